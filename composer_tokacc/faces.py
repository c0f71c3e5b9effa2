# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Names that are loaded on first use: who takes one of a room waits for, and needs, what that one needs alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(face: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, and has ``dir`` list the names; ``places``: in which module each stands."""
    module = sys.modules[face]

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f'module {face!r} has no attribute {name!r}')
        value = getattr(import_module(f'{face}.{places[name]}'), name)
        setattr(module, name, value)  # found without this function from now on
        return value

    module.__dict__['__dir__'] = lambda: sorted({*vars(module), *places})
    return load
