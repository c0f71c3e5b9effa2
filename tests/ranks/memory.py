# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: memory runs out in a forward of the second rank. Returns the largest error of each case.

Composer then computes the step again on all ranks, in smaller microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc import TokenAccumulation
from tests.support.text import collate, text_model, text_rows
from tests.support.training import On, fit, hugging_face, largest, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2), (5, 3), (4, 4)]
SHARES = (4, 4)
"""Rows of each rank, in two microbatches at first."""
NUM_STEPS = 3


class OutOfMemory(Callback):
    """Makes a layer raise once on the second rank, in this step and microbatch, both counted from 0."""

    def __init__(self, layer: torch.nn.Module, step: int, microbatch: int) -> None:
        self.place = (step, microbatch)
        self.num_forwards = 0
        self.raises = False
        layer.register_forward_pre_hook(self.run_out)

    def batch_start(self, state: State, logger: Logger) -> None:
        self.num_forwards = 0

    def before_forward(self, state: State, logger: Logger) -> None:
        place = (int(state.timestamp.batch), self.num_forwards)
        self.num_forwards += 1
        self.raises = place == self.place and dist.get_global_rank() == 1

    def run_out(self, *_: Any) -> None:
        if self.raises:
            self.raises = False
            raise RuntimeError('CUDA out of memory')


def set_auto(state: State) -> None:
    """Does what ``device_train_microbatch_size='auto'`` does. Composer itself allows it only on GPUs."""
    state.auto_microbatching = True


def error(step: int, microbatch: int) -> float:
    rows = text_rows(ROWS)
    model = hugging_face(text_model())
    expected, _ = reference_gradients(model.model, collate(rows))
    callbacks = [On(Event.FIT_START, set_auto), OutOfMemory(model.model.model.layers[1], step, microbatch)]
    batches = [collate(rank_share(rows, SHARES))] * NUM_STEPS
    recorder = fit(model, *batches, algorithms=[TokenAccumulation()], callbacks=callbacks, microbatch_size=2)
    assert recorder.trainer.state.device_train_microbatch_size == 1
    return largest(relative_error(gradients, expected) for gradients in recorder.steps)


def main() -> dict[str, float]:
    errors = {}
    for step in (0, 1):
        for microbatch in (0, 1):
            errors[f'step {step}, microbatch {microbatch}'] = error(step, microbatch)
    return errors
