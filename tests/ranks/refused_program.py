# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a program that refuses its arguments. Returns the status and stderr of every rank."""

from __future__ import annotations

import contextlib
import errno
import io
from importlib import import_module
from typing import NoReturn

from composer.utils import dist

from composer_tokacc.programs.run_result import FinishedRun


def run_out_of_disk(run: FinishedRun, **arguments: object) -> NoReturn:
    """A function for ``report.name``, which only rank 0 calls. Takes all other keys of the section."""
    raise OSError(errno.ENOSPC, 'No space left on device')


def main(program: str, *arguments: str) -> list[tuple[int, str]]:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = import_module(program).main(list(arguments))
    return dist.all_gather_object((status, printed.getvalue()))
