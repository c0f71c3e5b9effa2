# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Zero-weight rows change neither the loss nor the gradient of a microbatch's own rows, in every family."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data_spec.pieces import (
    CutRules,
    Piece,
    add_rows,
    build,
    missing_dummies,
    smallest_row,
    zero_weight,
)
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import describe
from composer_tokacc.planning import CutOptions, pack_lengths
from composer_tokacc.row_counts import RowCounts, num_samples, rows_of, with_counts, with_rows
from tests.matrix.harness import measure_steps
from tests.matrix.subjects import SUBJECTS
from tests.support import family_models
from tests.support.families import FAMILIES, IMAGE_FAMILIES, FamilyCase
from tests.support.family_media import MEDIA, TokenIds
from tests.support.sample_encoder import word_tokenizer
from tests.support.small_batches import text_batch
from tests.support.training import loader

TEXT_ROWS = [0, 4]


@functools.cache
def case_of(name: str, *, has_videos: bool = False) -> tuple[Any, BatchLayout]:
    case = MEDIA[name]() if has_videos else FAMILIES[name]()
    return case, BatchLayout.for_model(case.model)


def batch_of(case: FamilyCase, rows, side: str):
    """Rows of the whole batch, trimmed as a split trims them."""
    layout = BatchLayout.for_model(case.model)
    batch = with_counts(layout.concat(case.rows, padding_side=side, pad_token_id=case.pad_token_id))
    return layout.trim(layout.select(batch, rows))


def loss_and_gradients(case: FamilyCase, batch):
    if case.name == 'mllama':  # its gradients are so large where text looks at empty images that float32 is off by 2e-6
        case.model.double()
        floating = {key for key, value in batch.items() if torch.is_tensor(value) and value.is_floating_point()}
        batch = {key: value.double() if key in floating else value for key, value in batch.items()}
    case.model.zero_grad()
    loss = case.loss_sum(batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in case.model.named_parameters() if p.requires_grad}


def relative_error(gradients, expected) -> float:
    keys = [name for name, gradient in expected.items() if gradient is not None]
    difference = sum(float((gradients[key] - expected[key]).double().square().sum()) for key in keys)
    difference += sum(
        float(g.double().square().sum()) for key, g in gradients.items() if g is not None and key not in keys
    )
    return (difference / sum(float(expected[key].double().square().sum()) for key in keys)) ** 0.5


def own_rows(case: FamilyCase, side: str):
    """The text rows with the loss they have in the batch: Mllama's depends on whether there is an image at all."""
    if case.name != 'mllama':
        return batch_of(case, TEXT_ROWS, side)
    batch = batch_of(case, [*TEXT_ROWS, 3], side)
    batch['labels'][2] = -100
    return batch


@pytest.mark.parametrize(('spare', 'side'), [(1, 'right'), (5, 'left')], ids=['narrower, right', 'wider, left'])
@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_dummy_image_row_changes_no_gradient(name, spare, side):
    case, layout = case_of(name)
    loss, gradients = loss_and_gradients(case, own_rows(case, side))
    microbatch = batch_of(case, TEXT_ROWS, side)
    padded = add_rows(layout, microbatch, [zero_weight(batch_of(case, [spare], side))], side)
    padded_loss, padded_gradients = loss_and_gradients(case, padded)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=0)
    assert relative_error(padded_gradients, gradients) < 1e-6
    # The purpose of the row: every parameter gets a gradient, so that no rank waits for another.
    assert all(gradient is not None for gradient in padded_gradients.values())
    assert any(gradient is None for gradient in loss_and_gradients(case, microbatch)[1].values())


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_labels_of_dummy_row_change_gradient(name, side):
    case, layout = case_of(name)
    _, gradients = loss_and_gradients(case, own_rows(case, side))
    labelled = with_rows(batch_of(case, [1], side), [RowCounts(samples=0)])
    padded = add_rows(layout, batch_of(case, TEXT_ROWS, side), [labelled], side)
    assert relative_error(loss_and_gradients(case, padded)[1], gradients) > 1e-4


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_added_rows_are_no_samples(name):
    case, layout = case_of(name)
    microbatch = batch_of(case, TEXT_ROWS, 'right')
    row = batch_of(case, [1], 'right')
    padded = add_rows(layout, microbatch, [zero_weight(row)], 'right')
    assert (row['labels'] != -100).any()  # the original keeps its labels
    assert layout.num_rows(padded) == 3
    assert num_samples(padded) == num_samples(microbatch) == 2
    assert rows_of(padded) == [*rows_of(microbatch), RowCounts(samples=0, rule='causal')]
    spec = token_data_spec(loader(microbatch))
    assert spec.get_num_samples_in_batch(padded) == 2
    assert spec.get_num_tokens_in_batch(padded) == spec.get_num_tokens_in_batch(microbatch)


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_pads_are_no_image_placeholders(name):
    """The rarest id of the spare row, or of any with images, may be the placeholder itself."""
    case, layout = case_of(name)
    for side in ('left', 'right'):
        microbatch, spare = batch_of(case, [4], side), zero_weight(batch_of(case, [1], side))
        padded = add_rows(layout, microbatch, [spare], side)
        placeholders = spare['input_ids'] == layout.image_token_id
        assert 0 < int(placeholders.sum()) == int((padded['input_ids'] == layout.image_token_id).sum())


@pytest.mark.parametrize('name', IMAGE_FAMILIES)
def test_dummy_row_is_the_smallest(name):
    case, layout = case_of(name)
    batch = batch_of(case, range(6), 'left')
    row = smallest_row([describe(layout, batch)], 'image')
    fewest = min(layout.images_per_row(batch_of(case, [row], 'left'))[0] for row in (1, 2, 3, 5))
    assert layout.images_per_row(row) == [fewest]
    assert row['sample_ids'][0] in ('sample-1', 'sample-2')
    assert describe(layout, row).lengths == [row['input_ids'].shape[1]]
    assert num_samples(row) == 0


def test_dummy_row_brings_no_new_lists():
    case, layout = case_of('llava')
    microbatch = batch_of(case, TEXT_ROWS, 'right')
    del microbatch['sample_ids']
    padded = add_rows(layout, microbatch, [zero_weight(batch_of(case, [1], 'right'))], 'right')
    assert 'sample_ids' not in padded
    assert padded['num_images'] == [0, 0, 1]


def test_padding_of_row_beginning_with_placeholder():
    case, layout = case_of('video_llava', has_videos=True)
    row = next(row for row, truth in zip(case.rows, case.truth, strict=True) if truth == {'image': 2, 'video': 0})
    other = next(row for row, truth in zip(case.rows, case.truth, strict=True) if not truth['image'] and truth['video'])
    assert row['input_ids'][0, 0] == case.model.config.image_token_id
    batch = add_rows(layout, row, [zero_weight(other)], 'right')
    assert layout.images_per_row(batch) == [2, 0]
    torch.testing.assert_close(case.loss_sum(batch), case.loss_sum(row), rtol=1e-5, atol=0)


def test_dummy_row_is_padded_as_batch():
    case, layout = case_of('llava')
    facts = describe(layout, batch_of(case, range(6), 'left'))
    text = min(TEXT_ROWS, key=facts.lengths.__getitem__)
    dummies = {'image': describe(layout, smallest_row([facts], 'image'))}
    piece = Piece.from_facts(facts, CutRules(left='trim'), CutOptions()).take([text])
    (microbatch,) = build([replace(piece, dummies=missing_dummies(dummies, facts, [text]))])
    assert microbatch['attention_mask'].shape[1] > facts.lengths[text]
    assert microbatch['attention_mask'][0, -facts.lengths[text] :].all()


def images_and_videos_somewhere(values):
    """Answers for all ranks: for each modality whether some rank has it, and whether some rank lacks it; or a count."""
    return [1, 1, 0, *values[3:]] if len(values) == 6 else list(values)


def glm_row(config, unit):
    """One token of one image, or of one pair of frames, which are images between the tokens of a video."""
    edges = [getattr(config, f'{unit}_{edge}_token_id') for edge in ('start', 'end')]
    row = text_batch([5])
    row['input_ids'] = torch.tensor([[10, edges[0], config.image_token_id, edges[1], 11]])
    row['mm_token_type_ids'] = torch.tensor([[0, 0, 1 if unit == 'image' else 2, 0, 0]])
    vision = config.vision_config
    merge, size = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = 'pixel_values' if unit == 'image' else 'pixel_values_videos'
    return {**row, pixels: torch.rand(merge**2, size), f'{unit}_grid_thw': torch.tensor([[1, merge, merge]])}


@pytest.mark.parametrize('unit', ['image', 'video'])
def test_glm_gets_no_video_beside_image(unit, monkeypatch):
    """Its forward takes one kind of placeholders for both, and refuses a batch with both."""
    special = ('<image>', '<video>', '<image_start>', '<image_end>', '<video_start>', '<video_end>')
    model = family_models.MODELS['glm4v'](TokenIds(word_tokenizer(*special)))
    layout = BatchLayout.for_model(model)
    text = {**text_batch([5, 3]), 'mm_token_type_ids': torch.zeros(2, 5).long()}
    text['input_ids'] += 10
    media = {modality: glm_row(model.config, modality) for modality in ('image', 'video')}
    batch = layout.concat([text, media[unit]])
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', images_and_videos_somewhere)
    monkeypatch.setattr('composer_tokacc.data_spec.split.from_any_rank', lambda row: row or zero_weight(media['image']))
    microbatches = token_data_spec(loader(batch), layout=layout).split_batch(batch, 1)
    assert len(microbatches) == 3
    for microbatch in microbatches:
        model(**{key: value for key, value in microbatch.items() if torch.is_tensor(value)}).loss.backward()
        assert ('pixel_values' in microbatch) != ('pixel_values_videos' in microbatch)


def test_packed_rows_are_halved_if_needed(monkeypatch):
    case, layout = case_of('llava')
    batch = layout.concat([batch_of(case, [1], 'right'), *[batch_of(case, TEXT_ROWS[:1], 'right')] * 8])
    lengths = describe(layout, batch).lengths
    budget = lengths[0] + sum(lengths[1:6])
    groups = pack_lengths(lengths, budget)
    [text] = [group for group in groups if 0 not in group]
    assert sum(lengths[row] for row in text) + lengths[0] <= budget < (len(text) + 1) * max(lengths[0], *lengths[1:])
    microbatches = packed_microbatches(monkeypatch, batch, layout, slot_tokens=budget)
    assert len(microbatches) == len(groups) == 2
    assert all('pixel_values' in microbatch for microbatch in microbatches)
    assert max(microbatch['input_ids'].numel() for microbatch in microbatches) <= budget


def packed_microbatches(monkeypatch, batch, layout, agreed=list, **options):
    """On a rank of two."""
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', agreed)
    dataloader = loader(batch)
    spec = token_data_spec(dataloader, layout=layout, packing=True, **options)
    split_of(dataloader).adopt(CutRules(packing='documents'))
    return spec.split_batch(batch, 1)


def test_media_rows_of_other_ranks_fit(monkeypatch):
    """Rows with images in a step in which only another rank has a video."""
    case, layout = case_of('qwen2_5_vl', has_videos=True)
    image_row = case.rows[case.kinds.index('image')]
    video_row = case.rows[case.kinds.index('video')]
    batch = with_counts(layout.concat([image_row] * 4))
    budget = layout.width(image_row) + layout.width(video_row)
    monkeypatch.setattr('composer_tokacc.data_spec.split.from_any_rank', lambda row: row or zero_weight(video_row))
    microbatches = packed_microbatches(
        monkeypatch, batch, layout, images_and_videos_somewhere, slot_tokens=budget, max_image_tokens=None
    )
    assert all('pixel_values_videos' in microbatch for microbatch in microbatches)
    assert max(microbatch['input_ids'].numel() for microbatch in microbatches) <= budget


def test_row_that_leaves_no_room(monkeypatch, caplog):
    case, layout = case_of('llava')
    batch = layout.concat([batch_of(case, [row], 'right') for row in (1, *TEXT_ROWS)])
    budget = max(describe(layout, batch).lengths)
    assert budget == describe(layout, batch).lengths[2]
    packed_microbatches(monkeypatch, batch, layout, slot_tokens=budget)
    assert "sample 'sample-4' must fit into a microbatch together with the dummy rows" in caplog.text
    assert f'over the caps of {budget} and None' in caplog.text


def test_no_media_rows_if_reduced_once(monkeypatch):
    case, layout = case_of('llava')
    text = layout.concat([batch_of(case, TEXT_ROWS, 'right')] * 4)
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', None)  # nothing is agreed upon
    dataloader = loader(text)
    spec = token_data_spec(dataloader, layout=layout, slot_tokens=max(describe(layout, text).lengths))
    split = split_of(dataloader)
    split.adopt(split.rules)
    split.reduces_once = True
    microbatches = spec.split_batch(text, 1)
    assert len(microbatches) > 1
    assert not any('pixel_values' in microbatch for microbatch in microbatches)
    assert sum(map(layout.num_rows, microbatches)) == sum(map(num_samples, microbatches)) == 8


def test_rows_added_beside_written_positions():
    """Mllama padded on the left. One of its microbatches has only text."""
    subject = SUBJECTS['mllama_mixed']
    batch = subject.batch(499905, side='left')
    [outcome] = measure_steps(subject.model('large'), [batch], 3)
    assert outcome.kind == 'exact', str(outcome)
