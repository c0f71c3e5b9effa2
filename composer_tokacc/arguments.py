# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the arguments of public functions. All raise ValueError, with the name and the value of the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_tokacc.refusals import InvalidInputError


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless an argument is a positive integer that fits into int64."""
    if not _is_integer(value) or not 1 <= value < 2**63:
        raise InvalidInputError(f'`{name}` must be a positive integer, got: {value!r}.')


def as_number(name: str, value: Any) -> float:
    """Returns an argument as a float. Raises ValueError unless it is a finite number of at least 0.

    A tensor or an array of one number counts as this number.
    """
    try:
        number = float(value)
    # A tensor of several numbers raises RuntimeError, and an integer above the largest float OverflowError.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    is_other_type = isinstance(value, (str, bytes, bool))  # float() reads them, too
    if is_other_type or not 0 <= number < math.inf:
        raise InvalidInputError(f'`{name}` must be a finite number, at least 0, got: {value!r:.80}.')
    return number


def as_list(name: str, values: Any, entries: str) -> list[Any]:
    """Returns an argument as a list. Raises ValueError unless it can be iterated over, and has entries.

    ``entries`` says what they are.
    """
    try:
        listed = list(values)
    except TypeError as error:  # raised for a number, and also for a tensor of no dimension, which has `__iter__`
        raise InvalidInputError(f'`{name}` must be a list of {entries}, got: {values!r:.80}.') from error
    if not listed:
        raise InvalidInputError(f'`{name}` must be a list of {entries}, got: an empty one.')
    return listed


def _is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or numpy. True and False do not count."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_kind(
    name: str,
    value: Any,
    kind: type,
) -> None:
    """Raises ValueError unless an argument is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise InvalidInputError(f'`{name}` must be a {kind.__name__}, got: {" ".join(repr(value).split())[:80]}.')


def check_choice(
    name: str,
    value: Any,
    choices: Sequence[Any],
) -> None:
    """Raises ValueError unless an argument is one of the choices."""
    types = [type(choice) for choice in choices]
    # The type is compared, too, because 1 == True.
    if type(value) not in types or value not in choices:
        *first_choices, last_choice = [repr(choice) for choice in choices]
        raise InvalidInputError(f'`{name}` must be {", ".join(first_choices)} or {last_choice}, got: {value!r}.')


def check_state(state: Any, keys: set[str], *, counts: Sequence[str] = ()) -> None:
    """Raises ValueError unless a state to load has all ``keys``, with integers from 0 under those in ``counts``."""
    is_good = isinstance(state, Mapping) and keys <= state.keys()
    for name in counts:
        is_good = is_good and _is_integer(state[name]) and state[name] >= 0
    if not is_good:
        integers = f', with integers from 0 under {" and ".join(counts)}' if counts else ''
        raise InvalidInputError(
            f'`state` must have the keys {sorted(keys)}{integers}, got: {state!r:.200}. Load what `state_dict` of the '
            'same class returned.'
        )
