# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel
from composer_tokacc.planning.minmax import min_max_cut
from tests.planning.reference import sorted_rows

COST = CostModel(vision_per_token=0.7, launch=0.0)


def _dearest(rows, bounds) -> float:
    return max(
        (end - start) * rows.row_costs[start] + 0.7 * (rows.images[end] - rows.images[start])
        for start, end in pairwise(bounds)
    )


def _least_dearest(rows, count) -> float:
    @functools.cache
    def best(start: int, left: int) -> float:
        if start == len(rows):
            return 0.0
        if left == 0:
            return float('inf')
        ends = range(start + 1, int(rows.reach[start]) + 1)
        return min(max(_dearest(rows, [start, end]), best(end, left - 1)) for end in ends)

    return best(0, count)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=10),
    st.integers(1, 90),
    st.integers(1, 10),
)
@example([(1, 0), (4, 7), (5, 9)], 8, 2)  # the two rows that fill the cap are the limit itself, but for rounding
def test_dearest_microbatch_is_as_cheap_as_exhaustive_search_makes_it(samples, max_tokens, count):
    lengths, images = map(list, zip(*samples, strict=True))
    rows = sorted_rows(lengths, max_tokens, images, 25, cost=COST)
    truth = _least_dearest(rows, count)
    bounds = min_max_cut(rows, count, COST)
    if truth == float('inf'):
        assert bounds is None
    else:
        assert len(bounds) - 1 <= count
        assert all(end <= rows.reach[start] for start, end in pairwise(bounds))
        assert _dearest(rows, bounds) == pytest.approx(truth, rel=2e-4)
