# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing helper: how large may a microbatch be, and what is gained?

Three parts. A run's own model is traced without its memory, which gives a memory model (``shapes``,
``trace``, ``memory_model``). The memory model says the largest safe microbatch (``suggestion``). Steps of that size are
simulated with the run's own cuts, and reported (``profile``, ``simulate``, ``report``); ``timing`` speaks of seconds.
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
