# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs a program, which must succeed. Returns what rank 0 prints. FSDP is FSDP2.

Arguments: the folder in which the program runs, its module, and its own arguments.
"""

from __future__ import annotations

import contextlib
import io
import os
from importlib import import_module
from pathlib import Path

os.environ['FSDP_VERSION'] = '2'


def main(folder: str, program: str, *arguments: str) -> str:
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = import_module(program).main(list(arguments))
        # The programs return their exit status, the scripts of the examples nothing.
        expected_status = None if program.startswith('examples.') else 0
        assert status == expected_status, f'{program} ended with {status}'
    finally:
        os.chdir(before)
    return printed.getvalue()
