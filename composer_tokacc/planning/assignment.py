# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Assignment of microbatches to ranks: so that all ranks have equal loads, or in step slots of similar cost.

Everywhere ``costs`` is the cost of each of K microbatches, float64 (K,), and ``ranks`` the rank of each, int64 (K,).
The load of a rank is the summed cost of its microbatches. A step slot is one microbatch of each rank, which
all ranks compute at the same time.
"""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled


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
    loads = np.zeros(num_ranks)
    for k in np.argsort(-costs, kind='mergesort'):  # 'stable', by a name that older numba knows
        # So far: all costlier microbatches have a rank.
        least_loaded = np.argmin(loads)  # ties go to the lower rank
        ranks[k] = least_loaded
        loads[least_loaded] += costs[k]
    return ranks, loads.max()


@compiled
def rebalance(
    costs: np.ndarray,
    ranks: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Lowers the load of the slowest rank, round after round, by an exchange with another rank.

    The slowest rank is the one with the greatest load. It exchanges a microbatch for a cheaper one, or gives one away.
    In each round all exchanges are compared by the greater load of the two ranks afterwards, and the one with the least
    is made. The rounds end if that load would not be lower than before. To limit the time of a plan, there are at most
    four times as many rounds as ranks. No rank loses its only microbatch, because the other rank would then be at least
    as slow.

    For example, if one rank has microbatches of cost 6 and 4 and another one of cost 2, their loads are 10 and 2. To
    give away the 4 makes them 6 and 6.

    Returns:
        The new ranks, and the greatest load.
    """
    # Each rank gets an empty microbatch of cost 0. To give a microbatch away is to exchange it for an empty one.
    costs = np.concatenate((costs, np.zeros(num_ranks)))
    ranks = np.concatenate((ranks, np.arange(num_ranks)))
    loads = np.bincount(ranks, costs, num_ranks)
    for _ in range(4 * num_ranks):
        # So far: the greatest load has not grown.
        slowest = np.argmax(loads)
        # The best exchange so far, and the greater load of the two ranks after it. At first there is none, so it must
        # beat the present load. A gain that is only rounding does not count.
        outgoing = -1
        incoming = -1
        least_load = loads[slowest] * (1.0 - 1e-9)
        exchangeable = np.flatnonzero(ranks != slowest)
        exchangeable_costs = costs[exchangeable]
        loads_of_their_ranks = loads[ranks[exchangeable]]
        for k in np.flatnonzero(ranks == slowest):
            for place in range(len(exchangeable)):
                saving = costs[k] - exchangeable_costs[place]
                greater_load = max(loads[slowest] - saving, loads_of_their_ranks[place] + saving)
                if greater_load < least_load:
                    least_load = greater_load
                    outgoing = k
                    incoming = exchangeable[place]
        if outgoing < 0:
            break  # no exchange helps
        ranks[outgoing] = ranks[incoming]
        ranks[incoming] = slowest
        loads = np.bincount(ranks, costs, num_ranks)
    return ranks[:-num_ranks], loads.max()


def best_slot_order(
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, float]:
    """Finds the best order in which to fill step slots, and the time of all slots.

    The order is returned as a cost of each microbatch, float64 (K,): the microbatches with the greatest of these costs
    are the first slot, the next ones the second, and so on.

    Ranks that gather each layer's weights together also compute each layer at the same time. One rank of the slot is
    the slowest in all layers of the vision encoder, and one, perhaps another, in all layers after it. So a slot takes
    the time of its slowest encoder plus the time of its slowest remainder.

    Without images, sorting by cost is optimal. Take any slots, the slowest first, and count them from 0. The slots
    before slot k have room for k * num_ranks microbatches. So at least one of the k * num_ranks + 1 costliest
    microbatches is in slot k or in a later one, and slot k takes at least as long as the cheapest of these. If
    microbatches are sorted by cost, it takes exactly as long.

    With images three orders are tried: by text, by vision and by their sum. The order by text is best if all images are
    equal, and the order by vision if all texts are equal.

    Args:
        text: Cost of each microbatch outside the vision encoder, float64 (K,).
        vision: Cost of each microbatch in the vision encoder, float64 (K,).
        num_ranks: Number of ranks, which is the size of a slot.
    """
    best_order_by = text
    least_time = _time_of_slots(text, text, vision, num_ranks)
    if vision.max() > 0.0:
        for order_by in (text + vision, vision):
            time = _time_of_slots(order_by, text, vision, num_ranks)
            if time < least_time:
                least_time = time
                best_order_by = order_by
    return best_order_by, least_time


def _time_of_slots(
    order_by: np.ndarray,
    text: np.ndarray,
    vision: np.ndarray,
    num_ranks: int,
) -> float:
    """Returns the time of all slots if microbatches are sorted by ``order_by``, the greatest first."""
    # Every slot takes the next `num_ranks` microbatches, one a rank. A row of `slots` is a slot.
    order = np.argsort(-order_by, kind='stable')
    slots = order.reshape(-1, num_ranks)
    slowest_text = text[slots].max(axis=1)
    slowest_vision = vision[slots].max(axis=1)
    times = slowest_text + slowest_vision
    return float(times.sum())


def assign_slots(order_by: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns the rank of each microbatch in step slots, int64 (K,).

    The ``num_ranks`` microbatches with the greatest ``order_by`` are the first slot, the next ones the second, and so
    on, see :func:`best_slot_order`. K is a multiple of ``num_ranks``. The time of a slot does not depend on which rank
    gets which. The snake order (0, 1, 2, 2, 1, 0, 0, ...) also keeps the loads close: the rank with the costliest of
    one slot gets the cheapest of the next.
    """
    slot, place = np.divmod(np.arange(len(order_by)), num_ranks)
    snake = np.where(slot % 2 == 0, place, num_ranks - 1 - place)
    ranks = np.empty(len(order_by), dtype=np.int64)
    ranks[np.argsort(-order_by, kind='stable')] = snake
    return ranks
