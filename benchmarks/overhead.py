# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What TokenAccumulation costs: its share of a step of the demo run, on two ranks.

    composer -n 2 -m benchmarks.overhead [--steps 40] [algorithms.token_accumulation.token_weights=sqrt]

Runs yamls/digits.yaml and adds up the time inside the algorithm's events and its backward hook, step by step. The share
that its one all-reduce has in it, waiting for the other rank included, is given apart. Prints medians over the steps;
rank 0 writes results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist

from benchmarks.machine import machine
from composer_tokacc import TokenAccumulation
from composer_tokacc.algorithm.token_accumulation import NUM_FIRST_STEPS
from composer_tokacc.checks.step import StepCheck, WatchedTokens
from composer_tokacc.collectives import RankSum
from composer_tokacc.programs import load_config
from composer_tokacc.programs.run import build_parts, build_trainer, check_config

RESULTS = Path(__file__).resolve().parent / 'results'
DEMO = Path(__file__).resolve().parents[1] / 'yamls' / 'digits.yaml'


class Steps(Callback):
    """Seconds of each step, and of what was timed within it."""

    def __init__(self) -> None:
        self.spent = {'algorithm': 0.0, 'all_reduce': 0.0}
        self.steps: list[dict[str, float]] = []
        self.started = 0.0

    def timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[kind] += time.perf_counter() - started

        return call

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.spent = dict.fromkeys(self.spent, 0.0)
        self.started = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.steps.append({**self.spent, 'step': time.perf_counter() - self.started})


def main() -> None:
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--results', type=Path, default=RESULTS)
    given, overrides = parser.parse_known_args()
    config = load_config(DEMO, [f'trainer.max_duration={given.steps}ba', 'trainer.progress_bar=false', *overrides])
    check_config(config)
    trainer = build_trainer(config, build_parts(config), InMemoryLogger())
    steps = Steps()
    trainer.state.callbacks.append(steps)
    algorithm = next(one for one in trainer.state.algorithms if isinstance(one, TokenAccumulation))
    algorithm.apply = steps.timed(algorithm.apply, 'algorithm')  # pyright: ignore[reportAttributeAccessIssue]
    StepCheck.observe = steps.timed(StepCheck.observe, 'algorithm')
    WatchedTokens._note = steps.timed(WatchedTokens._note, 'algorithm')  # pyright: ignore[reportPrivateUsage]
    RankSum.__init__ = steps.timed(RankSum.__init__, 'all_reduce')
    RankSum.read = steps.timed(RankSum.read, 'all_reduce')
    trainer.fit()
    # The first step pays for the probe, once a run, and the first ten measure every token.
    measured = steps.steps[NUM_FIRST_STEPS:]
    shares = {
        'with_all_reduce': statistics.median(one['algorithm'] / one['step'] for one in measured),
        'without_all_reduce': statistics.median(
            (one['algorithm'] - one['all_reduce']) / one['step'] for one in measured
        ),
    }
    medians = {kind: statistics.median(one[kind] for one in measured) for kind in ('step', 'algorithm', 'all_reduce')}
    if dist.get_global_rank() == 0:
        print(f'{len(measured)} steps of {DEMO.name} on {dist.get_world_size()} ranks, medians:')
        print(f'step {medians["step"] * 1e3:.1f} ms, algorithm {medians["algorithm"] * 1e3:.2f} ms')
        print(f'of which its all-reduce, waiting included, {medians["all_reduce"] * 1e3:.2f} ms')
        print(f'share of the step {shares["with_all_reduce"]:.2%}, all-reduce aside {shares["without_all_reduce"]:.2%}')
        print(f'the probe took {steps.steps[0]["algorithm"]:.2f} s, once a run')
        given.results.mkdir(parents=True, exist_ok=True)
        found = {'machine': machine(), 'ranks': dist.get_world_size(), 'shares': shares, 'seconds': medians}
        (given.results / 'overhead.json').write_text(json.dumps(found, indent=1))


if __name__ == '__main__':
    main()
