# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which rows the comparison of cuts packs together, and in which order."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from types import SimpleNamespace

import pytest

from composer_tokacc.checks.comparison import RowComparison


@pytest.mark.parametrize('largest_packed_row', [0, 5, 18, 19, 36, 37, 100])
def test_order_of_packed_rows(largest_packed_row):
    """Each row comes before and after each other one, also if only neighbours count, and is packed by itself."""
    lengths = [9, 6, 3]
    comparison = RowComparison.__new__(RowComparison)
    comparison._facts = SimpleNamespace(lengths=lengths)
    comparison._all_rows = [0, 1, 2]
    comparison._single_rows = [[0], [1], [2]]
    packed_rows = []
    comparison._check_microbatches = lambda assemble, groups, cut_kind: packed_rows.extend(groups)

    comparison._check_packed_rows(None, largest_packed_row)

    neighbours = set()
    earlier_and_later = set()
    for rows in packed_rows:
        neighbours.update(pairwise(rows))
        earlier_and_later.update(combinations(rows, 2))
    assert earlier_and_later >= set(permutations(range(3), 2))
    assert {(later, earlier) for earlier, later in neighbours} == neighbours
    assert [rows for rows in packed_rows if len(rows) == 1] == [[0], [1], [2]]
    largest = max(sum(lengths[row] for row in rows) for rows in packed_rows)
    assert largest_packed_row <= largest < max(largest_packed_row, 1) + sum(lengths)
