# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cuts of rows into microbatches: with least padding, filled up to a limit, or of equal cost. Also packs rows.

The functions share these arrays of n rows in their order. All but ``bounds`` are fields of :class:`.OrderedRows`:

- ``bounds``, int64 (K + 1,), is a cut into K microbatches. Microbatch ``k`` holds rows ``bounds[k]`` to
  ``bounds[k + 1] - 1``.
- ``reach``, int64 (n,), stands for the caps. A microbatch that starts at row ``i`` must end at ``reach[i]`` or before.
  ``reach[i]`` is at least ``i + 1``, so that a row over a cap is placed alone. It never falls from one row to the next.
- ``row_costs``, float64 (n,), is the cost of each row at its width, without the vision encoder.
- ``vision_before``, float64 (n + 1,), is a running sum: the cost in the vision encoder of all rows before each row.

A microbatch of rows ``start`` to ``end - 1`` costs ``(end - start) * row_costs[widest row]``, its *padded cost*, plus
``vision_before[end] - vision_before[start]``, plus the fixed cost ``launch`` of any microbatch.

*Sorted rows* are sorted from the longest to the shortest, so the widest row of a microbatch is its first.
"""

from __future__ import annotations

import heapq
import math
from itertools import pairwise

import numpy as np

from composer_tokacc.planning.compiled import compiled
from composer_tokacc.planning.options import CutOptions, Table
from composer_tokacc.planning.rows import OrderedRows, Rows

PRECISION = 1e-4
"""Relative width at which the bisection of :func:`equal_cost_cut` stops. One row more or less in a microbatch changes
its cost by far more."""


def cut_rows(
    lengths: Table,
    options: CutOptions,
    *,
    image_tokens: Table | None = None,
    loss_tokens: Table | None = None,
    max_width: int | None = None,
) -> list[list[int]]:
    """Cuts the rows of one rank into microbatches of least cost under hard caps, or packs them, by ``options.packing``.

    A microbatch is as wide as its longest row, rounded up to ``width_multiple`` but not past ``max_width``, the width
    of the collated batch. Rows times width never exceeds ``max_tokens``, the image tokens of its rows never exceed
    ``max_image_tokens``, their loss tokens never ``max_loss_tokens``. A row that breaks a cap by itself is placed
    alone.

    With ``packing=True`` rows are packed as by :func:`.pack_lengths`, and ``regroup`` does not matter. ``'auto'``
    counts as False here: the split has replaced it before it cuts.

    Returns:
        Row indices of each microbatch, ascending. The costliest microbatch comes first, so that FSDP ranks compute
        similar ones at the same time. Without ``regroup`` they keep the order of the rows. If rows are packed, see
        :func:`.pack_lengths`.

    Example:
        >>> cut_rows([7, 2, 8, 2, 2], CutOptions(max_tokens=16))
        [[0, 2], [1, 3, 4]]
        >>> cut_rows([7, 2, 8, 2, 2], CutOptions(max_tokens=16, regroup=False))
        [[0, 1], [2], [3, 4]]
    """
    all_rows = Rows(lengths, options, image_tokens=image_tokens, loss_tokens=loss_tokens, max_width=max_width)
    if options.packing is True:
        return _pack(all_rows)
    if options.regroup:
        rows = all_rows.by_length()
    else:
        rows = all_rows.in_order(np.arange(len(all_rows.lengths)))
    launch = options.cost.launch
    # All cuts cost the same in the vision encoder, so its cost is left out.
    bounds = least_padded_cut(rows.row_costs, rows.reach, launch)
    microbatches = []
    for start, end in pairwise(bounds.tolist()):
        microbatches.append(sorted(rows.order[start:end].tolist()))
    if not options.regroup:
        return microbatches
    # Single microbatches differ in their cost in the vision encoder, so here it counts.
    costs = microbatch_costs(rows.row_costs, rows.vision_before, bounds[:-1], bounds[1:], launch)
    costliest_first = np.argsort(-costs, kind='stable')
    return [microbatches[k] for k in costliest_first.tolist()]


def pack_lengths(
    lengths: Table,
    max_tokens: int,
    image_tokens: Table | None = None,
    max_image_tokens: int | None = None,
    loss_tokens: Table | None = None,
    max_loss_tokens: int | None = None,
) -> list[list[int]]:
    """Groups rows so that the lengths, image tokens and loss tokens of a group sum to at most their caps.

    From the longest row to the shortest, each is put into the first group that has room. With one cap, such
    first-fit-decreasing needs at most 11/9 of the fewest groups, plus one (Dosa 2007). A row over a cap by itself is
    placed alone.

    Returns:
        Row indices of each group, longest row first. Groups come in the order of their longest row.

    Example:
        >>> pack_lengths([7, 2, 8, 2, 2], 10)
        [[2, 1], [0, 3], [4]]
    """
    options = CutOptions(max_tokens=max_tokens, max_image_tokens=max_image_tokens, max_loss_tokens=max_loss_tokens)
    return _pack(Rows(lengths, options, image_tokens=image_tokens, loss_tokens=loss_tokens))


def _pack(rows: Rows) -> list[list[int]]:
    """Packs rows as :func:`pack_lengths` does."""
    # (n, number of caps). Packing adds no padding, so the token budget is a cap on the sum of lengths, like the others.
    sizes = rows.capped_sizes.T
    groups: list[list[int]] = []
    # How much each group may still take under each cap, (n, number of caps). There may be a group for each row, so the
    # array has n lines, but only the first `len(groups)` are in use. A row over a cap makes the line of its group
    # negative, so no other row joins it.
    room = np.tile(rows.caps, (len(sizes), 1))
    longest_first = np.argsort(-rows.lengths, kind='stable').tolist()
    for row in longest_first:
        room_of_groups = room[: len(groups)]
        has_room = np.all(sizes[row] <= room_of_groups, axis=1)
        if has_room.any():
            group = int(has_room.argmax())
        else:
            group = len(groups)
            groups.append([])
        groups[group].append(row)
        room[group] -= sizes[row]
    return groups


@compiled
def microbatch_costs(
    row_costs: np.ndarray,
    vision_before: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    launch: float,
) -> np.ndarray:
    """Returns the cost of each microbatch of sorted rows ``starts[k]`` to ``ends[k] - 1``, float64 (K,)."""
    padded = (ends - starts) * row_costs[starts]
    return padded + (vision_before[ends] - vision_before[starts]) + launch


@compiled
def least_padded_cut(
    row_costs: np.ndarray,
    reach: np.ndarray,
    price: float,
) -> np.ndarray:
    """Cuts rows, sorted or not, so that the padded cost plus ``price`` for each microbatch is least.

    The higher the price, the fewer microbatches there are. For the cheapest cut the price is ``launch``.

    Plain dynamic programming over the ends of microbatches, in O(n * rows that a microbatch can hold). On sorted rows
    O(n log n) is possible, with three times the code. It was not faster for plans of up to 1,024 rows (measured).
    """
    n = len(row_costs)
    # For each `end`, the best cut of the rows before it: its total cost, and where its last microbatch starts.
    least_totals = np.zeros(n + 1)
    last_starts = np.zeros(n + 1, dtype=np.int64)
    earliest = 0
    widest_cost_of_last = row_costs[0]  # cost of the widest row in the last microbatch of the best cut, for `end - 1`
    for end in range(1, n + 1):
        # So far: both arrays are filled for all smaller ends.
        while reach[earliest] < end:
            earliest += 1
        # The caps allow all starts from `earliest` on. Most of them need not be tried if the new row is no wider than
        # the row before it. Then it adds to each microbatch the cost of the widest row there. For the previous end, no
        # start was better than `previous_start`. The starts before it give microbatches that are as wide or wider, so
        # they are no better for this end, either. Those of equal width are tried: rounding may make them better.
        first_tried = earliest
        if end > 1 and row_costs[end - 1] <= row_costs[end - 2]:
            previous_start = last_starts[end - 1]
            first_tried = max(earliest, previous_start)
            while first_tried > earliest and row_costs[first_tried - 1] <= widest_cost_of_last:
                first_tried -= 1
        # Try all starts, from the microbatch of the new row alone to longer ones.
        best_start = end - 1
        widest_cost = row_costs[best_start]
        widest_cost_of_last = widest_cost
        least = least_totals[best_start] + widest_cost
        for start in range(end - 2, first_tried - 1, -1):
            widest_cost = max(widest_cost, row_costs[start])
            total = least_totals[start] + (end - start) * widest_cost
            if total < least:
                least = total
                best_start = start
                widest_cost_of_last = widest_cost
        least_totals[end] = least + price
        last_starts[end] = best_start
    # Walk back from the last end.
    bounds = [n]
    while bounds[-1] > 0:
        bounds.append(last_starts[bounds[-1]])
    return np.array(bounds[::-1])


def least_padded_cuts(rows: OrderedRows) -> list[np.ndarray]:
    """Returns cuts of sorted rows with least padded cost, for rising prices of a microbatch.

    The last one has the fewest microbatches that the caps allow. From one cut to the next, the number of microbatches
    never rises.
    """
    bounds_of_fewest = fill(rows.row_costs, rows.vision_before, rows.reach, math.inf)
    cuts = []
    for price in _rising_prices(rows):
        bounds = least_padded_cut(rows.row_costs, rows.reach, price)
        cuts.append(bounds)
        if len(bounds) == len(bounds_of_fewest):
            break  # higher prices give as many microbatches
    return cuts


def _rising_prices(rows: OrderedRows) -> list[float]:
    """Returns prices of a microbatch. Each is twice the one before it."""
    greatest_cost = float(rows.row_costs[0])
    # At the lowest price a further microbatch pays if it saves one or two thousandths of the cost of the widest row.
    least_price = 1e-3 * greatest_cost
    # At the highest price a further microbatch never pays, because no cut costs more than all rows at the greatest
    # width. It is twice that cost, to be safe from rounding.
    prices = [2.0 * len(rows) * greatest_cost]
    # Halves are exact, so all CPUs find the same cuts. Powers (`np.geomspace`) are rounded differently with AVX512.
    while prices[-1] / 2 > least_price:
        prices.append(prices[-1] / 2)
    return prices[::-1]


@compiled
def fill(
    row_costs: np.ndarray,
    vision_before: np.ndarray,
    reach: np.ndarray,
    limit: float,
) -> np.ndarray:
    """Fills one microbatch of sorted rows after the other, up to the caps and a limit of its cost.

    The fixed cost ``launch`` does not count. A row that costs more than the limit is placed alone. No other cut under
    the caps and the limit has fewer microbatches.
    """
    n = len(row_costs)
    bounds = [0]
    while bounds[-1] < n:
        start = bounds[-1]
        end = start + 1
        while end < reach[start]:
            padded = (end + 1 - start) * row_costs[start]
            if padded + (vision_before[end + 1] - vision_before[start]) > limit:
                break
            end += 1
        bounds.append(end)
    return np.array(bounds)


@compiled
def equal_cost_cut(
    row_costs: np.ndarray,
    vision_before: np.ndarray,
    reach: np.ndarray,
    count: int,
) -> np.ndarray:
    """Cuts sorted rows into at most ``count`` microbatches, whose costliest one is as cheap as ``PRECISION`` allows.

    ``count`` is at least the number of microbatches that the caps demand.
    """
    # No limit below the cost of the costliest row does better, because that row is in some microbatch.
    cost_of_each_row = row_costs + (vision_before[1:] - vision_before[:-1])
    lowest_limit = cost_of_each_row.max()
    bounds = fill(row_costs, vision_before, reach, lowest_limit)
    if len(bounds) - 1 <= count:
        return bounds
    # Bisection between a limit that needs more than `count` microbatches and one that does not. The first is the limit
    # that has just failed. The second is the cost of all rows in one microbatch, because no microbatch costs more.
    too_low = lowest_limit
    high_enough = len(row_costs) * row_costs[0] + vision_before[-1]
    while high_enough - too_low > PRECISION * high_enough:
        middle = 0.5 * (too_low + high_enough)
        if not too_low < middle < high_enough:  # costs near 1e-323, which have no float between them
            break
        if len(fill(row_costs, vision_before, reach, middle)) - 1 <= count:
            high_enough = middle
        else:
            too_low = middle
    return fill(row_costs, vision_before, reach, high_enough)


@compiled
def split_largest(
    row_costs: np.ndarray,
    bounds: np.ndarray,
    count: int,
) -> np.ndarray:
    """Splits the microbatch of greatest padded cost in the middle of its rows, again and again.

    It stops at ``count`` microbatches, or when each has one row.

    Returns:
        Bounds of ``min(count, n)`` microbatches, or the given bounds if these have more. The given bounds are always
        among them.
    """
    if len(bounds) - 1 >= count:
        return bounds  # to save the time of the heap
    new_bounds = list(bounds)
    # The microbatches that can be split: negative padded cost, start and end. The first entry of a heap is the
    # smallest, so it is the costliest microbatch. The entry that is removed at once only tells numba the types.
    heap = [(0.0, 0, 0)]
    heap.pop()
    for k in range(len(bounds) - 1):
        _push(heap, row_costs, bounds[k], bounds[k + 1])
    while len(heap) > 0 and len(new_bounds) - 1 < count:  # K microbatches have K + 1 bounds
        _, start, end = heapq.heappop(heap)
        middle = (start + end) // 2  # of an odd number of rows, the first half gets fewer, because they are longer
        new_bounds.append(middle)
        _push(heap, row_costs, start, middle)
        _push(heap, row_costs, middle, end)
    return np.array(sorted(new_bounds))


@compiled
def _push(
    heap: list[tuple[float, int, int]],
    row_costs: np.ndarray,
    start: int,
    end: int,
) -> None:
    """Adds a microbatch to the heap of :func:`split_largest`, unless it has only one row, which cannot be split."""
    num_rows = end - start
    if num_rows > 1:
        padded_cost = num_rows * row_costs[start]
        heapq.heappush(heap, (-padded_cost, start, end))
