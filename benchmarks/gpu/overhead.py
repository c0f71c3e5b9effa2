# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(c) What the algorithm costs: steps with and without it, host syncs by line, the idle gap of the GPU at its read."""

from __future__ import annotations

import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import composer_tokacc
from benchmarks.gpu.scale import Scale, build_llava
from benchmarks.gpu.store import Store
from benchmarks.small_llava import make_rows
from benchmarks.timed_steps import Row, data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation

PACKAGE = Path(composer_tokacc.__file__).parent

LIMIT = 0.005
READ = 'tokacc.read'
MICROBATCHES = (2, 8)


class TimedAlgorithm(TokenAccumulation):
    """Host seconds inside each event; that of AFTER_TRAIN_BATCH is mostly the wait for the gradients."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.host_seconds: Counter[str] = Counter()

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        started = time.perf_counter()
        with record_function(READ) if event == Event.AFTER_TRAIN_BATCH else record_function(f'tokacc.{event.value}'):
            super().apply(event, state, logger)
        self.host_seconds[event.value] += time.perf_counter() - started


class MarkedEnd(Callback):
    """Marks the place of the read where there is no algorithm."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        with record_function(READ):
            pass


class UnsynchronizedClock(Callback):
    """Seconds between the ends of steps, without any wait of its own."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


class OneStep(Callback):
    """Runs a context manager around the second step."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.step = manager, 0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self.step += 1
        if self.step == 2:
            self.manager.__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.step == 2:
            self.manager.__exit__(None, None, None)


def _line(stack: Sequence[traceback.FrameSummary]) -> str:
    ours = [frame for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)]
    others = [
        frame for frame in stack if '/torch/' not in frame.filename and not frame.filename.endswith('warnings.py')
    ]
    frame = (ours or others or stack)[-1]
    path = Path(frame.filename)
    name = path.relative_to(PACKAGE.parent) if ours else Path(*path.parts[-2:])
    return f'{name}:{frame.lineno}'


@contextmanager
def syncs_by_line(found: Counter[str]) -> Iterator[None]:
    """Counts calls that wait for the GPU, by the innermost line of ours that made them, or else of whoever did."""
    kept = warnings.showwarning

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if 'synchronizing' not in str(message):
            return
        found[_line(traceback.extract_stack()[:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode('warn')
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode('default')
            warnings.showwarning = kept


def steps(
    model: Any, batch: Row, microbatches: int, algorithm: Any, scale: Scale, *callbacks: Callback, num_steps: int = 2
) -> None:
    """Steps of the same batch with or without the algorithm; the cut is the same."""
    size = len(batch['input_ids']) // microbatches
    data = data_of('ours', [batch] * num_steps, BatchLayout.for_model(model))
    algorithms = [] if algorithm is None else [algorithm]
    fit(model, data, size, num_steps=num_steps, device=scale.device, algorithms=algorithms, callbacks=callbacks)


def idle_gap(events: Any) -> dict[str, float] | None:
    """Milliseconds without any kernel around the read: last end before the host has read to first start after."""
    marks = [one.time_range for one in events if one.name == READ and one.device_type == DeviceType.CPU]
    kernels = [one.time_range for one in events if one.device_type == DeviceType.CUDA and not _is_annotation(one)]
    if not marks or not kernels:
        return None
    read = marks[-1].end
    before = max((kernel.end for kernel in kernels if kernel.start <= read), default=read)
    after = min((kernel.start for kernel in kernels if kernel.start > read), default=None)
    busy = sum(kernel.end - kernel.start for kernel in kernels) / 1e3
    # Without a read the host runs ahead of the device, and kernels go on all the while.
    gap = max(after - max(before, 0), 0) / 1e3 if after is not None and before <= after else 0.0
    return {'gap_ms': gap, 'kernels_ms': busy, 'kernels': len(kernels)}


def _is_annotation(event: Any) -> bool:
    """The profiler repeats `record_function` on the device's line, where it spans kernels and the time between them."""
    return getattr(event, 'is_user_annotation', False) or event.name.startswith(
        ('tokacc', 'Optimizer.', 'ProfilerStep')
    )


def measure(scale: Scale) -> dict[str, Any]:
    """Both ways in turn, several times; then one step of each under the profiler, and one under the sync watch."""
    config, device = scale.config(), scale.device
    model = build_llava(config, device, checkpointing=scale.checkpointing)
    rows = max(MICROBATCHES)
    width = max(scale.microbatch * scale.longest // rows, 1)  # half of them in one microbatch fit
    # Equal rows: both ways make the same microbatches, and what differs is the algorithm.
    batch = BatchLayout.for_model(config).concat(make_rows([width] * rows, 0, config))
    result: dict[str, Any] = {'rows': rows, 'width': width}
    for microbatches in MICROBATCHES:
        seconds: dict[str, list[float]] = {'with': [], 'without': []}
        host: list[Counter[str]] = []
        for _ in range(scale.rounds):
            for way in seconds:
                clock = UnsynchronizedClock()
                algorithm = _algorithm(way)
                steps(model, batch, microbatches, algorithm, scale, clock, num_steps=scale.steps_a_round)
                seconds[way] += clock.seconds
                if algorithm is not None:
                    host.append(algorithm.host_seconds)
        found: dict[str, Any] = {f'step_{way}_ms': statistics.median(s) * 1e3 for way, s in seconds.items()}
        found['share'] = found['step_with_ms'] / found['step_without_ms'] - 1
        found['spread'] = {way: [min(s) * 1e3, max(s) * 1e3] for way, s in seconds.items()}
        found['host_ms_by_event'] = {
            event: statistics.median(one[event] for one in host) / scale.steps_a_round * 1e3 for event in host[0]
        }
        found['profile'] = {way: profiled(model, batch, microbatches, way, scale) for way in seconds}
        if device.is_gpu:
            found['syncs'] = {way: watched(model, batch, microbatches, way, scale) for way in seconds}
        result[f'{microbatches} microbatches'] = found
    result['holds'] = all(result[f'{count} microbatches']['share'] <= LIMIT for count in MICROBATCHES)
    if device.is_gpu:
        few, many = (_ours(result[f'{count} microbatches']['syncs']['with']) for count in MICROBATCHES)
        result['syncs_of_ours_a_step'], result['syncs_of_ours_a_microbatch'] = (
            few,
            (many - few) / (MICROBATCHES[1] - MICROBATCHES[0]),
        )
        result['holds'] = result['holds'] and many == few
    return result


def _algorithm(way: str) -> TimedAlgorithm | None:
    return TimedAlgorithm(loss_tokens='causal', check_loss=False) if way == 'with' else None


def _ours(syncs: dict[str, int]) -> int:
    return sum(count for line, count in syncs.items() if line.startswith(f'{PACKAGE.name}/'))


def profiled(model: Any, batch: Row, microbatches: int, way: str, scale: Scale) -> dict[str, Any]:
    """Kernels and the idle gap at the read, of one step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if scale.device.is_gpu else [])]
    profiler = profile(activities=activities)
    steps(
        model, batch, microbatches, _algorithm(way), scale, *([] if way == 'with' else [MarkedEnd()]), OneStep(profiler)
    )
    events = profiler.events() or []
    calls = Counter(one.name for one in events)
    waits = {
        name: count
        for name, count in calls.items()
        if 'Synchronize' in name or name in ('aten::item', 'aten::_local_scalar_dense')
    }
    return {'waits': waits, 'read': idle_gap(events)}


def watched(model: Any, batch: Row, microbatches: int, way: str, scale: Scale) -> dict[str, int]:
    """Lines that waited for the GPU in one step."""
    found: Counter[str] = Counter()
    steps(model, batch, microbatches, _algorithm(way), scale, OneStep(syncs_by_line(found)))
    return dict(found.most_common())


def run(scale: Scale, store: Store) -> None:
    store.measure('c_overhead', lambda: measure(scale))
