# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fixture ``token_exact``, in tests of others."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module

import pytest

from tests.support.launch import ROOT

pytest_plugins = 'pytester'


@pytest.fixture(autouse=True)
def loaded_modules():
    """``pytester`` forgets modules that are first imported in a run, and torch cannot be imported twice."""
    for module in ('composer_tokacc.step_watch', 'tests.support.text'):
        import_module(module)


LOOPS = """
import pytest, torch

ROWS = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]])

def step(model, weights):
    for ids, weight in zip(ROWS, weights):
        loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        (loss * weight).backward()

@pytest.mark.parametrize('weights', [(4 / 5, 1 / 5), (1 / 2, 1 / 2)], ids=['tokens', 'means'])
def test_loop(token_exact, weights):
    model = torch.nn.Embedding(9, 9)
    with token_exact(model):
        step(model, weights)

def test_one_token_counts_twice(token_exact):
    model = torch.nn.Embedding(9, 9)
    with token_exact(model):
        losses = torch.nn.functional.cross_entropy(model(ROWS[0])[0, :-1], ROWS[0][0, 1:], reduction='none')
        (losses * torch.tensor([1, 1, 2, 1])).mean().backward()
"""


def run_pytest(pytester, source):
    pytester.makepyfile(source)
    options = []
    # The package may be installed, so that pytest finds the plugin by itself too.
    for plugin in ('no:composer_tokacc', 'composer_tokacc.pytest_plugin', 'no:cacheprovider'):
        options += ['-p', plugin]
    return pytester.runpytest_inprocess(*options)


def test_exact_steps_pass_and_others_fail(pytester):
    done = run_pytest(pytester, LOOPS)
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            '*got: the heaviest weighs 4.0000 times the lightest.',
            'backward 2: all of 1 tokens with loss: 4 times the median',
            'Divide by the loss tokens*',
            '*got: the heaviest weighs 2.0000 times the lightest.',
            'backward 1: number 3 of 4 tokens with loss: 2 times the median',
        ]
    )


FAULTY = """
import copy, pytest, torch
from torch.nn.functional import cross_entropy

ROWS = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]])
FACTORS = 4 / 5, 1 / 5

def losses(model):
    for ids, factor in zip(ROWS, FACTORS):
        yield cross_entropy(model(ids)[0, :-1], ids[0, 1:]) * factor

def right(model, optimizer):
    optimizer.zero_grad()
    for loss in losses(model):
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()

def right_at_once(model, optimizer):
    sum(losses(model)).backward()
    optimizer.step()

def right_in_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        for loss in losses(model):
            loss.backward()
        return loss
    optimizer.step(closure)

def right_with_average(model, optimizer):
    average = copy.deepcopy(model)
    for loss in losses(model):
        loss.backward()
        with torch.no_grad():
            average(ROWS[0])
        average.weight.data.lerp_(model.weight.data, 0.1)
    optimizer.step()

def right_by_hand(model, optimizer):
    for loss in losses(model):
        [gradient] = torch.autograd.grad(loss, [model.weight])
        model.weight.grad = gradient if model.weight.grad is None else model.weight.grad + gradient
    optimizer.step()

def other_sign(model, optimizer):
    for number, loss in enumerate(losses(model)):
        (-loss if number else loss).backward()

def times_zero(model, optimizer):
    for number, loss in enumerate(losses(model)):
        (loss * (1 - number)).backward()

def without_backward(model, optimizer):
    first, second = losses(model)
    first.backward()

def zero_grad_inside(model, optimizer):
    for loss in losses(model):
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()

def zero_grad_after_zero(model, optimizer):
    first, second = losses(model)
    first.backward()
    (model.weight * 0).sum().backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()

def step_inside(model, optimizer):
    for loss in losses(model):
        loss.backward()
        optimizer.step()

def step_by_hand(model, optimizer):
    for loss in losses(model):
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad

def clip_inside(model, optimizer):
    for loss in losses(model):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()

def zero_before_step(model, optimizer):
    for loss in losses(model):
        loss.backward()
    optimizer.zero_grad()
    optimizer.step()

def stale_gradient(model, optimizer):
    model.weight.grad = torch.ones_like(model.weight)
    for loss in losses(model):
        loss.backward()

@pytest.mark.parametrize('learning_rate', [0.0, 0.1])
@pytest.mark.parametrize('name', NAMES)
def test_step(token_exact, name, learning_rate):
    model = torch.nn.Embedding(9, 9)
    model.double()  # the update is a difference of weights
    before = model.weight.detach().clone()
    [expected] = torch.autograd.grad(sum(losses(model)), [model.weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    try:
        with token_exact(model):
            globals()[name](model, optimizer)
    finally:
        if learning_rate:
            update = before - model.weight.detach()
            gradient = torch.zeros(()) if model.weight.grad is None else model.weight.grad
            update = update if update.any() else gradient
            # Clipping may change the length.
            error = update / update.norm().clamp(min=1e-9) - expected / expected.norm()
            assert (error.norm() < 1e-6) == name.startswith('right')
"""
FAULTS = {
    'right': None,
    'right_at_once': None,
    'right_in_closure': None,
    'right_with_average': None,
    'right_by_hand': None,
    'other_sign': 'Every token of an optimizer step must weigh the same, got: positive and negative weights.',
    'times_zero': 'Forward 2 of 2 adds nothing to the gradient: its gradient is 0.',
    'without_backward': 'Forward 2 of 2 adds nothing to the gradient: `backward` did not reach its logits.',
    'zero_grad_inside': 'Gradients changed between backward 1 and 2: `weight`.*',
    'zero_grad_after_zero': 'Gradients changed between backward 2 and 3: `weight`.*',
    'step_inside': 'An optimizer made a step between backward 1 and 2.*',
    'step_by_hand': 'Parameters changed between backward 1 and 2: `weight`.',
    'clip_inside': 'Gradients changed between backward 1 and 2: `weight`.*',
    'zero_before_step': 'Gradients were set to 0 between the last backward and the step of the optimizer.',
    'stale_gradient': 'Gradients were not 0 before the first backward: `weight`.*',
}


@pytest.mark.parametrize('name', FAULTS)
def test_whole_gradient_of_step(pytester, name):
    """Tokens weigh the same at the logits in all of these loops. In most of them the gradient is not their mean."""
    result = run_pytest(pytester, FAULTY.replace('NAMES', repr([name])))
    if FAULTS[name] is None:
        result.assert_outcomes(passed=2)
    else:
        result.assert_outcomes(failed=2)
        result.stdout.fnmatch_lines([FAULTS[name]])


LLAMA = """
import pytest, torch
from composer_tokacc import weighted_microbatches
from tests.support.text import collate, text_model, text_rows

def step(model, rows, no_backward=()):
    for number, (microbatch, weight) in enumerate(weighted_microbatches([collate(part) for part in rows])):
        if number not in no_backward:
            (model(**microbatch).loss * weight).backward()

def test_empty_microbatch(token_exact):
    model, rows = text_model(), text_rows([(9, 4), (7, 0), (5, 3)])
    with token_exact(model):
        step(model, [rows[:1], rows[1:2], rows[2:]])

def test_checkpoints(token_exact):
    model, rows = text_model().train(), text_rows([(9, 4), (7, 2), (5, 3)])
    model.gradient_checkpointing_enable()
    with token_exact(model):
        step(model, [rows[:1], rows[1:2], rows[2:]])

class Outer(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = text_model(), reentrant

    def forward(self, input_ids):
        forward = lambda embeddings: self.inner(inputs_embeds=embeddings).logits
        embeddings = self.inner.get_input_embeddings()(input_ids)
        return torch.utils.checkpoint.checkpoint(forward, embeddings, use_reentrant=self.reentrant)

@pytest.mark.parametrize('reentrant', [False, True])
def test_checkpoint_of_the_whole_model(token_exact, reentrant):
    model, total = Outer(reentrant), 3 + 6
    with token_exact(model):
        for length in (4, 7):
            ids = torch.arange(length)[None] + 3
            (torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction='sum') / total).backward()

def test_evaluation_inside(token_exact):
    model, rows = text_model(), text_rows([(9, 4), (7, 2)])
    with token_exact(model):
        step(model, [rows[:1], rows[1:]])
        with torch.no_grad():
            model(**collate(rows))
"""


def test_healthy_steps_pass(pytester):
    """An empty microbatch with factor 0, activation checkpoints that run a forward again, and an evaluation."""
    run_pytest(pytester, LLAMA).assert_outcomes(passed=5)


SHARDED = """
import pytest, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from composer_tokacc import weighted_microbatches
from tests.support.text import collate, text_model, text_rows

@pytest.fixture(scope='module', autouse=True)
def group():
    if torch.distributed.is_initialized():  # by another test of this process
        yield
        return
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()

@pytest.mark.parametrize('shards', [False, True])
@pytest.mark.parametrize('fault', FAULTS)
def test_step(token_exact, fault, shards):
    model, rows = text_model(), text_rows([(9, 4), (7, 2), (5, 3)])
    if shards:
        for block in [*model.model.layers, model]:
            fully_shard(block, mesh=init_device_mesh('cpu', (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with token_exact(model):
        for microbatch, weight in weighted_microbatches([collate([row]) for row in rows]):
            if fault == 'zero_grad':
                optimizer.zero_grad()
            if fault == 'frozen' and len(microbatch['labels'][0]) == 7:
                model.lm_head.requires_grad_(False)
            (model(**microbatch).loss * weight).backward()
            model.lm_head.requires_grad_(True)
            if fault == 'step':
                optimizer.step()
"""


def test_sharded_and_frozen_parameters(pytester):
    run_pytest(pytester, SHARDED.replace('FAULTS', "['none']")).assert_outcomes(passed=2)
    result = run_pytest(pytester, SHARDED.replace('FAULTS', "['zero_grad', 'step']"))
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(['Gradients changed between backward 1 and 2: *', 'An optimizer made a step*'])
    result = run_pytest(pytester, SHARDED.replace('FAULTS', "['frozen']").replace('[False, True])', '[False])', 1))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['Parameters were frozen between backward 1 and 2: `lm_head.weight`.'])


STATE = """
import pytest, torch
from torch.nn.functional import cross_entropy

class Running(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.kind = torch.nn.Embedding(9, 8), kind
        self.head = torch.nn.Linear(8, 9)
        self.dropout = torch.nn.Dropout(0.5)
        if kind == 'spectral norm':
            self.head = torch.nn.utils.parametrizations.spectral_norm(self.head, n_power_iterations=1)
        self.register_buffer('mean', torch.zeros(8))
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        hidden = self.dropout(self.embedding(ids))
        if self.kind == 'running mean':
            self.mean.lerp_(hidden.detach().mean(dim=(0, 1)), 0.5)
            hidden = hidden - self.mean
        if self.kind == 'counter':
            self.calls += 1
        if self.kind == 'attribute':
            self.number = getattr(self, 'number', 0) + 1
            hidden = hidden / self.number
        if self.kind == 'counter in use':
            self.calls = self.calls + 1
            hidden = hidden / self.calls
        return self.head(hidden)

@pytest.mark.parametrize('kind', KINDS)
def test_step(token_exact, kind):
    model, rows = Running(kind), [torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]])]
    with token_exact(model):
        for ids, factor in zip(rows, [4 / 5, 1 / 5]):
            (cross_entropy(model(ids)[0, :-1], ids[0, 1:]) * factor).backward()
    assert int(model.calls) == (2 if 'counter' in kind else 0)
"""


def test_state_that_forwards_write(pytester):
    """State counts if the next forward depends on it. A counter that nothing reads does no harm."""
    kinds = ['none', 'counter']
    run_pytest(pytester, STATE.replace('KINDS', repr(kinds))).assert_outcomes(passed=2)
    kinds = ['spectral norm', 'running mean', 'counter in use', 'attribute']
    result = run_pytest(pytester, STATE.replace('KINDS', repr(kinds)))
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            'A forward writes `head.parametrizations.weight.0._u`*',
            'A forward writes `mean`, and the next one depends on it*',
            'A forward writes `calls`, and the next one depends on it*',
            'A forward writes something outside of its buffers, and the next one depends on it*',
        ]
    )


def test_plugin_loads_neither_torch_nor_composer():
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    [line] = setup['options.entry_points']['pytest11'].split('\n')[1:]
    module = line.split(' = ')[1]
    code = f'import sys, {module}; assert {module}.token_exact; assert not {{"torch", "composer"}} & set(sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
