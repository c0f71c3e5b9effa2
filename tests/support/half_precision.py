# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs on a CPU in precisions that Composer allows only on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Precision, State
from composer.loggers import Logger

from composer_tokacc import BatchLayout
from tests.support.families import Case
from tests.support.training import (
    GradientRecorder,
    Gradients,
    fit,
    gradients_of,
    reference_gradients,
    relative_error,
)

DTYPES = {Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP16: torch.float16}
SCALE = 1024.0


class EnabledScaler(torch.amp.GradScaler):
    """A loss scaler that is enabled, as on a GPU."""

    def __init__(self) -> None:
        super().__init__('cpu', init_scale=SCALE)


class SetPrecision(Callback):
    """Sets the precision of a run on a CPU. The Trainer itself would accept only fp32."""

    def __init__(self, precision: str) -> None:
        self.precision = Precision(precision)

    def fit_start(self, state: State, logger: Logger) -> None:
        state._precision = self.precision


@contextmanager
def _autocast(precision: Precision | str, *_: object, **__: object) -> Iterator[None]:
    dtype = DTYPES.get(Precision(precision), torch.bfloat16)
    with torch.autocast('cpu', dtype, enabled=Precision(precision) in DTYPES):
        yield


def train_in_two_cuts(case: Case, **options: Any) -> list[tuple[GradientRecorder, float]]:
    """Trains a step with microbatches of two rows, and one with a single microbatch.

    Args:
        case: A model with its rows.
        options: See :func:`.fit`.

    Returns:
        The recorder of each run, and the relative error of its gradient. The reference is one forward in float32.
    """
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    expected, _ = reference_gradients(case.model, batch)
    results = []
    for microbatch_size in (2, len(case.rows)):
        recorder = fit(case.model, batch, layout=layout, microbatch_size=microbatch_size, **options)
        recorder.trainer.close()  # so that the next Trainer can have the same callbacks
        results.append((recorder, relative_error(recorder.gradients, expected)))
    return results


def gradients_of_one_forward(case: Case, batch: dict[str, Any], precision: str) -> Gradients:
    """Returns the gradients of one plain forward in a precision. Its loss is scaled as with :class:`EnabledScaler`."""
    with _autocast(precision):
        loss = case.loss(batch)
    scaled_gradients = gradients_of(case.model, SCALE * loss)
    return {name: gradient / SCALE for name, gradient in scaled_gradients.items()}


def set_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes runs with this precision and an enabled loss scaler, as on a GPU.

    Returns:
        The callbacks that a run needs for it.
    """
    for module in ('composer.trainer.trainer', 'composer_tokacc.algorithm.setup'):
        monkeypatch.setattr(f'{module}.get_precision_context', _autocast)
    monkeypatch.setattr('composer.trainer.trainer.GradScaler', EnabledScaler)
    # With closures Composer would make a ClosureGradScaler instead.
    monkeypatch.setattr(Trainer, '_use_closures', lambda self: False)
    return [SetPrecision(precision)]
