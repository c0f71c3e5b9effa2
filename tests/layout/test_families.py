# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of real batches of every family: what their own processors make, and what their own models say to it."""

from __future__ import annotations

import functools
from itertools import cycle

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout.families import FAMILIES as LAYOUTS
from tests.support.families import FAMILIES, IMAGE_FAMILIES, FamilyCase

TEXT_ROWS, IMAGE_ROWS = [0, 4], [1, 2, 3, 5]
# Which rows the model's own loss couples cannot be told apart by any layout: see test_mllama_couples_rows.
ROW_SETS = {'mllama': [IMAGE_ROWS]}


@functools.cache
def case_of(name: str) -> FamilyCase:
    return FAMILIES[name]()


def joined(case: FamilyCase, layout: BatchLayout, rows, side: str = 'right'):
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


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_image_in_wrong_row_changes_loss(name):
    case = case_of(name)
    row = dict(case.rows[3])
    mixed = {**row, 'pixel_values': row['pixel_values'].flip(0 if 'aspect_ratio_ids' not in row else 1)}
    if 'pixel_attention_mask' in row:
        mixed['pixel_values'] = row['pixel_values'].flip(1)
    with torch.no_grad():
        assert abs(case.loss(mixed) / case.loss(row) - 1) > 1e-3


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('groups', [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3, 4, 5]]])
def test_splits_rejoin_to_the_batch(name, groups):
    case = case_of(name)
    for layout in layouts(case):
        batch = joined(case, layout, range(6))
        parts = [layout.trim(layout.select(batch, rows)) for rows in groups]
        assert_same_batch(layout.concat(parts, pad_token_id=case.pad_token_id), batch)


@pytest.mark.parametrize('name', FAMILIES)
def test_rows_in_another_order_and_back(name):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, range(6))
    order = [4, 2, 5, 0, 3, 1]
    back = [order.index(row) for row in range(6)]
    shuffled = layout.select(batch, order)
    assert shuffled['sample_ids'] == [f'sample-{row}' for row in order]
    assert_same_batch(layout.select(shuffled, back), batch)


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_no_pixel_is_lost_or_doubled(name):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, range(6))
    parts = [layout.select(batch, rows) for rows in ([5, 0], [4], [3, 1, 2])]

    def pixels(batches):
        values = torch.cat([part['pixel_values'].flatten().double() for part in batches if 'pixel_values' in part])
        return values[values != 0].sort().values

    torch.testing.assert_close(pixels(parts), pixels(case.rows[row] for row in IMAGE_ROWS), rtol=0, atol=0)
    assert not {'pixel_values', 'image_grid_thw', 'image_sizes', 'cross_attention_mask'} & parts[1].keys()


@pytest.mark.parametrize('name', FAMILIES)
def test_images_are_found_by_placeholders(name):
    case = case_of(name)
    layout = BatchLayout.for_model(case.model)
    batch = joined(case, layout, range(6))
    truth = layout.images_per_row(batch)
    assert [count > 0 for count in truth] == [bool(sample.images) for sample in case.samples]
    del batch['num_images']
    assert layout.images_per_row(batch) == truth
    assert layout.images_per_row(layout.select(batch, [3, 1, 0])) == [truth[3], truth[1], truth[0]]


@pytest.mark.parametrize('name', ['llava', 'llava_next', 'paligemma'])
def test_images_that_cannot_be_counted(name):
    case = case_of(name)
    layout = BatchLayout.infer(case.rows[1])
    batch = joined(case, layout, range(6))
    del batch['num_images']
    with pytest.raises(ValueError, match=r'which of 7 images belong to which of 6 rows.*Carry `num_images`.*for_model'):
        layout.select(batch, [1])


def test_token_types_tell_images_of_qwen():
    case = case_of('qwen2_vl')
    if 'mm_token_type_ids' not in case.rows[1]:
        pytest.skip('processors write token types since transformers 5')
    batch = joined(case, BatchLayout.infer(case.rows[1]), range(6))
    del batch['num_images']
    assert BatchLayout.infer(batch).images_per_row(batch) == [0, 1, 1, 2, 0, 3]


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
