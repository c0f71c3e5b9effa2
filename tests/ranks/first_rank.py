# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a function that only rank 0 calls. Returns what every rank gets, or its error."""

from __future__ import annotations

import sys
from collections.abc import Callable

from composer.utils import dist

from composer_tokacc.collectives import run_on_rank_0
from composer_tokacc.refusals import InvalidInputError


class OwnError(TypeError):
    """An error that cannot be sent to other ranks."""

    def __reduce__(self) -> str:
        raise TypeError('cannot pickle')


def answer() -> int:
    return 7


def refuse() -> int:
    raise InvalidInputError('no sample')


def fail() -> int:
    raise OwnError('a bug of ours')


def leave() -> int:
    sys.exit(0)


def return_a_function() -> Callable[[], int]:
    return lambda: 7


def outcomes(compute: Callable[[], object]) -> list[tuple[str, str]]:
    """Returns the class and the text of the result or the error on each rank."""
    try:
        outcome: object = run_on_rank_0(compute)
    except (Exception, SystemExit) as error:
        outcome = error
    return dist.all_gather_object((type(outcome).__name__, str(outcome)))


def main() -> dict[str, list[tuple[str, str]]]:
    return {compute.__name__: outcomes(compute) for compute in (answer, refuse, fail, leave, return_a_function)}
