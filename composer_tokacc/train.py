# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a vision-language model with the Composer Trainer, as a YAML file says.

composer -n 2 -m composer_tokacc.train yamls/digits.yaml [key=value ...]
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence

if __name__ == '__main__':
    gc.disable()  # until all is loaded: looking for garbage takes a fifth of that time, and finds none
    if os.environ.get('RANK', '0') == '0':  # what follows takes ten seconds and more
        print('loading torch, Composer and Transformers ...', file=sys.stderr, flush=True)

import torch
from composer.loggers import InMemoryLogger
from composer.utils import dist

from composer_tokacc.programs import TrainConfig
from composer_tokacc.programs.checkpoints import checkpoint_folder, keep_to_whole_checkpoint, lock_folder
from composer_tokacc.programs.faults import allow_open_files
from composer_tokacc.programs.report import summarize, write_report
from composer_tokacc.programs.run import build_parts, build_trainer, command_line, run_program
from composer_tokacc.programs.schema import say

__all__ = ['main', 'run']

_USAGE = 'composer -n RANKS -m composer_tokacc.train FILE.yaml [key=value ...]'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status.

    Args:
        arguments: The YAML file, then ``key=value`` overrides; None takes them from the command line.
    """
    given, overrides = command_line(_USAGE, __doc__).parse_known_args(arguments)
    # By default each rank would start a thread on every core of its node.
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // dist.get_local_world_size(), 1))
    allow_open_files()
    return run_program(run, given.config, overrides, trains=True)


def run(config: TrainConfig) -> None:
    """Trains, evaluates and reports.

    Raises:
        ConfigError: For a model or data that the config names and that cannot be used.
    """
    folder = checkpoint_folder(config.trainer)
    # One process writes for all; the others wait for it where the ranks meet.
    with lock_folder(folder if dist.get_global_rank() == 0 else None):
        if dist.get_local_rank() == 0 and (found := keep_to_whole_checkpoint(config.trainer)):
            say(found)
        _train(config)


def _train(config: TrainConfig) -> None:
    parts, history = build_parts(config), InMemoryLogger()
    say('starting the Trainer ...')
    trainer = build_trainer(config, parts, history)
    first_step = int(trainer.state.timestamp.batch.value)
    started = time.monotonic()
    duration, elapsed = trainer.state.max_duration, trainer.state.timestamp
    # A run resumed at its end has nothing left to train, for which fit() raises.
    if duration is None or elapsed.get(duration.unit) < duration:
        say(f'training from step {first_step + 1}, before which the model is looked at ...')
        trainer.fit()
    seconds = time.monotonic() - started
    if parts.eval_loader is not None and not any(name.startswith('metrics/eval/') for name in history.data):
        say('evaluating ...')
        trainer.eval()
    say('writing the report ...')
    result = summarize(trainer.state, history, first_step=first_step, seconds=seconds, skipped=parts.skip_reports())
    summary = write_report(config, parts, result, history) if dist.get_global_rank() == 0 else ''
    # The other ranks wait for the one that writes: NCCL takes an early end for a crash.
    dist.barrier()
    trainer.close()  # before the summary: it ends the progress bar's line
    if summary:
        print(f'\n{summary}', flush=True)


if __name__ == '__main__':
    sys.exit(main())
