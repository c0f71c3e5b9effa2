# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the training program with FSDP2 on gloo; its arguments are the program's."""

from __future__ import annotations

import os
import sys

os.environ['FSDP_VERSION'] = '2'

from composer.utils import dist, get_device

from composer_tokacc.train import main
from tests.support.fsdp import repair_average

if __name__ == '__main__':
    dist.initialize_dist(get_device('cpu'), timeout=300.0)
    repair_average()
    sys.exit(main(sys.argv[1:]))
