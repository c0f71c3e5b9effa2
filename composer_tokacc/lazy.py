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


def on_first_use(
    package_name: str,
    module_of_name: Mapping[str, str],
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` of a package.

    Python calls ``__getattr__`` for a name that the package does not have yet. It imports the name. ``__dir__`` lists
    all names, also those that are not imported yet.

    Args:
        package_name: Name of the package, which is being imported.
        module_of_name: For each public name the module that defines it, relative to the package.
    """
    package = sys.modules[package_name]

    def import_name(name: str) -> Any:
        if name not in module_of_name:
            raise AttributeError(f'module {package_name!r} has no attribute {name!r}')
        module = import_module(f'{package_name}.{module_of_name[name]}')
        value = getattr(module, name)
        # From now on Python finds the name without this function.
        setattr(package, name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(package), *module_of_name})

    return import_name, list_names
