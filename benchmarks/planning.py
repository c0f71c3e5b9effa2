# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How fast the planner is; how well it plans is in `benchmarks.scaling`.

    python -m benchmarks.planning [--lengths DIR] [--quick]

Prints a table; writes results/planning.json and results/planning.png.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_sets import LengthSet, lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from composer_tokacc.planning import CutOptions, cut_rows, plan_microbatches

MICROBATCH = 4
SIZES = [(256, 8), (1024, 8), (4096, 8), (16384, 8), (1024, 64), (4096, 64), (16384, 64)]
"""Samples of the global batch, ranks."""


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


def measure(sets: list[LengthSet], repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for length_set in sets:
        for objective in ('ddp', 'fsdp'):
            for size, ranks in SIZES:
                batch = length_set.draw(size, seed=size)
                budget = MICROBATCH * int(batch.lengths.max())

                def plan(
                    lengths: Any = batch.lengths, ranks: int = ranks, budget: int = budget, goal: Any = objective
                ) -> Any:
                    return plan_microbatches(lengths, num_ranks=ranks, max_tokens=budget, objective=goal)

                times = time_call(plan, max(15, repeats * 256 // size))
                rows.append({'set': length_set.name, 'objective': objective, 'samples': size, 'ranks': ranks, **times})
    rank = sets[0].draw(32, seed=0)
    options = CutOptions(max_tokens=MICROBATCH * int(rank.lengths.max()))
    times = time_call(lambda: cut_rows(rank.lengths, options), repeats)
    return [*rows, {'set': rank.name, 'objective': 'cut, one rank', 'samples': 32, 'ranks': 1, **times}]


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout='constrained')
    axis = figure.subplots()
    for objective, ranks in dict.fromkeys((row['objective'], row['ranks']) for row in rows if row['samples'] > 32):
        line = [
            row for row in rows if (row['set'], row['objective'], row['ranks']) == (rows[0]['set'], objective, ranks)
        ]
        x, y = zip(*((row['samples'], row['least_cpu_ms']) for row in line), strict=True)
        axis.loglog(x, y, 'o-', label=f'{objective}, {ranks} ranks')
    n = np.array([256, 16384])
    start = min(row['least_cpu_ms'] for row in rows if row['samples'] == 256)
    axis.loglog(n, start * n * np.log(n) / (256 * np.log(256)), 'k--', label='n log n')
    axis.set(xlabel='samples of the global batch', ylabel='milliseconds of processor time (least)')
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--quick', action='store_true', help='a tenth of the repeats')
    given = parser.parse_args()
    tables, source = read_tables(given.lengths)
    rows = measure([tables, lognormal(0.92)], 20 if given.quick else 200)
    show(source, rows)
    write(given.results / 'planning.json', {'source': source, 'machine': machine(), 'latency': rows})
    picture(rows, given.results / 'planning.png')


if __name__ == '__main__':
    main()
