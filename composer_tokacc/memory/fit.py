# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Fits bytes of activations to the sizes of a microbatch: least squares, no coefficient negative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from composer_tokacc.memory.shapes import BatchShape

__all__ = ['FEATURES', 'ActivationFit', 'fit_activations', 'non_negative_least_squares']

FEATURES = ('constant', 'tokens', 'area', 'image_tokens', 'pixel_bytes', 'image_area')
# What the bytes of each part can depend on. Tokens and tokens x vocabulary are one column for one model, so text and
# logits are told apart where they are measured, not here.
_FEATURES_OF = {
    'text': ('constant', 'tokens', 'area', 'image_tokens'),
    'logits': ('tokens',),
    'vision': ('image_tokens', 'pixel_bytes', 'image_area'),
    'weights': ('constant',),
}


@dataclass(frozen=True, kw_only=True)
class ActivationFit:
    """Bytes of each part as a sum of coefficients times sizes.

    Args:
        coefficients: By part, then by feature.
        area: When attention holds ``rows x width^2`` entries: ``'always'`` (eager), ``'padded'`` (SDPA builds a mask
            where there is padding), ``'never'`` (flash attention).
        residual: Largest relative error of the sum over the probes it was fitted to.
    """

    coefficients: Mapping[str, Mapping[str, float]]
    area: str
    residual: float

    def predict(self, shape: BatchShape) -> dict[str, float]:
        """Bytes of each part."""
        values: dict[str, float] = dict(zip(FEATURES, _features(shape, self.area), strict=True))
        return {
            part: sum(coefficient * values[name] for name, coefficient in terms.items())
            for part, terms in self.coefficients.items()
        }


def fit_activations(shapes: Sequence[BatchShape], measured: Sequence[Mapping[str, int]], *, area: str) -> ActivationFit:
    """Fits the parts of several probes.

    Args:
        shapes: Shapes of the probes.
        measured: Bytes by part of each.
        area: See :class:`ActivationFit`.
    """
    table = np.array([_features(shape, area) for shape in shapes], dtype=np.float64)
    totals = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in measured], dtype=np.float64)
    coefficients: dict[str, dict[str, float]] = {}
    for part in measured[0]:
        values = np.array([parts[part] for parts in measured], dtype=np.float64)
        names = _FEATURES_OF[part]
        if part == 'weights':
            # A text-only microbatch does not copy the tower's weights: the largest counts.
            coefficients[part] = {'constant': float(values.max())}
            continue
        columns = table[:, [FEATURES.index(name) for name in names]]
        # Errors count relative to the whole, so that small microbatches weigh as much as large ones.
        solution = non_negative_least_squares(columns / totals[:, None], values / totals)
        coefficients[part] = {name: float(x) for name, x in zip(names, solution, strict=True) if x > 0}
    fitted = ActivationFit(coefficients=coefficients, area=area, residual=0.0)
    predicted = [fitted.predict(shape) for shape in shapes]
    sums = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in predicted])
    residual = float(np.abs(sums / totals - 1).max())
    return ActivationFit(coefficients=coefficients, area=area, residual=residual)


def non_negative_least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solution of ``min |columns @ x - target|`` with ``x >= 0``, by scipy.

    Args:
        columns: (m, n).
        target: (m,).

    Returns:
        (n,).
    """
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0  # columns differ by many orders of magnitude
    solution = nnls(columns / scale, target)[0]
    solution[solution < 1e-9 * solution.max()] = 0.0  # noise of rounding is no term
    return solution / scale


def _features(shape: BatchShape, area: str) -> list[float]:
    has_area = area == 'always' or (area == 'padded' and shape.is_padded)
    return [
        1.0,
        float(shape.tokens),
        float(shape.area if has_area else 0),
        float(shape.image_tokens),
        float(shape.pixel_bytes),
        shape.image_area,
    ]
