# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sharing microbatches among ranks: longest processing time first and rebalanced, or columns of like cost.

Everywhere ``costs`` is the cost of each microbatch, float64 (K,), and ``ranks`` the rank of each, int64 (K,).
"""

from __future__ import annotations

import heapq

import numpy as np

from composer_tokacc.planning.compiled import compiled

CLOSE_ENOUGH = 1e-3
"""Excess of the slowest rank over the mean at which it is left alone: predicted steps are off by ten times as much."""


@compiled
def share_longest_first(costs: np.ndarray, num_ranks: int) -> tuple[np.ndarray, float]:
    """Give the costliest remaining microbatch to the least loaded rank (Graham 1969), in O(K log K).

    Returns:
        The ranks, and the load of the slowest of them.
    """
    ranks = np.zeros(len(costs), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # ties go to the lower rank
    slowest = 0.0
    for k in np.argsort(-costs, kind='mergesort'):
        load = heap[0][0] + float(costs[k])
        ranks[k] = heap[0][1]
        slowest = max(slowest, load)
        heapq.heapreplace(heap, (load, heap[0][1]))
    return ranks, slowest


@compiled
def rebalance(costs: np.ndarray, ranks: np.ndarray, num_ranks: int) -> tuple[np.ndarray, float]:
    """Swap a microbatch of the slowest rank for a cheaper one elsewhere, or give it away, as long as that helps.

    Every round takes the exchange after which the slower of the two ranks is fastest, so the slowest rank never becomes
    slower. Rounds are limited to four a rank. Every rank has at least one microbatch, before and after.

    Returns:
        The ranks, and the load of the slowest of them.
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
        # So far: loads and held agree with ranks, and no rank is slower than the slowest one was at the start.
        slowest = np.argmax(loads)
        if loads[slowest] <= enough:
            break
        given, taken, target = _best_exchange(costs, ranks, loads, slowest, held[slowest] > 1)
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
            # Whichever of the two is slower after the swap; every other rank stays as it is.
            slower = max(loads[slowest] - saving, loads[rank] + saving)
            if slower < best:
                best = slower
                given, taken, target = k, other, rank
        # Given away without return, to the rank that has most room for it.
        slower = max(loads[slowest] - costs[k], loads[idlest] + costs[k])
        if may_move and slower < best:
            best = slower
            given, taken, target = k, -1, idlest
    return given, taken, target


@compiled
def deal_columns(text: np.ndarray, vision: np.ndarray, num_ranks: int) -> tuple[np.ndarray, float]:
    """The cost by which microbatches are best dealt in columns, of like ones side by side.

    Ranks that gather each layer's weights together wait at the end of the vision tower as well as at the end of the
    microbatch, so a column takes its slowest tower and its slowest rest: ``vision`` is the cost of each microbatch in
    the tower, ``text`` all other cost, float64 (K,). Without a tower sorting is optimal: whatever the columns, the k-th
    costliest of their slowest microbatches is at least the one in place k * num_ranks of all microbatches sorted by
    cost. With one, whichever of both and their sum is best: where towers are equal it is the text, and vice versa.

    Returns:
        The cost, float64 (K,), and the sum over columns of the slowest tower and the slowest rest.
    """
    best = text
    least = _column_time(text, text, vision, num_ranks)
    if vision.max() > 0.0:
        for dealt in (text + vision, vision):
            time = _column_time(dealt, text, vision, num_ranks)
            if time < least:
                least = time
                best = dealt
    return best, least


@compiled
def _column_time(dealt, text, vision, num_ranks):  # noqa: ANN001, ANN202 - typed by numba
    """Time of the columns in order of one cost."""
    order = np.argsort(-dealt, kind='mergesort')
    time = 0.0
    for start in range(0, len(order), num_ranks):
        slowest_text = 0.0
        slowest_tower = 0.0
        for k in order[start : start + num_ranks]:
            slowest_text = max(slowest_text, text[k])
            slowest_tower = max(slowest_tower, vision[k])
        time += slowest_text + slowest_tower
    return time


def share_columns(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Deal microbatches of like cost side by side, in snake order, so that the sums of the ranks stay close as well.

    K is a multiple of `num_ranks`; the k-th costliest microbatches of all ranks are a column.
    """
    # Ranks 0, 1, 2, 2, 1, 0, 0, ...: who gets the costliest of one column gets the cheapest of the next.
    column, place = np.divmod(np.arange(len(costs)), num_ranks)
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[np.argsort(-costs, kind='stable')] = np.where(column % 2 == 0, place, num_ranks - 1 - place)
    return ranks
