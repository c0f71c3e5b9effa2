# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Timed steps of the real Trainer with several ways to cut a batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer import DataSpec, Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.device import CPU, ComputeDevice
from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.layout import describe
from composer_tokacc.planning import CostModel

METHODS = {
    'stock': 'stock Composer',
    'collate': 'Hugging Face style, padded per microbatch',
    'ours': 'token_data_spec',
    'packing': 'token_data_spec, packing=True',
}
Row = dict[str, Any]


class Batches(IterableDataset):
    """Batches that were made before."""

    def __init__(self, batches: Sequence[Row]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Row]:
        return iter(self.batches)


class StepClock(Callback):
    """Measures the seconds of each step and the positions that it computes.

    ``seconds`` go from the batch on the CPU to the gradients, with the split. ``whole`` goes from the end of one step
    to the end of the next: it also has counting, optimizer, logging and all other work of the host.
    """

    def __init__(self, device: ComputeDevice = CPU) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.whole: list[float] = []
        self.microbatches: list[int] = []
        self.positions: list[int] = []
        self.largest = 0

    def forget_first(self) -> None:
        """Drops the first step, which pays for checks that a run makes once."""
        for figures in (
            self.seconds,
            self.whole,
            self.microbatches,
            self.positions,
        ):
            del figures[0]

    def fit_start(self, state: State, logger: Logger) -> None:
        self.ended = time.perf_counter()

    def batch_start(self, state: State, logger: Logger) -> None:
        self.device.synchronize()
        self.positions.append(0)
        self.microbatches.append(0)
        self.started = time.perf_counter()

    def before_forward(self, state: State, logger: Logger) -> None:
        size = state.batch['input_ids'].numel()
        self.positions[-1] += size
        self.microbatches[-1] += 1
        self.largest = max(self.largest, size)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.device.synchronize()
        self.seconds.append(time.perf_counter() - self.started)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.device.synchronize()
        ended = time.perf_counter()
        self.whole.append(ended - self.ended)
        self.ended = ended


@dataclass(frozen=True)
class StockSplit:
    """Slices the rows in order, as Composer does. Unlike Composer's own split it keeps images with their rows."""

    layout: BatchLayout

    def __call__(self, batch: Row, size: int | float) -> list[Row]:
        num_rows = self.layout.num_rows(batch)
        starts = range(0, num_rows, int(size))
        return [self.layout.select(batch, range(start, min(start + int(size), num_rows))) for start in starts]


@dataclass(frozen=True)
class CollateSplit:
    """Pads each microbatch by itself, as a loader with batches of `size` does for gradient accumulation."""

    layout: BatchLayout

    def __call__(self, batch: Row, size: int | float) -> list[Row]:
        rows = [self.layout.trim(self.layout.select(batch, [row])) for row in range(self.layout.num_rows(batch))]
        return [self.layout.concat(rows[start : start + int(size)]) for start in range(0, len(rows), int(size))]


def data_of(
    method: str,
    batches: Sequence[Row] | DataLoader,
    layout: BatchLayout,
    cost: CostModel | None = None,
    slot_tokens: int | None = None,
) -> DataSpec:
    """Returns batches, or a loader, with one of the :data:`METHODS` to cut them."""
    loader = batches if isinstance(batches, DataLoader) else DataLoader(Batches(batches), batch_size=None)
    if method in ('ours', 'packing'):
        return token_data_spec(
            loader,
            layout=layout,
            packing=method == 'packing',
            cost=cost,
            slot_tokens=slot_tokens,
        )
    split = StockSplit(layout) if method == 'stock' else CollateSplit(layout)
    return DataSpec(
        loader,
        split_batch=split,
        get_num_samples_in_batch=lambda batch: len(batch['input_ids']),
    )


def fit(
    model: Any,
    data: DataSpec,
    microbatch: int | str,
    *,
    num_steps: int,
    device: ComputeDevice = CPU,
    precision: str | None = None,
    allow_tf32: bool = True,
    algorithms: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
) -> Trainer:
    """Runs steps of a Trainer at learning rate 0, so that the weights stay."""
    wrapped = HuggingFaceModel(model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped,
        train_dataloader=data,
        optimizers=torch.optim.SGD(wrapped.parameters(), lr=0.0),
        max_duration=f'{num_steps}ba',
        device=device.composer(allow_tf32=allow_tf32),
        precision=precision or device.precision,
        device_train_microbatch_size=microbatch,
        algorithms=list(algorithms),
        callbacks=list(callbacks),
        progress_bar=False,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
        release(trainer)
        wrapped.zero_grad(set_to_none=True)
    return trainer


def release(trainer: Trainer) -> None:
    """Drops the last batch and outputs. Composer keeps every trainer until the process ends, with all of this."""
    for name in ('batch', 'outputs', 'loss'):
        setattr(trainer.state, name, None)


def timed(
    method: str,
    model: Any,
    batches: Sequence[Row],
    microbatch: int,
    cost: CostModel | None = None,
    *,
    device: ComputeDevice = CPU,
    slot_tokens: int | None = None,
) -> StepClock:
    """Times a step of each batch, after a step of a few rows that pays for the check of the first batch.

    TokenAccumulation is on for all methods, so that only the cut differs.

    ``microbatch`` is the number of rows that a microbatch may hold at the width of the device batch, and ``cost`` are
    the prices of the planner.
    """
    clock = StepClock(device)
    layout = BatchLayout.for_model(model)
    lengths = describe(layout, batches[0]).lengths
    rows_by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    first_rows = sorted({*rows_by_length[:2], *rows_by_length[-2:]})
    first_batch = layout.select(batches[0], first_rows)
    fit(
        model,
        data_of(method, [first_batch, *batches], layout, cost, slot_tokens),
        microbatch,
        num_steps=1 + len(batches),
        device=device,
        algorithms=[TokenAccumulation(loss_tokens='causal', check_loss=False)],
        callbacks=[clock],
    )
    clock.forget_first()
    return clock
