# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cuts of least padded cost that keep the given order of rows, by dynamic programming."""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['least_cost_in_order']


@compiled
def least_cost_in_order(
    widths: np.ndarray,
    row_costs: np.ndarray,
    images: np.ndarray,
    max_tokens: int,
    max_image_tokens: int,
    count: int,
    penalty: float,
) -> tuple[np.ndarray, int]:
    """Cut rows in the order they have, in O(n * rows of a microbatch), times `count` where one is asked for.

    Args:
        widths: Width of each row in tokens, int64 (n,).
        row_costs: Cost of one row of each width, float64 (n,).
        images: Image tokens of each row, int64 (n,).
        max_tokens: Token budget of a microbatch.
        max_image_tokens: Image budget of a microbatch.
        count: Number of microbatches, or 0 for whatever costs least.
        penalty: Price of a microbatch where `count` is 0.

    Returns:
        Bounds of the microbatches, from 0 to n, int64 (K + 1,), and the least number that the caps allow. Where
        `count` is less than that, the bounds are empty.
    """
    n = len(widths)
    # What a microbatch that ends before `end` may start at, at the earliest: the caps forbid all that is longer.
    earliest = np.zeros(n + 1, dtype=np.int64)
    needed = np.zeros(n + 1, dtype=np.int64)
    for end in range(1, n + 1):
        start = end - 1
        width = widths[start]
        total = images[start]
        while start > 0:
            width = max(width, widths[start - 1])
            total += images[start - 1]
            if (end - start + 1) * width > max_tokens or total > max_image_tokens:
                break
            start -= 1
        earliest[end] = start
        needed[end] = needed[start] + 1
    fewest = needed[n]
    if 0 < count < fewest:
        return np.zeros(0, dtype=np.int64), fewest
    layers = max(count, 1)
    totals = np.full((layers + 1, n + 1), np.inf)
    last = np.zeros((layers + 1, n + 1), dtype=np.int64)
    totals[0, 0] = 0.0
    for layer in range(1, layers + 1):
        # Without a count all microbatches share one layer, and each pays its price.
        source = layer if count == 0 else layer - 1
        totals[source, 0] = 0.0 if source == 0 or count == 0 else np.inf
        for end in range(1, n + 1):
            dearest = 0.0
            for start in range(end - 1, earliest[end] - 1, -1):
                dearest = max(dearest, row_costs[start])
                total = totals[source, start] + (end - start) * dearest + penalty
                if total < totals[layer, end]:
                    totals[layer, end] = total
                    last[layer, end] = start
    return _trace_back(last, count), fewest


@compiled
def _trace_back(last: np.ndarray, count: int) -> np.ndarray:
    """Bounds of the best cut, from the start of the last microbatch before each end; layer by layer with a count."""
    layer = last.shape[0] - 1
    end = last.shape[1] - 1
    backwards = [end]
    while end > 0:
        end = last[layer, end]
        backwards.append(end)
        if count > 0:
            layer -= 1
    return np.array(backwards[::-1], dtype=np.int64)
