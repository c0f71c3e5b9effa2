# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the largest safe microbatch of a run, and predicts what it gains.

``trace`` runs steps of the run's own model without its memory, and ``memory_model`` predicts the peak of any microbatch
from them. ``suggestion`` finds the largest microbatch that fits in the worst case. ``simulate`` makes steps of that
size as the run would cut them, and ``report`` shows the result; with ``timing`` it is in seconds.
"""

from composer_tokacc.sizing.memory_model import GIB, MemoryModel, StaticBytes, load_or_calibrate
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.report import SizingReport, draw_report
from composer_tokacc.sizing.shapes import BatchShape
from composer_tokacc.sizing.simulate import draw_batches, simulate_steps
from composer_tokacc.sizing.suggestion import Capacity, suggest_microbatching
from composer_tokacc.sizing.timing import MicrobatchTimer, fit_cost
from composer_tokacc.sizing.trace import FlopModel, calibrate_fake, count_flops

__all__ = [
    'GIB',
    'BatchShape',
    'Capacity',
    'FlopModel',
    'MemoryModel',
    'MicrobatchTimer',
    'SampleSizes',
    'SizingReport',
    'StaticBytes',
    'calibrate_fake',
    'count_flops',
    'draw_batches',
    'draw_report',
    'fit_cost',
    'load_or_calibrate',
    'simulate_steps',
    'suggest_microbatching',
]
