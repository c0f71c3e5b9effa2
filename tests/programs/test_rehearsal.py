# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rehearsals run the heaviest microbatches before the first step, so that a run does not fail late.

A rehearsal must choose the right ones, and must leave no trace in the run.
"""

from __future__ import annotations

import copy
import json
import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer.core import Callback, Event, Precision, Time, Timestamp
from composer.devices import DeviceCPU

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.rehearsal import (
    Candidate,
    PlannedRun,
    Rehearsal,
    _in_running_order,
    _state_bytes,
    _steps_left,
    rehearse,
)
from composer_tokacc.sizing import BatchShape
from tests.support.exactness import loss_tokens
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, regrouping_loader
from tests.support.text import text_model
from tests.support.training import On, hugging_face, logged, train


def spec_of(dataset, *, size, batch, slot_tokens=LONGEST, labels_per_sample=None):
    """Returns a data spec that regroups a dataset on one rank. Its budget is ``size`` of the longest rows."""
    loader = regrouping_loader(
        dataset,
        global_batch_size=batch,
        max_tokens=size * LONGEST,
        loss_tokens=labels_per_sample,
        num_replicas=1,
        rank=0,
    )
    return token_data_spec(loader, slot_tokens=slot_tokens)


def train_seven_steps(callbacks):
    """Trains with random dropout and random labels. Returns losses, parameters and buffers, and the dataset."""
    torch.manual_seed(3)
    llama = text_model(attention_dropout=0.2)
    llama.register_buffer('num_calls', torch.zeros(()))
    llama.register_buffer('num_tokens', torch.zeros(()))
    llama.register_forward_pre_hook(count_call)
    model = hugging_face(llama)
    dataset = LengthDataset(40, random_labels=True)
    _, memory, _ = train(
        model,
        spec_of(dataset, size=2, batch=8),
        algorithms=[TokenAccumulation()],
        callbacks=callbacks,
        microbatch_size=2,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration='7ba',
        seed=5,
    )
    losses = logged(memory, 'loss/train/total')
    return losses, model.state_dict(), dataset


def count_call(module, arguments):
    """A hook that changes a buffer of the model, as batch norm does, and replaces another one."""
    module.num_calls.add_(1)
    module.num_tokens = module.num_tokens + 2


def test_rehearsal_changes_no_bit_of_run():
    rehearsal = Rehearsal()

    losses_without, weights_without, _ = train_seven_steps([])
    losses, weights, dataset = train_seven_steps([rehearsal])

    assert losses == losses_without
    for name, weight in weights.items():
        assert torch.equal(weight, weights_without[name]), name
    assert rehearsal.report is not None
    assert rehearsal.report.num_batches == 7
    assert 1 <= len(rehearsal.report.lines) <= 4
    assert len(dataset.read) > 7 * 8, 'samples were read twice'


class Phase(Callback):
    """Tells apart the forwards of the first-batch check, of the rehearsal behind this callback, and of the steps."""

    name = 'check'

    def batch_start(self, state, logger):
        self.name = 'rehearsal'

    def before_train_batch(self, state, logger):
        self.name = 'step'

    def batch_end(self, state, logger):
        self.name = 'check'


@pytest.mark.parametrize('labels', ['known', 'unknown', 'zeros'])
@pytest.mark.parametrize('logits', ['auto', 'all'])
def test_logits_are_rehearsed_as_in_run(logits, labels):
    """If the labels of all samples are known, the microbatch with most logits is run. Else logits of all positions."""
    torch.manual_seed(3)
    model = hugging_face(text_model())
    dataset = LengthDataset(60)
    phase = Phase()
    num_logits = {'check': [], 'rehearsal': [], 'step': []}

    def count(module, arguments, output):
        rows, positions, _ = output.shape
        num_logits[phase.name].append(rows * positions)

    model.model.lm_head.register_forward_hook(count)
    labels_per_sample = None
    if labels == 'known':
        labels_per_sample = np.array([loss_tokens(dataset[index]) for index in range(60)])
    elif labels == 'zeros':  # as in a table of samples whose labels are not counted
        labels_per_sample = np.zeros(60, dtype=int)
    rehearsal = Rehearsal()

    train(
        model,
        spec_of(dataset, size=4, batch=12, labels_per_sample=labels_per_sample),
        algorithms=[TokenAccumulation(loss_tokens='causal', logits=logits)],
        callbacks=[phase, rehearsal],
        microbatch_size=4,
        max_duration='5ba',
    )

    assert len(num_logits['step']) >= 5
    assert rehearsal.report.num_batches == 5
    most_in_rehearsal = max(num_logits['rehearsal'])
    most_in_run = max(num_logits['step'])
    if logits == 'all' or labels == 'known':
        assert most_in_rehearsal == most_in_run
    else:
        assert most_in_rehearsal > most_in_run


class LastLogits:
    """A hook of the output embedding. Records in each phase whether the logits of the call before were in memory."""

    def __init__(self, phase):
        self.phase = phase
        self.were_in_memory = {'check': [], 'rehearsal': [], 'step': []}
        self.reference = lambda: None

    def are_in_memory(self):
        return self.reference() is not None

    def look(self, module, arguments, output):
        self.were_in_memory[self.phase.name].append(self.are_in_memory())
        self.reference = weakref.ref(output)


def test_outputs_stay_as_in_run():
    """A microbatch begins with the outputs of the one before in memory, and the rehearsal leaves none."""
    model = hugging_face(text_model())
    phase = Phase()
    last_logits = LastLogits(phase)
    model.model.lm_head.register_forward_hook(last_logits.look)
    after_rehearsal = On(Event.BATCH_START, lambda state: last_logits.are_in_memory())

    train(
        model,
        spec_of(LengthDataset(40), size=2, batch=8),
        algorithms=[TokenAccumulation(loss_tokens='causal', logits='all')],
        callbacks=[phase, Rehearsal(), after_rehearsal],
        microbatch_size=2,
        max_duration='2ba',
    )

    for name in ('rehearsal', 'step'):
        first, *others = last_logits.were_in_memory[name]
        assert not first
        assert len(others) >= 1
        assert all(others)
    assert not after_rehearsal.values[0]


def test_microbatch_with_most_logits_comes_before_heaviest():
    def candidate(**shape):
        return Candidate(1, [0], [[0]], BatchShape(**shape))

    light = candidate(rows=1, width=10)
    most_logits = candidate(rows=2, width=20)
    long = candidate(rows=1, width=30)
    heaviest = candidate(rows=1, width=30, image_tokens=30)

    assert _in_running_order([light, most_logits, long, heaviest]) == [light, long, most_logits, heaviest]
    assert _in_running_order([light]) == [light, light], 'the gradients of the first are in memory'


def state_of_trainer(spec, model, *, size=4, batch=0, auto=True):
    """Returns the part of a Trainer's state that a rehearsal reads. The run has two epochs."""
    epoch, batch_in_epoch = divmod(batch, spec.dataloader.batch_sampler.num_batches)
    return SimpleNamespace(
        dataloader=spec.dataloader,
        model=model,
        device=DeviceCPU(),
        device_train_microbatch_size=size,
        optimizers=[],
        auto_microbatching=auto,
        algorithms=[],
        precision=Precision.FP32,
        precision_config=None,
        timestamp=Timestamp(epoch=epoch, batch=batch, batch_in_epoch=batch_in_epoch),
        max_duration=Time.from_epoch(2),
        dataloader_len=None,
    )


class Limited(torch.nn.Module):
    """A model, and its memory model, that runs out of memory as a GPU would. Attention needs ``per_area``."""

    pixel_bytes_per_image_token = 0.0

    def __init__(self, limit, per_area=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.limit = limit
        self.per_area = per_area
        self.num_calls = 0

    def memory_of(self, rows, width):
        return rows * width + self.per_area * rows * width**2

    def peak(self, shape, *, num_ranks):
        return self.memory_of(shape.rows, shape.width)

    def forward(self, batch):
        self.num_calls += 1
        if self.memory_of(*batch['input_ids'].shape) > self.limit:
            raise RuntimeError('CUDA out of memory. Tried to allocate')
        return self.weight

    def loss(self, outputs, batch):
        return outputs * 2


class OfTwoTerms(Limited):
    def loss(self, outputs, batch):
        return [outputs * 2, outputs * 3]


def test_loss_in_a_list():
    spec = spec_of(LengthDataset(8), size=4, batch=8)
    model = OfTwoTerms(np.inf)
    assert rehearse(state_of_trainer(spec, model))


def would_fail(spec, model, size):
    """Returns whether any microbatch of the two epochs would fail, found by reading them all."""
    sampler = spec.dataloader.batch_sampler
    largest = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in spec.dataloader:
            for microbatch in spec.split_batch(batch, size):
                rows, width = microbatch['input_ids'].shape
                largest = max(largest, model.memory_of(rows, width))
    sampler.set_epoch(0)
    return largest > model.limit


@pytest.mark.parametrize('seeds', [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)], ids=['few', 'many'])
def test_no_late_failure_after_a_rehearsal(seeds):
    num_lowered = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        spec = spec_of(LengthDataset(60, seed=seed), size=4, batch=12)
        per_area = float(rng.choice([0, 0.01, 0.05]))
        memory_of_longest_rows = Limited(np.inf, per_area).memory_of(4, LONGEST)
        limit = memory_of_longest_rows * rng.uniform(0.3, 1.05)
        model = Limited(limit, per_area)
        state = state_of_trainer(spec, model)

        report = rehearse(state, memory=model)

        size = state.device_train_microbatch_size
        assert report.microbatch_size == size
        assert not would_fail(spec, model, size), seed
        if size < 4:
            num_lowered += 1
            assert would_fail(spec, model, 2 * size), 'no smaller than it must be'
        else:
            assert model.num_calls <= 4
    assert 0 < num_lowered < len(seeds)


def test_short_rows_without_slot_tokens():
    """A rehearsal reads a microbatch of short rows by itself. In the run a long row of its step makes the budget."""
    dataset = LengthDataset(16)
    dataset.lengths[:] = 10
    dataset.lengths[0] = LONGEST
    spec = spec_of(dataset, size=4, batch=16, slot_tokens=None)
    model = Limited(limit=100)
    state = state_of_trainer(spec, model)

    rehearse(state, memory=model)

    size = state.device_train_microbatch_size
    assert not would_fail(spec, model, size)


def test_gradients_are_restored():
    """Composer drops only gradients of parameters in an optimizer. The others stay from one fit to the next."""
    model = Limited(np.inf)
    model.weight.grad = torch.tensor(3.0)
    assert rehearse(state_of_trainer(spec_of(LengthDataset(60), size=4, batch=12), model)).lines
    assert model.weight.grad == 3


def test_fixed_size_too_large_is_refused():
    spec = spec_of(LengthDataset(60), size=4, batch=12)
    fits_two_rows = Limited(2 * LONGEST)
    fits_no_row = Limited(3)
    with pytest.raises(ConfigError, match=r'got: 4. One of step \d+ does not fit .* Set it to 2, with which'):
        rehearse(state_of_trainer(spec, fits_two_rows, auto=False))
    with pytest.raises(ConfigError, match=r'samples .* No smaller size fits either'):
        rehearse(state_of_trainer(spec, fits_no_row, auto=False))


def test_budget_of_sampler_is_named():
    """Without ``slot_tokens`` a smaller size makes no smaller microbatches."""
    spec = spec_of(LengthDataset(60), size=4, batch=12, slot_tokens=None)
    model = Limited(2 * LONGEST)
    with pytest.raises(ConfigError, match="Lower the sampler's `max_tokens`"):
        rehearse(state_of_trainer(spec, model, auto=False))


def test_smaller_size_must_fit_longest_sample():
    """It is in none of the heaviest microbatches. With half the size it would be over the budget, in a later step."""
    dataset = LengthDataset(24)
    dataset.lengths[:] = 24
    dataset.lengths[0] = 30
    loader = regrouping_loader(dataset, global_batch_size=12, max_tokens=48, num_replicas=1, rank=0)
    spec = token_data_spec(loader, slot_tokens=12)
    model = Limited(40)
    with pytest.raises(ConfigError, match='No smaller size fits either'):
        rehearse(state_of_trainer(spec, model, size=4))


def test_size_below_one_slot():
    """Half a slot has the budget of four of the longest rows."""
    spec = spec_of(LengthDataset(60), size=4, batch=12, slot_tokens=8 * LONGEST)
    fits_four_rows = Limited(4 * LONGEST)
    fits_two_rows = Limited(2 * LONGEST)

    report = rehearse(state_of_trainer(spec, fits_four_rows, size=0.5))

    assert report.microbatch_size == 0.5
    with pytest.raises(ConfigError, match=r'got: 0.5. One of step \d+ does not fit'):
        rehearse(state_of_trainer(spec, fits_two_rows, size=0.5))


class Lion(torch.optim.Optimizer):
    """Has an attribute of its own, and a state of the size of its parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {'lr': 0.1})
        self.is_decoupled = True

    def step(self, closure=None):
        assert self.is_decoupled
        for parameter in self.param_groups[0]['params']:
            state = self.state[parameter]
            state['momentum'] = torch.zeros_like(parameter)


class EightBitLion(Lion):
    """Has a state of one byte a weight, and a table that all parameters share, as in bitsandbytes."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]['params']:
            state = self.state[parameter]
            state['momentum'] = torch.zeros_like(parameter, dtype=torch.uint8)
            state['table'] = torch.zeros(256)


@pytest.mark.parametrize(
    ('optimizer_class', 'state_bytes', 'warning'),
    [
        (Lion, 4 * 1000, ''),
        (EightBitLion, 1000, ''),
        (torch.optim.AdamW, 2 * 4 * 1000, ''),
        # Its step needs a closure.
        (torch.optim.LBFGS, 0, 'without the states of LBFGS'),
    ],
)
def test_states_of_optimizers(optimizer_class, state_bytes, warning, caplog):
    weight = torch.nn.Parameter(torch.zeros(10, 100))
    optimizer = optimizer_class([weight])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *arguments: pytest.fail('a hook of the run was called'))
    assert _state_bytes(optimizer) == pytest.approx(state_bytes, rel=1e-3)
    assert not optimizer.state
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


def test_resumed_run_rehearses_what_is_left():
    """The run has two epochs of five batches. It goes on with the third batch of the second epoch."""
    spec = spec_of(LengthDataset(60), size=4, batch=12)
    model = Limited(np.inf, 0.01)

    from_start = rehearse(state_of_trainer(spec, model), memory=model)
    from_batch_7 = rehearse(state_of_trainer(spec, model, batch=7), memory=model)

    assert from_start.num_batches == 10
    assert from_batch_7.num_batches == 3
    sampler = copy.copy(spec.dataloader.batch_sampler)
    assert sorted(spec.dataloader.batch_sampler.window(0)) == sorted(sampler.window(0))
    sampler.set_epoch(1)
    positions_left = []
    for batch in (2, 3, 4):
        for microbatch in sampler.plan(batch).ranks[0]:
            positions_left.append(len(microbatch.indices) * microbatch.width)
    rehearsed_positions = []
    for line in from_batch_7.lines:
        step, rows, width = re.search(r'step (\d+): (\d+) rows of (\d+)', line).groups()
        assert int(step) in (8, 9, 10), 'the first step of the run is 1'
        rehearsed_positions.append(int(rows) * int(width))
    assert max(rehearsed_positions) == max(positions_left)


def test_end_in_samples_of_growing_batches():
    """A schedule of the global batch begins with more, smaller batches than its largest size tells.

    Five batches of 4 samples and three of 12 have 56 samples, so the 60th is in a fourth one.
    """
    spec = spec_of(LengthDataset(60), size=4, batch=[[0, 4], ['5ba', 12]])
    state = state_of_trainer(spec, Limited(np.inf))
    state.max_duration = Time.from_sample(60)
    report = rehearse(state)
    assert report.num_batches == 5 + 4


def test_first_batches_of_each_epoch_are_rehearsed():
    """`train_subset_num_batches` ends an epoch early."""
    spec = spec_of(LengthDataset(60), size=4, batch=12)
    state = state_of_trainer(spec, Limited(np.inf))
    state.dataloader_len = Time.from_batch(2)
    run = PlannedRun(
        state=state,
        accumulation=None,
        sampler=spec.dataloader.batch_sampler,
        memory=None,
        labels_per_sample=None,
    )

    windows = [step.window for step in _steps_left(run)]

    expected_windows = []
    for epoch in range(2):
        sampler = copy.copy(run.sampler)
        sampler.set_epoch(epoch)
        expected_windows.append(sampler.window(0))
        expected_windows.append(sampler.window(1))
    assert windows == expected_windows


def test_resumed_run_with_shorter_epochs():
    """The checkpoint is at the third batch of an epoch, which now ends after two. So the next epoch begins."""
    spec = spec_of(LengthDataset(60), size=4, batch=12)
    state = state_of_trainer(spec, Limited(np.inf), batch=3)
    state.dataloader_len = Time.from_batch(2)
    report = rehearse(state)
    assert report.num_batches == 2


class Broken(Limited):
    def forward(self, batch):
        raise RuntimeError('shapes do not fit')


def test_other_errors_of_model_are_raised():
    spec = spec_of(LengthDataset(40), size=2, batch=8)
    with pytest.raises(RuntimeError, match='shapes do not fit'):
        rehearse(state_of_trainer(spec, Broken(1), size=2))


def test_foreign_loaders_are_not_rehearsed():
    assert rehearse(SimpleNamespace(dataloader=[])) is None


@pytest.mark.slow
def test_ranks_of_ddp_and_fsdp_rehearse():
    """A rehearsal changes nothing in the run. If the run would fail late, the size is lowered before, on all ranks."""
    limit = 2 * LONGEST
    runs = []
    for fsdp in (False, True):
        runs.append({'fsdp': fsdp, 'rehearses': False})
        runs.append({'fsdp': fsdp})
        runs.append({'fsdp': fsdp, 'limit': limit})

    results = launch_json('tests/ranks/rehearsal.py', json.dumps(runs), ranks=2)

    ddp_results = results[:3]
    fsdp_results = results[3:]
    for plain, rehearsed, limited in (ddp_results, fsdp_results):
        assert len(plain['losses']) == 6
        assert rehearsed['losses'] == plain['losses']
        assert rehearsed['norms'] == plain['norms']
        assert rehearsed['rehearsed'] == [3, 3], 'the second fit rehearses what is left of the run'
        assert plain['largest'] > limit, 'it would have failed'
        assert limited['early'] > limit
        assert limited['largest'] <= limit
        assert set(limited['size']) == {2}
    norms_of_ddp = ddp_results[0]['norms']
    norms_of_fsdp = fsdp_results[0]['norms']
    assert norms_of_fsdp == pytest.approx(norms_of_ddp, rel=1e-4)
