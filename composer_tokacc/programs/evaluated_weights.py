# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The weights that an evaluation sees, for answers and for the model at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from composer.algorithms import EMA
from composer.core import Event, State
from composer.loggers import Logger


@contextmanager
def evaluated_weights(state: State, logger: Logger) -> Iterator[None]:
    """Gives the model the weights that Composer evaluates, while the block runs.

    With Composer's EMA these are averages of the weights. EMA swaps them in at the start of an evaluation. At its end
    it swaps them out before callbacks are called, so a callback needs this context.
    """
    emas = []
    for algorithm in state.algorithms:
        # False before EMA has begun to average, see its argument `ema_start`.
        if isinstance(algorithm, EMA) and algorithm.match(Event.EVAL_START, state):
            emas.append(algorithm)
    for ema in emas:
        ema.apply(Event.EVAL_START, state, logger)
    try:
        yield
    finally:
        for ema in emas:
            ema.apply(Event.EVAL_END, state, logger)
