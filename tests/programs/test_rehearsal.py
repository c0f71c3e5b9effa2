# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The heaviest microbatches before the first step: the right ones, without a trace, and no late failure behind them."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer.core import Callback, Precision, Time, Timestamp
from composer.devices import DeviceCPU

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, TokenAccumulation, token_data_spec
from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.rehearsal import Rehearsal, rehearse
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import text_model
from tests.support.training import hugging_face, train


def data_of(num_samples=40, *, seed=0, size=2, batch=8, **kwargs):
    dataset = LengthDataset(num_samples, seed=seed, **kwargs)
    sampler = RegroupingBatchSampler(
        dataset, lengths=dataset.lengths, global_batch_size=batch, max_tokens=size * LONGEST, num_replicas=1, rank=0
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_samples)
    return token_data_spec(loader, slot_tokens=LONGEST), dataset


def parameters_after(callbacks):
    torch.manual_seed(3)
    model = hugging_face(text_model(attention_dropout=0.2))
    model.model.register_buffer('calls', torch.zeros(()))
    model.model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    spec, dataset = data_of(random_labels=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, memory, _ = train(
        model,
        spec,
        algorithms=[TokenAccumulation()],
        callbacks=callbacks,
        microbatch_size=2,
        optimizer=optimizer,
        max_duration='7ba',
        seed=5,
    )
    losses = [float(value) for _, value in memory.data['loss/train/total']]
    return losses, [one.detach().clone() for one in [*model.parameters(), *model.buffers()]], dataset


def test_a_run_is_bitwise_the_same_with_and_without_a_rehearsal():
    rehearsal = Rehearsal()
    plain, expected, *_ = parameters_after([])
    losses, found, dataset = parameters_after([rehearsal])
    assert losses == plain
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
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


@pytest.mark.parametrize('are_labels_known', [True, False])
@pytest.mark.parametrize('logits', ['auto', 'all'])
def test_logits_are_rehearsed_as_in_the_run(logits, are_labels_known):
    """With the labels of all samples the microbatch with most logits is run; without them logits of all positions."""
    torch.manual_seed(3)
    model = hugging_face(text_model())
    spec, dataset = data_of(60, size=4, batch=12)
    phase = Phase()
    num_logits = {'check': [], 'rehearsal': [], 'step': []}

    def count(module, args, output):
        num_logits[phase.name].append(output.shape[0] * output.shape[1])

    model.model.lm_head.register_forward_hook(count)
    labels = np.array([int((dataset[index]['labels'][:, 1:] >= 0).sum()) for index in range(60)])
    rehearsal = Rehearsal(labels_per_sample=labels if are_labels_known else None)
    algorithm = TokenAccumulation(loss_tokens='causal', logits=logits)
    train(model, spec, algorithms=[algorithm], callbacks=[phase, rehearsal], microbatch_size=4, max_duration='5ba')
    assert len(num_logits['step']) >= 5
    assert rehearsal.report.num_batches == 5
    if logits == 'all' or are_labels_known:
        assert max(num_logits['rehearsal']) == max(num_logits['step'])
    else:
        assert max(num_logits['rehearsal']) > max(num_logits['step'])
    assert ('logits at' in rehearsal.report.text()) == (logits == 'auto' and are_labels_known)


def stub(spec, model, *, size=2, epochs=2, batch=0, auto=True):
    """What a rehearsal asks of a Trainer's state."""
    epoch, batch_in_epoch = divmod(batch, len(spec.dataloader))
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
        max_duration=Time.from_epoch(epochs),
    )


class Limited(torch.nn.Module):
    """Fails, as a GPU would, where positions and attention take more than the memory."""

    def __init__(self, limit, per_area):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.limit, self.per_area = limit, per_area
        self.calls = 0

    def needs(self, rows, width):
        return rows * width + self.per_area * rows * width**2

    def peak(self, shape, *, num_ranks):
        return self.needs(shape.rows, shape.width)

    pixel_bytes_per_image_token = 0.0

    def forward(self, batch):
        self.calls += 1
        if self.needs(*batch['input_ids'].shape) > self.limit:
            raise RuntimeError('CUDA out of memory. Tried to allocate')
        return self.weight

    def loss(self, outputs, batch):
        return outputs * 2


def failures(spec, model, size, first_batch=0, epochs=2):
    """Microbatches of the whole run that would fail, counted batch by batch."""
    sampler, found, number = spec.dataloader.batch_sampler, 0, 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in spec.dataloader:
            for one in spec.split_batch(batch, size) if number >= first_batch else []:
                found += model.needs(*one['input_ids'].shape) > model.limit
            number += 1
    sampler.set_epoch(0)
    return found


@pytest.mark.parametrize('seeds', [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)], ids=['few', 'many'])
def test_no_late_failure_after_a_rehearsal(seeds):
    would_have_failed = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        spec, _ = data_of(60, seed=seed, size=4, batch=12)
        worst = Limited(np.inf, float(rng.choice([0, 0.01, 0.05])))
        model = Limited(worst.needs(4, LONGEST) * rng.uniform(0.3, 1.05), worst.per_area)
        state = stub(spec, model, size=4)
        report = rehearse(state, memory=model)
        size = state.device_train_microbatch_size
        failing = {one: failures(spec, model, one) for one in {4, size, min(2 * size, 4)}}
        would_have_failed += failing[4] > 0
        assert failing[size] == 0, seed
        assert report.microbatch_size == size
        assert size < 4 or model.calls <= 4
        assert size == 4 or failing[2 * size] > 0, 'no smaller than it must be'
    assert 0 < would_have_failed < len(seeds)


def test_a_fixed_size_that_does_not_fit_is_refused_with_one_that_does():
    spec, _ = data_of(60, size=4, batch=12)
    model = Limited(2 * LONGEST, 0.0)
    with pytest.raises(ConfigError, match=r'got: 4, with which that of step \d+ does not .* Set it to 2, with which'):
        rehearse(stub(spec, model, size=4, auto=False))
    with pytest.raises(ConfigError, match=r'samples .* No smaller one fits either'):
        rehearse(stub(spec, Limited(3, 0.0), size=4, auto=False))


def test_a_resumed_run_rehearses_what_is_left():
    spec, dataset = data_of(60, size=4, batch=12)
    model = Limited(np.inf, 0.01)
    whole, rest = (rehearse(stub(spec, model, size=4, batch=batch), memory=model) for batch in (0, 7))
    assert (whole.num_batches, rest.num_batches) == (10, 3)
    sampler = copy.copy(spec.dataloader.batch_sampler)
    sampler.set_epoch(1)
    left = [len(one) * max(dataset.lengths[k] for k in one) for b in (2, 3, 4) for one in planned(sampler, b)]
    heavy = [line.split(': ')[1].split(' rows of ') for line in rest.lines]
    assert max(int(rows) * int(width.split()[0]) for rows, width in heavy) == max(left)
    assert sorted(spec.dataloader.batch_sampler.window(0)) == sorted(copy.copy(spec.dataloader.batch_sampler).window(0))


def planned(sampler, batch):
    window = sampler.window(batch)
    return [[window[place] for place in one.indices] for rank in sampler.plan(batch).ranks for one in rank]


def test_other_errors_of_a_model_are_its_own_and_foreign_loaders_are_left_alone():
    spec, _ = data_of()

    class Broken(Limited):
        def forward(self, batch):
            raise RuntimeError('shapes do not fit')

    with pytest.raises(RuntimeError, match='shapes do not fit'):
        rehearse(stub(spec, Broken(1, 0.0)))
    assert rehearse(SimpleNamespace(dataloader=[])) is None


@pytest.mark.slow
def test_ranks_rehearse_in_step_under_ddp_and_fsdp():
    """The same run with and without; and with memory that would fail late: lowered before the first step on all."""
    limit = 2 * LONGEST
    runs = [
        {'fsdp': fsdp, **options} for fsdp in (False, True) for options in ({'rehearses': False}, {}, {'limit': limit})
    ]
    found = launch_json('tests/ranks/rehearsal.py', json.dumps(runs), ranks=2)
    for plain, rehearsed, limited in (found[:3], found[3:]):
        assert rehearsed['losses'] == plain['losses']
        assert rehearsed['norms'] == plain['norms']
        assert len(plain['losses']) == 6
        assert rehearsed['rehearsed'] == [3, 3], 'the second fit rehearses what is left of the run'
        assert plain['largest'] > limit, 'it would have failed'
        assert limited['early'] > limit
        assert limited['largest'] <= limit
        assert set(limited['size']) == {2}
    assert found[3]['norms'] == pytest.approx(found[0]['norms'], rel=1e-4)
