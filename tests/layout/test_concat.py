# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Joining batches: padding, and entries that only some of them have."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import BatchLayout
from tests.support.families import FAMILIES
from tests.support.small_batches import TEXT, text_batch


def test_padding_side_is_checked():
    with pytest.raises(ValueError, match="'left' or 'right', got: 'middle'"):
        BatchLayout(family=TEXT).concat([text_batch([3])], padding_side='middle')


def test_entry_that_only_some_samples_have_is_refused():
    layout = BatchLayout(family=TEXT)
    for key, value in (('token_type_ids', torch.zeros(1, 3).long()), ('sample_ids', ['a'])):
        with pytest.raises(ValueError, match=f'`{key}` must be in every batch or in none, got: 1 of 2'):
            layout.concat([text_batch([3]), {**text_batch([3]), key: value}])


def test_rows_without_images_may_lack_what_only_images_have():
    layout = BatchLayout.for_model(FAMILIES['llava_onevision']().model)
    with_image = {**text_batch([3]), 'pixel_values': torch.ones(1, 3, 3, 2, 2), 'image_sizes': torch.ones(1, 2)}
    with_image['batch_num_images'] = torch.tensor([1])
    joined = layout.concat([text_batch([2, 1]), with_image], pad_token_id=7)
    assert joined['batch_num_images'].tolist() == [0, 0, 1]
    assert joined['input_ids'].tolist() == [[1, 2, 7], [1, 0, 7], [1, 2, 3]]
    assert len(joined['pixel_values']) == 1
