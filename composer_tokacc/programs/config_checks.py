# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Our rules about a config, checked before any process group, model or data.

A value that Composer, torch or Transformers refuse themselves is not checked here, unless they would take it without a
word or refuse it only after the data was read and the model was loaded.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from composer import Trainer
from composer.core import TimeUnit, ensure_time
from composer.utils import is_compressed_pt
from composer.utils.parallelism import FSDP2Config, FSDPConfig
from pydantic import Field

from composer_tokacc.programs.checkpoints import check_checkpoint
from composer_tokacc.programs.errors import ConfigError, building, local_folder
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.models import EVAL_METRICS, TRAIN_METRICS, check_model
from composer_tokacc.programs.registry import HOST_HINTS, build_section, check_part, import_by_name, named_parts
from composer_tokacc.programs.schema import (
    REPORT_KEYS,
    Count,
    NotNegative,
    TrainConfig,
    check_arguments,
    check_names,
    check_value,
    precision_of,
    without,
)
from composer_tokacc.programs.sources import source_of, token_data_spec_of
from composer_tokacc.sampling.global_batches import BatchSchedule

# Arguments of the Trainer that other sections fill.
FILLED_ELSEWHERE = {
    'model': '`model`',
    'train_dataloader': '`dataset` and `loader`',
    'eval_dataloader': '`dataset.eval`',
    'algorithms': '`algorithms`',
    'callbacks': '`callbacks`',
    'optimizers': '`optimizer`',
    'schedulers': '`scheduler`',
    'device_train_microbatch_size': '`microbatching.device_train_microbatch_size`',
    'seed': '`seed`',
}
LAUNCHER_VARIABLES = {
    'RANK': NotNegative,
    'LOCAL_RANK': NotNegative,
    'NODE_RANK': NotNegative,
    'WORLD_SIZE': Count,
    'LOCAL_WORLD_SIZE': Count,
    'MASTER_PORT': Annotated[int, Field(ge=1, le=65535)],
}
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and checkpoints add to it."""
_FSDP = 'trainer.parallelism_config.fsdp'


def check_config(config: TrainConfig, *, num_ranks: int | None = None) -> None:
    """Raises ConfigError for the first mistake that the config itself shows, in one line with the remedy."""
    world_size = _check_launcher()
    num_ranks = num_ranks or world_size
    check_value('dataset.processor', config.dataset.get('processor'), dict | None)
    check_value('dataset.eval', config.dataset.get('eval'), dict | None)
    with building('model'):
        check_model(config.model.pretrained, config.model.config, config.model.lora)
    if config.model.lora is not None:
        _check_adapter(config, config.model.lora)
    _check_batch_sizes(config, num_ranks)
    with building('dataset'):
        source_of(config).check()
    with building('microbatching'):
        # The same call as in the run, without data: it refuses options that do not go together.
        token_data_spec_of(config, [], slot_tokens=config.microbatching.slot_tokens)
    _check_trainer(config.trainer)
    _check_unequal_epochs(config)
    for kind in ('algorithms', 'callbacks', 'loggers'):
        for part in named_parts(config, kind):
            check_part(part.kind, part.path, part.name, part.arguments)
    scheduler = config.scheduler
    check_part('scheduler', 'scheduler', scheduler.get('name', ''), without(scheduler, 'name'))
    _check_optimizer(config.optimizer)
    _check_stoppers(config)
    if config.is_sharded:
        _check_sharding(config)
    _check_report(config)
    _check_names(config)


def _check_launcher() -> int:
    """Returns the number of ranks that the launcher has set in the environment."""
    values = {}
    for name, allowed in LAUNCHER_VARIABLES.items():
        if name in os.environ:
            text = os.environ[name]
            values[name] = check_value(name, int(text) if text.isdecimal() else text, allowed)
    rank, world_size = values.get('RANK', 0), values.get('WORLD_SIZE', 1)
    if rank >= world_size:  # such a rank would take itself for one that writes nothing
        raise ConfigError('RANK', f'of the environment must be below WORLD_SIZE, got: {rank} of {world_size}. Unset it')
    return world_size


def _check_adapter(config: TrainConfig, lora: Section) -> None:
    """Checks that parallelism and precision fit an adapter. Its weights are float32, whatever the base has."""
    if config.is_sharded and lora.get('bits') is not None:
        raise ConfigError('model.lora.bits', 'must be left out with FSDP, got: 4. Use DDP, or a base in float32')
    if config.model.dtype == 'float32':
        return
    if config.is_sharded:
        raise ConfigError(
            'model.dtype',
            'must be float32 with `model.lora` and FSDP, which shards weights of one type together, got: '
            f'{config.model.dtype} and an adapter in float32. Set it, or use DDP',
        )
    precision = precision_of(config)
    if not precision.startswith('amp'):
        raise ConfigError(
            'trainer.precision',
            f'must be amp_bf16 or amp_fp16 with `model.lora` on a base in half precision, got: {precision}. Set it, or '
            '`model.dtype` to float32',
        )


def _check_batch_sizes(config: TrainConfig, num_ranks: int) -> None:
    loader = config.loader
    sizes = [('global_eval_batch_size', loader.global_eval_batch_size or 0)]
    if isinstance(loader.global_batch_size, int):
        sizes.append(('global_batch_size', loader.global_batch_size))
    else:
        with building('loader.global_batch_size'):
            schedule = BatchSchedule.from_stages(loader.global_batch_size)
        for size in schedule.sizes:
            sizes.append(('global_batch_size', size))
    for name, size in sizes:
        if size % num_ranks == 0:
            continue
        below = size // num_ranks * num_ranks
        suggestions = f'{below} or {below + num_ranks}' if below else f'{num_ranks}'
        raise ConfigError(
            f'loader.{name}',
            f'must be divisible by the number of ranks, got: {size} on {num_ranks} ranks. Set it to {suggestions}, or '
            'launch another number of ranks',
        )


def _check_unequal_epochs(config: TrainConfig) -> None:
    """Refuses a duration in epochs with a schedule of the global batch, as Composer would after the data was read."""
    duration = config.trainer['max_duration']
    is_in_epochs = ensure_time(duration, TimeUnit.EPOCH).unit == TimeUnit.EPOCH
    if is_in_epochs and not isinstance(config.loader.global_batch_size, int):
        raise ConfigError(
            'trainer.max_duration',
            'must be in tokens, samples or batches with a schedule of `loader.global_batch_size`, which gives epochs '
            f'unequal numbers of batches, got: {duration}',
        )


def _check_trainer(trainer: Section) -> None:
    for name, section in FILLED_ELSEWHERE.items():
        if name in trainer:
            raise ConfigError(f'trainer.{name}', f'must be set in its own section, got: {trainer[name]}. Use {section}')
    arguments = {**without(trainer, 'loggers'), 'model': None}
    check_arguments('trainer', Trainer, arguments, hints={**HOST_HINTS, 'model': Any})
    if trainer.get('max_duration') is None:
        raise ConfigError('trainer.max_duration', 'must be given. For example 2ep or 500ba')
    unit = ensure_time(trainer['max_duration'], TimeUnit.EPOCH).unit
    if unit in (TimeUnit.SECOND, TimeUnit.ITERATION):
        raise ConfigError(
            'trainer.max_duration',
            'must be in epochs, batches, samples or tokens (2ep, 500ba, 10000sp, 5000000tok), got: '
            f'{trainer["max_duration"]}',
        )
    parallelism = trainer.get('parallelism_config') or {}
    # `tp` takes Python objects, and the Trainer drops `fsdp2`.
    keys = [key for key, value in parallelism.items() if value is not None]
    check_names('trainer.parallelism_config', keys, ['fsdp'])
    file_name = str(trainer.get('save_filename'))
    if is_compressed_pt(file_name):
        raise ConfigError('trainer.save_filename', f'must end in .pt, got: {file_name}. No run resumes compressed ones')
    load_path = trainer.get('load_path')
    if load_path is not None and '://' not in load_path and '{' not in load_path:
        check_checkpoint('trainer.load_path', Path(load_path))


def _check_names(config: TrainConfig) -> None:
    """Refuses ``None`` and empty texts as names, and a name that no file system takes."""
    trainer = config.trainer
    names = {f'trainer.{key}': trainer.get(key) for key in ('run_name', 'save_folder', 'load_path')}
    names['report.folder'] = config.report.get('folder')
    names['loader.lengths_folder'] = config.loader.lengths_folder
    for path, name in names.items():
        # `key=None` on the command line is this text, because YAML writes null.
        if name is not None and name.strip() in ('', 'None'):
            raise ConfigError(path, f'must be a name, got: {name!r}. Write null for none')
    run_name = trainer.get('run_name')
    if trainer.get('save_folder') and run_name is None and '{run_name}' in trainer['save_folder']:
        raise ConfigError('trainer.run_name', 'must be given, because `trainer.save_folder` has {run_name} in it')
    if run_name is not None and len(str(run_name).encode()) > LONGEST_NAME:
        raise ConfigError('trainer.run_name', f'must be at most {LONGEST_NAME} bytes long, got: {run_name}')


def _check_optimizer(optimizer: Section) -> None:
    """Builds the optimizer for one weight, with the arguments of each part of the model.

    The one of the run is built after the model, which may take minutes to load.
    """
    parts = check_value('optimizer.parts', optimizer.get('parts'), dict[str, dict[str, Any]] | None) or {}
    for arguments in ({}, *parts.values()):
        parameter = torch.nn.Parameter(torch.zeros(1))
        build_section('optimizer', {**optimizer, **arguments}, [parameter])


def _check_stoppers(config: TrainConfig) -> None:
    """Refuses a stopper that watches a metric which nobody computes: it would wait for ever."""
    eval_metrics = EVAL_METRICS if config.dataset.get('eval') else ()
    train_metrics = TRAIN_METRICS if config.model.train_metrics else ()
    metrics = {
        'eval': [metric.__name__ for metric in eval_metrics],
        'train': [metric.__name__ for metric in train_metrics],
    }
    for name in ('early_stopper', 'threshold_stopper'):
        arguments = config.callbacks.get(name) or {}
        monitor, label = arguments.get('monitor'), arguments.get('dataloader_label')
        if name in config.callbacks and monitor not in metrics.get(str(label), ()):
            raise ConfigError(
                f'callbacks.{name}',
                f'must watch a metric of this run, got: {monitor} of {label}. The metrics are {metrics}. Give '
                '`dataset.eval` or `model.train_metrics`, and the name of a metric as it stands here',
            )


def _check_sharding(config: TrainConfig) -> None:
    """Refuses settings of FSDP that Composer drops without a word or refuses in the first step."""
    settings = config.trainer['parallelism_config']['fsdp']
    settings = check_value(_FSDP, settings, dict)
    # FSDP2's settings (FSDP_VERSION=2) come from the same mapping. The classes themselves take any name.
    known_names = {setting.name for cls in (FSDPConfig, FSDP2Config) for setting in dataclasses.fields(cls)}
    check_names(_FSDP, settings, known_names)
    check_arguments(_FSDP, FSDPConfig, settings, hints=HOST_HINTS)
    replicas = settings.get('data_parallel_replicate_degree')
    shards = settings.get('data_parallel_shard_degree', -1)
    if os.environ.get('FSDP_VERSION') == '2':
        if replicas is not None or shards != -1:
            raise ConfigError(
                _FSDP,
                'must be without `data_parallel_replicate_degree` and `data_parallel_shard_degree` with '
                f'FSDP_VERSION=2, which shards over all ranks and ignores them, got: {replicas} and {shards}',
            )
        return
    if replicas is None and 'HYBRID' in str(settings.get('sharding_strategy')).upper():
        raise ConfigError(
            f'{_FSDP}.data_parallel_replicate_degree',
            f'must be given with {settings["sharding_strategy"]}, which shards over all ranks without it. Set it to '
            'the number of nodes',
        )
    clipping = config.algorithms.get('gradient_clipping') or {}
    if clipping.get('clipping_type') == 'adaptive':
        raise ConfigError(
            'algorithms.gradient_clipping.clipping_type', 'must be norm or value with FSDP, got: adaptive'
        )


def _check_report(config: TrainConfig) -> None:
    report = config.report
    function: Any = _no_function
    if 'name' in report:
        function = import_by_name('report.name', str(report['name']))
        module = str(getattr(function, '__module__', ''))
        if module.partition('.')[0] in sys.stdlib_module_names:
            raise ConfigError('report.name', f'must be a function that takes a FinishedRun, got: {report["name"]}')
    check_arguments('report', function, report, num_positional=1, extra_keys=REPORT_KEYS)
    if not report.get('export'):
        return
    remedy = 'Export the checkpoint afterwards: python -m composer_tokacc.export CHECKPOINT FOLDER'
    if config.is_sharded:
        raise ConfigError('report.export', f'must be false with FSDP, which shards the weights, got: true. {remedy}')
    if config.model.lora is not None and config.model.pretrained is None:
        raise ConfigError(
            'report.export',
            f'must be false for `model.lora` on a base with random weights, got: true. {remedy} merge=true',
        )


def _no_function(run: object) -> None:
    """Stands for the function that ``report.name`` does not name."""


def check_folders(config: TrainConfig) -> None:
    """Makes the folders that a run writes to, so that it fails before training. A dry run only tries."""
    folders = {
        'report.folder': config.report['folder'],
        'trainer.save_folder': config.trainer.get('save_folder'),
        'loader.lengths_folder': config.loader.lengths_folder,
    }
    run_name = config.trainer.get('run_name')
    for path, folder in folders.items():
        is_in_object_store = path == 'trainer.save_folder' and '://' in str(folder)
        if folder is None or is_in_object_store:
            continue
        if run_name is not None:
            folder = folder.replace('{run_name}', str(run_name))
        # Other names in braces are known to the Trainer only.
        folder = local_folder(path, folder.partition('{')[0])
        try:
            _make(folder, only_try=config.dry_run)
        except OSError as error:
            raise ConfigError(path, f'must be a folder that can be made, got: {folder} ({error.strerror})') from error
        if path == 'report.folder':
            check_regular_files(path, folder, RESULT_FILES)


RESULT_FILES = ('metrics.jsonl', 'answers.jsonl', 'result.json', 'report.html')


def _make(folder: Path, *, only_try: bool) -> None:
    """Makes a folder, or raises the OSError that making it would raise, without leaving anything."""
    if not only_try:
        folder.mkdir(parents=True, exist_ok=True)
        return
    while not folder.exists():
        folder = folder.parent
    tempfile.TemporaryFile(dir=folder).close()


def check_regular_files(path: str, folder: Path, names: tuple[str, ...]) -> None:
    """Refuses anything but a file in the way of a file to be written: a pipe would be waited for."""
    for name in names:
        file = folder / name
        if file.exists() and not file.is_file():
            raise ConfigError(path, f'must have no folder, pipe or device in the way of its files, got: {file}')
