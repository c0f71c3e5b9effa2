# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compilation of the planner's inner loops with numba, where it is installed.

numba is optional: without it the very same Python functions run on the same arrays, in the same order of floating
point operations, so the plans are identical; only the latency differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    from numba import njit
except ImportError:  # numba also raises ImportError when it does not support the installed numpy
    njit = None

__all__ = ['HAS_NUMBA', 'compiled']

HAS_NUMBA = njit is not None
"""Whether the inner loops run as machine code."""

Function = TypeVar('Function', bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function of numpy arrays on its first call, and keep the machine code on disk.

    Args:
        function: A function in the subset of Python that numba understands.

    Returns:
        The compiled function, or `function` itself without numba.
    """
    if njit is None:
        return function
    try:
        return cast(Function, njit(cache=True)(function))
    except RuntimeError:  # neither the package folder nor the user's cache folder can be written
        return cast(Function, njit(function))
