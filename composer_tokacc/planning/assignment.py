# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Assignment of microbatches to ranks: longest processing time first and rebalanced, or step slots of similar cost.

``costs`` is the cost of each microbatch, float64 (K,), and ``ranks`` the rank of each, int64 (K,).
:func:`assign_longest_first` and :func:`rebalance` return ranks and the load of the slowest rank.
"""

from __future__ import annotations

import heapq

import numpy as np

from composer_tokacc.planning.compiled import compiled

CLOSE_ENOUGH = 1e-3
"""Excess of the slowest rank over the mean at which rebalancing stops. Predicted times of steps are ten times less
exact."""


@compiled
def assign_longest_first(
    costs: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Gives the costliest remaining microbatch to the least loaded rank (Graham 1969), in O(K log K)."""
    ranks = np.zeros(len(costs), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # ties go to the lower rank
    greatest_load = 0.0
    for k in np.argsort(-costs, kind='mergesort'):
        # So far: all costlier microbatches are placed, and the top of the heap is the least loaded rank.
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
    """Swaps a microbatch of the slowest rank for a cheaper one elsewhere, or gives it away, as long as that helps.

    An exchange changes two ranks. Every round takes the exchange after which the slower of the two is as fast as
    possible, so the slowest rank never becomes slower. There are at most four rounds a rank, to bound the time. Every
    rank must have a microbatch, and keeps at least one.
    """
    ranks = ranks.copy()
    loads = np.zeros(num_ranks)
    counts = np.zeros(num_ranks, dtype=np.int64)
    total = 0.0
    for k in range(len(costs)):
        loads[ranks[k]] += costs[k]
        counts[ranks[k]] += 1
        total += costs[k]
    close_to_mean = total / num_ranks * (1.0 + CLOSE_ENOUGH)
    for _ in range(4 * num_ranks):
        # So far: loads and counts agree with ranks, and no rank is slower than the slowest one was at the start.
        slowest = np.argmax(loads)
        if loads[slowest] <= close_to_mean:
            break
        outgoing, incoming, target = _best_exchange(costs, ranks, loads, slowest, counts[slowest] > 1)
        if outgoing < 0:
            break  # no exchange makes the slower of the two ranks faster
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
    best = loads[slowest] * (1.0 - 1e-9)  # a gain that is only rounding does not count
    outgoing = -1
    incoming = -1
    target = -1
    idlest = np.argmin(loads)
    for k in range(len(costs)):
        if ranks[k] != slowest:
            continue
        cost = costs[k]
        for other in range(len(costs)):
            rank = ranks[other]
            saving = cost - costs[other]
            if rank == slowest or saving <= 0.0:
                continue  # the slowest rank would become no faster
            # Whichever of the two is slower after the swap; every other rank stays as it is.
            slower = max(loads[slowest] - saving, loads[rank] + saving)
            if slower < best:
                best = slower
                outgoing = k
                incoming = other
                target = rank
        # Or the microbatch is given away, to the least loaded rank.
        slower = max(loads[slowest] - cost, loads[idlest] + cost)
        if may_give_away and slower < best:
            best = slower
            outgoing = k
            incoming = -1
            target = idlest
    return outgoing, incoming, target


@compiled
def best_slot_order(
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Returns the cost by which to sort microbatches into step slots, (K,), and the time of all slots.

    Ranks that gather each layer's weights together wait for each other twice in a microbatch: at the end of the vision
    encoder, and at the end of the microbatch. So a slot takes the time of its slowest encoder plus the time of its
    slowest remainder. ``vision`` is the cost of each microbatch in the encoder, ``text`` all other cost, float64 (K,).

    Without images, sorting by cost is optimal. Take any slots, the slowest first. The first k of them hold
    k * num_ranks microbatches, so one of the k * num_ranks + 1 costliest microbatches is in a slot after them. So the
    slowest slot after them costs at least as much as the cheapest of these microbatches. Sorted slots cost just that.

    With images three orders are tried: by text, by vision and by their sum. The order by text is best if all images are
    equal, and the order by vision if all texts are equal.
    """
    best = text
    least = _slots_time(text, text, vision, num_ranks)
    if vision.max() > 0.0:
        for order_by in (text + vision, vision):
            time = _slots_time(order_by, text, vision, num_ranks)
            if time < least:
                least = time
                best = order_by
    return best, least


@compiled
def _slots_time(
    order_by: np.ndarray,
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> float:
    """Returns the time of all slots if microbatches are sorted by one cost, the greatest first."""
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

    K is a multiple of `num_ranks`. The k-th costliest microbatches of all ranks are a slot. The loads of the ranks stay
    close, too.
    """
    # In snake order (0, 1, 2, 2, 1, 0, 0, ...) the rank with the costliest of one slot gets the cheapest of the next.
    slot, place = np.divmod(np.arange(len(costs)), num_ranks)
    snake = np.where(slot % 2 == 0, place, num_ranks - 1 - place)
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[np.argsort(-costs, kind='stable')] = snake
    return ranks
