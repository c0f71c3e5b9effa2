# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Global batches against torch's own DistributedSampler; shares, plans, state and refusals of the sampler."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler

from composer_tokacc.planning import CostModel, plan_microbatches
from composer_tokacc.sampling import LossShares, Mixture
from composer_tokacc.sampling.sampler import RegroupingBatchSampler, prefetch
from tests.support.sampler_steps import (
    LONGEST_SAMPLE,
    build_sampler,
    joined,
    lognormal_lengths,
    samplers_of_ranks,
    samples_of_steps,
)


def table_of(num_samples):
    """Returns random lengths, the same ones in each call."""
    return lognormal_lengths(np.random.default_rng(0), num_samples)


def build(num_samples, global_batch_size, **options):
    """Returns a sampler over samples of random lengths."""
    return build_sampler(table_of(num_samples), global_batch_size=global_batch_size, **options)


def all_ranks(lengths, global_batch_size, ranks, **options):
    """Returns the batches of every rank: [rank][batch]."""
    batches_of_ranks = []
    for sampler in samplers_of_ranks(lengths, ranks, global_batch_size=global_batch_size, **options):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        batches_of_ranks.append(batches)
    return batches_of_ranks


def stock_batches(num_samples, global_batch_size, ranks, *, epoch=0, seed=0, shuffle=True, drop_last=False):
    """Returns the samples of every global batch of DataLoaders on torch's sampler, sorted."""
    loaders = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(num_samples), ranks, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        loader = DataLoader(
            range(num_samples),
            batch_size=global_batch_size // ranks,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=list,
        )
        loaders.append(loader)
    return samples_of_steps(loaders)


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 90),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    multiple=st.integers(1, 3),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    objective=st.sampled_from(['ddp', 'fsdp']),
)
def test_global_batches_are_those_of_torch(num_samples, ranks, multiple, epoch, seed, shuffle, drop_last, objective):
    global_batch_size = 12 * multiple
    order = {'epoch': epoch, 'seed': seed, 'shuffle': shuffle, 'drop_last': drop_last}
    expected = stock_batches(num_samples, global_batch_size, ranks, **order)
    if not expected:
        with pytest.raises(ValueError, match='drop_last'):
            build(num_samples, global_batch_size, ranks=ranks, drop_last=True)
        return
    if not drop_last:
        # Torch repeats some samples in the last global batch, to fill up the ranks. Our epoch has each sample once.
        *earlier_batches, last_of_torch = expected
        remaining_samples = set(range(num_samples)) - set(joined(earlier_batches))
        assert remaining_samples <= set(last_of_torch)
        assert len(last_of_torch) - len(remaining_samples) == -num_samples % ranks
        expected[-1] = sorted(remaining_samples)

    batches_of_ranks = all_ranks(table_of(num_samples), global_batch_size, ranks, objective=objective, **order)

    assert samples_of_steps(batches_of_ranks) == expected
    assert all(joined(batches_of_ranks)), 'a rank without a row to compute'
    for step, samples in enumerate(expected):
        num_copies = sum(batches[step].is_copy for batches in batches_of_ranks)
        assert num_copies == max(ranks - len(samples), 0)


def test_ranks_without_images_get_samples():
    """A single sample with an image cannot fill a step slot of two ranks. The other rank still gets samples."""
    batches_of_ranks = all_ranks([8] * 4, 4, 2, image_tokens=[4, 0, 0, 0], objective='fsdp', max_tokens=64)
    assignments = joined(batches_of_ranks)
    assert sorted(joined(assignments)) == [0, 1, 2, 3]
    assert all(assignments)


def test_rank_with_only_dummies_gets_a_copy():
    """One sample with an image and one without fill a step slot each, both with a dummy of the other rank."""
    options = {'global_batch_size': 2, 'image_tokens': [4, 0], 'objective': 'fsdp', 'max_tokens': 64}
    samplers = samplers_of_ranks([8, 8], 2, **options)
    assignments = []
    for sampler in samplers:
        (assignment,) = sampler
        assert sampler.has_only_copies(0) == assignment.is_copy
        assignments.append(assignment)

    copies = [assignment for assignment in assignments if assignment.is_copy]
    assert len(copies) == 1
    (samples,) = [sorted(assignment) for assignment in assignments if not assignment.is_copy]
    assert samples == [0, 1]


def test_no_plan_tells_that_a_rank_has_samples():
    """With four samples for each rank of a global batch, no rank has only a copy. With fewer, some ranks have one."""
    rng = np.random.default_rng(0)
    options = {'objective': 'fsdp', 'global_batch_size': 20}
    num_copies = 0
    for _ in range(60):
        num_samples = int(rng.integers(4, 20))  # the last global batch may be smaller
        lengths = rng.integers(5, 60, num_samples)
        has_image = rng.random(num_samples) < 0.5
        vision_cost = rng.uniform(0, 2000, num_samples) * has_image
        samplers = samplers_of_ranks(lengths, 4, image_tokens=4 * has_image, vision_cost=vision_cost, **options)
        for sampler in samplers:
            (assignment,) = sampler
            assert sampler.has_only_copies(0) == assignment.is_copy
            num_copies += assignment.is_copy
    assert num_copies > 0


@pytest.mark.parametrize(('objective', 'per_rank'), [('ddp', 1), ('fsdp', 4)])
def test_enough_samples_need_no_plan(monkeypatch, objective, per_rank):
    """The trainer asks for copies at each step, so a plan that is not needed would make each step longer."""
    samplers = samplers_of_ranks([8] * 4 * per_rank, 4, global_batch_size=4 * per_rank, objective=objective)
    monkeypatch.delattr('composer_tokacc.sampling.sampler.plan_checked_rows')
    for sampler in samplers:
        assert not sampler.has_only_copies(0)


def test_ranks_finish_together():
    """Torch's sampler gives each rank as many samples as the others. Ours gives each as many tokens."""
    num_samples = 4096
    lengths = lognormal_lengths(np.random.default_rng(3), num_samples)
    batches_of_ranks = all_ranks(lengths, 128, 8, cost=CostModel(launch=0.0))
    orders_of_stock = [list(DistributedSampler(range(num_samples), 8, rank)) for rank in range(8)]

    # A step takes as long as the rank with the most tokens.
    time_of_ours = 0
    time_of_stock = 0
    for step in range(32):
        tokens = [lengths[list(batches[step])].sum() for batches in batches_of_ranks]
        time_of_ours += max(tokens)
        start = 16 * step  # a rank has 16 of the 128 samples of a global batch
        tokens_of_stock = [lengths[order[start : start + 16]].sum() for order in orders_of_stock]
        time_of_stock += max(tokens_of_stock)

    shortest_time = lengths.sum() / 8
    assert time_of_ours / shortest_time < 1.05
    assert time_of_stock / shortest_time > 1.2


def test_batches_are_a_pure_function():
    """They depend on the arguments and the epoch. Earlier epochs and pickling change nothing."""
    first = build(50, 12, ranks=3, rank=1)
    second = build(50, 12, ranks=3, rank=1)
    second.set_epoch(4)
    list(second)
    second.set_epoch(0)
    assert list(first) == list(second) == list(first)

    first.set_epoch(4)
    assert list(first) != list(second)

    pickled_sampler = pickle.dumps(first)
    assert list(pickle.loads(pickled_sampler)) == list(first)
    assignment = next(iter(first))
    pickled_assignment = pickle.dumps(assignment)
    assert pickle.loads(pickled_assignment) == assignment


def test_plan_and_window_match_the_batches():
    sampler = build(50, 12, ranks=3, rank=2)
    sampler.set_epoch(1)
    for batch, assignment in enumerate(sampler):
        window = sampler.window(batch)
        is_last = batch == 4  # two samples are left for three ranks
        assert assignment.is_copy == is_last
        assert sampler.has_only_copies(batch) == is_last
        planned_samples = []
        for microbatch in sampler.plan(batch).ranks[2]:
            if not microbatch.filled:
                planned_samples += [window[place] for place in microbatch.indices]
        if is_last:
            assert planned_samples == []
        else:
            assert planned_samples == list(assignment)


def test_epoch_order_is_made_once(monkeypatch):
    # Once, each call made the order again. That took time in proportion to the dataset.
    calls = []
    randperm = torch.randperm

    def counted(*args, **kwargs):
        calls.append(args)
        return randperm(*args, **kwargs)

    monkeypatch.setattr(torch, 'randperm', counted)
    sampler = build(500, 12)
    for num_orders, epoch in enumerate((0, 1), start=1):
        sampler.set_epoch(epoch)
        expected = [sorted(assignment) for assignment in sampler]
        assert len(expected) == len(sampler)
        for batch in range(len(sampler)):
            assert sorted(sampler.window(batch)) == expected[batch]
            assert all(sampler.plan(batch).ranks)
        assert len(calls) == num_orders


def test_state_of_other_keys_is_refused():
    sampler = build(96, 12)
    state = sampler.state_dict()
    state_with_word = {**state, 'epoch': 'two'}
    state_below_zero = {**state, 'batch': -1}
    for bad_state in (None, [1], {'x': 1}, state_with_word, state_below_zero):
        with pytest.raises(ValueError, match='must have the keys'):
            sampler.load_state_dict(bad_state)

    state_with_more = {**state, 'more': 1}
    with pytest.raises(ValueError, match=r'`more` .*, got: None, saved: 1'):
        sampler.load_state_dict(state_with_more)


@pytest.mark.parametrize('options', [{}, {'mixture': Mixture([32, 64])}])
def test_epochs_below_zero_are_refused(options):
    sampler = build(96, 12, **options)
    with pytest.raises(ValueError, match=r'`epoch` must be an integer from 0 to \d+, got: -1'):
        sampler.set_epoch(-1)


def test_sampler_skips_only_within_an_epoch():
    sampler = build(96, 12)
    with pytest.raises(ValueError, match='`batch` must be an integer from 0 to 8, got: 9'):
        sampler.skip_to(9)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'global_batch_size': 10, 'ranks': 4}, r'multiple of the number of ranks, got: 10 on 4 ranks\. Set it to 12'),
        ({'global_batch_size': 2, 'ranks': 4}, 'got: 2 on 4 ranks. Set it to 4'),
        ({'global_batch_size': 0}, '`global_batch_size` must be a positive integer'),
        ({'lengths': [3, 4]}, r'one entry per sample, got: shape \(2,\) for 4'),
        ({'lengths': [3, 4, -1, 5]}, '`lengths` must be finite and at least 1, got: -1 at sample 2'),
        ({'vision_cost': [1.0] * 3}, r'`vision_cost` must have one entry per sample, got: shape \(3,\) for 4'),
        ({'global_batch_size': 8, 'drop_last': True}, 'at most the samples of an epoch .* got: 8 > 4 samples'),
        ({'mixture': Mixture([3, 4])}, 'must have the sizes of the datasets'),
        ({'mixture': [], 'modality': 'per_step', 'media': [0, 1, 0, 1]}, r'`mixture` must be a Mixture, got: \[\]'),
        (
            {'loss_shares': LossShares([3], [1.0], [1] * 3)},
            r'`loss_shares` must have one entry per sample, got: shape \(3,\)',
        ),
        ({'modality': 'video'}, "must be 'mixed' or 'per_step'"),
        ({'modality': 'per_step'}, '`image_tokens` or `media` must be given'),
        ({'modality': 'per_step', 'media': [0] * 7}, '`media` must have one entry per sample'),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    options = {'lengths': [3, 4, 1, 5], 'global_batch_size': 4, **kwargs}
    with pytest.raises(ValueError, match=message) as caught:
        build_sampler(num_samples=4, **options)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('sizes', 'are_refused'),
    [
        ([10, 20, 70], False),
        ([30, 70], False),
        ([10, 90], False),
        ([100], False),
        ([10, 20, 30, 40], False),
        ([90, 10], True),
        ([70, 30], False),
        ([70, 20, 10], True),
    ],
)
def test_datasets_of_a_mixture_in_another_order(sizes, are_refused):
    """A dataset of a mixture may be several parts, or a piece of one, which may be made of several datasets."""
    dataset = ConcatDataset([range(10), ConcatDataset([range(20), range(70)])])
    shares = [1 / len(sizes)] * len(sizes)
    for option in ({'mixture': Mixture(sizes)}, {'loss_shares': LossShares(sizes, shares, [1] * 100)}):
        (name,) = option
        refusal = contextlib.nullcontext()
        if are_refused:
            refusal = pytest.raises(ValueError, match=rf'`{name}` must have the sizes .*parts of \[10, ')
        with refusal:
            RegroupingBatchSampler(dataset, lengths=[1] * 100, global_batch_size=4, max_tokens=9, **option)


@pytest.mark.parametrize('name', ['max_tokens', 'max_image_tokens'])
def test_sample_as_large_as_the_cap(name):
    lengths = [3, 9, 1, 5]
    options = {'global_batch_size': 4, 'image_tokens': [0, 9, 1, 2], 'max_tokens': 9, 'max_image_tokens': 9}
    (batch,) = build_sampler(lengths, **options)
    assert sorted(batch) == [0, 1, 2, 3]

    options[name] = 8
    with pytest.raises(ValueError, match=rf'`{name}` .* got: 8 < 9 \(sample 1\)'):
        build_sampler(lengths, **options)


def test_memory_grows_only_with_the_order():
    num_samples = 400_000
    lengths = table_of(num_samples)
    tracemalloc.start()
    sampler = build_sampler(lengths, global_batch_size=256, ranks=8)
    for _ in itertools.islice(sampler, 20):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # torch's own permutation, 8 bytes a sample, is not traced.
    assert peak / num_samples < 40


def planning_threads():
    """Returns the running threads that plan ahead."""
    return {thread for thread in threading.enumerate() if thread.name.startswith('prefetch')}


def test_planning_thread_ends_with_the_iterator():
    """A thread that is left behind would keep its sampler and go on planning."""
    threads_before = planning_threads()  # a test that failed before may have left some
    sampler = build(600, 12)
    iterator = iter(sampler)
    next(iterator)
    assert planning_threads() > threads_before

    iterator.close()
    assert planning_threads() <= threads_before

    for _ in sampler:
        pass
    assert planning_threads() <= threads_before


def test_prefetched_results_come_in_order():
    drawn = []
    threads = set()

    def square(item):
        threads.add(threading.current_thread())
        return item * item

    def items():
        for item in range(10):
            drawn.append(item)
            yield item

    results = prefetch(square, items())
    for item in range(10):
        assert next(results) == item**2
        assert len(drawn) <= item + 3
    assert next(results, None) is None
    assert threading.current_thread() not in threads


def test_planning_errors_reach_the_loader():
    def divide(item):
        return 6 // item

    threads_before = planning_threads()
    results = prefetch(divide, [3, 2, 0, 1])
    assert next(results) == 2
    assert next(results) == 3
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert planning_threads() <= threads_before


@pytest.mark.parametrize('objective', ['ddp', 'fsdp'])
def test_plans_know_the_encoder_cost(objective):
    lengths = table_of(64)
    vision_cost = np.random.default_rng(3).choice([10.0, 400.0], 64)
    options = {'max_tokens': 3 * LONGEST_SAMPLE, 'objective': objective}
    sampler = build_sampler(lengths, global_batch_size=32, ranks=4, vision_cost=vision_cost, **options)
    for batch in range(2):
        window = sampler.window(batch)
        plan_window = partial(plan_microbatches, lengths[window], num_ranks=4, **options)
        expected = plan_window(vision_cost=vision_cost[window])
        plan_without_cost = plan_window()
        assert sampler.plan(batch) == expected
        assert expected != plan_without_cost
