# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(f) `device_train_microbatch_size='auto'` through a real out-of-memory: what it settles on, and the same gradient."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger

from benchmarks.device import ComputeDevice
from benchmarks.gpu.exactness import accumulated_gradients, small_config
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.store import Store
from benchmarks.small_llava import make_rows
from composer_tokacc.invariance import relative_error

ROWS = 32
LONGEST = 2048
# fp32 sums in another order.
TOLERANCE = 1e-5


class SettledSize(Callback):
    """The microbatch size after the step, and how often the step was tried."""

    size: Any = None

    def __init__(self) -> None:
        self.attempts: list[Any] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.attempts.append(state.device_train_microbatch_size)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.size = state.device_train_microbatch_size


class SimulatedOutOfMemory(Callback):
    """For a rehearsal: Composer refuses 'auto' on a CPU, so the first attempts fail as they would on a GPU."""

    def before_loss(self, state: State, logger: Logger) -> None:
        state.auto_microbatching = True
        if state.device_train_microbatch_size > ROWS // 4:
            raise RuntimeError('CUDA out of memory')


@contextmanager
def room(limit: float, device: ComputeDevice) -> Iterator[None]:
    """No more than this many bytes for torch's allocator."""
    if device.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(limit / device.total_bytes(), 1.0))
    try:
        yield
    finally:
        if device.is_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)


def measure(scale: Scale) -> dict[str, Any]:
    """The gradient at a fixed size that fits, then with 'auto' in room for little more."""
    device = scale.device
    config = small_config(device)
    longest = LONGEST if device.is_gpu else 24
    lengths = [longest - (row * longest) // (2 * ROWS) for row in range(ROWS)]
    rows = make_rows(lengths, 0, config)
    device.reset_peak()
    before = torch.cuda.memory_allocated() if device.is_gpu else 0
    expected = accumulated_gradients(config, rows, 'ours', ROWS // 4, device, 'fp32')
    fitting = device.peak_bytes() - before
    result: dict[str, Any] = {'rows': ROWS, 'longest': longest, 'fits_in_gib': fitting / 2**30}
    settled = SettledSize()
    watchers = (settled, *([] if device.is_gpu else [SimulatedOutOfMemory()]))
    # The caching allocator wastes some of it; half the rows at a time want nearly twice as much.
    started = time.perf_counter()
    with room(before + 1.4 * fitting, device):
        size = 'auto' if device.is_gpu else ROWS
        found = accumulated_gradients(config, rows, 'ours', size, device, 'fp32', watchers)
    result.update(
        seconds=time.perf_counter() - started, settled_on=settled.size, attempts=settled.attempts,
        gradient_error=relative_error(found, expected)[0],
    )  # fmt: skip
    result['holds'] = result['gradient_error'] <= TOLERANCE and settled.size < ROWS
    return result


def run(scale: Scale, store: Store) -> None:
    store.measure('f_out_of_memory', lambda: measure(scale))
