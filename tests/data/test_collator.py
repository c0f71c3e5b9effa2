# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The collator pads on the tokenizer's side. Lists and images of the rows: see `test_llava.py`."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import count_tokens
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data.processor import train_tokenizer


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
    # Padding on the left moves the label of the last row away from column 0, so the model does predict it.
    num_of_last_row = 1 if side == 'left' else 0
    assert count_tokens(batch).loss_generating == (2, 1, num_of_last_row)


def test_tokenizer_without_pad_token():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    batch = VisionLanguageCollator(tokenizer)(ROWS)
    assert batch['input_ids'][2].tolist() == [13, *[tokenizer.eos_token_id] * 4]
    assert batch['attention_mask'][2].tolist() == [1, 0, 0, 0, 0]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match='`tokenizer` must have a pad token'):
        VisionLanguageCollator(tokenizer)
