# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Seconds of real microbatches, and the cost model that is fitted to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_tokacc.compat import tree_iter
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import vision_modules
from composer_tokacc.planning import CostModel
from composer_tokacc.sizing.memory_model import relative_fit

LATE = 1.5
"""Times over the fit from which a microbatch was held up by something else."""


@dataclass(eq=False)  # Composer keeps callbacks in dictionaries
class MicrobatchTimer(Callback):
    """Notes rows, width, image tokens and seconds of every microbatch, and what a step takes besides.

    Args:
        layout: Of the model; None: of text alone.
        hidden_size: Of the language model.
        patches: Patches that the vision encoder computes for a batch of one row; None: it is not timed.
        skip: Steps at the start that are not noted: caches warm up.
    """

    layout: BatchLayout | None = None
    hidden_size: int = 4096
    patches: Callable[[Mapping[str, Any]], int] | None = None
    skip: int = 2
    rows: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    row_patches: list[list[int]] = field(default_factory=list)
    """Of each row of a microbatch."""
    vision_seconds: list[float] = field(default_factory=list)
    """Of ``seconds`` those in the vision encoder, forward and backward."""
    seconds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    """Seconds of each step outside its microbatches: data, optimizer, logging."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Watches the vision encoder, its projector and what lies between them."""
        self._depth, self._in_encoder, self._first_gradient = 0, 0.0, None  # encoders may run before the first step
        for module in vision_modules(state.model) if self.patches is not None else ():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered = self._now()

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._in_encoder += self._now() - self._entered
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._gradient_arrives)

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        # Images come first in the forward pass: when the gradient is back at what they gave, the encoder alone is left.
        if self._first_gradient is None:
            self._first_gradient = self._now()

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
        before, batch, layout = self._now(), state.batch, self.layout
        image_tokens = 0 if layout is None else sum(layout.image_tokens_per_row(batch))
        patches: list[int] = []
        if layout is not None and self.patches is not None:
            rows = range(layout.num_rows(batch))
            patches = [self.patches(one) for one in layout.split(batch, [[row] for row in rows])]
        self._sizes = (*batch['input_ids'].shape, image_tokens, patches)
        self._in_encoder, self._first_gradient = 0.0, None
        spent = self._now() - before  # on counting, which is no part of the run
        self._started += spent
        self._step_started += spent

    def after_backward(self, state: State, logger: Logger) -> None:
        """Ends a microbatch and starts the next."""
        now = self._now()
        seconds, self._started = now - self._started, now
        self._inside += seconds
        if int(state.timestamp.batch) < self.skip:
            return
        encoder = self._in_encoder + (0.0 if self._first_gradient is None else now - self._first_gradient)
        columns: list[Any] = [self.rows, self.widths, self.image_tokens, self.row_patches]
        columns += [self.vision_seconds, self.seconds]
        for column, value in zip(columns, (*self._sizes, encoder, seconds), strict=True):
            column.append(value)

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


def fit_cost(timers: Sequence[MicrobatchTimer], *, quadratic: float) -> tuple[CostModel, float]:
    """Returns the cost model of timed microbatches, and the median of the seconds of a step outside them.

    Where the vision encoder was timed by itself its cost is ``a * patches^2 + b * patches + c`` an image, and the rest
    of a microbatch that of its text; else images cost by their tokens. A few noisy times do not tell the quadratic term
    of the text from the linear one, so it is given.

    Args:
        timers: Of runs with microbatches of many shapes.
        quadratic: Width at which attention costs as much as the dense layers: six times the hidden size.

    Raises:
        ValueError: Nothing was timed, or times do not grow with tokens.
    """

    def joined(name: str) -> np.ndarray:
        return np.array([value for timer in timers for value in getattr(timer, name)], dtype=np.float64)

    names = ('rows', 'widths', 'image_tokens', 'seconds', 'vision_seconds')
    rows, widths, images, seconds, vision = map(joined, names)
    if len(seconds) == 0:
        raise ValueError('`timers` must hold at least one microbatch, got: none. Run more steps.')
    # Of each microbatch: squares of the patches of its rows, patches, and rows with any.
    row_patches = [np.array(patches) for timer in timers for patches in timer.row_patches]
    powers = np.array([[(one**2).sum(), one.sum(), (one > 0).sum()] for one in row_patches]).reshape(-1, 3)
    has_images = powers[:, 1] > 0
    per_square = per_patch = per_image = 0.0
    if has_images.any() and vision[has_images].all():
        per_square, per_patch, per_image = _fit(powers[has_images], vision[has_images]).tolist()
        seconds, images = seconds - vision, np.zeros_like(images)
    features = np.stack([rows * (widths + widths**2 / quadratic), images, np.ones_like(rows)], axis=1)
    per_token, per_image_token, per_microbatch = _fit(features, seconds).tolist()
    if per_token <= 0:
        raise ValueError('Measured times must grow with the number of tokens, got: none that do. Time more steps.')
    cost = CostModel(
        quadratic=quadratic,
        vision_per_token=per_image_token / per_token,
        vision_per_image=per_image / per_token,
        vision_per_patch=per_patch / per_token,
        vision_per_square=per_square / per_token,
        launch=per_microbatch / per_token,
        seconds_per_token=per_token,
    )
    outside = joined('outside')
    return cost, float(np.median(outside)) if len(outside) else 0.0


def _fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns non-negative least squares of relative errors, (terms,)."""
    # A busy machine makes single microbatches late: they are left out, and the rest is fitted again.
    kept, solution = np.ones(len(seconds), dtype=bool), np.zeros(features.shape[1])
    for _ in range(3):
        if kept.any():
            solution = relative_fit(features[kept], seconds[kept])
        kept = seconds <= LATE * np.maximum(features @ solution, 1e-12)
    return solution
