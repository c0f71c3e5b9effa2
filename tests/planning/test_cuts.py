# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
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
from tests.planning.reference import fits, least_padded, partitions, sorted_rows

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
    starts = bounds[:-1]
    ends = bounds[1:]
    return bool(np.all(starts < ends) and np.all(ends <= rows.reach[starts]))


# Least padded cuts of sorted rows


@settings(max_examples=150, deadline=None)
@given(SAMPLES, st.integers(1, 90), st.none() | st.integers(1, 20), st.just(0.0) | st.floats(0.001, 0.5), st.randoms())
def test_cost_matches_exhaustive_search(samples, max_tokens, max_images, tolerance, random):
    lengths, images = map(list, zip(*samples, strict=True))
    rows = sorted_rows(lengths, max_tokens, images, max_images)
    order = rows.order.tolist()
    truth = least_padded(lengths, max_tokens, _price, order=order, images=images, max_images=max_images)
    cuts = LeastPaddedCuts(rows, tolerance)
    assert cuts.fewest == min(truth)
    counts = list(truth)
    random.shuffle(counts)  # corners found for one count must not spoil another
    for count in counts:
        bounds = cuts.exactly(count)
        assert len(bounds) == count + 1
        assert _caps_hold(rows, bounds)
        assert truth[count] - 1e-6 <= _padded_bounds(rows, bounds) <= truth[count] * (1 + tolerance) + 1e-6


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.floats(0.0, 50.0))
def test_priced_cut_beats_all_counts(lengths, max_tokens, price):
    rows = sorted_rows(lengths, max_tokens)
    truth = least_padded(sorted(lengths, reverse=True), max_tokens, _price)
    bounds = least_padded_cut(rows.row_costs, rows.reach, price)
    total = _padded_bounds(rows, bounds) + price * (len(bounds) - 1)
    assert total == pytest.approx(min(cost + price * count for count, cost in truth.items()))


def test_sorted_contiguous_cuts_beat_all_partitions():
    """The planner rests on this claim. Every partition of five rows is tried."""
    lengths = [9, 4, 7, 2, 5]
    max_tokens = 18
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
    """Least cost of the costliest microbatch of any cut into at most `count`, by exhaustive search."""

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
@example([(1, 0), (4, 7), (5, 9)], 8, 0)  # two rows that fill the cap cost as much as the limit, except for rounding
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
        sizes = {}
        for first, end in pairwise(expected):
            if end - first > 1:
                sizes[first, end] = (end - first) * lengths[first]
        first, end = max(sizes, key=sizes.get)
        expected = sorted([*expected, (first + end) // 2])
    assert split_largest(np.array(lengths, dtype=float), np.array(start), count).tolist() == expected


# The rows of one rank


def test_width_multiple_counts_against_the_cap():
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20))) == [[0, 1]]
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20, width_multiple=8))) == [[0], [1]]


def test_rounding_stops_at_the_collated_width():
    assert sorted(cut_rows([9, 9], CutOptions(max_tokens=20, width_multiple=8), max_width=10)) == [[0, 1]]


def test_rounding_makes_no_row_oversize():
    assert cut_rows([9], CutOptions(max_tokens=10, width_multiple=8)) == [[0]]
