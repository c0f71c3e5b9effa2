# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""On ranks that stay: a program that ends well, in the folder of a page.

Arguments: the folder, the program's module, its own arguments, result file.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    folder, module, *arguments, path = sys.argv[1:]
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert import_module(module).main(arguments) == 0
    finally:
        os.chdir(before)
    if os.environ['RANK'] == '0':
        Path(path).write_text('null')


if __name__ == '__main__':
    main()
