# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Classes by the names that a YAML file uses, and whether they take the arguments beside the name.

``gradient_clipping`` is Composer's ``GradientClipping``, ``lr_monitor`` its ``LRMonitor``, ``adamw`` torch's ``AdamW``;
a dotted name such as ``my_package.callbacks.MyCallback`` is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import re
import resource
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import composer.algorithms
import composer.callbacks
import composer.loggers
import composer.optim
import torch
from composer import Trainer
from composer.core import Algorithm, Callback, Precision, Time, TimeUnit, ensure_time
from composer.devices import DeviceGPU
from composer.distributed import DDPSyncStrategy
from composer.distributed.mosaic_parallelism import SHARDING_MAP
from composer.utils import get_device
from composer.utils.parallelism import FSDP2Config, FSDPConfig, ParallelismConfig

from composer_tokacc.programs.schema import ConfigError, TrainConfig, unknown_name

__all__ = [
    'build_all',
    'build_section',
    'check_arguments',
    'check_host',
    'check_mesh',
    'check_names',
    'check_sections',
    'import_by_name',
    'without',
]

# Base class, a word that a YAML name may leave out (`tensorboard` for TensorboardLogger), and where the classes are.
_KINDS: dict[str, tuple[type, str, tuple[Any, ...]]] = {
    'algorithms': (Algorithm, '', (composer.algorithms,)),
    'callbacks': (Callback, '', (composer.callbacks,)),
    'loggers': (composer.loggers.LoggerDestination, 'logger', (composer.loggers,)),
    'optimizer': (torch.optim.Optimizer, '', (composer.optim, torch.optim)),
    'scheduler': (composer.optim.ComposerScheduler, 'scheduler', (composer.optim,)),
}
# Our own classes, as their llm-foundry entry points are called, and names that llm-foundry's users know.
_ALIASES = {
    ('algorithms', 'token_accumulation'): 'composer_tokacc.TokenAccumulation',
    ('callbacks', 'token_monitor'): 'composer_tokacc.TokenMonitor',
    ('scheduler', 'cosine_with_warmup'): 'CosineAnnealingWithWarmupScheduler',
    ('scheduler', 'linear_decay_with_warmup'): 'LinearWithWarmupScheduler',
}
# What Composer's loggers import only when they are made, which is after the data has been read and the model loaded.
_PACKAGES = {
    'CometMLLogger': 'comet_ml',
    'MLFlowLogger': 'mlflow',
    'NeptuneLogger': 'neptune',
    'SlackLogger': 'slack_sdk',
    'TensorboardLogger': 'tensorboard',
    'WandBLogger': 'wandb',
}
# Files that a rank has open at least, and more of them for each loader process: what waits in its queue.
FILES, FILES_OF_WORKER = 48, 32
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
# Texts that a host looks at in the first step, or once everything is built: by class or function, and argument.
_CHOICES = {
    ('GradientClipping', 'clipping_type'): ('norm', 'value', 'adaptive'),
    ('Trainer', 'ddp_sync_strategy'): tuple(DDPSyncStrategy.__members__),
    ('FSDPConfig', 'sharding_strategy'): tuple(SHARDING_MAP),
    ('FSDPConfig', 'state_dict_type'): ('full', 'sharded'),
    ('FSDPConfig', 'mixed_precision'): ('DEFAULT', 'PURE', 'FULL'),
}
_PLAIN = {bool: (bool,), int: (int,), float: (float, int), str: (str,), NoneType: (NoneType,)}
"""What a value may be, by an annotation's plain types."""


def build_all(kind: str, parts: Mapping[str, Any] | None) -> list[Any]:
    """Builds each part of a checked section that maps names to arguments, in order."""
    return [_class_by_name(kind, name)(**(arguments or {})) for name, arguments in (parts or {}).items()]


def build_section(kind: str, section: Mapping[str, Any], *positional: Any) -> Any:
    """Builds what a checked section with a ``name`` and arguments stands for."""
    return _class_by_name(kind, section['name'])(*positional, **without(section, 'name'))


def check_sections(config: TrainConfig) -> None:
    """Holds the sections that name classes, the Trainer's and the report's to what they are meant for.

    Raises:
        ConfigError: For an unknown name or argument, a missing one, or one that means nothing beside another.
    """
    loggers = config.trainer.get('loggers') or {}
    if not isinstance(loggers, dict):
        raise ConfigError(f'`trainer.loggers` must be a mapping of names to arguments, got: {loggers}')
    for kind, parts in (('algorithms', config.algorithms), ('callbacks', config.callbacks), ('loggers', loggers)):
        for name, arguments in parts.items():
            cls = _class_by_name(kind, name)
            check_arguments(f'{kind}.{name}', cls, arguments)
            package = _PACKAGES.get(cls.__name__)
            if package is not None and find_spec(package) is None:
                extra = package.removesuffix('_sdk')
                raise ConfigError(
                    f'`trainer.loggers.{name}` needs the package {package}, got: none. '
                    f"pip install 'mosaicml[{extra}]' for a version that Composer works with"
                )
            if kind != 'loggers':  # some of which connect to somewhere when they are made
                _try(f'{kind}.{name}', cls, arguments or {})
    weight = torch.nn.Parameter(torch.zeros(1))
    for kind, section, given in (('optimizer', config.optimizer, [[weight]]), ('scheduler', config.scheduler, [])):
        if 'name' not in section:
            raise ConfigError(f'`{kind}.name` must be given, got: {section}')
        target, arguments = _class_by_name(kind, section['name']), without(section, 'name')
        check_arguments(kind, target, arguments, num_given=len(given))
        _try(kind, target, arguments, *given)
    if 'token_accumulation' in config.algorithms and config.trainer.get('accumulate_train_batch_on_tokens'):
        raise ConfigError(
            '`trainer.accumulate_train_batch_on_tokens` must be false with `algorithms.token_accumulation`, got: true. '
            'Both weigh by tokens, and together the gradient is wrong; remove one'
        )
    clipping = config.algorithms.get('gradient_clipping') or {}
    if clipping.get('clipping_type') == 'adaptive' and config.is_sharded and os.environ.get('FSDP_VERSION') != '2':
        raise ConfigError(
            '`algorithms.gradient_clipping.clipping_type` must be norm or value with FSDP, got: adaptive. Or use DDP'
        )
    _check_trainer(config.trainer)
    _check_report(config.report)
    if config.report.get('export') and config.is_sharded:
        raise ConfigError(
            '`report.export` must be false with FSDP, whose weights are on no rank whole, got: true. Export the '
            'checkpoint afterwards: python -m composer_tokacc.export CHECKPOINT FOLDER'
        )
    if config.report.get('export') and config.model.lora is not None and config.model.pretrained is None:
        raise ConfigError(
            '`report.export` must be false with `model.lora` on a base that is nowhere else, got: true. Export the '
            'checkpoint afterwards: python -m composer_tokacc.export CHECKPOINT FOLDER merge=true'
        )


def import_by_name(path: str, name: str) -> Any:
    """What a dotted name such as ``my_package.callbacks.MyCallback`` stands for; ``path`` is where it was given."""
    module_name, _, attribute = name.rpartition('.')
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'`{path}` name must be importable, got: {name} ({error})') from error


def check_arguments(
    path: str, target: Any, arguments: Mapping[str, Any] | None, *, num_given: int = 0, own_keys: Sequence[str] = ()
) -> None:
    """Refuses what is unknown or missing among the arguments that the section ``path`` has for ``target``.

    Args:
        path: The section, for the message.
        target: Class or function.
        arguments: Keyword arguments; None means none.
        num_given: How many leading parameters the program supplies itself.
        own_keys: Keys of the section that are not meant for ``target``.
    """
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ConfigError(f'`{path}` must be a mapping of arguments, got: {arguments!r}. Write {{}} for none')
    parameters = list(inspect.signature(target).parameters.values())[num_given:]
    names = [*own_keys] + [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        check_names(path, arguments or {}, names)
    for p in parameters:
        if p.default is p.empty and p.name in names and p.name not in (arguments or {}):
            raise ConfigError(f'`{path}.{p.name}` must be given: {target.__name__} has no default for it')
    hints = _hints(target)
    for name, value in (arguments or {}).items():
        if name in hints:
            _check_type(f'{path}.{name}', value, hints[name])
        choices = _CHOICES.get((target.__name__, name))
        # Those in capitals are put into capitals by the host.
        if choices is not None and isinstance(value, str) and not {value, value.upper()} & set(choices):
            raise ConfigError(unknown_name(f'`{path}.{name}`', value, choices))


def _hints(target: Any) -> dict[str, Any]:
    """Annotated types of the arguments, by name; none where an annotation names what cannot be imported."""
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}


def _check_type(path: str, value: Any, hint: Any) -> None:
    """Holds a value to an annotation of plain types or times: hosts take the text ``no`` for true."""
    options = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    options = {option for option in options if get_origin(option) is not os.PathLike}  # which no YAML file holds
    lists = {option for option in options if get_origin(option) is Sequence}
    if Time in options and isinstance(value, str):
        _check_time(path, value, least=0)
    elif lists and isinstance(value, list):
        for each in value:
            _check_type(path, each, get_args(min(lists, key=str))[0])
    elif options - lists <= _PLAIN.keys():
        allowed = {kind for option in options - lists for kind in _PLAIN[option]}
        if type(value) not in allowed:
            names = [option.__name__.replace('NoneType', 'null') for option in options - lists]
            expected = ' or '.join(sorted([*names, *['list'] * bool(lists)]))
            raise ConfigError(f'`{path}` must be of type {expected}, got: {value}')


def check_host(config: TrainConfig) -> None:
    """Refuses what this machine cannot do, and folders that it cannot write, which Composer says in its midst.

    Raises:
        ConfigError: As said.
    """
    trainer = config.trainer
    try:
        on_gpu = isinstance(get_device(trainer.get('device')), DeviceGPU)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f'`trainer.device` must be a device of this machine, got: {trainer["device"]} ({error})'
        ) from error
    precision, known = trainer.get('precision', 'fp32'), [one.value for one in Precision]
    if precision not in known:
        raise ConfigError(unknown_name('`trainer.precision`', str(precision), known))
    if not on_gpu and precision != 'fp32':
        raise ConfigError(f'`trainer.precision` must be fp32 on a CPU, got: {precision}')
    if config.is_sharded and not on_gpu and os.environ.get('FSDP_VERSION') != '2':
        raise ConfigError(
            '`trainer.parallelism_config` must be without `fsdp` where there is no GPU, got: one. Leave it out, or set '
            'FSDP_VERSION=2 in the environment, which runs on CPUs'
        )
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + FILES_OF_WORKER * config.loader.num_workers
    if 0 <= limit < needed:
        raise ConfigError(
            f'the limit of open files (`ulimit -n`) must be at least {needed} with {config.loader.num_workers} '
            f'`loader.num_workers`, got: {limit}. Raise it, for example to 65536'
        )
    run_name = str(trainer.get('run_name'))
    for key, folder in (
        ('report.folder', config.report['folder']),
        ('trainer.save_folder', trainer.get('save_folder')),
    ):
        if folder is None or '://' in folder:
            continue
        try:
            Path(folder.replace('{run_name}', run_name).partition('{')[0]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f'`{key}` must be a folder that can be made, got: {folder} ({error.strerror})') from error


def _try(path: str, target: Any, arguments: Mapping[str, Any], *given: Any) -> None:
    """Makes the object once and drops it: what its class says against the values comes before anything is built."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            target(*given, **arguments)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f'`{path}` must be what {target.__name__} takes, got: {dict(arguments)} ({error})') from error


def check_names(path: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Refuses the first of ``arguments`` that is not ``known``; ``path`` is the section that they stand in."""
    for key in arguments:
        if key not in known:
            raise ConfigError(unknown_name(f'`{path}` key', key, known))


def _check_trainer(trainer: dict[str, Any]) -> None:
    for name, own in _FILLED_ELSEWHERE.items():
        if name in trainer:
            raise ConfigError(f'`trainer.{name}` must be set in its own section, got: {trainer[name]}. Use `{own}`')
    # `model` is the program's own; everything else has a default.
    check_arguments('trainer', Trainer, {**trainer, 'model': None})
    if 'max_duration' not in trainer:
        raise ConfigError('`trainer.max_duration` must be given, got: nothing. For example 2ep or 500ba')
    for name in ('max_duration', 'eval_interval', 'save_interval'):
        if name in trainer:
            _check_time(f'trainer.{name}', trainer[name])
    if trainer.get('autoresume') and not (trainer.get('save_folder') and trainer.get('run_name')):
        raise ConfigError(
            '`trainer.autoresume` must come with `trainer.save_folder` and `trainer.run_name`, which say '
            'where the checkpoints are, got: neither or one of them'
        )
    load_path = trainer.get('load_path')
    if load_path and '://' not in load_path and '{' not in load_path and not Path(load_path).exists():
        raise ConfigError(f'`trainer.load_path` must be an existing checkpoint, got: {load_path}')
    _check_parallelism(trainer.get('parallelism_config') or {})


def _check_parallelism(parallelism: Mapping[str, Any]) -> None:
    path = 'trainer.parallelism_config'
    check_arguments(path, ParallelismConfig, parallelism)
    fsdp = parallelism.get('fsdp') or {}
    # The Trainer reads FSDP2's settings (FSDP_VERSION=2) from the same mapping; the classes themselves take any name.
    known = {known.name for config in (FSDPConfig, FSDP2Config) for known in dataclasses.fields(config)}
    check_names(f'{path}.fsdp', fsdp, known)
    check_arguments(f'{path}.fsdp', FSDPConfig, fsdp)


def check_mesh(fsdp: Mapping[str, Any], num_ranks: int) -> None:
    """Refuses groups of ranks that the ranks do not make, or that FSDP would not make, silently.

    Raises:
        ConfigError: As said.
    """
    path = '`trainer.parallelism_config.fsdp'
    replicas, shards = fsdp.get('data_parallel_replicate_degree'), fsdp.get('data_parallel_shard_degree', -1)
    for name, degree in (('replicate', replicas), ('shard', shards)):
        if degree is not None and (
            isinstance(degree, bool) or not isinstance(degree, int) or degree < -1 or not degree
        ):
            raise ConfigError(
                f'{path}.data_parallel_{name}_degree` must be positive, or -1 for the rest, got: {degree}'
            )
    if os.environ.get('FSDP_VERSION') == '2':
        if replicas is not None or shards != -1:
            raise ConfigError(
                f'{path}` must be without `data_parallel_replicate_degree` and `data_parallel_shard_degree` with '
                f'FSDP_VERSION=2, which shards over all ranks whatever they say, got: {replicas} and {shards}'
            )
        return
    if replicas is None and str(fsdp.get('sharding_strategy')).upper() in ('HYBRID_SHARD', '_HYBRID_SHARD_ZERO2'):
        raise ConfigError(
            f'{path}.data_parallel_replicate_degree` must be given with {fsdp["sharding_strategy"]}, which shards over '
            'all ranks otherwise, got: nothing. Set it to the number of nodes'
        )
    degrees = [degree for degree in (replicas, shards) if degree is not None]
    product = math.prod(degree for degree in degrees if degree > 0)
    if degrees.count(-1) > 1 or num_ranks % product or (-1 not in degrees and product != num_ranks):
        raise ConfigError(
            f'{path}.data_parallel_replicate_degree` times `data_parallel_shard_degree` must be the number of ranks, '
            f'got: {replicas} and {shards} on {num_ranks} ranks. Leave the latter out, or set it to -1, for the rest'
        )


def _check_time(path: str, value: Any, *, least: int = 1) -> None:
    try:
        found = ensure_time(value, TimeUnit.EPOCH).value
    except (ValueError, TypeError) as error:
        raise ConfigError(f'`{path}` must be a time such as 2ep or 500ba, got: {value}') from error
    if found < least and not 0 < found < 1:
        raise ConfigError(f'`{path}` must be {"longer than nothing" if least else "no negative time"}, got: {value}')


def _check_report(report: dict[str, Any]) -> None:
    if not isinstance(report.get('folder'), str):
        raise ConfigError(f'`report.folder` must be a path, got: {report.get("folder")}')
    if not isinstance(report.get('export'), bool | None):
        raise ConfigError(f'`report.export` must be true or false, got: {report["export"]}')
    if 'name' not in report:
        return check_names('report', report, ('folder', 'name', 'export'))
    function = import_by_name('report', str(report['name']))
    return check_arguments('report', function, without(report, 'folder', 'name', 'export'), num_given=1)


def _class_by_name(kind: str, name: str) -> Any:
    """The class that ``name`` stands for in the YAML section ``kind``; a ConfigError names the nearest that exists."""
    target = _ALIASES.get((kind, name), name)
    if '.' in target:
        return import_by_name(kind, target)
    base, suffix, modules = _KINDS[kind]
    found = {}
    for value in (value for module in reversed(modules) for value in vars(module).values()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not inspect.isabstract(value):
            # LRMonitor -> lr_monitor, DecoupledAdamW -> decoupled_adamw
            snake = re.sub(r'(?<=[A-Za-z])(?=[A-Z][a-z])', '_', value.__name__).lower()
            found[snake.removesuffix(suffix).removesuffix('_')] = value
    wanted = target.replace('_', '').lower().removesuffix(suffix)
    for snake, cls in found.items():
        if snake.replace('_', '') == wanted:
            return cls
    raise ConfigError(
        unknown_name(f'`{kind}` name', name, [*found, *(alias for own, alias in _ALIASES if own == kind)])
    )


def without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A section without some of its keys: the arguments of what it stands for."""
    return {key: value for key, value in section.items() if key not in keys}
