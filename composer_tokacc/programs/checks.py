# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a config before any process group, model or data: what its sections mean for each other.

What an argument may be is said by its owner, whose words :func:`.section` puts into those of the file.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import TimeUnit, ensure_time
from composer.utils.parallelism import FSDP2Config, FSDPConfig, ParallelismConfig

from composer_tokacc.planning import CostModel
from composer_tokacc.programs.errors import ConfigError, section, unknown_name
from composer_tokacc.programs.models import check_source
from composer_tokacc.programs.registry import check_arguments, class_by_name, import_by_name
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import cost_of, source_of, token_data_spec_of

__all__ = ['check_config']

_DTYPES = ('float32', 'bfloat16', 'float16')
# Arguments of the Trainer that other sections fill.
_FILLED_ELSEWHERE = {
    'model': 'model',
    'train_dataloader': 'dataset` and `loader',
    'eval_dataloader': 'dataset.eval',
    'algorithms': 'algorithms',
    'callbacks': 'callbacks',
    'optimizers': 'optimizer',
    'schedulers': 'scheduler',
    'device_train_microbatch_size': 'microbatching.device_train_microbatch_size',
    'seed': 'seed',
}


def check_config(config: TrainConfig, *, world_size: int | None = None) -> None:
    """Checks the sense of a config whose types are right.

    Args:
        config: from :func:`composer_tokacc.programs.load_config`.
        world_size: number of ranks; None takes it from the launcher's environment.

    Raises:
        ConfigError: for the first mistake, in one line that says what it is and how to mend it.
    """
    if world_size is None:
        world_size = int(os.environ.get('WORLD_SIZE', '1'))
    _check_model(config)
    _check_loader(config, world_size)
    _check_dataset(config)
    _check_microbatching(config)
    _check_named_parts(config)
    _check_trainer(config)
    _check_report(config.report)


def _check_model(config: TrainConfig) -> None:
    with section('model', ('pretrained', 'config')):
        check_source(config.model.pretrained, config.model.config)
    if config.model.dtype not in _DTYPES:
        raise ConfigError(f'`model.dtype` must be one of {", ".join(_DTYPES)}, got: {config.model.dtype}')


def _check_dataset(config: TrainConfig) -> None:
    for key in ('processor', 'eval'):
        if not isinstance(config.dataset.get(key), dict | None):
            raise ConfigError(f'`dataset.{key}` must be a mapping of arguments, got: {config.dataset[key]}')
    source_of(config).check()


def _check_loader(config: TrainConfig, world_size: int) -> None:
    loader = config.loader
    for name in ('global_batch_size', 'global_eval_batch_size'):
        size = getattr(loader, name)
        if size is None:
            continue
        if size < 1:
            raise ConfigError(f'`loader.{name}` must be at least 1, got: {size}')
        if size % world_size:
            below, above = size // world_size * world_size, (size // world_size + 1) * world_size
            sizes = f'{below} or {above}' if below else str(above)
            raise ConfigError(
                f'`loader.{name}` must be divisible by the number of ranks, got: {size} on {world_size} ranks. '
                f'Set it to {sizes}, or launch another number of ranks'
            )
    if loader.modality not in ('mixed', 'per_step'):
        raise ConfigError(f'`loader.modality` must be `mixed` or `per_step`, got: {loader.modality}')
    if loader.num_workers < 0:
        raise ConfigError(f'`loader.num_workers` must be at least 0, got: {loader.num_workers}')
    if loader.prefetch_factor is not None and not (loader.num_workers and loader.prefetch_factor > 0):
        raise ConfigError(
            f'`loader.prefetch_factor` must be positive and needs workers, got: {loader.prefetch_factor} with '
            f'{loader.num_workers} workers. Set `loader.num_workers`, or leave it out'
        )


def _check_microbatching(config: TrainConfig) -> None:
    microbatching = config.microbatching
    size = microbatching.device_train_microbatch_size
    if isinstance(size, str) and size not in ('auto', 'suggest'):
        raise ConfigError(
            f'`microbatching.device_train_microbatch_size` must be a number, `auto` or `suggest`, got: {size}'
        )
    if isinstance(size, int) and size < 1:
        raise ConfigError(
            f'`microbatching.device_train_microbatch_size` must be at least 1, got: {size}. '
            'Use 1 for the least memory, or leave it out for one microbatch a step'
        )
    if size == 'auto' and (config.trainer.get('device') == 'cpu' or not torch.cuda.is_available()):
        raise ConfigError(
            '`microbatching.device_train_microbatch_size` must be a number on CPU, got: auto. '
            'Composer can find it on GPUs only'
        )
    if microbatching.device_memory_gib is not None and not microbatching.device_memory_gib > 0:
        raise ConfigError(f'`microbatching.device_memory_gib` must be positive, got: {microbatching.device_memory_gib}')
    check_arguments('microbatching.cost', CostModel, microbatching.cost)
    with section('microbatching.cost', [field.name for field in dataclasses.fields(CostModel)]):
        cost_of(config)
    # The run's own, of no data.
    token_data_spec_of(config, [], slot_tokens=microbatching.slot_tokens)


def _check_named_parts(config: TrainConfig) -> None:
    named: list[tuple[str, dict[str, Any]]] = [('algorithms', config.algorithms), ('callbacks', config.callbacks)]
    named.append(('loggers', config.trainer.get('loggers') or {}))
    for kind, parts in named:
        if not isinstance(parts, dict):
            raise ConfigError(f'`trainer.{kind}` must be a mapping of names to arguments, got: {parts}')
        for name, arguments in parts.items():
            check_arguments(f'{kind}.{name}', class_by_name(kind, name), arguments)
    for kind, given, num_given in (('optimizer', config.optimizer, 1), ('scheduler', config.scheduler, 0)):
        if 'name' not in given:
            raise ConfigError(f'`{kind}.name` must be given, got: {given}')
        arguments = {key: value for key, value in given.items() if key != 'name'}
        check_arguments(kind, class_by_name(kind, given['name']), arguments, num_given=num_given)
    if 'token_accumulation' in config.algorithms and config.trainer.get('accumulate_train_batch_on_tokens'):
        raise ConfigError(
            '`trainer.accumulate_train_batch_on_tokens` must be false with `algorithms.token_accumulation`, got: true. '
            'Both weigh by tokens, and together the gradient is wrong; remove one'
        )


def _check_trainer(config: TrainConfig) -> None:
    trainer = config.trainer
    for name, own in _FILLED_ELSEWHERE.items():
        if name in trainer:
            raise ConfigError(f'`trainer.{name}` must be set in its own section, got: {trainer[name]}. Use `{own}`')
    # `model` is the program's own; everything else has a default.
    check_arguments('trainer', Trainer, {**trainer, 'model': None})
    if 'max_duration' not in trainer:
        raise ConfigError('`trainer.max_duration` must be given, got: nothing. For example 2ep or 500ba')
    for name in ('max_duration', 'eval_interval', 'save_interval'):
        if name in trainer:
            _check_time(name, trainer[name])
    if trainer.get('autoresume') and not (trainer.get('save_folder') and trainer.get('run_name')):
        raise ConfigError(
            '`trainer.autoresume` must come with `trainer.save_folder` and `trainer.run_name`, which say '
            'where the checkpoints are, got: neither or one of them'
        )
    _check_parallelism(trainer.get('parallelism_config') or {})
    load_path = trainer.get('load_path')
    if load_path and '://' not in load_path and '{' not in load_path and not Path(load_path).exists():
        raise ConfigError(f'`trainer.load_path` must be an existing checkpoint, got: {load_path}')


def _check_parallelism(parallelism: dict[str, Any]) -> None:
    check_arguments('trainer.parallelism_config', ParallelismConfig, parallelism)
    # The Trainer reads FSDP2's settings (FSDP_VERSION=2) from the same mapping; the classes themselves take any name.
    known = {known.name for config in (FSDPConfig, FSDP2Config) for known in dataclasses.fields(config)}
    for key in parallelism.get('fsdp') or {}:
        if key not in known:
            raise ConfigError(unknown_name('`trainer.parallelism_config.fsdp` key', key, known))


def _check_report(report: dict[str, Any]) -> None:
    if not isinstance(report.get('folder'), str):
        raise ConfigError(f'`report.folder` must be a path, got: {report.get("folder")}')
    arguments = {key: value for key, value in report.items() if key not in ('folder', 'name')}
    if 'name' in report:
        check_arguments('report', import_by_name('report', str(report['name'])), arguments, num_given=1)
    elif arguments:
        raise ConfigError(unknown_name('`report` key', next(iter(arguments)), ('folder', 'name')))


def _check_time(name: str, value: Any) -> None:
    try:
        positive = ensure_time(value, TimeUnit.EPOCH).value > 0
    except (ValueError, TypeError) as error:
        raise ConfigError(f'`trainer.{name}` must be a time such as 2ep or 500ba, got: {value}') from error
    if not positive:
        raise ConfigError(f'`trainer.{name}` must be longer than nothing, got: {value}')
