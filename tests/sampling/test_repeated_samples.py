# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Repeated samples of torch's DistributedSampler, which fill up the ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from composer_tokacc.repeated_samples import num_repeated
from composer_tokacc.sampling import RegroupingBatchSampler


@settings(deadline=None, max_examples=150)
@given(
    num_samples=st.integers(1, 60),
    ranks=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last_batch=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_repeated_samples_are_left_out(num_samples, ranks, batch_size, shuffle, drop_last_batch, drop_last, epoch):
    counts = Counter()
    dropped = Counter()
    for rank in range(ranks):
        sampler = DistributedSampler(range(num_samples), ranks, rank, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        loader = DataLoader(
            range(num_samples), batch_size=batch_size, sampler=sampler, collate_fn=list, drop_last=drop_last_batch
        )
        for batch_index, batch in enumerate(loader):
            copies = num_repeated(loader, batch_index)
            assert 0 <= copies <= (batch_index == len(loader) - 1)
            counts.update(batch[: len(batch) - copies])
            dropped.update(batch[len(batch) - copies :])
    assert not counts or max(counts.values()) == 1
    if drop_last:
        assert not dropped
    elif not drop_last_batch:
        assert sorted(counts) == list(range(num_samples))
        assert sum(dropped.values()) == -num_samples % ranks


def test_sampler_of_a_part():
    dataset = Subset(range(100), list(range(5)))
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, 3, 2), collate_fn=list)
    assert [num_repeated(loader, batch) for batch in range(2)] == [1, 0], 'its two rows are of positions 2 and 5 of 5'


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_ranks_without_a_sample(ranks):
    copies = []
    for rank in range(ranks):
        sampler = RegroupingBatchSampler(
            range(26), lengths=[5] * 26, global_batch_size=12, max_tokens=20, num_replicas=ranks, rank=rank
        )
        loader = DataLoader(range(26), batch_sampler=sampler, collate_fn=list)
        copies.append([num_repeated(loader, batch) for batch in range(3)])
    assert [sum(step) for step in zip(*copies, strict=True)] == [0, 0, max(ranks - 2, 0)]


def test_other_samplers_repeat_nothing():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    class FixedOrder(DistributedSampler):
        def __iter__(self):
            return iter([0, 1])

    loaders = [
        DataLoader(range(5), batch_size=2),
        DataLoader(range(5), batch_size=None),
        DataLoader(range(5), batch_sampler=[[0, 1], [2]]),
        DataLoader(range(5), batch_size=2, sampler=FixedOrder(range(5), 2, 1)),
        DataLoader(Stream(), batch_size=2),
        [[0, 1], [2]],
    ]
    for loader in loaders:
        assert [num_repeated(loader, batch) for batch in range(3)] == [0, 0, 0]
