# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Placeholders of each item, at the real models' sizes; ``test_families.py`` tries them on real batches."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from composer_tokacc import BatchLayout
from composer_tokacc.layout import placeholders

PINPOINTS = {
    'next': [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    'onevision': [[384 * height, 384 * width] for height in range(1, 7) for width in range(1, 7)],
}


def random_sizes(count):
    rng = random.Random(0)
    return [(rng.randrange(20, 3000), rng.randrange(20, 3000)) for _ in range(count)]


def test_llava_next_counts_as_its_processor():
    processor = object.__new__(transformers.LlavaNextProcessor)
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=PINPOINTS['next'])
    vision = SimpleNamespace(image_size=336, patch_size=14)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=PINPOINTS['next'])
    sizes = random_sizes(1000)
    found = placeholders.anyres({'image_sizes': torch.tensor(sizes)}, config, len(sizes), 0)
    assert found == [processor._get_number_of_features(*size, 336, 336) for size in sizes]


def test_llava_onevision_counts_as_its_processor():
    processor = object.__new__(transformers.LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, 'anyres_max_9'
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=PINPOINTS['onevision'])
    vision = SimpleNamespace(image_size=384, patch_size=14)
    config = SimpleNamespace(
        vision_config=vision, image_grid_pinpoints=PINPOINTS['onevision'], vision_aspect_ratio='anyres_max_9'
    )
    sizes = random_sizes(1000)
    found = placeholders.anyres({'image_sizes': torch.tensor(sizes)}, config, len(sizes), 0)
    assert found == [processor._get_number_of_features(*size, 384, 384) for size in sizes]
    assert max(found) < 27**2 * 12  # the cap was met
    both = {'image_sizes': torch.tensor(sizes[:3]), 'batch_num_images': torch.tensor([1, 0, 2])}
    assert placeholders.anyres(both, config, 3, 0) == [found[0], 27**2 + 1, 27**2 + 1]


def test_frames_of_glm_are_no_images():
    """GLM-4V writes the frames of a video as images, between the tokens of a video."""
    config = SimpleNamespace(
        model_type='glm4v', image_token_id=9, video_token_id=8, video_start_token_id=7, video_end_token_id=6
    )
    ids = torch.tensor([[9, 9, 1, 7, 9, 1, 9, 6], [7, 9, 9, 6, 7, 9, 6, 1], [1, 9, 1, 2, 3, 0, 0, 0]])
    batch = {'input_ids': ids, 'attention_mask': (ids != 0).long()}
    batch |= {'image_grid_thw': torch.tensor([[1, 2, 4], [1, 2, 2]]), 'pixel_values': torch.rand(12, 2)}
    batch |= {'video_grid_thw': torch.tensor([[2, 2, 2], [2, 2, 2], [1, 2, 2]])}
    batch |= {'pixel_values_videos': torch.rand(20, 2)}
    layout = BatchLayout.for_model(config)
    assert layout.images_per_row(batch) == [1, 0, 1]
    assert layout.units_per_row(batch, 'video') == [1, 2, 0]
    assert layout.units_per_row(batch, 'video_patch') == [8, 12, 0]


def test_query_tokens_are_never_guessed():
    """BLIP-2 fills all placeholders in order, even if they were meant for other images."""
    config = SimpleNamespace(model_type='blip-2', image_token_id=9, num_query_tokens=2)
    layout, ids = BatchLayout.for_model(config), torch.tensor([[9, 9, 1, 1], [9, 9, 9, 9], [1, 2, 3, 4]])
    batch = {'input_ids': ids, 'pixel_values': torch.rand(3, 3, 2, 2)}
    assert layout.images_per_row(batch) == [1, 2, 0]
    ids[0, 0] = ids[2, 0] = 1
    with pytest.raises(ValueError, match=r'got: \[1, 4, 0\] by row, where the images fill \[2, 2, 2\]'):
        layout.images_per_row(batch)


@pytest.mark.parametrize(
    ('kind', 'unit', 'shape'),
    [('instructblip', 'image', (2, 1, 1, 1)), ('instructblipvideo', 'video', (2, 2, 1, 1, 1))],
)
def test_instruction_goes_with_its_media(kind, unit, shape):
    config = SimpleNamespace(model_type=kind, num_query_tokens=2, **{f'{unit}_token_id': 9})
    layout = BatchLayout.for_model(config)
    num_tokens = 2 if unit == 'image' else 4
    ids = torch.tensor([[9] * num_tokens + [1], [1] * (num_tokens + 1), [9] * num_tokens + [1]])
    batch = {'input_ids': ids, 'qformer_input_ids': torch.arange(4).view(2, 2)}
    batch |= {'pixel_values': torch.arange(2.0).view(2, *[1] * (len(shape) - 1)).expand(shape).clone()}
    assert layout.units_per_row(batch, unit) == [1, 0, 1]
    part = layout.select(batch, [2, 1])
    assert part['pixel_values'].unique().tolist() == [1]
    assert part['qformer_input_ids'].tolist() == [[2, 3]]
    assert 'pixel_values' not in layout.select(batch, [1])
    with pytest.raises(ValueError, match=r'got: \[0, 0, \d\] by row.*same `num_query_tokens`'):
        layout.units_per_row({**batch, 'input_ids': torch.cat([ids[1:2], ids[1:]])}, unit)


def test_audio_expanded_by_the_model():
    config = SimpleNamespace(model_type='qwen2_audio', audio_token_id=9)
    ids = torch.tensor([[1, 9, 1], [2, 3, 4], [9, 1, 9]])
    batch = {'input_ids': ids, 'input_features': torch.rand(3, 4, 40), 'feature_attention_mask': torch.ones(3, 40)}
    assert BatchLayout.for_model(config).units_per_row(batch, 'audio') == [1, 0, 2]
