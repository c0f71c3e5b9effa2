# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a vision-language model with the Composer Trainer, as a YAML file says.

composer -n 2 -m composer_tokacc.train yamls/digits.yaml [key=value ...]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist

from composer_tokacc.config import ConfigError, TrainConfig, load_config
from composer_tokacc.config.registry import build_by_name
from composer_tokacc.data import BadSampleError
from composer_tokacc.run.answers import answer_held_out
from composer_tokacc.run.config_checks import check_config
from composer_tokacc.run.parts import RunParts, build_parts
from composer_tokacc.run.report import print_summary, summarize, write_report
from composer_tokacc.run.streaming_parts import LLAVA_STREAMING
from composer_tokacc.sampling import RestoreRandomState, SkipReadBatches

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
    try:
        config = load_config(arguments[0], arguments[1:])
        check_config(config)
        run(config)
    except (ConfigError, BadSampleError) as error:
        return _refuse(error)
    return 0


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains, evaluates and reports.

    Returns:
        The result that rank 0 also writes to ``report.folder``; see :func:`composer_tokacc.run.report.summarize`.

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
    result = summarize(trainer.state, history, seconds=seconds)
    result['skipped'] = parts.skip_reports()
    folder = config.report.folder.format(run_name=trainer.state.run_name)
    is_first, answers = dist.get_global_rank() == 0, []
    if is_first:
        # A sharded model cannot generate on one rank alone.
        if parts.eval_dataset is not None and not config.trainer.get('parallelism_config'):
            answers = answer_held_out(
                parts.model,
                parts.eval_dataset,
                parts.processor,
                num_samples=config.report.num_samples,
                max_new_tokens=config.report.max_new_tokens,
            )
        write_report(folder, result, history, answers, picture=config.report.picture)
    # The other ranks wait for the one that writes: NCCL takes an early end for a crash.
    dist.barrier()
    trainer.close()  # before the summary: it ends the progress bar's line
    if is_first:
        print_summary(result, answers, folder)
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
    if config.dataset.get('name') == LLAVA_STREAMING:
        callbacks.append(RestoreRandomState())
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


def _build_all(kind: str, parts: dict[str, Any]) -> list[Any]:
    return [build_by_name(kind, name, arguments) for name, arguments in parts.items()]


def _build_section(kind: str, section: dict[str, Any], *positional: Any) -> Any:
    arguments = {key: value for key, value in section.items() if key != 'name'}
    return build_by_name(kind, section['name'], arguments, *positional)


def _refuse(error: Exception) -> int:
    if int(os.environ.get('LOCAL_RANK', '0')) > 0:
        # All ranks stumble over the same mistake. The launcher prints the whole output of each rank that fails by
        # itself, so the others wait for it to end them, and rank 0 says it once. Composer turns SIGTERM into a failure.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    print(f'error: {error}', file=sys.stderr, flush=True)
    return 2


if __name__ == '__main__':
    sys.exit(main())
