# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models how evenly the ranks are loaded, and how fast a step is, with our sampler and with others.

    python -m benchmarks.scaling

The other samplers are written from their descriptions. All have the memory of stock Composer: `k` rows as wide as the
longest sample of the global batch. One set of lengths is lognormal, the other comes from the tables in
COMPOSER_TOKACC_LENGTHS. A global batch has `G` samples, and there are `W` ranks. Writes results/scaling.json.
"""

from __future__ import annotations

import heapq
import json
import math

import numpy as np

from benchmarks.length_sets import LengthSet, lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import Row, parser_of, write
from composer_tokacc.planning import CostModel, CutOptions, Rows, lower_bound, plan_microbatches

MICROBATCH = 4
# Number of ranks, samples a rank, and number of global batches.
WORLDS = (
    (8, 16, 40),
    (64, 32, 10),
    (512, 32, 4),
    (4096, 32, 1),
)
STOCK = 'stock Composer'


def stock(batch: LengthSet, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Returns the loads of stock Composer: `k` rows a microbatch, each padded to the longest row of the rank."""
    lengths = by_rank(batch.lengths, num_ranks)
    num_rows = lengths.shape[1]
    num_microbatches = math.ceil(num_rows / MICROBATCH)
    widths = lengths.max(axis=1)
    text_cost = num_rows * cost.rows(widths)  # `cost.rows` returns the cost of one row of each width
    return text_cost + num_microbatches * cost.launch + vision_cost(batch, num_ranks, cost)


def even_chunks(batch: LengthSet, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Returns the loads of LLaVA's modality-length sampler: microbatches of `k` rows with about equal sums of lengths.

    The samples are taken from the longest to the shortest. Each goes to the microbatch with the smallest sum that still
    has room. A microbatch is padded to its longest row. The ranks get the microbatches in turn.
    """
    num_microbatches = len(batch.lengths) // MICROBATCH
    # Sum of lengths, and number of the microbatch.
    not_full = [(0, number) for number in range(num_microbatches)]
    num_rows = np.zeros(num_microbatches, dtype=int)
    widths = np.zeros(num_microbatches, dtype=int)
    image_tokens = np.zeros(num_microbatches, dtype=int)
    for sample in np.argsort(-batch.lengths, kind='stable').tolist():
        sum_of_lengths, number = heapq.heappop(not_full)
        length = int(batch.lengths[sample])
        num_rows[number] += 1
        widths[number] = max(widths[number], length)
        image_tokens[number] += batch.image_tokens[sample]
        if num_rows[number] < MICROBATCH:
            heapq.heappush(not_full, (sum_of_lengths + length, number))
    costs = MICROBATCH * cost.rows(widths) + cost.launch + cost.vision_per_token * image_tokens
    return by_rank(costs, num_ranks).sum(axis=1)


def stride(batch: LengthSet, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Returns the loads of NeMo-RL's dynamic batching.

    It sorts the samples, gives them to the ranks in turn, cuts all ranks at the same places, and trims.
    """
    longest_first = batch.take(np.argsort(-batch.lengths, kind='stable'))
    lengths = by_rank(longest_first.lengths, num_ranks)
    num_rows = lengths.shape[1]
    loads = vision_cost(longest_first, num_ranks, cost).astype(float)
    start = 0
    while start < num_rows:
        # Rank 0 has the longest row at this place, so its rows decide where all ranks cut.
        widths = lengths[:, start]
        rows_that_fit = max_tokens_of(batch) // int(widths[0])
        end = min(num_rows, start + max(1, rows_that_fit))
        loads += (end - start) * cost.rows(widths) + cost.launch
        start = end
    return loads


def regrouped(batch: LengthSet, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Returns the loads of our sampler, which plans the microbatches of all ranks together."""
    plan = plan_microbatches(
        batch.lengths,
        num_ranks=num_ranks,
        max_tokens=max_tokens_of(batch),
        image_tokens=batch.image_tokens,
        cost=cost,
    )
    loads = []
    for microbatches in plan.ranks:
        costs = [microbatch.cost for microbatch in microbatches]
        loads.append(sum(costs))
    return np.array(loads)


# Ways to share out a global batch. Each returns the load of each rank, (W,): the cost of its microbatches together.
METHODS = {
    STOCK: stock,
    'LLaVA even chunks': even_chunks,
    'NeMo-RL stride': stride,
    'regrouped over ranks': regrouped,
}


def by_rank(values: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns the values of each rank, (W, G / W), in the order of torch's DistributedSampler."""
    return values.reshape(-1, num_ranks).T


def vision_cost(batch: LengthSet, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Returns the cost of the images of each rank, (W,)."""
    return cost.vision_per_token * by_rank(batch.image_tokens, num_ranks).sum(axis=1)


def max_tokens_of(batch: LengthSet) -> int:
    return MICROBATCH * int(batch.lengths.max())


def simulate(length_set: LengthSet, num_ranks: int, per_rank: int, steps: int) -> list[Row]:
    """Returns imbalance, share of the bound and speed-up of every method, over several global batches."""
    cost = CostModel()
    global_batch = num_ranks * per_rank
    batches = length_set.draw(global_batch * steps, seed=num_ranks).global_batches(global_batch)
    # No sampler can have a smaller load of the slowest rank.
    bounds = []
    for batch in batches:
        options = CutOptions(max_tokens=max_tokens_of(batch), cost=cost)
        rows = Rows(batch.lengths, options, image_tokens=batch.image_tokens)
        bounds.append(lower_bound(rows, num_ranks))
    loads_by_method = {}
    for name, method in METHODS.items():
        loads_by_method[name] = np.stack([method(batch, num_ranks, cost) for batch in batches])
    # A step takes as long as its slowest rank.
    slowest_of_stock = loads_by_method[STOCK].max(axis=1).mean()
    figures = []
    for name, loads in loads_by_method.items():
        slowest = loads.max(axis=1).mean()
        figures.append(
            {
                'set': length_set.name,
                'ranks': num_ranks,
                'samples a rank': per_rank,
                'method': name,
                'slowest / mean': float(slowest / loads.mean()),
                'share of bound': float(np.mean(bounds) / slowest),
                'times stock': float(slowest_of_stock / slowest),
            }
        )
    return figures


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    tables, source = read_tables()
    rows = []
    # Clipping lowers the coefficient of variation from 0.92 to 0.9.
    for length_set in (tables, lognormal(0.92)):
        for world in WORLDS:
            modelled = simulate(length_set, *world)
            print(json.dumps(modelled, indent=1), flush=True)
            rows += modelled
    write(arguments.results / 'scaling.json', {'source': source, 'machine': machine(), 'modelled': rows})


if __name__ == '__main__':
    main()
