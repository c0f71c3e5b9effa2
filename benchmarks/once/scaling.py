# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models how evenly the ranks are loaded, and how fast a step is, with our sampler and with others.

    python -m benchmarks.once.scaling [--lengths DIR] [--quick]

On 8 to 4,096 ranks and the real tables, it showed that the slowest rank has 0.1 to 0.4 % more load than the mean after
planning, and that steps are 1.77 to 2.27 times as fast as with stock Composer. The other samplers are written from
their descriptions. All have the memory of stock Composer: `k` rows as wide as the longest sample of the global batch.
Samples come in the order of torch's DistributedSampler: rank ``r`` of ``W`` gets places ``r, r + W, ...``.
Prints tables and writes results/scaling.json.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.length_sets import LengthSet, lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from composer_tokacc.planning import (
    CostModel,
    CutOptions,
    Rows,
    lower_bound,
    plan_microbatches,
)

MICROBATCH = 4
# Number of ranks, samples a rank, and number of global batches.
WORLDS = ((8, 16, 40), (64, 32, 10), (512, 32, 4), (4096, 32, 1))
STOCK = 'stock Composer'


class Samplers:
    """Ways to share out a global batch. Each method returns the loads of the ranks, (W,).

    Args:
        num_ranks: The number of ranks, W.
        cost: The cost model.
    """

    def __init__(self, num_ranks: int, cost: CostModel) -> None:
        self.num_ranks = num_ranks
        self.cost = cost

    def methods(self) -> dict[str, Callable[[LengthSet], np.ndarray]]:
        return {
            STOCK: self.stock,
            'LLaVA even chunks': self.even_chunks,
            'NeMo-RL stride': self.stride,
            'regrouped over ranks': self.regrouped,
        }

    def stock(self, batch: LengthSet) -> np.ndarray:
        """Stock Composer: k rows a microbatch, each padded to the longest row of the rank."""
        rows = self._by_rank(batch.lengths)
        num_rows = rows.shape[1]
        num_microbatches = math.ceil(num_rows / MICROBATCH)
        launches = num_microbatches * self.cost.launch
        text = num_rows * self.cost.rows(rows.max(axis=1))
        return text + launches + self._vision(batch)

    def even_chunks(self, batch: LengthSet) -> np.ndarray:
        """LLaVA's modality-length sampler: microbatches of k rows with about equal sums, each padded to its longest.

        Longest first, every sample goes to the microbatch with the least sum that has room.
        """
        num_chunks = len(batch.lengths) // MICROBATCH
        open_chunks = [(0, chunk) for chunk in range(num_chunks)]
        sizes = np.zeros(num_chunks, dtype=int)
        widths = np.zeros(num_chunks, dtype=int)
        images = np.zeros(num_chunks, dtype=int)
        for index in np.argsort(-batch.lengths, kind='stable').tolist():
            total, chunk = heapq.heappop(open_chunks)
            length = int(batch.lengths[index])
            widths[chunk] = max(widths[chunk], length)
            images[chunk] += batch.image_tokens[index]
            sizes[chunk] += 1
            if sizes[chunk] < MICROBATCH:
                heapq.heappush(open_chunks, (total + length, chunk))
        text = MICROBATCH * self.cost.rows(widths) + self.cost.launch
        loads = text + self.cost.vision_per_token * images
        return loads.reshape(-1, self.num_ranks).sum(axis=0)

    def stride(self, batch: LengthSet) -> np.ndarray:
        """NeMo-RL's dynamic batching: sort, stride over ranks, cut all ranks at the same places, trim."""
        longest_first = batch.take(np.argsort(-batch.lengths, kind='stable'))
        rows = self._by_rank(longest_first.lengths)
        num_rows = rows.shape[1]
        loads = self._vision(longest_first).astype(float)
        start = 0
        while start < num_rows:
            # Rank 0 has the longest row at this place, so its rows decide where all ranks cut.
            rows_that_fit = max_tokens_of(batch) // int(rows[0, start])
            end = min(num_rows, start + max(1, rows_that_fit))
            loads += (end - start) * self.cost.rows(rows[:, start])
            loads += self.cost.launch
            start = end
        return loads

    def regrouped(self, batch: LengthSet) -> np.ndarray:
        """Plans as RegroupingBatchSampler does."""
        plan = plan_microbatches(
            batch.lengths,
            num_ranks=self.num_ranks,
            max_tokens=max_tokens_of(batch),
            image_tokens=batch.image_tokens if batch.image_tokens.any() else None,
            cost=self.cost,
        )
        loads = []
        for microbatches in plan.ranks:
            loads.append(sum(microbatch.cost for microbatch in microbatches))
        return np.array(loads)

    def _by_rank(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of the rows of each rank, (W, G / W)."""
        return values.reshape(-1, self.num_ranks).T

    def _vision(self, batch: LengthSet) -> np.ndarray:
        """Returns the cost of the images of each rank, (W,)."""
        return self.cost.vision_per_token * self._by_rank(batch.image_tokens).sum(axis=1)


def max_tokens_of(batch: LengthSet) -> int:
    return MICROBATCH * int(batch.lengths.max())


def simulate(length_set: LengthSet, num_ranks: int, per_rank: int, steps: int) -> list[dict[str, Any]]:
    """Returns imbalance, share of the bound and speed-up of every method, over several global batches."""
    cost = CostModel()
    global_batch = num_ranks * per_rank
    batches = length_set.draw(global_batch * steps, seed=num_ranks).global_batches(global_batch)
    bounds = []
    for batch in batches:
        options = CutOptions(max_tokens=max_tokens_of(batch), cost=cost)
        batch_rows = Rows(batch.lengths, options, image_tokens=batch.image_tokens)
        bounds.append(lower_bound(batch_rows, num_ranks))
    loads = {}
    for name, method in Samplers(num_ranks, cost).methods().items():
        loads[name] = np.stack([method(batch) for batch in batches])
    stock_step = loads[STOCK].max(axis=1).mean()
    rows = []
    for name, loads_of_method in loads.items():
        step = loads_of_method.max(axis=1).mean()
        row = {
            'set': length_set.name,
            'ranks': num_ranks,
            'samples a rank': per_rank,
            'method': name,
            'slowest / mean': float(step / loads_of_method.mean()),
            'share of bound': float(np.mean(bounds) / step),
            'times stock': float(stock_step / step),
        }
        rows.append(row)
    return rows


def main() -> None:
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--quick', action='store_true', help='fewer ranks')
    arguments = parser.parse_args()
    tables, source = read_tables(arguments.lengths)
    worlds = WORLDS[:2] if arguments.quick else WORLDS
    rows = []
    for length_set in (tables, lognormal(0.92)):
        for world in worlds:
            rows += simulate(length_set, *world)
    show(f'Modelled, memory of {MICROBATCH} rows; {source}', rows)
    write(arguments.results / 'scaling.json', {'source': source, 'machine': machine(), 'modelled': rows})


if __name__ == '__main__':
    main()
