# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens a second of the same steps, split in four ways: one process, one memory, the same rows.

    python -m benchmarks.throughput [--rounds 5] [--quick]

A small LLaVA (hidden size 512, 4 layers, fp32) trains through the real Composer Trainer. Every method has the memory of
`microbatch` rows as wide as the device batch. In each round the methods take turns. Figures are medians over rounds.
The bound is the time of the same rows if each were computed among rows of its own width, in microbatches of the same
memory: no padding at all. The prices of the planner are fitted to such times, which are measured first. The real
tables (folder COMPOSER_TOKACC_LENGTHS) are a quarter as wide, for the CPU. Without them, that set is left out.
Prints tables; writes results/throughput.json.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from benchmarks.small_llava import build_model, make_rows
from benchmarks.timed_steps import (
    METHODS,
    Row,
    StepClock,
    bound_seconds,
    equal_widths,
    fit_cost_model,
    timed,
)
from composer_tokacc import BatchLayout
from composer_tokacc.planning import CostModel
from examples.digits import DigitsDataset, build_digits_processor

MICROBATCH = 4
LONG_SET = 'lognormal CV 0.9, mean 500'


def fitted_cost(model: Any, lengths: np.ndarray, width: int) -> CostModel:
    """Fits the prices of the planner to times of four small microbatches, and of their rows in one microbatch.

    The difference is the price of a launch. On a CPU it is mostly the sum of gradients in memory.
    """
    # The first microbatches of a process are slow.
    equal_widths(lengths, model, 1, width // 4)
    rounds = []
    for _ in range(3):
        small = equal_widths(lengths, model, 1, width // 8, num_microbatches=4)
        joined = equal_widths(lengths, model, 1, width // 8, num_microbatches=4, joined=True)
        rounds.append([*small, *joined])
    counts = [count for count, _, _ in rounds[0]]
    widths = [width for _, width, _ in rounds[0]]
    seconds = []
    for index in range(len(counts)):
        seconds.append(statistics.median(times[index][2] for times in rounds))
    return fit_cost_model(counts, widths, seconds)


def measure(
    name: str,
    lengths: np.ndarray,
    device_batch: int,
    methods: Sequence[str],
    steps: int,
    rounds: int,
) -> Row:
    model = build_model()
    layout = BatchLayout.for_model(model)
    drawn = np.random.default_rng(0).choice(lengths, (steps, device_batch))
    batches = [layout.concat(make_rows(row.tolist(), seed)) for seed, row in enumerate(drawn)]
    real_tokens = int(drawn.sum())
    # The bound has the memory of the mean device batch. Their widths differ a little.
    width = int(np.mean([batch['input_ids'].shape[1] for batch in batches]))
    cost = fitted_cost(model, drawn, width)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    clocks: dict[str, StepClock] = {}
    bounds = []
    for _ in range(rounds):
        for method in methods:
            clocks[method] = timed(method, model, batches, MICROBATCH, cost)
            seconds[method].append(sum(clocks[method].seconds))
        bounds.append(bound_seconds(drawn, equal_widths(drawn, model, MICROBATCH, width)))

    def against(times: Sequence[float] | None, method: str) -> float | None:
        if times is None:
            return None
        return statistics.median(
            other / seconds_of_method for other, seconds_of_method in zip(times, seconds[method], strict=True)
        )

    rows = []
    for method in methods:
        row = {
            'method': METHODS[method],
            'tokens_per_second': real_tokens / statistics.median(seconds[method]),
            'against_stock': against(seconds.get('stock'), method),
            'against_hugging_face': against(seconds.get('collate'), method),
            'share_of_bound': against(bounds, method),
            'padding': 1 - real_tokens / sum(clocks[method].positions),
            'largest_microbatch': clocks[method].largest,
            'seconds': seconds[method],
        }
        rows.append(row)
    return {
        'set': name,
        'device_batch': device_batch,
        'microbatch': MICROBATCH,
        'steps': steps,
        'rounds': rounds,
        'mean_length': float(drawn.mean()),
        'variation': float(drawn.std() / drawn.mean()),
        'cost': asdict(cost),
        'bound_tokens_per_second': real_tokens / statistics.median(bounds),
        'bounds': bounds,
        'methods': rows,
    }


def length_sets() -> dict[str, np.ndarray]:
    digits = DigitsDataset(build_digits_processor(), num_samples=512)
    sets = {
        'lognormal CV 0.9': np.clip(lognormal(0.92, mean=320).lengths, 12, 2048),
        LONG_SET: lognormal(0.92).lengths,
        'no padding': np.full(1000, 128),
        'digits': np.array([digits[index]['input_ids'].shape[1] for index in range(512)]),
    }
    tables, source = read_tables()
    if source.startswith('real'):
        sets['real tables / 4'] = np.maximum(tables.lengths // 4, 4)
    return sets


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--quick', action='store_true', help='one round of one step')
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    sets = length_sets()
    runs = []
    for name in sets:
        steps = 2 if name in ('digits', 'no padding') else 1
        runs.append((name, 32, tuple(METHODS), steps))
    # Many rows leave the planner most to choose from. The other methods would be slow there.
    runs.append((LONG_SET, 128, ('ours',), 1))
    results = []
    for name, device_batch, methods, steps in runs:
        rounds = arguments.rounds
        if arguments.quick:
            steps = rounds = 1
        result = measure(name, sets[name], device_batch, methods, steps, rounds)
        results.append({'machine': machine(), **result})
        rows = [{key: value for key, value in row.items() if key != 'seconds'} for row in result['methods']]
        show(
            f'{name}, {device_batch} rows; bound {result["bound_tokens_per_second"]:,.0f} real tokens/s',
            rows,
        )
        write(arguments.results / 'throughput.json', {'results': results})


if __name__ == '__main__':
    main()
