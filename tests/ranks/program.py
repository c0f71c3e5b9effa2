# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a program that ends well, sharded by FSDP2; rank 0 writes what it prints.

Arguments: its module, its own arguments, result file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from importlib import import_module
from pathlib import Path

from composer.utils import dist, get_device

from tests.support.fsdp import repair_average


def main() -> None:
    program, *arguments, path = sys.argv[1:]
    if any('.fsdp=' in one for one in arguments):
        os.environ['FSDP_VERSION'] = '2'
        dist.initialize_dist(get_device('cpu'))
        repair_average()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert import_module(program).main(arguments) == 0
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(printed.getvalue()))


if __name__ == '__main__':
    main()
