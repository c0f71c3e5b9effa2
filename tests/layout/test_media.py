# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which images, videos and audios belong to which row."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import BatchLayout
from tests.support.small_batches import LLAVA, QWEN, text_batch

IMAGE = 9


def llava_batch(ids, num_pixels, **entries):
    ids = torch.tensor(ids)
    batch = {'input_ids': ids, 'attention_mask': (ids != 0).long(), 'labels': ids}
    return {**batch, 'pixel_values': torch.rand(num_pixels, 3, 2, 2), **entries}


def test_touching_images_of_equal_size_are_told_apart():
    layout = BatchLayout(family=LLAVA, image_token_id=IMAGE)
    batch = llava_batch([[1, 9, 9, 9, 9, 2], [3, 4, 5, 6, 7, 8], [9, 9, 1, 0, 0, 0]], 3)
    assert layout.images_per_row(batch) == [2, 0, 1]


def test_image_broken_over_lines_is_one_image():
    layout = BatchLayout(family=LLAVA, image_token_id=IMAGE)
    batch = llava_batch([[9, 9, 1, 9, 9, 1], [9, 9, 1, 9, 9, 0]], 2)
    assert layout.images_per_row(batch) == [1, 1]


def test_images_of_unequal_size_are_not_told_apart_by_their_mean():
    """Pixtral: rows of 3 + 3 and 12 placeholders have the same mean size of 6 as rows of one and two images."""
    layout = BatchLayout(family=LLAVA, image_token_id=IMAGE)
    first, second = [9] * 3 + [1] + [9] * 3 + [0] * 6, [9] * 12 + [1]
    batch = llava_batch([first, second], 3, image_sizes=torch.tensor([[2, 2], [2, 2], [2, 8]]))
    assert layout.images_per_row(batch) == [2, 1]


def test_tiles_count_where_the_carried_number_counts_images():
    layout = BatchLayout(family=LLAVA, image_token_id=IMAGE)
    batch = llava_batch([[9, 9, 9, 1], [9, 1, 2, 3]], 4, num_images=[1, 1])
    assert layout.images_per_row(batch) == [3, 1]


@pytest.mark.parametrize('num_images', [[1, 1], None])
def test_images_that_nothing_tells_apart_are_refused(num_images):
    layout = BatchLayout(family=LLAVA, image_token_id=IMAGE)
    entries = {} if num_images is None else {'num_images': num_images}
    batch = llava_batch([[9, 9, 9, 1], [9, 9, 1, 2]], 3, **entries)
    with pytest.raises(ValueError, match=r'placeholders for 3 images, got: \[3, 2\] .* in 2 runs.*`num_images`'):
        layout.images_per_row(batch)


def test_qwen_images_are_found_by_their_grids():
    layout = BatchLayout(family=QWEN, image_token_id=IMAGE)
    ids = torch.tensor([[9, 9, 9, 1], [1, 2, 3, 4], [9, 1, 9, 9]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 4, 2]])  # 1, 2, 1, 2 tokens
    batch = {'input_ids': ids, 'image_grid_thw': grid, 'pixel_values': torch.arange(24.0)[:, None]}
    assert layout.images_per_row(batch) == [2, 0, 2]
    assert layout.select(batch, [2])['pixel_values'][:, 0].tolist() == list(range(12, 24))


def test_one_row_has_all_the_images():
    layout = BatchLayout(family=LLAVA)
    assert layout.images_per_row(llava_batch([[9, 9, 9, 9]], 3)) == [3]


def test_videos_go_with_their_rows():
    layout = BatchLayout(family=QWEN)
    batch = text_batch([3, 5, 2], num_images=[1, 0, 1], num_videos=[0, 2, 1])
    batch |= {'image_grid_thw': torch.tensor([[1, 2, 2], [1, 2, 4]]), 'pixel_values': torch.arange(12.0)[:, None]}
    batch |= {'video_grid_thw': torch.tensor([[2, 2, 2], [1, 2, 2], [3, 2, 2]])}
    batch |= {'pixel_values_videos': torch.arange(24.0)[:, None], 'second_per_grid_ts': torch.tensor([0.5, 1.0, 2.0])}
    assert layout.media_per_row(batch) == [1, 2, 2]
    part = layout.select(batch, [2, 1])
    assert part['pixel_values'][:, 0].tolist() == list(range(4, 12))
    assert part['pixel_values_videos'][:, 0].tolist() == [*range(12, 24), *range(12)]
    assert part['second_per_grid_ts'].tolist() == [2.0, 0.5, 1.0]
    assert not {'pixel_values', 'image_grid_thw'} & layout.select(batch, [1]).keys()
    with pytest.raises(ValueError, match='`num_videos` must sum to the 3 videos'):
        layout.select({**batch, 'num_videos': [0, 1, 1]}, [1])


def test_audio_goes_with_its_rows_and_needs_its_counts():
    batch = text_batch([3, 5, 2], num_audios=[1, 0, 2])
    batch |= {'input_features': torch.arange(3.0)[:, None, None].expand(3, 4, 6)}
    batch |= {'feature_attention_mask': torch.ones(3, 6)}
    layout = BatchLayout.infer(batch)
    assert layout.media_per_row(batch) == [1, 0, 2]
    part = layout.select(batch, [2, 1])
    assert part['input_features'][:, 0, 0].tolist() == [1, 2]
    assert len(part['feature_attention_mask']) == 2
    del batch['num_audios']
    with pytest.raises(ValueError, match='`num_audios` must sum to the 3 audios'):
        layout.select(batch, [1])
