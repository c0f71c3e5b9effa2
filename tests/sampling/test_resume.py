# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The callback that restores the random generators of Python, numpy and torch when a run is resumed."""

from __future__ import annotations

import random

import numpy as np
import torch

from composer_tokacc.sampling import RestoreRandomState


def draw():
    """Returns numbers of the three generators."""
    of_python = [random.random(), random.gauss(0, 1)]
    of_numpy = [np.random.rand(), np.random.normal()]
    of_torch = torch.rand(3).tolist()
    return of_python, of_numpy, of_torch


def test_generators_go_on_after_resume():
    draw()  # normal numbers are drawn in pairs, and the half that is left belongs to the state
    saved = RestoreRandomState().state_dict()
    assert all(isinstance(value, str) for value in saved.values())
    expected = draw()

    callback = RestoreRandomState()
    callback.load_state_dict(saved)
    callback.before_dataloader(None, None)
    assert draw() == expected

    # Only the first batch after a resume restores them.
    callback.before_dataloader(None, None)
    assert draw() != expected


def test_state_has_one_key():
    """With a further one no older sharded checkpoint could be read: docs/architecture.md#what-a-checkpoint-holds."""
    assert set(RestoreRandomState().state_dict()) == {'generators'}


def test_nothing_is_touched_without_a_checkpoint():
    state_before = torch.get_rng_state()
    callback = RestoreRandomState()
    callback.before_dataloader(None, None)
    assert torch.equal(torch.get_rng_state(), state_before)
