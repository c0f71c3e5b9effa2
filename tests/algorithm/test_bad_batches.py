# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that no model can compute: one line with the requirement, the sample and the remedy, before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_tokacc import token_data_spec
from tests.matrix.harness import measure_steps
from tests.matrix.native_models import Terms, by_token
from tests.matrix.subjects import SUBJECTS
from tests.support.text import VOCABULARY, collate, text_model, text_rows
from tests.support.training import fit, loader, reference_gradients, relative_error

SHAPE = [(4, 2), (9, 3), (5, 4), (14, 11)]


def batch_of(**entries: Any) -> dict[str, Any]:
    return {**collate(text_rows(SHAPE)), 'sample_ids': [f'sample-{row}' for row in range(len(SHAPE))], **entries}


def with_label(label: int) -> dict[str, Any]:
    labels = batch_of()['labels']
    labels[2, 3] = label
    return batch_of(labels=labels)


def refusal(*batches: dict[str, Any], model: Any = None, has_spec: bool = True) -> str:
    data = loader(*batches)
    with pytest.raises((ValueError, RuntimeError), match='got:') as caught:
        fit(model or text_model(), token_data_spec(data) if has_spec else data, max_duration=f'{len(batches)}ba')
    assert '..' not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(('dtype', 'has_spec'), [(torch.int32, True), (torch.int32, False), (torch.uint8, True)])
def test_labels_without_cross_entropy(dtype, has_spec):
    labels = batch_of()['labels'].clamp(min=0) if dtype == torch.uint8 else batch_of()['labels']
    message = refusal(batch_of(labels=labels.to(dtype)), has_spec=has_spec)
    assert f'must be int64 for cross-entropy, got: {dtype}. Give it `.long()`' in message


@pytest.mark.parametrize(('label', 'later'), [(VOCABULARY, False), (-1, True)])
def test_label_outside_vocabulary_names_sample(label, later):
    message = refusal(*[batch_of()] * later, with_label(label))
    assert f"`labels` must be -100 or ids from 0 to {VOCABULARY - 1}, got: {label} in sample 'sample-2'" in message


def test_logits_show_the_vocabulary():
    message = refusal(with_label(VOCABULARY), model=Terms(by_token))
    assert f'`labels` of 8 to {VOCABULARY}' in message
    message = refusal(batch_of(), with_label(VOCABULARY), model=Terms(by_token))
    assert f"got: {VOCABULARY} in sample 'sample-2'" in message


def test_last_id_is_a_label():
    batch, model = with_label(VOCABULARY - 1), text_model()
    recorder = fit(model, batch)
    assert relative_error(recorder.gradients, reference_gradients(model, batch)[0]) < 1e-6


@pytest.mark.parametrize(('token', 'later'), [(VOCABULARY, False), (-1, True)])
def test_token_outside_embedding_names_sample(token, later):
    batch = batch_of()
    batch['input_ids'][1, 2] = token
    message = refusal(*[batch_of()] * later, batch)
    assert f"`input_ids` must be ids from 0 to {VOCABULARY - 1}, got: {token} in sample 'sample-1'" in message


def test_token_outside_unknown_embedding():
    message = refusal(batch_of(input_ids=batch_of()['input_ids'] + VOCABULARY), model=Terms(by_token))
    assert 'its embedding must hold every token' in message


def test_placeholders_outside_the_embedding_stay():
    """PaliGemma puts pads in their place before it looks them up."""
    subject = SUBJECTS['paligemma']
    model, batch = subject.model('large'), subject.batch(0, side='right')
    config, size = model.model.config, model.model.get_input_embeddings().num_embeddings
    is_placeholder = batch['input_ids'] == config.image_token_id
    assert is_placeholder.any()
    config.image_token_id, batch['input_ids'] = size, batch['input_ids'].masked_fill(is_placeholder, size)
    assert [outcome.kind for outcome in measure_steps(model, [batch], 2)] == ['exact']


@pytest.mark.parametrize('has_spec', [True, False])
@pytest.mark.parametrize('queries', [1, 14])
def test_mask_of_three_dimensions(queries, has_spec):
    mask = batch_of()['attention_mask'][:, None].expand(-1, queries, -1)
    message = refusal(batch_of(attention_mask=mask), has_spec=has_spec)
    assert f"of shape (4, {queries}, 14), beginning with sample 'sample-0'. Give one mask" in message


def test_mask_of_four_dimensions_is_taken():
    plain, model = batch_of(), text_model()
    causal = torch.ones(14, 14, dtype=torch.bool).tril()
    batch = batch_of(attention_mask=plain['attention_mask'][:, None, None].bool() & causal)
    recorder = fit(model, batch)
    assert relative_error(recorder.gradients, reference_gradients(model, plain)[0]) < 1e-6


@pytest.mark.parametrize('has_spec', [True, False])
@pytest.mark.parametrize('later', [False, True], ids=['first batch', 'later batch'])
def test_batch_of_no_rows(later, has_spec):
    message = refusal(*[batch_of()] * later, {key: rows[:0] for key, rows in batch_of().items()}, has_spec=has_spec)
    assert 'must hold at least one row of one token, got: labels of shape (0, 14)' in message
