# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a microbatch costs, in units of one token through the dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ['CostModel']


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a microbatch of `n` rows of width `w`: ``n * (w + w^2 / quadratic) + vision + launch``.

    The unit is the time of one token position in the dense layers, so that the cost of a short row is its width.

    Args:
        quadratic: Width at which attention costs as much as the dense layers; six times the hidden size for a
            standard transformer block (hidden size 4096 by default). ``math.inf`` for no quadratic term.
        vision_per_token: Cost of one image token in the vision tower.
        launch: Cost of starting a microbatch, whatever is in it. Zero would make microbatches of one row free.
        seconds_per_token: Seconds of one unit where the model was fitted to measured times. Plans do not use it.

    Example:
        >>> CostModel(quadratic=1000.0, launch=0.0).microbatch(2, 100)
        220.0
    """

    quadratic: float = 6 * 4096.0
    vision_per_token: float = 0.0
    launch: float = 128.0
    seconds_per_token: float | None = None

    def __post_init__(self) -> None:
        if not self.quadratic > 0:
            raise ValueError(f'`quadratic` must be positive, got: {self.quadratic}. Use math.inf for no such term.')
        for name in ('vision_per_token', 'launch'):
            value = getattr(self, name)
            if not 0 <= value < float('inf'):
                raise ValueError(f'`{name}` must be finite and not negative, got: {value}.')

    def rows(self, widths: np.ndarray) -> np.ndarray:
        """Cost of one row at each width, without vision and launch.

        Args:
            widths: Padded widths in tokens, any shape.

        Returns:
            Costs, float64, of the same shape.
        """
        widths = np.asarray(widths, dtype=np.float64)
        return widths + widths * widths / self.quadratic

    def microbatch(self, num_rows: int, width: int, image_tokens: int = 0) -> float:
        """Cost of a microbatch of `num_rows` rows padded to `width`, with `image_tokens` in all."""
        return num_rows * (width + width * width / self.quadratic) + self.vision_per_token * image_tokens + self.launch

    @classmethod
    def fit(
        cls,
        num_rows: Sequence[int],
        widths: Sequence[int],
        seconds: Sequence[float],
        image_tokens: Sequence[int] | None = None,
    ) -> CostModel:
        """Fit the terms to measured microbatch times by least squares; none of them is negative.

        Errors are taken relative to the measured time, so that long microbatches do not drown short ones. A term that
        comes out negative is left out and the rest fitted again.

        Args:
            num_rows: Rows of each timed microbatch.
            widths: Their padded widths in tokens.
            seconds: Their measured times, positive.
            image_tokens: Their image tokens; all zero if None.

        Returns:
            The fitted model, with `seconds_per_token` set.

        Raises:
            ValueError: The arguments differ in length, a time is not positive, or time does not grow with tokens.
        """
        images = np.zeros(len(widths)) if image_tokens is None else np.asarray(image_tokens, dtype=np.float64)
        n, w, t = (np.asarray(x, dtype=np.float64) for x in (num_rows, widths, seconds))
        if not len(n) == len(w) == len(t) == len(images):
            raise ValueError(f'Timings must be of equal length, got: {len(n)}, {len(w)}, {len(t)}, {len(images)}.')
        if len(t) == 0 or not np.all(t > 0):
            raise ValueError('`seconds` must hold at least one time, all of them positive.')
        terms = np.stack([n * w, n * w * w, images, np.ones_like(n)], axis=1)
        solution = _least_squares(terms / t[:, None], np.ones_like(t))
        per_token, per_square, per_image, per_launch = (float(x) for x in solution)
        if per_token <= 0:
            raise ValueError('Measured times must grow with the number of tokens. Time wider or longer microbatches.')
        return cls(
            quadratic=per_token / per_square if per_square > 0 else float('inf'),
            vision_per_token=per_image / per_token,
            launch=per_launch / per_token,
            seconds_per_token=per_token,
        )


def _least_squares(terms: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares where the most negative coefficient is dropped until none is left."""
    active = np.flatnonzero(np.abs(terms).max(axis=0) > 0)
    solution = np.zeros(terms.shape[1])
    while len(active):
        scale = np.abs(terms[:, active]).max(axis=0)  # columns differ by many orders of magnitude
        values = np.linalg.lstsq(terms[:, active] / scale, target, rcond=None)[0] / scale
        if np.all(values >= 0):
            solution[active] = values
            break
        active = np.delete(active, int(np.argmin(values * scale)))
    return solution
