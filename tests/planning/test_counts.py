# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import cut, raise_count
from composer_tokacc.planning.counts import raise_bounds
from tests.planning.reference import check_cut, sorted_rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 120), st.integers(1, 30))
def test_count_is_reached_and_nothing_lost(lengths, max_tokens, count):
    before = cut(lengths, max_tokens)
    after = raise_count(before, count, lengths)
    assert len(after) == max(len(before), min(count, len(lengths)))
    check_cut(after, lengths, max_tokens)
    assert sum(max(lengths[i] for i in rows) * len(rows) for rows in after) <= sum(
        max(lengths[i] for i in rows) * len(rows) for rows in before
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 30))
def test_sorted_bounds_are_raised_within_the_old_ones(lengths, count):
    rows = sorted_rows(lengths, 10**6)
    start = [0, len(lengths) // 2, len(lengths)] if len(lengths) > 1 else [0, 1]
    bounds = raise_bounds(rows.row_costs, np.array(start), count)
    assert len(bounds) - 1 == max(len(start) - 1, min(count, len(lengths)))
    assert set(start) <= set(bounds.tolist())
    assert np.all(np.diff(bounds) > 0)


def test_order_is_kept():
    assert raise_count([[0, 1], [2, 3, 4], [5]], 4, [6, 1, 5, 5, 5, 100]) == [[0, 1], [2, 3], [4], [5]]


def test_what_came_in_is_left_alone():
    given_in = [[0, 1, 2]]
    raise_count(given_in, 3, [1, 1, 1])
    assert given_in == [[0, 1, 2]]


def test_empty_microbatch_is_refused():
    with pytest.raises(ValueError, match='must not be empty'):
        raise_count([[0], []], 2, [1])
