# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The collator pads on the tokenizer's side and joins the lists and the images of the rows."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import count_tokens
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data.processor import train_tokenizer


def sample(ids, labels, num_images=0, sample_id='s'):
    tensors = {
        'input_ids': torch.tensor([ids]),
        'attention_mask': torch.ones(1, len(ids), dtype=torch.long),
        'labels': torch.tensor([labels]),
        'sample_ids': [sample_id],
        'num_images': [num_images],
    }
    if num_images:
        tensors['pixel_values'] = torch.full((num_images, 3, 2, 2), float(ids[0]))
    return tensors


def make_tokenizer(padding_side='right'):
    tokenizer = train_tokenizer(['a'], vocab_size=300)
    tokenizer.padding_side = padding_side
    return tokenizer


ROWS = [
    sample([5, 6, 7], [-100, 6, 7], sample_id='text'),
    sample([8, 9, 10, 11, 12], [8, -100, -100, -100, 12], num_images=2, sample_id='two'),
    sample([13], [13], num_images=1, sample_id='one'),
]


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_are_padded(side):
    tokenizer = make_tokenizer(side)
    batch = VisionLanguageCollator(tokenizer)(ROWS)
    fills = {'input_ids': tokenizer.pad_token_id, 'attention_mask': 0, 'labels': -100}
    for key, fill in fills.items():
        for padded, row in zip(batch[key].tolist(), ROWS, strict=True):
            entries = row[key][0].tolist()
            padding = [fill] * (5 - len(entries))
            expected = padding + entries if side == 'left' else entries + padding
            assert padded == expected, key


def test_left_padding_adds_a_loss_token():
    batch = VisionLanguageCollator(make_tokenizer('left'))(ROWS)
    # Padding moves the first label of a row away from position 0 of the batch, so the model does predict it.
    assert count_tokens(batch).loss_generating == (2, 1, 1)


def test_lists_travel_with_the_rows():
    batch = VisionLanguageCollator(make_tokenizer())(ROWS)
    assert next(iter(batch)) == 'input_ids'
    assert batch['sample_ids'] == ['text', 'two', 'one']
    assert batch['num_images'] == [0, 2, 1]
    assert batch['pixel_values'][:, 0, 0, 0].tolist() == [8, 8, 13]


def test_tokenizer_without_pad_token_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match='`tokenizer` must have a pad token'):
        VisionLanguageCollator(tokenizer)
