# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sharing microbatches among ranks: longest processing time first, or columns of like cost."""

from __future__ import annotations

import heapq

import numpy as np

from composer_tokacc.planning.compiled import compiled

__all__ = ['column_time', 'share_columns', 'share_longest_first']


@compiled
def share_longest_first(costs: np.ndarray, num_ranks: int, max_per_rank: int) -> tuple[np.ndarray, float]:
    """Give the dearest remaining microbatch to the least loaded rank (Graham 1969), in O(K log K).

    Args:
        costs: Cost of each microbatch, float64 (K,).
        num_ranks: Number of ranks.
        max_per_rank: Microbatches that no rank may exceed; K <= num_ranks * max_per_rank.

    Returns:
        The rank of each microbatch, int64 (K,), and the load of the slowest rank.
    """
    ranks = np.zeros(len(costs), dtype=np.int64)
    held = np.zeros(num_ranks, dtype=np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # ties go to the lower rank
    slowest = 0.0
    for k in np.argsort(-costs, kind='mergesort'):
        load = heap[0][0] + float(costs[k])
        rank = heap[0][1]
        ranks[k] = rank
        held[rank] += 1
        slowest = max(slowest, load)
        if held[rank] < max_per_rank:
            heapq.heapreplace(heap, (load, rank))
        else:
            heapq.heappop(heap)
    return ranks, slowest


@compiled
def column_time(costs: np.ndarray, num_ranks: int) -> float:
    """Sum over columns of the slowest microbatch, when microbatches of like cost run side by side.

    Sorting by cost is optimal: whatever the columns, the k-th dearest of their slowest microbatches is at least the
    one in place k * num_ranks of all microbatches sorted by cost.

    Args:
        costs: Cost of each microbatch, float64 (K,).
        num_ranks: Number of ranks, microbatches in a column.

    Returns:
        The time of the step in which ranks wait for each other after every microbatch.
    """
    dearest_first = -np.sort(-costs)
    total = 0.0
    for k in range(0, len(costs), num_ranks):
        total += dearest_first[k]
    return total


@compiled
def share_columns(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Deal microbatches of like cost side by side, to and fro, so that the sums of the ranks stay close as well.

    Args:
        costs: Cost of each microbatch, float64 (K,), K a multiple of `num_ranks`.
        num_ranks: Number of ranks.

    Returns:
        Index of the microbatch of each column and rank, int64 (K / num_ranks, num_ranks); dearest column first.
    """
    order = np.argsort(-costs, kind='mergesort')
    table = np.zeros((len(costs) // num_ranks, num_ranks), dtype=np.int64)
    for k in range(len(costs)):
        column = k // num_ranks
        rank = k % num_ranks
        table[column, rank if column % 2 == 0 else num_ranks - 1 - rank] = order[k]
    return table
