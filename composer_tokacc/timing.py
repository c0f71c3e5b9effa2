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

from composer_tokacc.planning import CostModel

__all__ = ['MicrobatchTimer', 'fit_cost']


@dataclass
class MicrobatchTimer(Callback):
    """Notes rows, width, image tokens and seconds of every microbatch, and what a step takes besides.

    Args:
        image_token_id: Placeholder of images; None without images.
        skip: Steps at the start that are not noted: caches warm up.
    """

    image_token_id: int | None = None
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
        ids = state.batch['input_ids']
        is_image = 0 if self.image_token_id is None else int((ids == self.image_token_id).sum())
        self._shape = (*ids.shape, is_image)

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


def fit_cost(timers: Sequence[MicrobatchTimer]) -> tuple[CostModel, float]:
    """The cost model of timed microbatches, and the median of the seconds of a step outside them.

    Raises:
        ValueError: Nothing was timed, or times do not grow with tokens.
    """

    def joined(name: str) -> list:
        return [value for timer in timers for value in getattr(timer, name)]

    cost = CostModel.fit(joined('rows'), joined('widths'), joined('seconds'), joined('image_tokens'))
    outside = joined('outside')
    return cost, float(np.median(outside)) if outside else 0.0
