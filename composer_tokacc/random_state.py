# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Fixed random numbers for a piece of code. Those that the run draws before and after it stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    # Not torch.manual_seed(), which also seeds the GPUs. If they have not started yet, they get the seed when they do,
    # and kept_random_state() cannot undo that.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the states of the random generators of Python, numpy and torch after the context."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices: list[int] = []
    if torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def same_random_numbers(seed: int = 0) -> Iterator[None]:
    """Seeds the random numbers inside of the context, for the same dropout in two forwards. Restores them after it."""
    with kept_random_state():
        seed_everything(seed)
        yield
