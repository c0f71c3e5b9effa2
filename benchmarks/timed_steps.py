# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps of the real Trainer with the rivals' ways to cut a batch, timed; the bound of them all, and fitted prices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    def __init__(self, batches: Sequence[Row]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class StepClock(Callback):
    """Seconds of each step, and what was computed.

    ``seconds`` go from the batch on the CPU to whole gradients, splitting included; ``whole`` from the end of one step
    to the end of the next, with counting, optimizer, logging and all that the host does between them.
    """

    def __init__(self, device: ComputeDevice = CPU) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.whole: list[float] = []
        self.microbatches: list[int] = []
        self.positions: list[int] = []
        self.largest = 0

    def forget_first(self) -> None:
        """Leaves out the first step, which pays for checks that a run makes once."""
        for figures in (self.seconds, self.whole, self.microbatches, self.positions):
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


def split_of(method: str, layout: BatchLayout) -> Callable[[Row, int | float], list[Row]]:
    """The rivals, each from its description; every one keeps image rows with their own."""

    def chunks(order: Sequence[Any], size: int) -> list[Sequence[Any]]:
        return [order[start : start + size] for start in range(0, len(order), size)]

    def stock(batch: Row, size: int | float) -> list[Row]:
        return [layout.select(batch, rows) for rows in chunks(range(layout.num_rows(batch)), int(size))]

    def collate(batch: Row, size: int | float) -> list[Row]:
        """What a loader with batches of `size` hands to gradient accumulation: rows joined afresh."""
        rows = [layout.trim(layout.select(batch, [row])) for row in range(layout.num_rows(batch))]
        return [layout.concat(part) for part in chunks(rows, int(size))]

    return {'stock': stock, 'collate': collate}[method]


def data_of(
    method: str,
    batches: Sequence[Row] | DataLoader,
    layout: BatchLayout,
    cost: CostModel | None = None,
    slot_tokens: int | None = None,
) -> DataSpec:
    """Ready batches, or a loader of some, behind a way to cut them."""
    loader = batches if isinstance(batches, DataLoader) else DataLoader(Batches(batches), batch_size=None)
    if method in ('ours', 'packing'):
        return token_data_spec(loader, layout=layout, packing=method == 'packing', cost=cost, slot_tokens=slot_tokens)
    return DataSpec(
        loader, split_batch=split_of(method, layout), get_num_samples_in_batch=lambda batch: len(batch['input_ids'])
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
    **trainer_arguments: Any,
) -> Trainer:
    """Steps of a Trainer at learning rate 0: gradients are computed, weights stay."""
    wrapped = HuggingFaceModel(model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped, train_dataloader=data, optimizers=torch.optim.SGD(wrapped.parameters(), lr=0.0),
        max_duration=f'{num_steps}ba', device=device.composer(allow_tf32=allow_tf32),
        precision=precision or device.precision, device_train_microbatch_size=microbatch, algorithms=list(algorithms),
        callbacks=list(callbacks), progress_bar=False, **trainer_arguments,
    )  # fmt: skip
    try:
        trainer.fit()
    finally:
        trainer.close()
        # Composer keeps every trainer until the process ends, and each its last batch, outputs and gradients.
        for name in ('batch', 'outputs', 'loss'):
            setattr(trainer.state, name, None)
        wrapped.zero_grad(set_to_none=True)
    return trainer


def timed(
    method: str,
    model: Any,
    batches: Sequence[Row],
    microbatch: int,
    cost: CostModel | None = None,
    *,
    device: ComputeDevice = CPU,
    slot_tokens: int | None = None,
    exact: bool = True,
) -> StepClock:
    """All steps through a Trainer, after one of a few rows that pays for the first-batch check.

    Args:
        method: One of :data:`METHODS`.
        model: Transformers model.
        batches: Device batches, one a step.
        microbatch: Rows that a microbatch may hold at the width of the device batch.
        cost: Prices of the planner.
        device: Where.
        slot_tokens: See :func:`.token_data_spec`.
        exact: Whether the algorithm is on; where it is on for all methods, only the cut differs.
    """
    clock = StepClock(device)
    algorithms = [TokenAccumulation(loss_tokens='causal', check_loss=False)] if exact else []
    layout = BatchLayout.for_model(model)
    by_length = sorted(range(layout.num_rows(batches[0])), key=describe(layout, batches[0]).lengths.__getitem__)
    few = layout.select(batches[0], sorted({*by_length[:2], *by_length[-2:]}))
    data = data_of(method, [few, *batches], layout, cost, slot_tokens)
    fit(
        model, data, microbatch, num_steps=1 + len(batches), device=device, algorithms=algorithms, callbacks=[clock]
    )  # fmt: skip
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
    device: ComputeDevice = CPU,
    num_widths: int = 7,
) -> list[tuple[int, int, float]]:
    """Rows, width and seconds of microbatches of equal rows that fill the memory, at widths as the set has them.

    Args:
        lengths: Of the set.
        model: Transformers model.
        microbatch: Rows of ``width`` tokens that fill the memory.
        width: In tokens.
        num_microbatches: Timed together.
        joined: Whether all their rows make one microbatch.
        device: Where.
        num_widths: Widths to time.
    """
    layout, found = BatchLayout.for_model(model), []
    widths = np.geomspace(max(lengths.min(), 2), lengths.max(), num_widths).astype(int)
    for length in np.unique(widths).tolist():
        count = max(microbatch * width // length, 1)
        batch = layout.concat(make_rows([length] * count * num_microbatches, seed=1, config=model.config))
        if joined:
            count *= num_microbatches
        # On a GPU the first step of a shape pays for its memory.
        batches = [batch] * (2 if device.is_gpu else 1)
        clock = timed('stock', model, batches, count, device=device, exact=not device.is_gpu)
        seconds = clock.whole if device.is_gpu else clock.seconds
        found.append((count, length, seconds[-1] / (1 if joined else num_microbatches)))
    return found


def bound_seconds(lengths: np.ndarray, times: Sequence[tuple[int, int, float]]) -> float:
    """Seconds for these rows were each computed among rows of its own width, in microbatches of the same memory."""
    counts, widths, seconds = np.array(times).T
    # Seconds per token vary little with the width, so interpolate those.
    return float(np.sum(np.interp(lengths, widths, seconds / counts / widths) * lengths))


def fit_cost_model(num_rows: Sequence[int], widths: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fit time per token, per token squared and per launch by least squares of the relative errors.

    Args:
        num_rows: Rows of each timed microbatch.
        widths: Their padded widths in tokens.
        seconds: Their measured times, positive.

    Raises:
        ValueError: Times do not grow with the number of tokens.
    """
    n, w, t = (np.asarray(values, dtype=np.float64) for values in (num_rows, widths, seconds))
    terms = np.stack([n * w, n * w * w, np.ones_like(n)], axis=1) / t[:, None]
    scale = terms.max(axis=0)  # columns differ by many orders of magnitude
    per_token, per_square, per_launch = (nnls(terms / scale, np.ones_like(t))[0] / scale).tolist()
    if per_token <= 0:
        raise ValueError('Measured times must grow with the number of tokens. Time wider or longer microbatches.')
    return CostModel(
        quadratic=per_token / per_square if per_square > 0 else float('inf'),
        launch=per_launch / per_token,
        seconds_per_token=per_token,
    )
