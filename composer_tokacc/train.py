# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a vision-language model with the Composer Trainer, from a YAML file.

composer -n 2 -m composer_tokacc.train yamls/digits.yaml [key=value ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from composer_tokacc.programs.process import allow_open_files, command_line, prepare, say, share_cores

if __name__ == '__main__':
    # Answers --help and says that the imports begin, because they take seconds.
    prepare(__doc__, announces=True)

from composer import Trainer
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist

from composer_tokacc.collectives import run_on_rank_0
from composer_tokacc.programs import TrainConfig
from composer_tokacc.programs.answers import answer_callback_of
from composer_tokacc.programs.build import RunParts, TrainerParts, build_parts, build_trainer, build_trainer_parts
from composer_tokacc.programs.checkpoints import checkpoint_folder, lock_folders, run_name_of
from composer_tokacc.programs.config_checks import notes_on
from composer_tokacc.programs.evaluated_weights import evaluated_weights
from composer_tokacc.programs.metrics_file import JsonLines, read_metrics
from composer_tokacc.programs.rehearsal import rehearsal_of
from composer_tokacc.programs.run_result import result_folder, summarize, write_report
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import without
from composer_tokacc.programs.traces import watch_flops

__all__ = ['main', 'run']


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status.

    Args:
        arguments: The YAML file, then ``key=value`` overrides; None takes them from the command line.
    """
    parsed, overrides = command_line(__doc__).parse_known_args(arguments)
    return run_program(run, parsed.config, overrides, trains=True)


def run(config: TrainConfig) -> None:
    """Trains, evaluates and writes the report. With ``dry_run`` it only tries whether a step can start.

    Raises:
        ConfigError: If the model or the data of the config cannot be used.
    """
    share_cores(dist.get_local_world_size())
    allow_open_files()
    for note in notes_on(config):
        say(f'note: {note}')
    if config.dry_run:
        _dry_run(config)
        return
    # The first rank locks the folders for all ranks. The others wait for it when they join the process group.
    folders = {}
    if dist.get_global_rank() == 0:
        folders = _folders_of_run(config)
    with lock_folders(folders):
        _train(config)


def _folders_of_run(config: TrainConfig) -> dict[str, Path | None]:
    """Returns the folders that a run writes into, by their keys in the config. None: nothing to lock."""
    run_name = run_name_of(config.trainer)
    report_folder = None
    # If the folder has the name of the run in it, but the run has none yet, Composer will generate a unique one.
    if run_name is not None or '{run_name}' not in config.report['folder']:
        report_folder = result_folder(config, run_name or '')
    return {'trainer.save_folder': checkpoint_folder(config.trainer), 'report.folder': report_folder}


class _DryRunEnd(Exception):
    """Ends the fit of a dry run before the first step."""


class _StopBeforeStep(Callback):
    """Ends a dry run before the first step. First-batch check and rehearsal come earlier, in ``BATCH_START``."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        raise _DryRunEnd


def _dry_run(config: TrainConfig) -> None:
    """Does everything but training, and writes only caches. Rehearses even if the config switches that off."""
    # Without these keys the Trainer writes neither checkpoints nor logs.
    trainer_arguments = without(config.trainer, 'save_folder', 'autoresume', 'loggers')
    microbatching = replace(config.microbatching, rehearse='heaviest')
    config = replace(config, trainer=trainer_arguments, microbatching=microbatching)
    trainer, _ = _build(config, InMemoryLogger(), build_trainer_parts(config))
    trainer.state.callbacks.append(_StopBeforeStep())
    with suppress(_DryRunEnd):
        if not _has_ended(trainer):
            trainer.fit()
    trainer.close()
    num_steps = '?'
    epoch_length = trainer.state.dataloader_len
    if epoch_length is not None:
        num_steps = str(epoch_length.value)
    say(f'dry run: all but training went well; an epoch has {num_steps} steps')


def _train(config: TrainConfig) -> None:
    """Builds the run, trains and evaluates it, and writes its report on the first rank."""
    trainer_parts = build_trainer_parts(config)
    trainer_parts.loggers.append(JsonLines(config.report['folder']))
    history = InMemoryLogger()
    trainer, parts = _build(config, history, trainer_parts)
    # TokenMonitor logs MFU from the first step, so it needs the operations of the model now.
    watch_flops(parts.source, parts.model, trainer.state)
    answer_callback = answer_callback_of(config, parts)
    if answer_callback is not None:
        trainer.state.callbacks.append(answer_callback)
    # Steps that an earlier process has trained: 0, unless the run was resumed.
    finished_steps = int(trainer.state.timestamp.batch.value)
    started = time.monotonic()
    if not _has_ended(trainer):
        say(f'training from step {finished_steps + 1}, after a check of the model on the first batch ...')
        trainer.fit()
    seconds = time.monotonic() - started
    # Composer's fit evaluates at its end. It does not if `trainer.eval_interval` is 0, or if no step was left to train.
    was_evaluated = any(name.startswith('metrics/eval/') for name in history.data)  # the history is of this process
    if parts.eval_loader is not None and not was_evaluated:
        say('evaluating ...')
        trainer.eval()
    say('writing the report ...')

    def write_on_first_rank() -> str:
        metrics = read_metrics(result_folder(config, trainer.state.run_name))
        result = summarize(trainer.state, metrics, parts, first_step=finished_steps, seconds=seconds)
        last_answers = []
        if answer_callback is not None:
            last_answers = answer_callback.last
        # The export and the user's function (`report.name`) see the weights that were evaluated.
        with ExitStack() as stack:
            if not config.is_sharded:  # rank 0 cannot use a sharded model alone
                stack.enter_context(evaluated_weights(trainer.state, trainer.logger))
            return write_report(config, parts, result, metrics, history, last_answers)

    summary = run_on_rank_0(write_on_first_rank)
    # All ranks end together. If a rank exited earlier, NCCL would report it as crashed.
    dist.barrier()
    trainer.close()  # before the summary, because this ends the line of the progress bar
    if dist.get_global_rank() == 0:
        print(f'\n{summary}', flush=True)


def _build(
    config: TrainConfig,
    history: InMemoryLogger,
    trainer_parts: TrainerParts,
) -> tuple[Trainer, RunParts]:
    """Builds data, model and Trainer, and adds the callback that rehearses the heaviest microbatches."""
    parts = build_parts(config)
    say('starting the Trainer ...')
    trainer = build_trainer(config, parts, history, trainer_parts)
    rehearsal = rehearsal_of(config, parts)
    if rehearsal is not None:
        # Appended to the built Trainer, so that it runs after the callbacks of the config.
        trainer.state.callbacks.append(rehearsal)
    return trainer, parts


def _has_ended(trainer: Trainer) -> bool:
    """Returns whether no step of a resumed run is left. Then Composer's ``fit`` would raise an error."""
    duration = trainer.state.max_duration
    elapsed = trainer.state.timestamp
    return duration is not None and elapsed.get(duration.unit) >= duration


if __name__ == '__main__':
    sys.exit(main())
