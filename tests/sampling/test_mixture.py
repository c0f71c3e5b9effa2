# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Several datasets in one run: their shares, an even order, no sample lost over epochs, and one modality a step."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer_tokacc.sampling.global_batches import GlobalBatches
from composer_tokacc.sampling.mixture import Mixture, counts_of_first, interleave
from tests.support.sampler_steps import joined, samplers_of_ranks, samples_of_steps


def lists_of_sizes(smallest, largest, *, min_size=1, max_size=4):
    """Returns a strategy of hypothesis: the numbers of samples of a few datasets."""
    numbers = st.integers(smallest, largest)
    return st.lists(numbers, min_size=min_size, max_size=max_size)


def batches_of_epochs(mixture, global_batch_size, epochs, *, seed=3, **options):
    """Yields the global batches of each epoch, as lists of samples."""
    lengths = np.ones(sum(mixture.sizes), dtype=int)
    run = GlobalBatches(lengths, samples=global_batch_size, seed=seed, mixture=mixture, **options)
    num_batches = len(run.of_epoch(0))
    for epoch in epochs:
        batches_of_epoch = run.of_epoch(epoch)
        assert len(batches_of_epoch) == num_batches
        yield [batch.tolist() for batch in batches_of_epoch]


def batches(mixture, global_batch_size, epoch, **options):
    """Returns the global batches of one epoch, as lists of samples."""
    (batches_of_epoch,) = batches_of_epochs(mixture, global_batch_size, [epoch], **options)
    return batches_of_epoch


def count_samples(batches_of_samples, num_samples):
    """Returns how often the batches have each sample."""
    return np.bincount(joined(batches_of_samples), minlength=num_samples)


@pytest.mark.parametrize('argument', ['epochs', 'weights'])
@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.int64])
def test_rates_may_be_arrays(argument, dtype):
    rates = np.array([1, 2], dtype=dtype)

    mixture = Mixture([30, 40], **{argument: rates})
    mixture_of_list = Mixture([30, 40], **{argument: [1, 2]})

    assert mixture.quotas == mixture_of_list.quotas
    assert len(batches(mixture, 8, 0)) > 0


@settings(deadline=None, max_examples=16)
@given(
    sizes=lists_of_sizes(12, 40, min_size=2),
    epochs=st.sampled_from([1, 2]),
    modality=st.sampled_from([None, 'media', 'image_tokens']),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_ranks_make_the_same_steps(sizes, epochs, modality, drop_last, epoch):
    num_samples = sum(sizes)
    lengths = np.arange(num_samples) % 9 + 1
    mixture = Mixture(sizes, epochs=[epochs] * len(sizes))
    options = {'global_batch_size': 24, 'max_tokens': 30, 'mixture': mixture, 'drop_last': drop_last}
    media = None
    if modality is not None:
        media = np.arange(num_samples) % 3
        options['modality'] = 'per_step'
        options[modality] = media
    if modality == 'image_tokens':
        media = np.sign(media)  # with images, or without

    global_batches = batches(mixture, 24, epoch, drop_last=drop_last, seed=0, media=media)

    if not drop_last:
        counts = count_samples(global_batches, num_samples)
        assert counts.tolist() == [epochs] * num_samples
    expected_steps = [sorted(batch) for batch in global_batches]
    for ranks in (1, 3, 8):
        samplers = samplers_of_ranks(lengths, ranks, epoch=epoch, **options)
        assert samples_of_steps(samplers) == expected_steps


@settings(deadline=None, max_examples=25)
@given(sizes=lists_of_sizes(5, 40), global_batch_size=st.integers(1, 20))
def test_drop_last_loses_nothing_over_epochs(sizes, global_batch_size):
    num_samples = sum(sizes)
    assume(num_samples >= global_batch_size)
    epochs = batches_of_epochs(Mixture(sizes), global_batch_size, range(40), drop_last=True)

    counts = np.zeros(num_samples, dtype=int)
    for batches_of_epoch in epochs:
        for batch in batches_of_epoch:
            assert len(batch) == global_batch_size
        counts += count_samples(batches_of_epoch, num_samples)

    assert counts.min() > 0
    starts_of_datasets = np.cumsum(sizes)[:-1]
    for counts_of_dataset in np.split(counts, starts_of_datasets):
        assert np.ptp(counts_of_dataset) <= 1, 'a pass ends before the next one begins'
    distances = np.abs(counts - counts.mean())
    assert distances.max() <= 1 + len(sizes) / min(sizes)


SIZES_OF_THREE = [500, 80, 900]


def counts_of_three_datasets(**options):
    """Yields how many samples of each dataset a global batch has, for all batches of three epochs.

    A batch has 40 samples, twice as many of the second dataset as of each other one.
    """
    dataset_of_sample = np.repeat([0, 1, 2], SIZES_OF_THREE)
    mixture = Mixture(SIZES_OF_THREE, weights=[1.0, 2.0, 1.0])
    epochs = batches_of_epochs(mixture, 40, range(3), drop_last=True, **options)
    for batches_of_epoch in epochs:
        for batch in batches_of_epoch:
            yield np.bincount(dataset_of_sample[batch], minlength=3)


def assert_at_most_one_off(counts, expected):
    """Checks that no count differs by more than one from the expected count."""
    assert np.abs(counts - expected).max() <= 1


def test_global_batches_hold_each_share():
    for counts in counts_of_three_datasets():
        assert_at_most_one_off(counts, [10, 20, 10])


def test_shares_with_one_modality_a_step():
    """Only the second dataset has the second modality. The others share the steps of the first modality."""
    media = np.repeat([0, 1, 0], SIZES_OF_THREE)
    for counts in counts_of_three_datasets(media=media):
        if counts[1] > 0:
            assert counts.tolist() == [0, 40, 0]
        else:
            assert_at_most_one_off(counts, [20, 0, 20])


def test_fractions_of_a_pass_go_on():
    """Two epochs of half a pass have each of the first 10 samples once. Each epoch has the other 8 samples twice."""
    mixture = Mixture([10, 8], epochs=[0.5, 2])

    counts = []
    for epoch in range(4):
        batches_of_epoch = batches(mixture, 7, epoch)
        counts.append(count_samples(batches_of_epoch, 18))

    expected = [1] * 10 + [4] * 8
    first_two_epochs = counts[0] + counts[1]
    last_two_epochs = counts[2] + counts[3]
    assert first_two_epochs.tolist() == expected
    assert last_two_epochs.tolist() == expected
    for counts_of_epoch in counts:
        assert counts_of_epoch[10:].tolist() == [2] * 8


def test_epochs_and_seeds_give_other_orders():
    mixture = Mixture([30, 20])
    order = batches(mixture, 10, 0)
    assert batches(mixture, 10, 0) == order
    assert batches(mixture, 10, 1) != order
    assert batches(mixture, 10, 0, seed=4) != order


@settings(deadline=None, max_examples=60)
@given(
    sizes=lists_of_sizes(1, 40),
    global_batch_size=st.integers(1, 12),
    drop_last=st.booleans(),
    num_modalities=st.integers(1, 3),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_one_modality_a_step(sizes, global_batch_size, drop_last, num_modalities, seed, shuffle):
    """Every sample is trained once an epoch, or as often as the others if batches must be full."""
    num_samples = sum(sizes)
    if drop_last:
        assume(num_samples >= global_batch_size)
    rng = np.random.default_rng(seed)
    media = rng.integers(0, num_modalities, num_samples)
    mixture = Mixture(sizes)
    options = {'drop_last': drop_last, 'seed': None}
    if shuffle:
        options['seed'] = seed
    if num_modalities > 1:
        options['media'] = media
    num_epochs = 2
    if drop_last:
        num_epochs = 40

    counts = np.zeros(num_samples, dtype=int)
    for batches_of_epoch in batches_of_epochs(mixture, global_batch_size, range(num_epochs), **options):
        for batch in batches_of_epoch:
            assert len(np.unique(media[batch])) == 1
        counts += count_samples(batches_of_epoch, num_samples)

    if not drop_last:
        assert (counts == num_epochs).all()
        return
    # A rare modality waits until it fills a batch, but is not left out.
    batches_an_epoch = num_samples // global_batch_size
    passes = num_epochs * batches_an_epoch * global_batch_size / num_samples
    for modality in np.unique(media):
        counts_of_modality = counts[media == modality]
        tolerance = global_batch_size / len(counts_of_modality) + 1
        assert counts_of_modality.mean() == pytest.approx(passes, abs=tolerance)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        pytest.param({'epochs': [1, 1], 'weights': [1, 1]}, 'got: both', id='epochs and weights'),
        pytest.param({'epochs': [1]}, r'`epochs` must have one entry .* shape \(1,\) for 2', id='too few epochs'),
        pytest.param({'weights': [1, -1]}, '`weights` must be .* got: -1', id='negative weight'),
        pytest.param({'weights': [1, math.nan]}, '`weights` must be .* got: nan', id='NaN'),
    ],
)
def test_bad_rates_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mixture([3, 4], **arguments)


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        pytest.param([3, 0], '`sizes` must be .* at least 1, .*got: 0', id='empty dataset'),
        pytest.param([], '`sizes` must hold at least one', id='no dataset'),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Mixture(sizes)


def test_modality_without_a_sample_is_refused():
    """One image in 100 samples is a tenth of an image in a tenth of an epoch. Rounded, no epoch would ever have it."""
    media = np.array([1] + [0] * 99)
    mixture = Mixture([100], epochs=[0.1])
    with pytest.raises(ValueError, match=r'must have a sample of each modality, got: \[10, 0\]'):
        batches(mixture, 4, 0, media=media)


# Merged sequences, compared with plain merging one by one.

QUOTAS = st.fractions(Fraction(1, 50), 50, max_denominator=50)
LISTS_OF_QUOTAS = st.lists(QUOTAS, min_size=1, max_size=6)


def merge_one_by_one(num_items, quotas):
    """Sainte-Laguë as textbooks have it: the next item goes to the largest quotient q / (2 c + 1)."""
    counts = [0] * len(quotas)
    merged = []
    for _ in range(num_items):
        quotients = [quota / (2 * count + 1) for quota, count in zip(quotas, counts, strict=True)]
        chosen = quotients.index(max(quotients))
        merged.append(chosen)
        counts[chosen] += 1
    return merged


@settings(deadline=None, max_examples=100)
@given(quotas=LISTS_OF_QUOTAS, num_items=st.integers(0, 120))
def test_counts_of_the_divisor_method(quotas, num_items):
    merged = merge_one_by_one(num_items, quotas)
    expected = [merged.count(source) for source in range(len(quotas))]
    counts = counts_of_first(num_items, quotas)
    assert counts == expected


@settings(deadline=None, max_examples=100)
@given(quotas=LISTS_OF_QUOTAS, begin=st.integers(0, 60), length=st.integers(0, 60))
def test_stretch_of_the_merged_sequence(quotas, begin, length):
    """The items of each source are numbered from the beginning of the sequence."""
    end = begin + length
    merged = merge_one_by_one(end, quotas)
    expected = []
    for place in range(begin, end):
        source = merged[place]
        num_earlier_items = merged[:place].count(source)
        expected.append((source, num_earlier_items))

    begins = counts_of_first(begin, quotas)
    ends = counts_of_first(end, quotas)
    sources, items = interleave(begins, ends, quotas)

    pairs = zip(sources.tolist(), items.tolist(), strict=True)
    assert sorted(pairs) == sorted(expected)


# Shares of loss tokens.


@settings(deadline=None, max_examples=10)
@given(sizes=lists_of_sizes(30, 90, min_size=2, max_size=3), seed=st.integers(0, 9))
def test_shares_of_loss_tokens(sizes, seed):
    """Counted sample by sample: short answers in one dataset, long ones in another, some without any."""
    rng = np.random.default_rng(seed)
    tokens_of_datasets = []
    for dataset, size in enumerate(sizes):
        most_tokens = 10 ** (1 + dataset)
        dataset_tokens = rng.integers(0, most_tokens, size) + dataset
        dataset_tokens[-1] += 1  # a dataset without any token would be refused
        tokens_of_datasets.append(dataset_tokens)
    tokens = np.concatenate(tokens_of_datasets)
    dataset_of_sample = np.repeat(np.arange(len(sizes)), sizes)
    shares = [0.7, 0.3]
    if len(sizes) == 3:
        shares = [0.5, 0.3, 0.2]

    mixture = Mixture.from_loss_shares(sizes, shares, tokens)
    epochs = batches_of_epochs(mixture, 20, range(40), seed=seed)

    assert float(sum(mixture.quotas)) == pytest.approx(sum(sizes))
    trained_tokens = np.zeros(len(sizes))
    for batches_of_epoch in epochs:
        for sample in joined(batches_of_epoch):
            dataset = dataset_of_sample[sample]
            trained_tokens[dataset] += tokens[sample]
    total = trained_tokens.sum()
    tokens_of_pass = [dataset_tokens.sum() for dataset_tokens in tokens_of_datasets]
    largest_pass = max(tokens_of_pass)
    for dataset, share in enumerate(shares):
        trained_share = trained_tokens[dataset] / total
        # Shares are exact over whole passes. So they are off by less than one pass of each dataset.
        largest_error = (largest_pass + tokens_of_pass[dataset]) / total
        assert trained_share == pytest.approx(share, abs=largest_error, rel=0)


@pytest.mark.parametrize('num_tokens', [3e9, 3e12])
def test_loss_shares_may_be_numbers_of_tokens(num_tokens):
    loss_tokens = [30, 40, 50]
    in_tokens = Mixture.from_loss_shares([2, 1], [num_tokens, 2 * num_tokens], loss_tokens)
    relative = Mixture.from_loss_shares([2, 1], [1, 2], loss_tokens)

    quotas = [float(quota) for quota in in_tokens.quotas]
    expected_quotas = [float(quota) for quota in relative.quotas]
    assert quotas == pytest.approx(expected_quotas)


@pytest.mark.parametrize(
    ('shares', 'loss_tokens', 'message'),
    [
        pytest.param(
            [0.5, 0.5],
            [3, 4, 0],
            r'Every dataset must have `loss_tokens`, got: means of \[3\.5, 0\.0\]',
            id='dataset without loss tokens',
        ),
        pytest.param(
            [1, 0],
            [3, 4, 5],
            r'`shares` must be above 0 .* got: \[1\.0, 0\.0\]',
            id='share of zero',
        ),
    ],
)
def test_bad_loss_shares_are_refused(shares, loss_tokens, message):
    with pytest.raises(ValueError, match=message):
        Mixture.from_loss_shares([2, 1], shares, loss_tokens)
