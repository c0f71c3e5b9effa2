# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures how long the planner takes for a global batch, with numba and without.

    python -m benchmarks.planning [--rounds 5]

Samples have lognormal lengths with a coefficient of variation of about 0.9. A microbatch has the memory of 4 rows as
long as the longest sample of the global batch. A round starts three processes. In the first one numba compiles, because
its cache is empty. The second one loads the machine code that the first one saved. The third one runs without numba.
The first plan of each case is left out of the medians, because it may compile. Figures are medians over plans, then
over rounds. All are processor times: the planner has one thread, so that is how long it takes on an idle machine.
Writes results/planning.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import numpy as np

from benchmarks.length_sets import lognormal
from benchmarks.machine import machine
from benchmarks.record import RESULTS, Row, parser_of, table, write
from composer_tokacc.planning import plan_microbatches

RESULTS_FILE = RESULTS / 'planning.json'
# Number of samples of a global batch, and number of ranks.
CASES = ((64, 2), (512, 8))
MICROBATCH = 4
# Global batches of a case, after the first one.
NUM_BATCHES = 20


def time_plan(lengths: np.ndarray, num_ranks: int) -> float:
    """Returns the seconds of processor time to plan a global batch."""
    max_tokens = MICROBATCH * int(lengths.max())
    start = time.process_time()
    plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    return time.process_time() - start


def time_cases(num_batches: int) -> list[Row]:
    """Returns for each case the seconds of its first plan, and the median of the later ones."""
    length_set = lognormal(0.92)
    rows = []
    for num_samples, num_ranks in CASES:
        samples = length_set.draw((1 + num_batches) * num_samples, seed=num_ranks)
        batches = samples.global_batches(num_samples)
        seconds = [time_plan(batch.lengths, num_ranks) for batch in batches]
        rows.append({'first_seconds': seconds[0], 'seconds': statistics.median(seconds[1:])})
    return rows


def in_new_process(num_batches: int, cache: str, *, use_numba: bool) -> list[Row]:
    """Runs :func:`time_cases` in a new process, because numba reads its settings when it is imported."""
    variables = {'NUMBA_CACHE_DIR': cache, 'NUMBA_DISABLE_JIT': '0' if use_numba else '1'}
    spawn = get_context('spawn')
    with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(time_cases, num_batches).result()


def measure(rounds: int, num_batches: int = NUM_BATCHES) -> Row:
    """Returns the times of all cases, and of the first plan of a process."""
    compiling = []
    loading = []
    without_numba = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            compiling.append(in_new_process(num_batches, cache, use_numba=True))
            loading.append(in_new_process(num_batches, cache, use_numba=True))
            without_numba.append(in_new_process(num_batches, cache, use_numba=False))
    cases = []
    for index, (num_samples, num_ranks) in enumerate(CASES):
        compiled_seconds = median_of(loading, index, 'seconds')
        plain_seconds = median_of(without_numba, index, 'seconds')
        cases.append(
            {
                'samples': num_samples,
                'ranks': num_ranks,
                'with_numba_seconds': compiled_seconds,
                'without_numba_seconds': plain_seconds,
                'times_as_long': plain_seconds / compiled_seconds,
            }
        )
    return {
        'cases': cases,
        'compile_seconds': median_of(compiling, 0, 'first_seconds'),
        'load_seconds': median_of(loading, 0, 'first_seconds'),
    }


def median_of(rounds: list[list[Row]], case: int, figure: str) -> float:
    return statistics.median(cases[case][figure] for cases in rounds)


def table_of(results: Row) -> str:
    """Returns a table with a row for each case."""
    rows = []
    for case in results['cases']:
        with_numba = f'{1000 * case["with_numba_seconds"]:.1f} ms'
        without_numba = f'{1000 * case["without_numba_seconds"]:.1f} ms'
        times_as_long = f'{case["times_as_long"]:.0f}'
        rows.append((case['samples'], case['ranks'], with_numba, without_numba, times_as_long))
    return table(('samples', 'ranks', 'with numba', 'without numba', 'times as long'), rows)


def main() -> None:
    parser = parser_of(__doc__, results=RESULTS_FILE)
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    results = measure(arguments.rounds)
    print(table_of(results))
    compile_seconds = results['compile_seconds']
    load_seconds = results['load_seconds']
    print(f'First plan of a process: {compile_seconds:.1f} s if numba compiles, {load_seconds:.2f} s from its cache.')
    write(arguments.results, {'machine': machine(), **results})


if __name__ == '__main__':
    main()
