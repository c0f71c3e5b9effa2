# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cuts of least padded cost, by dynamic programming over the sorted rows.

The cost of rows ``[i, j)`` as one microbatch is ``(j - i) * c_i`` with ``c`` falling, which is a Monge cost (the
quadrangle inequality holds, and the caps only forbid supersets of what they forbid). Two things follow: the best cut
with a price per microbatch takes O(n log n) (Galil and Park 1992, "Dynamic programming with convexity, concavity and
sparsity"), and the least cost is convex in the number of microbatches, so that the best cut with *exactly* K
microbatches is found by searching for the price (Aggarwal, Schieber and Tokuyama 1994).
"""

from __future__ import annotations

import numpy as np

from composer_tokacc.planning.compiled import compiled
from composer_tokacc.planning.greedy import greedy_cut
from composer_tokacc.planning.rows import SortedRows

__all__ = ['AreaCuts', 'least_cost_cut']


@compiled
def _price(totals, row_costs, reach, start, end, penalty):  # noqa: ANN001, ANN202 - typed by numba
    """Least cost of rows [0, end) whose last microbatch begins at `start`."""
    if end > reach[start]:
        return np.inf
    return totals[start] + (end - start) * row_costs[start] + penalty


@compiled
def least_cost_cut(row_costs: np.ndarray, reach: np.ndarray, penalty: float) -> np.ndarray:
    """Cut sorted rows so that padded cost plus `penalty` per microbatch is least, in O(n log n).

    Args:
        row_costs: Cost of one row at the width of each row, not increasing, float64 (n,).
        reach: Latest end of a microbatch from each row, int64 (n,).
        penalty: Price of a microbatch.

    Returns:
        Bounds of the microbatches, from 0 to n, int64 (K + 1,).
    """
    n = len(row_costs)
    totals = np.zeros(n + 1)
    last = np.zeros(n + 1, dtype=np.int64)
    # Candidate starts; each is the best for ends from `begins` up to the next candidate's.
    starts = np.zeros(n + 1, dtype=np.int64)
    begins = np.zeros(n + 1, dtype=np.int64)
    head = 0
    tail = 0
    begins[0] = 1
    for end in range(1, n + 1):
        while head < tail and begins[head + 1] <= end:
            head += 1
        start = starts[head]
        last[end] = start
        totals[end] = _price(totals, row_costs, reach, start, end, penalty)
        if end == n:
            break
        # A later start is the better one from some end on (Monge), so that end is found by bisection.
        while tail >= head:
            begin = max(begins[tail], end + 1)
            if _price(totals, row_costs, reach, end, begin, penalty) > _price(
                totals, row_costs, reach, starts[tail], begin, penalty
            ):
                break
            tail -= 1
        if tail < head:
            tail = head
            starts[tail] = end
            begins[tail] = end + 1
            continue
        high = _overtakes(totals, row_costs, reach, starts[tail], end, max(begins[tail], end + 1), penalty)
        if high <= n:
            tail += 1
            starts[tail] = end
            begins[tail] = high
    return trace_back(last)


@compiled
def _overtakes(totals, row_costs, reach, older, newer, low, penalty):  # noqa: ANN001, ANN202 - typed by numba
    """First end from which the newer start is at least as good as the older one, which is better at `low`."""
    high = min(len(row_costs), reach[older]) + 1  # the caps end the older one's lead at the latest
    while high - low > 1:
        middle = (low + high) // 2
        if _price(totals, row_costs, reach, newer, middle, penalty) > _price(
            totals, row_costs, reach, older, middle, penalty
        ):
            low = middle
        else:
            high = middle
    return high


@compiled
def trace_back(last: np.ndarray) -> np.ndarray:
    """Bounds of the cut in which the last microbatch before each end begins at `last[end]`."""
    count = 0
    end = len(last) - 1
    while end > 0:
        end = last[end]
        count += 1
    bounds = np.zeros(count + 1, dtype=np.int64)
    end = len(last) - 1
    for k in range(count, 0, -1):
        bounds[k] = end
        end = last[end]
    return bounds


@compiled
def _padded_cost(row_costs, bounds):  # noqa: ANN001, ANN202 - typed by numba
    total = 0.0
    for k in range(len(bounds) - 1):
        total += (bounds[k + 1] - bounds[k]) * row_costs[bounds[k]]
    return total


class AreaCuts:
    """Cuts of one set of sorted rows of least padded cost, for any number of microbatches.

    Each price tried gives one corner of the convex curve of least cost over the number of microbatches; corners are
    kept, so that asking for many counts costs little more than asking for one.

    Args:
        rows: The sorted rows.
        tolerance: Relative excess of cost that is accepted for fewer trials.
    """

    def __init__(self, rows: SortedRows, tolerance: float = 0.0) -> None:
        self._rows = rows
        self._tolerance = tolerance
        self._corners: dict[int, tuple[float, np.ndarray]] = {}
        num_rows = len(rows)
        self.min_count = len(greedy_cut(rows.reach)) - 1
        # No saving can be worth this price: all rows at the greatest width, and then some.
        self._add(2.0 * num_rows * float(rows.row_costs[0]) + 1.0)
        singles = np.arange(num_rows + 1, dtype=np.int64)
        self._corners.setdefault(num_rows, (_padded_cost(rows.row_costs, singles), singles))

    def _add(self, penalty: float) -> int:
        bounds = least_cost_cut(self._rows.row_costs, self._rows.reach, penalty)
        count = len(bounds) - 1
        padded = _padded_cost(self._rows.row_costs, bounds)
        if count not in self._corners or padded < self._corners[count][0]:
            self._corners[count] = (padded, bounds)
        return count

    def priced(self, penalty: float) -> np.ndarray:
        """Bounds of the cut whose padded cost plus `penalty` per microbatch is least."""
        return self._corners[self._add(penalty)][1]

    def exactly(self, count: int) -> np.ndarray:
        """Bounds of the cut of least padded cost with `count` microbatches, `min_count <= count <= n`.

        With a tolerance the cost is at most so much above the least one: it lies between the costs of the corners on
        either side, and a splice of the two costs no more than the dearer of them (exchange argument).
        """
        while count not in self._corners:
            few = max(k for k in self._corners if k < count)
            many = min(k for k in self._corners if k > count)
            (few_cost, few_bounds), (many_cost, many_bounds) = self._corners[few], self._corners[many]
            saving = few_cost - many_cost
            found = few
            if saving > self._tolerance * many_cost:
                found = self._add(saving / (many - few))
            if not few < found < many:  # no corner between the two: they share a straight piece of the curve
                return _splice(few_bounds, many_bounds, count)
        return self._corners[count][1]


@compiled
def _splice(few: np.ndarray, many: np.ndarray, count: int) -> np.ndarray:
    """Follow `few`, then change over to `many` inside one microbatch of `few`, for `count` microbatches in all.

    Where both cuts are best at the same price, so is the result (exchange argument on a Monge cost). The microbatch of
    the change lies inside one of `few`, so it keeps the caps.
    """
    shift = len(many) - 1 - count
    t = 0
    while few[t + 1] < many[t + 1 + shift]:
        t += 1
    bounds = np.zeros(count + 1, dtype=np.int64)
    bounds[: t + 1] = few[: t + 1]
    bounds[t + 1 :] = many[t + 1 + shift :]
    return bounds
