# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Counts of tokens by row, and of packed rows, against numbers that were counted by hand."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from composer.core.data_spec import DataSpec

from composer_tokacc import TokenCounts, count_tokens, counting, token_data_spec
from composer_tokacc.counting import LossRule
from composer_tokacc.row_counts import (
    RowCounts,
    attach_row_counts,
    num_samples,
    packed_counts,
    row_counts_of,
    with_counts,
)
from composer_tokacc.weights import LOSS_WEIGHTS
from tests.support.small_batches import additive, square_mask
from tests.support.text import (
    collate,
    one_layer_model,
    packed_row,
    positions_of,
    ragged_batch,
    text_row,
)
from tests.support.training import assert_exact, fit, loader


def test_padding_is_no_loss():
    batch = ragged_batch([(3, 2), (4, 3), (8, 7), (12, 11)])

    counts = count_tokens(batch)

    assert counts.loss_generating == (2, 3, 7, 11)
    assert counts.real == (3, 4, 8, 12)
    assert counts.padded == (9, 8, 4, 0)
    assert counts.num_loss_generating == 23
    assert counts.num_real == 27
    assert counts.num_padded == 21
    # Composer's own counter counts four rows of 12 tokens.
    stock_data = DataSpec([batch])
    assert stock_data.get_num_tokens_in_batch(batch, token_type='loss_generating') == 48


@pytest.mark.parametrize(
    ('new_labels', 'expected'),
    [
        ([True, False], True),
        ([False, True], True),
        ([False, False], False),
    ],
)
def test_new_label_in_a_packed_row(new_labels, expected):
    documents = [RowCounts(has_new_label=is_new) for is_new in new_labels]
    counts = packed_counts(documents)
    assert counts.has_new_label is expected


def test_one_token_has_no_loss():
    batch = collate([text_row(1, 1)])

    counts = count_tokens(batch)

    assert counts == TokenCounts(loss_generating=(0,), real=(1,), padded=(0,))


@pytest.fixture
def two_rows():
    """Rows of 3 and 6 tokens. Their last 2 and 4 tokens have labels."""
    return ragged_batch([(3, 2), (6, 4)])


def one_label_per_row(labels):
    return labels[:, 0]


def as_codes(labels):
    return labels[..., None]


@pytest.mark.parametrize(
    ('make_spec', 'has_ids'),
    [
        (DataSpec, True),
        (token_data_spec, True),
        (token_data_spec, False),
    ],
)
@pytest.mark.parametrize(
    ('change', 'description'),
    [
        (one_label_per_row, r'int64 of shape \(2,\)'),
        (as_codes, r'int64 of shape \(2, 6, 1\)'),
        (torch.Tensor.float, r'float32 of shape \(2, 6\)'),
    ],
)
def test_other_labels_are_refused(two_rows, change, description, make_spec, has_ids):
    batch = two_rows
    if not has_ids:
        del batch['input_ids']
    batch['labels'] = change(batch['labels'])
    data = make_spec(loader(batch))
    with pytest.raises(ValueError, match=f'`labels` .* integers .*{description}'):
        fit(one_layer_model(), data)


def first_row(tensor):
    return tensor[:1]


def without_first_column(tensor):
    return tensor[:, 1:]


@pytest.mark.parametrize(
    ('key', 'change', 'message'),
    [
        ('labels', first_row, '`labels` must have as many rows as `input_ids`, 2, got: 1'),
        ('attention_mask', first_row, '`attention_mask` must be'),
        ('attention_mask', torch.Tensor.tolist, '`attention_mask` must be .* list'),
        ('position_ids', without_first_column, '`position_ids` must be as wide'),
    ],
)
def test_entries_of_other_rows_are_not_counted(two_rows, key, change, message):
    batch = two_rows
    batch['position_ids'] = positions_of(batch)
    batch[key] = change(batch[key])
    with pytest.raises(ValueError, match=message):
        count_tokens(batch)


def test_positions_in_a_list_are_not_read(two_rows):
    expected = count_tokens(two_rows)
    two_rows['position_ids'] = positions_of(two_rows).tolist()
    assert count_tokens(two_rows) == expected


def test_left_padding_is_not_packing():
    """The positions of the pads are 0, as at the start of a document."""
    batch = ragged_batch([(3, 3), (6, 4)], side='left')
    batch['position_ids'] = positions_of(batch)
    counts = count_tokens(batch)
    assert counts.loss_generating == (3, 4)


def test_positions_without_mask_are_real():
    batch = ragged_batch([(6, 4)])
    del batch['attention_mask']
    counts = count_tokens(batch)
    assert counts.real == (6,)


@pytest.mark.parametrize('form', ['boolean', 'additive'])
@pytest.mark.parametrize('side', ['left', 'right'])
def test_square_mask_hides_padding(side, form):
    batch = ragged_batch([(3, 2), (6, 4)], side=side)
    mask = square_mask(batch)
    if form == 'additive':
        mask = additive(mask)
    batch['attention_mask'] = mask

    counts = count_tokens(batch)

    assert counts.real == (3, 6)
    assert counts.padded == (3, 0)


@pytest.mark.parametrize('rule', LossRule)
def test_rule_reads_as_its_value(rule):
    """Messages and files show a rule as users write it. Ranks and workers send rules to each other."""
    value = rule.value
    assert type(value) is str
    assert type(str(rule)) is str
    assert f'{rule} {rule!r} {rule:>20} {[rule]}' == f'{value} {value!r} {value:>20} {[value]}'
    assert json.dumps({'rule': rule}) == json.dumps({'rule': value})
    assert {value: 'found'}[rule] == 'found'
    assert LossRule(value) is rule
    assert LossRule(rule) is rule
    assert LossRule.named(value) is rule
    pickled = pickle.dumps(rule)
    assert pickle.loads(pickled) is rule
    assert copy.deepcopy(rule) is rule


@pytest.mark.parametrize('value', ['auto', 'Causal', '', None, True, ['causal']])
def test_unknown_rule_is_refused(value):
    with pytest.raises(ValueError, match="must be 'causal', 'causal_attended' or 'unshifted', got: "):
        LossRule(value)


def test_rule_may_be_left_open():
    assert LossRule.named('auto') is None

    message = "must be 'auto', 'causal', 'causal_attended' or 'unshifted', got: 'shifted'"
    with pytest.raises(ValueError, match=message):
        LossRule.named('shifted')


def test_each_rule_counts_its_own_tokens():
    """The first row has a label on its first token, which only the unshifted rule counts.

    A batch that is already counted by another rule is counted once more.
    """
    tokens_by_rule = [
        (LossRule.CAUSAL, 2),
        (LossRule.UNSHIFTED, 3),
        (LossRule.CAUSAL, 2),
    ]
    batch = ragged_batch([(3, 3), (6, 4)])
    for rule, num_tokens in tokens_by_rule:
        batch = with_counts(batch, rule)
        first, second = row_counts_of(batch)
        assert first == RowCounts(
            real_tokens=3,
            loss_tokens=num_tokens,
            loss_weight=num_tokens,
            rule=rule,
        )
        assert second == RowCounts(
            real_tokens=6,
            loss_tokens=4,
            loss_weight=4,
            rule=rule,
        )
        # Not numbers of torch or numpy, because checkpoints and loggers get them.
        assert type(first.loss_tokens) is int
        assert type(first.real_tokens) is int


def test_token_weights_are_added_to_counts():
    """With ``'sample'`` the tokens of a row together weigh 1."""
    batch = with_counts(ragged_batch([(3, 3), (6, 4)]))
    weights_of_rows = [row.loss_weight for row in row_counts_of(batch)]
    assert weights_of_rows == [2, 4]

    weighted = with_counts(batch, token_weights='sample')
    weights_of_rows = [row.loss_weight for row in row_counts_of(weighted)]
    assert weights_of_rows == pytest.approx([1.0, 1.0])
    sums_of_tokens = weighted[LOSS_WEIGHTS].sum(dim=1)
    assert sums_of_tokens.tolist() == pytest.approx([1.0, 1.0])


def test_dummy_rows_count_nothing(two_rows):
    batch = attach_row_counts(two_rows, [RowCounts(samples=0), RowCounts()])

    counted = with_counts(batch, LossRule.CAUSAL, 'sqrt')

    dummy, sample = row_counts_of(counted)
    assert dummy == RowCounts(samples=0, rule=LossRule.CAUSAL)
    assert sample.samples == 1
    assert sample.real_tokens == 6
    assert sample.loss_tokens == 4
    assert num_samples(counted) == 1
    labels_of_dummy = counted['labels'][0]
    assert (labels_of_dummy == -100).all()


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
    """Nothing predicts the first token of a document, whether it has a label or not."""
    four_tokens = text_row(4, 4)
    batch = packed([FIVE_TOKENS, THREE_TOKENS, four_tokens], masks_starts=masks_starts)
    counts = count_tokens(batch)
    assert counts.loss_generating == (4 + 2 + 3,)


def test_unshifted_counts_first_tokens_of_documents():
    batch = packed([FIVE_TOKENS, THREE_TOKENS], masks_starts=False)

    counts = count_tokens(batch, 'unshifted')
    (row,) = row_counts_of(with_counts(batch, LossRule.UNSHIFTED))

    assert counts.loss_generating == (5 + 3,)
    assert row.loss_tokens == 5 + 3


@pytest.mark.parametrize('masks_starts', [True, False])
def test_packed_rows_train_like_padded(masks_starts):
    long_documents = [FIVE_TOKENS, THREE_TOKENS]
    short_document = text_row(4, 2, seed=3)
    # Rows of different width cannot share a tensor, so the second row gets a document without labels.
    filler = text_row(4, 0, seed=4)
    first_row = packed(long_documents, masks_starts=masks_starts)
    second_row = packed([short_document, filler], masks_starts=masks_starts)
    packed_batch = {}
    for key in first_row:
        packed_batch[key] = torch.cat([first_row[key], second_row[key]])
    padded_batch = collate([*long_documents, short_document])

    assert_exact(one_layer_model(), loader(packed_batch), batch=padded_batch, microbatch_size=1)


@pytest.mark.parametrize('has_mask', [True, False])
def test_document_of_one_token(has_mask):
    """It has no loss, so only four tokens of the first document count."""
    one_token = text_row(1, 1)
    batch = packed([FIVE_TOKENS, one_token], masks_starts=False)
    if has_mask:
        batch['attention_mask'] = torch.ones(1, 6)
    counts = count_tokens(batch)
    assert counts.loss_generating == (4,)


# If a row is padded on the left, a pad predicts the label of its first token.
@pytest.mark.parametrize(
    ('columns', 'num_tokens'),
    [
        pytest.param(slice(2, 8), 5, id='padded left'),
        pytest.param(slice(0, 6), 4, id='padded right'),
    ],
)
def test_packing_ignores_padding(columns, num_tokens):
    """The second row has the first six tokens of the first one, and two pads."""
    full_row = packed([FIVE_TOKENS, THREE_TOKENS], masks_starts=False)
    full_row['attention_mask'] = torch.ones(1, 8, dtype=torch.long)
    batch = {}
    for key, value in full_row.items():
        fill = -100 if key == 'labels' else 0
        padded_row = torch.full_like(value, fill)
        padded_row[:, columns] = value[:, :6]  # the second document keeps one token
        batch[key] = torch.cat([value, padded_row])

    counts = count_tokens(batch)
    masked = counting.mask_document_starts(batch)

    assert counts.loss_generating == (4 + 2, num_tokens)
    has_label = masked['labels'] != -100
    assert has_label.sum(dim=1).tolist() == [7, 5]


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
    counts = count_tokens(batch)
    assert counts.loss_generating == (4,)
