# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of real batches of every family: made by the processors of the family, and computed by its models."""

from __future__ import annotations

import functools
import random
from itertools import cycle
from typing import Any

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout.families import FAMILIES as LAYOUTS
from tests.support.families import FAMILIES, IMAGE_FAMILIES, FamilyCase
from tests.support.family_media import MEDIA, Case

TEXT_ROWS, IMAGE_ROWS = [0, 4], [1, 2, 3, 5]
PIXELS = {'video': 'pixel_values_videos', 'image': 'pixel_values', 'audio': 'input_features'}
# Which rows the model's own loss couples cannot be told apart by any layout: see test_mllama_couples_rows.
ROW_SETS = {'mllama': [IMAGE_ROWS]}


@functools.cache
def case_of(name: str) -> FamilyCase:
    return FAMILIES[name]()


def joined(case: Case, layout: BatchLayout, rows, side: str = 'right'):
    return layout.concat([case.rows[row] for row in rows], padding_side=side, pad_token_id=case.pad_token_id)


def layouts(case: FamilyCase):
    return [BatchLayout.for_model(case.model), BatchLayout.infer(case.rows[1])]


def assert_same_batch(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            # Idefics3's processor of transformers 4.51 makes its mask float64 as soon as it pads.
            expected_value = value.to(found[key].dtype) if key == 'pixel_attention_mask' else value
            torch.testing.assert_close(
                found[key], expected_value, rtol=0, atol=0, msg=lambda text, key=key: f'{key}: {text}'
            )
        else:
            assert found[key] == value, key


@functools.cache
def uncounted(name: str) -> tuple[Case, list[dict[str, int]]]:
    """A case without carried counts, and the number of media of each row by modality."""
    if name in MEDIA:
        media_case = MEDIA[name]()
        return media_case, media_case.truth
    case = FAMILIES[name]()
    layout = BatchLayout.for_model(case.model)
    truth = [{'image': layout.images_per_row(row)[0]} for row in case.rows]
    assert [row['image'] > 0 for row in truth] == [bool(sample.images) for sample in case.samples]
    for row in case.rows:
        del row['num_images'], row['sample_ids']
    return case, truth


UNCOUNTED = [*MEDIA, *(name for name in IMAGE_FAMILIES if name not in MEDIA)]


def drawn_batches(case: Case, layout: BatchLayout, count: int):
    """Random rows, some of them twice, in random order, with the rows that each batch was made of."""
    rng = random.Random(0)
    for index in range(count):
        chosen = [rng.randrange(len(case.rows)) for _ in range(rng.randrange(2, 7))]
        side = ('left', 'right')[index % 2]
        yield joined(case, layout, chosen, side), chosen


def assert_same_row(found: dict[str, Any], row: dict[str, Any]):
    """Equal tensors; what was padded to the batch's largest (tiles, height, width) is padded with zeros."""
    assert found.keys() - row.keys() <= {'batch_num_images'}
    for key, expected in row.items():
        value = found[key].clone()
        inside = tuple(slice(0, size) for size in expected.shape)
        torch.testing.assert_close(value[inside], expected, rtol=0, atol=0, check_dtype=False, msg=key)
        value[inside] = 0
        assert not value.any(), key


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('name', FAMILIES)
def test_joined_rows_match_the_processors_batch(name, side):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    for rows in (IMAGE_ROWS, TEXT_ROWS):
        expected = case.encode.together([case.samples[row] for row in rows], padding_side=side)
        found = joined(case, layout, rows, side)
        expected.pop('labels', None)  # PaliGemma's processor labels pads
        if 'cross_attention_mask' in expected:  # Mllama's processor lets pads look, at images and in the vision tower
            is_text, is_image = found['attention_mask'], (found['aspect_ratio_ids'] != 0).long()
            for batch in (expected, found):
                batch['cross_attention_mask'] = batch['cross_attention_mask'] * is_text[:, :, None, None]
                batch['aspect_ratio_mask'] = batch['aspect_ratio_mask'] * is_image[:, :, None]
        assert_same_batch({key: found[key] for key in expected}, expected)


@pytest.mark.parametrize(('name', 'side'), zip(FAMILIES, cycle(['right', 'left']), strict=False))
def test_row_losses_add_up(name, side):
    case = case_of(name)
    for layout in layouts(case):
        for rows in ROW_SETS.get(name, [range(6)]):
            batch = joined(case, layout, rows, side)
            with torch.no_grad():
                whole = case.loss_sum(batch)
                alone = [case.loss_sum(layout.trim(layout.select(batch, [row]))) for row in range(len(rows))]
                grouped = [case.loss_sum(layout.trim(layout.select(batch, group))) for group in ([3, 0], [2, 1])]
                own = [case.loss_sum(case.rows[row]) for row in rows]
            torch.testing.assert_close(torch.stack(alone), torch.stack(own), rtol=1e-5, atol=0)
            torch.testing.assert_close(torch.stack(alone).sum(), whole, rtol=1e-5, atol=0)
            torch.testing.assert_close(torch.stack(grouped).sum(), sum(alone[:4]), rtol=1e-5, atol=0)


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('groups', [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3, 4, 5]]])
def test_splits_rejoin_to_the_batch(name, groups):
    case = case_of(name)
    for layout in layouts(case):
        batch = joined(case, layout, range(6))
        parts = [layout.trim(layout.select(batch, rows)) for rows in groups]
        assert_same_batch(layout.concat(parts, pad_token_id=case.pad_token_id), batch)


@pytest.mark.parametrize('name', UNCOUNTED)
def test_rows_of_twenty_random_batches(name):
    case, truth = uncounted(name)
    layout = BatchLayout.for_model(case.model)
    num_mixed = 0
    for batch, chosen in drawn_batches(case, layout, 20):
        for unit in truth[0]:
            assert layout.units_per_row(batch, unit) == [truth[row][unit] for row in chosen]
        parts = layout.split(batch, [[index] for index in range(len(chosen))])
        for part, row in zip(parts, chosen, strict=True):
            assert_same_row(layout.trim(part), case.rows[row])
        num_mixed += len({sum(truth[row].values()) for row in chosen}) > 1
    assert num_mixed > 10


@pytest.mark.parametrize('name', MEDIA)
def test_loss_of_parts_and_of_rows(name):
    case, _ = uncounted(name)
    layout = BatchLayout.for_model(case.model)
    with torch.no_grad():
        for batch, chosen in drawn_batches(case, layout, 3):
            own = sum(case.loss_sum(case.rows[row]) for row in chosen)
            parts = layout.split(batch, [range(0, len(chosen), 2), range(1, len(chosen), 2)])
            found = sum(case.loss_sum(layout.trim(part)) for part in parts)
            torch.testing.assert_close(found, own, rtol=1e-5, atol=0)


@pytest.mark.parametrize('name', UNCOUNTED)
def test_media_in_wrong_row_changes_loss(name):
    """Otherwise the sums of losses would show nothing."""
    case, truth = uncounted(name)
    modality = next(iter(reversed(truth[0])))
    row = next(row for row, counts in zip(case.rows, truth, strict=True) if counts[modality] > 1)
    pixels = row[PIXELS[modality]]
    has_slots = 'aspect_ratio_ids' in row or 'pixel_attention_mask' in row
    with torch.no_grad():
        mixed = {**row, PIXELS[modality]: pixels.flip(1 if has_slots else 0)}
        assert abs(case.loss(mixed) / case.loss(row) - 1) > (1e-4 if name in MEDIA else 1e-3)


@pytest.mark.parametrize(
    'name',
    [
        'llava',
        'llava_next',
        'paligemma',
        'llava_onevision',
        'llava_next_video',
        'video_llava',
        'qwen2_audio',
        'mistral3',
    ],
)
def test_missing_model_names_the_key(name):
    case, truth = uncounted(name)
    batch = joined(case, BatchLayout.for_model(case.model), range(len(case.rows)))
    modality = next(modality for modality in PIXELS if modality in truth[0])
    bare = BatchLayout.infer(batch)
    with pytest.raises(
        ValueError, match=f'which of .* {modality}s belong to .*Carry `num_{modality}s` .*for_model'
    ) as refusal:
        bare.units_per_row(batch, modality)
    assert '\n' not in str(refusal.value)
    counts = [row[modality] for row in truth]
    assert bare.units_per_row({**batch, f'num_{modality}s': counts}, modality) == counts


def test_token_types_tell_images_of_qwen():
    case = case_of('qwen2_vl')
    if 'mm_token_type_ids' not in case.rows[1]:
        pytest.skip('processors write token types since transformers 5')
    batch = joined(case, BatchLayout.infer(case.rows[1]), range(6))
    del batch['num_images']
    assert BatchLayout.infer(batch).images_per_row(batch) == [0, 1, 1, 2, 0, 3]


def test_wrong_carried_counts_give_way():
    case, truth = uncounted('qwen3_vl')
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, range(len(case.rows)))
    videos = [row['video'] for row in truth]
    assert layout.units_per_row({**batch, 'num_videos': [1] * len(videos)}, 'video') == videos
    assert layout.units_per_row({**batch, 'num_videos': videos[:-1]}, 'video') == videos


@pytest.mark.parametrize('name', FAMILIES)
def test_batch_without_any_image(name):
    case = case_of(name)
    for layout in layouts(case):
        batch = joined(case, layout, TEXT_ROWS)
        assert layout.media_per_row(batch) == [0, 0]
        none = {**batch, 'pixel_values': None}
        assert BatchLayout.infer(none).select(none, [1])['pixel_values'] is None
        assert layout.select(none, [1])['pixel_values'] is None
        with torch.no_grad():
            alone = [case.loss_sum(layout.trim(layout.select(batch, [row]))) for row in (0, 1)]
            torch.testing.assert_close(sum(alone), case.loss_sum(batch), rtol=1e-5, atol=0)


@pytest.mark.parametrize('name', FAMILIES)
def test_layout_of_model_and_of_batch(name):
    case = case_of(name)
    family = BatchLayout.for_model(case.model).family
    assert family == BatchLayout.for_model(case.config).family
    assert family.entries in ({}, BatchLayout.infer(case.rows[1]).family.entries)  # {}: they are found


@pytest.mark.parametrize('name', FAMILIES)
def test_only_mllama_couples_rows(name):
    """The model itself gives a text row another loss beside an image: no grouping is right for it, so it is named."""
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, [0, 1])
    with torch.no_grad():
        changed = case.loss_sum(batch) - case.loss_sum(case.rows[0]) - case.loss_sum(case.rows[1])
    assert (abs(changed) > 1e-3 * case.loss_sum(case.rows[0])) == (name == 'mllama') == bool(layout.family.coupling)


def test_no_type_has_two_entries():
    types = [model_type for family in LAYOUTS for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_slots_of_other_rows_are_refused():
    """SmolVLM's processor makes a row of slots for each video, however many stand in a row of text."""
    case = case_of('smolvlm')
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, IMAGE_ROWS)
    with pytest.raises(ValueError, match='a row of slots for each of 4 rows, got: 5'):
        layout.images_per_row(
            {**batch, 'pixel_values': batch['pixel_values'][[0, 1, 2, 3, 3]], 'pixel_attention_mask': None}
        )
