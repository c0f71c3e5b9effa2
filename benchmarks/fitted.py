# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A cost model fitted to measured times of microbatches, for benchmarks that plan for the machine they run on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from composer_tokacc.planning import CostModel


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
