# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a program that refuses its arguments. Returns the status and stderr of every rank."""

from __future__ import annotations

import contextlib
import io
from importlib import import_module

from composer.utils import dist


def main(program: str, *arguments: str) -> list[tuple[int, str]]:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = import_module(program).main(list(arguments))
    return dist.all_gather_object((status, printed.getvalue()))
