# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Classes by the names that a YAML file uses, and what the arguments beside a name may be.

``gradient_clipping`` is Composer's ``GradientClipping``, ``lr_monitor`` its ``LRMonitor``, ``adamw`` torch's ``AdamW``;
a dotted name such as ``my_package.callbacks.MyCallback`` is imported.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import NoneType
from typing import Annotated, Any, Literal

import composer.algorithms
import composer.callbacks
import composer.loggers
import composer.optim
import torch
from composer.core import Algorithm, Callback, Precision
from composer.distributed import DDPSyncStrategy
from composer.distributed.mosaic_parallelism import SHARDING_MAP

from composer_tokacc.programs.errors import ConfigError, must, unknown_name
from composer_tokacc.programs.process import without_warnings
from composer_tokacc.programs.schema import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, Range, check_arguments

# Base class, a word that a YAML name may leave out (`tensorboard` for TensorboardLogger), and where the classes are.
_SECTIONS: dict[str, tuple[type, str, tuple[Any, ...]]] = {
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
# Packages that classes import when they are made.
_NEEDED = {
    'CometMLLogger': 'comet_ml', 'MLFlowLogger': 'mlflow', 'NeptuneLogger': 'neptune', 'SlackLogger': 'slack_sdk',
    'TensorboardLogger': 'tensorboard', 'WandBLogger': 'wandb',
}  # fmt: skip
# What asks for sparse gradients, or for batches of images and classes, or of tensors alone.
_UNSUITED = (
    torch.optim.SparseAdam, composer.algorithms.AugMix, composer.algorithms.ColOut, composer.algorithms.CutMix,
    composer.algorithms.CutOut, composer.algorithms.MixUp, composer.algorithms.NoOpModel,
    composer.algorithms.ProgressiveResizing, composer.algorithms.RandAugment, composer.algorithms.SeqLengthWarmup,
    composer.callbacks.ImageVisualizer,
    composer.callbacks.LoadCheckpoint,  # unpickles what it loads
)  # fmt: skip
_ALL_OR_SOME = Literal[-1] | Annotated[int, AT_LEAST_1]
# What a host's annotations do not say, and the host says only in the first step or never: by argument, of any class.
_HINTS: dict[str, Any] = {
    **dict.fromkeys(('alpha', 'alpha_i', 'alpha_f', 'lr', 'weight_decay'), Annotated[float, AT_LEAST_0]),
    **dict.fromkeys(('gamma', 'power', 'rho', 'scale_schedule_ratio'), Annotated[float, POSITIVE]),
    'clipping_threshold': Annotated[float, POSITIVE],
    'clipping_type': Literal['norm', 'value', 'adaptive'],
    **dict.fromkeys(('data_parallel_replicate_degree', 'data_parallel_shard_degree'), _ALL_OR_SOME | None),
    **dict.fromkeys(('train_subset_num_batches', 'eval_subset_num_batches'), _ALL_OR_SOME),
    'ddp_sync_strategy': Literal[tuple(DDPSyncStrategy.__members__)] | None,  # type: ignore[valid-type]
    'dist_timeout': Annotated[float, POSITIVE],
    **dict.fromkeys(('algorithm_passes', 'load_object_store', 'profiler'), NoneType),  # objects, which no file holds
    'mixed_precision': Literal['DEFAULT', 'PURE', 'FULL'],
    'mode': Literal['default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'] | None,  # of compile
    'momentum': Annotated[float, FRACTION],
    'precision': Literal[tuple(one.value for one in Precision)] | None,  # type: ignore[valid-type]
    'save_num_checkpoints_to_keep': Annotated[int, Range(least=-1)],
    'python_log_level': Literal['DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL'] | None,
    'sharding_strategy': Literal[tuple(SHARDING_MAP)],  # type: ignore[valid-type]
    'smoothing': Annotated[float, FRACTION],
    'state_dict_type': Literal['full', 'sharded'],
    'window_size': Annotated[int, AT_LEAST_1],
}


def check_part(kind: str, path: str, name: str, arguments: Any, *given: Any) -> None:
    """Refuses a class that is not there, and arguments that it does not take.

    The object is made once and dropped, as only the class itself knows what its values may be; not a logger, some of
    which connect to somewhere.
    """
    cls = class_by_name(kind, name)
    # The host's own constructor, which a class without one has, takes anything and drops it.
    target = object if cls.__init__ is _SECTIONS[kind][0].__init__ else cls
    check_arguments(path, target, arguments, num_given=len(given), hints=_HINTS)
    needed = _NEEDED.get(cls.__name__)
    if needed is not None and find_spec(needed) is None:
        raise ConfigError(f'`{path}` needs the package {needed}, got: none. pip install {needed}')
    made = None if kind == 'loggers' else _make(path, cls, arguments or {}, *given)
    base = object if kind in ('loggers', 'scheduler') else _SECTIONS[kind][0]  # any function may be a scheduler
    if not isinstance(made, base):
        raise ConfigError(f'`{path}` must be a {base.__name__}, got: a {type(made).__name__}')


def check_host_arguments(path: str, target: Any, arguments: Any, *, num_given: int = 0) -> None:
    """Refuses arguments that a function or class of a host does not take."""
    check_arguments(path, target, arguments, num_given=num_given, hints=_HINTS)


def named_parts(config: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Gives kind, path, name and arguments of each algorithm, callback and logger that a config names."""
    sections = {'algorithms': config.algorithms, 'callbacks': config.callbacks}
    for path, parts in {**sections, 'trainer.loggers': config.trainer.get('loggers') or {}}.items():
        yield from ((path.rpartition('.')[2], f'{path}.{name}', name, given) for name, given in parts.items())


def build_all(kind: str, parts: Mapping[str, Any] | None) -> list[Any]:
    """Builds each part of a checked section that maps names to arguments, in order."""
    return [_make(f'{kind}.{name}', class_by_name(kind, name), given or {}) for name, given in (parts or {}).items()]


def build_section(kind: str, section: Mapping[str, Any], *positional: Any) -> Any:
    """Builds what a checked section with a ``name`` and arguments stands for."""
    return class_by_name(kind, section['name'])(*positional, **without(section, 'name', 'parts'))


def _make(path: str, cls: Any, arguments: Mapping[str, Any], *given: Any) -> Any:
    # Whatever a class raises for its arguments, or for a package that it lacks.
    with without_warnings(), must(f'`{path}` must be what {cls.__name__} takes', dict(arguments), Exception):
        return cls(*given, **arguments)


def import_by_name(path: str, name: str) -> Any:
    """Returns what a dotted name such as ``my_package.callbacks.MyCallback`` stands for; ``path`` is where it stood."""
    module_name, _, attribute = name.rpartition('.')
    with must(f'`{path}` name must be importable', name, ImportError, AttributeError, ValueError, TypeError):
        found = getattr(importlib.import_module(module_name), attribute)
        inspect.signature(found)  # of what is called by its arguments, which a module is not
        return found


def class_by_name(kind: str, name: str) -> Any:
    """Returns the class that ``name`` stands for in a section; a ConfigError names the nearest that exists."""
    target = _ALIASES.get((kind, str(name)), str(name))
    if '.' in target:
        return import_by_name(kind, target)
    base, suffix, modules = _SECTIONS[kind]
    found = {}
    for cls in (value for module in reversed(modules) for value in vars(module).values() if inspect.isclass(value)):
        if issubclass(cls, base) and cls not in (base, *_UNSUITED) and not inspect.isabstract(cls):
            # LRMonitor -> lr_monitor, DecoupledAdamW -> decoupled_adamw
            snake = re.sub(r'(?<=[A-Za-z])(?=[A-Z][a-z])', '_', cls.__name__).lower()
            found[snake.removesuffix(suffix).removesuffix('_')] = cls
    wanted = target.replace('_', '').lower().removesuffix(suffix)
    for snake, cls in found.items():
        if snake.replace('_', '') == wanted:
            return cls
    aliases = [alias for section, alias in _ALIASES if section == kind]
    raise ConfigError(unknown_name(f'`{kind}` name', str(name), [*found, *aliases]))


def without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Returns a section without some of its keys: the arguments of what it stands for."""
    return {key: value for key, value in section.items() if key not in keys}
