# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The cost model, with numbers by hand."""

from __future__ import annotations

from composer_tokacc.planning import CostModel


def test_packed_row_costs_its_documents():
    """Attention is only over the tokens of the same document."""
    cost = CostModel(quadratic=100.0, document=3.0, launch=50.0)
    first = 10 + 10 * 10 / 100
    second = 20 + 20 * 20 / 100
    assert cost.packed([10, 20]) == first + second + 2 * 3 + 50
