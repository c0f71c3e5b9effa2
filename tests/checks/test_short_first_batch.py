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


@pytest.mark.parametrize('labelled', [0, 1])
@pytest.mark.parametrize('num_rows', [1, 3])
@pytest.mark.parametrize('packing', [False, True])
def test_rows_of_one_token(labelled, num_rows, packing):
    model = text_model()
    short, longer = collate(text_rows([(1, labelled)] * num_rows)), collate(text_rows(LONG))
    recorder = fit(model, short, longer, packing=packing)
    assert not any(gradient.any() for gradient in recorder.steps[0].values())
    expected, _ = reference_gradients(model, longer)
    assert relative_error(recorder.steps[1], expected) < 1e-6


@pytest.mark.parametrize('side', ['left', 'right'])
def test_one_token_with_padding(side):
    model = text_model()
    short = collate(text_rows([(1, 0), (3, 0)]), side=side)
    short = {key: value[:1] for key, value in short.items()}
    longer = collate(text_rows(LONG), side=side)
    recorder = fit(model, short, longer)
    expected, _ = reference_gradients(model, longer)
    assert relative_error(recorder.steps[1], expected) < 1e-6


def test_masked_models_with_one_token():
    model = masked_model('modernbert')
    short, longer = masked_batch([1]), masked_batch([4, 9, 5])
    assert bool((short['labels'] != -100).all())
    recorder = fit(model, short, longer)
    for batch, gradients in zip((short, longer), recorder.steps, strict=True):
        assert relative_error(gradients, reference_gradients(model, batch)[0]) < 1e-6


@pytest.mark.slow
def test_the_first_rank_has_one_token():
    results = launch_json('tests/ranks/short_first_batch.py', ranks=2)
    assert results['error'] < 1e-6


def test_rows_without_any_token_stay():
    nothing = collate(text_rows([(1, 0), (1, 0)]))
    nothing['attention_mask'][:] = 0
    model, longer = text_model(), collate(text_rows(LONG))
    batch = {key: torch.cat([nothing[key], value[:2, :1]]) for key, value in longer.items()}
    recorder = fit(model, batch, longer)
    expected, _ = reference_gradients(model, longer)
    assert relative_error(recorder.steps[1], expected) < 1e-6
