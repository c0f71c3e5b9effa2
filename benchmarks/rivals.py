# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What others do with the same samples, modelled with the same cost and the same memory.

Each function takes one global batch in random order and returns the modelled time of the step. Memory is that of stock
Composer on the same batch: `k` rows as wide as its longest sample, so `max_tokens = k * longest`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from benchmarks.length_sets import LengthSet
from composer_tokacc.planning import CostModel, cut, plan_microbatches
from composer_tokacc.planning.greedy import greedy_cut
from composer_tokacc.planning.rows import sort_rows

MEGA_BATCHES = 50
"""Global batches that Hugging Face's LengthGroupedSampler sorts at a time."""


class Rivals:
    """All ways of running one global batch.

    Args:
        num_ranks: Number of ranks, W.
        microbatch: Rows of a microbatch of stock Composer, k.
        cost: The cost model.
    """

    def __init__(self, num_ranks: int, microbatch: int, cost: CostModel) -> None:
        self.num_ranks = num_ranks
        self.microbatch = microbatch
        self.cost = cost

    def methods(self) -> dict[str, Callable[[LengthSet], float]]:
        """Name -> function of one global batch."""
        return {
            'stock Composer': self.stock,
            'stock, trimmed': lambda batch: self._dealt(batch, self._fixed_rows),
            'sorted in the rank': lambda batch: self._dealt(batch, self._greedy),
            'NeMo-RL stride': self.stride,
            'our cut in the rank': lambda batch: self._dealt(batch, self._cut),
            'planner, fsdp': lambda batch: self.planned(batch, 'fsdp')[0],
            'planner, ddp': lambda batch: self.planned(batch, 'ddp')[0],
        }

    def stock(self, batch: LengthSet) -> float:
        """Rows dealt as DistributedSampler does, padded to the rank's longest, k rows a microbatch."""
        return self._dealt(batch, lambda rows: self._fixed_rows(rows, width=int(rows.lengths.max())))

    def stride(self, batch: LengthSet) -> float:
        """NeMo-RL dynamic batching: sort, stride over ranks, cut all ranks at the same places by budget, trim."""
        order = np.argsort(-batch.lengths, kind='stable')
        budget = self._max_tokens(batch)
        loads = np.zeros(self.num_ranks)
        place, per_rank = 0, len(order) // self.num_ranks
        while place < per_rank:
            widest = int(batch.lengths[order[place * self.num_ranks]])
            end = min(per_rank, place + max(1, budget // widest))
            for rank in range(self.num_ranks):
                loads[rank] += self._price(batch, order[rank :: self.num_ranks][place:end])
            place = end
        return float(loads.max())

    def planned(self, batch: LengthSet, objective: str) -> tuple[float, float]:
        """Time and bound of our plan."""
        stats = plan_microbatches(
            batch.lengths,
            num_ranks=self.num_ranks,
            max_tokens=self._max_tokens(batch),
            image_tokens=batch.image_tokens if batch.image_tokens.any() else None,
            objective=objective,  # pyright: ignore[reportArgumentType]
            cost=self.cost,
        ).stats
        return stats.cost, stats.bound

    def length_grouped(self, epoch: LengthSet, global_batch: int) -> float:
        """Hugging Face's group_by_length over a whole epoch, which changes who is in a global batch.

        Mega-batches of up to 50 global batches are sorted by length and dealt to ranks; every microbatch of k rows is
        padded to its own longest.
        """
        mega = global_batch * max(1, min(len(epoch.lengths) // (global_batch * 4), MEGA_BATCHES))
        parts = [
            np.arange(start, min(start + mega, len(epoch.lengths))) for start in range(0, len(epoch.lengths), mega)
        ]
        order = np.concatenate([part[np.argsort(-epoch.lengths[part], kind='stable')] for part in parts])
        total = 0.0
        for start in range(0, len(order), global_batch):
            rows = order[start : start + global_batch]
            batch = LengthSet(epoch.name, epoch.lengths[rows], epoch.image_tokens[rows])
            total += self._dealt(batch, self._fixed_rows)
        return total

    def _max_tokens(self, batch: LengthSet) -> int:
        return self.microbatch * int(batch.lengths.max())

    def _price(self, batch: LengthSet, rows: np.ndarray, width: int | None = None) -> float:
        width = int(batch.lengths[rows].max()) if width is None else width
        return self.cost.microbatch(len(rows), width, int(batch.image_tokens[rows].sum()))

    def _dealt(self, batch: LengthSet, run: Callable[[LengthSet], float]) -> float:
        """Slowest rank when rows are dealt out one by one; `run` gives the time of one rank."""
        self._budget = self._max_tokens(batch)
        return max(
            run(LengthSet(batch.name, batch.lengths[r :: self.num_ranks], batch.image_tokens[r :: self.num_ranks]))
            for r in range(self.num_ranks)
        )

    def _fixed_rows(self, rows: LengthSet, width: int | None = None) -> float:
        places = np.arange(len(rows.lengths))
        return sum(
            self._price(rows, places[start : start + self.microbatch], width)
            for start in range(0, len(places), self.microbatch)
        )

    def _greedy(self, rows: LengthSet) -> float:
        ordered = sort_rows(rows.lengths, rows.image_tokens, self.cost, self._budget, None)
        return sum(self._price(rows, ordered.order[a:b]) for a, b in pairwise(greedy_cut(ordered.reach).tolist()))

    def _cut(self, rows: LengthSet) -> float:
        return sum(self._price(rows, np.array(part)) for part in cut(rows.lengths, self._budget, cost=self.cost))
