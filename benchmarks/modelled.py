# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Modelled load of every rank for one global batch, by each way of dealing samples out; written from descriptions.

All have the memory of stock Composer: `k` rows as wide as the longest sample of the global batch. Samples come in the
order of torch's DistributedSampler, so rank ``r`` of ``W`` is dealt places ``r, r + W, ...``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from benchmarks.length_sets import LengthSet
from composer_tokacc.planning import CostModel, CutOptions, cut_rows, plan_microbatches

STOCK = 'stock Composer'


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

    def methods(self) -> dict[str, Callable[[LengthSet], np.ndarray]]:
        """Name -> function from a global batch to the loads of the ranks, (W,)."""
        return {
            STOCK: self.stock,
            'LLaVA even chunks': self.even_chunks,
            'NeMo-RL stride': self.stride,
            'token_data_spec alone': self.rank_local,
            'regrouped over ranks': self.regrouped,
        }

    def stock(self, batch: LengthSet) -> np.ndarray:
        """Every row padded to the longest of its rank, k rows a microbatch."""
        rows = self._dealt(batch.lengths)
        num_rows = rows.shape[1]
        launches = -(-num_rows // self.microbatch) * self.cost.launch
        return num_rows * self.cost.rows(rows.max(axis=1)) + launches + self._vision(batch)

    def rank_local(self, batch: LengthSet) -> np.ndarray:
        """Each rank cuts its own rows as our split does."""
        budget = self._max_tokens(batch)
        return self._vision(batch) + [
            self._price(lengths, cut_rows(lengths, CutOptions(max_tokens=budget, cost=self.cost)))
            for lengths in self._dealt(batch.lengths)
        ]

    def even_chunks(self, batch: LengthSet) -> np.ndarray:
        """LLaVA's modality-length sampler: microbatches of k rows with about equal sums, each padded to its longest.

        Longest first, every sample goes to the microbatch of least sum that has room.
        """
        num_chunks = len(batch.lengths) // self.microbatch
        open_chunks = [(0, place) for place in range(num_chunks)]
        sizes, widths, images = (np.zeros(num_chunks, dtype=int) for _ in range(3))
        for index in np.argsort(-batch.lengths, kind='stable').tolist():
            total, place = heapq.heappop(open_chunks)
            widths[place] = max(widths[place], batch.lengths[index])
            images[place] += batch.image_tokens[index]
            sizes[place] += 1
            if sizes[place] < self.microbatch:
                heapq.heappush(open_chunks, (total + int(batch.lengths[index]), place))
        prices = self.microbatch * self.cost.rows(widths) + self.cost.launch + self.cost.vision_per_token * images
        return prices.reshape(-1, self.num_ranks).sum(axis=0)

    def stride(self, batch: LengthSet) -> np.ndarray:
        """NeMo-RL dynamic batching: sort, stride over ranks, cut all ranks at the same places by budget, trim."""
        ordered = batch.take(np.argsort(-batch.lengths, kind='stable'))
        rows = self._dealt(ordered.lengths)
        budget = self._max_tokens(batch)
        loads = self._vision(ordered)
        place = 0
        while place < rows.shape[1]:
            end = min(rows.shape[1], place + max(1, budget // int(rows[0, place])))
            loads += (end - place) * self.cost.rows(rows[:, place]) + self.cost.launch
            place = end
        return loads

    def regrouped(self, batch: LengthSet) -> np.ndarray:
        """What RegroupingBatchSampler does."""
        plan = plan_microbatches(
            batch.lengths, num_ranks=self.num_ranks, max_tokens=self._max_tokens(batch),
            image_tokens=batch.image_tokens if batch.image_tokens.any() else None, cost=self.cost,
        )  # fmt: skip
        return np.array([sum(microbatch.cost for microbatch in rank) for rank in plan.ranks])

    def _price(self, lengths: np.ndarray, microbatches: list[np.ndarray] | list[list[int]]) -> float:
        widths = np.array([int(lengths[rows].max()) for rows in microbatches])
        return float(([len(rows) for rows in microbatches] * self.cost.rows(widths) + self.cost.launch).sum())

    def _dealt(self, values: np.ndarray) -> np.ndarray:
        """Values of the rows of each rank, (W, G / W)."""
        return values.reshape(-1, self.num_ranks).T

    def _vision(self, batch: LengthSet) -> np.ndarray:
        """What the images of each rank's rows cost, however they are cut, (W,)."""
        return self.cost.vision_per_token * self._dealt(batch.image_tokens).sum(axis=1)

    def _max_tokens(self, batch: LengthSet) -> int:
        return self.microbatch * int(batch.lengths.max())
