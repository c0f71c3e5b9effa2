# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which images, videos and audios belong to which row, from placeholders and config alone, without carried counts."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from composer_tokacc import BatchLayout
from composer_tokacc.layout import placeholders
from tests.support.families import FAMILIES, IMAGE_FAMILIES
from tests.support.family_media import MEDIA, MediaCase


@functools.cache
def case_of(name: str) -> MediaCase:
    if name in MEDIA:
        return MEDIA[name]()
    case = FAMILIES[name]()
    rows = [{key: value for key, value in row.items() if isinstance(value, torch.Tensor)} for row in case.rows]
    truth = [{'image': BatchLayout.for_model(case.model).images_per_row(row)[0]} for row in rows]
    return MediaCase(model=case.model, rows=rows, truth=truth, pad_token_id=case.pad_token_id)


def drawn_batches(case: MediaCase, layout: BatchLayout, count: int):
    """Random rows, some of them twice, in random order, with the rows that each batch was made of."""
    rng = random.Random(0)
    for index in range(count):
        chosen = [rng.randrange(len(case.rows)) for _ in range(rng.randrange(2, 7))]
        side = ('left', 'right')[index % 2]
        rows = [case.rows[row] for row in chosen]
        yield layout.concat(rows, padding_side=side, pad_token_id=case.pad_token_id), chosen


def assert_same_row(found, row):
    """Equal tensors; what was padded to the batch's largest (tiles, height, width) is padded with zeros."""
    assert found.keys() - row.keys() <= {'batch_num_images'}
    for key, expected in row.items():
        value = found[key].clone()
        inside = tuple(slice(0, size) for size in expected.shape)
        torch.testing.assert_close(value[inside], expected, rtol=0, atol=0, check_dtype=False, msg=key)
        value[inside] = 0
        assert not value.any(), key


@pytest.mark.parametrize('name', [*MEDIA, *(name for name in IMAGE_FAMILIES if name not in MEDIA)])
def test_rows_of_twenty_random_batches(name):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    num_mixed = 0
    for batch, chosen in drawn_batches(case, layout, 20):
        for unit in case.truth[0]:
            assert layout.units_per_row(batch, unit) == [case.truth[row][unit] for row in chosen]
        parts = layout.split(batch, [[index] for index in range(len(chosen))])
        for part, row in zip(parts, chosen, strict=True):
            assert_same_row(layout.trim(part), case.rows[row])
        num_mixed += len({sum(case.truth[row].values()) for row in chosen}) > 1
    assert num_mixed > 10


@pytest.mark.parametrize('name', MEDIA)
def test_loss_of_parts_and_of_rows(name):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    with torch.no_grad():
        for batch, chosen in drawn_batches(case, layout, 3):
            own = sum(case.loss_sum(case.rows[row]) for row in chosen)
            parts = layout.split(batch, [range(0, len(chosen), 2), range(1, len(chosen), 2)])
            found = sum(case.loss_sum(layout.trim(part)) for part in parts)
            torch.testing.assert_close(found, own, rtol=1e-5, atol=0)


@pytest.mark.parametrize('name', MEDIA)
def test_media_in_wrong_row_changes_loss(name):
    case = case_of(name)
    unit = next(iter(reversed(case.truth[0])))
    row = next(row for row, truth in zip(case.rows, case.truth, strict=True) if truth[unit] > 1)
    key = {'video': 'pixel_values_videos', 'image': 'pixel_values', 'audio': 'input_features'}[unit]
    with torch.no_grad():
        assert abs(case.loss({**row, key: row[key].flip(0)}) / case.loss(row) - 1) > 1e-4


@pytest.mark.parametrize('name', ['llava_onevision', 'llava_next_video', 'video_llava', 'qwen2_audio', 'mistral3'])
def test_missing_model_names_the_key(name):
    case = case_of(name)
    batch = BatchLayout.for_model(case.model).concat(case.rows, pad_token_id=case.pad_token_id)
    unit = next(unit for unit in ('video', 'audio', 'image') if unit in case.truth[0])
    bare = BatchLayout.infer(batch)
    with pytest.raises(ValueError, match=f'Carry `num_{unit}s` .*for_model') as refusal:
        bare.units_per_row(batch, unit)
    assert '\n' not in str(refusal.value)
    counts = [truth[unit] for truth in case.truth]
    assert bare.units_per_row({**batch, f'num_{unit}s': counts}, unit) == counts


def test_wrong_carried_counts_give_way():
    case = case_of('qwen3_vl')
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    videos = [truth['video'] for truth in case.truth]
    assert layout.units_per_row({**batch, 'num_videos': [1] * len(videos)}, 'video') == videos
    assert layout.units_per_row({**batch, 'num_videos': videos[:-1]}, 'video') == videos


# The sizes themselves, at the real models' sizes.

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
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=PINPOINTS['onevision'])
    sizes = random_sizes(1000)
    found = placeholders.anyres_capped({'image_sizes': torch.tensor(sizes)}, config, len(sizes), 0)
    assert found == [processor._get_number_of_features(*size, 384, 384) for size in sizes]
    assert max(found) < 27**2 * 12  # the cap was met
    both = {'image_sizes': torch.tensor(sizes[:3]), 'batch_num_images': torch.tensor([1, 0, 2])}
    assert placeholders.anyres_capped(both, config, 3, 0) == [found[0], 27**2 + 1, 27**2 + 1]


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
    """BLIP-2 fills as many placeholders as there are, whatever images they were meant for."""
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
