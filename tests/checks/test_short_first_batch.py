# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""First batches whose rows have one token: a causal model has no loss on them."""

from __future__ import annotations

import pytest

from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import assert_exact, fit, reference_gradients, relative_error

LONGER = [(4, 2), (9, 7), (5, 3)]


def assert_second_step_is_exact(model, first_batch, second_batch, **options):
    """Returns the gradients of the first step. They are zero, so a relative error of them is not a number."""
    recorder = fit(model, first_batch, second_batch, **options)
    first_gradients, gradients = recorder.steps
    expected, _ = reference_gradients(model, second_batch)
    assert relative_error(gradients, expected) < 1e-6
    return first_gradients


@pytest.mark.parametrize(
    ('packing', 'num_rows', 'num_labels'),
    [(False, 1, 0), (False, 1, 1), (False, 3, 1), (True, 1, 1), (True, 3, 0)],
)
def test_rows_of_one_token(num_labels, num_rows, packing):
    short = ragged_batch([(1, num_labels)] * num_rows)
    longer = ragged_batch(LONGER)
    first_gradients = assert_second_step_is_exact(one_layer_model(), short, longer, packing=packing)
    for gradient in first_gradients.values():
        assert not gradient.any()


@pytest.mark.parametrize('side', ['left', 'right'])
def test_one_token_with_padding(side):
    rows = ragged_batch([(1, 0), (3, 0)], side=side)
    padded_row = {key: tensor[:1] for key, tensor in rows.items()}
    assert_second_step_is_exact(one_layer_model(), padded_row, ragged_batch(LONGER, side=side))


def test_rows_without_any_token_stay():
    """Rows whose mask is 0 everywhere are not dropped from the batch."""
    batch = ragged_batch([(1, 0), (1, 0), (1, 0), (1, 0)])
    batch['attention_mask'][:2] = 0
    assert_second_step_is_exact(one_layer_model(), batch, ragged_batch(LONGER))


def test_masked_models_with_one_token():
    """They do not shift labels, so one token has a loss."""
    short = masked_batch([1])
    assert short['labels'].item() != -100
    assert_exact(masked_model('modernbert'), short, masked_batch([4, 9, 5]))
