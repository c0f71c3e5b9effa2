# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the largest safe microbatch of a run, and predicts what it gains.

``trace`` runs a few microbatches of the run's own model with tensors that take no memory. ``memory_model`` is fitted to
them, and predicts the peak of any other microbatch. ``suggestion`` finds the largest microbatch that fits in the worst
case. ``simulate`` cuts steps as the run would, and ``report`` shows the result. ``timing`` measures microbatches on the
machine, so that the report is in seconds.
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
