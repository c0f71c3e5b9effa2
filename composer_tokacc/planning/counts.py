# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Raising the number of microbatches by splitting the largest, never by dropping or repeating a sample."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['raise_bounds', 'raise_count']


@compiled
def raise_bounds(row_costs: np.ndarray, bounds: np.ndarray, count: int) -> np.ndarray:
    """Split the dearest microbatch of a sorted cut in two halves until there are `count`, or one row each.

    Args:
        row_costs: Cost of one row at the width of each row, not increasing, float64 (n,).
        bounds: Bounds of the microbatches, from 0 to n, int64 (K + 1,).
        count: Number of microbatches to reach.

    Returns:
        Bounds of `min(count, n)` microbatches (or of K, if that is more).
    """
    heap = [(0.0, 0, 0)]
    heap.pop()
    for k in range(len(bounds) - 1):
        start = bounds[k]
        end = bounds[k + 1]
        # Microbatches of one row sink to the end of the heap: they cannot be split.
        heapq.heappush(heap, (-row_costs[start] * (end - start) if end - start > 1 else 1.0, start, end))
    while len(heap) < count and heap[0][0] < 0.0:
        start, end = heap[0][1], heap[0][2]
        middle = (start + end) // 2
        heapq.heapreplace(heap, (-row_costs[start] * (middle - start) if middle - start > 1 else 1.0, start, middle))
        heapq.heappush(heap, (-row_costs[middle] * (end - middle) if end - middle > 1 else 1.0, middle, end))
    raised = np.zeros(len(heap) + 1, dtype=np.int64)
    k = 1
    for item in heap:
        raised[k] = item[2]
        k += 1
    raised.sort()
    return raised


def raise_count(microbatches: Sequence[Sequence[int]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Split the largest microbatch, halfway down its rows, until there are `count` microbatches.

    Rows keep their order: the concatenation of the result is the concatenation of what came in, except that halves
    take the place of the whole. Where there are fewer rows than `count`, one microbatch a row comes back, and the
    caller adds `count - len(result)` zero-weight copies.

    Args:
        microbatches: Row indices of each microbatch.
        count: Number of microbatches to reach.
        lengths: Length in tokens of every row that the indices point to.

    Returns:
        `count` microbatches, fewer where rows run out, or all that came in where they are more already.

    Raises:
        ValueError: A microbatch is empty.

    Example:
        >>> raise_count([[0, 1, 2, 3], [4]], 3, [5, 5, 3, 3, 9])
        [[0, 1], [2, 3], [4]]
    """
    if any(len(rows) == 0 for rows in microbatches):
        raise ValueError('`microbatches` must not be empty lists, got: one without rows. Leave it out.')
    raised = [list(rows) for rows in microbatches]
    areas = [_area(rows, lengths) for rows in raised]
    while len(raised) < count and max(areas, default=0) > 0:
        k = areas.index(max(areas))
        rows = raised[k]
        halves = [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
        raised[k : k + 1] = halves
        areas[k : k + 1] = [_area(half, lengths) for half in halves]
    return raised


def _area(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """Padded area of a microbatch that can be split, 0 for a single row."""
    return len(rows) * max(int(lengths[row]) for row in rows) if len(rows) > 1 else 0
