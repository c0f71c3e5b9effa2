# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The exchanging loader on real ranks, with datasets that need no mosaicml-streaming."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from composer_tokacc import token_data_spec
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling import ExchangingDataLoader, exchange
from tests.ranks.exchange import BATCH, EPOCH, READ
from tests.support.launch import launch_json
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples


def build(num_samples=20, **kwargs):
    options = {'batch_size': 8, 'collate_fn': collate_samples, 'max_tokens': 2 * LONGEST, **kwargs}
    return ExchangingDataLoader(LengthDataset(num_samples), **options)


def names(batches):
    return [[int(name) for name in batch['sample_ids']] for batch in batches]


def test_one_rank_cuts_what_it_reads_and_the_split_hands_the_microbatches_on():
    loader = build(max_tokens=LONGEST)
    spec = token_data_spec(loader, slot_tokens=LONGEST)
    batches = list(loader)
    assert [sorted(batch) for batch in names(batches)] == [list(range(k, min(k + 8, 20))) for k in (0, 8, 16)]
    for batch in batches:
        planned = [microbatch['sample_ids'] for microbatch in batch.microbatches]
        assert len(planned) > 1
        assert [one['input_ids'].shape[1] for one in batch.microbatches] == [
            max(loader.dataset.lengths[int(name)] for name in names) for names in planned
        ]
        assert [part['sample_ids'] for part in spec.split_batch(spec.batch_transforms(batch), 1)] == planned
    assert len(loader) == 3
    assert loader.batch_size == 8


def test_patches_tell_what_a_sample_costs_in_the_tower(monkeypatch):
    seen = []
    plan = exchange.plan_batch
    monkeypatch.setattr(exchange, 'plan_batch', lambda rows, num_ranks: seen.append(rows) or plan(rows, num_ranks))
    cost = CostModel(vision_per_image=2.0, vision_per_patch=0.5)
    list(build(8, cost=cost, patches=lambda sample: 10 * sample['input_ids'].shape[1]))
    assert seen[-1].vision_cost.tolist() == [2.0 + 5.0 * length for length in seen[-1].lengths]


@pytest.mark.parametrize('num_workers', [0, 2])
def test_iterating_takes_no_random_numbers(num_workers):
    loader = build(num_workers=num_workers)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_many_samples_from_workers_need_few_files():
    loader = build(600, batch_size=100, num_workers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 60, hard))
    try:
        found = names(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [sorted(batch) for batch in found] == [list(range(k, k + 100)) for k in range(0, 600, 100)]


def test_state_is_that_of_the_dataset_in_samples_of_all_ranks():
    class Resumable(LengthDataset):
        loaded = None

        def state_dict(self, num_samples, from_beginning):
            return {'num_samples': num_samples, 'from_beginning': from_beginning}

        def load_state_dict(self, state):
            self.loaded = state

    loader = ExchangingDataLoader(
        Resumable(20), batch_size=8, collate_fn=collate_samples, max_tokens=2 * LONGEST, num_workers=1
    )
    iterator = iter(loader)
    for seen in (8, 16, 20):
        next(iterator)
        assert loader.state_dict() == {'num_samples': seen, 'from_beginning': False}
    loader.load_state_dict({'a': 1})
    assert loader.dataset.loaded == {'a': 1}
    assert build().state_dict() is None


def test_batch_size_is_needed():
    with pytest.raises(ValueError, match='`batch_size` must be what each rank reads'):
        build(batch_size=None)


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_ranks_exchange_what_they_read(ranks):
    results = launch_json('tests/ranks/exchange.py', ranks=ranks)
    counts = READ[ranks]
    starts = [sum(counts[:rank]) for rank in range(ranks)]
    read = [
        [
            index
            for start, count in zip(starts, counts, strict=True)
            for index in range(start + step * BATCH, start + min((step + 1) * BATCH, count))
        ]
        for step in range(-(-max(counts) // BATCH))
    ]
    check_steps(results['uneven'], read)
    computed = [name for rank in results['uneven'][0] for name in rank['names']]
    assert computed != read[0], 'samples should move between ranks'
    for kind in ('sampler', 'workers', 'drop_last'):
        for epoch in results[kind]:
            expected = epoch['read']
            if kind == 'drop_last':
                expected = [step for step in expected if len(step) == ranks * BATCH]
            assert epoch['length'] == len(expected)
            check_steps(epoch['steps'], expected)
        first, second = results[kind]
        assert first['read'] != second['read']
    assert len(results['sampler'][0]['read'][-1]) < BATCH * ranks, 'the last batch should be a smaller one'
    assert sum(map(len, results['sampler'][0]['read'])) == EPOCH

    message = f'sample "{BATCH}" is broken'
    assert results['bad sample'] == [f'BadSampleError: {message}'] * ranks
    others = [f'NotExactError: every rank must read its samples, got: an error on rank 0: {message}'] * (ranks - 1)
    assert results['other error'] == [f'OSError: {message}', *others]

    for objective in ('ddp', 'fsdp'):
        for case, indices in zip(results[objective], read, strict=True):
            assert case['error'] < 1e-6, results[objective]
            assert case['loss_error'] < 1e-6
            assert case['num_samples'] == len(indices)


def check_steps(steps, expected):
    """Each step holds what was read for it, once; every rank computes something, and samples arrive whole."""
    assert len(steps) == len(expected)
    for step, read in zip(steps, expected, strict=True):
        computed = [name for rank in step if rank['num_samples'] for name in rank['names']]
        assert sorted(computed) == sorted(read)
        assert all(rank['whole'] and rank['names'] for rank in step)
        fillers = [rank for rank in step if not rank['num_samples']]
        assert len(fillers) == max(len(step) - len(read), 0)
