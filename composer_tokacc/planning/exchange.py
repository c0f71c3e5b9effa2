# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exchanges that take load off the slowest rank, after microbatches were shared longest first."""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['exchange']

CLOSE_ENOUGH = 1e-3
"""Excess of the slowest rank over the mean at which it is left alone."""


@compiled
def exchange(costs: np.ndarray, ranks: np.ndarray, num_ranks: int, may_move: bool) -> tuple[np.ndarray, float]:
    """Swap a microbatch of the slowest rank for a cheaper one elsewhere, or give it away, as long as that helps.

    Every round takes the exchange after which the slower of the two ranks is fastest, so the slowest rank never becomes
    slower. Rounds are limited to four a rank.

    Args:
        costs: Cost of each microbatch, float64 (K,).
        ranks: Rank of each microbatch, int64 (K,), every rank at least once.
        num_ranks: Number of ranks.
        may_move: Whether ranks may have unequal numbers of microbatches; if not, only swaps are made.

    Returns:
        The rank of each microbatch, int64 (K,), and the load of the slowest rank.
    """
    ranks = ranks.copy()
    loads = np.zeros(num_ranks)
    held = np.zeros(num_ranks, dtype=np.int64)
    total = 0.0
    for k in range(len(costs)):
        loads[ranks[k]] += costs[k]
        held[ranks[k]] += 1
        total += costs[k]
    enough = total / num_ranks * (1.0 + CLOSE_ENOUGH)
    for _ in range(4 * num_ranks):
        slowest = np.argmax(loads)
        if loads[slowest] <= enough:
            break
        given, taken, target = _best_exchange(costs, ranks, loads, slowest, may_move and held[slowest] > 1)
        if given < 0:
            break
        ranks[given] = target
        if taken < 0:
            held[slowest] -= 1
            held[target] += 1
        else:
            ranks[taken] = slowest
        saving = costs[given] - (costs[taken] if taken >= 0 else 0.0)
        loads[slowest] -= saving
        loads[target] += saving
    return ranks, loads.max()


@compiled
def _best_exchange(costs, ranks, loads, slowest, may_move):  # noqa: ANN001, ANN202 - typed by numba
    """The microbatch to give, the one to take (-1: none) and the other rank; (-1, -1, -1) where nothing helps."""
    best = loads[slowest] * (1.0 - 1e-9)
    given = -1
    taken = -1
    target = -1
    idlest = np.argmin(loads)
    for k in range(len(costs)):
        if ranks[k] != slowest:
            continue
        for other in range(len(costs)):
            rank = ranks[other]
            saving = costs[k] - costs[other]
            if rank == slowest or saving <= 0.0:
                continue
            slower = max(loads[slowest] - saving, loads[rank] + saving)
            if slower < best:
                best = slower
                given, taken, target = k, other, rank
        slower = max(loads[slowest] - costs[k], loads[idlest] + costs[k])
        if may_move and slower < best:
            best = slower
            given, taken, target = k, -1, idlest
    return given, taken, target
