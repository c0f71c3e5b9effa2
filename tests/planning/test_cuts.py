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
    microbatches = []
    for start, end in pairwise(bounds):
        microbatches.append(order[start:end])
    return microbatches


def padded_cost(samples, microbatches) -> float:
    """Returns the cost of microbatches without vision and launch."""
    return sum(samples.padded_cost(rows) for rows in microbatches)


# Least padded cuts of sorted rows


def filled_cut(rows, limit):
    """Returns the cut into microbatches that are filled up to a limit of their cost."""
    return fill(rows.row_costs, rows.vision_before, rows.reach, limit)


@settings(max_examples=100, deadline=None)
@given(samples_under_caps())
def test_cuts_match_exhaustive_search(samples):
    """Each cut has the least padded cost of all cuts into as many microbatches. The last has the fewest."""
    rows = samples.sorted_rows()
    least_cost_of_count = samples.least_padded_costs(rows.order.tolist())

    cuts = least_padded_cuts(rows)

    last_cut = microbatches_of(rows, cuts[-1])
    assert len(last_cut) == min(least_cost_of_count)
    for bounds in cuts:
        microbatches = microbatches_of(rows, bounds)
        samples.check_cut(microbatches)
        least_cost = least_cost_of_count[len(microbatches)]
        assert padded_cost(samples, microbatches) == pytest.approx(least_cost)


@pytest.mark.parametrize('price', [0.5, 5.0, 50.0])
def test_sorted_contiguous_cuts_beat_all_partitions(price):
    """The planner rests on this claim. Every partition of five rows is tried. Each microbatch has a price."""
    samples = Samples([9, 4, 7, 2, 5], max_tokens=18)
    rows = samples.sorted_rows()

    def cost_with_prices(microbatches) -> float:
        return padded_cost(samples, microbatches) + price * len(microbatches)

    costs_of_partitions = []
    for partition in partitions([0, 1, 2, 3, 4]):
        if all(samples.fit(microbatch) for microbatch in partition):
            costs_of_partitions.append(cost_with_prices(partition))

    bounds = least_padded_cut(rows.row_costs, rows.reach, price)

    microbatches = microbatches_of(rows, bounds)
    least_cost = min(costs_of_partitions)
    assert cost_with_prices(microbatches) == pytest.approx(least_cost)


# Cuts filled up to a limit, and of equal cost


@pytest.mark.parametrize(
    ('limit', 'expected'),
    [
        pytest.param(np.inf, [[0, 1], [2, 3], [4, 5, 6]], id='no limit'),
        pytest.param(5.0, [[0], [1], [2], [3], [4, 5], [6]], id='two rows of 2, and a row of 7 is over it'),
    ],
)
def test_filled_microbatches_are_the_fewest(limit, expected):
    samples = Samples([7, 7, 7, 7, 2, 2, 2], max_tokens=14)
    rows = samples.sorted_rows()

    bounds = filled_cut(rows, limit)

    assert microbatches_of(rows, bounds) == expected


def least_costliest(rows, count) -> float:
    """Returns the least cost of the costliest microbatch of any cut into at most `count`, by exhaustive search."""

    @functools.cache
    def least_costliest_from(start: int, most_microbatches: int) -> float:
        """Returns the same for the rows from `start` on."""
        if start == len(rows):
            return 0.0
        if most_microbatches == 0:
            return float('inf')
        costs = []
        for end in range(start + 1, int(rows.reach[start]) + 1):
            cost_of_first = cost_between(rows, start, end)
            costliest_of_others = least_costliest_from(end, most_microbatches - 1)
            costs.append(max(cost_of_first, costliest_of_others))
        return min(costs)

    return least_costliest_from(0, count)


def cost_between(rows, start, end) -> float:
    """Returns the cost of the microbatch that starts at `start` and ends before `end`, without its launch."""
    text = (end - start) * rows.row_costs[start]
    vision = rows.vision_before[end] - rows.vision_before[start]
    return text + vision


LENGTH_AND_IMAGES = st.tuples(st.integers(1, 30), st.integers(0, 9))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(LENGTH_AND_IMAGES, min_size=1, max_size=10),
    st.integers(1, 90),
    st.integers(0, 9),
)
@example([(1, 0), (4, 7), (5, 9)], 8, 0)  # two rows that fill the cap cost as much as the limit, except for rounding
def test_costliest_microbatch_matches_exhaustive_search(drawn, max_tokens, num_more):
    lengths, images = zip(*drawn, strict=True)
    samples = Samples(
        lengths=list(lengths),
        images=list(images),
        max_tokens=max_tokens,
        max_images=25,
    )
    cost = CostModel(vision_per_token=0.7, launch=5.0)
    rows = samples.sorted_rows(cost)
    cut_into_fewest = microbatches_of(rows, filled_cut(rows, np.inf))
    count = len(cut_into_fewest) + num_more

    bounds = equal_cost_cut(rows.row_costs, rows.vision_before, rows.reach, count)

    microbatches = microbatches_of(rows, bounds)
    assert len(microbatches) <= count
    samples.check_cut(microbatches)
    costs = [cost_between(rows, start, end) for start, end in pairwise(bounds)]
    least_possible = least_costliest(rows, count)
    assert max(costs) == pytest.approx(least_possible, rel=2e-4)


def test_costs_without_a_float_between_them():
    """The bisection between two neighbouring floats must end."""
    smallest = 5e-324
    vision_before = smallest * np.arange(6.0)
    reach = np.full(5, 5)

    bounds = equal_cost_cut(np.zeros(5), vision_before, reach, 4)

    assert bounds[0] == 0
    assert bounds[-1] == 5
    assert len(bounds) - 1 <= 4


# Splitting microbatches further


def with_largest_halved(bounds, lengths) -> list[int]:
    """Returns the bounds with one more in the middle of the largest microbatch that has several rows."""
    middle_of_size = {}  # of the first microbatch of each size, rows times width
    for start, end in pairwise(bounds):
        num_rows = end - start
        size = num_rows * lengths[start]
        if num_rows > 1:
            middle_of_size.setdefault(size, (start + end) // 2)
    largest = max(middle_of_size)
    return sorted([*bounds, middle_of_size[largest]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 30))
def test_largest_microbatch_is_split_first(lengths, count):
    lengths.sort(reverse=True)
    num_rows = len(lengths)
    middle = num_rows // 2
    halves = [0, middle, num_rows] if middle > 0 else [0, num_rows]
    most_bounds = min(count, num_rows) + 1
    expected_bounds = halves
    while len(expected_bounds) < most_bounds:
        expected_bounds = with_largest_halved(expected_bounds, lengths)
    row_costs = np.array(lengths, dtype=float)

    bounds = split_largest(row_costs, np.array(halves), count)

    assert bounds.tolist() == expected_bounds


# The rows of one rank


def test_width_multiple_counts_against_the_cap():
    """Two rows of 9 tokens are 18. Rounded up to 16 columns each, they are over the cap of 20.

    Rounding stops at the width of the collated batch. If this is 10, they have 20.
    """
    lengths = [9, 9]
    exact = CutOptions(max_tokens=20)
    rounded = CutOptions(max_tokens=20, width_multiple=8)

    cut_by_length = cut_rows(lengths, exact)
    cut_by_rounded_width = cut_rows(lengths, rounded)
    cut_in_narrow_batch = cut_rows(lengths, rounded, max_width=10)

    assert sorted(cut_by_length) == [[0, 1]]
    assert sorted(cut_by_rounded_width) == [[0], [1]]
    assert sorted(cut_in_narrow_batch) == [[0, 1]]


def test_rounding_makes_no_row_oversize():
    """A row that is longer than the limit keeps its length."""
    lengths = np.array([3, 9, 12])

    widths = padded_widths(lengths, multiple=8, limit=10)

    assert widths.tolist() == [8, 10, 12]
