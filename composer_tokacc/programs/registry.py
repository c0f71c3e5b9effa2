# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds the classes that a YAML file names.

``gradient_clipping`` is Composer's ``GradientClipping``, ``lr_monitor`` its ``LRMonitor``, ``adamw`` torch's ``AdamW``.
A dotted name such as ``my_package.callbacks.MyCallback`` is imported.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal

import composer.algorithms
import composer.callbacks
import composer.loggers
import composer.optim
import torch
from composer.core import Algorithm, Callback, Precision
from composer.distributed import DDPSyncStrategy
from composer.distributed.mosaic_parallelism import SHARDING_MAP
from composer.loggers import LoggerDestination
from composer.optim import ComposerScheduler
from pydantic import AfterValidator, BeforeValidator, Field

from composer_tokacc.programs.errors import ConfigError, building, unknown_name
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.process import without_warnings
from composer_tokacc.programs.schema import (
    Count,
    Duration,
    Fraction,
    Hint,
    Positive,
    TrainConfig,
    check_arguments,
    check_value,
    is_longer_than_nothing,
    without,
)


@dataclass(frozen=True)
class Kind:
    """A kind of part that a config may name."""

    base: type
    modules: tuple[ModuleType, ...]
    """Where its classes are looked up. The first module wins."""
    suffix: str = ''
    """A word of the class name that the YAML name may leave out: ``tensorboard`` for ``TensorboardLogger``."""


KINDS = {
    'algorithms': Kind(Algorithm, (composer.algorithms,)),
    'callbacks': Kind(Callback, (composer.callbacks,)),
    'loggers': Kind(LoggerDestination, (composer.loggers,), suffix='logger'),
    'optimizer': Kind(torch.optim.Optimizer, (composer.optim, torch.optim)),
    'scheduler': Kind(ComposerScheduler, (composer.optim,), suffix='scheduler'),
}
# Our own classes under the names of their llm-foundry entry points, and names that llm-foundry's users know.
ALIASES = {
    ('algorithms', 'token_accumulation'): 'composer_tokacc.TokenAccumulation',
    ('callbacks', 'token_monitor'): 'composer_tokacc.TokenMonitor',
    ('scheduler', 'cosine_with_warmup'): 'CosineAnnealingWithWarmupScheduler',
    ('scheduler', 'linear_decay_with_warmup'): 'LinearWithWarmupScheduler',
}
UNSUITED = (
    torch.optim.SparseAdam,  # needs sparse gradients
    composer.algorithms.AugMix,  # this and the following: batches of images and classes, or of tensors only
    composer.algorithms.ColOut,
    composer.algorithms.CutMix,
    composer.algorithms.CutOut,
    composer.algorithms.MixUp,
    composer.algorithms.NoOpModel,
    composer.algorithms.ProgressiveResizing,
    composer.algorithms.RandAugment,
    composer.algorithms.SeqLengthWarmup,
    composer.callbacks.ImageVisualizer,
    composer.callbacks.LoadCheckpoint,  # unpickles a file, so a config could run code
)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _choice(*names: str) -> Hint:
    return Literal[names]  # type: ignore[valid-type]


def _upper_choice(*names: str) -> Hint:
    """A choice that Composer itself puts in capitals."""
    return Annotated[_choice(*names), BeforeValidator(_upper)]


_WEIGHT = Annotated[float, Field(ge=0)]
_ALL_OR_SOME = Literal[-1] | Count
# Values that a host would take without a word, or refuse only after the model is loaded; by argument, of any class.
HOST_HINTS: dict[str, Hint] = {
    'algorithm_passes': NoneType,  # this and the profiler are objects, which no file holds
    'alpha': _WEIGHT,
    'alpha_f': _WEIGHT,
    'alpha_i': _WEIGHT,
    'clipping_threshold': Positive,
    'clipping_type': _choice('norm', 'value', 'adaptive'),
    'console_log_interval': Duration,
    'data_parallel_replicate_degree': _ALL_OR_SOME | None,
    'data_parallel_shard_degree': _ALL_OR_SOME | None,
    'ddp_sync_strategy': _upper_choice(*DDPSyncStrategy.__members__) | None,
    'dist_timeout': Positive,
    'eval_interval': Duration,
    'eval_subset_num_batches': _ALL_OR_SOME,
    'load_object_store': NoneType,
    'lr': _WEIGHT,
    'max_duration': Duration,
    'mixed_precision': _upper_choice('DEFAULT', 'PURE', 'FULL'),
    'precision': _choice(*(precision.value for precision in Precision)) | None,
    'profiler': NoneType,
    'python_log_level': _upper_choice('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL') | None,
    'save_interval': Duration,
    'save_num_checkpoints_to_keep': Annotated[int, Field(ge=-1)],
    'scale_schedule_ratio': Positive,
    'sharding_strategy': _upper_choice(*SHARDING_MAP),
    'smoothing': Fraction,
    'state_dict_type': _choice('full', 'sharded'),
    't_max': Annotated[str, AfterValidator(is_longer_than_nothing)],
    'train_subset_num_batches': _ALL_OR_SOME,
    'weight_decay': _WEIGHT,
    'window_size': Count,
}


@dataclass(frozen=True)
class NamedPart:
    """One algorithm, callback or logger of a config."""

    kind: str
    path: str
    """Its key, such as ``callbacks.lr_monitor``."""
    name: str
    arguments: Section | None

    def build(self) -> Any:
        """Builds the object. Composer's own ones name their key if they fail later, in an event."""
        part = build_part(self.kind, self.path, self.name, self.arguments)
        if type(part).__module__.startswith(('composer.', 'composer_tokacc.')):
            _name_in_events(part, self.path)
        return part


def named_parts(config: TrainConfig, kind: str) -> Iterator[NamedPart]:
    """Gives the algorithms, callbacks or loggers that a config names, in order."""
    path, section = kind, getattr(config, kind, None)
    if kind == 'loggers':
        path, section = 'trainer.loggers', config.trainer.get('loggers')
    for name, arguments in (check_value(path, section, dict | None) or {}).items():
        yield NamedPart(kind, f'{path}.{name}', name, arguments)


def build_all(config: TrainConfig, kind: str) -> list[Any]:
    """Builds the algorithms, callbacks or loggers that a config names, in order."""
    return [part.build() for part in named_parts(config, kind)]


def build_section(kind: str, section: Section, *positional: Any) -> Any:
    """Builds the optimizer or the scheduler from its section, a ``name`` and arguments."""
    if 'name' not in section:
        raise ConfigError(f'{kind}.name', 'must be given')
    return build_part(kind, kind, section['name'], without(section, 'name', 'parts'), *positional)


def build_part(
    kind: str,
    path: str,
    name: str,
    arguments: Section | None,
    *positional: Any,
) -> Any:
    """Builds one object. ``path`` is its key in the config; ``positional`` comes from the program itself."""
    cls = class_by_name(kind, name)
    checked = check_part(kind, path, name, arguments, num_positional=len(positional))
    with without_warnings(), building(path):  # a warning would come without its key
        return cls(*positional, **checked)


def check_part(
    kind: str,
    path: str,
    name: str,
    arguments: Section | None,
    *,
    num_positional: int = 0,
) -> dict[str, Any]:
    """Returns the arguments for a class, which must be there and take them."""
    cls = class_by_name(kind, name)
    # A class without a constructor inherits the one of its base. It takes any argument and drops it.
    has_constructor = cls.__init__ is not KINDS[kind].base.__init__
    signature = cls if has_constructor else object
    return check_arguments(path, signature, arguments, num_positional=num_positional, hints=HOST_HINTS)


def _name_in_events(part: Algorithm | Callback, path: str) -> None:
    """Turns any error of a part in an event into one line with its key."""
    for method_name in ('run_event', 'match', 'apply'):
        method = getattr(part, method_name, None)
        if method is not None:
            setattr(part, method_name, _named(method, path))


def _named(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with building(path):
            return method(*arguments, **keywords)

    return call


def import_by_name(path: str, name: str) -> Any:
    """Returns the class or function that a dotted name stands for; ``path`` is the key that has it."""
    module_name, _, attribute = name.rpartition('.')
    try:
        imported = getattr(importlib.import_module(module_name), attribute)
        inspect.signature(imported)  # a module, for example, has none
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(path, f'must name something that can be imported, got: {name} ({error})') from error
    return imported


def class_by_name(kind: str, name: str) -> Any:
    """Returns the class that ``name`` stands for in a section. The error names the nearest that exists."""
    name = str(name)
    target = ALIASES.get((kind, name), name)
    base = KINDS[kind].base
    if '.' in target:
        cls = import_by_name(kind, target)
        # Checked before it is called: the name of a function such as os.system would run.
        is_part = inspect.isclass(cls) and (base is ComposerScheduler or issubclass(cls, base))
        if not is_part:
            raise ConfigError(f'{kind}.{name}', f'must be a class derived from {base.__name__}, got: {cls!r}')
        return cls
    classes = _classes_of(kind)
    suffix = KINDS[kind].suffix
    target_letters = target.replace('_', '').lower().removesuffix(suffix)
    for snake_name, cls in classes.items():
        if snake_name.replace('_', '') == target_letters:
            return cls
    aliases = [alias for section, alias in ALIASES if section == kind]
    raise ConfigError(kind, unknown_name('class', name, [*classes, *aliases]))


def _classes_of(kind: str) -> dict[str, type]:
    """Returns the classes of a kind by their names in a YAML file."""
    base, suffix = KINDS[kind].base, KINDS[kind].suffix
    classes = {}
    # A later entry replaces an earlier one, so the first module comes last.
    for module in reversed(KINDS[kind].modules):
        for cls in vars(module).values():
            if not inspect.isclass(cls) or not issubclass(cls, base):
                continue
            if cls is base or cls in UNSUITED or inspect.isabstract(cls):
                continue
            # LRMonitor -> lr_monitor, DecoupledAdamW -> decoupled_adamw
            snake_name = re.sub(r'(?<=[A-Za-z])(?=[A-Z][a-z])', '_', cls.__name__).lower()
            classes[snake_name.removesuffix(suffix).removesuffix('_')] = cls
    return classes
