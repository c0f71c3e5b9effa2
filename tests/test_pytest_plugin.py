# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fixture ``token_exact``, and the steps that it passes and fails."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from configparser import ConfigParser
from functools import partial
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from composer_tokacc import LogitsAtLabels, pytest_plugin, weighted_microbatches
from composer_tokacc.step_watch import relative_difference
from tests.checks.test_written_state import (
    ReplacedMean,
    RunningMean,
    Statistic,
    WarmUp,
    spectral_norm,
    with_layers,
)
from tests.support.launch import ROOT
from tests.support.process_group import group_of_one_rank
from tests.support.text import RAGGED, collate, text_model, text_rows
from tests.support.training import fit

pytest_plugins = 'pytester'

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
        ids = ROWS[0]
        losses = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction='none')
        (losses * torch.tensor([1, 1, 2, 1])).mean().backward()
"""


def test_fixture_in_a_test_run(pytester):
    # `pytester` forgets modules that are first imported in its run, and torch cannot be imported twice.
    import_module('composer_tokacc.step_watch')
    pytester.makepyfile(LOOPS)
    options = []
    # The package may be installed, so that pytest finds the plugin by itself too.
    for plugin in ('no:composer_tokacc', 'composer_tokacc.pytest_plugin', 'no:cacheprovider'):
        options += ['-p', plugin]
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            '*got: the heaviest weighs 4.0000 times the lightest.',
            'forward 2: 1 of 1 tokens with loss weigh 4 to 4 times the median, such as [[]1]',
            'Divide by the loss tokens*',
            '*got: the heaviest weighs 2.0000 times the lightest.',
            'forward 1: 1 of 4 tokens with loss weigh 2 to 2 times the median, such as [[]3]',
        ]
    )


def test_plugin_loads_neither_torch_nor_composer():
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    [line] = setup['options.entry_points']['pytest11'].split('\n')[1:]
    module = line.split(' = ')[1]
    code = f'import sys, {module}; assert {module}.token_exact; assert not {{"torch", "composer"}} & set(sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


exact_step = pytest_plugin._exact_step
"""The context manager that the fixture gives to a test."""


def faults_of(model, step):
    """Makes the step under the fixture. Returns the message of its failure, or an empty string if it passes."""
    try:
        with exact_step(model):
            step()
    except pytest.fail.Exception as failure:
        return str(failure)
    return ''


# Loops over two microbatches of one row.

ROWS = (torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]]))
SHARES = (4 / 5, 1 / 5)
"""Of the tokens of the step."""


def losses(model):
    for ids, share in zip(ROWS, SHARES, strict=True):
        logits = model(ids)[0, :-1]
        yield cross_entropy(logits, ids[0, 1:]) * share


class Loop:
    """The actions of a loop in one step. Each loss belongs to the next row and is multiplied by its share."""

    def __init__(self, model, learning_rate):
        self.weight = model.weight
        self.optimizer = torch.optim.SGD([model.weight], lr=learning_rate)
        self.zero_grad = self.optimizer.zero_grad
        self.step = self.optimizer.step
        self.model = model
        self.losses = losses(model)
        self.total = 0.0
        self.average = None

    def backward(self):
        next(self.losses).backward()

    def backward_of_both(self):
        sum(self.losses).backward()

    def backward_of_total(self):
        self.total = self.total + next(self.losses)
        self.total.backward(retain_graph=True)

    def backward_in_halves(self):
        half = next(self.losses) / 2
        half.backward(retain_graph=True)
        half.backward()

    def backward_of_negative(self):
        (-next(self.losses)).backward()

    def failing_backward(self):
        self.backward_that_fails(self.weight.register_hook)

    def late_failing_backward(self):
        """Fails after it has added to the gradient."""
        self.backward_that_fails(self.weight.register_post_accumulate_grad_hook)

    def backward_that_fails(self, register):
        def run_out_of_memory(gradient):
            raise torch.OutOfMemoryError

        hook = register(run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            next(losses(self.model)).backward()
        hook.remove()

    def backward_without_memory_for_checksums(self):
        """Fails before it adds to the gradient, because a checksum needs a copy of a parameter."""
        with (
            patch('composer_tokacc.step_watch._checksums', side_effect=torch.OutOfMemoryError),
            pytest.raises(torch.OutOfMemoryError),
        ):
            next(losses(self.model)).backward()

    def start_again(self):
        self.zero_grad()
        self.losses = losses(self.model)

    def backward_of_zero(self):
        (next(self.losses) * 0).backward()

    def backward_without_row(self):
        (self.weight * 0).sum().backward()

    def forward(self):
        next(self.losses)

    def keep_stale_gradient(self):
        self.weight.grad = torch.ones_like(self.weight)

    def clip(self):
        torch.nn.utils.clip_grad_norm_([self.weight], 0.1)

    def move_weight(self):
        self.weight.data -= 0.1 * self.weight.grad

    def step_with_closure(self):
        def closure():
            self.zero_grad()
            for loss in self.losses:
                loss.backward()
            return loss

        self.step(closure)

    def update_average(self):
        self.average = self.average or copy.deepcopy(self.model)
        with torch.no_grad():
            self.average(ROWS[0])
        self.average.weight.data.lerp_(self.weight.data, 0.1)


RIGHT_LOOPS = [
    'zero_grad backward backward clip step zero_grad',
    'backward_of_both step',
    'step_with_closure',
    'backward failing_backward start_again backward backward step',
    'backward late_failing_backward start_again backward backward step',
    'backward backward_without_memory_for_checksums start_again backward backward step',
    'update_average backward update_average backward update_average step',
    'backward_in_halves backward step',
]
FAULTS = {
    'backward_of_total backward_of_total step': 'got: the heaviest weighs 2.0000 times the lightest',
    'backward backward_of_negative': 'must weigh the same, got: positive and negative weights',
    'backward backward_of_zero': 'Forward 2 of 2 adds nothing to the gradient: its gradient is 0',
    'backward forward': 'Forward 2 of 2 adds nothing to the gradient: `backward` did not reach its logits',
    'zero_grad backward zero_grad backward step': 'Gradients changed between backward 1 and 2: `weight`',
    'backward backward_without_row zero_grad backward step': 'Gradients changed between backward 2 and 3: `weight`',
    'failing_backward zero_grad backward zero_grad backward step': 'Gradients changed between backward 1 and 2',
    'late_failing_backward backward backward step': 'before the first backward, or after one that raised: `weight`',
    'backward step backward step': 'An optimizer made a step between backward 1 and 2',
    'backward move_weight backward move_weight': 'Parameters changed, or were frozen',
    'backward clip backward clip step': 'Gradients changed between backward 1 and 2: `weight`',
    'backward backward zero_grad step': 'Gradients were set to 0 between the last backward and the step',
    'keep_stale_gradient backward backward': 'Gradients were not 0 before the first backward',
}


@pytest.mark.parametrize('learning_rate', [0.0, 0.1])
@pytest.mark.parametrize('actions', [*RIGHT_LOOPS, *FAULTS])
def test_whole_gradient_of_step(actions, learning_rate):
    """In most of these loops tokens weigh the same at the logits, but the gradient is not their mean."""
    model = torch.nn.Embedding(9, 9).double()  # the update is a difference of weights
    before = model.weight.detach().clone()
    [expected] = torch.autograd.grad(sum(losses(model)), [model.weight])

    def step():
        loop = Loop(model, learning_rate)
        for action in actions.split():
            getattr(loop, action)()

    message = faults_of(model, step)
    assert FAULTS.get(actions, '') in message
    assert bool(message) == (actions in FAULTS)
    if learning_rate:
        update = before - model.weight.detach()
        if not update.any() and model.weight.grad is not None:
            update = model.weight.grad
        # Directions, because clipping changes the length.
        direction = update / update.norm().clamp(min=1e-9)
        error = direction - expected / expected.norm()
        assert (error.norm() < 1e-6) == (actions in RIGHT_LOOPS)


# Healthy steps of a Llama: an empty microbatch, forwards that run again, an evaluation, and parts of parameters.


def step_of_rows(model, rows):
    """Makes a microbatch of each row."""
    for microbatch, weight in weighted_microbatches([collate([row]) for row in rows]):
        (model(**microbatch).loss * weight).backward()


@pytest.mark.parametrize('num_labels', [0, 2])
@pytest.mark.parametrize('checkpoints', [False, True])
def test_empty_microbatch_and_evaluation(checkpoints, num_labels):
    model = text_model().train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    rows = text_rows([(9, 4), (7, num_labels), (5, 3)])

    def step():
        step_of_rows(model, rows)
        with torch.no_grad():
            model(**collate(rows))

    assert faults_of(model, step) == ''


@pytest.mark.parametrize('options', [{'logits': 'all'}, {'logits': 'labels'}, {'packing': True}], ids=str)
def test_step_of_composer(options):
    model = text_model()
    batch = collate(text_rows(RAGGED))
    assert faults_of(model, lambda: fit(model, batch, **options)) == ''


def test_forgotten_backward_of_first_token():
    """The first label is token 0, which is also the label that an empty microbatch gets."""
    model = text_model()
    batch = collate(text_rows([(9, 8)]))
    forgotten = collate(text_rows([(9, 8)]))
    forgotten['labels'][0, 1] = 0

    def step():
        model(**batch).loss.backward()
        model(**forgotten)

    assert 'Forward 2 of 2 adds nothing to the gradient' in faults_of(model, step)


def test_forward_without_a_measured_weight():
    """The model is sure of its labels, so nobody knows whether its tokens weigh as much as those of the other one."""
    model = torch.nn.Embedding(9, 9)
    with torch.no_grad():
        for token in (5, 6):
            model.weight[token] = 0
            model.weight[token, token + 1] = 30

    def step():
        for ids, weight in ((torch.arange(5)[None], 1), (torch.tensor([[5, 6, 7]]), 100)):
            loss = cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction='sum')
            (loss * weight).backward()

    assert 'Forward 2 of 2 has no token whose weight can be measured' in faults_of(model, step)


def test_lost_label_of_each_row():
    """The loss of the loop leaves out the last token. The other tokens weigh the same."""
    model = text_model()
    batch = collate(text_rows([(9, 4), (7, 2)]))

    def step():
        logits = model(**batch).logits[:, :-2]
        cross_entropy(logits.transpose(1, 2), batch['labels'][:, 1:-1]).backward()

    assert 'Forward 1 of 1 adds only 5 of its 6 labels to the gradient' in faults_of(model, step)


class SGDWithScaler(torch.optim.SGD):
    """Takes the GradScaler as an argument, as fused optimizers of other packages do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        if grad_scaler is None:
            super().step(closure)


@pytest.mark.parametrize(
    'make_optimizer',
    [torch.optim.AdamW, partial(torch.optim.AdamW, fused=True), SGDWithScaler],
    ids=['plain', 'fused', 'with scaler'],
)
def test_gradient_that_overflows(make_optimizer):
    """A GradScaler leaves out the step, or lets the optimizer leave it out."""
    model = torch.nn.Embedding(9, 9)
    model.weight.register_hook(lambda gradient: gradient * torch.inf)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler('cpu')
    before = model.weight.detach().clone()

    def step():
        for loss in losses(model):
            scaler.scale(loss).backward()
        scaler.step(optimizer)

    assert faults_of(model, step) == ''
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize('factor', [torch.nan, torch.inf])
def test_step_with_gradients_that_are_not_finite(factor):
    model = torch.nn.Embedding(9, 9)
    model.weight.register_hook(lambda gradient: gradient * factor)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        for loss in losses(model):
            loss.backward()
        optimizer.step()

    faults = faults_of(model, step)
    assert 'NaN or infinite at the step of the optimizer: `weight`' in faults
    assert 'rank' not in faults


def test_gradient_that_is_set_to_zero():
    model = text_model()
    batch = collate(text_rows([(9, 4)]))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(**batch).loss.backward()
        model.lm_head.weight.grad = None
        optimizer.step()

    assert 'the step of the optimizer: `lm_head.weight`' in faults_of(model, step)


@pytest.mark.parametrize('reentrant', [False, True])
def test_checkpoint_of_the_whole_model(reentrant):
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = text_model()

        def forward(self, input_ids):
            embeddings = self.inner.get_input_embeddings()(input_ids)
            return checkpoint(self.logits, embeddings, use_reentrant=reentrant)

        def logits(self, embeddings):
            return self.inner(inputs_embeds=embeddings).logits

    model = Outer()

    def step():
        for length in (4, 7):
            ids = torch.arange(length)[None] + 3
            loss = cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction='sum')
            (loss / 9).backward()  # 3 and 6 tokens

    assert faults_of(model, step) == ''


def step_with_fault(model, fault):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = text_rows([(9, 4), (7, 2), (5, 3)])
    for number, (microbatch, weight) in enumerate(weighted_microbatches([collate([row]) for row in rows])):
        if fault == 'zero_grad':
            optimizer.zero_grad()
        is_frozen = fault == 'frozen in all' or (fault == 'frozen' and number == 1)
        model.lm_head.requires_grad_(not is_frozen)
        (model(**microbatch).loss * weight).backward()
        if fault == 'step':
            optimizer.step()
    if fault == 'nan':
        model.lm_head.weight.grad.mul_(torch.nan)
        optimizer.step()


@pytest.mark.parametrize(
    ('shards', 'fault', 'message'),
    [
        (False, 'frozen', 'frozen or unfrozen, between backward 1 and 2: `lm_head.weight`.'),
        (False, 'frozen', 'frozen or unfrozen, between backward 2 and 3: `lm_head.weight`.'),
        (False, 'frozen in all', ''),
        (True, 'none', ''),
        (True, 'zero_grad', 'Gradients changed between backward 1 and 2: '),
        (True, 'step', 'An optimizer made a step'),
        (True, 'nan', 'NaN or infinite at the step of the optimizer: `lm_head.weight`.'),
    ],
)
def test_sharded_and_frozen_parameters(shards, fault, message, tmp_path):
    if shards and not hasattr(torch.cpu.Stream, 'record_event'):
        pytest.skip('FSDP2 of torch 2.6 needs a GPU')
    model = text_model()
    with group_of_one_rank(tmp_path):
        if shards:
            mesh = init_device_mesh('cpu', (1,))
            for block in [*model.model.layers, model]:
                fully_shard(block, mesh=mesh)
        faults = faults_of(model, lambda: step_with_fault(model, fault))
    assert message in faults
    assert bool(message) == bool(faults)


class NormOfBatch(torch.nn.BatchNorm1d):
    """Writes its running mean. The backward checks that nobody else has written it since."""

    def forward(self, states):
        return super().forward(states.transpose(1, 2)).transpose(1, 2)


class ScaledByMean(RunningMean):
    """Multiplies by its state, so the backward needs the state as it was in the forward."""

    def forward(self, states):
        self.update(states.detach().mean(dim=(0, 1)))
        return torch.addcmul(states, states, self.running)


class MeanInList(torch.nn.Module):
    """Keeps its state in a list."""

    def __init__(self):
        super().__init__()
        self.means = []

    def forward(self, states):
        self.means.append(states.detach().mean())
        return states + sum(self.means)


def faults_of_two_rows(model):
    return faults_of(model, lambda: step_of_rows(model, text_rows([(5, 5), (2, 2)])))


@pytest.mark.parametrize(
    ('make_layer', 'written'),
    [
        (torch.nn.Identity, ''),
        (lambda: NormOfBatch(32), ''),
        (ScaledByMean, r'`\S+running`'),
        (spectral_norm, r'`\S+parametrizations\.weight\.0\._u`'),
        (RunningMean, r'`\S+running`'),
        (ReplacedMean, r'`\S+running`'),
        (WarmUp, r'`\S+count`'),
        (MeanInList, 'state that is no tensor or number of a module'),
    ],
)
def test_state_that_forwards_write(make_layer, written):
    """State counts if the next forward depends on it. A counter that nothing reads does no harm."""
    model = with_layers(torch.nn.Dropout(0.5), make_layer())
    message = faults_of_two_rows(model)
    if written:
        assert re.search(f'A forward writes {written}.* and the next one depends on it', message)
    else:
        assert message == ''


def test_logits_that_are_nan():
    """They do not show that a forward writes state."""
    model = with_layers(torch.nn.Dropout(0.5))
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    message = faults_of_two_rows(model)
    assert 'a logit is NaN' in message
    assert 'writes' not in message


class NanOfThirdForward(torch.nn.Module):
    """Counts its forwards. The one of training is the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer('count', torch.zeros(()))

    def forward(self, states):
        self.count += 1
        return states if self.count < 3 else states * torch.nan


def test_state_is_named_beside_nan():
    message = faults_of_two_rows(with_layers(torch.nn.Identity(), NanOfThirdForward()))
    assert re.search(r'a logit is NaN.* A forward writes `\S+count`', message)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_logits_beside_the_limit_of_masks(dtype):
    """Round-off of a logit is small wherever it is. A logit that is masked in one forward only is a difference."""
    logits = torch.tensor([1.0, -torch.inf, -10_000.0, 2.0], dtype=dtype)
    rounded = logits.clone()
    rounded[2] = torch.nextafter(rounded[2], torch.tensor(0.0, dtype=dtype))
    assert relative_difference(logits, logits) == 0
    for first, second in ((logits, rounded), (rounded, logits)):
        assert relative_difference(first, second) <= torch.finfo(dtype).eps
    assert relative_difference(logits, torch.full_like(logits, -torch.inf)) > 1e-3
    assert relative_difference(logits, torch.tensor([1.0, 5.0, -10_000.0, 2.0], dtype=dtype)) > 0.5


def test_repeated_forward_is_not_counted():
    statistic = Statistic()
    model = with_layers(torch.nn.Dropout(0.5), statistic)
    assert faults_of_two_rows(model) == ''
    assert int(statistic.number) == statistic.calls == 2


def test_logits_at_labels_in_a_step():
    """Its check runs the model inside of the first forward, which is then repeated with its own batch."""
    model = text_model()

    def step():
        with LogitsAtLabels(model):
            for microbatch, weight in weighted_microbatches([collate(text_rows(RAGGED))]):
                (model(**microbatch).loss * weight).backward()

    assert faults_of(model, step) == ''
