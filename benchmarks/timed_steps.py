# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Timed steps of the real Trainer with several ways to cut a batch, on a GPU or, as a rehearsal, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from composer import DataSpec, Trainer
from composer.core import Algorithm, Callback, State
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.machine import machine
from benchmarks.record import Row
from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.batch import BatchDict

GIB = 2**30


@dataclass(frozen=True)
class ComputeDevice:
    """``cuda`` or ``cpu``. The methods hide what differs between them."""

    name: Literal['cpu', 'cuda']

    @property
    def is_gpu(self) -> bool:
        return self.name == 'cuda'

    @property
    def precision(self) -> str:
        """Returns the precision of a run. Composer trains only in fp32 on a CPU."""
        return 'amp_bf16' if self.is_gpu else 'fp32'

    def composer_device(self, *, allow_tf32: bool = True) -> Device:
        """Returns the device for ``Trainer(device=...)``."""
        return DeviceGPU(allow_tf32=allow_tf32) if self.is_gpu else DeviceCPU()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Gives unused memory of torch's allocator back to the GPU."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Returns the most bytes that were allocated since :meth:`reset_peak`, or 0 on the CPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def total_bytes(self) -> int:
        """Returns the memory of the GPU. There must be one."""
        return torch.cuda.get_device_properties(0).total_memory

    def report(self) -> Row:
        """Returns the machine and the GPU for a results file."""
        report = machine()
        if self.is_gpu:
            report['gpu'] = torch.cuda.get_device_name()
            report['gpu_gib'] = round(self.total_bytes() / GIB, 1)
            report['cuda'] = torch.version.cuda
        return report


CPU = ComputeDevice('cpu')
GPU = ComputeDevice('cuda')


class Batches(IterableDataset):
    """Batches made before the run. Iterable, because on several ranks Composer asks others for a DistributedSampler."""

    def __init__(self, batches: Sequence[BatchDict]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[BatchDict]:
        return iter(self.batches)


class StepClock(Callback):
    """Measures the seconds of each step, the positions that it computes, and its peak memory on a GPU.

    A step is timed from the end of the step before to its own end. So its time includes counting, splitting, the
    optimizer, logging and all other work of the host. Its peak includes the checks that the algorithm makes before it.
    """

    def __init__(self, device: ComputeDevice = CPU) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.positions: list[int] = []
        self.peak_bytes: list[int] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        self.device.reset_peak()
        self.ended = time.perf_counter()

    def batch_start(self, state: State, logger: Logger) -> None:
        self.positions.append(0)

    def before_forward(self, state: State, logger: Logger) -> None:
        self.positions[-1] += state.batch['input_ids'].numel()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.device.synchronize()
        ended = time.perf_counter()
        self.seconds.append(ended - self.ended)
        self.ended = ended
        self.peak_bytes.append(self.device.peak_bytes())
        self.device.reset_peak()


def chunks(items: Sequence[Any], size: int) -> list[Any]:
    """Cuts a list or a range into parts of this size. The last part may be shorter."""
    parts = []
    for start in range(0, len(items), size):
        parts.append(items[start : start + size])
    return parts


def stock_split(layout: BatchLayout, batch: BatchDict, size: int | float) -> list[BatchDict]:
    """Slices the rows in order, as Composer does. Unlike Composer's own split, it keeps images with their rows."""
    rows = range(layout.num_rows(batch))
    return [layout.select(batch, part) for part in chunks(rows, int(size))]


def collate_split(layout: BatchLayout, batch: BatchDict, size: int | float) -> list[BatchDict]:
    """Pads each microbatch to its own longest row. So does Hugging Face's Trainer, whose loader makes microbatches."""
    rows = []
    for index in range(layout.num_rows(batch)):
        row = layout.select(batch, [index])
        rows.append(layout.trim(row))
    return [layout.concat(part) for part in chunks(rows, int(size))]


def data_of(
    method: str,
    batches: Sequence[BatchDict] | DataLoader,
    layout: BatchLayout,
    slot_tokens: int | None = None,
) -> DataSpec:
    """Returns the data of a run.

    Args:
        method: How batches are cut: `stock`, `collate` (see :func:`collate_split`), `ours` or `packing`.
        batches: Batches, or a loader of them.
        slot_tokens: For `ours` and `packing`, an argument of `token_data_spec`.
    """
    if isinstance(batches, DataLoader):
        loader = batches
    else:
        loader = DataLoader(Batches(batches), batch_size=None)
    if method in ('ours', 'packing'):
        return token_data_spec(loader, layout=layout, packing=method == 'packing', slot_tokens=slot_tokens)
    split = stock_split if method == 'stock' else collate_split
    return data_with_split(loader, partial(split, layout))


def data_with_split(loader: DataLoader, split: Callable | None) -> DataSpec:
    """Returns the data of a run of stock Composer with this function as its split, or with its own one."""
    return DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda batch: len(batch['input_ids']))


def fit(
    model: Any,
    data: DataSpec,
    microbatch: int | str,
    duration: str = '1ba',
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: ComputeDevice = CPU,
    allow_tf32: bool = True,
    precision: str | None = None,
    **settings: Any,
) -> None:
    """Trains a model of Transformers with Composer.

    Args:
        microbatch: Rows of a microbatch, or 'auto'. For `ours` and `packing` it is an amount of memory: as many rows of
            `slot_tokens`, by default the width of the device batch. A microbatch of shorter rows may have more of them.
        optimizer: None: the learning rate is 0, so that the weights do not change.
        precision: None: the usual one of the device.
        settings: Other arguments of Composer's Trainer.
    """
    wrapped = HuggingFaceModel(model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped,
        train_dataloader=data,
        optimizers=optimizer or torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration=duration,
        device=device.composer_device(allow_tf32=allow_tf32),
        precision=precision or device.precision,
        device_train_microbatch_size=microbatch,
        progress_bar=False,
        **settings,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
        # Composer keeps the state of every run until the process ends. It is emptied, so that the next run has memory.
        for name in ('model', 'batch', 'outputs', 'loss'):
            setattr(trainer.state, name, None)
        for name in ('algorithms', 'callbacks', 'optimizers', 'schedulers'):
            setattr(trainer.state, name, [])
        wrapped.zero_grad(set_to_none=True)
        device.empty_cache()


def time_steps(
    method: str,
    model: Any,
    batches: Sequence[BatchDict],
    microbatch: int,
    *,
    algorithms: Sequence[Algorithm],
    num_warmup: int = 1,
    device: ComputeDevice = CPU,
    slot_tokens: int | None = None,
) -> StepClock:
    """Trains a step on each batch and times it. Drops the first `num_warmup` steps, because they pay for checks.

    The other arguments are those of :func:`data_of` and :func:`fit`.
    """
    clock = StepClock(device)
    fit(
        model,
        data_of(method, batches, BatchLayout.for_model(model), slot_tokens),
        microbatch,
        f'{len(batches)}ba',
        device=device,
        algorithms=algorithms,
        callbacks=[clock],
    )
    for figures in (clock.seconds, clock.positions, clock.peak_bytes):
        del figures[:num_warmup]
    return clock
