# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches whose rows have one token or none: a causal model has no loss on them."""

from __future__ import annotations

import pytest

from tests.matrix.native_models import NativeModel
from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import assert_exact, fit, reference_gradients, relative_error

LONGER = ragged_batch([(4, 2), (9, 7), (5, 3)])


UNLABELLED = (1, 0)
LABELLED = (1, 1)
"""Length and number of labels of a row of one token."""


def assert_short_step_is_zero(short, *, packing=False):
    """Fails unless the step of a short batch has a gradient of zero, and the next step is exact."""
    model = one_layer_model()

    recorder = fit(model, LONGER, short, LONGER, packing=packing)

    _, short_gradients, gradients_of_longer = recorder.steps
    for gradient in short_gradients.values():
        assert not gradient.any()
    expected, _ = reference_gradients(model, LONGER)
    assert relative_error(gradients_of_longer, expected) < 1e-6


@pytest.mark.parametrize(
    'short',
    [
        pytest.param(ragged_batch([UNLABELLED]), id='one row'),
        pytest.param(ragged_batch([LABELLED] * 3), id='rows with labels'),
        pytest.param(ragged_batch([UNLABELLED], width=3, side='left'), id='padded on the left'),
        pytest.param(ragged_batch([UNLABELLED], width=3), id='padded on the right'),
    ],
)
def test_rows_of_one_token(short):
    assert_short_step_is_zero(short)


@pytest.mark.parametrize(
    'row_sizes',
    [
        pytest.param([LABELLED], id='a row with a label'),
        pytest.param([UNLABELLED] * 3, id='rows without labels'),
    ],
)
def test_packed_rows_of_one_token(row_sizes):
    assert_short_step_is_zero(ragged_batch(row_sizes), packing=True)


def test_rows_without_attention():
    short = ragged_batch([UNLABELLED] * 3)
    short['attention_mask'][:] = 0
    assert_short_step_is_zero(short)


def test_one_token_in_a_quotient():
    """In the short batch no label counts, so the loss is 0 / 0. The step is not refused."""

    def loss_of(logits, labels):
        total = next_token_loss(logits, labels, reduction='sum')
        num_labels = (labels[:, 1:] != -100).sum()
        return total / num_labels

    short = ragged_batch([UNLABELLED, LABELLED], width=3)

    recorder = fit(NativeModel(loss_of), LONGER, short, LONGER)

    assert len(recorder.steps) == 3


@pytest.mark.parametrize(
    ('width', 'side'),
    [
        (1, 'right'),
        (3, 'right'),
        (3, 'left'),
    ],
)
def test_first_batch_of_one_token_rows(width, side):
    """No position of a causal model predicts a label, except padding on the left. So they do not show the loss rule."""
    short = ragged_batch([UNLABELLED, LABELLED], width=width, side=side)

    with pytest.raises(RuntimeError, match='must have a row with two tokens'):
        fit(one_layer_model(), short, LONGER)


def test_masked_models_with_one_token():
    """They do not shift labels, so one token has a loss."""
    model = masked_model('modernbert')
    short = masked_batch([1])
    longer = masked_batch([4, 9, 5])
    assert short['labels'].item() != -100

    assert_exact(model, longer, short)
    assert_exact(model, short, longer)
