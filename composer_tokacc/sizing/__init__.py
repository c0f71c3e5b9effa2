# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing helper: how large may a microbatch be, and what is gained?

Three parts. A run's own model is traced without its memory, which gives a memory model (``shapes``, ``fake``,
``trace``, ``memory_model``, ``calibrate``). The memory model says the largest safe microbatch (``capacity``). Steps of
that size are simulated with the run's own cuts, and reported (``profile``, ``simulate``, ``suggestion``, ``report``,
``picture``).
"""

from composer_tokacc.sizing.calibrate import calibrate_fake, fit_memory, load_or_calibrate
from composer_tokacc.sizing.capacity import Capacity, LargestMicrobatch, largest_microbatch
from composer_tokacc.sizing.fake import cast_model
from composer_tokacc.sizing.memory_model import GIB, MemoryModel, StaticBytes, transformer_blocks
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.report import SizingReport
from composer_tokacc.sizing.shapes import BatchShape
from composer_tokacc.sizing.simulate import CutOptions, draw_batches, simulate_steps
from composer_tokacc.sizing.suggestion import suggest_microbatching
from composer_tokacc.sizing.timing import MicrobatchTimer, fit_cost

__all__ = [
    'GIB',
    'BatchShape',
    'Capacity',
    'CutOptions',
    'LargestMicrobatch',
    'MemoryModel',
    'MicrobatchTimer',
    'SampleSizes',
    'SizingReport',
    'StaticBytes',
    'calibrate_fake',
    'cast_model',
    'draw_batches',
    'fit_cost',
    'fit_memory',
    'largest_microbatch',
    'load_or_calibrate',
    'simulate_steps',
    'suggest_microbatching',
    'transformer_blocks',
]
