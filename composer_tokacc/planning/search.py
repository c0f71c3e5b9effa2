# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The search for the cut of sorted rows that makes the shortest step on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.cuts import LeastPaddedCuts, equal_cost_cut, microbatch_costs, split_largest
from composer_tokacc.planning.rows import SortedRows
from composer_tokacc.planning.share import column_time, rebalance, share_longest_first

__all__ = ['Cut', 'CutSearch']

# Chosen on 460 plans for each objective: 16 to 2,048 samples of AI2D, ChartQA, DocVQA and of lognormal length, 2 to 64
# ranks, memory of 1 to 8 rows. What is said of other values is the modelled time of a step against the chosen one.
STEPS = 8
"""Numbers of microbatches tried between the fewest and one a sample. 4: 0.05 % slower in the mean, 3.6 % at worst; 12:
as fast to 0.1 %."""
NEAR = 4
"""Numbers tried on each side of the best of those, in columns. 2: 0.6 % slower at worst; none: 1.7 %."""
TOLERANCE = 0.001
"""Relative excess of padded cost that is accepted of a cut. 0.01: 0.1 % slower under ``'ddp'``; 0: as fast to 0.02 %,
for more trials."""
PROMISING = 8
"""Cuts that are rebalanced, of those whose ranks were shared longest first. 4: 0.08 % slower; 1: 0.3 %, 4.7 % at worst;
16: 0.02 % faster, and the time of the plan grows."""


class Cut(NamedTuple):
    """A cut of sorted rows, as judged by the objective."""

    time: float
    """Modelled time of the step."""
    bounds: np.ndarray
    """Bounds of the microbatches in the sorted rows, int64 (K + 1,)."""
    costs: np.ndarray
    """Cost of each microbatch, and after them of the zero-weight copies, float64 (K + copies,)."""
    ranks: np.ndarray | None
    """Rank of each of them, int64 (K + copies,); None where ranks run in columns."""


class CutSearch:
    """Search for the best cut of one set of rows: over the number of microbatches, two cuts for each.

    Both are needed. The cut of least padded cost alone is up to 1.7 times slower under ``'ddp'``, where a rank has few
    rows or images cost much (a microbatch of four long rows, for which all other ranks wait), and 1.3 times under
    ``'fsdp'``. The cut of most equal cost alone is up to 1.1 times slower, and 1.07 times.

    Args:
        rows: The sorted rows.
        num_ranks: Number of ranks that share them.
        cost: The cost model.
        columns: Whether ranks wait for each other after every microbatch (``'fsdp'``) or after the last (``'ddp'``).
    """

    def __init__(self, rows: SortedRows, num_ranks: int, cost: CostModel, columns: bool) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        self._launch = cost.launch
        self._columns = columns
        self._padded = LeastPaddedCuts(rows, TOLERANCE)
        self._alone = rows.row_costs + np.diff(rows.vision) + cost.launch

    @property
    def filler(self) -> int:
        """Sorted position of the cheapest row, of which zero-weight copies are made."""
        return int(np.argmin(self._alone))

    def best(self) -> Cut:
        """Find the cut of least modelled time."""
        cuts: list[Cut] = []
        for count in self._counts():
            cuts.extend(self._at(count))
            # So far: the best cut of all counts tried. Launches grow with the count, so the bound does, too: once it
            # reaches the best time, no greater count can win.
            if self._least_time(count) >= min(cut.time for cut in cuts):
                break
        if self._columns:
            # The time jumps from column to column, so the counts that were passed over near the best one matter.
            for count in self._near(cuts):
                cuts.extend(self._at(count))
        cuts.sort(key=_time)
        if not self._columns:
            # The best cut shared longest first is not always the best one rebalanced, but it is among the first.
            cuts = [self._rebalanced(cut) for cut in cuts[:PROMISING]]
        return min(cuts, key=_time)

    def _counts(self) -> Iterator[int]:
        """Numbers of microbatches to try, rising: the fewest and the next two, then by steps that grow.

        Close together at first, where one microbatch more or less changes the load of a rank most. Columns are full:
        there the numbers are multiples of the number of ranks.
        """
        step = self._num_ranks if self._columns else 1
        fewest = -(-max(self._padded.fewest, self._num_ranks) // step)
        most = max(fewest, -(-len(self._rows) // step))
        growth = max(1.06, (most / fewest) ** (1 / STEPS))
        count = float(fewest)
        tried = 0
        while int(count) <= most:
            yield int(count) * step
            tried += 1
            count = int(count) + 1 if tried < 3 else max(int(count) + 1, count * growth)

    def _near(self, cuts: list[Cut]) -> list[int]:
        """Untried numbers of microbatches between that of the best cut and its neighbours."""
        tried = sorted({len(cut.costs) for cut in cuts})
        place = tried.index(len(min(cuts, key=_time).costs))
        below, best, above = tried[max(place - 1, 0)], tried[place], tried[min(place + 1, len(tried) - 1)]
        step = self._num_ranks
        return list(range(best - step, below, -step))[:NEAR] + list(range(best + step, above, step))[:NEAR]

    def _least_time(self, count: int) -> float:
        """Time which no plan of ``count`` or more microbatches beats: no padding, perfect balance."""
        no_padding = float(self._alone.sum()) - len(self._rows) * self._launch
        return (no_padding + count * self._launch) / self._num_ranks

    def _at(self, count: int) -> list[Cut]:
        """Two cuts into ``count`` microbatches: of least padded cost, and of most equal cost."""
        rows = self._rows
        if count > len(rows):  # a row each, and zero-weight copies
            return [self._judge(np.arange(len(rows) + 1, dtype=np.int64), count)]
        equal = equal_cost_cut(rows.row_costs, rows.vision, rows.reach, count)
        if len(equal) - 1 < count:
            equal = split_largest(rows.row_costs, equal, count)
        return [self._judge(self._padded.exactly(count), count), self._judge(equal, count)]

    def _judge(self, bounds: np.ndarray, count: int) -> Cut:
        """The cut with its modelled time; zero-weight copies of the cheapest row make up for what `count` lacks."""
        costs = microbatch_costs(self._rows.row_costs, self._rows.vision, bounds, self._launch)
        copies = count - len(costs)
        if copies > 0:
            costs = np.concatenate([costs, np.full(copies, self._alone[self.filler])])
        if self._columns:
            return Cut(column_time(costs, self._num_ranks), bounds, costs, None)
        ranks, time = share_longest_first(costs, self._num_ranks)
        return Cut(time, bounds, costs, ranks)

    def _rebalanced(self, cut: Cut) -> Cut:
        """The cut with load taken off the slowest rank."""
        assert cut.ranks is not None, 'cuts for ddp are shared when they are judged'
        ranks, time = rebalance(cut.costs, cut.ranks, self._num_ranks)
        return cut._replace(ranks=ranks, time=time)


def _time(cut: Cut) -> float:
    return cut.time
