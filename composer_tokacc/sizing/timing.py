# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Times real microbatches, and fits a cost model to the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_tokacc.batch import Batch
from composer_tokacc.compat import tree_iter
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import media_modules
from composer_tokacc.planning import CostModel
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sizing.memory_model import relative_fit


class TimedMicrobatch(NamedTuple):
    """Sizes and seconds of a microbatch."""

    rows: int
    width: int
    image_tokens: int
    seconds: float
    vision_seconds: float = 0.0
    """The part of ``seconds`` in the vision encoder, forward and backward."""
    patches: Sequence[int] = ()
    """Patches of each row."""


@dataclass(eq=False)  # Composer keeps callbacks in dictionaries
class MicrobatchTimer(Callback):
    """Records sizes and seconds of every microbatch, and the other seconds of a step.

    A microbatch begins where the previous one ended, after its backward pass. The first one begins at
    ``before_train_batch``. The rest of the step is outside of microbatches.

    Args:
        layout: Layout of the model's batches. None: a text model.
        hidden_size: Hidden size of the language model. The timer only keeps it, for the argument `quadratic` of
            :func:`fit_cost`.
        patches: Function that counts the patches that the vision encoder computes for a batch of one row. None: the
            encoder is not timed.
        skip: Number of first steps of a fit that are not recorded, because caches warm up.
    """

    layout: BatchLayout | None = None
    hidden_size: int = 4096
    patches: Callable[[Batch], int] | None = None
    skip: int = 2
    microbatches: list[TimedMicrobatch] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    """Seconds of each step outside of its microbatches: data, optimizer, logging. The last step of a fit is missing."""
    # Of the present step and microbatch, see the events below.
    _first_recorded_step: int = field(default=0, init=False, repr=False)
    _step_started: float = field(default=0.0, init=False, repr=False)
    _seconds_in_microbatches: float = field(default=0.0, init=False, repr=False)
    _microbatch_started: float = field(default=0.0, init=False, repr=False)
    _shape: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    """Rows and width of the microbatch."""
    _num_image_tokens: int = field(default=0, init=False, repr=False)
    _row_patches: list[int] = field(default_factory=list, init=False, repr=False)
    """Patches of each row."""
    _num_running_encoders: int = field(default=0, init=False, repr=False)
    """More than one if an encoder is part of another."""
    _encoder_started: float = field(default=0.0, init=False, repr=False)
    _encoder_seconds: float = field(default=0.0, init=False, repr=False)
    """Seconds of the forward pass in encoders."""
    _gradient_arrived: float | None = field(default=None, init=False, repr=False)
    """Time at which the gradient reached the output of the encoder."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Resets the timer, and puts hooks on encoders and projectors if there is a function `patches`."""
        # A resumed run does not begin with step 0.
        self._first_recorded_step = int(state.timestamp.batch) + self.skip
        self._num_running_encoders = 0
        self._encoder_seconds = 0.0
        self._gradient_arrived = None
        if self.patches is None:
            return
        for module in media_modules(state.model):
            module.register_forward_pre_hook(self._enter_encoder)
            module.register_forward_hook(self._leave_encoder)

    def _enter_encoder(self, *_: object) -> None:
        """Hook: starts the clock, unless this encoder is a part of one that runs already."""
        self._num_running_encoders += 1
        if self._num_running_encoders == 1:
            self._encoder_started = self._now()

    def _leave_encoder(
        self,
        module: torch.nn.Module,
        inputs: Any,
        output: Any,
    ) -> None:
        """Hook: stops the clock, and adds a hook that notes when the gradient of the output arrives."""
        self._num_running_encoders -= 1
        if self._num_running_encoders:
            return
        self._encoder_seconds += self._now() - self._encoder_started
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._note_gradient)

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        # The encoder comes first in the forward pass, so it comes last in the backward pass. All time after this
        # moment is spent in the encoder.
        if self._gradient_arrived is None:
            self._gradient_arrived = self._now()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Ends the previous step, records its seconds outside of microbatches, and starts the next."""
        started = self._now()
        # The step that starts is number `batch`, and the one that has ended is number `batch - 1`.
        if int(state.timestamp.batch) - 1 >= self._first_recorded_step:
            seconds_of_step = started - self._step_started
            self.outside.append(seconds_of_step - self._seconds_in_microbatches)
        self._step_started = started
        self._seconds_in_microbatches = 0.0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Starts the first microbatch."""
        self._microbatch_started = self._now()

    def before_forward(self, state: State, logger: Logger) -> None:
        """Notes the sizes of the microbatch, and resets the clock of the encoder."""
        counting_started = self._now()
        batch = state.batch
        self._shape = batch['input_ids'].shape
        self._num_image_tokens = 0
        self._row_patches = []
        if self.layout is not None:
            self._num_image_tokens = sum(self.layout.image_tokens_per_row(batch))
            if self.patches is not None:
                rows = [[row] for row in range(self.layout.num_rows(batch))]
                single_rows = self.layout.split(batch, rows)
                self._row_patches = [self.patches(row) for row in single_rows]
        self._encoder_seconds = 0.0
        self._gradient_arrived = None
        # A run without this timer does not count. So the time of it is left out: step and microbatch start later.
        counting_seconds = self._now() - counting_started
        self._microbatch_started += counting_seconds
        self._step_started += counting_seconds

    def after_backward(self, state: State, logger: Logger) -> None:
        """Ends a microbatch and starts the next."""
        ended = self._now()
        seconds = ended - self._microbatch_started
        self._microbatch_started = ended
        self._seconds_in_microbatches += seconds
        if int(state.timestamp.batch) < self._first_recorded_step:
            return
        vision_seconds = self._encoder_seconds
        if self._gradient_arrived is not None:
            vision_seconds += ended - self._gradient_arrived
        rows, width = self._shape
        microbatch = TimedMicrobatch(rows, width, self._num_image_tokens, seconds, vision_seconds, self._row_patches)
        self.microbatches.append(microbatch)

    def _now(self) -> float:
        """Returns the time in seconds, after the GPU has done all its work."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


def fit_cost(timers: Sequence[MicrobatchTimer], *, quadratic: float) -> tuple[CostModel, float]:
    """Fits a cost model to timed microbatches. Returns it, and the median seconds of a step outside of microbatches.

    If the vision encoder was timed, its seconds for a row with images are ``a * p^2 + b * p + c``, where ``p`` is the
    number of patches in the row. The time outside of the encoder then depends only on the text. If the encoder was not
    timed, images cost by their tokens.

    Args:
        timers: Timers of runs with microbatches of many shapes.
        quadratic: Width at which attention costs as much as the dense layers: six times the hidden size. It is not
            fitted, because a few noisy times do not separate the quadratic term from the linear one.

    Raises:
        ValueError: Nothing was timed, or times do not grow with tokens.
    """
    microbatches: list[TimedMicrobatch] = []
    seconds_outside: list[float] = []
    for timer in timers:
        microbatches += timer.microbatches
        seconds_outside += timer.outside
    if not microbatches:
        raise InvalidInputError('`timers` must hold at least one microbatch, got: none. Run more steps.')
    seconds = np.array([microbatch.seconds for microbatch in microbatches])
    # For each microbatch the sizes that cost time outside of the vision encoder: text in the unit of CostModel (a token
    # in the dense layers), image tokens, and 1 for the launch of the microbatch.
    sizes = []
    for microbatch in microbatches:
        text_units = microbatch.rows * (microbatch.width + microbatch.width**2 / quadratic)
        sizes.append([text_units, microbatch.image_tokens, 1])
    features = np.array(sizes, dtype=np.float64)
    encoder = _fit_encoder(microbatches)
    if encoder is not None:
        # This fit prices the images, so the fit below must not price them again by their tokens.
        seconds -= np.array([microbatch.vision_seconds for microbatch in microbatches])
        features[:, 1] = 0
    per_token, per_image_token, per_microbatch = relative_fit(features, seconds).tolist()
    if per_token <= 0:
        raise InvalidInputError(
            'The measured times do not grow with the number of tokens, so no cost per token fits. Time more steps.'
        )
    cost = CostModel(
        quadratic=quadratic,
        vision_per_token=per_image_token / per_token,
        launch=per_microbatch / per_token,
        seconds_per_token=per_token,
    )
    if encoder is not None:
        cost = replace(
            cost,
            vision_per_image=encoder.per_row / per_token,  # CostModel counts the images of a sample as one
            vision_per_patch=encoder.per_patch / per_token,
            vision_per_square=encoder.per_square / per_token,
        )
    return cost, float(np.median(seconds_outside or [0.0]))


class _EncoderSeconds(NamedTuple):
    """Seconds of the vision encoder for a row with ``p`` patches: ``per_square * p^2 + per_patch * p + per_row``."""

    per_square: float
    per_patch: float
    per_row: float


def _fit_encoder(microbatches: Sequence[TimedMicrobatch]) -> _EncoderSeconds | None:
    """Fits the seconds of microbatches in the vision encoder. Returns None if it was not timed."""
    # For each microbatch with images: sums over its rows of patches^2 and patches, and the number of rows with images.
    sizes = []
    seconds = []
    for microbatch in microbatches:
        patches = np.array(microbatch.patches)
        if patches.sum() > 0:
            sizes.append([(patches**2).sum(), patches.sum(), (patches > 0).sum()])
            seconds.append(microbatch.vision_seconds)
    # Patches are counted from the batch, so they have no seconds if `media_modules` finds no encoder.
    if not seconds or min(seconds) <= 0:
        return None
    fit = relative_fit(np.array(sizes, dtype=np.float64), np.array(seconds))
    return _EncoderSeconds(*fit.tolist())
