# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds objects of the classes that a YAML file names.

``gradient_clipping`` is Composer's ``GradientClipping``, ``lr_monitor`` its ``LRMonitor``, ``adamw`` torch's ``AdamW``.
A dotted name such as ``my_package.callbacks.MyCallback`` is imported.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import composer.algorithms
import composer.callbacks
import composer.loggers
import composer.optim
import torch
from composer.core import Algorithm, Callback, TimeUnit, ensure_time
from composer.loggers import LoggerDestination
from composer.optim import ComposerScheduler, CosineAnnealingWithWarmupScheduler, LinearWithWarmupScheduler
from pydantic import AfterValidator, Field

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.monitor import TokenMonitor
from composer_tokacc.programs.errors import ConfigError, building, unknown_name
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.process import without_warnings
from composer_tokacc.programs.schema import (
    REPORT_KEYS,
    Count,
    Fraction,
    Hint,
    Name,
    Positive,
    TrainConfig,
    check_arguments,
    check_names,
    without,
)


@dataclass(frozen=True)
class Kind:
    """A kind of object that a section of the config names, such as an optimizer, and where its classes are found."""

    base: type
    """Class that all classes of this kind are derived from."""
    modules: tuple[ModuleType, ...]
    """Modules that have its classes. If two modules have a class of the same name, the first module wins."""
    suffix: str = ''
    """The end of a class name that the YAML name may leave out: ``tensorboard`` for ``TensorboardLogger``."""
    aliases: dict[str, type] = field(default_factory=dict)
    """Classes by further YAML names: those of this package, and names of llm-foundry."""


KINDS = {
    'algorithms': Kind(Algorithm, (composer.algorithms,), aliases={'token_accumulation': TokenAccumulation}),
    'callbacks': Kind(Callback, (composer.callbacks,), aliases={'token_monitor': TokenMonitor}),
    'trainer.loggers': Kind(LoggerDestination, (composer.loggers,), suffix='logger'),
    'optimizer': Kind(torch.optim.Optimizer, (composer.optim, torch.optim)),
    'scheduler': Kind(
        ComposerScheduler,
        (composer.optim,),
        suffix='scheduler',
        aliases={
            'cosine_with_warmup': CosineAnnealingWithWarmupScheduler,
            'linear_decay_with_warmup': LinearWithWarmupScheduler,
        },
    ),
}
"""By the key of the section in the config. In this module an argument ``kind`` is such a key."""
UNSUITED = (
    torch.optim.SparseAdam,  # needs sparse gradients
    # These change images, or images and their labels, and expect batches without text.
    composer.algorithms.AugMix,
    composer.algorithms.ColOut,
    composer.algorithms.CutMix,
    composer.algorithms.CutOut,
    composer.algorithms.MixUp,
    composer.algorithms.ProgressiveResizing,
    composer.algorithms.RandAugment,
    composer.callbacks.ImageVisualizer,
    composer.algorithms.NoOpModel,  # replaces the model by one that learns nothing
    composer.algorithms.SeqLengthWarmup,  # shortens or divides rows, also within images and answers
    composer.callbacks.LoadCheckpoint,  # unpickles a file, so a config could run code
)
"""Classes that are refused as if they did not exist."""

NamedArguments = dict[str, dict[str, Any] | None]
"""Arguments by the name of a class. None means its defaults."""


def _check_time(value: int | str | None, *, may_be_zero: bool) -> int | str | None:
    """Returns the value. Refuses a text that is no time for Composer, a negative time, and 0 unless ``may_be_zero``."""
    if value is None:
        return None
    try:
        length = ensure_time(value, TimeUnit.EPOCH).value
    except (ValueError, TypeError) as error:
        raise ValueError(f'must be a time such as 2ep or 500ba ({error})') from error
    if length < 0 or (length == 0 and not may_be_zero):
        raise ValueError('must be a longer time')
    return value


Duration = Annotated[int | str | None, AfterValidator(partial(_check_time, may_be_zero=False))]
"""A time above 0 as Composer reads it, such as ``2ep``, or None. A number without a unit means epochs."""
Interval = Annotated[int | str, AfterValidator(partial(_check_time, may_be_zero=True))]
"""A time between two events, or 0 for never."""
WarmUp = Annotated[str, AfterValidator(partial(_check_time, may_be_zero=True))]
"""A time that may be 0, such as ``0ba``. It must have a unit."""
Weight = Annotated[float, Field(ge=0)]
AllOrSome = Literal[-1] | Count
"""A number of batches or ranks; -1 for all."""


class HostArguments(TypedDict, total=False):
    """Ranges of arguments by name, for the Trainer, FSDP and all classes that need no dotted name.

    Most of these classes accept any value when they are built. A wrong one would show only in a step, or never. In a
    class of the user an argument of the same name may mean something else. So only its own annotations count there.

    This class is only used to make the mapping ``HOST_HINTS``. In a plain mapping, type checkers would refuse values
    such as ``Name | None``.
    """

    alpha: Weight
    alpha_f: Weight
    alpha_i: Weight
    clipping_threshold: Positive
    clipping_type: Literal['norm', 'value', 'adaptive']
    console_log_interval: Duration
    data_parallel_replicate_degree: AllOrSome | None
    data_parallel_shard_degree: AllOrSome | None
    dist_timeout: Positive
    eval_interval: Interval
    eval_subset_num_batches: AllOrSome
    loggers: NamedArguments | None
    max_duration: Duration
    run_name: Name | None
    save_folder: Name | None
    save_interval: Duration
    save_num_checkpoints_to_keep: Annotated[int, Field(ge=-1)]
    scale_schedule_ratio: Positive
    smoothing: Fraction | None
    state_dict_type: Literal['full', 'sharded']
    t_max: Duration
    t_warmup: WarmUp
    train_subset_num_batches: AllOrSome
    window_size: Count


HOST_HINTS: dict[str, Hint] = get_type_hints(HostArguments, include_extras=True)


def build_all(kind: str, section: NamedArguments | None) -> list[Any]:
    """Builds the algorithms, callbacks or loggers that a section names, in order.

    Args:
        kind: A key of ``KINDS``, which is the key of the section.
        section: The section.
    """
    objects = []
    for name, arguments in (section or {}).items():
        built = build_part(kind, f'{kind}.{name}', name, arguments or {})
        objects.append(built)
    return objects


def build_section(kind: str, section: Section, *positional: Any) -> Any:
    """Builds the optimizer or the scheduler from its section: a ``name``, and arguments.

    ``positional`` are arguments that the program itself supplies, such as the parameters of the model. The key
    ``parts`` (settings of an optimizer for parts of the model) is not for the class: the caller has read it.
    """
    name = section.get('name', '')
    arguments = without(section, 'name', 'parts')
    return build_part(kind, kind, name, arguments, *positional)


def build_part(
    kind: str,
    path: str,
    name: str,
    arguments: Section,
    *positional: Any,
) -> Any:
    """Builds one object of a section. ``path`` is the key of its arguments in the config."""
    cls = class_by_name(kind, name)
    if cls.__init__ is KINDS[kind].base.__init__:
        # The class has no constructor of its own. The base's constructor accepts any arguments and drops them, so none
        # are allowed.
        check_names(path, arguments, ())
    hints = None
    if cls in _classes_of(kind).values():  # a class that needs no dotted name, even if the user gives it one
        hints = HOST_HINTS
    build = partial(cls, *positional)
    checked = check_arguments(path, build, arguments, hints=hints)
    with without_warnings(), building(path):  # a warning of a host does not say which key of the config it is about
        return build(**checked)


def import_by_name(path: str, name: str) -> Any:
    """Returns the class or function that a dotted name stands for. ``path`` is the key in the config with this name."""
    module_name, _, attribute = name.rpartition('.')
    if not module_name:
        raise ConfigError(path, f'must be a dotted name such as package.module.name, got: {name}')
    # A YAML file from somebody else must not run commands, as os.system() and subprocess.Popen do.
    if module_name.partition('.')[0] in sys.stdlib_module_names:
        raise ConfigError(path, f'must not be of the standard library, which can run commands, got: {name}')
    with building(path):
        imported = getattr(importlib.import_module(module_name), attribute)
        inspect.signature(imported)  # raises for something that cannot be called, such as a module
    return imported


def report_function(report: Section) -> Callable[[Any], Any] | None:
    """Returns the function that ``report.name`` names, with its arguments from the section filled in; None without it.

    The returned function takes only a FinishedRun. Refuses keys of the section that are no arguments of the function.
    """
    name = report.get('name')
    if name is None:
        check_arguments('report', object, report, extra_keys=REPORT_KEYS)  # `object` takes no arguments
        return None
    function = import_by_name('report.name', str(name))
    # The first argument, a FinishedRun, is not from the file.
    arguments = check_arguments('report', partial(function, None), report, extra_keys=REPORT_KEYS)
    return partial(function, **without(arguments, *REPORT_KEYS))


def class_by_name(kind: str, name: str) -> Any:
    """Returns the class that ``name`` stands for in the section ``kind``. Raises ConfigError if there is none."""
    name = str(name)  # a YAML file may have a number here
    base = KINDS[kind].base
    classes = _classes_of(kind)
    if '.' in name:
        cls = import_by_name(kind, name)
        # A scheduler may be any class, because Composer only calls it.
        fits = inspect.isclass(cls) and (base is ComposerScheduler or issubclass(cls, base))
        if not fits:
            raise ConfigError(f'{kind}.{name}', f'must be a class such as a {base.__name__}, got: {cls!r}')
    else:
        # Capitals and underscores do not count: `AdamW`, `adam_w` and `adamw` are the same class.
        classes_by_letters = {short_name.replace('_', ''): cls for short_name, cls in classes.items()}
        letters = name.replace('_', '').lower().removesuffix(KINDS[kind].suffix)
        cls = classes_by_letters.get(letters)
    if cls is None or cls in UNSUITED:  # a dotted name may find an unsuited class
        raise ConfigError(kind, unknown_name('class', name, classes))
    return cls


def token_accumulation_options(config: TrainConfig) -> Section:
    """Returns the arguments of TokenAccumulation in a config; empty if the config does not name it.

    Finds it under any spelling, and under the dotted name of a subclass.
    """
    name = _name_of_token_accumulation(config)
    if name is None:
        return {}
    return config.algorithms[name] or {}


def build_token_accumulation(config: TrainConfig) -> TokenAccumulation | None:
    """Builds the TokenAccumulation, or the subclass of it, that a config names. Returns None if it names neither."""
    name = _name_of_token_accumulation(config)
    if name is None:
        return None
    return build_part('algorithms', f'algorithms.{name}', name, token_accumulation_options(config))


def _name_of_token_accumulation(config: TrainConfig) -> str | None:
    """Returns the key in the section ``algorithms`` that names TokenAccumulation or a subclass; None without it."""
    for name in config.algorithms:
        if issubclass(class_by_name('algorithms', name), TokenAccumulation):
            return name
    return None


def uses_composers_flag(config: TrainConfig) -> bool:
    """Returns whether Composer itself weights the microbatches of a run by their tokens.

    The flag is ``trainer.accumulate_train_batch_on_tokens``.
    """
    return bool(config.trainer.get('accumulate_train_batch_on_tokens'))


def weights_tokens(config: TrainConfig) -> bool:
    """Returns whether a run weights its microbatches by their tokens, with TokenAccumulation or Composer's flag."""
    return _name_of_token_accumulation(config) is not None or uses_composers_flag(config)


def _classes_of(kind: str) -> dict[str, type]:
    """Returns the classes of a kind that need no dotted name, by their names in a YAML file."""
    base = KINDS[kind].base
    classes: dict[str, type] = dict(KINDS[kind].aliases)
    for module in KINDS[kind].modules:
        for _, cls in inspect.getmembers(module, inspect.isclass):
            can_be_built = issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)
            if not can_be_built or cls in UNSUITED:
                continue
            # LRMonitor -> lr_monitor, DecoupledAdamW -> decoupled_adamw
            snake_name = re.sub(r'(?<=[A-Za-z])(?=[A-Z][a-z])', '_', cls.__name__).lower()
            short_name = snake_name.removesuffix(KINDS[kind].suffix).removesuffix('_')
            classes.setdefault(short_name, cls)  # keeps the class of an earlier module
    return classes
