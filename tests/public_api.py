# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The public surface as text: names, signatures and defaults.

    python -m tests.public_api > tests/public_api.txt

Public are the names in ``__all__`` of the package and of its rooms, names without an underscore in single modules, the
arguments of the programs, and the sections of their YAML file. `CONTRIBUTING.md` says how long a name stays after it is
deprecated.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from composer_tokacc.programs import schema

__all__ = ['MODULES', 'public_names', 'surface']

MODULES = (
    '',
    'counting',
    'planning',
    'layout',
    'algorithm',
    'data_spec',
    'sampling',
    'monitor',
    'invariance',
    'data',
    'sizing',
    'programs',
    'train',
    'size',
    'verify',
    'export',
    'examples',
    'checks.token_weights',
)


def surface() -> str:
    """Returns the public surface, a block for each module.

    A name that two modules list is written out in the first one. The second one refers to it.
    """
    blocks: list[str] = []
    place_of_object: dict[int, str] = {}
    for room in MODULES:
        module = import_module(f'composer_tokacc.{room}' if room else 'composer_tokacc')
        blocks.append('\n'.join([f'[{module.__name__}]', *_names(module, place_of_object)]))
    blocks.append('\n'.join(['[YAML sections]', *_sections()]))
    return '\n\n'.join(blocks) + '\n'


def public_names(module: ModuleType) -> list[str]:
    """Returns the names in ``__all__`` of a module. Without it, the names that it defines without an underscore."""
    if hasattr(module, '__all__'):
        return sorted(module.__all__)
    defined: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        defined += [target.id for target in targets if isinstance(target, ast.Name)]
    return sorted(name for name in defined if not name.startswith('_') and name != 'log')


def _names(module: ModuleType, place_of_object: dict[int, str]) -> Iterator[str]:
    """Yields the lines of a module. Adds its classes and functions to ``place_of_object``, by their id."""
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            if id(value) in place_of_object:
                yield f'{name}: {place_of_object[id(value)]}'
                continue
            place_of_object[id(value)] = f'{module.__name__}.{name}'
        if inspect.isclass(value):
            yield from _class(name, value)
        elif inspect.isfunction(value):
            yield f'{name}{_signature(value)}'
        else:
            yield f'{name}: {_value_or_type(value)}'


def _class(name: str, cls: type) -> Iterator[str]:
    """Yields the constructor of a class, then its public attributes and methods, if this package defines them."""
    our_bases = [base for base in cls.__mro__ if base.__module__.startswith('composer_tokacc')]
    bases = ', '.join(base.__name__ for base in cls.__bases__ if base is not object)
    line = f'class {name}({bases})' if bases else f'class {name}'
    if any('__init__' in vars(base) or '__new__' in vars(base) for base in our_bases):
        line += f': {_signature(cls)}'
    yield line
    members: dict[str, Any] = {}
    for base in reversed(our_bases):
        members.update(vars(base))
    # Fields are arguments of the constructor.
    field_names = {field.name for field in fields(cls)} if is_dataclass(cls) else set(getattr(cls, '_fields', ()))
    for key in sorted(members.keys() - field_names):
        if not key.startswith('_'):
            yield f'    .{key}{_member(members[key])}'


def _member(value: Any) -> str:
    if isinstance(value, staticmethod | classmethod):
        comment = 'static method' if isinstance(value, staticmethod) else 'class method'
        return f'{_signature(value.__func__, "        ")}  # {comment}'
    if inspect.isfunction(value):
        return _signature(value, '        ')
    # A property has `fget`, a cached property has `func`.
    getter = getattr(value, 'fget', None) or getattr(value, 'func', None)
    if getter is not None:
        return f' -> {inspect.signature(getter).return_annotation}'
    return f': {_value_or_type(value)}'


def _signature(function: Any, indent: str = '    ') -> str:
    """Returns a signature on one line, or with a line for each parameter if one line would be too long."""
    signature = inspect.signature(function)
    parts: list[str] = []
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append('*')
            has_star = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            has_star = True
        parts.append(_parameter(parameter))
    returned = '' if inspect.isclass(function) else f' -> {signature.return_annotation}'
    line = f'({", ".join(parts)}){returned}'
    if len(line) <= 100:
        return line
    lines = [f'{indent}{part},' for part in parts]
    return '\n'.join(['(', *lines, f'{indent[4:]}){returned}'])


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f'*{text}'
    elif parameter.kind is parameter.VAR_KEYWORD:
        text = f'**{text}'
    annotation = getattr(parameter.annotation, '__forward_arg__', parameter.annotation)
    if annotation is not parameter.empty:
        text += f': {annotation}'
    if parameter.default is not parameter.empty:
        default = getattr(parameter.default, '__name__', repr(parameter.default))
        text += f' = {default}'
    return text


def _value_or_type(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


def _sections() -> Iterator[str]:
    """Yields the sections of the YAML file, and the keys and defaults of those that this package defines.

    The keys of other sections are arguments of Composer, torch or transformers.
    """
    for section in fields(schema.TrainConfig):
        yield f'{section.name}: {section.type}'
        section_class = getattr(schema, str(section.type), None)
        if is_dataclass(section_class):
            for parameter in inspect.signature(section_class).parameters.values():
                yield f'    {_parameter(parameter)}'


if __name__ == '__main__':
    print(surface(), end='')
