# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a vision-language model with the Composer Trainer, as a YAML file says.

composer -n 2 -m composer_tokacc.train yamls/digits.yaml [key=value ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from composer_tokacc.programs.process import allow_open_files, command_line, prepare, say, share_cores

if __name__ == '__main__':
    prepare(__doc__, says_so=True)

from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist

from composer_tokacc.programs import TrainConfig
from composer_tokacc.programs.answers import answers_of
from composer_tokacc.programs.build import build_loggers, build_parts, build_trainer
from composer_tokacc.programs.checkpoints import checkpoint_folder, keep_to_whole_checkpoint, lock_folder
from composer_tokacc.programs.errors import in_words_of, must
from composer_tokacc.programs.registry import without
from composer_tokacc.programs.rehearsal import rehearsal_of
from composer_tokacc.programs.run_result import JsonLines, summarize, write_report
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.suggest import watch_flops

__all__ = ['main', 'run']


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status.

    Args:
        arguments: The YAML file, then ``key=value`` overrides; None takes them from the command line.
    """
    given, overrides = command_line(__doc__).parse_known_args(arguments)
    return run_program(run, given.config, overrides, trains=True)


def run(config: TrainConfig) -> None:
    """Trains, evaluates and reports.

    Raises:
        ConfigError: For a model or data that the config names and that cannot be used.
    """
    share_cores(dist.get_local_world_size())
    allow_open_files()
    if config.dry_run:
        _rehearse_all(config)
        return
    folder = checkpoint_folder(config.trainer)
    # One process writes for all; the others wait for it where the ranks meet.
    with in_words_of(config), lock_folder(folder if dist.get_global_rank() == 0 else None):
        if dist.get_local_rank() == 0 and (found := keep_to_whole_checkpoint(config.trainer)):
            say(found)
        _train(config)


class _DryRunEnd(Exception):
    """Nothing but training is left."""


class _StopBeforeStep(Callback):
    """Ends a dry run behind the check of the first batch and the rehearsal."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        raise _DryRunEnd


def _rehearse_all(config: TrainConfig) -> None:
    """Does everything but training, and writes nothing."""
    kept = without(config.trainer, 'save_folder', 'autoresume', 'loggers')
    config = replace(config, trainer=kept, microbatching=replace(config.microbatching, rehearse='heaviest'))
    parts = build_parts(config)
    say('starting the Trainer ...')
    trainer = build_trainer(config, parts, InMemoryLogger())
    trainer.state.callbacks += [rehearsal_of(config, parts), _StopBeforeStep()]
    with suppress(_DryRunEnd):
        trainer.fit()
    trainer.close()
    steps = trainer.state.dataloader_len
    say(f'dry run: all but training went well; an epoch has {"?" if steps is None else steps.value} steps')


def _train(config: TrainConfig) -> None:
    loggers, history = [*build_loggers(config), JsonLines(config.report['folder'])], InMemoryLogger()
    parts = build_parts(config)
    say('starting the Trainer ...')
    trainer = build_trainer(config, parts, history, loggers)
    watch_flops(config, parts, trainer.state)
    answers = answers_of(config, parts)
    trainer.state.callbacks += [one for one in (rehearsal_of(config, parts), answers) if one is not None]
    first_step = int(trainer.state.timestamp.batch.value)
    started = time.monotonic()
    duration, elapsed = trainer.state.max_duration, trainer.state.timestamp
    # A run resumed at its end has nothing left to train, for which fit() raises.
    if duration is None or elapsed.get(duration.unit) < duration:
        say(f'training from step {first_step + 1}, before which the model is looked at ...')
        requirement = '`trainer.save_folder` must hold no checkpoint that this run would write'
        with must(requirement, None, FileExistsError, remedy=' Or go on from it: trainer.autoresume=true'):
            trainer.fit()
    seconds = time.monotonic() - started
    if parts.eval_loader is not None and not any(name.startswith('metrics/eval/') for name in history.data):
        say('evaluating ...')
        trainer.eval()
    say('writing the report ...')
    result = summarize(trainer.state, history, parts, first_step=first_step, seconds=seconds)
    last = [] if answers is None else answers.last
    summary = write_report(config, parts, result, history, last) if dist.get_global_rank() == 0 else ''
    # The other ranks wait for the one that writes: NCCL takes an early end for a crash.
    dist.barrier()
    trainer.close()  # before the summary: it ends the progress bar's line
    if summary:
        print(f'\n{summary}', flush=True)


if __name__ == '__main__':
    sys.exit(main())
