# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Counts of tokens by row, and of packed rows, against numbers that were counted by hand."""

from __future__ import annotations

import pytest
import torch
from composer.core.data_spec import DataSpec

from composer_tokacc import TokenCounts, count_tokens, counting, token_data_spec
from composer_tokacc.row_counts import RowCounts, attach_row_counts, num_samples, row_counts_of, with_counts
from composer_tokacc.weights import LOSS_WEIGHTS
from tests.support.small_batches import additive, square_mask
from tests.support.text import collate, one_layer_model, packed_row, positions_of, ragged_batch, text_row
from tests.support.training import assert_exact, fit, loader


def test_padding_is_no_loss():
    batch = ragged_batch([(3, 2), (4, 3), (8, 7), (12, 11)])
    counts = count_tokens(batch)
    assert counts == TokenCounts(loss_generating=(2, 3, 7, 11), real=(3, 4, 8, 12), padded=(9, 8, 4, 0))
    assert counts.num_loss_generating == 23
    assert counts.num_real == 27
    assert counts.num_padded == 21
    # Composer's own counter counts four rows of 12 tokens.
    assert DataSpec([batch]).get_num_tokens_in_batch(batch, token_type='loss_generating') == 48


def test_one_token_has_no_loss():
    batch = collate([text_row(1, 1)])
    assert count_tokens(batch) == TokenCounts(loss_generating=(0,), real=(1,), padded=(0,))


@pytest.mark.parametrize(('has_data_spec', 'has_ids'), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    ('change', 'description'),
    [
        pytest.param(lambda labels: labels[:, 0], r'int64 of shape \(2,\)', id='one label per row'),
        pytest.param(lambda labels: labels[..., None], r'int64 of shape \(2, 6, 1\)', id='codes'),
        pytest.param(lambda labels: labels.float(), r'float32 of shape \(2, 6\)', id='floats'),
    ],
)
def test_other_labels_are_refused(change, description, has_data_spec, has_ids):
    batch = ragged_batch([(3, 2), (6, 4)])
    if not has_ids:
        del batch['input_ids']
    batch['labels'] = change(batch['labels'])
    data = loader(batch)
    if has_data_spec:
        data = token_data_spec(data)
    with pytest.raises(ValueError, match=f'`labels` .* integers .*{description}'):
        fit(one_layer_model(), data)


def test_left_padding_is_not_packing():
    batch = ragged_batch([(3, 3), (6, 4)], side='left')
    batch['position_ids'] = positions_of(batch)
    assert count_tokens(batch).loss_generating == (3, 4)


def test_positions_without_mask_are_real():
    batch = ragged_batch([(6, 4)])
    del batch['attention_mask']
    assert count_tokens(batch).real == (6,)


@pytest.mark.parametrize('form', ['boolean', 'additive'])
@pytest.mark.parametrize('side', ['left', 'right'])
def test_square_mask_hides_padding(side, form):
    batch = ragged_batch([(3, 2), (6, 4)], side=side)
    mask = square_mask(batch)
    batch['attention_mask'] = additive(mask) if form == 'additive' else mask
    counts = count_tokens(batch)
    assert counts.real == (3, 6)
    assert counts.padded == (3, 0)


def test_each_rule_counts_its_own_tokens():
    batch = ragged_batch([(3, 3), (6, 4)])
    # A batch that is already counted by another rule is counted once more.
    for rule, num_first_tokens in [('causal', 2), ('unshifted', 3), ('causal', 2)]:
        batch = with_counts(batch, rule)
        first, second = row_counts_of(batch)
        assert first == RowCounts(real_tokens=3, loss_tokens=num_first_tokens, loss_weight=num_first_tokens, rule=rule)
        assert second == RowCounts(real_tokens=6, loss_tokens=4, loss_weight=4, rule=rule)
        # Not numbers of torch or numpy, because checkpoints and loggers get them.
        assert {type(first.loss_tokens), type(first.real_tokens)} == {int}


def test_token_weights_are_added_to_counts():
    batch = with_counts(ragged_batch([(3, 3), (6, 4)]))
    assert [row.loss_weight for row in row_counts_of(batch)] == [2, 4]
    weighted = with_counts(batch, token_weights='sample')
    assert [row.loss_weight for row in row_counts_of(weighted)] == pytest.approx([1.0, 1.0])
    assert weighted[LOSS_WEIGHTS].sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_dummy_rows_count_nothing():
    batch = ragged_batch([(3, 2), (6, 4)])
    batch = attach_row_counts(batch, [RowCounts(samples=0), RowCounts()])
    counted = with_counts(batch, 'causal', 'sqrt')
    dummy, sample = row_counts_of(counted)
    assert dummy == RowCounts(samples=0, rule='causal')
    assert (sample.samples, sample.real_tokens, sample.loss_tokens) == (1, 6, 4)
    assert num_samples(counted) == 1
    assert (counted['labels'][0] == -100).all()


# Packed rows.

FIVE_TOKENS = text_row(5, 5, seed=1)
THREE_TOKENS = text_row(3, 3, seed=2)


def packed(documents, *, masks_starts):
    """Returns one row of several documents. ``masks_starts``: their first tokens have no label."""
    row = packed_row(documents)
    if masks_starts:
        is_start = row['position_ids'] == 0
        row['labels'][is_start] = -100
    return row


@pytest.mark.parametrize('masks_starts', [True, False])
def test_first_tokens_of_packed_documents(masks_starts):
    four_tokens = text_row(4, 4)
    batch = packed([FIVE_TOKENS, THREE_TOKENS, four_tokens], masks_starts=masks_starts)
    assert count_tokens(batch).loss_generating == (4 + 2 + 3,)


def test_unshifted_counts_first_tokens_of_documents():
    batch = packed([FIVE_TOKENS, THREE_TOKENS], masks_starts=False)
    assert count_tokens(batch, 'unshifted').loss_generating == (8,)
    (row,) = row_counts_of(with_counts(batch, 'unshifted'))
    assert row.loss_tokens == 8


@pytest.mark.parametrize('masks_starts', [True, False])
def test_packed_rows_train_like_padded(masks_starts):
    long_documents = [FIVE_TOKENS, THREE_TOKENS]
    short_document = text_row(4, 2, seed=3)
    # Rows of different width cannot share a tensor, so the second row gets a document without labels.
    filler = text_row(4, 0, seed=4)
    first = packed(long_documents, masks_starts=masks_starts)
    second = packed([short_document, filler], masks_starts=masks_starts)
    packed_batch = {key: torch.cat([first[key], second[key]]) for key in first}
    padded_batch = collate([*long_documents, short_document])
    assert_exact(one_layer_model(), loader(packed_batch), batch=padded_batch, microbatch_size=1)


@pytest.mark.parametrize('has_mask', [True, False])
def test_document_of_one_token(has_mask):
    batch = packed([FIVE_TOKENS, text_row(1, 1)], masks_starts=False)
    if has_mask:
        batch['attention_mask'] = torch.ones(1, 6)
    assert count_tokens(batch).loss_generating == (4,)


# If a row is padded on the left, a pad predicts the label of its first token.
@pytest.mark.parametrize(
    ('columns', 'num_tokens'), [(slice(2, 8), 5), (slice(0, 6), 4)], ids=['padded left', 'padded right']
)
def test_packing_ignores_padding(columns, num_tokens):
    full_row = packed([FIVE_TOKENS, THREE_TOKENS], masks_starts=False)
    full_row['attention_mask'] = torch.ones(1, 8, dtype=torch.long)
    batch = {}
    for key, value in full_row.items():
        fill = -100 if key == 'labels' else 0
        padded_row = torch.full_like(value, fill)
        padded_row[:, columns] = value[:, :6]  # the second document keeps one token
        batch[key] = torch.cat([value, padded_row])
    assert count_tokens(batch).loss_generating == (4 + 2, num_tokens)
    kept_labels = counting.mask_document_starts(batch)['labels'] != -100
    assert kept_labels.sum(dim=1).tolist() == [7, 5]


def test_masked_labels_are_reported_once(caplog):
    counting._warn_once.cache_clear()
    batch = packed([FIVE_TOKENS, THREE_TOKENS], masks_starts=False)
    with_counts(batch)
    with_counts(batch)
    (record,) = caplog.records
    assert 'set to -100' in record.message


def test_zero_positions_tell_no_documents():
    batch = packed([FIVE_TOKENS], masks_starts=False)
    batch['position_ids'] = torch.zeros_like(batch['position_ids'])
    assert count_tokens(batch).loss_generating == (4,)
