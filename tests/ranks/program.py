# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a program that ends well; rank 0 writes what it prints.

Arguments: its module, its own arguments, result file.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib import import_module
from pathlib import Path

from composer.utils import dist


def main() -> None:
    program, *arguments, path = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert import_module(program).main(arguments) == 0
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(printed.getvalue()))


if __name__ == '__main__':
    main()
