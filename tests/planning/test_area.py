# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel
from composer_tokacc.planning.area import AreaCuts, least_cost_cut
from composer_tokacc.planning.greedy import greedy_cut
from tests.planning.reference import least_padded, sorted_rows

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def _padded(rows, bounds) -> float:
    return sum((end - start) * rows.row_costs[start] for start, end in pairwise(bounds))


def _price(width: int) -> float:
    return float(CostModel().rows(np.array([width]))[0])


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.randoms(use_true_random=False))
def test_every_count_costs_what_exhaustive_search_finds(lengths, max_tokens, random):
    rows = sorted_rows(lengths, max_tokens)
    truth = least_padded(rows.lengths.tolist(), max_tokens, _price)
    cuts = AreaCuts(rows)
    assert cuts.min_count == min(truth)
    counts = list(truth)
    random.shuffle(counts)  # corners found for one count must not spoil another
    for count in counts:
        bounds = cuts.exactly(count)
        assert len(bounds) == count + 1
        assert np.all(bounds[1:] <= rows.reach[bounds[:-1]])
        assert _padded(rows, bounds) == pytest.approx(truth[count])


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.floats(0.001, 0.5))
def test_tolerance_is_kept(lengths, max_tokens, tolerance):
    rows = sorted_rows(lengths, max_tokens)
    cuts = AreaCuts(rows, tolerance)
    for count, cost in least_padded(rows.lengths.tolist(), max_tokens, _price).items():
        bounds = cuts.exactly(count)
        assert len(bounds) == count + 1
        assert np.all(bounds[1:] <= rows.reach[bounds[:-1]])
        assert _padded(rows, bounds) <= cost * (1 + tolerance) + 1e-9


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 90), st.floats(0.0, 50.0))
def test_priced_cut_is_the_least_of_all_counts(lengths, max_tokens, penalty):
    rows = sorted_rows(lengths, max_tokens)
    truth = least_padded(rows.lengths.tolist(), max_tokens, _price)
    bounds = least_cost_cut(rows.row_costs, rows.reach, penalty)
    found = _padded(rows, bounds) + penalty * (len(bounds) - 1)
    assert found == pytest.approx(min(cost + penalty * count for count, cost in truth.items()))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=10), st.integers(1, 20))
def test_image_cap_in_the_sorted_order(samples, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    rows = sorted_rows(lengths, 60, images, max_images)
    sorted_images = np.diff(rows.images).tolist()
    truth = least_padded(rows.lengths.tolist(), 60, _price, images=sorted_images, max_images=max_images)
    cuts = AreaCuts(rows)
    assert cuts.min_count == min(truth)
    for count, cost in truth.items():
        assert _padded(rows, cuts.exactly(count)) == pytest.approx(cost)


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
        if all(len(block) * max(lengths[row] for row in block) <= max_tokens for block in partition):
            cost = sum(len(block) * _price(max(lengths[row] for row in block)) for block in partition)
            best[len(partition)] = min(best.get(len(partition), np.inf), cost)
    cuts = AreaCuts(sorted_rows(lengths, max_tokens))
    assert min(best) == cuts.min_count
    for count, cost in best.items():
        assert _padded(sorted_rows(lengths, max_tokens), cuts.exactly(count)) == pytest.approx(cost)


def test_greedy_fills_every_microbatch():
    rows = sorted_rows([7, 7, 7, 7, 2, 2, 2], 14)
    assert greedy_cut(rows.reach).tolist() == [0, 2, 4, 7]
