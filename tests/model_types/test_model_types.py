# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A slice of the model types, tried, and what was kept of all of them; ``make model-types`` tries all."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.model_types.table import kind_of, results, table
from tests.support.launch import ROOT

if tuple(map(int, transformers.__version__.split('.')[:2])) < (5, 23):
    pytest.skip('the table is of transformers from 5.23 on', allow_module_level=True)

from composer.models import HuggingFaceModel

from composer_tokacc import BatchLayout
from composer_tokacc.data_spec.pieces import add_rows, smallest_row
from composer_tokacc.layout import describe
from composer_tokacc.row_counts import without_rows
from tests.matrix.harness import measure_steps, plain_gradients, quiet
from tests.model_types.trial import CLASSES, maker_of, tried
from tests.support.training import relative_error

QUICK = {
    'multimodal': ('git', 'granite_docling', 'voxtral_realtime'),
    'text': ('gpt2',),
}
SLICE = {
    'multimodal': ('florence2', 'gemma4', 'glm46v', 'lfm2_vl', 'minicpmv4_6', 'molmo2', 'pix2struct', 'step3p7'),
    'text': ('gemma3_text', 'lfm2', 'mixtral', 'qwen3_next', 'rwkv'),
    'other': ('bert', 't5'),
}


@pytest.mark.parametrize(
    ('kind', 'model_type'),
    [(kind, one) for kind, types in QUICK.items() for one in types]
    + [pytest.param(kind, one, marks=pytest.mark.slow) for kind, types in SLICE.items() for one in types],
)
def test_type_is_as_the_table_says(kind, model_type):
    found = tried(model_type, kind)
    kept = results()[kind][model_type]
    assert {key: kind_of(said) for key, said in found.items()} == {key: kind_of(said) for key, said in kept.items()}, (
        found
    )


KINDS = ('exact', 'refused', 'not tried', 'not built', 'at labels', 'all logits')


def test_no_type_is_wrong():
    kept = results()
    for kind, classes in CLASSES.items():
        assert classes.keys() <= kept[kind].keys()
    said = [(name, one) for types in kept.values() for name, found in types.items() for one in found.values()]
    assert [one for one in said if kind_of(one[1]) not in KINDS] == []


def test_page_has_the_table():
    assert table() in (ROOT / 'docs' / 'families.md').read_text()


@pytest.mark.parametrize('model_type', ['qwen3_5', pytest.param('gemma4', marks=pytest.mark.slow)])
def test_images_after_text_steps(model_type):
    maker = maker_of(model_type)
    steps = [maker.batch('image', has_media=False), maker.batch('image'), maker.batch('image', has_media=False)]
    with quiet():
        outcomes = measure_steps(HuggingFaceModel(maker.model, shift_labels=True), steps, 1)
    assert [one.kind for one in outcomes] == ['exact'] * 3, outcomes


def test_zero_scale_hides_no_positions():
    maker = maker_of('mistral_large4')
    maker.side = 'left'
    scales = [weight for name, weight in maker.model.named_parameters() if name.endswith('softmax_scaling.scale')]
    assert scales
    assert not any(bool(weight.any()) for weight in scales)
    with quiet():
        (outcome,) = measure_steps(HuggingFaceModel(maker.model, shift_labels=True), [maker.batch('image')], 1)
    assert outcome.kind == 'exact', outcome


def test_images_numbered_over_the_batch():
    maker = maker_of('hunyuan_vl')
    batch, layout = maker.batch('image'), BatchLayout.for_model(maker.model)
    rows = [layout.select(batch, [row]) for row in range(len(batch['input_ids']))]
    keys = ('input_ids', 'mm_token_type_ids', 'image_grid_thw', 'attention_mask')
    positions = [maker.model.model.get_rope_index(**{key: row[key] for key in keys if key in row})[0] for row in rows]
    batch['position_ids'] = torch.cat(positions, dim=1)
    with quiet():
        (outcome,) = measure_steps(HuggingFaceModel(maker.model, shift_labels=True), [batch], 1)
    assert outcome.kind == 'exact', outcome


def test_noise_in_evaluation_is_named():
    maker = maker_of('vibevoice_asr')
    model, batch = HuggingFaceModel(maker.model, shift_labels=True), maker.batch('audio')
    with quiet():
        (noisy,) = measure_steps(model, [batch], 1)
        (without,) = measure_steps(model, [{**batch, 'sample': False}], 1)
    assert noisy.kind == 'refused'
    assert 'random in evaluation' in noisy.message
    assert without.kind == 'exact', without


@pytest.mark.slow
@pytest.mark.parametrize(
    ('model_type', 'modality'),
    [
        *((one, 'image') for one in ('gemma3', 'internvl', 'lfm2_vl', 'minicpmv4_6', 'molmo2', 'paligemma')),
        *(('glm4v', 'video'), ('qwen3_5', 'video'), ('glmasr', 'audio')),
    ],
)
def test_smallest_media_row_as_dummy(model_type, modality):
    """It changes no gradient, and uses the encoder that text leaves unused."""
    maker = maker_of(model_type)
    model, layout = HuggingFaceModel(maker.model, shift_labels=True), BatchLayout.for_model(maker.model)
    text, media = maker.batch(modality, has_media=False), maker.batch(modality, runs=2 if modality == 'video' else 1)
    row = smallest_row([describe(layout, media)], modality)
    assert row is not None
    joined = without_rows(add_rows(layout, text, [row], 'right'))
    assert layout.units_per_row(joined, modality)[:-1] == [0] * len(text['input_ids'])
    found, expected = plain_gradients(model, joined), plain_gradients(model, text)
    assert relative_error(found, expected) < 1e-6
    assert found.keys() > expected.keys()
