# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Imports the public names of a package on first use.

So a user of one name does not wait for the modules of the other names, and does not need their dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for a package, which imports a name. Sets ``__dir__``, so that it lists all names.

    Args:
        package: Name of the package.
        modules: For each name the module that defines it, relative to the package.
    """
    module = sys.modules[package]

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        value = getattr(import_module(f'{package}.{modules[name]}'), name)
        # From now on Python finds the name without this function.
        setattr(module, name, value)
        return value

    module.__dict__['__dir__'] = lambda: sorted({*vars(module), *modules})
    return load
