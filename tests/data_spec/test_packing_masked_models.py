# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Packing for masked language models: labels are not shifted, attention looks in both directions."""

from __future__ import annotations

import pytest
import torch
import transformers

from composer_tokacc import BatchLayout
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.row_counts import with_counts
from tests.support.masked_text import MODELS, PAD, masked_batch, masked_model
from tests.support.text import text_attention
from tests.support.training import assert_exact, composer_gradients, fit, reference_gradients, relative_error

LENGTHS = [4, 5, 9, 14, 6, 3, 2, 9]
NUM_ROWS = len(LENGTHS)
PACKABLE = [name for name in MODELS if name != 'deberta']
"""DeBERTa's attention cannot be told the documents."""

pytestmark = pytest.mark.skipif(
    transformers.__version__.startswith('4.'),
    reason='encoders of Transformers 4 have no attention by documents, so packing is refused',
)


@pytest.mark.parametrize(('packing', 'microbatch_size'), [(False, 3), (True, NUM_ROWS)])
@pytest.mark.parametrize('name', PACKABLE)
def test_masked_models_are_exact(name, packing, microbatch_size):
    model = masked_model(name)
    batch = masked_batch(LENGTHS)

    assert_exact(model, batch, packing=packing, microbatch_size=microbatch_size)


@pytest.mark.parametrize('name', PACKABLE)
def test_eager_attention_to_few_documents(name):
    model = masked_model(name, 'eager')
    batch = masked_batch(LENGTHS)

    assert_exact(model, batch, packing=True, microbatch_size=1, reference_dtype=torch.float32)


@pytest.mark.parametrize('name', PACKABLE)
def test_left_padding_is_exact_or_refused(name):
    model = masked_model(name)
    batch = masked_batch(LENGTHS, side='left')

    if name == 'bert':  # it counts positions from column 0, padding included
        with pytest.raises(RuntimeError, match='positions'):
            fit(model, batch, packing=True)
    else:
        assert_exact(model, batch, packing=True, microbatch_size=3)


def test_attention_outside_the_interface_is_named():
    model = masked_model('deberta')

    with pytest.raises(RuntimeError, match='AttentionInterface'):
        fit(model, masked_batch(LENGTHS), packing=True)


def test_ids_of_padding_inside_a_row():
    """RoBERTa gives tokens with the id of padding the position of padding, and counts on without them."""
    batch = masked_batch(LENGTHS)
    batch['input_ids'][2, 4] = PAD
    batch['input_ids'][3, [0, 7]] = PAD
    model = masked_model('roberta')

    assert_exact(model, batch, packing=True, microbatch_size=3)


def test_labels_stay_where_they_are():
    """If labels are shifted, the label of a first token would be predicted from the document before it."""
    batch = masked_batch(LENGTHS)
    layout = BatchLayout.infer(batch)
    is_token = batch['attention_mask'].bool()
    labels_of_tokens = batch['labels'][is_token]

    unshifted = pack_rows(layout, with_counts(batch, LossRule.UNSHIFTED), text_attention())
    shifted = pack_rows(layout, with_counts(batch, LossRule.CAUSAL), text_attention())

    assert unshifted['attention_mask'].sum(dim=1).tolist() == LENGTHS
    assert torch.equal(unshifted['labels'][0], labels_of_tokens)
    is_first_token = unshifted['position_ids'][0] == 0
    labels_without_first = labels_of_tokens.masked_fill(is_first_token, -100)
    assert torch.equal(shifted['labels'][0], labels_without_first)


@pytest.mark.parametrize('pad', [0, 1])
def test_labels_on_padding_are_refused(pad):
    batch = masked_batch(LENGTHS)
    batch['labels'][0, LENGTHS[0] + pad] = 7
    model = masked_model('modernbert')

    with pytest.raises((ValueError, RuntimeError), match='labels on padding'):
        fit(model, batch, packing=True)


class Wrapper(torch.nn.Module):
    """Takes ids and mask as PEFT's models do, and hands them on."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, input_ids=None, attention_mask=None, **inputs):
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **inputs)


@pytest.mark.parametrize('name', ['modernbert', 'esm'])
def test_wrappers_are_called_once(name):
    """Only embeddings that look at the mask are called for each document."""
    model = masked_model(name)
    wrapper = Wrapper(model)
    batch = masked_batch(LENGTHS)
    expected_gradients, expected_loss = reference_gradients(masked_model(name), batch)
    layout = BatchLayout.infer(batch)
    packed = pack_rows(layout, with_counts(batch, LossRule.UNSHIFTED), DocumentAttention(wrapper))
    inputs = {key: packed[key] for key in ('input_ids', 'attention_mask', 'position_ids', 'labels')}

    outputs = wrapper(**inputs)
    outputs.loss.backward()

    assert outputs.loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(composer_gradients(model), expected_gradients) < 1e-6
