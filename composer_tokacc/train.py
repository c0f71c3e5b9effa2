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
from dataclasses import asdict
from typing import Any

import torch
from composer import DataSpec, Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device, reproducibility

from composer_tokacc.answers import answer_held_out
from composer_tokacc.config import ConfigError, TrainConfig, load_config
from composer_tokacc.config_checks import check_config
from composer_tokacc.layout import BatchLayout
from composer_tokacc.loaders import build_dataset, build_loader, build_processor
from composer_tokacc.models import build_model
from composer_tokacc.registry import build_by_name
from composer_tokacc.report import print_summary, summarize, write_report

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
    except ConfigError as error:
        return _refuse(error)
    return 0


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains, evaluates and reports.

    Returns:
        The result that rank 0 also writes to ``report.folder``; see :func:`composer_tokacc.report.summarize`.

    Raises:
        ConfigError: for model or data that the config names and that cannot be used.
    """
    _share_cores()
    reproducibility.seed_all(config.seed)
    history = InMemoryLogger()
    try:
        # Before the data: with `on_error: skip` the ranks share the scan for bad samples.
        dist.initialize_dist(get_device(config.trainer.get('device')), config.trainer.get('dist_timeout', 300.0))
        processor = build_processor(config)
        datasets = [build_dataset(config, processor, held_out=held_out) for held_out in (False, True)]
        model = build_model(processor=processor, seed=config.seed, **asdict(config.model))
        layout = BatchLayout.for_model(model)
        loaders = [
            None if dataset is None else build_loader(config, dataset, processor, layout, held_out=held_out)
            for dataset, held_out in zip(datasets, (False, True), strict=True)
        ]
    except (ValueError, OSError) as error:
        # What the config names does not fit or is not there; the chained error keeps its own story.
        raise ConfigError(' '.join(str(error).split())) from error
    trainer = build_trainer(config, model, loaders[0], loaders[1], history)
    started = time.monotonic()
    trainer.fit()
    seconds = time.monotonic() - started
    if loaders[1] is not None and not any(name.startswith('metrics/eval/') for name in history.data):
        trainer.eval()
    result = summarize(trainer.state, history, seconds=seconds)
    if dist.get_global_rank() == 0:
        answers = []
        if datasets[1] is not None and config.report.num_samples and not config.trainer.get('parallelism_config'):
            answers = answer_held_out(
                model,
                datasets[1],
                processor,
                num_samples=config.report.num_samples,
                max_new_tokens=config.report.max_new_tokens,
            )
        folder = config.report.folder.format(run_name=trainer.state.run_name)
        write_report(folder, result, history, answers, picture=config.report.picture)
    # The other ranks wait for the one that writes: NCCL takes an early end for a crash.
    dist.barrier()
    trainer.close()
    if dist.get_global_rank() == 0:
        print_summary(result, answers, folder)
    return result


def build_trainer(
    config: TrainConfig,
    model: HuggingFaceModel,
    train_loader: DataSpec | None,
    eval_loader: DataSpec | None,
    history: InMemoryLogger,
) -> Trainer:
    """The Composer Trainer of a config; ``history`` is logged to besides the loggers that the config names."""
    arguments = {key: value for key, value in config.trainer.items() if key != 'loggers'}
    loggers = _build_all('loggers', config.trainer.get('loggers') or {})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.microbatching.device_train_microbatch_size is not None:
        arguments['device_train_microbatch_size'] = config.microbatching.device_train_microbatch_size
    return Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=eval_loader,
        optimizers=_build_section('optimizer', config.optimizer, parameters),
        schedulers=_build_section('scheduler', config.scheduler),
        algorithms=_build_all('algorithms', config.algorithms),
        callbacks=_build_all('callbacks', config.callbacks),
        loggers=[*loggers, history],
        seed=config.seed,
        **arguments,
    )


def _build_all(kind: str, parts: dict[str, Any]) -> list[Any]:
    return [build_by_name(kind, name, arguments) for name, arguments in parts.items()]


def _build_section(kind: str, section: dict[str, Any], *positional: Any) -> Any:
    arguments = {key: value for key, value in section.items() if key != 'name'}
    return build_by_name(kind, section['name'], arguments, *positional)


def _share_cores() -> None:
    """Divides the cores among the ranks of this node: by default each rank would start a thread on every core."""
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // dist.get_local_world_size(), 1))


def _refuse(error: ConfigError) -> int:
    if int(os.environ.get('LOCAL_RANK', '0')) > 0:
        # All ranks stumble over the same mistake. The launcher prints the whole output of each rank that fails by
        # itself, so the others wait for it to end them, and rank 0 says it once. Composer turns SIGTERM into a failure.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    print(f'error: {error}', file=sys.stderr, flush=True)
    return 2


if __name__ == '__main__':
    sys.exit(main())
