# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cuts of rows into microbatches: with least padding, filled up to a limit, or of equal cost. Also packs rows.

A cut is given by its bounds: microbatch ``k`` holds rows ``bounds[k]`` to ``bounds[k + 1] - 1``, int64 (K + 1,). The
caps are given by ``reach``, int64 (n,): a microbatch that starts at row ``i`` ends at ``reach[i]`` at the latest.
``reach[i]`` is at least ``i + 1``, so that a row over a cap is placed alone, and never falls from one row to the next.
A microbatch costs its number of rows times ``row_costs`` of its widest row, float64 (n,), plus the vision cost of its
rows, ``vision[end] - vision[start]``, float64 (n + 1,), plus a fixed cost.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import NamedTuple

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
    """Cuts the rows of one rank into microbatches of least cost under hard caps, or packs them into the fewest.

    A microbatch is as wide as its longest row, rounded up to ``width_multiple`` but not past ``max_width``, the width
    of the collated batch. Rows times width never exceeds ``max_tokens``, the image tokens of its rows never exceed
    ``max_image_tokens``, their loss tokens never ``max_loss_tokens``. A row that breaks a cap by itself is placed
    alone.

    Returns:
        Row indices of each microbatch, ascending. The costliest microbatch comes first; without ``regroup`` they keep
        the order of the rows. For packed rows see :func:`.pack_lengths`.

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
    fixed_cost = options.cost.launch
    bounds = least_padded_cut(rows.row_costs, rows.reach, fixed_cost)
    microbatches = []
    for start, end in pairwise(bounds.tolist()):
        microbatches.append(sorted(rows.order[start:end].tolist()))
    if not options.regroup:
        return microbatches
    costs = microbatch_costs(rows.row_costs, rows.vision, bounds, fixed_cost)
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
    """Groups rows so that lengths, image tokens and loss tokens sum to at most their caps: first fit, longest first.

    First-fit-decreasing needs at most 11/9 of the fewest groups, plus one (Dosa 2007). A row over a cap by itself is
    placed alone.

    Returns:
        Row indices of each group, longest first, so that rows of one length are next to each other: attention computes
        them at once. Groups come in the order of their longest row.

    Example:
        >>> pack_lengths([7, 2, 8, 2, 2], 10)
        [[2, 1], [0, 3], [4]]
    """
    options = CutOptions(max_tokens=max_tokens, max_image_tokens=max_image_tokens, max_loss_tokens=max_loss_tokens)
    return _pack(Rows(lengths, options, image_tokens=image_tokens, loss_tokens=loss_tokens))


def _pack(rows: Rows) -> list[list[int]]:
    """Packs rows as :func:`pack_lengths` does."""
    # A packed row is as long as its documents together. So its length is one of the sizes that add up to a cap.
    sizes = rows.capped_sizes.T
    groups: list[list[int]] = []
    # How much each group may still take under each cap. There are at most as many groups as rows.
    room = np.tile(rows.caps, (len(sizes), 1))
    longest_first = np.argsort(-rows.lengths, kind='stable').tolist()
    for row in longest_first:
        # So far: every longer row is in a group.
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
    vision: np.ndarray,
    bounds: np.ndarray,
    fixed_cost: float,
) -> np.ndarray:
    """Returns the cost of each microbatch of a cut of sorted rows, float64 (K,)."""
    starts = bounds[:-1]
    ends = bounds[1:]
    padded = (ends - starts) * row_costs[starts]
    return padded + (vision[ends] - vision[starts]) + fixed_cost


@compiled
def least_padded_cut(
    row_costs: np.ndarray,
    reach: np.ndarray,
    price: float,
) -> np.ndarray:
    """Cuts rows, sorted or not, so that padded cost plus ``price`` per microbatch is least.

    Plain dynamic programming over the ends of microbatches, in O(n * rows that a microbatch can hold). (On sorted rows
    O(n log n) is possible, with three times the code; measured, a whole plan of up to 1,024 rows took as long.)

    The higher the price, the fewer microbatches there are.
    """
    n = len(row_costs)
    totals = np.zeros(n + 1)
    last = np.zeros(n + 1, dtype=np.int64)
    earliest = 0
    is_sorted = True
    for end in range(1, n + 1):
        # So far: for every earlier end, totals[end] is the least total of the rows before it, and last[end] is where
        # the last microbatch of that cut starts.
        while reach[earliest] < end:
            earliest += 1
        # Now `earliest` is the first start that the caps allow. On sorted rows (end - start) * row_costs[start] is a
        # Monge cost, and so the best last microbatch never starts earlier for a later end (Galil and Park 1992):
        # nothing before the previous best start needs a look.
        if end > 1 and row_costs[end - 1] > row_costs[end - 2]:
            is_sorted = False
        first = max(earliest, last[end - 1]) if is_sorted else earliest
        best = end - 1
        widest = row_costs[best]
        least = totals[best] + widest
        for start in range(end - 2, first - 1, -1):
            widest = max(widest, row_costs[start])
            total = totals[start] + (end - start) * widest
            if total < least:
                least = total
                best = start
        totals[end] = least + price
        last[end] = best
    # Walk back from the last end: first to count the microbatches, then to write their bounds.
    count = 0
    end = n
    while end > 0:
        end = last[end]
        count += 1
    bounds = np.zeros(count + 1, dtype=np.int64)
    end = n
    for k in range(count, 0, -1):
        bounds[k] = end
        end = last[end]
    return bounds


class _Corner(NamedTuple):
    """A cut at a corner of the curve of :class:`LeastPaddedCuts`."""

    padded_cost: float
    bounds: np.ndarray


class LeastPaddedCuts:
    """Cuts sorted rows with least padded cost, for any number of microbatches.

    The least cost falls with the number of microbatches K along a convex curve (the cost is Monge; Aggarwal, Schieber
    and Tokuyama 1994). A cut at a price touches the curve where its slope is minus the price, at a corner:

        least cost
          |*
          | .                    * corners, each found by a cut at some price
          |  .
          |   *                  The slope between the corners on either side of K is the price of the next trial. It
          |     .                either finds a corner between them, or says that they share a straight piece of the
          |       * .            curve. Then a splice of their two cuts lies on that piece, at K.
          |           . * . _ *
          +-------------------- K

    Corners are kept, so that the cuts for many K take little more time than one. To save trials, a cut may cost more
    than the least, by the share `tolerance`.
    """

    def __init__(
        self,
        rows: OrderedRows,
        tolerance: float = 0.0,
    ) -> None:
        self._rows = rows
        self._tolerance = tolerance
        self._corners: dict[int, _Corner] = {}
        """By number of microbatches."""
        # The left end of the curve: no saving is worth a price above the cost of all rows at the greatest width.
        cost_at_greatest_width = len(rows) * float(rows.row_costs[0])
        self.fewest = self._try(2.0 * cost_at_greatest_width + 1.0)
        # The right end: one row each.
        bounds_of_single_rows = np.arange(len(rows) + 1, dtype=np.int64)
        cost_of_single_rows = float(rows.row_costs.sum())
        self._corners[len(rows)] = _Corner(cost_of_single_rows, bounds_of_single_rows)

    def _try(self, price: float) -> int:
        """Finds the corner of a price, and returns its number of microbatches."""
        bounds = least_padded_cut(self._rows.row_costs, self._rows.reach, price)
        cost_of_widest = self._rows.row_costs[bounds[:-1]]
        padded = float(np.dot(np.diff(bounds), cost_of_widest))
        count = len(bounds) - 1
        if count not in self._corners or padded < self._corners[count].padded_cost:
            self._corners[count] = _Corner(padded, bounds)
        return count

    def exactly(self, count: int) -> np.ndarray:
        """Returns bounds of the cut of least padded cost with ``count`` microbatches, ``fewest <= count <= n``.

        Its cost is at most the tolerance above the least one: the least cost lies between the costs of the corners on
        both sides, and a splice of the two costs no more than the costlier corner.
        """
        while count not in self._corners:
            below = max(k for k in self._corners if k < count)
            above = min(k for k in self._corners if k > count)
            few = self._corners[below]
            many = self._corners[above]
            # The price at which both corners cost the same. A cut at this price costs less only at a corner between.
            saving = few.padded_cost - many.padded_cost
            between = below
            if saving > self._tolerance * many.padded_cost:
                between = self._try(saving / (above - below))
            if not below < between < above:
                # There is no corner in between: the curve is straight here, or nearly straight.
                return _splice(few.bounds, many.bounds, count)
        return self._corners[count].bounds


@compiled
def _splice(
    few: np.ndarray,
    many: np.ndarray,
    count: int,
) -> np.ndarray:
    """Follows `few`, then changes over to `many` inside one microbatch of `few`, for `count` microbatches in all.

    If both cuts are best at the same price, so is the result. The reason: this splice and the one from `many` to `few`
    together cost no more than the two cuts (exchange argument on a Monge cost). The microbatch of the change lies
    inside one of `few`, so it keeps the caps.
    """
    # With t microbatches of `few` first, `many` still has to make count - t, which start at place t + shift.
    shift = len(many) - 1 - count
    t = 0
    while few[t + 1] < many[t + 1 + shift]:
        t += 1
    # Now few[t] <= many[t + shift] < many[t + 1 + shift] <= few[t + 1]: change over in microbatch t.
    bounds = np.zeros(count + 1, dtype=np.int64)
    bounds[: t + 1] = few[: t + 1]
    bounds[t + 1 :] = many[t + 1 + shift :]
    return bounds


@compiled
def fill(
    row_costs: np.ndarray,
    vision: np.ndarray,
    reach: np.ndarray,
    limit: float,
) -> np.ndarray:
    """Fills one microbatch of sorted rows after the other, up to the caps and the limit.

    A microbatch of two or more rows costs at most the limit, without its fixed cost. No cut that keeps the caps and the
    limit has fewer microbatches.
    """
    n = len(row_costs)
    bounds = np.zeros(n + 1, dtype=np.int64)
    count = 0
    start = 0
    while start < n:
        # The last end that keeps the limit, by bisection: the cost grows with every row.
        low = start + 1
        high = reach[start]
        while low < high:
            middle = (low + high + 1) // 2
            padded = (middle - start) * row_costs[start]
            cost = padded + (vision[middle] - vision[start])
            if cost <= limit:
                low = middle
            else:
                high = middle - 1
        # Now `low` is the last end under cap and limit: the microbatch is full, and the next one starts there.
        start = low
        count += 1
        bounds[count] = start
    return bounds[: count + 1].copy()


@compiled
def equal_cost_cut(
    row_costs: np.ndarray,
    vision: np.ndarray,
    reach: np.ndarray,
    count: int,
) -> np.ndarray:
    """Cuts sorted rows into at most ``count`` microbatches whose costliest one is as cheap as possible.

    ``count`` is at least the number of :func:`fill` without a limit.
    """
    # Both limits are added up in the order of `fill`. With other rounding, a microbatch could cost more there than the
    # limit that was computed from it.
    cost_of_each_row = row_costs + (vision[1:] - vision[:-1])
    low = cost_of_each_row.max()
    most_rows = reach - np.arange(len(reach))
    cost_of_most_rows = most_rows * row_costs + (vision[reach] - vision[:-1])
    high = cost_of_most_rows.max()
    # The costliest row cannot be cut, so no lower limit does better than its own cost.
    bounds = fill(row_costs, vision, reach, low)
    if len(bounds) - 1 <= count:
        return bounds
    # Bisection: `low` needs more than `count` microbatches. `high` does not, because no microbatch that the caps allow
    # costs more.
    while high - low > PRECISION * high:
        middle = 0.5 * (low + high)
        if len(fill(row_costs, vision, reach, middle)) - 1 <= count:
            high = middle
        else:
            low = middle
    return fill(row_costs, vision, reach, high)


@compiled
def split_largest(
    row_costs: np.ndarray,
    bounds: np.ndarray,
    count: int,
) -> np.ndarray:
    """Splits the largest microbatch of sorted rows, halfway down its rows, until there are ``count``, or one row each.

    Returns:
        Bounds of ``min(count, n)`` microbatches, or the given bounds if these are of more. The given bounds are always
        among them.
    """
    # Each entry is minus the size of a microbatch, its start and its end. The first one only tells numba the types.
    heap = [(0.0, 0, 0)]
    heap.pop()
    for k in range(len(bounds) - 1):
        heapq.heappush(heap, _by_size(row_costs, bounds[k], bounds[k + 1]))
    # The largest is at the top. Single rows have a positive entry, so once one is at the top nothing is left to split.
    while len(heap) < count and heap[0][0] < 0.0:
        start, end = heap[0][1], heap[0][2]
        middle = (start + end) // 2  # the shorter half holds the longer rows
        heapq.heapreplace(heap, _by_size(row_costs, start, middle))
        heapq.heappush(heap, _by_size(row_costs, middle, end))
    new_bounds = [0]
    for _, _, end in heap:
        new_bounds.append(end)
    return np.array(sorted(new_bounds))


@compiled
def _by_size(
    row_costs: np.ndarray,
    start: int,
    end: int,
) -> tuple[float, int, int]:
    """Returns the entry of a microbatch in a heap whose top is the largest one that can be split."""
    num_rows = end - start
    if num_rows == 1:
        return (1.0, start, end)
    return (-num_rows * row_costs[start], start, end)
