# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch

from composer_tokacc import count_tokens
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data.processor import train_tokenizer


def sample(ids, labels, num_images=0, sample_id='s'):
    made = {
        'input_ids': torch.tensor([ids]),
        'attention_mask': torch.ones(1, len(ids), dtype=torch.long),
        'labels': torch.tensor([labels]),
        'sample_ids': [sample_id],
        'num_images': [num_images],
    }
    if num_images:
        made['pixel_values'] = torch.full((num_images, 3, 2, 2), float(ids[0]))
    return made


def tokenizer(padding_side='right'):
    made = train_tokenizer(['a'], vocab_size=300)
    made.padding_side = padding_side
    return made


ROWS = [
    sample([5, 6, 7], [-100, 6, 7], sample_id='text'),
    sample([8, 9, 10, 11, 12], [8, -100, -100, -100, 12], num_images=2, sample_id='two'),
    sample([13], [13], num_images=1, sample_id='one'),
]


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_are_padded_on_tokenizers_side(side):
    batch = VisionLanguageCollator(tokenizer(side))(ROWS)
    pad = tokenizer().pad_token_id
    right = {
        'input_ids': [[5, 6, 7, pad, pad], [8, 9, 10, 11, 12], [13, pad, pad, pad, pad]],
        'attention_mask': [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]],
        'labels': [[-100, 6, 7, -100, -100], [8, -100, -100, -100, 12], [13, -100, -100, -100, -100]],
    }
    left = {
        'input_ids': [[pad, pad, 5, 6, 7], [8, 9, 10, 11, 12], [pad, pad, pad, pad, 13]],
        'attention_mask': [[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1]],
        'labels': [[-100, -100, -100, 6, 7], [8, -100, -100, -100, 12], [-100, -100, -100, -100, 13]],
    }
    for key, rows in (left if side == 'left' else right).items():
        assert batch[key].tolist() == rows


def test_lists_travel_with_the_rows():
    batch = VisionLanguageCollator(tokenizer())(ROWS)
    assert next(iter(batch)) == 'input_ids'
    assert batch['sample_ids'] == ['text', 'two', 'one']
    assert batch['num_images'] == [0, 2, 1]
    assert batch['pixel_values'][:, 0, 0, 0].tolist() == [8, 8, 13]


def test_first_label_behind_left_padding():
    # Behind padding, position 0 of a row is no longer position 0 of the batch: the model does predict it.
    batch = VisionLanguageCollator(tokenizer('left'))(ROWS)
    assert count_tokens(batch).loss_generating == (2, 1, 1)


def test_tokenizer_without_pad_token_is_refused():
    made = tokenizer()
    made.pad_token = None
    with pytest.raises(ValueError, match='`tokenizer` must have a pad token'):
        VisionLanguageCollator(made)
