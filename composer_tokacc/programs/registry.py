# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's and torch's classes by the names that a YAML file uses.

``gradient_clipping`` is Composer's ``GradientClipping``, ``lr_monitor`` its ``LRMonitor``, ``adamw`` torch's ``AdamW``;
a dotted name such as ``my_package.callbacks.MyCallback`` is imported.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import composer.algorithms
import composer.callbacks
import composer.loggers
import composer.optim
import torch
from composer.core import Algorithm, Callback

from composer_tokacc.programs.errors import ConfigError, unknown_name

__all__ = ['build_by_name', 'check_arguments', 'class_by_name', 'import_by_name']

_MODULES: dict[str, tuple[Any, ...]] = {
    'algorithms': (composer.algorithms,),
    'callbacks': (composer.callbacks,),
    'loggers': (composer.loggers,),
    'optimizer': (composer.optim, torch.optim),
    'scheduler': (composer.optim,),
}
_BASES: dict[str, type] = {
    'algorithms': Algorithm,
    'callbacks': Callback,
    'loggers': composer.loggers.LoggerDestination,
    'optimizer': torch.optim.Optimizer,
    'scheduler': composer.optim.ComposerScheduler,
}
# Words that a YAML name may leave out: `tensorboard` for TensorboardLogger, `linear_with_warmup` for the scheduler.
_SUFFIXES = {'loggers': 'logger', 'scheduler': 'scheduler'}
# Our own classes, as their llm-foundry entry points are called, and names that llm-foundry's users know.
_ALIASES = {
    ('algorithms', 'token_accumulation'): 'composer_tokacc.TokenAccumulation',
    ('callbacks', 'token_monitor'): 'composer_tokacc.TokenMonitor',
    ('scheduler', 'cosine_with_warmup'): 'CosineAnnealingWithWarmupScheduler',
    ('scheduler', 'linear_decay_with_warmup'): 'LinearWithWarmupScheduler',
}


def class_by_name(kind: str, name: str) -> type:
    """Finds the class that ``name`` stands for in the YAML section ``kind``.

    Raises:
        ConfigError: when there is none; names the nearest that exists.
    """
    target = _ALIASES.get((kind, name), name)
    if '.' in target:
        return import_by_name(kind, target)
    classes = _classes(kind)
    wanted = target.replace('_', '').lower()
    for cls_name, cls in classes.items():
        if wanted in (cls_name.lower(), cls_name.lower().removesuffix(_SUFFIXES.get(kind, ' '))):
            return cls
    snake_names = [_snake(kind, cls_name) for cls_name in classes]
    snake_names += [alias for section, alias in _ALIASES if section == kind]
    raise ConfigError(unknown_name(f'`{kind}` name', name, snake_names))


def build_by_name(kind: str, name: str, arguments: Mapping[str, Any] | None, *positional: Any) -> Any:
    """Builds ``name`` with ``arguments`` from the YAML file; see :func:`check_arguments` for what is refused."""
    cls = class_by_name(kind, name)
    check_arguments(f'{kind}.{name}', cls, arguments, num_given=len(positional))
    return cls(*positional, **(arguments or {}))


def import_by_name(path: str, name: str) -> Any:
    """Imports what a dotted name such as ``my_package.callbacks.MyCallback`` stands for.

    Args:
        path: Where the name stands, for the message.
        name: Module and attribute.

    Raises:
        ConfigError: When there is no such module or attribute.
    """
    module_name, _, attribute = name.rpartition('.')
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'`{path}` name must be importable, got: {name} ({error})') from error


def check_arguments(
    path: str, target: Any, arguments: Mapping[str, Any] | None, *, num_given: int = 0, own_keys: Sequence[str] = ()
) -> None:
    """Holds the keyword arguments of a YAML section to the signature of what they are meant for.

    Args:
        path: the section, for the message.
        target: class or function.
        arguments: keyword arguments; None means none.
        num_given: how many leading parameters the program supplies itself.
        own_keys: keys of the section that are not meant for ``target``.

    Raises:
        ConfigError: for an unknown argument, or a required one that is missing.
    """
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ConfigError(f'`{path}` must be a mapping of arguments, got: {arguments!r}. Write {{}} for none')
    parameters = list(inspect.signature(target).parameters.values())[num_given:]
    names = [*own_keys] + [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in arguments or {}:
            if key not in names:
                raise ConfigError(unknown_name(f'`{path}` key', key, names))
    for p in parameters:
        if p.default is p.empty and p.name in names and p.name not in (arguments or {}):
            raise ConfigError(f'`{path}.{p.name}` must be given: {target.__name__} has no default for it')


def _classes(kind: str) -> dict[str, type]:
    found: dict[str, type] = {}
    for module in _MODULES[kind]:
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, _BASES[kind]) and not inspect.isabstract(value):
                found.setdefault(name, value)
    return {name: cls for name, cls in found.items() if cls is not _BASES[kind]}


def _snake(kind: str, cls_name: str) -> str:
    """``LRMonitor`` -> ``lr_monitor``, ``DecoupledAdamW`` -> ``decoupled_adamw``."""
    snake = re.sub(r'(?<=[A-Za-z])(?=[A-Z][a-z])', '_', cls_name).lower()
    return snake.removesuffix('_' + _SUFFIXES.get(kind, ' '))
