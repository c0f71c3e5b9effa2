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


@pytest.mark.parametrize(
    ('packing', 'num_rows', 'num_labels', 'num_pads', 'side', 'is_attended'),
    [
        (False, 1, 0, 0, 'right', True),
        (False, 3, 1, 0, 'right', True),
        (True, 1, 1, 0, 'right', True),
        (True, 3, 0, 0, 'right', True),
        (False, 1, 0, 2, 'left', True),
        (False, 1, 0, 2, 'right', True),
        (False, 3, 0, 0, 'right', False),
    ],
)
def test_rows_of_one_token(packing, num_rows, num_labels, num_pads, side, is_attended):
    with_longer_row = ragged_batch([(1, num_labels)] * num_rows + [(1 + num_pads, 0)], side=side)
    short = {key: tensor[:-1] for key, tensor in with_longer_row.items()}
    short['attention_mask'] = short['attention_mask'] * is_attended
    model = one_layer_model()
    recorder = fit(model, LONGER, short, LONGER, packing=packing)
    _, short_gradients, gradients = recorder.steps
    for gradient in short_gradients.values():
        assert not gradient.any()
    expected, _ = reference_gradients(model, LONGER)
    assert relative_error(gradients, expected) < 1e-6


def test_rows_of_one_token_in_a_quotient():
    """Such a loss is not a number if no label counts."""

    def loss_of(logits, labels):
        return next_token_loss(logits, labels, reduction='sum') / (labels[:, 1:] != -100).sum()

    with_longer_row = ragged_batch([(1, 0), (1, 1), (3, 0)])
    short = {key: tensor[:-1] for key, tensor in with_longer_row.items()}
    recorder = fit(NativeModel(loss_of), LONGER, short, LONGER)
    assert len(recorder.steps) == 3


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('num_pads', [0, 2])
def test_first_rows_of_one_token_are_refused(num_pads, side):
    """No position of a causal model predicts a label, except padding on the left. So they do not show the loss rule."""
    with_longer_row = ragged_batch([(1, 0), (1, 1), (1 + num_pads, 0)], side=side)
    short = {key: tensor[:-1] for key, tensor in with_longer_row.items()}
    with pytest.raises(RuntimeError, match='must have a row with two tokens'):
        fit(one_layer_model(), short, LONGER)


def test_masked_models_with_one_token():
    """They do not shift labels, so one token has a loss."""
    short = masked_batch([1])
    assert short['labels'].item() != -100
    model = masked_model('modernbert')
    longer = masked_batch([4, 9, 5])
    assert_exact(model, longer, short)
    assert_exact(model, short, longer)
