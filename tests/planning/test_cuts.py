# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The cutters, each compared with an exhaustive search or with numbers by hand."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, cut_rows, padded_widths
from composer_tokacc.planning.cuts import equal_cost_cut, fill, least_padded_cut, least_padded_cuts, split_largest
from tests.planning.reference import Samples, partitions, samples_under_caps


def microbatches_of(rows, bounds) -> list[list[int]]:
    """Returns the samples of each microbatch. It starts at a bound and ends before the next one."""
    order = rows.order.tolist()
    return [order[start:end] for start, end in pairwise(bounds)]


# Least padded cuts of sorted rows


@settings(max_examples=100, deadline=None)
@given(samples_under_caps())
def test_cuts_match_exhaustive_search(samples):
    """Each cut has the least padded cost of all cuts into as many microbatches. The last has the fewest."""
    rows = samples.sorted_rows()
    least_costs = samples.least_padded_costs(rows.order.tolist())
    cuts = least_padded_cuts(rows)
    assert len(cuts[-1]) - 1 == min(least_costs)
    for bounds in cuts:
        microbatches = microbatches_of(rows, bounds)
        samples.check_cut(microbatches)
        cost = sum(map(samples.padded_cost, microbatches))
        assert cost == pytest.approx(least_costs[len(microbatches)])


@pytest.mark.parametrize('price', [0.5, 5.0, 50.0])
def test_sorted_contiguous_cuts_beat_all_partitions(price):
    """The planner rests on this claim. Every partition of five rows is tried."""
    samples = Samples([9, 4, 7, 2, 5], max_tokens=18)
    costs = []
    for partition in partitions(list(range(5))):
        if all(map(samples.fit, partition)):
            costs.append(sum(map(samples.padded_cost, partition)) + price * len(partition))
    rows = samples.sorted_rows()
    microbatches = microbatches_of(rows, least_padded_cut(rows.row_costs, rows.reach, price))
    cost = sum(map(samples.padded_cost, microbatches)) + price * len(microbatches)
    assert cost == pytest.approx(min(costs))


# Cuts filled up to a limit, and of equal cost


def test_filled_microbatches_are_the_fewest():
    rows = Samples([7, 7, 7, 7, 2, 2, 2], max_tokens=14).sorted_rows()
    without_limit = fill(rows.row_costs, rows.vision, rows.reach, np.inf)
    assert microbatches_of(rows, without_limit) == [[0, 1], [2, 3], [4, 5, 6]]
    # A row of 7 is over this limit by itself. Two rows of 2 fit.
    under_limit = fill(rows.row_costs, rows.vision, rows.reach, 5.0)
    assert microbatches_of(rows, under_limit) == [[0], [1], [2], [3], [4, 5], [6]]


def least_costliest(rows, count) -> float:
    """Returns the least cost of the costliest microbatch of any cut into at most `count`, by exhaustive search."""

    @functools.cache
    def best(start: int, left: int) -> float:
        if start == len(rows):
            return 0.0
        if left == 0:
            return float('inf')
        costs = []
        for end in range(start + 1, int(rows.reach[start]) + 1):
            costliest = max(cost_between(rows, start, end), best(end, left - 1))
            costs.append(costliest)
        return min(costs)

    return best(0, count)


def cost_between(rows, start, end) -> float:
    text = (end - start) * rows.row_costs[start]
    return text + rows.vision[end] - rows.vision[start]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=10),
    st.integers(1, 90),
    st.integers(0, 9),
)
@example([(1, 0), (4, 7), (5, 9)], 8, 0)  # two rows that fill the cap cost as much as the limit, except for rounding
def test_costliest_microbatch_matches_exhaustive_search(drawn, max_tokens, num_more):
    lengths = [length for length, _ in drawn]
    images = [num_images for _, num_images in drawn]
    samples = Samples(lengths, max_tokens, images=images, max_images=25)
    rows = samples.sorted_rows(CostModel(vision_per_token=0.7, launch=5.0))
    fewest = len(fill(rows.row_costs, rows.vision, rows.reach, np.inf)) - 1
    count = fewest + num_more
    bounds = equal_cost_cut(rows.row_costs, rows.vision, rows.reach, count)
    assert len(bounds) - 1 <= count
    samples.check_cut(microbatches_of(rows, bounds))
    costliest = max(cost_between(rows, start, end) for start, end in pairwise(bounds))
    assert costliest == pytest.approx(least_costliest(rows, count), rel=2e-4)


# Splitting microbatches further


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 30))
def test_largest_microbatch_is_split_first(lengths, count):
    lengths.sort(reverse=True)
    num_rows = len(lengths)
    halves = sorted({0, num_rows // 2, num_rows})
    most_bounds = min(count, num_rows) + 1
    expected = list(halves)
    while len(expected) < most_bounds:
        middles = {}  # of the first microbatch with each number of padded tokens
        for start, end in pairwise(expected):
            num_padded = (end - start) * lengths[start]
            if end - start > 1:
                middles.setdefault(num_padded, (start + end) // 2)
        largest = max(middles)
        expected = sorted([*expected, middles[largest]])
    bounds = split_largest(np.array(lengths, dtype=float), np.array(halves), count)
    assert bounds.tolist() == expected


# The rows of one rank


def test_width_multiple_counts_against_the_cap():
    lengths = [9, 9]
    exact = CutOptions(max_tokens=20)
    rounded = CutOptions(max_tokens=20, width_multiple=8)
    assert sorted(cut_rows(lengths, exact)) == [[0, 1]]
    assert sorted(cut_rows(lengths, rounded)) == [[0], [1]]
    # Rounding stops at the width of the collated batch.
    assert sorted(cut_rows(lengths, rounded, max_width=10)) == [[0, 1]]


def test_rounding_makes_no_row_oversize():
    """A row that is longer than the limit keeps its length."""
    widths = padded_widths(np.array([3, 9, 12]), multiple=8, limit=10)
    assert widths.tolist() == [8, 10, 12]
