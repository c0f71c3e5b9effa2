# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of real batches of every family: made by the processors of the family, and computed by its models."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout.families import FAMILIES as LAYOUTS
from tests.support.families import FAMILIES, IMAGE_FAMILIES, MEDIA, Case

TEXT_ROWS = [0, 4]
"""The rows of a case that have no image."""
IMAGE_ROWS = [1, 2, 3, 5]
UNCOUNTED = dict.fromkeys([*MEDIA, *IMAGE_FAMILIES])  # each name once
COUNT_TILES = ('idefics3', 'smolvlm')
"""Families whose rows count tiles if they carry no `num_images`."""
TOUCHING_IMAGES = {'llava_next': 5, 'llava_next_video': 5}
"""The row in which two images of unequal size have no token between them. Only `num_images` tells them apart."""

for_each_family = pytest.mark.parametrize('name', FAMILIES)


@functools.cache
def case_of(name: str) -> Case:
    return FAMILIES[name]()


@functools.cache
def uncounted(name: str) -> Case:
    """Returns a case whose rows carry no counts of media."""
    if name in MEDIA:
        return MEDIA[name]()
    case = FAMILIES[name]()
    for index, row in enumerate(case.rows):
        del row['num_images']
        del row['sample_ids']
        if name in COUNT_TILES and case.truth[index]['image']:
            case.truth[index]['image'] = row['pixel_values'].shape[1]
    return case


def joined(case: Case, layout: BatchLayout, rows, side: str = 'right'):
    """Returns a batch of some rows of the case."""
    samples = [case.rows[row] for row in rows]
    return layout.concat(
        samples,
        padding_side=side,
        pad_token_id=case.pad_token_id,
    )


def all_rows_joined(case: Case, layout: BatchLayout):
    every_row = range(len(case.rows))
    return joined(case, layout, every_row)


def counts_of(case: Case, rows, modality: str) -> list[int]:
    """Returns how many images, videos or audios these rows have, as the case tells."""
    counts = []
    for row in rows:
        media_of_row = case.truth[row]
        counts.append(media_of_row[modality])
    return counts


def layouts(case: Case):
    """Returns the layout of the model, and the layout that is inferred from a row with an image."""
    layout_of_model = BatchLayout.for_model(case.model)
    layout_of_row = BatchLayout.infer(case.rows[1])
    return [layout_of_model, layout_of_row]


def assert_same_batch(batch, expected):
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert batch[key] == value, key
            continue
        if key == 'pixel_attention_mask':  # Idefics3's processor of transformers 4.51 pads it with float64
            value = value.to(batch[key].dtype)
        torch.testing.assert_close(batch[key], value, rtol=0, atol=0)


def assert_same_row(row: dict[str, Any], expected: dict[str, Any]):
    """Equal tensors, apart from zeros that pad images to the largest of the batch (tiles, height, width)."""
    new_keys = row.keys() - expected.keys()
    assert new_keys <= {'batch_num_images'}
    for key, expected_value in expected.items():
        value = row[key]
        unpadded = tuple(slice(0, size) for size in expected_value.shape)
        padding = value.clone()
        padding[unpadded] = 0
        torch.testing.assert_close(
            value[unpadded],
            expected_value,
            rtol=0,
            atol=0,
            check_dtype=False,
            msg=key,
        )
        assert not padding.any(), key


def random_batches(case: Case, layout: BatchLayout, count: int):
    """Yields batches of random rows, some of them twice, and the numbers of these rows."""
    rng = random.Random(0)
    num_rows_of_case = len(case.rows)
    for index in range(count):
        num_rows = rng.randrange(2, 7)
        rows = [rng.randrange(num_rows_of_case) for _ in range(num_rows)]
        side = 'left' if index % 2 == 0 else 'right'
        batch = joined(case, layout, rows, side)
        yield batch, rows


# Rows that carry counts of their images.


def without_values_on_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch of Mllama in which no padding of the text and of the images attends to images.

    Its processor lets them attend, which changes no loss.
    """
    is_text = batch['attention_mask'][:, :, None, None]
    is_image = batch['aspect_ratio_ids'] != 0
    return {
        **batch,
        'cross_attention_mask': batch['cross_attention_mask'] * is_text,
        'aspect_ratio_mask': batch['aspect_ratio_mask'] * is_image.long()[:, :, None],
    }


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('rows', [IMAGE_ROWS, TEXT_ROWS], ids=['images', 'text'])
@for_each_family
def test_joined_rows_match_the_processors_batch(name, rows, side):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    samples = [case.samples[row] for row in rows]
    expected = case.encode.together(samples, padding_side=side)
    expected.pop('labels', None)  # PaliGemma's processor labels pads

    batch = joined(case, layout, rows, side)

    batch = {key: batch[key] for key in expected}
    if 'cross_attention_mask' in expected:
        batch = without_values_on_padding(batch)
        expected = without_values_on_padding(expected)
    assert_same_batch(batch, expected)


@pytest.mark.parametrize(
    'groups',
    [
        pytest.param([[0], [1], [2], [3], [4], [5]], id='each row'),
        pytest.param([[0, 1, 2], [3, 4, 5]], id='equal parts'),
        pytest.param([[0, 1], [2, 3, 4, 5]], id='unequal parts'),
    ],
)
@for_each_family
def test_splits_rejoin_to_the_batch(name, groups):
    case = case_of(name)
    for layout in layouts(case):
        batch = joined(case, layout, range(6))
        parts = []
        for rows in groups:
            part = layout.select(batch, rows)
            parts.append(layout.trim(part))

        rejoined = layout.concat(parts, pad_token_id=case.pad_token_id)

        assert_same_batch(rejoined, batch)


@for_each_family
def test_batch_without_any_image(name):
    case = case_of(name)
    for layout in layouts(case):
        batch = joined(case, layout, TEXT_ROWS)
        assert layout.media_per_row(batch) == [0, 0]

        batch['pixel_values'] = None
        layout_of_batch = BatchLayout.infer(batch)
        for selecting_layout in (layout, layout_of_batch):
            second_row = selecting_layout.select(batch, [1])
            assert second_row['pixel_values'] is None


@for_each_family
def test_layout_of_model_and_of_batch(name):
    case = case_of(name)
    family_of_model = BatchLayout.for_model(case.model).family
    family_of_config = BatchLayout.for_model(case.config).family
    family_of_batch = BatchLayout.infer(case.rows[1]).family

    assert family_of_model == family_of_config
    if family_of_model.entries:  # without entries, they are found in each batch
        assert family_of_model.entries == family_of_batch.entries


@for_each_family
def test_only_mllama_couples_rows(name):
    """Its loss of a text row changes if the batch has an image. The layout must say so, for the rules of a cut."""
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    text_row, image_row = case.rows[:2]
    both_rows = joined(case, layout, [0, 1])

    with torch.no_grad():
        text_loss = case.loss_sum(text_row)
        image_loss = case.loss_sum(image_row)
        joined_loss = case.loss_sum(both_rows)

    change = joined_loss - (text_loss + image_loss)
    is_coupled = abs(change) > 1e-3 * text_loss
    assert is_coupled == (name == 'mllama')
    assert bool(layout.family.coupling) == (name == 'mllama')


def test_no_type_has_two_entries():
    types = []
    for family in LAYOUTS:
        types.extend(family.model_types)

    assert len(types) == len(set(types))


def test_slots_of_other_rows_are_refused():
    """SmolVLM's processor makes a row of slots for each video, even if several videos are in one row of text."""
    case = case_of('smolvlm')
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, IMAGE_ROWS)
    batch['pixel_values'] = batch['pixel_values'][[0, 1, 2, 3, 3]]
    batch['pixel_attention_mask'] = None

    with pytest.raises(ValueError, match='a row of slots for each of 4 rows, got: 5'):
        layout.images_per_row(batch)


# Rows that carry no counts of their media.


@pytest.mark.parametrize('name', UNCOUNTED)
def test_rows_of_twenty_random_batches(name):
    case = uncounted(name)
    layout = BatchLayout.for_model(case.model)
    modalities = list(case.truth[0])
    num_unequal = 0  # batches that have rows with unequal numbers of media
    for batch, rows in random_batches(case, layout, 20):
        if TOUCHING_IMAGES.get(name) in rows:
            continue

        for modality in modalities:
            expected_counts = counts_of(case, rows, modality)
            assert layout.units_per_row(batch, modality) == expected_counts

        one_row_each = [[place] for place in range(len(rows))]
        parts = layout.split(batch, one_row_each)
        for part, row in zip(parts, rows, strict=True):
            trimmed = layout.trim(part)
            assert_same_row(trimmed, case.rows[row])

        media_of_rows = {sum(case.truth[row].values()) for row in rows}
        if len(media_of_rows) > 1:
            num_unequal += 1
    assert num_unequal > 5, 'too few batches have rows with unequal numbers of media'


def test_unequal_touching_images_need_their_number():
    case = uncounted('llava_next')
    layout = BatchLayout.for_model(case.model)
    rows = [1, TOUCHING_IMAGES['llava_next']]
    batch = joined(case, layout, rows)
    num_images = counts_of(case, rows, 'image')

    with pytest.raises(ValueError, match='Carry `num_images`'):
        layout.images_per_row(batch)

    batch['num_images'] = num_images
    assert layout.images_per_row(batch) == num_images


@pytest.mark.parametrize(
    ('name', 'modality'),
    [
        ('llava', 'image'),
        ('llava_next', 'image'),
        ('paligemma', 'image'),
        ('mistral3', 'image'),
        ('llava_onevision', 'video'),
        ('llava_next_video', 'video'),
        ('video_llava', 'video'),
        ('qwen2_audio', 'audio'),
    ],
)
def test_missing_model_names_the_key(name, modality):
    """Batches of these families have neither a grid nor slots. Only placeholders, whose id is in the config, tell."""
    case = uncounted(name)
    layout_of_model = BatchLayout.for_model(case.model)
    batch = all_rows_joined(case, layout_of_model)
    layout = BatchLayout.infer(batch)
    counts = counts_of(case, range(len(case.rows)), modality)

    message = f'{modality}s belong to .*`num_{modality}s` .*for_model'
    with pytest.raises(ValueError, match=message) as refusal:
        layout.units_per_row(batch, modality)
    assert '\n' not in str(refusal.value)

    batch[f'num_{modality}s'] = counts
    assert layout.units_per_row(batch, modality) == counts


def test_token_types_tell_images_of_qwen():
    case = case_of('qwen2_vl')
    row_with_image = case.rows[1]
    if 'mm_token_type_ids' not in row_with_image:
        pytest.skip('processors write token types since transformers 5')
    layout_of_a_row = BatchLayout.infer(row_with_image)
    batch = joined(case, layout_of_a_row, range(6))
    del batch['num_images']

    layout = BatchLayout.infer(batch)

    assert layout.images_per_row(batch) == [0, 1, 1, 2, 0, 3]


def test_wrong_carried_counts_give_way():
    case = uncounted('qwen3_vl')
    layout = BatchLayout.for_model(case.model)
    batch = all_rows_joined(case, layout)
    num_rows = len(case.rows)
    expected = counts_of(case, range(num_rows), 'video')
    one_for_each_row = [1] * num_rows
    too_few = expected[:-1]
    too_many = [*expected, 0]

    for wrong_counts in (one_for_each_row, too_few, too_many):
        batch['num_videos'] = wrong_counts
        assert layout.units_per_row(batch, 'video') == expected
