# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The public surface as text: names, signatures and defaults.

    python -m tests.public_api > tests/public_api.txt

Public is what the package and each of its rooms list in ``__all__``, what single modules define without an underscore,
the arguments of the programs, and the sections of their YAML file. `CONTRIBUTING.md` says how long a name that is left
stays.
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
    """A block a module; a name that two modules list is spelled out where it stands first."""
    blocks: list[str] = []
    known: dict[int, str] = {}
    for room in MODULES:
        module = import_module('.'.join(filter(None, ('composer_tokacc', room))))
        blocks.append('\n'.join([f'[{module.__name__}]', *_names(module, known)]))
    blocks.append('\n'.join(['[YAML sections]', *_sections()]))
    return '\n\n'.join(blocks) + '\n'


def public_names(module: ModuleType) -> list[str]:
    """What a room lists, or a module of its own defines without an underscore."""
    if hasattr(module, '__all__'):
        return sorted(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)]
        defined += [target.id for target in targets if isinstance(target, ast.Name)]
    return sorted(name for name in defined if not name.startswith('_') and name != 'log')


def _names(module: ModuleType, known: dict[int, str]) -> Iterator[str]:
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            if id(value) in known:
                yield f'{name}: {known[id(value)]}'
                continue
            known[id(value)] = f'{module.__name__}.{name}'
        if inspect.isclass(value):
            yield from _class(name, value)
        elif inspect.isfunction(value):
            yield f'{name}{_signature(value)}'
        else:
            yield f'{name}: {_type_of(value)}'


def _class(name: str, cls: type) -> Iterator[str]:
    """The constructor, then public attributes and methods of ours; a host's are the host's."""
    own = [base for base in cls.__mro__ if base.__module__.startswith('composer_tokacc')]
    bases = ', '.join(base.__name__ for base in cls.__bases__ if base is not object)
    head = f'class {name}({bases})' if bases else f'class {name}'
    if any('__init__' in vars(base) or '__new__' in vars(base) for base in own):
        head += f': {_signature(cls)}'
    yield head
    of_fields = {field.name for field in fields(cls)} if is_dataclass(cls) else set(getattr(cls, '_fields', ()))
    members = {key: value for base in reversed(own) for key, value in vars(base).items() if not key.startswith('_')}
    for key in sorted(members.keys() - of_fields):
        yield f'    .{key}{_member(members[key])}'


def _member(value: Any) -> str:
    if isinstance(value, staticmethod | classmethod):
        kind = 'static' if isinstance(value, staticmethod) else 'class'
        return f'{_signature(value.__func__, "        ")}  # {kind} method'
    if inspect.isfunction(value):
        return _signature(value, '        ')
    getter = getattr(value, 'fget', None) or getattr(value, 'func', None)  # of a property, a cached property
    return f': {_type_of(value)}' if getter is None else f' -> {inspect.signature(getter).return_annotation}'


def _signature(function: Any, indent: str = '    ') -> str:
    """On one line, or a parameter a line where that were too long."""
    signature = inspect.signature(function)
    parts, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append('*')
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_parameter(parameter))
    returned = '' if inspect.isclass(function) else f' -> {signature.return_annotation}'
    line = f'({", ".join(parts)}){returned}'
    if len(line) <= 100:
        return line
    return '\n'.join(['(', *(f'{indent}{part},' for part in parts), f'{indent[4:]}){returned}'])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: '*', parameter.VAR_KEYWORD: '**'}.get(parameter.kind, '')
    hint = getattr(parameter.annotation, '__forward_arg__', parameter.annotation)
    text = f'{stars}{parameter.name}' + (f': {hint}' if hint is not parameter.empty else '')
    if parameter.default is parameter.empty:
        return text
    return f'{text} = {getattr(parameter.default, "__name__", repr(parameter.default))}'


def _type_of(value: Any) -> str:
    return f'{value!r}' if isinstance(value, int | float | str) else type(value).__name__


def _sections() -> Iterator[str]:
    """Keys of the YAML file whose owner is this package, with their defaults; the rest are arguments of a host."""
    for section in fields(schema.TrainConfig):
        owner = getattr(schema, str(section.type), None)
        yield f'{section.name}: {section.type}'
        if is_dataclass(owner):
            for parameter in inspect.signature(owner).parameters.values():
                yield f'    {_parameter(parameter)}'


if __name__ == '__main__':
    print(surface(), end='')
