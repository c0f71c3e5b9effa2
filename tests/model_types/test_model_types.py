# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Some model types, tried again, and the table of all. ``make model-types`` tries all of them."""

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
from composer_tokacc.row_counts import without_row_counts
from tests.matrix.harness import measure_steps, plain_gradients
from tests.model_types.trial import CLASSES, assert_as_the_table_says, maker_of
from tests.support.training import relative_error

QUICK_TYPES = {'multimodal': ['git'], 'text': ['gpt2']}
SLOW_TYPES = {
    'multimodal': [
        'florence2',
        'gemma4',
        'glm46v',
        'granite_docling',
        'lfm2_vl',
        'minicpmv4_6',
        'molmo2',
        'pix2struct',
        'step3p7',
        'voxtral_realtime',
    ],
    'text': ['gemma3_text', 'lfm2', 'mixtral', 'qwen3_next', 'rwkv'],
    'masked': ['bert', 'funnel'],
    'seq2seq': ['t5'],
}
TYPES = [(kind, model_type) for kind, types in QUICK_TYPES.items() for model_type in types]
for slow_kind, slow_types in SLOW_TYPES.items():
    TYPES += [pytest.param(slow_kind, model_type, marks=pytest.mark.slow) for model_type in slow_types]


@pytest.mark.parametrize(('kind', 'model_type'), TYPES)
def test_type_is_as_the_table_says(kind, model_type):
    assert_as_the_table_says(model_type, kind)


KINDS = ('exact', 'refused', 'not tried', 'not built', 'at labels', 'all logits')


def test_no_type_is_wrong():
    table_of_kinds = results()
    for kind, classes in CLASSES.items():
        assert classes.keys() <= table_of_kinds[kind].keys()
    for types in table_of_kinds.values():
        for model_type, outcomes in types.items():
            for modality, outcome in outcomes.items():
                assert kind_of(outcome) in KINDS, (model_type, modality, outcome)


def test_page_has_the_table():
    assert table() in (ROOT / 'docs' / 'families.md').read_text()


def outcomes_of(maker, *batches):
    """Returns the outcome of a step on each batch, in microbatches of one row."""
    model = HuggingFaceModel(maker.model, shift_labels=True)
    return measure_steps(model, batches, 1)


@pytest.mark.parametrize('model_type', ['qwen3_5', pytest.param('gemma4', marks=pytest.mark.slow)])
def test_images_after_text_steps(model_type):
    maker = maker_of(model_type)
    first_text = maker.batch('image', has_media=False)
    images = maker.batch('image')
    later_text = maker.batch('image', has_media=False)

    outcomes = outcomes_of(maker, first_text, images, later_text)

    assert [outcome.kind for outcome in outcomes] == ['exact'] * 3, outcomes


def test_zero_scale_hides_no_positions():
    """Queries are multiplied by ``scale * log(position + 1) + bias``. In a fresh model ``scale`` is 0."""
    maker = maker_of('mistral_large4')
    maker.side = 'left'
    weights_of_scales = []
    for name, weight in maker.model.named_parameters():
        if name.endswith('softmax_scaling.scale'):
            weights_of_scales.append(weight)
    assert weights_of_scales
    for weight in weights_of_scales:
        assert not weight.any()

    (outcome,) = outcomes_of(maker, maker.batch('image'))

    assert outcome.kind == 'exact', outcome


ROPE_INDEX_ENTRIES = ('input_ids', 'mm_token_type_ids', 'image_grid_thw', 'attention_mask')


def test_images_numbered_over_the_batch():
    """The model numbers the images of a batch. So the positions are computed for one row at a time."""
    maker = maker_of('hunyuan_vl')
    batch = maker.batch('image')
    layout = BatchLayout.for_model(maker.model)
    positions_of_rows = []
    for row in range(len(batch['input_ids'])):
        one_row_batch = layout.select(batch, [row])
        entries = {key: value for key, value in one_row_batch.items() if key in ROPE_INDEX_ENTRIES}
        positions, *_ = maker.model.model.get_rope_index(**entries)
        positions_of_rows.append(positions)
    batch['position_ids'] = torch.cat(positions_of_rows, dim=1)

    (outcome,) = outcomes_of(maker, batch)

    assert outcome.kind == 'exact', outcome


def test_noise_in_evaluation_is_named():
    maker = maker_of('vibevoice_asr')
    batch = maker.batch('audio')
    batch_without_noise = {**batch, 'sample': False}

    (noisy_outcome,) = outcomes_of(maker, batch)
    (outcome,) = outcomes_of(maker, batch_without_noise)

    assert noisy_outcome.kind == 'refused'
    assert 'random in evaluation' in noisy_outcome.message
    assert outcome.kind == 'exact', outcome


IMAGE_TYPES = ['gemma3', 'internvl', 'lfm2_vl', 'minicpmv4_6', 'molmo2', 'paligemma']


TYPES_WITH_DUMMY = [(model_type, 'image') for model_type in IMAGE_TYPES]
TYPES_WITH_DUMMY += [('glm4v', 'video'), ('qwen3_5', 'video'), ('glmasr', 'audio')]


@pytest.mark.slow
@pytest.mark.parametrize(('model_type', 'modality'), TYPES_WITH_DUMMY)
def test_smallest_media_row_as_dummy(model_type, modality):
    """It changes no gradient, and uses the encoder that text leaves unused."""
    maker = maker_of(model_type)
    model = HuggingFaceModel(maker.model, shift_labels=True)
    layout = BatchLayout.for_model(maker.model)
    text = maker.batch(modality, has_media=False)
    num_frames = 2 if modality == 'video' else 1
    media = maker.batch(modality, runs=num_frames)

    dummy_row = smallest_row([describe(layout, media)], modality)
    assert dummy_row is not None
    with_dummy = without_row_counts(add_rows(layout, text, [dummy_row], 'right'))
    *media_of_text_rows, _ = layout.units_per_row(with_dummy, modality)
    assert media_of_text_rows == [0] * len(text['input_ids'])

    expected = plain_gradients(model, text)
    gradients = plain_gradients(model, with_dummy)
    assert relative_error(gradients, expected) < 1e-6
    assert gradients.keys() > expected.keys()
