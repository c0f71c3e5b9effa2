# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""First batches whose rows have one token: a causal model has no loss on them."""

from __future__ import annotations

import pytest
import torch

from tests.support.launch import launch_json
from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, reference_gradients, relative_error

LONG = [(4, 2), (9, 7), (5, 3)]


def check_second_step(model, short, longer, **options):
    """Asserts that the step of the longer rows is exact. Returns the gradients of the first step."""
    recorder = fit(model, short, longer, **options)
    expected, _ = reference_gradients(model, longer)
    assert relative_error(recorder.steps[1], expected) < 1e-6
    return recorder.steps[0]


@pytest.mark.parametrize('labelled', [0, 1])
@pytest.mark.parametrize('num_rows', [1, 3])
@pytest.mark.parametrize('packing', [False, True])
def test_rows_of_one_token(labelled, num_rows, packing):
    short = collate(text_rows([(1, labelled)] * num_rows))
    gradients = check_second_step(text_model(), short, collate(text_rows(LONG)), packing=packing)
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize('side', ['left', 'right'])
def test_one_token_with_padding(side):
    short = collate(text_rows([(1, 0), (3, 0)]), side=side)
    short = {key: value[:1] for key, value in short.items()}
    check_second_step(text_model(), short, collate(text_rows(LONG), side=side))


def test_rows_without_any_token_stay():
    empty_rows = collate(text_rows([(1, 0), (1, 0)]))
    empty_rows['attention_mask'][:] = 0
    longer = collate(text_rows(LONG))
    batch = {key: torch.cat([empty_rows[key], value[:2, :1]]) for key, value in longer.items()}
    check_second_step(text_model(), batch, longer)


def test_masked_models_with_one_token():
    model = masked_model('modernbert')
    short = masked_batch([1])
    longer = masked_batch([4, 9, 5])
    assert bool((short['labels'] != -100).all())
    gradients = check_second_step(model, short, longer)
    assert relative_error(gradients, reference_gradients(model, short)[0]) < 1e-6


@pytest.mark.slow
def test_the_first_rank_has_one_token():
    results = launch_json('tests/ranks/short_first_batch.py', ranks=2)
    assert results['error'] < 1e-6
