# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures the time of TokenAccumulation and of the ledger by source, as shares of a step of the demo on two ranks.

    composer -n 2 -m benchmarks.overhead [--steps 40] [algorithms.token_accumulation.token_weights=sqrt]

Runs yamls/digits.yaml with samples of two sources. The ledger by source is the part of TokenMonitor that adds up loss
and tokens of each source. The time of the algorithm is the time in its events and backward hooks. It includes its
all-reduce, which waits for the other rank. The time of the all-reduce is also shown by itself. Rank 0 prints medians
over the steps, and writes results/overhead.json.

Checks of rows are timed, too: the first one, and the later ones, in steps 16, 32 and so on, or for rows of a new kind.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist

from benchmarks.machine import machine
from benchmarks.record import ROOT, parser_of, write
from composer_tokacc import TokenAccumulation
from composer_tokacc.algorithm import token_accumulation
from composer_tokacc.checks.first_batch import LOOK_AGAIN, FirstBatchCheck
from composer_tokacc.checks.step import MicrobatchRecord
from composer_tokacc.monitor.source_ledger import SourceLedger
from composer_tokacc.programs import load_config
from composer_tokacc.programs.build import build_parts, build_trainer
from composer_tokacc.programs.config_checks import check_config

DEMO = ROOT / 'yamls' / 'digits.yaml'
TWO_SOURCES = 'dataset.parts={one: {num_samples: 2048}, other: {num_samples: 2048, seed: 5}}'
# The first step pays for the check of the first batch. In the next steps many labels occur for the first time. The
# algorithm measures microbatches with such labels, so these steps take longer than later ones.
UNMEASURED_STEPS = 10


class StepTimes(Callback):
    """Measures the seconds of each step, and the seconds in functions that :meth:`watch` was called for."""

    def __init__(self) -> None:
        # Seconds in this step so far, by the parts that are timed.
        self.seconds = {'algorithm': 0.0, 'all_reduce': 0.0, 'ledger': 0.0, 'check': 0.0}
        self.steps: list[dict[str, float]] = []
        self.started = 0.0

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replaces a function of a class, an object or a module by one that adds its seconds to this part."""
        function = getattr(owner, name)

        def timed_function(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        setattr(owner, name, timed_function)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.started = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.steps.append({**self.seconds, 'step': time.perf_counter() - self.started})


def measure_demo(steps: int, overrides: list[str]) -> StepTimes:
    """Trains the demo run, and measures the time in functions of the algorithm and the ledger."""
    settings = [f'trainer.max_duration={steps}ba', 'trainer.progress_bar=false', TWO_SOURCES]
    config = load_config(DEMO, [*settings, *overrides])
    check_config(config)
    trainer = build_trainer(config, build_parts(config), InMemoryLogger())
    times = StepTimes()
    trainer.state.callbacks.append(times)
    for algorithm in trainer.state.algorithms:
        if isinstance(algorithm, TokenAccumulation):
            times.watch(algorithm, 'apply', 'algorithm')
    times.watch(MicrobatchRecord, 'observe', 'algorithm')
    times.watch(MicrobatchRecord, '_measure', 'algorithm')
    times.watch(token_accumulation, 'summed_over_ranks', 'all_reduce')
    times.watch(FirstBatchCheck, 'prove', 'check')
    # The ledger also needs an exchange, but the monitor makes that exchange in any case.
    times.watch(SourceLedger, 'note', 'ledger')
    times.watch(SourceLedger, 'sums_of_rank', 'ledger')
    times.watch(SourceLedger, 'add_up', 'ledger')
    trainer.fit()
    return times


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__)
    parser.add_argument('--steps', type=int, default=40)
    arguments, overrides = parser.parse_known_args()
    if arguments.steps <= LOOK_AGAIN:
        parser.error(f'--steps must be at least {LOOK_AGAIN + 1}, so that rows are checked again.')
    times = measure_demo(arguments.steps, overrides)
    if dist.get_global_rank() != 0:
        return
    steps = times.steps[UNMEASURED_STEPS:]
    shares = {
        # The algorithm's time includes its all-reduce.
        'with_all_reduce': statistics.median(step['algorithm'] / step['step'] for step in steps),
        'ledger_by_source': statistics.median(step['ledger'] / step['step'] for step in steps),
    }
    seconds_of_checks = {}
    for number, step in enumerate(times.steps):
        if step['check']:
            seconds_of_checks[number] = step['check']
    seconds = {
        'first_check': seconds_of_checks.pop(0),
        'later_check': statistics.median(seconds_of_checks.values()),
    }
    for part in ('step', 'algorithm', 'all_reduce'):
        seconds[part] = statistics.median(step[part] for step in steps)
    print(f'medians on {dist.get_world_size()} ranks: shares of the step {shares}, seconds {seconds}')
    results = {
        'machine': machine(),
        'ranks': dist.get_world_size(),
        'shares': shares,
        'seconds': seconds,
        'seconds_of_later_checks': seconds_of_checks,
    }
    write(arguments.results / 'overhead.json', results)


if __name__ == '__main__':
    main()
