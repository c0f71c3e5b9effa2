# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The collator pads on the tokenizer's side. Lists and images of the rows: see `test_llava.py`."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import count_tokens
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data.processor import train_tokenizer
from tests.support.text import collate


def sample(ids, labels):
    return {
        'input_ids': torch.tensor([ids]),
        'attention_mask': torch.ones(1, len(ids), dtype=torch.long),
        'labels': torch.tensor([labels]),
    }


def make_tokenizer(padding_side='right'):
    tokenizer = train_tokenizer(['a'], vocab_size=300)
    tokenizer.padding_side = padding_side
    return tokenizer


ROWS = [
    sample([5, 6, 7], [-100, 6, 7]),
    sample([8, 9, 10, 11, 12], [8, -100, -100, -100, 12]),
    sample([13], [13]),
]


@pytest.mark.parametrize(('side', 'labels_of_rows'), [('left', (2, 1, 1)), ('right', (2, 1, 0))])
def test_rows_are_padded(side, labels_of_rows):
    """Padding on the left moves the label of the last row away from column 0, so the model does predict it."""
    tokenizer = make_tokenizer(side)
    batch = VisionLanguageCollator(tokenizer)(ROWS)
    expected = collate(ROWS, side=side)
    is_padding = expected['attention_mask'] == 0
    expected['input_ids'][is_padding] = tokenizer.pad_token_id
    for key, entries in expected.items():
        assert torch.equal(batch[key], entries), key
    assert count_tokens(batch).loss_generating == labels_of_rows


def test_tokenizer_without_pad_token():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    batch = VisionLanguageCollator(tokenizer)(ROWS)
    is_padding = batch['attention_mask'] == 0
    assert is_padding.any()
    assert (batch['input_ids'][is_padding] == tokenizer.eos_token_id).all()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match='`tokenizer` must have a pad token'):
        VisionLanguageCollator(tokenizer)


def test_sample_of_two_rows_is_refused():
    """Its second row would be trained on, but have no name and no number of images."""
    two_rows = {'input_ids': torch.ones(2, 3, dtype=torch.long), 'labels': torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match=r'`samples` must be single rows, .* \(1, length\), got: \(2, 3\)'):
        VisionLanguageCollator(make_tokenizer())([ROWS[0], two_rows])
