# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The planner: how fast it is, how close to the bound, and how much faster than others the modelled step becomes.

    python -m benchmarks.planning [--lengths DIR] [--quick]

DIR holds tables `tokens,image_tiles` as .csv.gz; COMPOSER_TOKACC_LENGTHS is used if it is not given, seeded synthetic
tables if neither is there. Prints tables; writes results/planning.json and results/planning.png next to this file.
Times of steps are modelled (cost.py), not measured: benchmarks/throughput.py measures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_sets import LengthSet, half_text, lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.modelled import STOCK, Rivals
from composer_tokacc.planning import CostModel, CutOptions, cut_rows, plan_microbatches

RESULTS = Path(__file__).resolve().parent / 'results'
NUM_RANKS = 8
MICROBATCH = 4
VISION = 0.17  # a 300M vision tower on four patches an image token, beside a 7B language model
SIZES = [(256, 8), (1024, 8), (4096, 8), (16384, 8), (1024, 64), (4096, 64), (16384, 64)]


def time_call(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and least milliseconds of a call, after one to warm up, and the least processor time.

    Processor time leaves out what other programs took from the core, so growth is read from it.
    """
    function()
    spent, busy = [], []
    for _ in range(repeats):
        start, start_busy = time.perf_counter(), time.thread_time()
        function()
        busy.append((time.thread_time() - start_busy) * 1e3)
        spent.append((time.perf_counter() - start) * 1e3)
    return {'median_ms': float(np.median(spent)), 'least_ms': min(spent), 'least_cpu_ms': min(busy)}


def measure_latency(sets: list[LengthSet], repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Latency of plans by size, and the exponent of its growth with the number of samples."""
    rows: list[dict[str, Any]] = []
    for length_set in sets:
        for objective in ('ddp', 'fsdp'):
            for size, ranks in SIZES:
                batch = length_set.draw(size, seed=size)
                budget = MICROBATCH * int(batch.lengths.max())

                def plan(
                    batch: LengthSet = batch, ranks: int = ranks, budget: int = budget, goal: Any = objective
                ) -> Any:
                    return plan_microbatches(batch.lengths, num_ranks=ranks, max_tokens=budget, objective=goal)

                times = time_call(plan, max(15, repeats * 256 // size))
                rows.append({'set': length_set.name, 'objective': objective, 'samples': size, 'ranks': ranks, **times})
    rank = sets[0].draw(32, seed=0)
    options = CutOptions(max_tokens=MICROBATCH * int(rank.lengths.max()))
    times = time_call(lambda: cut_rows(rank.lengths, options), repeats)
    rows.append({'set': rank.name, 'objective': 'cut, one rank', 'samples': 32, 'ranks': 1, **times})
    growth = {}
    for length_set in sets:
        for objective in ('ddp', 'fsdp'):
            picked = [
                r for r in rows if (r['set'], r['objective'], r['ranks']) == (length_set.name, objective, NUM_RANKS)
            ]
            x, y = np.log([r['samples'] for r in picked]), np.log([r['least_cpu_ms'] for r in picked])
            growth[f'{length_set.name}, {objective}'] = float(np.polyfit(x, y, 1)[0])
    return rows, growth


def compare(length_set: LengthSet, global_batch: int, steps: int, cost: CostModel) -> list[dict[str, Any]]:
    """Every method on the same samples: share of the bound and speed-up over stock Composer."""
    rivals = Rivals(NUM_RANKS, MICROBATCH, cost)
    epoch = length_set.draw(global_batch * steps, seed=global_batch)
    batches = epoch.global_batches(global_batch)
    totals = {name: sum(float(method(batch).max()) for batch in batches) for name, method in rivals.methods().items()}
    totals['regrouped, FSDP'] = sum(rivals.plan(batch, 'fsdp').stats.cost for batch in batches)
    totals['HF LengthGrouped *'] = sum(float(loads.max()) for loads in rivals.length_grouped(epoch, global_batch))
    bound = sum(rivals.plan(batch).stats.bound for batch in batches)
    totals['bound'] = bound
    return [
        {
            'set': length_set.name,
            'variation': length_set.variation,
            'global_batch': global_batch,
            'launch': cost.launch,
            'method': name,
            'share_of_bound': bound / total,
            'speed_up': totals[STOCK] / total,
        }
        for name, total in totals.items()
    ]


def side_by_side(rows: list[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """One line for each set, global batch and launch; one column for each method."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        fixed = {key: row[key] for key in ('set', 'variation', 'global_batch', 'launch')}
        lines.setdefault(tuple(fixed.values()), fixed)[row['method']] = row[figure]
    return list(lines.values())


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table, with rich where it is installed."""
    columns = list(rows[0])
    cells = [[f'{v:.3f}' if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[k]) for line in [columns, *cells]) for k in range(len(columns))]
        print(f'\n{title}')
        for line in [columns, *cells]:
            print('  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title, title_justify='left')
    for column in columns:
        table.add_column(
            column,
            justify='left' if isinstance(rows[0][column], str) else 'right',
            no_wrap=isinstance(rows[0][column], str),
        )
    for line in cells:
        table.add_row(*line)
    Console(width=190).print(table)


def picture(latency: list[dict[str, Any]], rows: list[dict[str, Any]], path: Path) -> None:
    """Latency over the number of samples, and speed-ups at a global batch of 256."""
    import matplotlib as mpl

    mpl.use('Agg')
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), width_ratios=[1, 2])
    for key in dict.fromkeys((r['objective'], r['ranks']) for r in latency if r['samples'] > 32):
        line = [r for r in latency if (r['objective'], r['ranks']) == key and r['set'] == latency[0]['set']]
        left.loglog(
            [r['samples'] for r in line], [r['least_cpu_ms'] for r in line], 'o-', label=f'{key[0]}, {key[1]} ranks'
        )
    n = np.array([256, 16384])
    start = min(r['least_cpu_ms'] for r in latency if r['samples'] == 256)
    left.loglog(n, start * n * np.log(n) / (256 * np.log(256)), 'k--', label='n log n')
    left.set(
        xlabel='samples of the global batch',
        ylabel='milliseconds of processor time (least)',
        title='Latency of a plan',
    )
    left.legend()
    picked = [r for r in rows if r['global_batch'] == 256]
    names, sets = (list(dict.fromkeys(r[key] for r in picked)) for key in ('method', 'set'))
    for k, name in enumerate(names):
        heights = [next(r['speed_up'] for r in picked if (r['set'], r['method']) == (s, name)) for s in sets]
        right.bar(np.arange(len(sets)) + (k - len(names) / 2) * 0.09, heights, 0.085, label=name)
    right.set(xticks=range(len(sets)), xticklabels=sets, ylabel='times stock Composer, modelled')
    right.set_title(f'Equal memory, global batch 256, {NUM_RANKS} ranks')
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--lengths', type=Path, default=os.environ.get('COMPOSER_TOKACC_LENGTHS'))
    parser.add_argument('--output', type=Path, default=RESULTS)
    parser.add_argument('--quick', action='store_true', help='a tenth of the steps and repeats')
    arguments = parser.parse_args()
    tables, source = read_tables(None if arguments.lengths is None else Path(arguments.lengths))
    print(source)
    hard = lognormal(0.92)
    latency, growth = measure_latency([tables, hard], 20 if arguments.quick else 200)
    show('Latency of a plan, after warm-up', latency)
    show('Growth', [{'set': key, 'exponent in samples': value} for key, value in growth.items()])

    scale = 10 if arguments.quick else 1
    rows: list[dict[str, Any]] = []
    sets = [(tables, 0.0), (half_text(tables), VISION), (lognormal(0.3), 0.0), (lognormal(0.5), 0.0), (hard, 0.0)]
    for length_set, vision in sets:
        for global_batch, steps in ((32, 400), (256, 60), (1024, 20)):
            rows += compare(length_set, global_batch, max(2, steps // scale), CostModel(vision_per_token=vision))
    memory = f'{NUM_RANKS} ranks, memory of {MICROBATCH} rows; * changes who is in a global batch'
    show(f'Times stock Composer, modelled ({memory})', side_by_side(rows, 'speed_up'))
    show(f'Share of the bound, modelled ({memory})', side_by_side(rows, 'share_of_bound'))
    launches = [
        row
        for launch in (0.0, 32.0, 512.0)
        for global_batch, steps in ((32, 100), (256, 20), (1024, 10))
        for row in compare(tables, global_batch, max(2, steps // scale), CostModel(launch=launch))
        if row['method'].startswith('regrouped')
    ]
    show('Share of the bound with other prices of a launch, in tokens', side_by_side(launches, 'share_of_bound'))
    show('Times stock Composer, likewise', side_by_side(launches, 'speed_up'))
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = {
        'source': source,
        'machine': machine(),
        'num_ranks': NUM_RANKS,
        'microbatch': MICROBATCH,
        'latency': latency,
        'growth': growth,
        'methods': rows,
        'launches': launches,
    }
    (arguments.output / 'planning.json').write_text(json.dumps(report, indent=1) + '\n')
    try:
        picture(latency, rows, arguments.output / 'planning.png')
    except ImportError:
        print('matplotlib is not installed: no picture')


if __name__ == '__main__':
    main()
