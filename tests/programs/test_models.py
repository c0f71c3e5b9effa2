# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from composer_tokacc.model_structure import transformer_blocks
from composer_tokacc.programs.build import build_optimizer
from composer_tokacc.programs.models import build_model, build_transformers_model, parameter_groups
from tests.support.text import VOCABULARY

VISION = {
    'model_type': 'clip_vision_model',
    'hidden_size': 16,
    'intermediate_size': 32,
    'num_hidden_layers': 3,
    'num_attention_heads': 2,
    'image_size': 8,
    'patch_size': 8,
}
TEXT = {
    'model_type': 'llama',
    'hidden_size': 16,
    'intermediate_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
}
LLAVA = {'model_type': 'llava', 'vision_config': VISION, 'text_config': TEXT, 'vision_feature_layer': -1}


def llava(processor, **changes):
    return {**copy.deepcopy(LLAVA), **changes}


def test_vocabulary_and_special_tokens_come_from_the_processor(processor):
    config = build_model(config=llava(processor), processor=processor).model.config
    tokenizer = processor.tokenizer
    assert config.text_config.vocab_size == len(tokenizer)
    assert config.text_config.pad_token_id == tokenizer.pad_token_id
    assert config.text_config.eos_token_id == tokenizer.eos_token_id
    assert config.text_config.bos_token_id is None
    assert config.image_token_index == tokenizer.convert_tokens_to_ids('<image>')


def test_given_settings_win_over_the_processor(processor):
    settings = llava(processor, text_config={**TEXT, 'vocab_size': 300, 'eos_token_id': 7})
    config = build_model(config=settings, processor=processor).model.config
    assert config.text_config.vocab_size == 300
    assert config.text_config.eos_token_id == 7


def test_settings_are_not_changed_in_place(processor):
    settings = llava(processor)
    build_model(config=settings, processor=processor)
    assert settings == LLAVA


T5 = {'model_type': 't5', 'd_model': 16, 'd_ff': 16, 'd_kv': 8, 'num_layers': 1, 'num_heads': 2}
QFORMER = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 16}
BLIP2 = {'model_type': 'blip-2', 'text_config': T5, 'vision_config': QFORMER, 'qformer_config': QFORMER}
EVERY_PART = ['model.language_model', 'model.vision_tower', 'model.multi_modal_projector', 'lm_head']
LATE = pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='refused in the first forward')
MISTAKES = [
    ({'config': {**LLAVA, 'model_type': 'lava'}}, 'lava. Did you mean llava\\?'),
    ({'config': {**LLAVA, 'text_config': {**TEXT, 'num_hidden_layers': 'two'}}}, "two|'str'"),
    ({'config': {**LLAVA, 'vision_confg': {}}}, 'vision_confg. Did you mean vision_config\\?'),
    ({'config': {**LLAVA, 'text_config': {'hiden_size': 8}}}, 'text_config` has no key hiden_size'),
    ({'config': {**LLAVA, 'text_config': {**TEXT, 'vocab_size': 5}}}, "vocab_size` must be at least the tokenizer's"),
    ({'config': {**TEXT, 'hidden_size': -4}}, '`model.config.hidden_size` must be greater than or equal to 1, got: -4'),
    pytest.param({'config': {**TEXT, 'num_attention_heads': 5}}, '5', marks=LATE),
    ({}, 'must have exactly one of'),
    ({'config': LLAVA, 'pretrained': 'folder'}, 'must have exactly one of'),
    # An encoder would read the answers.
    ({'config': BLIP2}, 'must have only a decoder, got: blip-2'),
    ({'config': LLAVA, 'freeze': ['vision']}, r"got: 'vision'. Its parts are .*tower, (model\.)?multi_modal_projector"),
    ({'config': LLAVA, 'freeze': EVERY_PART}, 'must leave something to train'),
]


@pytest.mark.parametrize(('settings', 'expected'), MISTAKES)
def test_mistakes_are_refused_by_name(processor, settings, expected):
    with pytest.raises(ValueError, match=expected):
        build_model(**settings, processor=processor)


def test_same_seed_gives_same_weights(processor):
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build_model(config=llava(processor), processor=processor, seed=s) for s in (3, 3, 4))
    torch.testing.assert_close(torch.rand(3), expected_draw, rtol=0, atol=0)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize('tower', ['clip_vision_model', 'siglip_vision_model'])
@pytest.mark.parametrize('feature_layer', [-1, -2, -3, 1, 2, [-3, -2]])
def test_unreached_parameters_are_frozen(tower, feature_layer):
    # Siglip has no class token to leave out, and no CLIP token count is needed with 'full'.
    settings = {
        'model_type': 'llava',
        'vision_feature_layer': feature_layer,
        'vision_feature_select_strategy': 'full',
        'image_token_index': 5,
        'text_config': {**TEXT, 'vocab_size': 40},
        'vision_config': {**VISION, 'model_type': tower, 'image_size': 16},
    }
    model = build_model(config=settings)
    num_features = 4 + (tower == 'clip_vision_model')
    ids = torch.randint(6, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 1 : 1 + num_features] = 5
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(True)
    inputs = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'pixel_values': pixels, 'labels': ids}
    model(inputs).loss.backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trainable == reached


@pytest.mark.parametrize('name', ['vision_tower', 'model.vision_tower', 'model.multi_modal_projector'])
def test_frozen_parts_keep_their_weights(processor, batch, name):
    model = build_model(config=llava(processor), processor=processor, freeze=[name])
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(batch).loss.backward()
    optimizer.step()
    changed = {key for key, value in model.model.state_dict().items() if not torch.equal(value, before[key])}
    inside = {key for key in before if key.removeprefix('model.').startswith(f'{name.removeprefix("model.")}.')}
    assert inside
    assert not changed & inside
    assert any('language_model' in key for key in changed)


@pytest.mark.parametrize('saved_dtype', [torch.float32, torch.bfloat16])
def test_checkpoint_in_the_wanted_dtype(tmp_path, processor, batch, saved_dtype):
    original = build_model(config=llava(processor), processor=processor, seed=9).model.to(saved_dtype)
    original.save_pretrained(tmp_path)
    loaded = build_model(pretrained=str(tmp_path), processor=processor)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert isinstance(loaded.model, type(AutoModelForImageTextToText.from_pretrained(tmp_path)))
    for (name, a), b in zip(original.named_parameters(), loaded.model.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0, msg=name)


def test_embeddings_grow_to_the_tokenizer(tmp_path, processor):
    small = {**TEXT, 'vocab_size': 10, 'pad_token_id': 0, 'eos_token_id': 1, 'bos_token_id': None}
    build_model(config=small).model.save_pretrained(tmp_path)
    model = build_model(pretrained=str(tmp_path), processor=processor.tokenizer)
    assert model.model.get_input_embeddings().num_embeddings >= len(processor.tokenizer)


def test_metrics_count_shifted_labelled_tokens_only(processor, batch):
    model = build_model(config=llava(processor), processor=processor).eval()
    with torch.no_grad():
        logits = model({**batch, 'labels': batch['labels'].clone()}).logits
        outputs = model.eval_forward({**batch, 'labels': batch['labels'].clone()})
    metrics = model.get_metrics(is_train=False)
    for metric in metrics.values():
        model.update_metric(batch, outputs, metric)
    predicted, wanted = logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten()
    is_labelled = wanted != -100
    right = (predicted.argmax(-1) == wanted)[is_labelled]
    assert metrics['MaskedAccuracy'].compute().item() == pytest.approx(right.float().mean().item())
    expected = F.cross_entropy(predicted[is_labelled], wanted[is_labelled]).item()
    assert metrics['LanguageCrossEntropy'].compute().item() == pytest.approx(expected, rel=1e-5)


def test_training_metrics_are_off(processor):
    assert build_model(config=llava(processor), processor=processor).get_metrics(is_train=True) == {}
    asked = build_model(config=llava(processor), processor=processor, train_metrics=True)
    assert list(asked.get_metrics(is_train=True)) == ['LanguageCrossEntropy']


def test_only_generation_keeps_a_cache(processor, batch):
    model = build_model(config=llava(processor), processor=processor)
    assert model(batch).past_key_values is None
    assert model.model.generation_config.use_cache


def test_activation_checkpointing_changes_no_gradient(processor, batch):
    gradients = []
    for activation_checkpointing in (False, True):
        model = build_model(
            config=llava(processor), processor=processor, activation_checkpointing=activation_checkpointing
        ).train()
        model(batch).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    assert any(getattr(module, 'gradient_checkpointing', False) for module in model.modules())


def test_fsdp_wraps_blocks_of_every_encoder(processor):
    model = build_model(config=llava(processor), processor=processor)
    blocks = transformer_blocks(model.model)
    assert [type(block).__name__ for block in blocks] == ['CLIPEncoderLayer'] * 3 + ['LlamaDecoderLayer'] * 2
    wrapped = [module for module in model.model.modules() if model.model.fsdp_wrap_fn(module)]
    assert {id(module) for module in wrapped} == {id(block) for block in blocks}


def test_experts_are_no_blocks():
    settings = {**TEXT, 'model_type': 'mixtral', 'vocab_size': 32, 'num_local_experts': 4}
    assert [type(b).__name__ for b in transformer_blocks(build_model(config=settings).model)] == [
        'MixtralDecoderLayer'
    ] * 2


def test_text_model_from_a_config():
    settings = {**TEXT, 'vocab_size': VOCABULARY}
    model = build_model(config=settings)
    assert type(model.model).__name__ == 'LlamaForCausalLM'
    ids = torch.arange(12).view(2, 6)
    assert model({'input_ids': ids, 'labels': ids}).loss.isfinite()


def test_tokenizer_travels_in_the_checkpoint(processor):
    metadata = build_model(config=llava(processor), processor=processor).get_metadata()
    assert 'tokenizer.json' in metadata['tokenizer']
    assert metadata['model']['config']['content']['model_type'] == 'llava'


def test_learning_rates_of_parts(processor):
    model = build_transformers_model(config=llava(processor), processor=processor, freeze=['multi_modal_projector'])
    parts = {'vision_tower': {'lr': 0.25}, 'language_model': {'lr': 0.5}, 'language_model.layers.1': {'lr': 0.125}}
    groups = parameter_groups(model, parts)
    found = {id(one): group.get('lr') for group in groups for one in group['params']}
    expected = {}
    for name, one in model.named_parameters():
        of_text = 0.125 if 'layers.1.' in name else 0.5 if 'language_model' in name else None
        if one.requires_grad:
            expected[id(one)] = 0.25 if 'vision_tower' in name else of_text
    assert found == expected
    assert sum(len(group['params']) for group in groups) == len(expected), 'each once'
    with pytest.raises(ValueError, match='must name parts of the model that are trained, got: multi_modal_projector'):
        parameter_groups(model, {'multi_modal_projector': {'lr': 1}})


def test_a_part_of_all_parameters_keeps_its_arguments():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = build_optimizer(model, {'name': 'adamw', 'lr': 1e-3, 'parts': {'0': {'lr': 5e-4}}})
    assert {group['lr'] for group in optimizer.param_groups} == {5e-4}
    assert sum(len(group['params']) for group in optimizer.param_groups) == 2
