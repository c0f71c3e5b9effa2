# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Layouts of models without an entry: rows get the entries that their placeholders say, or the batch is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout import describe
from composer_tokacc.layout.found import Reading, entries_per_row, joined_readings
from tests.support.small_batches import text_batch

IMAGE, VIDEO = 90, 91
CONFIG = SimpleNamespace(
    model_type='new_vl',
    vision_config=SimpleNamespace(),
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=88,
    image_newline_id=87,
)
TEXT = SimpleNamespace(model_type='new_text')


def rows_of(*texts, **entries):
    """Rows of the given ids, padded on the right with 0."""
    batch = text_batch([len(text) for text in texts], **entries)
    for row, text in enumerate(texts):
        batch['input_ids'][row, : len(text)] = torch.tensor(text)
    return batch


def numbered(count, *shape):
    return torch.arange(count).view(count, *[1] * len(shape)).expand(count, *shape).contiguous()


THREE = ([1, IMAGE, IMAGE, 2, IMAGE, IMAGE], [1, 2], [IMAGE, IMAGE, 3])
"""Two images, none, one; two placeholders each."""


@pytest.mark.parametrize(
    ('key', 'value', 'kept'),
    [
        ('pixel_values', numbered(3, 3, 4, 4), [[0, 1], [], [2]]),  # an image each (LLaVA, Llama 4, Gemma 3)
        ('pixel_values', numbered(6, 5), [[0, 1, 2, 3], [], [4, 5]]),  # a patch a placeholder (Molmo 2)
        ('pixel_values', numbered(24, 5), [[*range(16)], [], [*range(16, 24)]]),  # four merged patches each (Qwen)
        ('image_sizes', numbered(3, 2), [[0, 1], [], [2]]),
        ('patch_attention_mask', numbered(3, 2, 2), [[0, 1], [], [2]]),
    ],
)
def test_entries_of_images_follow_their_placeholders(key, value, kept):
    layout = BatchLayout.for_model(CONFIG)
    batch = rows_of(*THREE, **{key: value})
    parts = layout.split(batch, [[0], [1], [2], [2, 0]])
    expected = [*kept, kept[2] + kept[0]]
    found = [part[key].flatten(1)[:, 0].tolist() if key in part else [] for part in parts]
    assert found == expected
    assert layout.images_per_row(batch)[1] == 0


@pytest.mark.parametrize(
    ('key', 'value', 'expected'),
    [
        ('pixel_values', numbered(3, 3, 4, 4), [2, 0, 1]),  # an entry an image
        ('pixel_values', numbered(6, 5), [4, 0, 2]),  # an entry a placeholder
        ('pixel_values', numbered(24, 5), [16, 0, 8]),  # four entries a placeholder
    ],
)
def test_one_count_per_row(key, value, expected):
    """A list of ints, one for each row, which add up to the entries that there are."""
    batch = rows_of(*THREE, **{key: value})
    counts = entries_per_row(batch, CONFIG, 'image', len(value))
    assert counts == expected
    assert [type(count) for count in counts] == [int] * len(THREE)
    assert sum(counts) == len(value)


def test_unequal_images_told_by_grid():
    text = [[IMAGE] * 6, [1], [IMAGE] * 4]  # 4 + 2 placeholders without anything between them, and 4
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 4]])
    batch = rows_of(*text, pixel_values=numbered(40, 3), image_grid_thw=grid)
    first, _, last = BatchLayout.for_model(CONFIG).split(batch, [[0], [1], [2]])
    assert first['image_grid_thw'].tolist() == grid[:2].tolist()
    assert first['pixel_values'][:, 0].tolist() == list(range(24))
    assert last['pixel_values'][:, 0].tolist() == list(range(24, 40))


def test_tiles_are_told_by_their_number():
    tiles = torch.tensor([3, 1, 2])  # five placeholders a tile, but not the same number of them each
    text = [[IMAGE] * 16 + [1] + [IMAGE] * 5, [1], [IMAGE] * 11]
    batch = rows_of(*text, pixel_values=numbered(6, 3, 2, 2), num_image_tiles=tiles)
    first, middle, last = BatchLayout.for_model(CONFIG).split(batch, [[0], [1], [2]])
    assert [one['pixel_values'].flatten(1)[:, 0].tolist() for one in (first, last)] == [[0, 1, 2, 3], [4, 5]]
    assert 'pixel_values' not in middle


def test_two_modalities_in_one_batch():
    text = [[IMAGE, 1, VIDEO, VIDEO], [VIDEO, VIDEO, 2], [IMAGE, IMAGE]]
    batch = rows_of(*text, pixel_values=numbered(3, 2), pixel_values_videos=numbered(2, 3, 2))
    layout = BatchLayout.for_model(CONFIG)
    assert describe(layout, batch).counts == {'image': [1, 0, 2], 'video': [1, 1, 0]}
    one = layout.select(batch, [1])
    assert 'pixel_values' not in one
    assert one['pixel_values_videos'].flatten().tolist() == [1] * 6


def test_ambiguous_images_are_refused():
    layout = BatchLayout.for_model(CONFIG)
    merged = rows_of([IMAGE, IMAGE, IMAGE, 1], [1, 2], [IMAGE, 1, IMAGE], pixel_values=numbered(3, 3, 4, 4))
    with pytest.raises(ValueError, match=r'3 entries of images.*\[3, 0, 2\] placeholders in \[1, 0, 1\] runs'):
        layout.select(rows_of(*[[IMAGE] * 3, [1], [IMAGE] * 2], pixel_values=torch.ones(3, 3)), [0])
    assert layout.images_per_row(merged) == [1, 0, 2]  # runs alone fit
    assert layout.images_per_row({**merged, 'num_images': [2, 0, 1]}) == [2, 0, 1]


@pytest.mark.parametrize(
    ('key', 'value', 'kept'),
    [
        ('sample_weight', torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0])),
        ('teacher_logits', torch.arange(3.0)[:, None, None].expand(3, 6, 5), torch.full((1, 3, 5), 2.0)),
        ('moe_mm_token_type_ids', numbered(3, 6), torch.full((1, 3), 2)),
        ('num_items_in_batch', torch.tensor(7), torch.tensor(7)),
        ('temperature', torch.tensor([0.5]), torch.tensor([0.5])),
        ('position_ids', torch.arange(6)[None], torch.arange(3)[None]),
    ],
)
def test_unregistered_tensors_of_rows(key, value, kept):
    layout = BatchLayout.for_model(TEXT)
    batch = text_batch([6, 2, 3], **{key: value})
    trimmed = layout.trim(layout.select(batch, [2]))
    torch.testing.assert_close(trimmed[key], kept)


def test_encoder_without_placeholders():
    config = SimpleNamespace(model_type='new', vision_config=SimpleNamespace())
    batch = text_batch([3, 2], pixel_values=numbered(2, 3, 2, 2))
    assert BatchLayout.for_model(config).select(batch, [1])['pixel_values'].unique().tolist() == [1]


def test_adjacent_patches_told_by_sizes():
    sizes = torch.tensor([[2, 4], [2, 2], [4, 4]])  # two, one and four tokens; patches of 4 pixels
    text = [[IMAGE] * 2 + [1] + [IMAGE], [1], [IMAGE] * 4]
    pixels = torch.arange(4 * 28).expand(1, 3, 4, 4 * 28)  # as MiniCPM-V has them
    first, middle, last = BatchLayout.for_model(CONFIG).split(
        rows_of(*text, pixel_values=pixels, target_sizes=sizes), [[0], [1], [2]]
    )
    assert (first['pixel_values'].shape, last['pixel_values'].shape) == ((1, 3, 4, 48), (1, 3, 4, 64))
    assert last['pixel_values'][0, 0, 0, 0] == 48
    assert 'pixel_values' not in middle


def test_patches_of_selected_rows():
    pooling = torch.tensor([[0, 1], [2, -1], [4, 5], [6, 7], [8, 9], [10, -1]])  # Molmo 2: two tokens an image
    batch = rows_of(*THREE, pixel_values=numbered(3, 4, 5), image_token_pooling=pooling)
    layout = BatchLayout.for_model(CONFIG)
    alone = layout.select(batch, [2])
    assert alone['image_token_pooling'].tolist() == [[0, 1], [2, -1]]
    assert layout.select(batch, [2, 0])['image_token_pooling'][2:].tolist() == [[4, 5], [6, -1], [8, 9], [10, 11]]
    joined = layout.concat([layout.select(batch, [row]) for row in range(3)])
    assert joined['image_token_pooling'].tolist() == pooling.tolist()


def test_tiles_that_some_images_lack():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    batch = rows_of(*THREE, pixel_values_local=numbered(4, 3, 2, 2), num_local_patches=torch.tensor([4, 0, 0]))
    layout = BatchLayout.for_model(CONFIG)
    assert layout.select(batch, [0])['pixel_values_local'].shape[0] == 4
    masked = rows_of(*THREE, pixel_values=numbered(3, 3, 4), pixel_mask=mask)
    assert layout.select(masked, [2])['pixel_mask'].tolist() == [[1, 0, 0]]


def test_rows_without_ids():
    batch = {'labels': torch.ones(3, 2, dtype=torch.long), 'flattened_patches': numbered(3, 4, 5)}  # pix2struct
    assert BatchLayout.for_model(CONFIG).select(batch, [1])['flattened_patches'].unique().tolist() == [1]


def test_image_sizes_settle_the_count():
    """One large image and three small ones fill as many placeholders: four images would go two by two."""
    texts = [1, *[IMAGE] * 3, 2], [1, IMAGE, 2, IMAGE, 2, IMAGE]
    batch = rows_of(*texts, image_grid_thw=torch.tensor([[1, 2, 6], [1, 2, 2], [1, 2, 2], [1, 2, 2]]))
    assert BatchLayout.for_model(CONFIG).images_per_row(batch) == [1, 3]


# The meaning of a key.


def test_what_a_key_meant_before_decides():
    """As wide as the text in one batch, and not in another: then it is not text."""
    layout = BatchLayout.for_model(TEXT)
    wide, narrow = (text_batch(lengths, memory=torch.zeros(3, 8, 5)) for lengths in ([12, 2, 3], [8, 2, 3]))
    assert layout.entry_of(narrow, 'memory').seq_dims == (1,)
    assert layout.entry_of(wide, 'memory').seq_dims == ()
    decided = layout.with_readings(layout.readings_of(wide))
    assert decided.entry_of(narrow, 'memory').seq_dims == ()
    trimmed = decided.trim(decided.select(narrow, [1, 2]))
    assert (trimmed['input_ids'].shape, trimmed['memory'].shape) == ((2, 3), (2, 8, 5))


def test_key_of_another_meaning():
    layout = BatchLayout.for_model(TEXT)
    layout = layout.with_readings(layout.readings_of(text_batch([6, 2, 3], tags=torch.zeros(3, 4))))
    with pytest.raises(ValueError, match=r"batch\['tags'\].*one value for all rows.*one entry per row"):
        layout.entry_of(text_batch([6, 2, 3], tags=torch.zeros(1)), 'tags')


def test_two_batches_agree():
    layout = BatchLayout.for_model(TEXT)
    alone = layout.readings_of(text_batch([4], tags=torch.zeros(1, 4)))
    both = layout.readings_of(text_batch([4, 3], tags=torch.zeros(1, 4)))
    assert joined_readings(alone, both) == joined_readings(both, alone) == both == {'tags': (Reading.SHARED_TEXT,)}


@pytest.mark.parametrize(
    ('key', 'shape', 'mask_key'),
    [('pixel_values', (3, 6, 12), 'pixel_attention_mask'), ('input_features', (3, 5, 6), 'input_features_mask')],
    ids=['LFM2-VL', 'GLM-ASR'],
)
def test_media_mask_as_wide_as_text(key, shape, mask_key):
    """Three items in three rows, with as many patches or frames as the text has columns."""
    is_audio = key == 'input_features'
    layout = BatchLayout.for_model(SimpleNamespace(model_type='asr', audio_token_id=IMAGE) if is_audio else CONFIG)
    mask = torch.arange(18).view(3, 6)
    batch = rows_of(*THREE, **{key: torch.arange(3.0 * shape[1] * shape[2]).view(shape), mask_key: mask})
    trimmed = layout.trim(layout.select(batch, [2]))
    assert trimmed['input_ids'].shape == (1, 3)
    assert trimmed[mask_key].tolist() == mask[2:].tolist()
    torch.testing.assert_close(trimmed[key], batch[key][2:])


def test_text_integers_named_after_a_modality():
    layout = BatchLayout.for_model(CONFIG)
    marks = torch.arange(18).view(3, 6)
    batch = rows_of(*THREE, pixel_values=numbered(3, 3, 4, 4), image_marks=marks)
    assert layout.trim(layout.select(batch, [2]))['image_marks'].tolist() == marks[2:, :3].tolist()


@pytest.mark.parametrize('counts', [[2, 0, 1], torch.tensor([0, 3, 0])], ids=['list', 'tensor'])
def test_carried_counts_come_first(counts):
    config = SimpleNamespace(model_type='new', vision_config=SimpleNamespace())
    batch = text_batch([3, 2, 4], pixel_values=numbered(3, 3, 2, 2), num_images=counts)
    assert BatchLayout.for_model(config).images_per_row(batch) == list(counts)
