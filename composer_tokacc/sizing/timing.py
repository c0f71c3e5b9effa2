# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Times a few real steps, so that a plan can speak of seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.sizing.memory_model import non_negative_fit

__all__ = ['MicrobatchTimer', 'fit_cost']

LATE = 1.5
"""Times over the fit from which a microbatch was held up by something else."""


@dataclass(eq=False)  # Composer keeps callbacks in dictionaries
class MicrobatchTimer(Callback):
    """Notes rows, width, image tokens and seconds of every microbatch, and what a step takes besides.

    Args:
        layout: Of the model; None: of text alone.
        hidden_size: Of the language model.
        skip: Steps at the start that are not noted: caches warm up.
    """

    layout: BatchLayout | None = None
    hidden_size: int = 4096
    skip: int = 2
    rows: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    """Seconds of each step outside its microbatches: data, optimizer, logging."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Ends the step before."""
        now = self._now()
        if int(state.timestamp.batch) > self.skip:
            self.outside.append(now - self._step_started - self._inside)
        self._step_started, self._inside = now, 0.0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Starts the first microbatch."""
        self._started = self._now()

    def before_forward(self, state: State, logger: Logger) -> None:
        """Notes the shape."""
        image_tokens = 0 if self.layout is None else sum(self.layout.image_tokens_per_row(state.batch))
        self._shape = (*state.batch['input_ids'].shape, image_tokens)

    def after_backward(self, state: State, logger: Logger) -> None:
        """Ends a microbatch and starts the next."""
        now = self._now()
        seconds, self._started = now - self._started, now
        self._inside += seconds
        if int(state.timestamp.batch) >= self.skip:
            for column, value in zip((self.rows, self.widths, self.image_tokens), self._shape, strict=True):
                column.append(value)
            self.seconds.append(seconds)

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


def fit_cost(timers: Sequence[MicrobatchTimer], *, quadratic: float) -> tuple[CostModel, float]:
    """The cost model of timed microbatches, and the median of the seconds of a step outside them.

    A few noisy times do not tell the quadratic term from the linear one, so it is given. A busy machine makes single
    microbatches late: those that took half as long again as the fit says are left out, and the rest fitted again.

    Args:
        timers: Of runs with microbatches of many shapes.
        quadratic: Width at which attention costs as much as the dense layers: six times the hidden size.

    Raises:
        ValueError: Nothing was timed, or times do not grow with tokens.
    """

    def joined(name: str) -> np.ndarray:
        return np.array([value for timer in timers for value in getattr(timer, name)], dtype=np.float64)

    rows, widths, images, seconds = (joined(name) for name in ('rows', 'widths', 'image_tokens', 'seconds'))
    if len(seconds) == 0:
        raise ValueError('`timers` must hold at least one microbatch, got: none. Run more steps.')
    columns = np.stack([rows * (widths + widths**2 / quadratic), images, np.ones_like(rows)], axis=1)
    solution = np.zeros(3)
    kept = np.ones(len(seconds), dtype=bool)
    for _ in range(3):
        solution = non_negative_fit(columns[kept] / seconds[kept, None], np.ones(int(kept.sum())))
        kept = seconds <= LATE * np.maximum(columns @ solution, 1e-12)
        if not kept.any():
            break
    per_token, per_image, per_launch = solution.tolist()
    if per_token <= 0:
        raise ValueError('Measured times must grow with the number of tokens, got: none that do. Time more steps.')
    cost = CostModel(
        quadratic=quadratic,
        vision_per_token=per_image / per_token,
        launch=per_launch / per_token,
        seconds_per_token=per_token,
    )
    outside = joined('outside')
    return cost, float(np.median(outside)) if len(outside) else 0.0
