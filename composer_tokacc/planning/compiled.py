# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compilation of the planner's inner loops with numba."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

try:
    from numba import njit
except ImportError as error:  # it is not installed, or does not fit this release of numpy
    logging.getLogger(__name__).warning('numba cannot be used, so planning takes 15 to 100 times as long: %s', error)
    njit = None

Function = TypeVar('Function', bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiles a function of numpy arrays on its first call. Keeps the machine code on disk if that is possible.

    Without numba the function stays as it is, so that the planner can be used without it. Plans are then the same, but
    slower: a plan of 64 samples on 2 ranks takes 9 ms instead of 0.5 ms, and a plan of 512 samples on 8 ranks takes
    0.1 s instead of 1 ms (``benchmarks/planning.py``).
    """
    if njit is None:
        return function
    try:
        dispatcher: Any = njit(function, cache=True)
    except RuntimeError:  # neither the folder of the package nor the user's cache folder can be written
        dispatcher = njit(function)
    # If the cache folder is damaged or full, functions are compiled again. `_cache` is a private name of numba. It is
    # missing if NUMBA_DISABLE_JIT is set. Other private names are used only in `compat.py`, but that file imports
    # torch, and the planner must not.
    cache = getattr(dispatcher, '_cache', None)
    if cache is not None:
        cache.load_overload = _none_on_error(cache.load_overload)
        cache.save_overload = _none_on_error(cache.save_overload)
    return dispatcher


def _none_on_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls the method, but returns None on any error. Numba reads it as: not in the cache."""

    def call(*arguments: Any) -> Any:
        with suppress(Exception):  # unpickling a damaged file may raise anything
            return method(*arguments)

    return call
