# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the arguments of public functions. All raise ValueError, with the name and the value of the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    number = math.nan
    if not isinstance(value, (str, bytes, bool)):  # float() reads them, too
        # A tensor of several numbers raises RuntimeError, and an integer above the largest float OverflowError.
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    # The comparison is False for NaN, so also for a value that is no number.
    if not 0 <= number < math.inf:
        raise InvalidInputError(f'`{name}` must be a finite number, at least 0, got: {value!r:.80}.')
    return number


def as_list(name: str, value: Any, description: str) -> list[Any]:
    """Returns an argument as a list. Raises ValueError if it cannot be iterated over, or is empty.

    Args:
        name: Name of the argument.
        value: The argument.
        description: What the list should hold, for the message: "a list of ...".
    """
    try:
        items = list(value)
    except TypeError as error:  # raised for a number, and also for a tensor of no dimension, which has `__iter__`
        raise InvalidInputError(f'`{name}` must be a list of {description}, got: {value!r:.80}.') from error
    if not items:
        raise InvalidInputError(f'`{name}` must be a list of {description}, but it is empty.')
    return items


def _is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or numpy. True and False do not count."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless an argument is an instance of ``kind``."""
    if not isinstance(value, kind):
        value_on_one_line = ' '.join(repr(value).split())
        raise InvalidInputError(f'`{name}` must be a {kind.__name__}, got: {value_on_one_line:.80}.')


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError unless an argument is one of the choices. There are at least two."""
    types = [type(choice) for choice in choices]
    # The type is compared, too, because 1 == True.
    if type(value) not in types or value not in choices:
        *first_choices, last_choice = [repr(choice) for choice in choices]
        raise InvalidInputError(f'`{name}` must be {", ".join(first_choices)} or {last_choice}, got: {value!r}.')


def check_state(state: Any, keys: set[str], *, counts: Sequence[str] = ()) -> None:
    """Raises ValueError unless a state to load is a mapping that has all of some keys. It may have others, too.

    Args:
        state: The state.
        keys: The keys that it must have.
        counts: Those of the keys whose value must be an integer of at least 0.
    """
    has_keys = isinstance(state, Mapping) and keys <= state.keys()
    if not has_keys or not all(_is_count(state[key]) for key in counts):
        requirement = f'the keys {sorted(keys)}'
        if counts:
            requirement += f', with integers of at least 0 under {" and ".join(counts)}'
        raise InvalidInputError(
            f'`state` must have {requirement}, got: {state!r:.200}. Load what `state_dict` of the same class returned.'
        )


def _is_count(value: Any) -> bool:
    """Returns whether a value is an integer of at least 0."""
    return _is_integer(value) and value >= 0
