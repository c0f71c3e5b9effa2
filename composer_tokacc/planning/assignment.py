# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Assignment of microbatches to ranks: so that all ranks have equal loads, or in step slots of similar cost.

Everywhere ``costs`` is the cost of each of K microbatches, float64 (K,), and ``ranks`` the rank of each, int64 (K,).
The load of a rank is the summed cost of its microbatches. A step slot is what all ranks compute at the same time: one
microbatch of each rank.
"""

from __future__ import annotations

import heapq

import numpy as np

from composer_tokacc.planning.compiled import compiled

CLOSE_ENOUGH = 1e-3
"""Rebalancing stops when the greatest load exceeds the mean load by this share. Predicted times of steps are off by ten
times as much."""


@compiled
def assign_longest_first(
    costs: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Gives each microbatch, the costliest first, to the rank with the least load so far (Graham 1969).

    Returns:
        The ranks, and the greatest load.
    """
    ranks = np.zeros(len(costs), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # ties go to the lower rank
    greatest_load = 0.0
    for k in np.argsort(-costs, kind='mergesort'):
        # So far: all costlier microbatches have a rank, and the top of the heap is the rank with the least load.
        load, rank = heap[0]
        load += float(costs[k])
        ranks[k] = rank
        greatest_load = max(greatest_load, load)
        heapq.heapreplace(heap, (load, rank))
    return ranks, greatest_load


@compiled
def rebalance(
    costs: np.ndarray,
    ranks: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Moves microbatches away from the rank with the greatest load, as long as that lowers the greatest load.

    In each round the rank with the greatest load exchanges a microbatch for a cheaper one of another rank, or gives one
    away. Of all possible exchanges it takes the one after which the greater load of the two ranks is least. There are
    at most four rounds a rank, to limit the time of a plan. Every rank must have a microbatch, and keeps at least one.

    Returns:
        The new ranks, and the greatest load.
    """
    ranks = ranks.copy()
    loads = np.bincount(ranks, costs, num_ranks)
    counts = np.bincount(ranks, None, num_ranks)
    total = 0.0  # not `costs.sum()`, which numpy and numba round differently
    for cost in costs:
        total += cost
    close_to_mean = total / num_ranks * (1.0 + CLOSE_ENOUGH)
    for _ in range(4 * num_ranks):
        # So far: loads and counts are those of `ranks`, and the greatest load has not grown.
        slowest = np.argmax(loads)
        if loads[slowest] <= close_to_mean:
            break
        outgoing, incoming, target = _best_exchange(costs, ranks, loads, slowest, counts[slowest] > 1)
        if outgoing < 0:
            break  # no exchange helps
        ranks[outgoing] = target
        saving = costs[outgoing]
        if incoming < 0:
            counts[slowest] -= 1
            counts[target] += 1
        else:
            ranks[incoming] = slowest
            saving -= costs[incoming]
        loads[slowest] -= saving
        loads[target] += saving
    return ranks, loads.max()


@compiled
def _best_exchange(
    costs: np.ndarray,
    ranks: np.ndarray,
    loads: np.ndarray,
    slowest: int | np.intp,
    may_give_away: bool | np.bool_,
) -> tuple[int, int, int | np.intp]:
    """Returns the microbatch that the slowest rank gives, the one that it gets, and the other rank.

    The second is -1 if it gets none. All are -1 if no exchange helps.
    """
    # The greater load of the two ranks after the best exchange so far. A gain that is only rounding does not count.
    best = loads[slowest] * (1.0 - 1e-9)
    outgoing = -1
    incoming = -1
    target = -1
    fastest = np.argmin(loads)
    for k in range(len(costs)):
        if ranks[k] != slowest:
            continue
        cost = costs[k]
        for other in range(len(costs)):
            rank = ranks[other]
            saving = cost - costs[other]
            if rank == slowest or saving <= 0.0:
                continue  # the load of the slowest rank would not fall
            greater_load = max(loads[slowest] - saving, loads[rank] + saving)
            if greater_load < best:
                best = greater_load
                outgoing = k
                incoming = other
                target = rank
        # Or the microbatch is given away, to the rank with the least load.
        greater_load = max(loads[slowest] - cost, loads[fastest] + cost)
        if may_give_away and greater_load < best:
            best = greater_load
            outgoing = k
            incoming = -1
            target = fastest
    return outgoing, incoming, target


@compiled
def best_slot_order(
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Returns the cost by which to sort microbatches into step slots, float64 (K,), and the time of all slots.

    Ranks that gather each layer's weights together also compute each layer at the same time. One rank of the slot is
    the slowest in all layers of the vision encoder, and one, perhaps another, in all layers after it. So a slot takes
    the time of its slowest encoder plus the time of its slowest remainder.

    Without images, sorting by cost is optimal, for this reason. Take any slots, the slowest first. The first k of them
    hold k * num_ranks microbatches. So one of the k * num_ranks + 1 costliest microbatches is in a later slot, and slot
    k + 1 takes at least as long as the cheapest of these. If microbatches are sorted by cost, this cheapest one is the
    first of slot k + 1, which takes just its time.

    With images three orders are tried: by text, by vision and by their sum. The order by text is best if all images are
    equal, and the order by vision if all texts are equal.

    Args:
        text: Cost of each microbatch outside the vision encoder, float64 (K,).
        vision: Cost of each microbatch in the vision encoder, float64 (K,).
        num_ranks: Number of ranks, which is the size of a slot.
    """
    best = text
    least = _time_of_slots(text, text, vision, num_ranks)
    if vision.max() > 0.0:
        for order_by in (text + vision, vision):
            time = _time_of_slots(order_by, text, vision, num_ranks)
            if time < least:
                least = time
                best = order_by
    return best, least


@compiled
def _time_of_slots(
    order_by: np.ndarray,
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> float:
    """Returns the time of all slots if microbatches are sorted by ``order_by``, the greatest first."""
    order = np.argsort(-order_by, kind='mergesort')
    time = 0.0
    # Every slot takes the next `num_ranks` microbatches, one a rank.
    for start in range(0, len(order), num_ranks):
        slowest_text = 0.0
        slowest_vision = 0.0
        for k in order[start : start + num_ranks]:
            slowest_text = max(slowest_text, text[k])
            slowest_vision = max(slowest_vision, vision[k])
        time += slowest_text + slowest_vision
    return float(time)


def assign_slots(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns the rank of each microbatch, so that microbatches of similar cost share a step slot.

    The costliest ``num_ranks`` microbatches are the first slot, the next ones the second, and so on. K is a multiple of
    ``num_ranks``. Ranks take them in snake order (0, 1, 2, 2, 1, 0, 0, ...): the rank with the costliest microbatch of
    one slot gets the cheapest of the next, so that the loads of the ranks stay close.
    """
    slot, place = np.divmod(np.arange(len(costs)), num_ranks)
    snake = np.where(slot % 2 == 0, place, num_ranks - 1 - place)
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[np.argsort(-costs, kind='stable')] = snake
    return ranks
