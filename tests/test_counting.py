# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from composer.core.data_spec import DataSpec

from composer_tokacc import TokenCounts, count_tokens, counting, token_data_spec
from composer_tokacc.row_counts import RowCounts, num_samples, rows_of, with_counts, with_rows
from composer_tokacc.weights import LOSS_WEIGHTS
from tests.support.text import collate, text_model, text_row, text_rows
from tests.support.training import assert_exact, fit, loader


def test_padding_is_no_loss():
    batch = collate(text_rows([(2 + 1, 2), (4, 3), (8, 7), (12, 11)]))
    counts = count_tokens(batch)
    assert counts == TokenCounts(loss_generating=(2, 3, 7, 11), real=(3, 4, 8, 12), padded=(9, 8, 4, 0))
    assert (counts.num_loss_generating, counts.num_real, counts.num_padded) == (23, 27, 21)
    assert DataSpec([batch]).get_num_tokens_in_batch(batch, token_type='loss_generating') == 48


@pytest.mark.parametrize('side', ['left', 'right'])
def test_first_position_never_counts_unless_unshifted(side):
    row = text_row(5, 5)  # a label at position 0
    batch = collate([row, text_row(3, 1)], side=side)
    assert count_tokens(batch).loss_generating == (4, 1)
    assert count_tokens(batch, 'unshifted').loss_generating == (5, 1)


def test_one_token_has_no_loss():
    assert count_tokens(collate([text_row(1, 1)])) == TokenCounts(loss_generating=(0,), real=(1,), padded=(0,))


@pytest.mark.parametrize('make', [loader, lambda batch: token_data_spec(loader(batch))], ids=['stock', 'ours'])
@pytest.mark.parametrize(
    ('wrong', 'got'),
    [
        (lambda labels: labels[:, 0], r'torch.int64 of shape \(2,\)'),
        (lambda labels: labels[..., None], r'torch.int64 of shape \(2, 6, 1\)'),
        (lambda labels: labels.float(), r'torch.float32 of shape \(2, 6\)'),
    ],
    ids=['of rows', 'of codes', 'floats'],
)
def test_labels_of_another_kind(wrong, got, make):
    batch = collate(text_rows([(3, 2), (6, 4)]))
    batch['labels'] = wrong(batch['labels'])
    with pytest.raises(ValueError, match=rf'`labels` must be integers of shape \(rows, width\).* got: {got}'):
        fit(text_model(), make(batch))


def test_unattended_labels_count_by_the_rule():
    batch = collate(text_rows([(3, 2), (6, 4)]), labels_on_pads=7)
    assert count_tokens(batch, 'causal').loss_generating == (5, 4)
    assert count_tokens(batch, 'causal_attended').loss_generating == (2, 4)


def test_left_padding_is_not_packing():
    batch = collate(text_rows([(3, 3), (6, 4)]), side='left')
    batch['position_ids'] = (batch['attention_mask'].cumsum(1) - 1).clamp(min=0)
    assert count_tokens(batch).loss_generating == (3, 4)


def test_positions_without_mask_are_real():
    batch = collate(text_rows([(6, 4)]))
    del batch['attention_mask']
    assert count_tokens(batch).real == (6,)


def test_each_rule_counts_its_own_tokens():
    batch = collate(text_rows([(3, 3), (6, 4)]))
    for rule, expected in (('causal', [2, 4]), ('unshifted', [3, 4]), ('causal', [2, 4])):
        batch = with_counts(batch, rule)
        rows = rows_of(batch)
        assert [(row.rule, row.loss_tokens) for row in rows] == [(rule, count) for count in expected]
        assert all(type(row.loss_tokens) is type(row.real_tokens) is int for row in rows)


def test_token_weights_are_added_to_counts():
    batch = with_counts(collate(text_rows([(3, 3), (6, 4)])))
    assert [row.loss_weight for row in rows_of(batch)] == [2, 4]
    weighted = with_counts(batch, token_weights='sample')
    assert [row.loss_weight for row in rows_of(weighted)] == pytest.approx([1.0, 1.0])
    assert weighted[LOSS_WEIGHTS].sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_rows_that_are_no_samples_count_nothing():
    batch = with_rows(collate(text_rows([(3, 2), (6, 4)])), [RowCounts(samples=0), RowCounts()])
    counted = with_counts(batch, 'causal', 'sqrt')
    added, sample = rows_of(counted)
    assert added == RowCounts(samples=0, rule='causal')
    assert (sample.samples, sample.real_tokens, sample.loss_tokens) == (1, 6, 4)
    assert num_samples(counted) == 1
    assert (counted['labels'][0] == -100).all()


# Packed rows.


def packed(rows, *, masked):
    ids, labels = (torch.cat([row[key] for row in rows], dim=1) for key in ('input_ids', 'labels'))
    lengths = [row['input_ids'].shape[1] for row in rows]
    if masked:
        starts = torch.tensor(lengths).cumsum(0)[:-1]
        labels[:, starts] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {'input_ids': ids, 'labels': labels, 'position_ids': positions}


@pytest.mark.parametrize('masked', [True, False])
def test_first_tokens_of_packed_documents(masked):
    rows = [text_row(5, 5, seed=1), text_row(3, 3, seed=2), text_row(4, 4, seed=3)]
    assert count_tokens(packed(rows, masked=masked)).loss_generating == (4 + 2 + 3,)


@pytest.mark.parametrize('masked', [True, False])
def test_packed_rows_train_like_padded(masked):
    model = text_model(attn_implementation='sdpa')
    long, short = [text_row(5, 5, seed=1), text_row(3, 3, seed=2)], [text_row(4, 2, seed=3)]
    batches = [packed(long, masked=masked), packed(short, masked=masked)]
    width = max(batch['input_ids'].shape[1] for batch in batches)
    assert width == 8
    # Two packed rows of different width cannot share a tensor, so the second is packed with an unlabelled document.
    filler = text_row(width - 4, 0, seed=4)
    batches[1] = packed([*short, filler], masked=masked)
    batch = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    assert_exact(model, loader(batch), batch=collate(long + short), microbatch_size=1)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_packing_ignores_padding(side):
    whole = packed([text_row(5, 5, seed=1), text_row(3, 3, seed=2)], masked=False)
    alone = count_tokens(whole).loss_generating
    short = {key: value[:, :6] for key, value in whole.items()}  # the second document has one token
    for mask in (torch.ones(1, 6), None):
        assert count_tokens({**short, **({} if mask is None else {'attention_mask': mask})}).loss_generating == (4,)
    padded = {key: torch.zeros(2, 8, dtype=torch.long) for key in ('input_ids', 'position_ids', 'attention_mask')}
    padded['labels'] = torch.full((2, 8), -100)
    columns = slice(2, 8) if side == 'left' else slice(0, 6)
    for key, value in {**whole, 'attention_mask': torch.ones(1, 8)}.items():
        padded[key][0] = value[0]
        padded[key][1, columns] = value[0, :6]
    # A label on the first token behind padding counts, as a pad predicts it.
    assert count_tokens(padded).loss_generating == (*alone, 4 + (side == 'left'))
    assert int((counting.mask_document_starts(padded)['labels'] != -100).sum()) == 7 + 5


def test_labels_that_packing_masks_are_said(caplog):
    counting._warn_once.cache_clear()
    batch = packed([text_row(5, 5, seed=1), text_row(3, 3, seed=2)], masked=False)
    with_counts(batch)
    with_counts(batch)
    assert [record.message.count('it is set to -100') for record in caplog.records] == [1]


def test_zero_positions_tell_no_documents():
    batch = packed([text_row(5, 5, seed=1)], masked=False)
    batch['position_ids'] = torch.zeros_like(batch['position_ids'])
    assert count_tokens(batch).loss_generating == (4,)
