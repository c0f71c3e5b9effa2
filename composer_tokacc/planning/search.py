# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The search over cuts and over the number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from composer_tokacc.planning.area import AreaCuts
from composer_tokacc.planning.compiled import compiled
from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.counts import raise_bounds
from composer_tokacc.planning.exchange import exchange
from composer_tokacc.planning.minmax import min_max_cut
from composer_tokacc.planning.rows import SortedRows
from composer_tokacc.planning.share import column_time, share_longest_first

__all__ = ['Cut', 'CutSearch']

STEPS = 8
"""Numbers of microbatches tried on the way from the fewest to the most that can pay."""
NEAR = 4
"""Numbers tried on each side of the best of those, where ranks run in columns."""
TOLERANCE = 0.001
"""Relative excess of padded cost that is accepted of a cut, for half the time."""
PROMISING = 4
"""Cuts whose sharing among ranks is improved by exchanges, where they do not."""


class Cut(NamedTuple):
    """A cut of sorted rows, as judged by the objective."""

    time: float
    """Modelled time of the step."""
    bounds: np.ndarray
    """Bounds of the microbatches in the sorted rows, int64 (K + 1,)."""
    costs: np.ndarray
    """Cost of each microbatch, and after them of `num_filled` zero-weight copies, float64 (K + num_filled,)."""
    ranks: np.ndarray | None
    """Rank of each of them, int64 (K + num_filled,); None where ranks run in columns."""
    method: str
    """How it was cut: 'area' or 'min-max'."""
    num_split: int
    num_filled: int


class CutSearch:
    """Search for the best cut of one set of rows.

    Args:
        rows: The sorted rows.
        num_ranks: Number of ranks that share them.
        cost: The cost model.
        columns: Whether ranks wait for each other after every microbatch ('fsdp') or only after the last one ('ddp').
    """

    def __init__(self, rows: SortedRows, num_ranks: int, cost: CostModel, columns: bool) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        self._cost = cost
        self._columns = columns
        self._area = AreaCuts(rows, TOLERANCE)
        self._vision = rows.images * cost.vision_per_token
        self._alone = rows.row_costs + np.diff(self._vision) + cost.launch
        self.min_per_rank = max(1, -(-self._area.min_count // num_ranks))

    @property
    def filler(self) -> int:
        """Sorted position of the cheapest row, of which zero-weight copies are made."""
        return int(np.argmin(self._alone))

    def best(self, per_rank: int | None = None) -> Cut:
        """Find the cut of least modelled time.

        Args:
            per_rank: Number of microbatches on every rank, at least `min_per_rank`; by default what is best.
        """
        cuts: list[Cut] = []
        if per_rank is not None:
            cuts.extend(self._at(per_rank * self._num_ranks, per_rank))
        else:
            for count in self._counts():
                cuts.extend(self._at(count))
                if self._least_time(count) >= min(cut.time for cut in cuts):
                    break
            if self._columns:
                for count in self._near(cuts):
                    cuts.extend(self._at(count))
        cuts.sort(key=_time)
        if not self._columns:
            cuts = [self._exchanged(cut, per_rank) for cut in cuts[:PROMISING]]
        return min(cuts, key=_time)

    def _counts(self) -> Iterator[int]:
        """Numbers of microbatches to try, rising: the fewest and the next two, then by steps that grow."""
        step = self._num_ranks if self._columns else 1
        fewest = self.min_per_rank if self._columns else max(self._area.min_count, self._num_ranks)
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
        best = len(min(cuts, key=_time).costs)
        place = tried.index(best)
        below, above = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        step = self._num_ranks
        return list(range(best - step, below, -step))[:NEAR] + list(range(best + step, above, step))[:NEAR]

    def _least_time(self, count: int) -> float:
        """Time which no plan of `count` or more microbatches beats, once padding is not worth a launch any more."""
        return (float(self._alone.sum()) + (count - len(self._rows)) * self._cost.launch) / self._num_ranks

    def _at(self, count: int, per_rank: int | None = None) -> list[Cut]:
        """Two cuts into `count` microbatches: of least padded cost, and of most equal cost."""
        num_rows = len(self._rows)
        if count > num_rows:
            return [self._judge(np.arange(num_rows + 1, dtype=np.int64), count, 'area', 0, per_rank)]
        cuts = [self._judge(self._area.exactly(count), count, 'area', 0, per_rank)]
        equal = min_max_cut(self._rows, count, self._cost)
        if equal is not None:
            num_split = count - (len(equal) - 1)
            if num_split:
                equal = raise_bounds(self._rows.row_costs, equal, count)
            cuts.append(self._judge(equal, count, 'min-max', num_split, per_rank))
        return cuts

    def _judge(self, bounds: np.ndarray, count: int, method: str, num_split: int, per_rank: int | None) -> Cut:
        num_filled = max(0, count - (len(bounds) - 1))
        copies = float(self._alone[self.filler]) if num_filled else 0.0
        costs = _microbatch_costs(self._rows.row_costs, self._vision, bounds, self._cost.launch, num_filled, copies)
        if self._columns:
            ranks, time = None, column_time(costs, self._num_ranks)
        else:
            ranks, time = share_longest_first(costs, self._num_ranks, per_rank or len(costs))
        return Cut(time, bounds, costs, ranks, method, num_split, num_filled)

    def _exchanged(self, cut: Cut, per_rank: int | None) -> Cut:
        """The cut with load taken off the slowest rank."""
        assert cut.ranks is not None, 'cuts for ddp are shared when they are judged'
        ranks, time = exchange(cut.costs, cut.ranks, self._num_ranks, per_rank is None)
        return cut._replace(ranks=ranks, time=time)


def _time(cut: Cut) -> float:
    return cut.time


@compiled
def _microbatch_costs(row_costs, vision, bounds, launch, num_filled, copies):  # noqa: ANN001, ANN202 - typed by numba
    """Cost of each microbatch of a cut, then of the zero-weight copies."""
    count = len(bounds) - 1
    costs = np.full(count + num_filled, copies)
    for k in range(count):
        start, end = bounds[k], bounds[k + 1]
        costs[k] = (end - start) * row_costs[start] + (vision[end] - vision[start]) + launch
    return costs
