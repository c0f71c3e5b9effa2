# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Timed steps of the real Trainer with several ways to cut a batch, the bound of all ways, and fitted prices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from composer import DataSpec, Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from scipy.optimize import nnls
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.device import CPU, ComputeDevice
from benchmarks.small_llava import make_rows
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


def equal_widths(
    lengths: np.ndarray,
    model: Any,
    microbatch: int,
    width: int,
    *,
    num_microbatches: int = 1,
    joined: bool = False,
) -> list[tuple[int, int, float]]:
    """Times microbatches of equal rows that fill the memory, at widths between the shortest and longest of a set.

    Args:
        lengths: The lengths of the set.
        model: A model of Transformers.
        microbatch: The number of rows of ``width`` tokens that fill the memory.
        width: In tokens.
        num_microbatches: How many microbatches are timed together.
        joined: Whether all their rows make one microbatch.

    Returns:
        Rows, width and seconds of each microbatch.
    """
    layout = BatchLayout.for_model(model)
    times = []
    widths = np.geomspace(max(lengths.min(), 2), lengths.max(), 7).astype(int)
    for length in np.unique(widths).tolist():
        count = max(microbatch * width // length, 1)
        batch = layout.concat(make_rows([length] * count * num_microbatches, seed=1, config=model.config))
        rows = count * num_microbatches if joined else count
        seconds = timed('stock', model, [batch], rows).seconds[-1]
        times.append((rows, length, seconds if joined else seconds / num_microbatches))
    return times


def bound_seconds(lengths: np.ndarray, times: Sequence[tuple[int, int, float]]) -> float:
    """Returns the seconds of these rows if each were computed among rows of its own width, in the same memory."""
    counts, widths, seconds = np.array(times).T
    # Seconds per token vary little with the width, so these are interpolated.
    return float(np.sum(np.interp(lengths, widths, seconds / counts / widths) * lengths))


def fit_cost_model(num_rows: Sequence[int], widths: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fits the time per token, per token squared and per launch by least squares of the relative errors.

    Args:
        num_rows: Rows of each timed microbatch.
        widths: Their padded widths in tokens.
        seconds: Their measured times, positive.

    Raises:
        ValueError: The times do not grow with the number of tokens.
    """
    rows = np.asarray(num_rows, dtype=np.float64)
    width = np.asarray(widths, dtype=np.float64)
    measured = np.asarray(seconds, dtype=np.float64)
    terms = np.stack([rows * width, rows * width**2, np.ones_like(rows)], axis=1) / measured[:, None]
    # The columns differ by many orders of magnitude.
    scale = terms.max(axis=0)
    solution, _ = nnls(terms / scale, np.ones_like(measured))
    per_token, per_square, per_launch = (solution / scale).tolist()
    if per_token <= 0:
        raise ValueError('Measured times must grow with the number of tokens. Time wider or longer microbatches.')
    return CostModel(
        quadratic=per_token / per_square if per_square > 0 else float('inf'),
        launch=per_launch / per_token,
        seconds_per_token=per_token,
    )
