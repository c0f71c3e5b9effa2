# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks what the sections of a config say together, before any process group, model or data."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from composer import Trainer
from composer.core import Precision, TimeUnit, ensure_time
from composer.devices import DeviceGPU
from composer.utils import get_device, is_compressed_pt
from composer.utils.parallelism import FSDP2Config, FSDPConfig

from composer_tokacc.programs.checkpoints import check_checkpoint
from composer_tokacc.programs.errors import ConfigError, in_words_of, local_folder, must
from composer_tokacc.programs.models import EVAL_METRICS, TRAIN_METRICS, check_model
from composer_tokacc.programs.registry import check_host_arguments, check_part, import_by_name, named_parts, without
from composer_tokacc.programs.schema import (
    AT_LEAST_0,
    AT_LEAST_1,
    OF_THE_REPORT,
    Range,
    TrainConfig,
    check_arguments,
    check_names,
    check_numbers,
    check_time,
    check_value,
    precision_of,
)
from composer_tokacc.programs.source import token_data_spec_of
from composer_tokacc.programs.sources import source_of

# Arguments of the Trainer that other sections fill.
_FILLED_ELSEWHERE = {
    'model': 'model', 'train_dataloader': 'dataset` and `loader', 'eval_dataloader': 'dataset.eval',
    'algorithms': 'algorithms', 'callbacks': 'callbacks', 'optimizers': 'optimizer', 'schedulers': 'scheduler',
    'device_train_microbatch_size': 'microbatching.device_train_microbatch_size', 'seed': 'seed',
}  # fmt: skip
_OF_THE_LAUNCHER = {
    **dict.fromkeys(('RANK', 'LOCAL_RANK', 'NODE_RANK'), AT_LEAST_0),
    **dict.fromkeys(('WORLD_SIZE', 'LOCAL_WORLD_SIZE'), AT_LEAST_1),
    'MASTER_PORT': Range(least=1, most=65535),
}
_FSDP = 'trainer.parallelism_config.fsdp'


def check_config(config: TrainConfig, *, num_ranks: int | None = None) -> None:
    """Raises ConfigError for the first mistake in a config whose types are right, in one line with the remedy."""
    for name, allowed in _OF_THE_LAUNCHER.items():
        value = os.environ.get(name, '1')
        if not value.isdecimal() or int(value) not in allowed:
            raise ConfigError(f'`{name}` of the environment must be a whole number, {allowed}, got: {value}. Unset it')
    rank, world = (int(os.environ.get(name, default)) for name, default in (('RANK', '0'), ('WORLD_SIZE', '1')))
    if rank >= world:  # it would take itself for one that writes nothing
        raise ConfigError(f'`RANK` of the environment must be below `WORLD_SIZE`, got: {rank} of {world}. Unset it')
    num_ranks = num_ranks or world
    check_value('loader.num_workers', config.loader.num_workers, Annotated[int, Range(most=256)])
    check_numbers('', without(dataclasses.asdict(config), 'microbatching'))  # whose cost may have an infinite term
    with in_words_of(config):
        check_model(config.model.pretrained, config.model.config, config.model.lora)
        if config.model.lora is not None:
            _check_adapter(config, config.model.lora)
        _check_batches(config, num_ranks)
        source_of(config).check()
        # The run's own, of no data.
        token_data_spec_of(config, [], slot_tokens=config.microbatching.slot_tokens)
    _check_parts(config)
    _check_trainer(config.trainer)
    _check_warmup(config)
    _check_report(config)
    if config.is_sharded:
        _check_mesh(config.trainer['parallelism_config']['fsdp'] or {}, num_ranks)


def _check_adapter(config: TrainConfig, lora: Mapping[str, Any]) -> None:
    """Checks that parallelism and precision fit what is trained, which is in float32 whatever the base is in."""
    if config.is_sharded and lora.get('bits') is not None:
        raise ConfigError('`model.lora.bits` must be left out with FSDP, got: 4. Use DDP, or a base in float32')
    if config.model.dtype == 'float32':
        return
    if config.is_sharded:
        raise ConfigError(
            '`model.dtype` must be float32 with `model.lora` and FSDP, which shards weights of one type together, got: '
            f'{config.model.dtype} beside an adapter in float32. Set it, or use DDP'
        )
    if not precision_of(config).startswith('amp'):
        raise ConfigError(
            '`trainer.precision` must be amp_bf16 or amp_fp16 with `model.lora` on a base in half precision, got: '
            f'{precision_of(config)}. Set it, or `model.dtype` to float32'
        )


def _check_batches(config: TrainConfig, num_ranks: int) -> None:
    """Refuses batches that the ranks cannot share evenly, and what torch would refuse once the data is read."""
    loader = config.loader
    for name in ('global_batch_size', 'global_eval_batch_size'):
        size = getattr(loader, name) or 0
        if size % num_ranks:
            below, above = size // num_ranks * num_ranks, (size // num_ranks + 1) * num_ranks
            raise ConfigError(
                f'`loader.{name}` must be divisible by the number of ranks, got: {size} on {num_ranks} ranks. '
                f'Set it to {f"{below} or " if below else ""}{above}, or launch another number of ranks'
            )
    if loader.prefetch_factor is not None and not loader.num_workers:
        found = f'{loader.prefetch_factor} with 0 workers'
        raise ConfigError(f'`loader.prefetch_factor` must come with `loader.num_workers`, got: {found}')
    is_cpu = config.trainer.get('device') == 'cpu' or not torch.cuda.is_available()
    if config.microbatching.device_train_microbatch_size == 'auto' and is_cpu:
        raise ConfigError('`microbatching.device_train_microbatch_size` must be a number on CPU, got: auto (GPU only)')
    for key in ('processor', 'eval'):
        check_value(f'dataset.{key}', config.dataset.get(key), dict | None)


def _check_parts(config: TrainConfig) -> None:
    """Checks the sections that name classes."""
    check_value('trainer.loggers', config.trainer.get('loggers'), dict | None)
    for part in named_parts(config):
        check_part(*part)
    measured = {
        'eval': EVAL_METRICS if config.dataset.get('eval') else (),
        'train': TRAIN_METRICS if config.model.train_metrics else (),
    }
    for name in sorted({'early_stopper', 'threshold_stopper'} & config.callbacks.keys()):
        monitor, label = config.callbacks[name]['monitor'], config.callbacks[name]['dataloader_label']
        known = {label: [metric.__name__ for metric in metrics] for label, metrics in measured.items()}
        if monitor not in known.get(label, ()):  # it would wait for ever
            remedy = 'Give `dataset.eval` or `model.train_metrics`, and the own name of a metric'
            found = f'{monitor} of {label}, of the metrics {known}. {remedy}'
            raise ConfigError(f'`callbacks.{name}` must watch a metric of this run, got: {found}')
    for kind, section in (('optimizer', config.optimizer), ('scheduler', config.scheduler)):
        if 'name' not in section:
            raise ConfigError(f'`{kind}.name` must be given, got: {section}')
    check_part('scheduler', 'scheduler', config.scheduler['name'], without(config.scheduler, 'name'))
    _check_optimizer(config.optimizer)
    if 'token_accumulation' in config.algorithms and config.trainer.get('accumulate_train_batch_on_tokens'):
        raise ConfigError(
            '`trainer.accumulate_train_batch_on_tokens` must be false with `algorithms.token_accumulation`, got: true. '
            'Both weigh by tokens, and together the gradient is wrong; remove one'
        )
    clipping = config.algorithms.get('gradient_clipping') or {}
    if clipping.get('clipping_type') == 'adaptive' and config.is_sharded and os.environ.get('FSDP_VERSION') != '2':
        raise ConfigError('`algorithms.gradient_clipping.clipping_type` must be norm or value with FSDP, got: adaptive')


def _check_optimizer(optimizer: dict[str, Any]) -> None:
    """Checks the arguments of an optimizer, and what parts of the model are given of their own."""
    shared, parts = without(optimizer, 'name', 'parts'), optimizer.get('parts') or {}
    if not isinstance(parts, dict) or not all(isinstance(own, dict) for own in parts.values()):
        raise ConfigError(f'`optimizer.parts` must map parts of the model to arguments, got: {parts}')
    groups = {'optimizer': {}, **{f'optimizer.parts.{name}': own for name, own in parts.items()}}
    for path, own in groups.items():
        check_part('optimizer', path, optimizer['name'], {**shared, **own}, [torch.nn.Parameter(torch.zeros(1))])


def _check_trainer(trainer: dict[str, Any]) -> None:
    for name, own in _FILLED_ELSEWHERE.items():
        if name in trainer:
            raise ConfigError(f'`trainer.{name}` must be set in its own section, got: {trainer[name]}. Use `{own}`')
    # `model` is the program's own, as are `loggers`; everything else has a default.
    check_host_arguments('trainer', Trainer, {**without(trainer, 'loggers'), 'model': None})
    if trainer.get('max_duration') is None:
        raise ConfigError('`trainer.max_duration` must be given, got: nothing. For example 2ep or 500ba')
    for name in ('max_duration', 'eval_interval', 'save_interval', 'console_log_interval'):
        if name in trainer:
            check_time(f'trainer.{name}', trainer[name])
    if ensure_time(trainer['max_duration'], TimeUnit.EPOCH).unit in (TimeUnit.SECOND, TimeUnit.ITERATION):
        raise ConfigError(
            '`trainer.max_duration` must be in epochs, batches, samples or tokens (2ep, 500ba, 10000sp, 5000000tok), '
            f'got: {trainer["max_duration"]}'
        )
    if trainer.get('autoresume') and not (trainer.get('save_folder') and trainer.get('run_name')):
        required = '`trainer.save_folder` and `trainer.run_name`'
        raise ConfigError(f'`trainer.autoresume` must come with {required}, got: neither or one of them')
    if is_compressed_pt(saved := str(trainer.get('save_filename'))):
        raise ConfigError(f'`trainer.save_filename` must end in .pt, got: {saved}. No run goes on from compressed ones')
    load_path = trainer.get('load_path')
    if load_path is not None and '://' not in load_path and '{' not in load_path:
        check_checkpoint('`trainer.load_path`', Path(load_path))
    check_host_arguments('trainer.compile_config', torch.compile, trainer.get('compile_config'), num_given=1)
    parallelism = trainer.get('parallelism_config') or {}
    # The plan of `tp` is of Python objects, and the Trainer drops `fsdp2`.
    check_names('trainer.parallelism_config', [key for key in parallelism if parallelism[key] is not None], ['fsdp'])
    # The Trainer reads FSDP2's settings (FSDP_VERSION=2) from the same mapping; the classes themselves take any name.
    known = {known.name for config in (FSDPConfig, FSDP2Config) for known in dataclasses.fields(config)}
    check_names(_FSDP, check_value(_FSDP, parallelism.get('fsdp') or {}, dict), known)
    check_host_arguments(_FSDP, FSDPConfig, parallelism.get('fsdp'))


def _check_warmup(config: TrainConfig) -> None:
    """Refuses a warm-up that Composer cannot hold against the run's length; a run cut short to try it may be all."""
    warmup, longest = config.scheduler.get('t_warmup'), config.trainer['max_duration']
    if warmup is None:
        return
    t_max = config.scheduler.get('t_max', '1dur')
    units = [ensure_time(time, TimeUnit.EPOCH).unit for time in (longest, warmup, t_max)]
    # As schedulers reckon: epochs in batches, a share of the run in its own unit.
    run, own, whole = (TimeUnit.BATCH if unit == TimeUnit.EPOCH else unit for unit in units)
    own, whole = (run if unit == TimeUnit.DURATION else unit for unit in (own, whole))
    if own != whole:
        name, end = ('scheduler.t_max', t_max) if 't_max' in config.scheduler else ('trainer.max_duration', longest)
        requirement = f'`scheduler.t_warmup` must be in the unit of `{name}`, or a share such as 0.05dur'
        raise ConfigError(f'{requirement}, got: {warmup} with {end}')


def _check_mesh(fsdp: Mapping[str, Any], num_ranks: int) -> None:
    """Refuses groups of ranks that the ranks do not make, or that FSDP would silently not make."""
    replicas, shards = fsdp.get('data_parallel_replicate_degree'), fsdp.get('data_parallel_shard_degree', -1)
    if os.environ.get('FSDP_VERSION') == '2':
        if replicas is not None or shards != -1:
            raise ConfigError(
                f'`{_FSDP}` must be without `data_parallel_replicate_degree` and `data_parallel_shard_degree` with '
                f'FSDP_VERSION=2, which shards over all ranks whatever they say, got: {replicas} and {shards}'
            )
        return
    if replicas is None and 'HYBRID' in str(fsdp.get('sharding_strategy')).upper():
        raise ConfigError(
            f'`{_FSDP}.data_parallel_replicate_degree` must be given with {fsdp["sharding_strategy"]}, which shards '
            'over all ranks otherwise, got: nothing. Set it to the number of nodes'
        )
    degrees = [degree for degree in (replicas, shards) if degree is not None]
    product = math.prod(degree for degree in degrees if degree > 0)
    if degrees.count(-1) > 1 or num_ranks % product or (-1 not in degrees and product != num_ranks):
        raise ConfigError(
            f'`{_FSDP}.data_parallel_replicate_degree` times `data_parallel_shard_degree` must be the number of ranks, '
            f'got: {replicas} and {shards} on {num_ranks} ranks. Leave the latter out, or set it to -1, for the rest'
        )


def _check_report(config: TrainConfig) -> None:
    report = config.report
    function = import_by_name('report', str(report['name'])) if 'name' in report else lambda run: None
    if str(getattr(function, '__module__', '')).partition('.')[0] in sys.stdlib_module_names:
        raise ConfigError(f'`report.name` must be a function that takes a FinishedRun, got: {report["name"]}')
    check_arguments('report', function, report, own_keys=OF_THE_REPORT, num_given=1)
    is_alone = config.model.lora is not None and config.model.pretrained is None
    if report.get('export') and (config.is_sharded or is_alone):
        why = 'FSDP, whose weights are on no rank whole' if config.is_sharded else '`model.lora` on a base of its own'
        raise ConfigError(
            f'`report.export` must be false with {why}, got: true. Export the checkpoint afterwards: '
            f'python -m composer_tokacc.export CHECKPOINT FOLDER{"" if config.is_sharded else " merge=true"}'
        )


def check_machine(config: TrainConfig) -> None:
    """Refuses what this machine cannot do, and folders that it cannot write, before Composer finds out in its midst."""
    trainer = config.trainer
    device = trainer.get('device')
    with must('`trainer.device` must be a device of this machine', device, Exception):  # MPS has errors of its own
        on_gpu = isinstance(get_device(device), DeviceGPU)
    if not on_gpu and trainer.get('precision', Precision.FP32) != Precision.FP32:
        raise ConfigError(f'`trainer.precision` must be fp32 on a CPU, got: {trainer["precision"]}')
    if config.is_sharded and not on_gpu and os.environ.get('FSDP_VERSION') != '2':
        raise ConfigError(
            '`trainer.parallelism_config` must be without `fsdp` where there is no GPU, got: one. Leave it out, or set '
            'FSDP_VERSION=2 in the environment, which runs on CPUs'
        )
    folders = {'report.folder': config.report['folder'], 'trainer.save_folder': trainer.get('save_folder')}
    folders['loader.lengths_folder'] = config.loader.lengths_folder
    for key, folder in folders.items():
        if folder is not None and ('://' not in folder or key != 'trainer.save_folder'):
            local_folder(f'`{key}`', folder)
            with must(f'`{key}` must be a folder that can be made', folder, OSError):
                known = folder.replace('{run_name}', str(trainer.get('run_name'))).partition('{')[0]
                Path(known).mkdir(parents=True, exist_ok=True)
