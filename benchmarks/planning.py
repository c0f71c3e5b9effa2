# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures how long the planner takes for a global batch, with numba and without.

    python -m benchmarks.planning [--rounds 5]

Samples have lognormal lengths with a coefficient of variation of about 0.9. A microbatch has the memory of 4 rows as
long as the longest sample of the global batch. A round starts three processes:

compiling      numba compiles during the first plan, because its cache is empty
from_cache     numba loads the machine code that the first process saved
without_numba  the planner runs as plain Python

`first_plan` is the first plan of a process. The figure of a case is the median of its plans without the first one. Of
all figures, the median over the rounds is written. They are seconds of processor time. The planner has one thread, so
it takes as long on an idle machine. Writes results/planning.json.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import numpy as np

from benchmarks.length_sets import lognormal
from benchmarks.record import RESULTS, parser_of, write
from composer_tokacc.planning import plan_microbatches

RESULTS_FILE = RESULTS / 'planning.json'
# Whether the processes of a round run without numba.
DISABLE_NUMBA = {'compiling': False, 'from_cache': False, 'without_numba': True}
# Number of samples of a global batch, and number of ranks.
CASES = ((64, 2), (512, 8))
MICROBATCH = 4
Seconds = dict[str, float]


def time_plan(lengths: np.ndarray, num_ranks: int) -> float:
    """Returns the seconds to plan a global batch."""
    max_tokens = MICROBATCH * int(lengths.max())
    start = time.process_time()
    plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    return time.process_time() - start


def time_cases(num_plans: int) -> Seconds:
    """Returns the median seconds of this many plans for each case, and the seconds of the first plan."""
    length_set = lognormal(0.92)
    seconds: Seconds = {}
    for num_samples, num_ranks in CASES:
        samples = length_set.draw((1 + num_plans) * num_samples, seed=num_ranks)
        plans = [time_plan(batch.lengths, num_ranks) for batch in samples.global_batches(num_samples)]
        seconds.setdefault('first_plan', plans[0])
        seconds[f'{num_samples} samples, {num_ranks} ranks'] = statistics.median(plans[1:])
    return seconds


def in_new_process(num_plans: int, cache: str, *, disable_numba: bool) -> Seconds:
    """Runs :func:`time_cases` in a new process, because numba reads its settings when it is imported."""
    variables = {'NUMBA_CACHE_DIR': cache, 'NUMBA_DISABLE_JIT': str(int(disable_numba))}
    spawn = get_context('spawn')
    with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(time_cases, num_plans).result()


def measure(num_rounds: int, num_plans: int = 20) -> dict[str, Seconds]:
    """Returns the seconds of each process, as medians over the rounds."""
    rounds = defaultdict(list)
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory() as cache:
            for process, disable_numba in DISABLE_NUMBA.items():
                seconds = in_new_process(num_plans, cache, disable_numba=disable_numba)
                rounds[process].append(seconds)
    medians: dict[str, Seconds] = {}
    for process, seconds_of_rounds in rounds.items():
        medians[process] = {}
        for name in seconds_of_rounds[0]:
            medians[process][name] = statistics.median(seconds[name] for seconds in seconds_of_rounds)
    return medians


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    seconds = measure(arguments.rounds)
    from benchmarks.machine import machine  # here, because it loads torch, and the measured processes need none

    print(json.dumps(seconds, indent=1))
    write(arguments.results / RESULTS_FILE.name, {'machine': machine(), **seconds})


if __name__ == '__main__':
    main()
