# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ranks that plan unlike batches are refused before the first optimizer step. The error names the difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from transformers import BatchEncoding

from composer_tokacc import plan_agreement
from composer_tokacc.plan_agreement import (
    RANDOM,
    PlanRecord,
    PlanSums,
    check_plans,
    find_difference,
    learning_rates_of,
    optimizer_settings_of,
    plan_record_of,
)
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling.witness import witness_of
from tests.support.launch import launch_json
from tests.support.length_dataset import LengthDataset, regrouping_loader

SEEDS = ('`seed`', '0 on rank 0', '1 on rank 1')
WORDS_OF_MESSAGE = {
    'seed': SEEDS,
    'seed, plain loader': SEEDS,
    'seed, workers': SEEDS,
    'order': ('`lengths`', 'in this order', 'on rank 1', 'glob'),
    'order of equal lengths': ('`first samples`', 'on rank 0', 'glob'),
    'order of equal lengths, workers': ('`first samples`', 'on rank 1', 'glob'),
    'batch': ('`global batch`', '0 on rank 0', '1 on rank 1'),
    'rank': ('sampler of each rank', 'rank 0 of 2, rank 0 of 2'),
    'num_replicas': ('sampler of each rank', 'rank 0 of 1, rank 0 of 1'),
    'seed of torch': SEEDS,
    'samples of torch': ('`number of samples`', '30 on rank 0', '28 on rank 1'),
    'rank of torch': ('sampler of each rank', 'rank 0 of 2, rank 0 of 2'),
    'kind of loader': ('none on rank 1',),
    'seed, exchanged': SEEDS,
    'max_tokens, exchanged': ('`max_tokens`', '48 on rank 0', '96 on rank 1'),
}


@pytest.mark.slow
def test_unlike_ranks_are_refused():
    results = launch_json('tests/ranks/unlike_plans.py', ranks=2)
    assert results['unlike'].keys() == WORDS_OF_MESSAGE.keys()
    for name, run in results['unlike'].items():
        for message in run['message']:
            for words in WORDS_OF_MESSAGE[name]:
                assert words in message, name
            assert '\n' not in message
        assert run['steps'] == [0, 0]
        assert run['moved'] == [False, False]
    for name, run in results['alike'].items():
        assert run == {'message': ['', ''], 'steps': [2, 2], 'moved': [True, True]}, name
    unequal_ends = results['unequal ends']
    for message in unequal_ends['message']:
        assert '`len(dataset)`' in message
        assert 'after 2 batches' in message
    assert unequal_ends['steps'] == [2, 2]
    for message in results['no batch']['message']:
        assert 'after 0 batches' in message
    assert results['equal ends'] == {'message': ['', ''], 'steps': [2, 2], 'moved': [True, True]}
    assert results['own loop, lengths'] == 3
    for message in results['own loop']:
        assert '`seed`' in message
    assert results['own loop, alike'] == ['', '']
    for message in results['later']:
        assert message.startswith('1: `epoch`')
        assert 'got: 1 on rank 0, 2 on rank 1' in message
    schedule = results['schedule']
    for message in schedule['message']:
        assert 'learning rate must be the same on all ranks, got: 0.08 on rank 0, 0.075 on rank 1' in message
    assert schedule['steps'] == [2, 2]  # the first two steps of both ranks have 0.1
    assert schedule['are_equal']
    assert len(results['exact']) == 4
    assert max(results['exact']) < 1e-6


DATASET = LengthDataset(30)
WITH_LONGER_SAMPLE = DATASET.lengths.copy()
WITH_LONGER_SAMPLE[3] += 1


@pytest.mark.parametrize(
    ('option', 'first', 'second', 'all_words'),
    [
        ('lengths', DATASET.lengths, WITH_LONGER_SAMPLE, ('`lengths`', '30 numbers of sum', 'on rank 1')),
        ('dataset', DATASET, LengthDataset(29), ('`number of samples`', '30 on rank 0', '29 on rank 1')),
        ('max_tokens', 96, 144, ('`max_tokens`', '96 on rank 0', '144 on rank 1')),
        ('cost', CostModel(launch=100.0), CostModel(launch=101.0), ('`cost`', '100.0', '101.0')),
        ('objective', 'ddp', 'fsdp', ('`objective`', 'ddp on rank 0', 'fsdp on rank 1')),
        ('shuffle', False, True, ('`shuffle`', 'False on rank 0', 'True on rank 1')),
        ('global_batch_size', 8, 16, ('`global_batch_size`', '8 on rank 0', '16 on rank 1')),
    ],
)
def test_argument_that_differs_is_named(option, first, second, all_words):
    records = []
    for rank, value in enumerate((first, second)):
        options = {'dataset': DATASET, 'global_batch_size': 8, option: value}
        loader = regrouping_loader(**options, num_replicas=2, rank=rank)
        first_batch = next(iter(loader))
        records.append(plan_record_of(first_batch, loader, 0))
    assert records[0].checksum != records[1].checksum
    message = find_difference(records)
    for words in all_words:
        assert words in message


class Shards(IterableDataset):
    """Holds the arguments of a StreamingDataset. With another batch size its rank reads other samples."""

    num_canonical_nodes = 2

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self):
        return iter(())


def test_batch_size_of_stream_is_compared():
    records = []
    for size in (4, 4, 2):
        loader = DataLoader(Shards(size), batch_size=4)
        records.append(plan_record_of({}, loader, 0))

    of_four, also_of_four, of_two = records
    assert of_four.checksum == also_of_four.checksum
    assert of_four.checksum != of_two.checksum
    assert '`batch_size` must be the same' in find_difference(records)


@pytest.mark.parametrize(
    ('witnesses', 'are_refused'),
    [
        (('aa', 'aa'), False),
        (('aa', 'bb'), True),
        (('aa', ''), False),
        (('aa', 'bb', ''), True),
        (('aa', 'bb', RANDOM), False),
    ],
)
def test_random_datasets_are_not_compared(witnesses, are_refused):
    """If one dataset is random, the others are, too. A rank that cannot read its samples says nothing about others."""
    records = []
    for rank, witness in enumerate(witnesses):
        records.append(PlanRecord(1, rank, len(witnesses), witness))
    difference = find_difference(records)
    if are_refused:
        assert difference is not None
    else:
        assert difference is None


@pytest.mark.parametrize(
    ('rates', 'words'),
    [
        ([0.5, 0.5 * (1 + 1e-15)], None),
        ([torch.tensor(0.5), 0.5], None),
        ([[0.5, 0.25], [0.5, 0.125]], '0.25 on rank 0, 0.125 on rank 1'),
        ([[0.5, 0.5, 0.25], [0.5, 0.25, 0.25]], '0.5 on rank 0, 0.25 on rank 1'),
        ([[0.5, 0.5], 0.5], '0.5 on rank 0, none on rank 1'),
        ([0.5, float('nan')], '0.5 on rank 0, nan on rank 1'),
        ([float('nan'), float('nan')], None),
        ([0.0, 1e-17, -1e-17], None),
        ([1e-10, 1.0001e-10], None),
        ([0.0, 1e-7], '0 on rank 0, 1e-07 on rank 1'),
        ([2.0, 2.0001], '2 on rank 0, 2.0001 on rank 1'),
    ],
)
def test_learning_rates_of_ranks(rates, words):
    """Machines of different kinds may round the cosine of a schedule in another way. That is no difference.

    At the end of the schedule the rate is a difference of two cosines, and nearly 0, with few exact digits.
    """
    records = []
    for rank, rates_of_rank in enumerate(rates):
        if not isinstance(rates_of_rank, list):
            rates_of_rank = [rates_of_rank]
        groups = [{'params': [torch.zeros(1)]} for _ in rates_of_rank]
        optimizer = torch.optim.SGD(groups)
        for group, learning_rate in zip(optimizer.param_groups, rates_of_rank, strict=True):
            group['lr'] = learning_rate
            group['initial_lr'] = 0.5  # as torch's schedulers write it
        records.append(PlanRecord(1, rank, len(rates), learning_rates=learning_rates_of([optimizer])))
    difference = find_difference(records)
    checksums = {record.checksum for record in records}
    if words is None:
        assert difference is None
        assert len(checksums) == 1
    else:
        assert words in difference
        assert len(checksums) == 2


def test_text_that_is_twice_the_same_by_chance():
    texts = iter(['one', 'one', 'two'])

    def read(indices):
        return [{'text': next(texts)}]

    assert witness_of(read, [0]) == RANDOM


def test_time_to_compare_grows_with_ranks():
    """Each argument is read once for each rank, not once for each pair of ranks."""
    reads = []

    class Value:
        def __str__(self):
            reads.append(self)
            return 'value'

    records = []
    for rank in range(20):
        facts = {'value': Value()}
        records.append(PlanRecord(1, rank, 20, facts=facts))
    find_difference(records)
    assert len(reads) == 20


def test_entry_named_plan_is_no_record():
    """A batch of Hugging Face gives its entries as attributes, also one that the dataset calls ``plan``."""
    batch = BatchEncoding({'plan': ['cut', 'sew']})
    assert plan_record_of(batch, None, 0) is None


def test_samplers_of_batch_samplers_are_compared():
    checksums = set()
    for seed in (0, 1):
        sampler = DistributedSampler(range(8), num_replicas=2, rank=1, seed=seed)
        batch_sampler = BatchSampler(sampler, batch_size=2, drop_last=False)
        loader = DataLoader(range(8), batch_sampler=batch_sampler)
        record = plan_record_of({}, loader, 0)
        assert record.rank == 1
        assert record.num_ranks == 2
        checksums.add(record.checksum)
    assert len(checksums) == 2, 'one for each seed'


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2**20 - 1), min_size=2, max_size=40), st.booleans())
def test_sums_tell_equal_checksums(checksums, are_equal):
    """Ranks compare their plans in detail only if the sums show that their checksums differ."""
    num_ranks = len(checksums)
    if are_equal:
        checksums = [checksums[0]] * num_ranks
    records = [PlanRecord(checksum, rank, num_ranks) for rank, checksum in enumerate(checksums)]
    numbers_of_ranks = [PlanSums.of(record) for record in records]
    sums = np.sum(numbers_of_ranks, axis=0, dtype=np.float64)  # float64, as if tokens had weights

    compared_records = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_agreement, 'get_world_size', lambda: num_ranks)
        patch.setattr(plan_agreement, 'compare_plans', compared_records.append)
        check_plans(PlanSums._make(sums.tolist()), records[0])

    have_compared = len(compared_records) > 0
    checksums_differ = len(set(checksums)) > 1
    assert have_compared == checksums_differ


def test_settings_of_optimizer_are_named():
    """Learning rates are compared in each step, and the choice of a kernel may differ."""
    weight = torch.nn.Parameter(torch.zeros(2))
    settings = optimizer_settings_of([torch.optim.AdamW([weight], weight_decay=0.1, foreach=True)])
    assert settings['optimizers[0]'] == 'AdamW'
    assert settings['optimizers[0].param_groups[0].weight_decay'] == '0.1'
    assert settings['optimizers[0].param_groups[0].betas'] == '(0.9, 0.999)'
    for name in ('params', 'lr', 'foreach'):
        assert f'optimizers[0].param_groups[0].{name}' not in settings


@pytest.mark.parametrize(
    ('changes', 'is_same'),
    [
        ({'weight_decay': 0.1}, False),
        ({'betas': (0.9, 0.99)}, False),
        ({'betas': [0.9, 0.99]}, False),
        ({'maximize': True}, False),
        ({'max_grad_norm': 1.0}, False),
        ({'weight_decay': 0.3 * (1 + 1e-15)}, True),
        ({'betas': [0.9, 0.95]}, True),
        ({'lr': 0.5, 'fused': True, 'param_names': ['weight']}, True),
        ({'max_grad_norm': None, 'mask': torch.ones(1)}, True),
    ],
)
def test_optimizer_settings_of_ranks(changes, is_same):
    """Round-off is no difference, nor is a tuple that a checkpoint has turned into a list."""
    settings_of_ranks = []
    for changes_of_rank in ({}, changes):
        optimizer = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.3, betas=(0.9, 0.95))
        optimizer.param_groups[0].update(changes_of_rank)
        settings_of_ranks.append(optimizer_settings_of([optimizer]))
    first_settings, second_settings = settings_of_ranks
    assert (first_settings == second_settings) is is_same
