# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How much memory a microbatch takes: measured on a GPU, or traced without one."""

from composer_tokacc.memory.calibrate import calibrate_fake, load_or_calibrate
from composer_tokacc.memory.model import GIB, LARGE_RESIDUAL, MemoryModel
from composer_tokacc.memory.shapes import BatchShape
from composer_tokacc.memory.static import StaticBytes

__all__ = ['GIB', 'LARGE_RESIDUAL', 'BatchShape', 'MemoryModel', 'StaticBytes', 'calibrate_fake', 'load_or_calibrate']
