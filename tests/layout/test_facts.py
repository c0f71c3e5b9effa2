# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about rows: a tensor that disagrees with the padding of the ids is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout import describe
from tests.support.small_batches import QWEN, text_batch

IMAGE = 90
LAYOUT = BatchLayout(family=QWEN, config=SimpleNamespace(image_token_id=IMAGE))


def batch_with_types(side: str, types_side: str) -> dict[str, torch.Tensor]:
    """Two rows, the second with two placeholders in the middle. Ids and types may be padded on different sides."""
    batch = text_batch([7, 4], side=side, names=['a', 'b'], sample_ids=['a', 'b'])
    first = 4 if side == 'left' else 1
    batch['input_ids'][1, first : first + 2] = IMAGE
    types = torch.zeros_like(batch['input_ids'])
    first = 4 if types_side == 'left' else 1
    types[1, first : first + 2] = 1
    return {**batch, 'mm_token_type_ids': types}


@pytest.mark.parametrize('side', ['left', 'right'])
def test_types_padded_like_the_ids(side):
    assert describe(LAYOUT, batch_with_types(side, side)).lengths == [7, 4]


@pytest.mark.parametrize('side', ['left', 'right'])
def test_types_padded_on_another_side(side):
    other = 'left' if side == 'right' else 'right'
    with pytest.raises(ValueError, match=r"mm_token_type_ids.*sample 'b'.*on which `input_ids` are padded"):
        describe(LAYOUT, batch_with_types(side, other))


def test_types_shifted_but_0_on_padding():
    """The types of the first row's image stand one token further, which padding does not show."""
    batch = batch_with_types('right', 'right')
    batch['mm_token_type_ids'][1] = torch.tensor([0, 0, 1, 1, 0, 0, 0])
    with pytest.raises(ValueError, match=r"must mark the placeholders of images.*column 1 of sample 'b'"):
        describe(LAYOUT, batch)


def test_types_in_holes_are_healthy():
    batch = batch_with_types('right', 'right')
    batch['attention_mask'][1, 1] = 0
    batch['labels'][1, 1] = -100
    assert describe(LAYOUT, batch).has_hole == [False, True]


def test_types_without_a_mark_are_healthy():
    batch = batch_with_types('left', 'left')
    batch['mm_token_type_ids'].zero_()
    assert describe(LAYOUT, batch).side == 'left'


def test_loss_mask_padded_on_another_side():
    batch = text_batch([6, 2], side='left')
    batch['loss_mask'] = batch['attention_mask'].flip(1)
    with pytest.raises(ValueError, match=r"batch\['loss_mask'\].*got: 1 in column 0 of row 1"):
        describe(LAYOUT, batch)


def test_facts_hold_until_an_entry_is_replaced():
    batch = batch_with_types('right', 'right')
    facts = describe(LAYOUT, batch)
    assert facts.describes(LAYOUT, batch)
    assert facts.describes(LAYOUT, dict(batch))
    assert not facts.describes(BatchLayout(family=QWEN, config=LAYOUT.config), batch)
    assert not facts.describes(LAYOUT, {**batch, 'more': torch.zeros(2)})
    batch['labels'] = batch['labels'].clone()
    assert not facts.describes(LAYOUT, batch)
