# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A long run of the training program: its memory must not grow, its gradient stay exact, and it must survive kills.

    python -m benchmarks.soak [--steps 2000] [--ranks 2] [--kills 12] [--seed 0]

A small LLaVA trains on the digits (0 to 12 images a sample, lengths of their own, one sample in ten without a label)
with a loader process, a checkpoint every hundred steps, and an "out of memory" on all ranks in one step of forty,
which halves the microbatch size and tries again. Every tenth step its gradient is held to one float64 forward over the
whole global batch, beside that of one float32 forward, and the memory of every rank and its loader is read.

Then a shorter run is killed again and again: a rank at the start of some step, a rank at any moment, or rank 0 in the
middle of writing a checkpoint; started anew each time by the same command, it must end with the weights and optimizer
of an unbroken run, bitwise (without "out of memory", behind which another cut, as exact, is rounded otherwise). Prints
both; writes results/soak.json next to this file, where a part that is left out keeps its last figures.
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist

from benchmarks.machine import COMPOSER, environment, machine
from benchmarks.record import ROOT, parser_of, write
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.invariance import relative_error
from examples.digits import DigitsDataset, build_digits_processor

SETTLED, CHECK_EVERY, OUT_OF_MEMORY_EVERY, SAVE_EVERY = 200, 10, 40, 100
"""Steps."""


class RaggedDigits(DigitsDataset):
    """The digits, every tenth sample without anything to learn from."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index % 10 == 0:
            sample['labels'] = torch.full_like(sample['labels'], -100)
        return sample


class OutOfMemory(Algorithm):
    """Raises behind the first backward of some steps what a GPU would, and gives the microbatch size back after them.

    On all ranks: where one alone runs out of memory, Composer needs the CUDA that this machine lacks.
    """

    def __init__(self, *, every: int) -> None:
        self.every = every
        self.is_due, self.size = False, 0

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BATCH_START, Event.AFTER_BACKWARD, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_START:
            batch = int(state.timestamp.batch)
            self.is_due = batch > 0 and batch % self.every == 0
            self.size = state.device_train_microbatch_size
            state.auto_microbatching = self.is_due
        elif event == Event.BATCH_END:
            state.device_train_microbatch_size, state.auto_microbatching = self.size, False
        elif self.is_due:
            self.is_due = False
            raise RuntimeError('CUDA out of memory')


class Observer(Callback):
    """Memory of this rank and its loader, and how far the gradient is from that of one forward; rank 0 writes both."""

    def __init__(self, *, path: str, every: int) -> None:
        self.path = Path(path)
        self.every = every
        self.mebibytes: list[float] = []
        self.errors: list[float] = []
        self.errors_of_one_forward: list[float] = []
        self.halved = 0
        self.samples: list[int] = []
        self.dataset = RaggedDigits(build_digits_processor(), num_samples=1 << 20, cache=False)
        self.collate = VisionLanguageCollator(self.dataset.processor)

    def batch_start(self, state: State, logger: Logger) -> None:
        names = [name for name in state.batch['sample_ids'] if name]
        self.size = state.device_train_microbatch_size
        self.samples = [int(name.rpartition('-')[2]) for rank in dist.all_gather_object(names) for name in rank]

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.halved += state.device_train_microbatch_size != self.size
        if int(state.timestamp.batch) % self.every == 0:
            own: Any = getattr(state.model, 'module', state.model)
            found = {name: p.grad for name, p in own.model.named_parameters() if p.grad is not None}
            batch = self.collate([self.dataset[index] for index in self.samples])
            expected = one_forward(own.model, batch, torch.float64)
            plain = one_forward(own.model, batch, torch.float32)
            self.errors.append(relative_error(found, expected)[0])
            self.errors_of_one_forward.append(relative_error(plain, expected)[0])

    def batch_end(self, state: State, logger: Logger) -> None:
        process = psutil.Process()
        processes = [process, *process.children(recursive=True)]
        self.mebibytes.append(sum(one.memory_info().rss for one in processes) / 2**20)

    def fit_end(self, state: State, logger: Logger) -> None:
        memory = dist.all_gather_object(self.mebibytes)
        if dist.get_global_rank() == 0:
            found = {'mebibytes': memory, 'errors': self.errors, 'halved': self.halved}
            self.path.write_text(json.dumps({**found, 'errors_of_one_forward': self.errors_of_one_forward}))


def one_forward(model: Any, batch: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of one plain forward over a whole global batch."""
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad(set_to_none=True)
    inputs = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    model(**inputs, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def config_of(
    folder: Path, *, steps: int, save_every: int, callbacks: dict[str, Any], out_of_memory: bool = False
) -> dict[str, Any]:
    """The digits run, smaller."""
    config = yaml.safe_load((ROOT / 'yamls' / 'digits.yaml').read_text())
    text, vision = config['model']['config']['text_config'], config['model']['config']['vision_config']
    text |= {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2}
    vision |= {'hidden_size': 16, 'intermediate_size': 32}
    config['dataset'] = {'name': 'benchmarks.soak.RaggedDigits', 'num_samples': 1000, 'cache': False}
    config['loader'] = {'global_batch_size': 16, 'num_workers': 1, 'lengths_folder': str(folder / 'lengths')}
    config['microbatching'] = {'device_train_microbatch_size': 4}
    # Without clipping, so that the gradient is the one that is known.
    config['algorithms'] = {'token_accumulation': {}}
    if out_of_memory:
        config['algorithms'] = {'benchmarks.soak.OutOfMemory': {'every': OUT_OF_MEMORY_EVERY}, **config['algorithms']}
    config['callbacks'] |= callbacks
    config['trainer'] |= {
        'max_duration': f'{steps}ba', 'save_folder': str(folder / 'checkpoints'), 'save_interval': f'{save_every}ba',
        'save_num_checkpoints_to_keep': 2, 'autoresume': True, 'progress_bar': False,
    }  # fmt: skip
    config['report'] = {'folder': str(folder)}
    return config


def start(folder: Path, config: dict[str, Any], ranks: int) -> subprocess.Popen[str]:
    """The training program on a config, under the launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'run.yaml'
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [COMPOSER, '-n', str(ranks), '-m', 'composer_tokacc.train', str(path)]
    with (folder / 'screen.txt').open('a') as screen:
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=screen, stderr=screen, text=True)


def soak(folder: Path, steps: int, ranks: int) -> dict[str, Any]:
    observer = {'benchmarks.soak.Observer': {'path': str(folder / 'found.json'), 'every': CHECK_EVERY}}
    config = config_of(folder, steps=steps, save_every=SAVE_EVERY, callbacks=observer, out_of_memory=True)
    started = time.monotonic()
    if start(folder, config, ranks).wait():
        raise SystemExit((folder / 'screen.txt').read_text()[-4000:])
    found = json.loads((folder / 'found.json').read_text())
    drifts = []
    for rank in found['mebibytes']:
        window = min(SETTLED, (len(rank) - SETTLED) // 2)
        early, late = np.mean(rank[SETTLED : SETTLED + window]), np.mean(rank[-window:])
        drifts.append(float(late / early - 1))
    return {
        'steps': steps,
        'ranks': ranks,
        'seconds': round(time.monotonic() - started, 1),
        'checked_steps': len(found['errors']),
        # Round-off grows beside a gradient that becomes small, in one float32 forward too.
        'largest_gradient_error': max(found['errors']),
        'largest_gradient_error_of_one_float32_forward': max(found['errors_of_one_forward']),
        'median_gradient_error': float(np.median(found['errors'])),
        'out_of_memory_steps': found['halved'],
        'mebibytes_after_200_steps': [rank[SETTLED] for rank in found['mebibytes']],
        'mebibytes_at_the_end': [rank[-1] for rank in found['mebibytes']],
        'drift_of_memory': drifts,
    }


def kill_again_and_again(folder: Path, kills: int, ranks: int, seed: int) -> dict[str, Any]:
    rng, steps, save_every = random.Random(seed), 5 * kills + 5, 2
    started = time.monotonic()
    config = config_of(folder / 'unbroken', steps=steps, save_every=save_every, callbacks={})
    if start(folder / 'unbroken', config, ranks).wait():
        raise SystemExit((folder / 'unbroken' / 'screen.txt').read_text()[-4000:])
    seconds = time.monotonic() - started
    broken, made = folder / 'broken', []
    size = latest(folder / 'unbroken').stat().st_size
    while len(made) < kills and step_of(broken) < steps:
        kind, behind = rng.choice(('at a step', 'in a write', 'at any moment')), step_of(broken)
        kill: dict[str, Any] = {'kind': kind, 'from': behind}
        if kind == 'at a step':
            kill |= {'rank': rng.randrange(ranks), 'batch': behind + rng.randint(0, 6)}
            callbacks = {'tests.support.killer.KillRank': {key: kill[key] for key in ('rank', 'batch')}}
        elif kind == 'in a write':
            batch = behind + save_every * rng.randint(1, 3)
            kill |= {'batch': batch, 'num_bytes': rng.randrange(1, size)}
            callbacks = {'tests.support.killer.KillInWrite': {key: kill[key] for key in ('batch', 'num_bytes')}}
        else:
            kill |= {'rank': rng.randrange(ranks), 'second': round(rng.uniform(0, seconds), 1)}
            callbacks = {}
        process = start(broken, config_of(broken, steps=steps, save_every=save_every, callbacks=callbacks), ranks)
        if kind == 'at any moment':
            time.sleep(kill['second'])
            alive = psutil.Process(process.pid).children() if process.poll() is None else []
            if len(alive) == ranks:
                alive[kill['rank']].send_signal(signal.SIGKILL)
        kill['status'] = process.wait()
        made.append(kill)
        print(kill, flush=True)
    if start(broken, config_of(broken, steps=steps, save_every=save_every, callbacks={}), ranks).wait():
        raise SystemExit((broken / 'screen.txt').read_text()[-4000:])
    if step_of(folder / 'unbroken') != step_of(broken):
        raise SystemExit(f'both must end with the same step, got: {latest(broken)}')
    one, other = (torch.load(latest(path), weights_only=False)['state'] for path in (folder / 'unbroken', broken))
    parts = ('model', 'optimizers')
    return {
        'steps': steps, 'ranks': ranks, 'seed': seed, 'kills': made,
        'survived': sum(kill['status'] != 0 for kill in made),
        'bitwise_equal': all(equal(one[part], other[part]) for part in parts),
    }  # fmt: skip


def latest(folder: Path) -> Path:
    return (folder / 'checkpoints' / 'latest-rank0.pt').resolve()


def step_of(folder: Path) -> int:
    """Of the newest checkpoint; 0 without."""
    found = re.search(r'-ba(\d+)-', latest(folder).name)
    return int(found[1]) if found else 0


def equal(one: Any, other: Any) -> bool:
    """Bitwise, through all that a checkpoint is made of."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--steps', type=int, default=2000, help='over 200; 0 leaves it out')
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--kills', type=int, default=12, help='0 leaves them out')
    parser.add_argument('--seed', type=int, default=0)
    given = parser.parse_args()
    path = given.results / 'soak.json'
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results['machine'] = machine()
    with tempfile.TemporaryDirectory() as folder:
        if given.steps:
            results['soak'] = soak(Path(folder) / 'soak', given.steps, given.ranks)
            print(json.dumps(results['soak'], indent=1), flush=True)
            write(path, results)
        if given.kills:
            results['kills'] = kill_again_and_again(Path(folder) / 'kills', given.kills, given.ranks, given.seed)
            print(f'{results["kills"]["survived"]} kills; bitwise equal: {results["kills"]["bitwise_equal"]}')
            write(path, results)


if __name__ == '__main__':
    main()
