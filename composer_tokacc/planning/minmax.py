# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cuts whose dearest microbatch is as cheap as possible, by bisection over its cost."""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled
from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.rows import SortedRows

__all__ = ['min_max_cut']

PRECISION = 1e-4
"""Relative width at which the bisection stops; one row more or less matters far more."""


def min_max_cut(rows: SortedRows, count: int, cost: CostModel) -> np.ndarray | None:
    """Cut sorted rows into at most `count` microbatches of nearly equal cost.

    Args:
        rows: The sorted rows.
        count: Number of microbatches that must not be exceeded.
        cost: The cost model; what a launch costs does not matter here.

    Returns:
        Bounds of the microbatches, int64 (K + 1,) with K <= `count`, or None where the caps allow no such cut.
    """
    bounds = _min_max(rows.row_costs, rows.images * cost.vision_per_token, rows.reach, count)
    return bounds if len(bounds) else None


@compiled
def _fill(row_costs, vision, reach, limit, count, bounds):  # noqa: ANN001, ANN202 - typed by numba
    """Fill microbatches up to `limit` each; True if at most `count` are enough. Writes the bounds."""
    n = len(row_costs)
    start = 0
    used = 0
    while start < n:
        if used == count:
            return used, False
        low = start + 1  # a row goes alone, if it must
        high = reach[start]
        while low < high:
            middle = (low + high + 1) // 2
            if (middle - start) * row_costs[start] + (vision[middle] - vision[start]) <= limit:
                low = middle
            else:
                high = middle - 1
        start = low
        used += 1
        bounds[used] = start
    return used, True


@compiled
def _min_max(row_costs, vision, reach, count):  # noqa: ANN001, ANN202 - typed by numba
    n = len(row_costs)
    bounds = np.zeros(n + 1, dtype=np.int64)
    low = 0.0
    high = 0.0
    for start in range(n):
        # Added up as in _fill: rounded otherwise, the dearest microbatch could be over a limit that is its own.
        low = max(low, row_costs[start] + (vision[start + 1] - vision[start]))
        high = max(high, (reach[start] - start) * row_costs[start] + (vision[reach[start]] - vision[start]))
    used, enough = _fill(row_costs, vision, reach, high, count, bounds)
    if not enough:
        return bounds[:0].copy()
    used, enough = _fill(row_costs, vision, reach, low, count, bounds)
    if enough:
        return bounds[: used + 1].copy()
    while high - low > PRECISION * high:
        middle = 0.5 * (low + high)
        used, enough = _fill(row_costs, vision, reach, middle, count, bounds)
        if enough:
            high = middle
        else:
            low = middle
    used, enough = _fill(row_costs, vision, reach, high, count, bounds)
    return bounds[: used + 1].copy()
