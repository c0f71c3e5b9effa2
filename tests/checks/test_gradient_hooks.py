# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hooks on parameters: linear ones are accepted, others are refused before the first step."""

from __future__ import annotations

import pytest
import torch
from composer.core import Event

from composer_tokacc.checks.first_batch import check_gradient_hooks
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import GradientRecorder, On, fit, loader, reference_gradients, relative_error


def keep_one_row(gradient):
    rows = torch.arange(len(gradient))
    is_kept = rows == 1
    return gradient * is_kept[:, None]


def clamp_in_place(gradient):
    gradient.clamp_(-1e-3, 1e-3)


LINEAR = {
    'only one row': keep_one_row,
    'half': lambda gradient: gradient / 2,
    'in place': lambda gradient: gradient.mul_(3.0),
    'changes nothing': lambda gradient: None,
}
NOT_LINEAR = {
    'clamped': lambda gradient: gradient.clamp(-1e-3, 1e-3),
    'clamped in place': clamp_in_place,
    'clamped at a high limit': lambda gradient: gradient.clamp(-5e3, 5e3),
    'normalised': lambda gradient: gradient / (1e-6 + gradient.norm()),
    'sign': torch.sign,
    'noise': lambda gradient: gradient + torch.randn_like(gradient),
}


@pytest.mark.parametrize(
    ('size', 'dtype'),
    [
        (4, torch.float32),
        (1000, torch.float16),
    ],
)
@pytest.mark.parametrize('name', LINEAR)
def test_linear_hooks_are_accepted(name, size, dtype):
    """Of a million random gradients in float16 some could overflow."""
    layer = torch.nn.Linear(size, size, dtype=dtype)
    layer.weight.register_hook(LINEAR[name])
    check_gradient_hooks(layer)


@pytest.mark.parametrize('name', NOT_LINEAR)
def test_other_hooks_are_refused(name):
    layer = torch.nn.Linear(4, 3)
    layer.weight.register_hook(NOT_LINEAR[name])

    with pytest.raises(RuntimeError, match=r"must be linear, got: .* on 'weight'"):
        check_gradient_hooks(layer)


def test_optimizer_in_backward_is_refused():
    layer = torch.nn.Linear(4, 3)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    with pytest.raises(RuntimeError, match=r"step once a batch, got: .*'bias'"):
        check_gradient_hooks(layer)


BATCH = ragged_batch([(3, 2), (9, 8), (5, 1), (4, 4)])


def test_run_with_a_linear_hook():
    """The run applies the hook to each microbatch. The reference applies it once, to the gradient of the batch."""
    model = one_layer_model()
    expected, _ = reference_gradients(model, BATCH)
    name = 'model.model.embed_tokens.weight'
    expected[name] = keep_one_row(expected[name])

    model.get_input_embeddings().weight.register_hook(keep_one_row)
    recorder = fit(model, loader(BATCH), microbatch_size=1)

    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize(
    ('added_at', 'num_exact_steps'),
    [
        (Event.FIT_START, 0),
        (Event.BATCH_END, 1),
    ],
)
def test_run_with_clamping_hook_is_refused(added_at, num_exact_steps):
    model = one_layer_model()
    weight = model.get_input_embeddings().weight

    def add_hook(state):
        weight.register_hook(NOT_LINEAR['clamped'])

    recorder = GradientRecorder()

    with pytest.raises(RuntimeError, match='must be linear'):
        fit(model, BATCH, BATCH, callbacks=[On(added_at, add_hook)], recorder=recorder)

    assert len(recorder.steps) == num_exact_steps
