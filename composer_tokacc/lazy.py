# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Imports the public names of a package on first use.

A user of one name does not wait for the modules of the other names, and does not need their dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package, which Python calls for a name that the package does not have yet.

    It imports the name. Also gives the package a ``__dir__`` that lists all names.

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
