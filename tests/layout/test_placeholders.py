# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Placeholders of items; ``test_families.py`` tries them on real batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from composer_tokacc.layout import describe, placeholders
from tests.support.small_batches import IMAGE, VIDEO, drawn_batch, layout_of_model, numbered, numbers_of


def test_frames_of_glm_are_no_images():
    """GLM-4V writes the frames of a video as images, between the tokens 7 and 6, which start and end a video."""
    layout = layout_of_model(
        'glm4v',
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        video_start_token_id=7,
        video_end_token_id=6,
    )
    image_grids = [
        [1, 2, 4],
        [1, 2, 2],
    ]
    video_grids = [
        [2, 2, 2],
        [2, 2, 2],
        [1, 2, 2],
    ]
    batch = drawn_batch(
        'ii17i1i6',
        '7ii67i61',
        '1i123',
    )
    batch['image_grid_thw'] = torch.tensor(image_grids)
    batch['video_grid_thw'] = torch.tensor(video_grids)
    batch['pixel_values'] = torch.rand(12, 2)
    batch['pixel_values_videos'] = torch.rand(20, 2)

    facts = describe(layout, batch)

    assert layout.images_per_row(batch) == [1, 0, 1]
    assert layout.units_per_row(batch, 'video') == [1, 2, 0]
    assert layout.units_per_row(batch, 'video_patch') == [8, 12, 0]
    assert facts.media_sizes('image') == [2, None, 1]
    assert facts.media_sizes('video') == [2, 2, None]


def test_query_tokens_are_never_guessed():
    """BLIP-2 fills all placeholders in order, even if they were meant for other images."""
    layout = layout_of_model('blip-2', image_token_id=IMAGE, num_query_tokens=2)
    pixels = torch.rand(3, 3, 2, 2)
    batch = drawn_batch('ii11', 'iiii', '1234', pixel_values=pixels)
    cut_in_first_row = drawn_batch('1i11', 'iiii', '1234', pixel_values=pixels)
    cut_in_only_row = drawn_batch('1i11', pixel_values=pixels[:1])

    assert layout.images_per_row(batch) == [1, 2, 0]
    with pytest.raises(ValueError, match=r'got: rows with \[1, 4, 0\] placeholders, and images that need \[2, 2, 2\]'):
        layout.images_per_row(cut_in_first_row)
    with pytest.raises(ValueError, match=r'got: rows with \[1\] placeholders, and images that need \[2\]'):
        layout.images_per_row(cut_in_only_row)


@pytest.mark.parametrize(
    ('model_type', 'modality', 'shape', 'placeholders_of_item'),
    [
        pytest.param('instructblip', 'image', (1, 1, 1), 'ii', id='image'),
        pytest.param('instructblipvideo', 'video', (2, 1, 1, 1), 'iiii', id='video of two frames'),
    ],
)
def test_instruction_goes_with_its_media(model_type, modality, shape, placeholders_of_item):
    """The Q-Former reads ``qformer_input_ids``. They have a row for each item, not for each row of text."""
    token_id = {f'{modality}_token_id': IMAGE}
    layout = layout_of_model(model_type, num_query_tokens=2, **token_id)
    with_item = placeholders_of_item + '1'
    without = '1' * len(with_item)
    instructions = torch.tensor(
        [
            [0, 1],
            [2, 3],
        ]
    )
    two_items = {'pixel_values': numbered(2, *shape), 'qformer_input_ids': instructions}
    batch = drawn_batch(with_item, without, with_item, **two_items)
    one_item_without_placeholders = drawn_batch(without, without, with_item, **two_items)

    last_and_middle = layout.select(batch, [2, 1])
    middle = layout.select(batch, [1])

    assert layout.units_per_row(batch, modality) == [1, 0, 1]
    assert numbers_of(last_and_middle['pixel_values']) == [1]
    assert last_and_middle['qformer_input_ids'].tolist() == [[2, 3]]
    assert 'pixel_values' not in middle
    with pytest.raises(ValueError, match=r'got: rows with \[0, 0, \d\].*same `num_query_tokens`'):
        layout.units_per_row(one_item_without_placeholders, modality)


NO_IMAGES = torch.rand(0, 3, 2, 2)
NO_AUDIOS = torch.rand(0, 4, 40)


@pytest.mark.parametrize(
    ('model_type', 'unit', 'key', 'no_items'),
    [
        ('llava', 'image', 'pixel_values', NO_IMAGES),
        ('video_llava', 'image', 'pixel_values_images', NO_IMAGES),
        ('blip-2', 'image', 'pixel_values', NO_IMAGES),
        ('qwen2_audio', 'audio', 'input_features', NO_AUDIOS),
    ],
)
def test_tensor_of_no_items(model_type, unit, key, no_items):
    layout = layout_of_model(
        model_type,
        num_query_tokens=2,
        image_token_id=IMAGE,
        audio_token_id=IMAGE,
    )
    only_text = drawn_batch('1111', '1234', **{key: no_items})
    with_placeholder = drawn_batch('1i11', '1234', **{key: no_items})

    assert layout.units_per_row(only_text, unit) == [0, 0]
    with pytest.raises(ValueError, match=f'0 (whole|entries of) {unit}s'):
        layout.units_per_row(with_placeholder, unit)


def test_own_id_of_a_model_counts():
    """The config of its encoder repeats the name, with another value."""
    vision_config = SimpleNamespace(image_token_id=0)
    config = SimpleNamespace(image_token_id=IMAGE, vision_config=vision_config)

    assert placeholders.named_ids(config, 'image') == (IMAGE,)


def test_audio_expanded_by_the_model():
    """The text has one placeholder for each audio."""
    layout = layout_of_model('qwen2_audio', audio_token_id=IMAGE)
    batch = drawn_batch('1i1', '234', 'i1i')
    batch['input_features'] = torch.rand(3, 4, 40)
    batch['feature_attention_mask'] = torch.ones(3, 40)

    assert layout.units_per_row(batch, 'audio') == [1, 0, 2]


def test_row_cut_inside_an_audio():
    """Qwen-Omni computes such rows, but gives the next row the rest of the audio.

    Four frames fill a placeholder, so the audios have 4, 2 and 2 placeholders.
    """
    layout = layout_of_model('qwen2_5_omni_thinker', audio_token_id=IMAGE)
    mask = torch.zeros(3, 16, dtype=torch.long)
    for audio, num_frames in enumerate([16, 8, 8]):
        mask[audio, :num_frames] = 1
    audios = {'input_features': torch.rand(3, 2, 16), 'feature_attention_mask': mask}
    whole_audios = drawn_batch('iiiiii1', 'ii12', **audios)
    cut_audio = drawn_batch('iii1', 'ii12', 'ii12', **audios)
    message = r'3 whole audios, got: rows with \[3, 2, 2\] placeholders, .* need \[4, 2, 2\]'

    assert layout.units_per_row(whole_audios, 'audio') == [2, 1]
    with pytest.raises(ValueError, match=message):
        layout.units_per_row(cut_audio, 'audio')
