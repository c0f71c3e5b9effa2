# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How fast the planner is.

    python -m benchmarks.planning [--lengths DIR] [--quick]

Prints a table; writes results/planning.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.length_sets import LengthSet, lognormal, read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from composer_tokacc.planning import CutOptions, cut_rows, plan_microbatches

MICROBATCH = 4
# Samples of the global batch, and ranks.
SIZES = (
    (256, 8),
    (1024, 8),
    (4096, 8),
    (16384, 8),
    (1024, 64),
    (4096, 64),
    (16384, 64),
)


def time_call(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns median and least milliseconds of a call, and the least processor time, after a call to warm up.

    Processor time leaves out the time that other programs took from the core.
    """
    function()
    milliseconds = []
    processor_milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        processor_start = time.thread_time()
        function()
        processor_milliseconds.append((time.thread_time() - processor_start) * 1e3)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {
        'median_ms': float(np.median(milliseconds)),
        'least_ms': min(milliseconds),
        'least_cpu_ms': min(processor_milliseconds),
    }


def measure(sets: list[LengthSet], repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for length_set in sets:
        for objective in ('ddp', 'fsdp'):
            for size, ranks in SIZES:
                batch = length_set.draw(size, seed=size)
                plan = partial(
                    plan_microbatches,
                    batch.lengths,
                    num_ranks=ranks,
                    max_tokens=MICROBATCH * int(batch.lengths.max()),
                    objective=objective,
                )
                row = {
                    'set': length_set.name,
                    'objective': objective,
                    'samples': size,
                    'ranks': ranks,
                }
                rows.append({**row, **time_call(plan, max(15, repeats * 256 // size))})
    batch = sets[0].draw(32, seed=0)
    options = CutOptions(max_tokens=MICROBATCH * int(batch.lengths.max()))
    row = {
        'set': batch.name,
        'objective': 'cut, one rank',
        'samples': 32,
        'ranks': 1,
    }
    rows.append({**row, **time_call(partial(cut_rows, batch.lengths, options), repeats)})
    return rows


def main() -> None:
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--quick', action='store_true', help='a tenth of the repeats')
    arguments = parser.parse_args()
    tables, source = read_tables(arguments.lengths)
    rows = measure([tables, lognormal(0.92)], 20 if arguments.quick else 200)
    show(source, rows)
    results = {'source': source, 'machine': machine(), 'latency': rows}
    write(arguments.results / 'planning.json', results)


if __name__ == '__main__':
    main()
