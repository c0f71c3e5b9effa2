# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, cut_rows
from composer_tokacc.planning.cuts import (
    LeastPaddedCuts,
    equal_cost_cut,
    fill,
    least_padded_cut,
    microbatch_costs,
    split_largest,
)
from tests.planning.reference import check_cut, fits, least_padded, price_of, sorted_rows

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=14)
COST = CostModel(vision_per_token=0.7, launch=5.0)


def _price(width: int) -> float:
    return float(COST.rows(np.array([width]))[0])


def _padded(microbatches, lengths) -> float:
    return sum(len(rows) * _price(max(lengths[row] for row in rows)) for rows in microbatches)


def _padded_bounds(rows, bounds) -> float:
    return sum((end - start) * rows.row_costs[start] for start, end in pairwise(bounds))


def _caps_hold(rows, bounds) -> bool:
    return bool(np.all(np.diff(bounds) > 0) and np.all(bounds[1:] <= rows.reach[bounds[:-1]]))


# Least padded cuts of sorted rows


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.randoms(use_true_random=False))
def test_cost_matches_exhaustive_search(lengths, max_tokens, random):
    rows = sorted_rows(lengths, max_tokens)
    truth = least_padded(sorted(lengths, reverse=True), max_tokens, _price)
    cuts = LeastPaddedCuts(rows)
    assert cuts.fewest == min(truth)
    counts = list(truth)
    random.shuffle(counts)  # corners found for one count must not spoil another
    for count in counts:
        bounds = cuts.exactly(count)
        assert len(bounds) == count + 1
        assert _caps_hold(rows, bounds)
        assert _padded_bounds(rows, bounds) == pytest.approx(truth[count])


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.floats(0.001, 0.5))
def test_tolerance_is_kept(lengths, max_tokens, tolerance):
    rows = sorted_rows(lengths, max_tokens)
    cuts = LeastPaddedCuts(rows, tolerance)
    for count, cost in least_padded(sorted(lengths, reverse=True), max_tokens, _price).items():
        bounds = cuts.exactly(count)
        assert len(bounds) == count + 1
        assert _caps_hold(rows, bounds)
        assert _padded_bounds(rows, bounds) <= cost * (1 + tolerance) + 1e-9


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.floats(0.0, 50.0))
def test_priced_cut_is_the_least_of_all_counts(lengths, max_tokens, price):
    rows = sorted_rows(lengths, max_tokens)
    truth = least_padded(sorted(lengths, reverse=True), max_tokens, _price)
    bounds = least_padded_cut(rows.row_costs, rows.reach, price)
    total = _padded_bounds(rows, bounds) + price * (len(bounds) - 1)
    assert total == pytest.approx(min(cost + price * count for count, cost in truth.items()))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=10), st.integers(1, 20))
def test_image_cap_in_the_sorted_order(samples, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    rows = sorted_rows(lengths, 60, images, max_images)
    truth = least_padded(lengths, 60, _price, order=rows.order.tolist(), images=images, max_images=max_images)
    cuts = LeastPaddedCuts(rows)
    assert cuts.fewest == min(truth)
    for count, cost in truth.items():
        assert _padded_bounds(rows, cuts.exactly(count)) == pytest.approx(cost)


def test_sorted_contiguous_cuts_beat_all_partitions():
    """The claim on which the planner rests, by trying every partition of five rows."""
    lengths, max_tokens = [9, 4, 7, 2, 5], 18

    def partitions(rows):
        if not rows:
            yield []
            return
        first, rest = rows[0], rows[1:]
        for partition in partitions(rest):
            yield [[first], *partition]
            for k, block in enumerate(partition):
                yield [*partition[:k], [first, *block], *partition[k + 1 :]]

    best: dict[int, float] = {}
    for partition in partitions(list(range(5))):
        if all(fits(lengths, [0] * 5, block, max_tokens, None) for block in partition):
            best[len(partition)] = min(best.get(len(partition), np.inf), _padded(partition, lengths))
    rows = sorted_rows(lengths, max_tokens)
    cuts = LeastPaddedCuts(rows)
    assert min(best) == cuts.fewest
    for count, cost in best.items():
        assert _padded_bounds(rows, cuts.exactly(count)) == pytest.approx(cost)


# Cuts filled up to a limit, and of equal cost


def test_filled_microbatches_are_the_fewest():
    rows = sorted_rows([7, 7, 7, 7, 2, 2, 2], 14)
    assert fill(rows.row_costs, rows.vision, rows.reach, np.inf).tolist() == [0, 2, 4, 7]
    assert fill(rows.row_costs, rows.vision, rows.reach, 5.0).tolist() == [0, 1, 2, 3, 4, 6, 7]


def _least_costliest(rows, count) -> float:
    """By exhaustive search."""

    @functools.cache
    def best(start: int, left: int) -> float:
        if start == len(rows):
            return 0.0
        if left == 0:
            return float('inf')
        ends = range(start + 1, int(rows.reach[start]) + 1)
        return min(max(_cost(rows, start, end), best(end, left - 1)) for end in ends)

    return best(0, count)


def _cost(rows, start, end) -> float:
    return (end - start) * rows.row_costs[start] + rows.vision[end] - rows.vision[start]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=10),
    st.integers(1, 90),
    st.integers(0, 9),
)
@example([(1, 0), (4, 7), (5, 9)], 8, 0)  # the two rows that fill the cap are the limit itself, but for rounding
def test_costliest_microbatch_matches_exhaustive_search(samples, max_tokens, more):
    lengths, images = map(list, zip(*samples, strict=True))
    rows = sorted_rows(lengths, max_tokens, images, 25, cost=COST)
    count = len(fill(rows.row_costs, rows.vision, rows.reach, np.inf)) - 1 + more
    bounds = equal_cost_cut(rows.row_costs, rows.vision, rows.reach, count)
    assert len(bounds) - 1 <= count
    assert _caps_hold(rows, bounds)
    costliest = max(_cost(rows, start, end) for start, end in pairwise(bounds))
    assert costliest == pytest.approx(_least_costliest(rows, count), rel=2e-4)


def test_costs_by_hand():
    rows = sorted_rows([10, 4, 4], 100, [2, 0, 4], cost=CostModel(quadratic=100.0, vision_per_token=0.5))
    costs = microbatch_costs(rows.row_costs, rows.vision, np.array([0, 1, 3]), 7.0)
    np.testing.assert_allclose(costs, [11 + 1 + 7, 2 * 4.16 + 2 + 7])


# Splitting microbatches further


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 30))
def test_largest_microbatch_is_split_first(lengths, count):
    lengths.sort(reverse=True)
    start = [0, len(lengths) // 2, len(lengths)] if len(lengths) > 1 else [0, 1]
    expected = list(start)
    while len(expected) - 1 < min(count, len(lengths)):
        pieces = [(a, b) for a, b in pairwise(expected) if b - a > 1]
        a, b = max(pieces, key=lambda piece: ((piece[1] - piece[0]) * max(lengths[slice(*piece)]), -piece[0]))
        expected = sorted([*expected, (a + b) // 2])
    assert split_largest(np.array(lengths, dtype=float), np.array(start), count).tolist() == expected


# The rows of one rank


@pytest.mark.parametrize('regroup', [True, False])
def test_cap_is_hard(regroup):
    """8 samples of 7 under a cap of 8: no microbatch of 14 (verl issue 3035)."""
    assert sorted(cut_rows([7] * 8, CutOptions(max_tokens=8, regroup=regroup))) == [[row] for row in range(8)]


@pytest.mark.parametrize('regroup', [True, False])
@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.integers(1, 120), st.integers(1, 20))
def test_caps_hold_for_all_rows(regroup, samples, max_tokens, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    options = CutOptions(max_tokens=max_tokens, regroup=regroup, max_image_tokens=max_images, cost=COST)
    microbatches = cut_rows(lengths, options, image_tokens=images)
    check_cut(microbatches, lengths, max_tokens, images, max_images)
    if not regroup:
        assert [row for rows in microbatches for row in rows] == list(range(len(lengths)))
    else:
        costs = [
            price_of(COST, len(rows), max(lengths[row] for row in rows), sum(images[row] for row in rows))
            for rows in microbatches
        ]
        assert costs == sorted(costs, reverse=True), 'costliest microbatch first'


@pytest.mark.parametrize('regroup', [True, False])
@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.integers(1, 120), st.integers(1, 20))
def test_cost_is_what_exhaustive_search_finds(regroup, samples, max_tokens, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row]) if regroup else None
    truth = least_padded(lengths, max_tokens, _price, order=order, images=images, max_images=max_images)
    options = CutOptions(max_tokens=max_tokens, regroup=regroup, max_image_tokens=max_images, cost=COST)
    microbatches = cut_rows(lengths, options, image_tokens=images)
    total = _padded(microbatches, lengths) + COST.launch * len(microbatches)
    assert total == pytest.approx(min(cost + COST.launch * count for count, cost in truth.items()))


def test_width_multiple_counts_against_the_cap():
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20))) == [[0, 1]]
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20, width_multiple=8))) == [[0], [1]]


def test_rounding_stops_at_the_collated_width():
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20, width_multiple=8), max_width=10)) == [[0, 1]]


def test_rounding_makes_no_row_oversize():
    assert cut_rows([9], CutOptions(max_tokens=10, width_multiple=8)) == [[0]]


@pytest.mark.parametrize('regroup', [True, False])
def test_row_over_a_cap_stands_alone(regroup):
    options = CutOptions(max_tokens=20, regroup=regroup)
    assert [1] in cut_rows([3, 50, 3], options)
    assert [1] in cut_rows([3, 3, 3], replace(options, max_image_tokens=4), image_tokens=[1, 9, 1])


@pytest.mark.parametrize('regroup', [True, False])
@pytest.mark.parametrize(
    ('lengths', 'max_tokens', 'given', 'message'),
    [
        ([], 8, {}, '`lengths` must hold at least one'),
        ([3, 0], 8, {}, 'at least 1, got: 0 at sample 1'),
        ([3, -2], 8, {}, 'at least 1, got: -2 at sample 1'),
        ([3.5], 8, {}, 'must be integers'),
        ([3], 0, {}, '`max_tokens` must be a positive integer, got: 0'),
        ([3], 8, {'width_multiple': 0}, '`width_multiple` must be a positive integer'),
        ([3, 4], 8, {'image_tokens': [1]}, r'one entry per sample, got: shape \(1,\) for 2'),
        ([3], 8, {'image_tokens': [-1]}, '`image_tokens` must be finite and at least 0, got: -1'),
        ([3], 8, {'max_image_tokens': 4}, '`image_tokens` must be given'),
        ([3], 8, {'image_tokens': [1], 'max_image_tokens': 0}, '`max_image_tokens` must be a positive integer'),
    ],
)
def test_bad_input_is_one_clear_line(regroup, lengths, max_tokens, given, message):
    of_rows = {name: value for name, value in given.items() if name in ('image_tokens', 'max_width')}
    options = {name: value for name, value in given.items() if name not in of_rows}
    with pytest.raises(ValueError, match=message) as caught:
        cut_rows(lengths, CutOptions(max_tokens=max_tokens, regroup=regroup, **options), **of_rows)
    assert '\n' not in str(caught.value)
