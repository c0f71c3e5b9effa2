# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a value of the YAML file may be, as its annotation says: types, choices, times, and ranges of numbers.

The annotations are those of our own sections and those of the hosts' classes. A range stands in the annotation::

    global_batch_size: Annotated[int, AT_LEAST_1] = 32
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from composer_tokacc.programs.errors import ConfigError, must, unknown_name


@dataclass(frozen=True, kw_only=True)
class Range:
    """Where a number must lie."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        words = (('at least', self.least), ('above', self.above), ('at most', self.most), ('below', self.below))
        return ' and '.join(f'{word} {bound}' for word, bound in words if math.isfinite(bound))


AT_LEAST_0, AT_LEAST_1, POSITIVE = Range(least=0), Range(least=1), Range(above=0)
FRACTION = Range(least=0, below=1)

_TYPES = {bool: (bool,), int: (int,), float: (float, int), str: (str,), NoneType: (NoneType,)}
"""What a value may be, by plain annotation; exactly, as hosts take the text ``no`` for true."""
_CONTAINERS = {list: list, Sequence: list, dict: Mapping, Mapping: Mapping}


def check_arguments(
    path: str,
    target: Any,
    arguments: Any,
    *,
    num_given: int = 0,
    own_keys: Mapping[str, Any] | None = None,
    hints: Mapping[str, Any] | None = None,
) -> None:
    """Refuses what is unknown, missing or of another type or range among the arguments for a class or function.

    Args:
        path: The section, for the message.
        target: Class or function.
        arguments: Keyword arguments; None means none.
        num_given: How many leading parameters the program supplies itself.
        own_keys: Keys of the section that are not meant for ``target``, and what they may be.
        hints: Annotations that count instead of those of ``target``.
    """
    if not isinstance(arguments, Mapping | None):
        raise ConfigError(f'`{path}` must be a mapping, got: {arguments}. Write {{}} for its defaults')
    arguments, own_keys = arguments or {}, own_keys or {}
    parameters = list(inspect.signature(target).parameters.values())[num_given:]
    names = [*own_keys, *(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        check_names(path, arguments, names)
    for p in parameters:
        if p.default is p.empty and p.name in names and p.name not in arguments:
            raise ConfigError(f'`{path}.{p.name}` must be given: {target.__name__} has no default for it')
    hints = {**hints_of(target), **(hints or {}), **own_keys}
    for name, value in arguments.items():
        check_value('.'.join(filter(None, (path, str(name)))), value, hints.get(name, Any))


def check_names(path: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Refuses the first of ``arguments`` that is not ``known``; ``path`` is the section that they stand in."""
    for key in arguments:
        if key not in known:
            raise ConfigError(unknown_name(f'`{path}` key' if path else 'section', str(key), known))


def hints_of(target: Any) -> dict[str, Any]:
    """Returns annotations by name; none where one names what cannot be imported."""
    owner = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def check_value(path: str, value: Any, hint: Any) -> None:
    """Holds a value to an annotation; what no YAML file can hold, such as a callable, passes."""
    from composer.core import Time

    # A path-like object is in no file.
    options = [option for option in alternatives(hint) if get_origin(option) is not os.PathLike]
    if Time in options and isinstance(value, str):
        return check_time(path, value, least=0)
    fitting = [option for option in options if _fits(value, option)]
    if not fitting:
        raise ConfigError(_wrong_type(path, value, options))
    base, ranges = _unpacked(fitting[0])
    for allowed in ranges:
        if value not in allowed:
            raise ConfigError(f'`{path}` must be {allowed}{_or_choices(options)}, got: {value}')
    if is_section(base):
        check_arguments(path, base, value)
    for each in value if isinstance(value, list) and get_args(base) else ():
        check_value(path, each, get_args(base)[0])
    return None


def check_time(path: str, value: Any, *, least: int = 1) -> None:
    """Refuses what is no time, and one that is too short."""
    from composer.core import TimeUnit, ensure_time

    with must(f'`{path}` must be a time such as 2ep or 500ba', value, ValueError, TypeError, RuntimeError):
        found = ensure_time(value, TimeUnit.EPOCH).value
    if found < least and not 0 < found < 1:
        raise ConfigError(f'`{path}` must be {"longer than nothing" if least else "no negative time"}, got: {value}')


def check_numbers(path: str, value: Any) -> None:
    """Refuses numbers that no program can reckon with, at any depth; ``.inf`` and ``.nan`` are YAML."""
    if isinstance(value, Mapping | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_numbers('.'.join(filter(None, (path, str(key)))), each)
    elif isinstance(value, int | float) and not -(2**63) <= value < 2**64:
        shown = value if isinstance(value, float) else f'one of {value.bit_length()} bits'
        raise ConfigError(f'`{path}` must be a finite number of at most 64 bits, got: {shown}')


def is_section(hint: Any) -> bool:
    """Returns whether an annotation is a section of our own; a host's dataclass may take more than it says."""
    return is_dataclass(hint) and getattr(hint, '__module__', '').startswith('composer_tokacc')


def alternatives(hint: Any) -> Iterator[Any]:
    """Gives the members of a union, or the annotation itself."""
    if get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from alternatives(option)
    else:
        yield hint


def _unpacked(option: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(option) is Annotated:
        base, *ranges = get_args(option)
        return base, tuple(each for each in ranges if isinstance(each, Range))
    return option, ()


def _fits(value: Any, option: Any) -> bool:
    base = _unpacked(option)[0]
    if get_origin(base) is Literal:
        # Hosts put choices in capitals into capitals themselves.
        return value in get_args(base) or (isinstance(value, str) and value.upper() in get_args(base))
    if base in _TYPES:
        return type(value) in _TYPES[base]
    container = Mapping if is_section(base) else _CONTAINERS.get(get_origin(base) or base)
    return container is None or isinstance(value, container)


def _wrong_type(path: str, value: Any, options: Sequence[Any]) -> str:
    bases = [_unpacked(option)[0] for option in options]
    choices = [str(choice) for base in bases if get_origin(base) is Literal for choice in get_args(base)]
    bases = [dict if is_section(base) else base for base in bases if get_origin(base) is not Literal]
    types = {getattr(get_origin(base) or base, '__name__', str(base)) for base in bases}
    words = {'NoneType': 'null', 'Sequence': 'list', 'dict': 'mapping', 'Mapping': 'mapping'}
    expected = 'of type ' * bool(types) + ' or '.join(sorted(words.get(name, name) for name in types))
    if isinstance(value, str) and choices and types <= {'NoneType'}:
        return unknown_name(f'`{path}`', value, choices)
    if types <= {'dict', 'Mapping', 'NoneType'} and not choices:
        return f'`{path}` must be a mapping, got: {value}. Leave it out for its defaults'
    return f'`{path}` must be {(expected + _or_choices(options)).removeprefix(", or ")}, got: {value}'


def _or_choices(options: Sequence[Any]) -> str:
    choices = (choice for option in options if get_origin(option) is Literal for choice in get_args(option))
    return ''.join(f', or {choice}' for choice in choices)
