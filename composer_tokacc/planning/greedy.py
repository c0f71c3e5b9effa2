# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The greedy cut: fill each microbatch to the cap. Fewest microbatches possible in the sorted order."""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['greedy_cut']


@compiled
def greedy_cut(reach: np.ndarray) -> np.ndarray:
    """Let every microbatch end where it must at the latest.

    Args:
        reach: Latest end of a microbatch from each row, int64 (n,).

    Returns:
        Bounds of the microbatches, from 0 to n, int64 (K + 1,).
    """
    n = len(reach)
    bounds = np.zeros(n + 1, dtype=np.int64)
    count = 0
    end = 0
    while end < n:
        end = reach[end]
        count += 1
        bounds[count] = end
    return bounds[: count + 1].copy()
