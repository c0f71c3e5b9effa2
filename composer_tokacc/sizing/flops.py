# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a microbatch costs in floating point operations, counted in a trace of the run's own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from composer_tokacc.batch import Batch
from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing.memory_model import non_negative_fit
from composer_tokacc.sizing.shapes import BatchShape, probe_batches
from composer_tokacc.sizing.trace import TracedStep

TERMS = ('tokens', 'area', 'image_tokens', 'image_area')
"""Sizes that the operations are a sum of: linear layers, attention of text, vision encoder and its attention."""


@dataclass(frozen=True, kw_only=True)
class FlopModel:
    """Operations of forward and backward, by ``TERMS``; padding is computed, and so it counts."""

    coefficients: Mapping[str, float]
    layout: BatchLayout
    residual: float
    """Largest relative error over the traced microbatches."""

    def text(self, rows: int, width: int) -> float:
        """Returns the operations of the language model."""
        return self._sum(BatchShape(rows=rows, width=width), TERMS[:2])

    def media(self, batch: Batch) -> float:
        """Returns the operations of encoders and what follows them."""
        return self._sum(BatchShape.from_batch(batch, self.layout), TERMS[2:])

    def _sum(self, shape: BatchShape, names: Sequence[str]) -> float:
        return sum(self.coefficients[name] * getattr(shape, name) for name in names)


def count_flops(
    build: Callable[[], nn.Module], config: Any, samples: Sequence[Mapping[str, Any]], *, width: int
) -> FlopModel:
    """Counts the matrix products of four to six microbatches without computing them; see :func:`.calibrate_fake`.

    Build the model with eager attention, whose products are seen, and without activation checkpointing, whose second
    forward is no use of the model.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    step = TracedStep(build, batches[0], on_gpu=False)
    shapes = [BatchShape.from_batch(batch, step.layout) for batch in batches]
    counted = np.array([step.count_flops(batch) for batch in batches], dtype=np.float64)
    table = np.array([[getattr(shape, name) for name in TERMS] for shape in shapes], dtype=np.float64)
    solution = non_negative_fit(table / counted[:, None], np.ones(len(counted)))
    residual = float(np.abs(table @ solution / counted - 1).max())
    coefficients: dict[str, float] = dict(zip(TERMS, solution.tolist(), strict=True))
    return FlopModel(coefficients=coefficients, layout=BatchLayout.for_model(config), residual=residual)
