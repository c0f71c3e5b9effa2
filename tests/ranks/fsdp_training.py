# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the training program with FSDP2 on gloo; rank 0 writes what the run reports.

Arguments: those of the program, result file.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ['FSDP_VERSION'] = '2'

from composer.utils import dist, get_device

from composer_tokacc.programs.schema import load_config
from composer_tokacc.train import main
from tests.support.fsdp import repair_average

if __name__ == '__main__':
    dist.initialize_dist(get_device('cpu'), timeout=300.0)
    repair_average()
    *arguments, path = sys.argv[1:]
    assert main(arguments) == 0
    if dist.get_global_rank() == 0:
        shutil.copy(Path(load_config(arguments[0], arguments[1:]).report['folder']) / 'result.json', path)
