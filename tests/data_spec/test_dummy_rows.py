# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Zero-weight rows change neither the loss nor the gradient of a microbatch's own rows, in every family."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.data_spec import split
from composer_tokacc.data_spec.pieces import (
    CutRules,
    Piece,
    add_rows,
    build,
    missing_dummies,
    smallest_row,
    zero_weight,
)
from composer_tokacc.layout import describe
from composer_tokacc.planning import CutOptions, pack_lengths
from composer_tokacc.row_counts import RowCounts, num_samples, row_counts_of, with_counts
from tests.matrix.native_models import NativeModel
from tests.model_types.tiny import float32_model, tiny_config
from tests.support.exactness import family_batch
from tests.support.families import FAMILIES, IMAGE_FAMILIES, MEDIA, Case
from tests.support.family_processors import word_tokenizer
from tests.support.small_batches import text_batch
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import (
    composer_gradients,
    in_double,
    loader,
    reference_gradients,
    relative_error,
    tensors_in,
)

TEXT_ROWS = [0, 4]
for_each_family = pytest.mark.parametrize('name', IMAGE_FAMILIES)


@functools.cache
def case_of(name: str) -> tuple[Case, BatchLayout]:
    case = FAMILIES[name]()
    return case, BatchLayout.for_model(case.model)


@functools.cache
def media_case_of(name: str) -> tuple[Any, BatchLayout]:
    """Returns a case of a family with rows of videos too."""
    case = MEDIA[name]()
    return case, BatchLayout.for_model(case.model)


def batch_of(case: Case, rows, side: str = 'right'):
    """Returns rows of the case's batch, trimmed as a split trims them."""
    layout = BatchLayout.for_model(case.model)
    batch = with_counts(family_batch(case, side=side))
    return layout.trim(layout.select(batch, rows))


def loss_and_gradients(case: Case, batch):
    """Returns the sum of the losses of a batch, and the gradients of this sum."""
    if case.name == 'mllama':
        # Its gradients are so large where text attends to empty images that float32 is off by 2e-6.
        case = replace(case, model=in_double(case.model))
        batch = tensors_in(batch, torch.float64)
    case.model.zero_grad()
    loss = case.loss_sum(batch)
    loss.backward()
    return loss.detach(), composer_gradients(case.model)


def expected_loss_and_gradients(case: Case, side: str):
    """Returns loss and gradients of the text rows in a batch with images.

    Mllama's loss of a text row depends on whether the batch has any image. So for Mllama an image row without labels is
    added.
    """
    if case.name != 'mllama':
        return loss_and_gradients(case, batch_of(case, TEXT_ROWS, side))
    batch = batch_of(case, [*TEXT_ROWS, 3], side)
    batch['labels'][2] = -100
    return loss_and_gradients(case, batch)


# Dummy rows with an image, in every family.


@pytest.mark.parametrize(('spare', 'side'), [(1, 'right'), (5, 'left')], ids=['narrower, right', 'wider, left'])
@for_each_family
def test_dummy_image_row_changes_no_gradient(name, spare, side):
    case, layout = case_of(name)
    loss, gradients = expected_loss_and_gradients(case, side)
    microbatch = batch_of(case, TEXT_ROWS, side)
    _, gradients_of_text = loss_and_gradients(case, microbatch)
    dummy = zero_weight(batch_of(case, [spare], side))
    padded = add_rows(layout, microbatch, [dummy], side)
    num_placeholders = int((dummy['input_ids'] == layout.image_token_id).sum())
    assert num_placeholders > 0
    assert int((padded['input_ids'] == layout.image_token_id).sum()) == num_placeholders, 'pads are none'
    padded_loss, padded_gradients = loss_and_gradients(case, padded)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=0)
    assert relative_error(padded_gradients, gradients) < 1e-6
    # The purpose of the row: every parameter gets a gradient, so that no rank waits for another.
    trained = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
    assert len(padded_gradients) == len(trained)
    assert len(gradients_of_text) < len(trained)


def test_dummy_rows_are_no_samples():
    case, layout = case_of('llava')
    microbatch = batch_of(case, TEXT_ROWS)
    row = batch_of(case, [1])
    padded = add_rows(layout, microbatch, [zero_weight(row)], 'right')
    assert (row['labels'] != -100).any()  # the original keeps its labels
    assert layout.num_rows(padded) == 3
    assert num_samples(padded) == num_samples(microbatch) == 2
    assert row_counts_of(padded) == [*row_counts_of(microbatch), RowCounts(samples=0, rule='causal')]
    spec = token_data_spec(loader(microbatch))
    assert spec.get_num_samples_in_batch(padded) == 2
    assert spec.get_num_tokens_in_batch(padded) == spec.get_num_tokens_in_batch(microbatch)


@for_each_family
def test_dummy_row_is_the_smallest(name):
    case, layout = case_of(name)
    batch = batch_of(case, range(6), 'left')
    row = smallest_row([describe(layout, batch)], 'image')
    fewest_images = min(num_images for num_images in layout.images_per_row(batch) if num_images > 0)
    assert layout.images_per_row(row) == [fewest_images]
    assert row['sample_ids'][0] in ('sample-1', 'sample-2')
    assert describe(layout, row).lengths == [row['input_ids'].shape[1]]
    assert num_samples(row) == 0


# Dummy rows of some families.


def test_dummy_row_brings_no_new_lists():
    case, layout = case_of('llava')
    microbatch = batch_of(case, TEXT_ROWS)
    del microbatch['sample_ids']
    padded = add_rows(layout, microbatch, [zero_weight(batch_of(case, [1]))], 'right')
    assert 'sample_ids' not in padded
    assert padded['num_images'] == [0, 0, 1]


def test_padding_of_row_beginning_with_placeholder():
    case, layout = media_case_of('video_llava')
    row = case.rows[case.truth.index({'image': 2, 'video': 0})]
    spare = case.rows[case.kinds.index('video')]
    assert row['input_ids'][0, 0] == case.model.config.image_token_id
    batch = add_rows(layout, row, [zero_weight(spare)], 'right')
    assert layout.images_per_row(batch) == [2, 0]
    torch.testing.assert_close(case.loss_sum(batch), case.loss_sum(row), rtol=1e-5, atol=0)


def test_dummy_row_is_padded_as_batch():
    case, layout = case_of('llava')
    facts = describe(layout, batch_of(case, range(6), 'left'))
    shorter_text = min(TEXT_ROWS, key=facts.lengths.__getitem__)
    dummies = {'image': describe(layout, smallest_row([facts], 'image'))}
    piece = Piece.from_facts(facts, CutRules(left=sys.maxsize), CutOptions()).take([shorter_text])
    missing = missing_dummies(dummies, facts, [shorter_text])
    (microbatch,) = build([replace(piece, dummies=missing)])
    mask = microbatch['attention_mask'][0]
    length = facts.lengths[shorter_text]
    assert len(mask) > length
    assert mask[-length:].all()


# Dummy rows that a rank adds because of another rank.


@pytest.fixture
def some_rank_has_videos(two_ranks, monkeypatch):
    """Both ranks have an image and lack it in some row; some rank has a video, and some rank lacks one."""

    def max_over_ranks(values):
        if len(values) != 6:  # a count
            return list(values)
        # Whether a rank has image, video and audio, and whether a rank lacks them.
        return [1, 1, 0, *values[3:]]

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)


def receive(monkeypatch, row):
    """Lets the other rank send this row as its dummy row."""
    monkeypatch.setattr(split, 'from_any_rank', lambda own_row: own_row or zero_weight(row))


def packed_microbatches(batch, layout, slot_tokens):
    spec = token_data_spec(loader(batch), layout=layout, packing=True, slot_tokens=slot_tokens)
    split_of_loader = split.split_of(spec.dataloader)
    split_of_loader.start(one_layer_model(), batch, 1, layout)
    split_of_loader.adopt(CutRules(packing='documents'))
    return spec.split_batch(batch, 1)


def glm_row(config, modality):
    """Returns a row with one placeholder: of an image, or of a pair of frames between the tokens of a video."""
    start = getattr(config, f'{modality}_start_token_id')
    end = getattr(config, f'{modality}_end_token_id')
    vision = config.vision_config
    merge = vision.spatial_merge_size
    patch_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels_key = {'image': 'pixel_values', 'video': 'pixel_values_videos'}[modality]
    type_id = {'image': 1, 'video': 2}[modality]
    row = text_batch([5])
    row['input_ids'] = torch.tensor([[10, start, config.image_token_id, end, 11]])
    row['mm_token_type_ids'] = torch.tensor([[0, 0, type_id, 0, 0]])
    row[pixels_key] = torch.rand(merge**2, patch_size)
    row[f'{modality}_grid_thw'] = torch.tensor([[1, merge, merge]])
    return row


@pytest.mark.parametrize('modality', ['image', 'video'])
def test_glm_gets_no_video_beside_image(modality, some_rank_has_videos, monkeypatch):
    """Its forward has the same placeholders for both, and refuses a batch with both."""
    special = ('<image>', '<video>', '<image_start>', '<image_end>', '<video_start>', '<video_end>')
    model = float32_model(tiny_config('glm4v', tokenizer=word_tokenizer(*special)))
    layout = BatchLayout.for_model(model)
    text = text_batch([5, 3], mm_token_type_ids=torch.zeros(2, 5).long())
    text['input_ids'] += 10
    batch = layout.concat([text, glm_row(model.config, modality)])
    receive(monkeypatch, glm_row(model.config, 'image'))
    microbatches = token_data_spec(loader(batch), layout=layout).split_batch(batch, 1)
    assert len(microbatches) == 3
    for microbatch in microbatches:
        model(**tensors_in(microbatch, torch.float32)).loss.backward()
        assert ('pixel_values' in microbatch) != ('pixel_values_videos' in microbatch)


def test_text_rank_takes_the_layout_of_another(two_ranks, monkeypatch):
    """Without a model each rank infers a layout from its own batch. Text does not show the entries of Mllama."""
    case, layout = case_of('mllama')
    batch = family_batch(case)
    counts = layout.images_per_row(batch)
    media_row = layout.select(batch, [counts.index(1)])
    text_keys = {'input_ids', 'attention_mask', 'labels', 'token_type_ids'}  # old processors add the last one
    text = {key: batch[key][TEXT_ROWS] for key in text_keys & batch.keys()}
    monkeypatch.setattr(split, 'max_over_ranks', lambda values: [1, 0, 0, 1, 1, 1] if len(values) == 6 else values)
    monkeypatch.setattr(split, 'all_gather_object', lambda inferred: [inferred, BatchLayout.infer(batch)])
    receive(monkeypatch, media_row)
    for microbatch in token_data_spec(loader(text)).split_batch(text, 1):
        assert num_samples(microbatch) < len(microbatch['input_ids']) == len(microbatch['cross_attention_mask'])


def test_text_rank_knows_unregistered_media(two_ranks, monkeypatch):
    """The family of this layout has no media. The check has found the images of another rank by their key."""
    text = with_counts(text_batch([5, 3]))
    images = {'pixel_values': torch.rand(1, 3, 4, 4), 'num_images': torch.tensor([1, 0])}
    with_image = text_batch([5, 3], **images)
    layout = BatchLayout.infer(text)
    layout = layout.with_readings(layout.readings_of(with_image))
    monkeypatch.setattr(split, 'max_over_ranks', lambda values: [1, 0, 0, 1, 1, 1] if len(values) == 6 else values)
    receive(monkeypatch, layout.select(with_image, [0]))
    spec = token_data_spec(loader(text))
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.layout = layout
    microbatch_split.adopt(CutRules())
    for microbatch in spec.split_batch(text, 1):
        assert 'pixel_values' in microbatch


def test_check_takes_the_layout_of_another_rank(monkeypatch):
    """With Composer's flag and a model without a config. Text does not show the entries of Mllama."""
    case, _ = case_of('mllama')
    inferred_with_media = BatchLayout.infer(family_batch(case))
    checked_layouts = []

    def prove(check, batch):
        checked_layouts.append(check.layout)
        return CutRules()

    monkeypatch.setattr(FirstBatchCheck, 'prove', prove)
    monkeypatch.setattr(split, 'all_gather_object', lambda inferred: [inferred, inferred_with_media])
    text = text_batch([5, 3])
    token_data_spec(loader(text), model=NativeModel('unshifted')).split_batch(text, 1)
    (layout,) = checked_layouts
    assert layout.family == inferred_with_media.family


def test_packed_rows_are_not_halved_needlessly(two_ranks):
    """The packed text rows leave room for a dummy image row. Padded to its length they would not."""
    case, layout = case_of('llava')
    image_row = batch_of(case, [1])
    text_row = batch_of(case, [0])
    batch = layout.concat([image_row] + [text_row] * 8)
    image_length, text_length, *_ = describe(layout, batch).lengths
    budget = image_length + 5 * text_length
    groups = pack_lengths([image_length] + [text_length] * 8, budget)
    [texts] = [group for group in groups if 0 not in group]
    assert len(texts) * text_length + image_length <= budget
    padded = (len(texts) + 1) * max(image_length, text_length)
    assert padded > budget
    microbatches = packed_microbatches(batch, layout, slot_tokens=budget)
    assert len(microbatches) == len(groups) == 2
    for microbatch in microbatches:
        assert 'pixel_values' in microbatch
        assert microbatch['input_ids'].numel() <= budget


def test_packed_rows_are_halved_if_needed(some_rank_has_videos, monkeypatch):
    """Two rows with an image fit into a microbatch, but not with the video of another rank."""
    case, layout = media_case_of('qwen2_5_vl')
    image_row = case.rows[case.kinds.index('image')]
    video_row = case.rows[case.kinds.index('video')]
    batch = with_counts(layout.concat([image_row] * 4))
    budget = 2 * layout.width(image_row)
    assert layout.width(video_row) < layout.width(image_row)
    receive(monkeypatch, video_row)
    microbatches = packed_microbatches(batch, layout, slot_tokens=budget)
    assert len(microbatches) == 4
    for microbatch in microbatches:
        assert 'pixel_values_videos' in microbatch
        assert microbatch['input_ids'].numel() <= budget


def test_row_that_leaves_no_room(two_ranks, caplog):
    case, layout = case_of('llava')
    batch = layout.concat([batch_of(case, [row]) for row in (1, *TEXT_ROWS)])
    lengths = describe(layout, batch).lengths
    budget = lengths[2]
    assert budget == max(lengths)
    packed_microbatches(batch, layout, slot_tokens=budget)
    assert "sample 'sample-4' must fit into a microbatch together with its dummy rows" in caplog.text
    assert f'over the caps of {budget} and None' in caplog.text


@pytest.mark.parametrize('gap', ['hole', 'labelled padding', None])
def test_text_rows_depend_on_media_of_ranks(gap, two_ranks, monkeypatch):
    """With media in the batch Qwen2-VL does not count a hole. On one rank the check compares such rows with others."""
    case, layout = case_of('qwen2_vl')
    text = batch_of(case, TEXT_ROWS)
    if gap == 'hole':
        text['attention_mask'][:, 2] = 0
    if gap == 'labelled padding':
        text['attention_mask'][:, -3:] = 0
    image = zero_weight(batch_of(case, [1]))
    monkeypatch.setattr(split, 'max_over_ranks', lambda values: [1, 0, 0, 1, 1, 1] if len(values) == 6 else values)
    receive(monkeypatch, image)
    spec = token_data_spec(loader(text), layout=layout)
    microbatch_split = split.split_of(spec.dataloader)
    rules = next(microbatch_split.candidates(describe(layout, text), CutRules()))
    microbatch_split.adopt(rules)
    microbatch_split.reduces_once = True
    microbatches = spec.split_batch(text, 1)
    assert ['pixel_values' in microbatch for microbatch in microbatches] == [gap is not None] * 2
    loss = sum(float(case.loss_sum(microbatch)) for microbatch in microbatches)
    expected = float(case.loss_sum(layout.concat([text, image])))
    assert loss == pytest.approx(expected, rel=1e-6)


def test_no_media_rows_if_reduced_once(two_ranks, monkeypatch):
    case, layout = case_of('llava')
    text = layout.concat([batch_of(case, TEXT_ROWS)] * 4)
    monkeypatch.setattr(split, 'max_over_ranks', None)  # nothing is agreed upon
    spec = token_data_spec(loader(text), layout=layout, slot_tokens=max(describe(layout, text).lengths))
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.adopt(microbatch_split.rules)
    microbatch_split.reduces_once = True
    microbatches = spec.split_batch(text, 1)
    assert len(microbatches) > 1
    for microbatch in microbatches:
        assert 'pixel_values' not in microbatch
        assert layout.num_rows(microbatch) == num_samples(microbatch)
    assert sum(map(num_samples, microbatches)) == 8


@pytest.mark.parametrize(('length', 'fits'), [(16, True), (17, False)])
def test_dummies_beyond_the_rotary_limit_are_refused(length, fits):
    """Beyond 16 tokens the widest row of a batch changes the embedding of all."""
    model = in_double(one_layer_model(rope_scaling={'rope_type': 'dynamic', 'factor': 4.0}, max_position_embeddings=16))
    layout = BatchLayout.for_model(model)
    batch = with_counts(ragged_batch([(4, 2), (9, 7)]))
    facts = describe(layout, batch)
    dummy = describe(layout, zero_weight(with_counts(ragged_batch([(length, 1)]))))
    piece = Piece.from_facts(facts, CutRules(right=sys.maxsize), CutOptions())
    expected, _ = reference_gradients(model, batch)

    (with_dummy,) = build([replace(piece, dummies=[dummy])])
    gradients, _ = reference_gradients(model, with_dummy)
    assert (relative_error(gradients, expected) < 1e-12) is fits
    if fits:
        split.with_dummies([piece], {'image': dummy})
    else:
        with pytest.raises(RuntimeError, match=r'16 tokens.*17 and 9'):
            split.with_dummies([piece], {'image': dummy})


# Empty microbatches, if another rank makes more microbatches.

NUM_ROWS, NUM_OF_OTHER_RANK = 3, 5


@pytest.mark.parametrize(
    ('equal_counts', 'reduces_once', 'expected'),
    [
        (True, False, NUM_OF_OTHER_RANK),
        (True, True, NUM_OF_OTHER_RANK),
        ('auto', False, NUM_OF_OTHER_RANK),
        ('auto', True, NUM_ROWS),
        (False, False, NUM_ROWS),
        (False, True, NUM_ROWS),
    ],
)
def test_counts_are_equal_if_needed(equal_counts, reduces_once, expected, two_ranks, monkeypatch):
    """``'auto'``: ranks need equal counts unless DDP reduces in the last microbatch only."""

    def max_over_ranks(values):
        is_count = len(values) == 1
        return [max(*values, NUM_OF_OTHER_RANK)] if is_count else values

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)
    batch = ragged_batch([(6, 3)] * NUM_ROWS)
    spec = token_data_spec(loader(batch), equal_counts=equal_counts)
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.adopt(microbatch_split.rules)
    microbatch_split.reduces_once = reduces_once
    microbatches = spec.split_batch(batch, 1)
    samples = [num_samples(microbatch) for microbatch in microbatches]
    assert samples == [1] * NUM_ROWS + [0] * (expected - NUM_ROWS)
    for empty in microbatches[NUM_ROWS:]:
        assert (empty['labels'] == -100).all()
