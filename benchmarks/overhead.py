# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What TokenAccumulation and the ledger by source cost: their shares of a step of the demo run, on two ranks.

    composer -n 2 -m benchmarks.overhead [--steps 40] [algorithms.token_accumulation.token_weights=sqrt]
    python -m benchmarks.overhead --large

Runs yamls/digits.yaml, its samples in two parts, and adds up the time inside the algorithm's events and its backward
hook, step by step. The share that its one all-reduce has in it, waiting for the other rank included, is given apart.
Prints medians over the steps; rank 0 writes
results/overhead.json.

With ``--large``: what measuring the tokens of a microbatch takes of its forward and backward, for a model of hidden
size 1,024 and a vocabulary of 150,000 (two rows of 256 tokens; a minute, 5 GB), into the same file.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import machine
from benchmarks.record import ROOT, parser_of, write
from composer_tokacc import TokenAccumulation
from composer_tokacc.checks.logits import has_bypass
from composer_tokacc.checks.step import MicrobatchRecord
from composer_tokacc.collectives import RankSum
from composer_tokacc.monitor.source_ledger import SourceLedger
from composer_tokacc.programs import load_config
from composer_tokacc.programs.build import build_parts, build_trainer
from composer_tokacc.programs.config_checks import check_config

DEMO = ROOT / 'yamls' / 'digits.yaml'
TWO_PARTS = ['dataset.parts={one: {num_samples: 2048}, other: {num_samples: 2048, seed: 5}}', 'dataset.num_samples=1']


class Steps(Callback):
    """Seconds of each step, and of what was timed within it."""

    def __init__(self) -> None:
        self.spent = {'algorithm': 0.0, 'all_reduce': 0.0, 'ledger': 0.0}
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


def measuring_of_a_large_vocabulary(rounds: int) -> dict[str, float]:
    """Medians of what measuring takes of the forward and backward of one microbatch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=150_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
    )
    model, ids = LlamaForCausalLM(config), torch.randint(3, 150_000, (2, 256))
    batch = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids}
    spent: list[float] = []
    steps = Steps()
    MicrobatchRecord._measure = steps.timed(MicrobatchRecord._measure, 'algorithm')  # pyright: ignore[reportPrivateUsage]
    shares: dict[str, float] = {}
    for name, is_whole in (('a few tokens', False), ('every token', True)):
        found = []
        for _ in range(rounds + 1):
            model.zero_grad(set_to_none=True)
            steps.spent['algorithm'], started = 0.0, time.perf_counter()
            outputs = model(**batch)
            begun = time.perf_counter()
            has_bypass([outputs.loss], [outputs.logits])
            record = MicrobatchRecord(batch=batch, rule='causal', num_tokens=510)
            record.watch(outputs.logits, None, 1 / 510, is_whole=is_whole)
            steps.spent['algorithm'] += time.perf_counter() - begun
            outputs.loss.backward()
            spent.append(time.perf_counter() - started)
            found.append(steps.spent['algorithm'] / (spent[-1] - steps.spent['algorithm']))
            assert record.deviations is not None
            assert record.deviations.max() < 1e-5
        shares[name] = statistics.median(found[1:])
        print(f'measuring {name} of a microbatch of 510: {shares[name]:.2%} of its forward and backward')
    return {**shares, 'seconds': statistics.median(spent[1:])}


def _write(folder: Path, found: dict[str, Any]) -> None:
    """Into the results file, beside what was measured otherwise."""
    path = folder / 'overhead.json'
    before = json.loads(path.read_text()) if path.exists() else {}
    write(path, {**before, 'machine': machine(), **found})


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__)
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--large', action='store_true')
    given, overrides = parser.parse_known_args()
    if given.large:
        _write(given.results, {'large_vocabulary': measuring_of_a_large_vocabulary(given.steps // 8)})
        return
    length = [f'trainer.max_duration={given.steps}ba', 'trainer.progress_bar=false']
    config = load_config(DEMO, [*length, *TWO_PARTS, *overrides])
    check_config(config)
    trainer = build_trainer(config, build_parts(config), InMemoryLogger())
    steps = Steps()
    trainer.state.callbacks.append(steps)
    algorithm = next(one for one in trainer.state.algorithms if isinstance(one, TokenAccumulation))
    algorithm.apply = steps.timed(algorithm.apply, 'algorithm')  # pyright: ignore[reportAttributeAccessIssue]
    MicrobatchRecord.observe = steps.timed(MicrobatchRecord.observe, 'algorithm')
    MicrobatchRecord._measure = steps.timed(MicrobatchRecord._measure, 'algorithm')  # pyright: ignore[reportPrivateUsage]
    RankSum.__init__ = steps.timed(RankSum.__init__, 'all_reduce')
    RankSum.read = steps.timed(RankSum.read, 'all_reduce')
    for name in ('note', '_sums', '_table'):  # the rest of it is the reduction that the monitor has anyway
        setattr(SourceLedger, name, steps.timed(getattr(SourceLedger, name), 'ledger'))
    trainer.fit()
    # The first step pays for the probe, once a run, and the first ones have many labels that are new.
    measured = steps.steps[10:]
    shares = {
        'with_all_reduce': statistics.median(one['algorithm'] / one['step'] for one in measured),
        'without_all_reduce': statistics.median(
            (one['algorithm'] - one['all_reduce']) / one['step'] for one in measured
        ),
        'ledger_by_source': statistics.median(one['ledger'] / one['step'] for one in measured),
    }
    medians = {kind: statistics.median(one[kind] for one in measured) for kind in ('step', 'algorithm', 'all_reduce')}
    if dist.get_global_rank() == 0:
        print(f'{len(measured)} steps of {DEMO.name} on {dist.get_world_size()} ranks, medians:')
        print(f'step {medians["step"] * 1e3:.1f} ms, algorithm {medians["algorithm"] * 1e3:.2f} ms')
        print(f'of which its all-reduce, waiting included, {medians["all_reduce"] * 1e3:.2f} ms')
        print(f'share of the step {shares["with_all_reduce"]:.2%}, all-reduce aside {shares["without_all_reduce"]:.2%}')
        print(f'share of the ledger by source {shares["ledger_by_source"]:.2%}')
        print(f'the probe took {steps.steps[0]["algorithm"]:.2f} s, once a run')
        first = steps.steps[0]['algorithm']
        _write(
            given.results,
            {'ranks': dist.get_world_size(), 'shares': shares, 'seconds': {**medians, 'first_batch': first}},
        )


if __name__ == '__main__':
    main()
