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

from composer_tokacc.planning import CostModel, cut, plan_microbatches

MEGA_BATCHES = 50
"""Global batches that Hugging Face's LengthGroupedSampler sorts at a time."""


class Loads:
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

    def methods(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """Name -> function from the lengths of a global batch to the loads of the ranks."""
        return {
            'stock DistributedSampler': self.stock,
            'stock, trimmed': lambda lengths: self._in_chunks(self._dealt(lengths)),
            'LLaVA even chunks': self.even_chunks,
            'NeMo-RL stride': self.stride,
            'token_data_spec alone': self.rank_local,
            'regrouped over ranks': self.regrouped,
        }

    def stock(self, lengths: np.ndarray) -> np.ndarray:
        """Every row padded to the longest of its rank."""
        rows = self._dealt(lengths)
        num_rows = rows.shape[1]
        launches = -(-num_rows // self.microbatch) * self.cost.launch
        return num_rows * self.cost.rows(rows.max(axis=1)) + launches

    def even_chunks(self, lengths: np.ndarray) -> np.ndarray:
        """LLaVA's modality-length sampler: microbatches of k rows with about equal sums, each padded to its longest.

        Longest first, every sample goes to the microbatch of least sum that has room.
        """
        num_chunks = len(lengths) // self.microbatch
        open_chunks = [(0, place) for place in range(num_chunks)]
        sizes, widths = np.zeros(num_chunks, dtype=int), np.zeros(num_chunks, dtype=int)
        for length in np.sort(lengths)[::-1].tolist():
            total, place = heapq.heappop(open_chunks)
            widths[place] = max(widths[place], length)
            sizes[place] += 1
            if sizes[place] < self.microbatch:
                heapq.heappush(open_chunks, (total + length, place))
        prices = self.microbatch * self.cost.rows(widths) + self.cost.launch
        return prices.reshape(-1, self.num_ranks).sum(axis=0)

    def stride(self, lengths: np.ndarray) -> np.ndarray:
        """NeMo-RL dynamic batching: sort, stride over ranks, cut all ranks at the same places by budget, trim."""
        rows = self._dealt(np.sort(lengths)[::-1])
        budget = self._max_tokens(lengths)
        loads = np.zeros(self.num_ranks)
        place = 0
        while place < rows.shape[1]:
            end = min(rows.shape[1], place + max(1, budget // int(rows[0, place])))
            loads += (end - place) * self.cost.rows(rows[:, place]) + self.cost.launch
            place = end
        return loads

    def rank_local(self, lengths: np.ndarray) -> np.ndarray:
        """Dealt as stock; each rank cuts its own rows by budget and trims."""
        budget = self._max_tokens(lengths)

        def load(rows: np.ndarray) -> float:
            return sum(
                self.cost.microbatch(len(part), int(rows[part].max())) for part in cut(rows, budget, cost=self.cost)
            )

        return np.array([load(rows) for rows in self._dealt(lengths)])

    def regrouped(self, lengths: np.ndarray) -> np.ndarray:
        """What RegroupingBatchSampler does."""
        plan = plan_microbatches(
            lengths, num_ranks=self.num_ranks, max_tokens=self._max_tokens(lengths), cost=self.cost
        )
        return np.array([sum(microbatch.cost for microbatch in rank) for rank in plan.ranks])

    def length_grouped(self, epoch: np.ndarray, global_batch: int) -> list[np.ndarray]:
        """Hugging Face's group_by_length over an epoch: mega-batches sorted, microbatches padded to their own longest.

        It changes who is in a global batch, which the others do not.
        """
        mega = global_batch * max(1, min(len(epoch) // (global_batch * 4), MEGA_BATCHES))
        ordered = np.concatenate([np.sort(epoch[start : start + mega])[::-1] for start in range(0, len(epoch), mega)])
        batches = ordered.reshape(-1, global_batch)
        return [self._in_chunks(self._dealt(batch)) for batch in batches]

    def _dealt(self, lengths: np.ndarray) -> np.ndarray:
        """Rows of each rank, (W, G / W)."""
        return lengths.reshape(-1, self.num_ranks).T

    def _in_chunks(self, rows: np.ndarray) -> np.ndarray:
        """Microbatches of k rows in the order dealt, each padded to its own longest."""
        starts = np.arange(0, rows.shape[1], self.microbatch)
        widths = np.maximum.reduceat(rows, starts, axis=1)
        sizes = np.diff([*starts, rows.shape[1]])
        return (sizes * self.cost.rows(widths)).sum(axis=1) + len(starts) * self.cost.launch

    def _max_tokens(self, lengths: np.ndarray) -> int:
        return self.microbatch * int(lengths.max())
