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
from composer_tokacc.checks.cut_rules import CutRules
from composer_tokacc.checks.first_batch import FirstBatchCheck, LossFacts
from composer_tokacc.checks.step import Step
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec import split
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.pieces import (
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
from tests.support.small_batches import IMAGE, drawn_batch, layout_of_model, numbered_images, text_batch
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
"""The rows of a case that have no image."""
for_each_family = pytest.mark.parametrize('name', IMAGE_FAMILIES)


@functools.cache
def case_of(name: str) -> tuple[Case, BatchLayout]:
    """Returns a case of a family with rows of images, and the layout of its model."""
    case = FAMILIES[name]()
    return case, BatchLayout.for_model(case.model)


@functools.cache
def media_case_of(name: str) -> tuple[Any, BatchLayout]:
    """Returns a case of a family with rows of videos too."""
    case = MEDIA[name]()
    return case, BatchLayout.for_model(case.model)


def row_of(case: Any, kind: str) -> dict[str, Any]:
    """Returns the first row of a kind, such as ``'video'``, of a case of :func:`media_case_of`."""
    number = case.kinds.index(kind)
    return case.rows[number]


def batch_of(case: Case, rows, side: str = 'right'):
    """Returns rows of the case's batch, trimmed as a split trims them."""
    layout = BatchLayout.for_model(case.model)
    batch = with_counts(family_batch(case, side=side))
    selected = layout.select(batch, rows)
    return layout.trim(selected)


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
    if case.name == 'mllama':
        batch = batch_of(case, [*TEXT_ROWS, 3], side)
        batch['labels'][2] = -100
    else:
        batch = batch_of(case, TEXT_ROWS, side)
    return loss_and_gradients(case, batch)


def num_placeholders(layout, batch):
    is_placeholder = batch['input_ids'] == layout.image_token_id
    return int(is_placeholder.sum())


def adopt(spec, rules=None, **options):
    """Lets the split of a spec take these rules, or the ones that it has, as if the check had proven them."""
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.adopt(rules or microbatch_split.rules, microbatch_split.layout, **options)
    return microbatch_split


# Dummy rows with an image, in every family.


@pytest.mark.parametrize(
    ('image_row', 'side'),
    [
        pytest.param(1, 'right', id='narrower, right'),
        pytest.param(5, 'left', id='wider, left'),
    ],
)
@for_each_family
def test_dummy_image_row_changes_no_gradient(name, image_row, side):
    """The purpose of the row: every parameter gets a gradient, so that no rank waits for another."""
    case, layout = case_of(name)
    expected_loss, expected_gradients = expected_loss_and_gradients(case, side)
    text = batch_of(case, TEXT_ROWS, side)
    _, gradients_of_text = loss_and_gradients(case, text)
    dummy = zero_weight(batch_of(case, [image_row], side))

    with_dummy = add_rows(layout, text, [dummy], side)
    loss, gradients = loss_and_gradients(case, with_dummy)

    placeholders_of_dummy = num_placeholders(layout, dummy)
    assert placeholders_of_dummy > 0
    assert num_placeholders(layout, with_dummy) == placeholders_of_dummy, 'pads are no placeholders'
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert relative_error(gradients, expected_gradients) < 1e-6
    trained = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
    assert len(gradients) == len(trained)
    assert len(gradients_of_text) < len(trained)


def test_dummy_rows_are_no_samples():
    case, layout = case_of('llava')
    text = batch_of(case, TEXT_ROWS)
    image_row = batch_of(case, [1])
    dummy = zero_weight(image_row)
    spec = token_data_spec(loader(text))

    with_dummy = add_rows(layout, text, [dummy], 'right')

    assert (image_row['labels'] != -100).any(), 'the original keeps its labels'
    assert layout.num_rows(with_dummy) == 3
    assert num_samples(text) == 2
    assert num_samples(with_dummy) == 2
    counts_of_dummy = RowCounts(samples=0, rule=LossRule.CAUSAL)
    assert row_counts_of(with_dummy) == [*row_counts_of(text), counts_of_dummy]
    assert spec.get_num_samples_in_batch(with_dummy) == 2
    assert spec.get_num_tokens_in_batch(with_dummy) == spec.get_num_tokens_in_batch(text)


@for_each_family
def test_dummy_row_is_the_smallest(name):
    case, layout = case_of(name)
    batch = batch_of(case, range(6), 'left')
    facts = describe(layout, batch)

    dummy = smallest_row([facts], 'image')

    image_counts = [num_images for num_images in layout.images_per_row(batch) if num_images > 0]
    assert layout.images_per_row(dummy) == [min(image_counts)]
    # The rows with the fewest images, by family.
    assert dummy['sample_ids'][0] in ('sample-1', 'sample-2')
    facts_of_dummy = describe(layout, dummy)
    width = dummy['input_ids'].shape[1]
    assert facts_of_dummy.lengths == [width], 'no padding'
    assert num_samples(dummy) == 0


# Dummy rows of some families.


def test_dummy_row_brings_no_new_lists():
    case, layout = case_of('llava')
    text = batch_of(case, TEXT_ROWS)
    del text['sample_ids']
    dummy = zero_weight(batch_of(case, [1]))

    with_dummy = add_rows(layout, text, [dummy], 'right')

    assert 'sample_ids' not in with_dummy
    assert with_dummy['num_images'] == [0, 0, 1]


@pytest.mark.parametrize('masked_rows', ['own', 'dummy'])
def test_only_some_rows_have_a_mask(masked_rows):
    """If a loader gives no masks, a rank that has padded its rows since has masks, and another rank has none."""
    case, layout = case_of('llava')
    text = batch_of(case, TEXT_ROWS[:1])
    dummy = zero_weight(batch_of(case, [1]))
    without_mask = dummy if masked_rows == 'own' else text
    del without_mask['attention_mask']

    with_dummy = add_rows(layout, text, [dummy], 'right')

    lengths = [layout.width(text), layout.width(dummy)]
    attended = with_dummy['attention_mask'].sum(dim=1)
    assert attended.tolist() == lengths


@pytest.mark.parametrize('listed', ['image', 'video'])
def test_dummies_of_two_ranks_have_unlike_lists(listed):
    """An empty microbatch joins the dummy row of this rank with that of another rank, whose batches lack a list."""
    case, layout = media_case_of('video_llava')
    dummies = {}
    for modality in ('image', 'video'):
        row = with_counts(row_of(case, modality))
        if modality == listed:
            row['files'] = ['a']
        dummies[modality] = describe(layout, zero_weight(row))

    microbatch = split._empty_microbatch([dummies['image']], dummies)

    assert num_samples(microbatch) == 0
    assert layout.images_per_row(microbatch) == [2, 0]


def test_padding_of_row_beginning_with_placeholder():
    """The padding must not take the id of the placeholder."""
    case, layout = media_case_of('video_llava')
    place_of_images = case.truth.index({'image': 2, 'video': 0})
    row_of_images = case.rows[place_of_images]
    first_id = row_of_images['input_ids'][0, 0]
    assert first_id == case.model.config.image_token_id
    dummy = zero_weight(row_of(case, 'video'))

    with_dummy = add_rows(layout, row_of_images, [dummy], 'right')

    assert layout.images_per_row(with_dummy) == [2, 0]
    loss = case.loss_sum(with_dummy)
    expected_loss = case.loss_sum(row_of_images)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)


def test_dummy_row_is_padded_as_batch():
    """A row of text is shorter than the dummy row. It is padded on the left, as it was in the batch."""
    case, layout = case_of('llava')
    batch = batch_of(case, range(6), 'left')
    facts = describe(layout, batch)
    shorter_text = min(TEXT_ROWS, key=facts.lengths.__getitem__)
    length = facts.lengths[shorter_text]
    dummy = describe(layout, smallest_row([facts], 'image'))
    missing = missing_dummies({'image': dummy}, facts, [shorter_text])
    all_rows = Piece.from_facts(facts, CutRules(left=sys.maxsize), CutOptions())
    text_row = all_rows.take([shorter_text])

    [microbatch] = build([replace(text_row, dummies=missing)])

    mask = microbatch['attention_mask'][0]
    assert len(mask) > length
    assert mask[-length:].all()


# Dummy rows that a rank adds because of another rank.


def is_count(values):
    """Returns whether ranks compare the number of their microbatches, and not which modalities they have."""
    return len(values) != 6


@pytest.fixture
def some_rank_has_videos(two_ranks, monkeypatch):
    """Both ranks have an image and lack it in some row; some rank has a video, and some rank lacks one."""

    def max_over_ranks(values):
        if is_count(values):
            return list(values)
        # Some rank has an image and some rank has a video, but none has audio.
        is_lacked = values[3:]
        return [1, 1, 0, *is_lacked]

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)


@pytest.fixture
def other_rank_has_images(two_ranks, monkeypatch):
    """This rank has only text. The other rank has images."""

    def max_over_ranks(values):
        if is_count(values):
            return values
        # Some rank has an image, none has a video or audio, and some rank lacks each of them.
        return [1, 0, 0, 1, 1, 1]

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)


def receive(monkeypatch, row):
    """Lets the other rank send this row as its dummy row."""
    dummy = zero_weight(row)
    monkeypatch.setattr(split, 'from_first_rank_with_value', lambda row_of_this_rank: row_of_this_rank or dummy)


def facts_with_codes(lengths):
    """Returns facts of three rows of text, 6 columns wide. The first two have an image of 6 codes each.

    The batch shows that the codes are not text, because they are not three rows. Fewer rows would not show it.
    """
    image_codes = torch.arange(12).reshape(2, 6)
    batch = with_counts(text_batch(lengths, num_images=[1, 1, 0], image_codes=image_codes))
    return describe(BatchLayout.infer(batch), batch)


@pytest.mark.parametrize('shortest', [5, 6])
def test_dummy_row_keeps_image_codes(shortest):
    facts = facts_with_codes([shortest, 6, 6])
    dummy = describe(facts.layout, smallest_row([facts], 'image'))
    all_rows = Piece.from_facts(facts, CutRules(), CutOptions(max_tokens=100))
    text_row = all_rows.take([2])

    [microbatch] = build([replace(text_row, dummies=[dummy])])

    assert dummy.width == shortest
    assert microbatch['image_codes'].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_packed_rows_keep_image_codes():
    facts = facts_with_codes([6, 6, 4])
    rules = CutRules(packing='documents')
    all_rows = Piece.from_facts(facts, rules, CutOptions(max_tokens=100))
    image_rows = all_rows.take([0, 1])
    attention = DocumentAttention(one_layer_model(), 'documents')

    [microbatch] = build([image_rows], attention)

    assert microbatch['input_ids'].shape == (1, 12)
    assert torch.equal(microbatch['image_codes'], facts.batch['image_codes'])


def packed_microbatches(batch, layout, slot_tokens):
    """Returns the microbatches of a packed batch, one slot each. The check is left out: packing is taken as proven."""
    spec = token_data_spec(loader(batch), layout=layout, packing=True, slot_tokens=slot_tokens)
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.start(one_layer_model(), batch, 1)
    microbatch_split.adopt(CutRules(packing='documents'), layout)
    return spec.split_batch(batch, 1)


def glm_row(config, modality):
    """Returns a row with one placeholder: of an image, or of a pair of frames between the tokens of a video."""
    start = getattr(config, f'{modality}_start_token_id')
    end = getattr(config, f'{modality}_end_token_id')
    vision = config.vision_config
    merge = vision.spatial_merge_size
    numbers_of_patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    if modality == 'image':
        pixels_key = 'pixel_values'
        type_id = 1
    else:
        pixels_key = 'pixel_values_videos'
        type_id = 2
    row = text_batch([5])
    row['input_ids'] = torch.tensor([[10, start, config.image_token_id, end, 11]])
    row['mm_token_type_ids'] = torch.tensor([[0, 0, type_id, 0, 0]])
    row[pixels_key] = torch.rand(merge**2, numbers_of_patch)
    row[f'{modality}_grid_thw'] = torch.tensor([[1, merge, merge]])
    return row


@pytest.mark.parametrize('modality', ['image', 'video'])
def test_glm_gets_no_video_beside_image(modality, some_rank_has_videos, monkeypatch):
    """Its forward has the same placeholders for both, and refuses a batch with both."""
    special = ('<image>', '<video>', '<image_start>', '<image_end>', '<video_start>', '<video_end>')
    config = tiny_config('glm4v', tokenizer=word_tokenizer(*special))
    model = float32_model(config)
    layout = BatchLayout.for_model(model)
    text = text_batch([5, 3], mm_token_type_ids=torch.zeros(2, 5).long())
    text['input_ids'] += 10
    media_row = glm_row(model.config, modality)
    image_row_of_other_rank = glm_row(model.config, 'image')
    receive(monkeypatch, image_row_of_other_rank)
    batch = layout.concat([text, media_row])
    spec = token_data_spec(loader(batch), layout=layout)

    microbatches = spec.split_batch(batch, 1)

    assert len(microbatches) == 3
    for microbatch in microbatches:
        output = model(**tensors_in(microbatch, torch.float32))
        output.loss.backward()
        has_image = 'pixel_values' in microbatch
        has_video = 'pixel_values_videos' in microbatch
        assert has_image != has_video


def test_text_rank_takes_layout_of_another(other_rank_has_images, monkeypatch):
    """Without a model each rank infers a layout from its own batch. Text does not show the entries of Mllama."""
    case, layout = case_of('mllama')
    batch = family_batch(case)
    text_keys = {'input_ids', 'attention_mask', 'labels', 'token_type_ids'}  # old processors add the last one
    text = {key: batch[key][TEXT_ROWS] for key in text_keys & batch.keys()}
    place_of_image = layout.images_per_row(batch).index(1)
    image_row = layout.select(batch, [place_of_image])
    receive(monkeypatch, image_row)
    layout_of_other_rank = BatchLayout.infer(batch)
    monkeypatch.setattr(split, 'all_gather_object', lambda inferred: [inferred, layout_of_other_rank])
    spec = token_data_spec(loader(text))

    microbatches = spec.split_batch(text, 1)

    for microbatch in microbatches:
        num_rows = len(microbatch['input_ids'])
        assert num_samples(microbatch) < num_rows
        assert len(microbatch['cross_attention_mask']) == num_rows


def test_text_rank_knows_unregistered_media(other_rank_has_images, monkeypatch):
    """The family of this layout has no media. The check has found the images of another rank by their key."""
    text = with_counts(text_batch([5, 3]))
    image = torch.rand(1, 3, 4, 4)
    with_image = text_batch([5, 3], pixel_values=image, num_images=torch.tensor([1, 0]))
    layout_of_text = BatchLayout.infer(text)
    readings = layout_of_text.readings_of(with_image)
    layout = layout_of_text.with_readings(readings)
    receive(monkeypatch, layout.select(with_image, [0]))
    spec = token_data_spec(loader(text))
    split.split_of(spec.dataloader).adopt(CutRules(), layout)

    microbatches = spec.split_batch(text, 1)

    for microbatch in microbatches:
        assert 'pixel_values' in microbatch


def test_check_takes_layout_of_another_rank(monkeypatch):
    """With Composer's flag and a model without a config. Text does not show the entries of Mllama."""
    case, _ = case_of('mllama')
    inferred_with_media = BatchLayout.infer(family_batch(case))
    text = text_batch([5, 3])
    checked_layouts = []

    def prove(check, batch, microbatch_size):
        checked_layouts.append(check.layout)
        return LossFacts(rule=LossRule.CAUSAL)

    monkeypatch.setattr(FirstBatchCheck, 'prove', prove)
    monkeypatch.setattr(split, 'all_gather_object', lambda inferred: [inferred, inferred_with_media])
    spec = token_data_spec(loader(text), model=NativeModel('unshifted'))

    spec.split_batch(text, 1)

    [layout] = checked_layouts
    assert layout.family == inferred_with_media.family


def test_packed_rows_are_not_halved_needlessly(two_ranks):
    """The packed text rows leave room for a dummy image row. Padded to its length they would not."""
    case, layout = case_of('llava')
    image_row = batch_of(case, [1])
    text_row = batch_of(case, [0])
    batch = layout.concat([image_row] + [text_row] * 8)
    lengths = describe(layout, batch).lengths
    image_length = lengths[0]
    text_length = lengths[1]
    budget = image_length + 5 * text_length
    # The image row, row 0, is in one of two microbatches. The other one has only text.
    groups = pack_lengths(lengths, budget)
    [text_group] = [group for group in groups if 0 not in group]
    num_texts = len(text_group)
    packed_with_dummy = num_texts * text_length + image_length
    padded_with_dummy = (num_texts + 1) * max(image_length, text_length)
    assert packed_with_dummy <= budget < padded_with_dummy

    microbatches = packed_microbatches(batch, layout, slot_tokens=budget)

    assert len(groups) == 2
    assert len(microbatches) == 2
    for microbatch in microbatches:
        assert 'pixel_values' in microbatch
        assert microbatch['input_ids'].numel() <= budget


def test_packed_rows_are_halved_if_needed(some_rank_has_videos, monkeypatch):
    """Two rows with an image fit into a microbatch, but not with the video of another rank."""
    case, layout = media_case_of('qwen2_5_vl')
    image_row = row_of(case, 'image')
    video_row = row_of(case, 'video')
    batch = with_counts(layout.concat([image_row] * 4))
    budget = 2 * layout.width(image_row)
    assert layout.width(video_row) < layout.width(image_row)
    receive(monkeypatch, video_row)

    microbatches = packed_microbatches(batch, layout, slot_tokens=budget)

    assert len(microbatches) == 4
    for microbatch in microbatches:
        assert 'pixel_values_videos' in microbatch
        assert microbatch['input_ids'].numel() <= budget


def test_cap_holds_beside_wider_decoder(other_rank_has_images, monkeypatch):
    """The dummy row of another rank makes the decoder's text of all rows of its microbatch wider."""
    layout = layout_of_model('llava', image_token_id=IMAGE)
    text = text_batch([6] * 4)
    text['labels'] = torch.full((4, 3), 5)
    image_row = drawn_batch('1i23', pixel_values=numbered_images(1))
    image_row['labels'] = torch.full((1, 20), 5)
    receive(monkeypatch, image_row)
    spec = token_data_spec(loader(text), layout=layout, slot_tokens=27)

    microbatches = spec.split_batch(text, 2)

    cap = 2 * (27 + 3)
    assert len(microbatches) == 4
    for microbatch in microbatches:
        num_positions = microbatch['input_ids'].numel() + microbatch['labels'].numel()
        assert num_positions <= cap


def test_row_that_leaves_no_room(two_ranks, caplog):
    case, layout = case_of('llava')
    image_row = batch_of(case, [1])
    short_text = batch_of(case, [0])
    long_text = batch_of(case, [4])
    batch = layout.concat([image_row, short_text, long_text])
    lengths = describe(layout, batch).lengths
    budget = lengths[2]
    assert budget == max(lengths)

    packed_microbatches(batch, layout, slot_tokens=budget)

    assert "sample 'sample-4' must fit into a microbatch together with its dummy rows" in caplog.text
    assert f'over the caps of {budget} and None' in caplog.text


@pytest.mark.parametrize('gap', ['hole', 'labelled padding', None])
def test_gaps_depend_on_media_of_ranks(gap, other_rank_has_images, monkeypatch):
    """With media in the batch Qwen2-VL does not count a hole. On one rank the check compares such rows with others.

    So text rows with a gap get a dummy image, as if they were in a batch with the other rank's image.
    """
    case, layout = case_of('qwen2_vl')
    text = batch_of(case, TEXT_ROWS)
    if gap == 'hole':
        text['attention_mask'][:, 2] = 0
    if gap == 'labelled padding':
        text['attention_mask'][:, -3:] = 0
    image_row = zero_weight(batch_of(case, [1]))
    receive(monkeypatch, image_row)
    text_beside_image = layout.concat([text, image_row])
    expected_loss = float(case.loss_sum(text_beside_image))
    spec = token_data_spec(loader(text), layout=layout)
    microbatch_split = split.split_of(spec.dataloader)
    candidates = microbatch_split.candidates(describe(layout, text), CutRules())
    adopt(spec, next(candidates))
    microbatch_split.step = Step(rows=[RowCounts()], reduces_once=True)

    microbatches = spec.split_batch(text, 1)

    assert len(microbatches) == 2
    loss = 0.0
    for microbatch in microbatches:
        has_image = 'pixel_values' in microbatch
        assert has_image == (gap is not None)
        loss += float(case.loss_sum(microbatch))
    assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_no_media_rows_if_reduced_once(two_ranks, monkeypatch):
    case, layout = case_of('llava')
    text = batch_of(case, TEXT_ROWS * 4)
    longest_row = max(describe(layout, text).lengths)
    monkeypatch.setattr(split, 'max_over_ranks', None)  # nothing is agreed upon
    spec = token_data_spec(loader(text), layout=layout, slot_tokens=longest_row)
    microbatch_split = adopt(spec)
    microbatch_split.step = Step(rows=[RowCounts()], reduces_once=True)

    microbatches = spec.split_batch(text, 1)

    assert len(microbatches) > 1
    total_samples = 0
    for microbatch in microbatches:
        assert 'pixel_values' not in microbatch
        samples = num_samples(microbatch)
        assert layout.num_rows(microbatch) == samples
        total_samples += samples
    assert total_samples == 8


@pytest.mark.parametrize('has_loss_in_dummies', [False, True])
def test_loss_in_dummy_rows_is_refused(has_loss_in_dummies):
    """The check has found that rows with media and without labels add to a mean over tokens."""
    case, layout = case_of('llava')
    batch = batch_of(case, [*TEXT_ROWS, 1])
    spec = token_data_spec(loader(batch), layout=layout)
    rules = CutRules(right=sys.maxsize, needs_media=True)
    adopt(spec, rules, has_loss_in_dummies=has_loss_in_dummies)

    if has_loss_in_dummies:
        with pytest.raises(RuntimeError, match='a term in rows without labels'):
            spec.split_batch(batch, 1)
    else:
        for microbatch in spec.split_batch(batch, 1):
            assert 'pixel_values' in microbatch


@pytest.mark.parametrize(
    ('length', 'fits'),
    [
        pytest.param(16, True, id='at the limit'),
        pytest.param(17, False, id='beyond the limit'),
    ],
)
def test_dummies_beyond_rotary_limit_are_refused(length, fits):
    """Beyond 16 tokens the widest row of a batch changes the embedding of all."""
    dynamic = {'rope_type': 'dynamic', 'factor': 4.0}
    model = in_double(one_layer_model(rope_scaling=dynamic, max_position_embeddings=16))
    layout = BatchLayout.for_model(model)
    batch = with_counts(ragged_batch([(4, 2), (9, 7)]))
    facts = describe(layout, batch)
    piece = Piece.from_facts(facts, CutRules(right=sys.maxsize), CutOptions())
    long_row = with_counts(ragged_batch([(length, 1)]))
    dummy = describe(layout, zero_weight(long_row))
    expected_gradients, _ = reference_gradients(model, batch)

    [with_dummy] = build([replace(piece, dummies=[dummy])])
    gradients, _ = reference_gradients(model, with_dummy)

    is_exact = relative_error(gradients, expected_gradients) < 1e-12
    assert is_exact is fits
    if fits:
        split.with_dummies([piece], {'image': dummy})
    else:
        with pytest.raises(RuntimeError, match=r'16 tokens.*17 and 9'):
            split.with_dummies([piece], {'image': dummy})


# Empty microbatches, if another rank makes more microbatches.

NUM_ROWS = 3
"""This rank makes a microbatch of each of its rows."""
NUM_OF_OTHER_RANK = 5
"""The other rank makes more microbatches."""


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
        if len(values) == 1:
            [num_of_this_rank] = values
            return [max(num_of_this_rank, NUM_OF_OTHER_RANK)]
        return values

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)
    batch = ragged_batch([(6, 3)] * NUM_ROWS)
    spec = token_data_spec(loader(batch), equal_counts=equal_counts)
    microbatch_split = adopt(spec)
    microbatch_split.step = Step(rows=[RowCounts()], reduces_once=reduces_once)

    microbatches = spec.split_batch(batch, 1)

    num_empty = expected - NUM_ROWS
    samples_of_microbatches = [num_samples(microbatch) for microbatch in microbatches]
    assert samples_of_microbatches == [1] * NUM_ROWS + [0] * num_empty
    for empty in microbatches[NUM_ROWS:]:
        assert (empty['labels'] == -100).all()
