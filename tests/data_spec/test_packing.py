# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows packed behind each other: exact, or refused with the reason."""

from __future__ import annotations

import pytest
import torch
from composer.models import HuggingFaceModel
from transformers import MptConfig, MptForCausalLM

from composer_tokacc import BatchLayout, TokenMonitor, token_data_spec
from composer_tokacc.checks.cut_rules import CutRules
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.row_counts import RowCounts, attach_row_counts, row_counts_of, with_counts
from tests.support.text import (
    ONE_UNLABELLED,
    VOCABULARY,
    next_token_loss,
    one_layer_model,
    positions_of,
    ragged_batch,
    text_attention,
)
from tests.support.training import COMPOSERS_FLAG, assert_exact, fit, hugging_face, loader, relative_error


def packed_text(batch):
    """Returns the one row into which the rows of a batch of text are packed."""
    layout = BatchLayout.infer(batch)
    return pack_rows(layout, batch, text_attention())


@pytest.mark.parametrize(
    ('side', 'attention', 'microbatch_size'),
    [('left', 'sdpa', 1), ('left', 'eager', 2), ('right', 'sdpa', 2), ('right', 'sdpa', 6), ('right', 'eager', 1)],
)
def test_packed_text_is_exact(side, attention, microbatch_size):
    reference_dtype = torch.float32 if attention == 'eager' else torch.float64

    recorder = assert_exact(
        one_layer_model(attn_implementation=attention),
        ragged_batch(ONE_UNLABELLED, side=side),
        reference_dtype=reference_dtype,
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
        without_bounds = {'input_ids': batch['input_ids'], 'labels': batch['labels']}
        return forward(self, without_bounds)

    monkeypatch.setattr(type(model), 'forward', forward_without_bounds)

    with pytest.raises(RuntimeError, match=r'leak from one document to the next'):
        fit(model, ragged_batch(ONE_UNLABELLED), packing=True)


def test_leak_is_refused_in_half_precision():
    """In this fresh model the leak changes the gradient at the logits by 5e-3, less than the round-off of bfloat16."""
    torch.manual_seed(0)
    config = MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, max_seq_len=64, initializer_range=0.01)
    model = MptForCausalLM(config).bfloat16()

    with pytest.raises(RuntimeError, match=r'leak from one document to the next'):
        fit(model, ragged_batch(ONE_UNLABELLED), packing=True)


@pytest.mark.parametrize('packing', [True, 'auto'])
@pytest.mark.parametrize('options', [{}, COMPOSERS_FLAG])
def test_packing_without_the_algorithm_is_refused(packing, options):
    """With Composer's flag the DataSpec knows the model. It must not change the model's attention, nor its cache."""
    model = hugging_face(one_layer_model())
    config_before = model.config.to_dict()
    model_of_spec = model if options == COMPOSERS_FLAG else None
    batches = loader(ragged_batch(ONE_UNLABELLED))
    data = token_data_spec(batches, model=model_of_spec, packing=packing)

    with pytest.raises(RuntimeError, match=f'`packing={packing!r}` needs TokenAccumulation.*without .accumulate'):
        fit(model, data, algorithms=[], **options)

    assert model.config.to_dict() == config_before


def test_positions_without_padding_are_packed():
    batch = ragged_batch([(4, 2), (9, 7), (5, 3), (14, 11)], side='left')
    batch['position_ids'] = positions_of(batch)

    assert_exact(one_layer_model(), batch, packing=True)


def test_positions_of_the_batch_are_refused():
    batch = ragged_batch(ONE_UNLABELLED)
    batch['position_ids'] = torch.zeros_like(batch['input_ids'])

    with pytest.raises(ValueError, match='`position_ids` must be absent'):
        packed_text(batch)


def test_rows_without_ids_are_refused():
    batch = ragged_batch(ONE_UNLABELLED)
    embed = one_layer_model().get_input_embeddings()
    embeddings = embed(batch['input_ids']).detach()
    batch_without_ids = {**batch, 'input_ids': None, 'inputs_embeds': embeddings}

    with pytest.raises(ValueError, match='`input_ids` must be in the batch'):
        packed_text(batch_without_ids)


def batch_with_hole():
    """Returns a batch whose longest row has two tokens without attention in its middle."""
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
    """The first pad of a row has a label, which the last token predicts. The longest row has no pad."""
    batch = ragged_batch(ONE_UNLABELLED)
    for row, (length, _) in enumerate(ONE_UNLABELLED):
        batch['labels'][row, length : length + 1] = 7

    assert_exact(one_layer_model(), batch, packing=True)


def test_labels_on_padding_that_do_not_count():
    """A model that counts attended labels must not count them when it is packed."""
    batch = ragged_batch(ONE_UNLABELLED)
    without_labels_on_padding = packed_text(with_counts(batch, LossRule.CAUSAL_ATTENDED))
    for row, (length, _) in enumerate(ONE_UNLABELLED):
        batch['labels'][row, length : length + 2] = 7

    packed = packed_text(with_counts(batch, LossRule.CAUSAL_ATTENDED))

    for key in ('input_ids', 'labels', 'attention_mask', 'position_ids'):
        assert torch.equal(packed[key], without_labels_on_padding[key])


class AttendedLoss(HuggingFaceModel):
    """Does not count labels on padding. Packed rows have none, and their mask has a row for each document."""

    def loss(self, outputs, batch):
        labels = batch['labels']
        mask = batch['attention_mask']
        if mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, -100)
        return next_token_loss(outputs['logits'], labels)


@pytest.mark.parametrize('packing', [True, 'auto'])
def test_check_of_labels_on_padding(packing):
    """The first-batch check must compare each row with its document, which lacks the padding under such labels."""
    batch = ragged_batch(ONE_UNLABELLED)
    model = AttendedLoss(one_layer_model(), shift_labels=True, use_logits=True)
    expected = fit(model, batch, packing=packing).steps[0]
    for row, (length, _) in enumerate(ONE_UNLABELLED):
        batch['labels'][row, length : length + 2] = 7
    model = AttendedLoss(one_layer_model(), shift_labels=True, use_logits=True)

    recorder = fit(model, batch, packing=packing)

    assert relative_error(recorder.steps[0], expected) < 1e-6


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

    packed = packed_text(with_counts(batch))

    assert list(packed['num_images']) == [3]


def test_packed_row_keeps_numbers_of_samples():
    """Their sum would name another sample."""
    batch = {**ragged_batch([(4, 2), (5, 3)]), 'sample_ids': [3, 7]}

    packed = packed_text(batch)

    assert packed['sample_ids'] == [[3, 7]]


def test_packed_row_keeps_counts_of_documents():
    """The third row is a dummy row, so it adds nothing to the counts of the packed row.

    By the rule 'sqrt' the loss tokens of a row weigh as much as the square root of their number.
    """
    batch = {**ragged_batch([(4, 2), (5, 3), (3, 2)]), 'source': ['a', 'b', 'c']}
    counts = [RowCounts(), RowCounts(), RowCounts(samples=0)]
    counted = with_counts(attach_row_counts(batch, counts), token_weights='sqrt')

    packed = packed_text(counted)

    [counts_of_packed] = row_counts_of(packed)
    assert counts_of_packed.documents == tuple(row_counts_of(counted))
    assert [document.source for document in counts_of_packed.documents] == ['a', 'b', None]
    assert counts_of_packed.samples == 2
    assert counts_of_packed.real_tokens == 4 + 5
    assert counts_of_packed.loss_tokens == 2 + 3
    assert counts_of_packed.loss_weight == pytest.approx(2**0.5 + 3**0.5)


@pytest.mark.parametrize(('side', 'rule'), [('left', 'causal'), ('left', 'unshifted'), ('right', 'causal')])
def test_label_that_a_pad_predicts_is_not_packed(side, rule):
    """Later batches may have it, although those that were checked had none. No range of rows tells this."""
    batch = ragged_batch([(9, 9), (14, 11)], side=side)
    spec = token_data_spec(loader(batch), packing=True)
    layout = BatchLayout.infer(batch)
    split = split_of(spec.dataloader)
    split.start(one_layer_model(), batch, 2)
    split.adopt(CutRules(packing='documents'), layout)
    counted = with_counts(batch, LossRule(rule))

    if (side, rule) == ('left', 'causal'):
        with pytest.raises(ValueError, match='must have no label in packed rows'):
            spec.split_batch(counted, 2)
    else:
        [packed] = spec.split_batch(counted, 2)
        assert packed['input_ids'].shape == (1, 23)
