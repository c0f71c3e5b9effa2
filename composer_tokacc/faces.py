# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Public names of a package that are imported on first use.

So importing one name does not import the modules, and does not need the dependencies, of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package, and has ``dir`` list the names.

    Args:
        package: Name of the package.
        modules: The module of each name, relative to the package.
    """
    face = sys.modules[package]

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        value = getattr(import_module(f'{package}.{modules[name]}'), name)
        # From now on Python finds the name without this function.
        setattr(face, name, value)
        return value

    face.__dict__['__dir__'] = lambda: sorted({*vars(face), *modules})
    return load
