# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows packed behind each other: exact, or refused with the reason."""

from __future__ import annotations

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from composer_tokacc import BatchLayout, TokenMonitor, token_data_spec
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.row_counts import RowCounts, attach_row_counts, row_counts_of, with_counts
from tests.support.text import ONE_UNLABELLED, VOCABULARY, one_layer_model, ragged_batch, text_attention
from tests.support.training import COMPOSERS_FLAG, assert_exact, fit, hugging_face, loader, relative_error


@pytest.mark.parametrize(
    ('side', 'attention', 'microbatch_size'),
    [('left', 'sdpa', 1), ('left', 'eager', 2), ('right', 'sdpa', 2), ('right', 'sdpa', 6), ('right', 'eager', 1)],
)
def test_packed_text_is_exact(side, attention, microbatch_size):
    recorder = assert_exact(
        one_layer_model(attn_implementation=attention),
        ragged_batch(ONE_UNLABELLED, side=side),
        reference_dtype=torch.float32 if attention == 'eager' else torch.float64,
        packing=True,
        microbatch_size=microbatch_size,
        callbacks=[TokenMonitor()],
    )
    assert recorder.logged('token_monitor/padding_ratio') == [0.0]


def test_leak_between_documents_is_refused(monkeypatch):
    """Without bounds every document sees the ones before it.

    The positions are bounds too, because Transformers finds documents by positions that restart at 0.
    """
    model = hugging_face(one_layer_model())
    forward = type(model).forward

    def forward_without_bounds(self, batch):
        return forward(self, {'input_ids': batch['input_ids'], 'labels': batch['labels']})

    monkeypatch.setattr(type(model), 'forward', forward_without_bounds)
    with pytest.raises(RuntimeError, match=r'leak from one document to the next'):
        fit(model, ragged_batch(ONE_UNLABELLED), packing=True)


def test_leak_is_refused_in_half_precision():
    """It changes the gradient by the logits of this fresh model by 5e-3, less than the round-off of bfloat16."""
    torch.manual_seed(0)
    sizes = {'vocab_size': VOCABULARY, 'd_model': 32, 'n_layers': 2, 'n_heads': 2, 'max_seq_len': 64}
    config = MptConfig(initializer_range=0.01, **sizes)
    model = MptForCausalLM(config).bfloat16()
    with pytest.raises(RuntimeError, match=r'leak from one document to the next'):
        fit(model, ragged_batch(ONE_UNLABELLED), packing=True)


@pytest.mark.parametrize('packing', [True, 'auto'])
@pytest.mark.parametrize('options', [{}, COMPOSERS_FLAG])
def test_packing_without_the_algorithm_is_refused(packing, options):
    """With Composer's flag the DataSpec knows the model. It must not change the model's attention, nor its cache."""
    model = hugging_face(one_layer_model())
    config_before = model.config.to_dict()
    data = token_data_spec(loader(ragged_batch(ONE_UNLABELLED)), model=model if options else None, packing=packing)
    with pytest.raises(RuntimeError, match=f'`packing={packing!r}` needs TokenAccumulation.*without .accumulate'):
        fit(model, data, algorithms=[], **options)
    assert model.config.to_dict() == config_before


def test_positions_without_padding_are_packed():
    batch = ragged_batch([(4, 2), (9, 7), (5, 3), (14, 11)], side='left')
    batch['position_ids'] = (batch['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)
    assert_exact(one_layer_model(), batch, packing=True)


def test_positions_of_the_batch_are_refused():
    batch = ragged_batch(ONE_UNLABELLED)
    batch['position_ids'] = torch.zeros_like(batch['input_ids'])
    with pytest.raises(ValueError, match='`position_ids` must be absent'):
        pack_rows(BatchLayout.infer(batch), batch, text_attention())


def test_rows_without_ids_are_refused():
    batch = ragged_batch(ONE_UNLABELLED)
    embeddings = one_layer_model().get_input_embeddings()(batch['input_ids']).detach()
    batch = {**batch, 'input_ids': None, 'inputs_embeds': embeddings}
    with pytest.raises(ValueError, match='`input_ids` must be in the batch'):
        pack_rows(BatchLayout.infer(batch), batch, text_attention())


def batch_with_hole():
    batch = ragged_batch(ONE_UNLABELLED)
    batch['attention_mask'][3, 5:7] = 0
    batch['labels'][3, :8] = -100
    return batch


def batch_with_labels_on_padding():
    return ragged_batch(ONE_UNLABELLED, labels_on_pads=7)


@pytest.mark.parametrize('is_first_batch', [True, False])
@pytest.mark.parametrize('make', [batch_with_hole, batch_with_labels_on_padding])
def test_interrupted_rows_are_refused(make, is_first_batch):
    batches = [make()]
    if not is_first_batch:
        batches.insert(0, ragged_batch(ONE_UNLABELLED))
    with pytest.raises((ValueError, RuntimeError), match='Rows must be one run of tokens'):
        fit(one_layer_model(), *batches, packing=True)


def test_one_label_behind_the_tokens():
    batch = ragged_batch(ONE_UNLABELLED)
    for row, (length, _) in enumerate(ONE_UNLABELLED):
        batch['labels'][row, length : length + 1] = 7
    assert_exact(one_layer_model(), batch, packing=True)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_empty_rows_are_packed(side):
    """A rank's share of a step may be empty, and so may several microbatches."""
    full = ragged_batch(ONE_UNLABELLED)
    empty = ragged_batch(ONE_UNLABELLED, side=side)
    empty['attention_mask'][:] = 0
    empty['labels'][:] = -100
    recorder = fit(one_layer_model(), full, empty, full, packing=True)
    gradients_before, gradients_of_empty, gradients_after = recorder.steps
    for gradient in gradients_of_empty.values():
        assert not gradient.any()
    assert relative_error(gradients_after, gradients_before) < 1e-6
    assert recorder.logged('loss/train/total')[1] == 0


def test_row_without_tokens_is_no_document():
    """The check of the first batch compares documents with the rows that they were made of."""
    batch = ragged_batch([(4, 4), (9, 9), (5, 5), (7, 7)])  # so few rows that the check computes all of them
    batch['attention_mask'][2] = 0
    batch['labels'][2] = -100
    assert_exact(one_layer_model(), batch, packing=True)


@pytest.mark.parametrize('count', [list, torch.tensor], ids=['list', 'tensor'])
def test_packed_row_has_all_images(count):
    batch = {**ragged_batch([(4, 2), (5, 3), (3, 2)]), 'num_images': count([1, 0, 2])}
    packed = pack_rows(BatchLayout.infer(batch), with_counts(batch), text_attention())
    assert list(packed['num_images']) == [3]


def test_packed_row_keeps_numbers_of_samples():
    """Their sum would name another sample."""
    batch = {**ragged_batch([(4, 2), (5, 3)]), 'sample_ids': [3, 7]}
    packed = pack_rows(BatchLayout.infer(batch), batch, text_attention())
    assert packed['sample_ids'] == [[3, 7]]


def test_packed_row_keeps_counts_of_documents():
    batch = {**ragged_batch([(4, 2), (5, 3), (3, 2)]), 'source': ['a', 'b', 'c']}
    with_dummy = attach_row_counts(batch, [RowCounts(), RowCounts(), RowCounts(samples=0)])
    counted = with_counts(with_dummy, token_weights='sqrt')
    (packed,) = row_counts_of(pack_rows(BatchLayout.infer(counted), counted, text_attention()))
    assert packed.documents == tuple(row_counts_of(counted))
    assert [document.source for document in packed.documents] == ['a', 'b', None]
    assert packed.samples == 2
    assert packed.real_tokens == 9
    assert packed.loss_tokens == 5
    assert packed.loss_weight == pytest.approx(2**0.5 + 3**0.5)
