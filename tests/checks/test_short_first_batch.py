# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches whose rows have one token or none: a causal model has no loss on them."""

from __future__ import annotations

import pytest
import torch

from tests.matrix.native_models import NativeModel
from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import next_token_loss, one_layer_model, ragged_batch
from tests.support.training import assert_exact, fit, reference_gradients, relative_error

LONGER = ragged_batch([(4, 2), (9, 7), (5, 3)])


def batch_of_one_token_rows(labels_of_rows, *, num_pads=0, side='right'):
    """Returns rows of one token. ``labels_of_rows`` has 1 if the token has a label, or else 0."""
    row_sizes = [(1, num_labels) for num_labels in labels_of_rows]
    return ragged_batch(row_sizes, width=1 + num_pads, side=side)


def unattended(batch):
    return {**batch, 'attention_mask': torch.zeros_like(batch['attention_mask'])}


@pytest.mark.parametrize(
    ('short', 'packing'),
    [
        pytest.param(batch_of_one_token_rows([0]), False, id='one row'),
        pytest.param(batch_of_one_token_rows([1, 1, 1]), False, id='rows with labels'),
        pytest.param(batch_of_one_token_rows([1]), True, id='packed row with a label'),
        pytest.param(batch_of_one_token_rows([0, 0, 0]), True, id='packed rows'),
        pytest.param(batch_of_one_token_rows([0], num_pads=2, side='left'), False, id='padded on the left'),
        pytest.param(batch_of_one_token_rows([0], num_pads=2), False, id='padded on the right'),
        pytest.param(unattended(batch_of_one_token_rows([0, 0, 0])), False, id='nothing attended'),
    ],
)
def test_rows_of_one_token(short, packing):
    """Their step has a gradient of zero, and the next step is exact."""
    model = one_layer_model()

    recorder = fit(model, LONGER, short, LONGER, packing=packing)

    _, short_gradients, gradients_of_longer = recorder.steps
    for gradient in short_gradients.values():
        assert not gradient.any()
    expected, _ = reference_gradients(model, LONGER)
    assert relative_error(gradients_of_longer, expected) < 1e-6


def test_one_token_in_a_quotient():
    """In the short batch no label counts, so the loss is 0 / 0. The step is not refused."""

    def loss_of(logits, labels):
        num_labels = (labels[:, 1:] != -100).sum()
        return next_token_loss(logits, labels, reduction='sum') / num_labels

    short = batch_of_one_token_rows([0, 1], num_pads=2)

    recorder = fit(NativeModel(loss_of), LONGER, short, LONGER)

    assert len(recorder.steps) == 3


@pytest.mark.parametrize(('num_pads', 'side'), [(0, 'right'), (2, 'right'), (2, 'left')])
def test_first_batch_of_one_token_rows(num_pads, side):
    """No position of a causal model predicts a label, except padding on the left. So they do not show the loss rule."""
    short = batch_of_one_token_rows([0, 1], num_pads=num_pads, side=side)

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
