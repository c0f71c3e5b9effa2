# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows made of a config alone go through the real models, use what real media use, and change no other row."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import transformers

from composer_tokacc import BatchLayout
from composer_tokacc.layout import Family, Media, dummy_row
from tests.support import family_models
from tests.support.families import FAMILIES, WITH_DUMMY
from tests.support.family_media import MEDIA, TokenIds
from tests.support.sample_encoder import word_tokenizer
from tests.support.small_batches import TEXT, text_batch

CASES = [
    *((name, 'image') for name in WITH_DUMMY),
    *((name, kind) for name in ('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl') for kind in ('image', 'video')),
    *((name, kind) for name in ('llava_onevision', 'llava_next_video', 'video_llava') for kind in ('image', 'video')),
    *(('qwen2_5_omni', kind) for kind in ('image', 'video', 'audio')),
    ('qwen2_audio', 'audio'),
    ('mistral3', 'image'),
    ('llava_pixtral', 'image'),
]


@functools.cache
def case_of(name: str, unit: str):
    """A model whose parameters all want gradients, its rows without media, and its rows with the unit alone."""
    case = MEDIA[name]() if name in MEDIA else FAMILIES[name]()
    case.model.requires_grad_(True)
    layout = BatchLayout.for_model(case.model)
    rows = [{key: value for key, value in row.items() if isinstance(value, torch.Tensor)} for row in case.rows]
    counts = [{kind: layout.units_per_row(row, kind)[0] for kind in ('image', 'video', 'audio')} for row in rows]
    text = [row for row, count in zip(rows, counts, strict=True) if not any(count.values())]
    media = [row for row, count in zip(rows, counts, strict=True) if count[unit] == sum(count.values()) > 0]
    return case, layout, text, media


def gradients(case, batch):
    case.model.zero_grad(set_to_none=True)
    case.loss_sum(batch).backward()
    return {name: value.grad.clone() for name, value in case.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(('name', 'unit'), dict.fromkeys(CASES))
def test_blank_row_uses_every_parameter_that_real_media_use(name, unit):
    case, layout, text, media = case_of(name, unit)
    batch = layout.concat([text[0], dummy_row(layout, unit, like=text[0])], pad_token_id=case.pad_token_id)
    assert layout.units_per_row(batch, unit) == [0, 1]
    found = gradients(case, batch)
    used = set().union(*(gradients(case, row).keys() for row in media))
    assert found.keys() == used
    assert used > gradients(case, text[0]).keys()
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize(('name', 'unit'), dict.fromkeys(CASES))
def test_blank_row_leaves_the_gradient_of_the_others_alone(name, unit, side):
    case, layout, text, _ = case_of(name, unit)
    plain = layout.concat(text, padding_side=side, pad_token_id=case.pad_token_id)
    row = dummy_row(layout, unit, like=plain)
    batch = layout.concat([plain, row], padding_side=side, pad_token_id=case.pad_token_id)
    if name == 'mllama':  # the model couples rows, which the layout says
        assert layout.coupling(batch)
        return
    found, expected = gradients(case, batch), gradients(case, plain)
    unused = [value for key, value in found.items() if key not in expected]
    assert unused
    assert not any(value.any() for value in unused)
    distance = sum((found[key] - value).double().square().sum() for key, value in expected.items()).sqrt()
    norm = sum(value.double().square().sum() for value in expected.values()).sqrt()
    assert norm > 0
    assert distance / norm < 1e-6


OTHERS = ('glm4v', 'blip2', 'instructblip')
OTHER_CASES = [*((name, 'image') for name in OTHERS), ('glm4v', 'video'), ('instructblipvideo', 'video')]


@pytest.mark.parametrize(('name', 'unit'), OTHER_CASES)
def test_blank_row_goes_through_models_that_have_no_processor_here(name, unit):
    """The models themselves hold placeholders against features, but for those with query tokens."""
    named = ('<image>', '<video>', '<image_start>', '<image_end>', '<video_start>', '<video_end>')
    ids = TokenIds(word_tokenizer(*named))
    model = family_models.MODELS[name](ids)
    layout = BatchLayout.for_model(model)
    text = text_batch([5])
    text['input_ids'] += 10
    if 'mm_token_type_ids' in dummy_row(layout, unit):
        text['mm_token_type_ids'] = torch.zeros(1, 5).long()
    batch = layout.concat([text, dummy_row(layout, unit, like=text)])
    assert layout.units_per_row(batch, unit) == [0, 1]
    model(**batch).loss.backward()
    without = [key for key, value in model.named_parameters() if value.grad is None]
    assert all('post_layernorm' in key for key in without)  # which features of the layers before it skip
    assert all(bool(value.grad.isfinite().all()) for value in model.parameters() if value.grad is not None)


@pytest.mark.parametrize(('name', 'unit'), dict.fromkeys(CASES))
def test_blank_row_is_a_function_of_the_config(name, unit):
    case, layout, _, media = case_of(name, unit)
    first = dummy_row(layout, unit)
    torch.manual_seed(1)
    second = dummy_row(BatchLayout.for_model(copy.deepcopy(case.model.config)), unit)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=0, atol=0)
    # Types and dimensions are those of the processor's own.
    for key in first.keys() & media[0].keys():
        assert first[key].dtype.is_floating_point == media[0][key].dtype.is_floating_point, key
        assert first[key].dim() == media[0][key].dim(), key
    assert not (first['labels'] != -100).any()
    assert first['input_ids'].shape[1] <= min(row['input_ids'].shape[1] for row in media)


def test_blank_row_takes_on_what_the_others_carry():
    _, layout, _, _ = case_of('llava', 'image')
    like = text_batch([3, 5], sample_ids=['a', 'b'], rule=['causal'] * 2, real=[3, 5], num_images=[0, 0], step=4)
    like |= {'position_ids': torch.arange(5).expand(2, 5), 'loss_mask': torch.ones(2, 5).long()}
    row = dummy_row(layout, like=like)
    width = row['input_ids'].shape[1]
    assert (row['sample_ids'], row['rule'], row['real'], row['step']) == ([None], ['causal'], [0], 4)
    assert row['position_ids'].tolist() == [list(range(width))]
    assert row['loss_mask'].shape == (1, width)
    assert layout.concat([like, row])['num_images'] == [0, 0, 1]
    del like['attention_mask']
    assert 'attention_mask' not in dummy_row(layout, like=like)


@pytest.mark.parametrize('name', ['qwen3_vl', 'llava_onevision', 'qwen2_5_omni'])
def test_blank_video_beside_images_brings_no_image(name):
    case, layout = MEDIA[name](), BatchLayout.for_model(MEDIA[name]().model)
    like = next(
        row for row, truth in zip(case.rows, case.truth, strict=True) if truth == {**truth, 'image': 2, 'video': 0}
    )
    batch = layout.concat([like, dummy_row(layout, 'video', like=like)], pad_token_id=case.pad_token_id)
    assert layout.images_per_row(batch) == [2, 0]
    assert layout.units_per_row(batch, 'video') == [0, 1]
    with torch.no_grad():
        torch.testing.assert_close(case.loss_sum(batch), case.loss_sum(like), rtol=1e-5, atol=0)


@pytest.mark.parametrize('name', [*WITH_DUMMY, *(name for name in MEDIA if name != 'internvl')])
def test_every_family_says_for_every_kind_of_media_whether_it_has_a_row(name):
    model = (MEDIA if name in MEDIA else FAMILIES)[name]().model
    layout = BatchLayout.for_model(model)
    made = {unit for unit in ('image', 'video', 'audio') if dummy_row(layout, unit) is not None}
    assert made == set(layout.family.media)


def test_no_blank_row_where_the_family_cannot_say():
    layout = BatchLayout.for_model(FAMILIES['llava']().model)
    assert dummy_row(layout, 'audio') is None
    assert dummy_row(BatchLayout(family=layout.family)) is None
    assert dummy_row(BatchLayout(family=TEXT, config=layout.config)) is None
    unknown_tower = copy.deepcopy(layout.config)
    unknown_tower.vision_config = transformers.Dinov2Config()
    assert dummy_row(BatchLayout(family=layout.family, config=unknown_tower)) is None


def test_a_family_of_ones_own_may_bring_its_blank_row():
    def blank(config):
        return {'input_ids': torch.tensor([[config.image_token_id, 0]]), 'pixel_values': torch.ones(1, 2)}

    family = Family(
        name='new', entries=BatchLayout.infer(text_batch([1])).family.entries, media={'image': Media(dummy=blank)}
    )
    row = dummy_row(BatchLayout(family=family, config=SimpleNamespace(image_token_id=5)))
    assert row['input_ids'].tolist() == [[5, 0]]
    assert row['attention_mask'].tolist() == [[1, 1]]
