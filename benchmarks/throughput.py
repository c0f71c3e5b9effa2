# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens per second of the same steps, cut in four ways: one process, one memory cap, the same rows.

    python -m benchmarks.throughput [--sets 'NAME SIZE' ...] [--rounds 5] [--quick]

A small LLaVA (hidden size 512, 4 layers, fp32) trains through the real Composer Trainer. Every method gets the memory
of `microbatch` rows as wide as the device batch. Rounds take the methods in turn; figures are medians over rounds. The
bound times rows of many widths among rows of their own width, in microbatches of the same memory, and adds them up:
no padding at all, perfectly cut. The planner's prices are fitted to such times, taken before. The real
tables (folder COMPOSER_TOKACC_LENGTHS) are scaled down in width for the CPU; without them that set is left out.
Prints tables; writes results/throughput.json and .png.
"""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from benchmarks.small_llava import build_model, make_rows
from benchmarks.timed_steps import METHODS, Row, StepClock, bound_seconds, equal_widths, fit_cost_model, timed
from composer_tokacc import BatchLayout
from composer_tokacc.planning import CostModel
from examples.digits import DigitsDataset, build_digits_processor

MICROBATCH = 4
LONG = 'lognormal CV 0.9, mean 500'


def fitted_cost(model: Any, lengths: np.ndarray, width: int) -> CostModel:
    """What the planner is told of this machine: the same rows in four small microbatches and in one, at many widths.

    The difference is what launches cost, which on a CPU is mostly the adding up of gradients in memory.
    """
    equal_widths(lengths, model, 1, width // 4)  # the first ones of a process are slow
    small, joined = [], []
    for _ in range(3):
        small.append(equal_widths(lengths, model, 1, width // 8, num_microbatches=4))
        joined.append(equal_widths(lengths, model, 1, width // 8, num_microbatches=4, joined=True))
    medians = [
        (*shapes[0][:2], statistics.median(shape[2] for shape in shapes))
        for repeats in (small, joined)
        for shapes in zip(*repeats, strict=True)
    ]
    counts, widths, seconds = zip(*medians, strict=True)
    return fit_cost_model(counts, widths, seconds)


def measure(name: str, lengths: np.ndarray, device_batch: int, methods: Sequence[str], steps: int, rounds: int) -> Row:
    rng = np.random.default_rng(0)
    model = build_model()
    layout = BatchLayout.for_model(model)
    drawn = rng.choice(lengths, (steps, device_batch))
    batches = [layout.concat(make_rows(row.tolist(), seed)) for seed, row in enumerate(drawn)]
    real = int(drawn.sum())
    # Same caps as the device batches', which differ a little in width.
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

    def against(times: Sequence[float], method: str) -> float:
        return statistics.median(a / b for a, b in zip(times, seconds[method], strict=True))

    rows = []
    for method in methods:
        rows.append({
            'method': METHODS[method],
            'tokens_per_second': real / statistics.median(seconds[method]),
            'against_stock': against(seconds['stock'], method) if 'stock' in methods else None,
            'against_hugging_face': against(seconds['collate'], method) if 'collate' in methods else None,
            'share_of_bound': against(bounds, method),
            'padding': 1 - real / sum(clocks[method].positions),
            'largest_microbatch': clocks[method].largest,
            'seconds': seconds[method],
        })  # fmt: skip
    return {
        'set': name, 'device_batch': device_batch, 'microbatch': MICROBATCH, 'steps': steps, 'rounds': rounds,
        'mean_length': float(drawn.mean()), 'variation': float(drawn.std() / drawn.mean()), 'cost': asdict(cost),
        'bound_tokens_per_second': real / statistics.median(bounds), 'bounds': bounds, 'methods': rows,
    }  # fmt: skip


def length_sets() -> dict[str, np.ndarray]:
    sets = {'lognormal CV 0.9': np.clip(lognormal(0.92, mean=320).lengths, 12, 2048)}
    sets[LONG] = lognormal(0.92).lengths
    sets['no padding'] = np.full(1000, 128)
    digits = DigitsDataset(build_digits_processor(), num_samples=512)
    sets['digits'] = np.array([digits[index]['input_ids'].shape[1] for index in range(512)])
    tables, source = read_tables()
    if source.startswith('real'):
        sets['real tables / 4'] = np.maximum(tables.lengths // 4, 4)
    return sets


def picture(results: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(len(results), 2)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(6.5 * columns, 2.9 * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(results) :]:
        axis.axis('off')
    for axis, result in zip(axes, results, strict=False):
        speeds = [row['tokens_per_second'] for row in result['methods']]
        names = [row['method'] for row in result['methods']]
        colors = [
            {'token_data_spec': 'tab:green'}.get(name, 'tab:olive' if 'packing' in name else 'tab:gray')
            for name in names
        ]
        bars = axis.barh(range(len(speeds)), speeds, color=colors)
        labels = [
            f'{speed / speeds[0]:.1f}x, {row["padding"]:.0%} padding'
            for speed, row in zip(speeds, result['methods'], strict=True)
        ]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.axvline(result['bound_tokens_per_second'], color='tab:red', lw=1, ls='--', label='no padding at all')
        axis.set_xlim(0, max(*speeds, result['bound_tokens_per_second']) * 1.4)
        axis.set_yticks(range(len(speeds)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f'{result["set"]}, {result["device_batch"]} rows a step', fontsize=10)
        axis.set_xlabel('real tokens per second')
    axes[0].legend(fontsize=8, loc='lower right')
    figure.suptitle('Same rows, same memory in each panel: small LLaVA, fp32, CPU')
    figure.savefig(path, dpi=130)


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__)
    parser.add_argument('--sets', nargs='*', help="name and device batch, e.g. 'digits 32'")
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--quick', action='store_true', help='one round of one step')
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    sets = length_sets()
    # Many rows give the planner most to choose from; the slow ways to cut them are left out there.
    runs = [(name, 32, tuple(METHODS), 2 if name in ('digits', 'no padding') else 1) for name in sets]
    runs.append((LONG, 128, ('ours',), 1))
    file = given.results / 'throughput.json'
    # With --sets, what was measured of the others before stays.
    known = json.loads(file.read_text())['results'] if given.sets and file.exists() else []
    results = {(one['set'], one['device_batch']): one for one in known}
    for name, device_batch, methods, steps in runs:
        if given.sets and f'{name} {device_batch}' not in given.sets:
            continue
        steps, rounds = (1, 1) if given.quick else (steps, given.rounds)
        found = measure(name, sets[name], device_batch, methods, steps, rounds)
        results[name, device_batch] = {'machine': machine(), **found}
        rows = [{key: value for key, value in row.items() if key != 'seconds'} for row in found['methods']]
        show(f'{name}, {device_batch} rows; bound {found["bound_tokens_per_second"]:,.0f} real tokens/s', rows)
    ordered = [results[name, size] for name, size, *_ in runs if (name, size) in results]
    write(file, {'results': ordered})
    picture(ordered, given.results / 'throughput.png')


if __name__ == '__main__':
    main()
