# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a vision-language model with the Composer Trainer, as a YAML file says.

composer -n 2 -m composer_tokacc.train yamls/digits.yaml [key=value ...]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist

from composer_tokacc.data import BadSampleError
from composer_tokacc.programs import ConfigError, TrainConfig, load_config
from composer_tokacc.programs.checks import check_config
from composer_tokacc.programs.errors import refuse
from composer_tokacc.programs.parts import RunParts, build_parts
from composer_tokacc.programs.registry import build_by_name, import_by_name
from composer_tokacc.programs.report import FinishedRun, Line, print_summary, summarize, write_report
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sampling import SkipReadBatches

__all__ = ['build_trainer', 'main', 'run']

_USAGE = 'usage: composer -n RANKS -m composer_tokacc.train FILE.yaml [key=value ...]'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; a mistake of the user's ends it with one line and status 2.

    Args:
        arguments: the YAML file, then ``key=value`` overrides; None takes them from the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ('-h', '--help'):
        print(__doc__ if arguments else _USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    # By default each rank would start a thread on every core of its node.
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // dist.get_local_world_size(), 1))
    try:
        config = load_config(arguments[0], arguments[1:])
        check_config(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    try:
        run(config)
    except (ConfigError, BadSampleError) as error:
        return refuse(error)
    return 0


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains, evaluates and reports.

    Returns:
        The result that rank 0 also writes to ``report.folder``; see :func:`.summarize`.

    Raises:
        ConfigError: for a model or data that the config names and that cannot be used.
    """
    parts, history = build_parts(config), InMemoryLogger()
    trainer = build_trainer(config, parts, history)
    started = time.monotonic()
    duration, elapsed = trainer.state.max_duration, trainer.state.timestamp
    # A run resumed at its end has nothing left to train, for which fit() raises.
    if duration is None or elapsed.get(duration.unit) < duration:
        trainer.fit()
    seconds = time.monotonic() - started
    if parts.eval_loader is not None and not any(name.startswith('metrics/eval/') for name in history.data):
        trainer.eval()
    result = summarize(trainer.state, history, seconds=seconds, skipped=parts.skip_reports())
    lines = _write_report(config, parts, result, history) if dist.get_global_rank() == 0 else []
    # The other ranks wait for the one that writes: NCCL takes an early end for a crash.
    dist.barrier()
    trainer.close()  # before the summary: it ends the progress bar's line
    if lines:
        print_summary(lines)
    return result


def build_trainer(config: TrainConfig, parts: RunParts, history: InMemoryLogger) -> Trainer:
    """The Composer Trainer of a config; ``history`` is logged to besides the loggers that the config names."""
    arguments = {key: value for key, value in config.trainer.items() if key != 'loggers'}
    loggers = _build_all('loggers', config.trainer.get('loggers') or {})
    parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    if parts.microbatch_size is not None:
        arguments['device_train_microbatch_size'] = parts.microbatch_size
    callbacks = _build_all('callbacks', config.callbacks)
    if config.trainer.get('spin_dataloaders', True):
        callbacks.append(SkipReadBatches())
    callbacks += source_of(config).callbacks()
    return Trainer(
        model=parts.model,
        train_dataloader=parts.train_loader,
        eval_dataloader=parts.eval_loader,
        optimizers=_build_section('optimizer', config.optimizer, parameters),
        schedulers=_build_section('scheduler', config.scheduler),
        algorithms=_build_all('algorithms', config.algorithms),
        callbacks=callbacks,
        loggers=[*loggers, history],
        seed=config.seed,
        **arguments,
    )


def _write_report(config: TrainConfig, parts: RunParts, result: dict[str, Any], history: InMemoryLogger) -> list[Line]:
    """Writes what the ``report`` section asks for; gives the lines of the summary."""
    arguments = {key: value for key, value in config.report.items() if key not in ('folder', 'name')}
    finished = FinishedRun(
        result=result,
        history=history,
        model=parts.model,
        eval_dataset=parts.eval_dataset,
        processor=parts.processor,
        folder=Path(config.report['folder'].format(run_name=result['run_name'])),
        is_sharded=bool(config.trainer.get('parallelism_config')),
    )
    more = import_by_name('report', config.report['name']) if 'name' in config.report else None
    return write_report(finished, None if more is None else lambda run: more(run, **arguments))


def _build_all(kind: str, parts: dict[str, Any]) -> list[Any]:
    return [build_by_name(kind, name, arguments) for name, arguments in parts.items()]


def _build_section(kind: str, section: dict[str, Any], *positional: Any) -> Any:
    arguments = {key: value for key, value in section.items() if key != 'name'}
    return build_by_name(kind, section['name'], arguments, *positional)


if __name__ == '__main__':
    sys.exit(main())
