# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

from composer_tokacc.model_structure import transformer_blocks
from composer_tokacc.programs.build import build_optimizer
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.models import build_model, build_transformers_model, parameter_groups, read_config
from tests.support.text import VOCABULARY
from tests.support.training import composer_gradients

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
SMALL_TEXT = {**TEXT, 'vocab_size': VOCABULARY}
LLAVA = {
    'model_type': 'llava',
    'vision_config': VISION,
    'text_config': TEXT,
    'vision_feature_layer': -1,
}


@pytest.fixture
def model(processor):
    return build_model(config=LLAVA, processor=processor)


# From settings to a config.


def test_tokens_come_from_the_processor(model, processor):
    config = model.model.config
    text_config = config.text_config
    tokenizer = processor.tokenizer
    assert text_config.vocab_size == len(tokenizer)
    assert text_config.pad_token_id == tokenizer.pad_token_id
    assert text_config.eos_token_id == tokenizer.eos_token_id
    assert text_config.bos_token_id is None
    assert config.image_token_index == tokenizer.convert_tokens_to_ids('<image>')


def with_text_settings(**changes):
    """Returns the settings of the small LLaVA, with changes to its text part."""
    return {**LLAVA, 'text_config': {**TEXT, **changes}}


def test_given_settings_win_over_the_processor(processor):
    settings = with_text_settings(vocab_size=300, eos_token_id=7)
    model = build_transformers_model(config=settings, processor=processor)
    config = model.config
    assert config.text_config.vocab_size == 300
    assert config.text_config.eos_token_id == 7


def test_null_for_the_language_model_is_its_default(processor):
    settings = {**LLAVA, 'text_config': None}
    config = read_config(None, settings, processor)
    assert config.text_config.vocab_size == len(processor.tokenizer)


def test_settings_are_not_changed_in_place(processor):
    settings = copy.deepcopy(LLAVA)
    build_model(config=settings, processor=processor)
    assert settings == LLAVA


T5 = {
    'model_type': 't5',
    'd_model': 16,
    'd_ff': 16,
    'd_kv': 8,
    'num_layers': 1,
    'num_heads': 2,
}
QFORMER = {
    'hidden_size': 16,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'intermediate_size': 16,
}
BLIP2 = {
    'model_type': 'blip-2',
    'text_config': T5,
    'vision_config': QFORMER,
    'qformer_config': QFORMER,
}
WRONG_CONFIGS = [
    pytest.param({**LLAVA, 'model_type': 'lava'}, r'lava. Did you mean llava\?', id='name of the model'),
    pytest.param({**LLAVA, 'vision_confg': {}}, r'vision_confg. Did you mean vision_config\?', id='name of a part'),
    pytest.param(
        {**LLAVA, 'text_config': {'hiden_size': 8}},
        'text_config` has no key hiden_size',
        id='name of a key',
    ),
    pytest.param(with_text_settings(num_hidden_layers='two'), "two|'str'", id='word for a number'),
    pytest.param(
        {**TEXT, 'num_attention_heads': 5},
        '5',
        marks=pytest.mark.skipif(
            transformers.__version__.startswith('4.'),
            reason='refused in the first forward',
        ),
        id='heads that do not divide the width',
    ),
    pytest.param(
        with_text_settings(vocab_size=5),
        "vocab_size` must be at least the tokenizer's",
        id='small vocabulary of a part',
    ),
    pytest.param(
        {**TEXT, 'vocab_size': 5},
        '`model.config.vocab_size` must be at least',
        id='small vocabulary',
    ),
    # An encoder would read the answers.
    pytest.param(BLIP2, 'must have only a decoder, got: blip-2', id='with an encoder'),
]


@pytest.mark.parametrize(('config', 'message'), WRONG_CONFIGS)
def test_wrong_configs_are_refused(processor, config, message):
    with pytest.raises(ValueError, match=message):
        build_model(config=config, processor=processor)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        pytest.param({}, 'must have exactly one of', id='neither config nor checkpoint'),
        pytest.param({'config': LLAVA, 'pretrained': 'folder'}, 'must have exactly one of', id='both'),
        pytest.param(
            {'config': LLAVA, 'freeze': ['vision']},
            r'has no part vision. Known: .*(model\.)?multi_modal_projector',
            id='unknown part',
        ),
    ],
)
def test_wrong_settings_are_refused(processor, settings, message):
    with pytest.raises(ValueError, match=message):
        build_model(**settings, processor=processor)


LEGAL_CONFIGS = [
    {'model_type': 'phi4_multimodal', 'audio_config': {'chunk_size': -1}},
    {'model_type': 'gemma4_text', 'head_dim': 64},
]


@pytest.mark.parametrize('config', LEGAL_CONFIGS, ids=lambda config: config['model_type'])
def test_fields_of_configs_are_known(config):
    """Gemma 4 has a field that cannot be read for all layers together."""
    if config['model_type'] not in CONFIG_MAPPING:
        pytest.skip('this release of Transformers does not have the model')
    read_config(None, config)


def test_parts_to_freeze_have_parameters():
    """A tied head has none of its own, so it cannot be frozen without the embeddings, and is not listed."""
    tied = {**SMALL_TEXT, 'tie_word_embeddings': True}
    untied = {**SMALL_TEXT, 'tie_word_embeddings': False}

    known_parts = r'has no part lm_head\. Known: model\.embed_tokens, model\.layers, model\.norm$'
    with pytest.raises(ValueError, match=known_parts):
        build_transformers_model(config=tied, freeze=['lm_head'])

    with pytest.raises(ValueError, match=r'has no part lm_heads\. Did you mean lm_head\.weight\?$'):
        build_transformers_model(config=untied, freeze=['lm_heads'])


def assert_same_tensors(named_tensors, expected):
    """Checks that both have the same names and exactly the same tensors."""
    torch.testing.assert_close(dict(named_tensors), dict(expected), rtol=0, atol=0)


# Weights, and which of them are trained.


def test_fresh_model_keeps_rotary_frequencies(tmp_path):
    """They stay in float32, as in a loaded model. Rounded ones would turn far positions by another angle."""
    model = build_transformers_model(config=TEXT, dtype='bfloat16')
    model.save_pretrained(tmp_path)
    loaded = build_transformers_model(pretrained=str(tmp_path), dtype='bfloat16')

    assert_same_tensors(model.named_buffers(), loaded.named_buffers())
    types = {parameter.dtype for parameter in model.parameters()}
    assert types == {torch.bfloat16}


def test_checkpoint_with_encoder_is_refused_unread(tmp_path):
    """The folder has no weights, so loading them would end in another error."""
    transformers.T5Config(**T5).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match='must have only a decoder, got: t5'):
        build_transformers_model(pretrained=str(tmp_path))


def test_same_seed_gives_same_weights(processor):
    """Building a model also leaves the run's own random numbers alone."""

    def weights_of_seed(seed):
        model = build_model(config=LLAVA, processor=processor, seed=seed)
        return model.state_dict()

    torch.manual_seed(5)
    expected_draw = torch.rand(3)

    torch.manual_seed(5)
    first = weights_of_seed(3)
    again = weights_of_seed(3)
    other = weights_of_seed(4)
    draw = torch.rand(3)

    assert torch.equal(draw, expected_draw)
    assert_same_tensors(again, first)
    with pytest.raises(AssertionError):
        assert_same_tensors(other, first)


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def names_with_gradient(model):
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize('encoder', ['clip_vision_model', 'siglip_vision_model'])
@pytest.mark.parametrize('feature_layer', [-1, -2, -3, 1, 2, [-3, -2]])
def test_unreached_parameters_are_frozen(encoder, feature_layer):
    """DDP fails at parameters without a gradient. A backward pass shows which these are."""
    config = {
        'model_type': 'llava',
        'vision_feature_layer': feature_layer,
        'vision_feature_select_strategy': 'full',  # Siglip has no class token that could be left out
        'image_token_index': 5,
        'text_config': {**TEXT, 'vocab_size': 40},
        'vision_config': {**VISION, 'model_type': encoder, 'image_size': 16},
    }
    num_features = 4  # one for each patch
    if encoder == 'clip_vision_model':
        num_features += 1  # the class token
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 40, (2, 12), generator=generator)
    ids[:, 1 : 1 + num_features] = 5
    batch = {
        'input_ids': ids,
        'attention_mask': torch.ones_like(ids),
        'pixel_values': torch.randn(2, 3, 16, 16, generator=generator),
        'labels': ids,
    }

    model = build_model(config=config)
    trainable = trained_names(model)

    model.requires_grad_(True)
    model(batch).loss.backward()
    assert trainable == names_with_gradient(model)


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='has no processor of videos for Video-LLaVA')
@pytest.mark.parametrize('model_type', ['aya_vision', 'llava', 'mistral3', 'video_llava'])
def test_unreached_parameters_of_families(model_type, tmp_path):
    """Video-LLaVA has two encoders. The tiny models and batches are those of docs/families.md."""
    from tests.model_types.trial import maker_of  # needs Transformers 5

    maker = maker_of(model_type)
    maker.config.vision_feature_layer = -2
    maker.config.save_pretrained(tmp_path)

    model = build_transformers_model(pretrained=str(tmp_path), load_weights=False).double()
    trainable = trained_names(model)

    model.requires_grad_(True)
    for modality in maker.modalities():
        batch = maker.batch(modality)
        model(**batch).loss.backward()
    reached = names_with_gradient(model)
    assert len(reached) < len(list(model.parameters()))
    assert trainable == reached


@pytest.mark.parametrize('part', ['vision_tower', 'model.vision_tower', 'model.multi_modal_projector'])
def test_frozen_parts_keep_their_weights(processor, batch, part):
    model = build_model(config=LLAVA, processor=processor, freeze=[part])
    before = copy.deepcopy(model.model.state_dict())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    model(batch).loss.backward()
    torch.optim.SGD(trainable, lr=1.0).step()

    prefix = part.removeprefix('model.') + '.'
    num_frozen = 0
    num_changed_of_language_model = 0
    for name, weight in model.model.state_dict().items():
        is_same = torch.equal(weight, before[name])
        if prefix in name:
            num_frozen += 1
            assert is_same, name
        elif 'language_model' in name and not is_same:
            num_changed_of_language_model += 1
    assert num_frozen > 0
    assert num_changed_of_language_model > 0


@pytest.mark.parametrize('saved_dtype', [torch.float32, torch.bfloat16])
def test_checkpoint_is_loaded_in_float32(tmp_path, processor, saved_dtype):
    original = build_transformers_model(config=LLAVA, processor=processor, seed=9)
    original.to(saved_dtype)
    original.save_pretrained(tmp_path)
    model_of_transformers = AutoModelForImageTextToText.from_pretrained(tmp_path)

    loaded = build_transformers_model(pretrained=str(tmp_path), processor=processor)

    assert isinstance(loaded, type(model_of_transformers))
    original.float()
    assert_same_tensors(loaded.named_parameters(), original.named_parameters())


def test_embeddings_grow_to_the_tokenizer(tmp_path, processor):
    tokenizer = processor.tokenizer
    small = {**TEXT, 'vocab_size': 10, 'pad_token_id': 0, 'eos_token_id': 1, 'bos_token_id': None}
    small_model = build_transformers_model(config=small)
    small_model.save_pretrained(tmp_path)

    model = build_transformers_model(pretrained=str(tmp_path), processor=tokenizer)

    embeddings = model.get_input_embeddings()
    assert embeddings.num_embeddings >= len(tokenizer)


# In Composer: metrics, caches, blocks.


def test_metrics_count_shifted_labelled_tokens_only(model, batch):
    model.eval()
    with torch.no_grad():
        logits = model(batch).logits
        outputs = model.eval_forward(copy.deepcopy(batch))  # Composer shifts these labels in place
    metrics = model.get_metrics(is_train=False)
    for metric in metrics.values():
        model.update_metric(batch, outputs, metric)
    accuracy = metrics['MaskedAccuracy'].compute()
    loss = metrics['LanguageCrossEntropy'].compute()

    next_tokens = batch['labels'][:, 1:]
    is_labelled = next_tokens != -100
    labels = next_tokens[is_labelled]
    predictions = logits[:, :-1][is_labelled]
    is_right = predictions.argmax(dim=-1) == labels
    expected_accuracy = is_right.float().mean()
    expected_loss = F.cross_entropy(predictions, labels)
    torch.testing.assert_close(accuracy, expected_accuracy)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)


def test_training_metrics_are_off(model, processor):
    model_with_metrics = build_model(config=LLAVA, processor=processor, train_metrics=True)
    metrics = model_with_metrics.get_metrics(is_train=True)
    assert model.get_metrics(is_train=True) == {}
    assert list(metrics) == ['LanguageCrossEntropy']


def test_only_generation_keeps_a_cache(model, batch):
    assert model(batch).past_key_values is None
    assert model.model.generation_config.use_cache


def test_activation_checkpointing_changes_no_gradient(model, processor, batch):
    checkpointed = build_model(config=LLAVA, processor=processor, activation_checkpointing=True)
    checkpointed.train()
    model.train()

    model(batch).loss.backward()
    checkpointed(batch).loss.backward()

    assert any(getattr(module, 'gradient_checkpointing', False) for module in checkpointed.modules())
    gradients = composer_gradients(checkpointed)
    expected_gradients = composer_gradients(model)
    torch.testing.assert_close(gradients, expected_gradients)


def class_names(modules):
    return [type(module).__name__ for module in modules]


def test_fsdp_wraps_blocks_of_every_encoder(model):
    hugging_face_model = model.model
    blocks = transformer_blocks(hugging_face_model)
    wrapped = filter(hugging_face_model.fsdp_wrap_fn, hugging_face_model.modules())
    assert class_names(blocks) == ['CLIPEncoderLayer'] * 3 + ['LlamaDecoderLayer'] * 2
    assert set(wrapped) == set(blocks)


def test_experts_are_no_blocks():
    config = {**TEXT, 'model_type': 'mixtral', 'vocab_size': 32, 'num_local_experts': 4}
    model = build_transformers_model(config=config)
    blocks = transformer_blocks(model)
    assert class_names(blocks) == ['MixtralDecoderLayer'] * 2


BERT = {
    'model_type': 'bert',
    'hidden_size': 16,
    'intermediate_size': 32,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'vocab_size': VOCABULARY,
}


@pytest.mark.parametrize(
    ('config', 'class_name', 'shift'),
    [
        pytest.param(SMALL_TEXT, 'LlamaForCausalLM', 1, id='decoder'),
        pytest.param(BERT, 'BertForMaskedLM', 0, id='encoder'),
        pytest.param({**BERT, 'is_decoder': True}, 'BertLMHeadModel', 1, id='encoder as a decoder'),
    ],
)
def test_text_model_from_a_config(config, class_name, shift):
    """The label of a position is predicted ``shift`` positions before it."""
    model = build_model(config=config).eval()
    ids = torch.arange(12).view(2, 6)
    batch = {'input_ids': ids, 'labels': ids.flip(1)}

    with torch.no_grad():
        loss = model(batch).loss
        logits = model.model(input_ids=ids).logits
    outputs = model.eval_forward(copy.deepcopy(batch))
    metric = model.get_metrics(is_train=False)['LanguageCrossEntropy']
    model.update_metric(batch, outputs, metric)

    assert type(model.model).__name__ == class_name
    predictions = logits[:, : 6 - shift].flatten(0, 1)
    labels = batch['labels'][:, shift:].flatten()
    expected = F.cross_entropy(predictions, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=0)


def test_tokenizer_that_composer_cannot_save(tmp_path, processor):
    """Composer's metadata has no place for a folder, in which Transformers saves further chat templates."""
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = {'default': 'a', 'tool_use': 'b'}

    model = build_model(config=TEXT, processor=tokenizer)
    metadata = model.get_metadata()

    for name, file in metadata['processor'].items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file['content'])
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template


# Learning rates of parts.


def rates_by_name(model, rates):
    """Returns the learning rate of each trained parameter by name. None: it is in no part."""
    settings_of_parts = {part: {'lr': rate} for part, rate in rates.items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    rate_of_name = {}
    for group in parameter_groups(model, settings_of_parts):
        for parameter in group['params']:
            name = names[parameter]
            assert name not in rate_of_name, 'each parameter is in one group'
            rate_of_name[name] = group.get('lr')
    assert rate_of_name.keys() == trained_names(model)
    return rate_of_name


def assert_rates(rates, expected_rates):
    """Fails unless each parameter has the rate of the first part that its name contains, or None."""
    for name, rate in rates.items():
        expected_rate = None
        for part, rate_of_part in expected_rates.items():
            if part in name:
                expected_rate = rate_of_part
                break
        assert rate == expected_rate, name


def test_learning_rates_of_parts(processor):
    model = build_transformers_model(config=LLAVA, processor=processor, freeze=['multi_modal_projector'])

    rates = rates_by_name(model, {'vision_tower': 0.25, 'language_model': 0.5, 'language_model.layers.1': 0.125})

    expected_rates = {'vision_tower': 0.25, 'language_model.layers.1': 0.125, 'language_model': 0.5}
    assert_rates(rates, expected_rates)
    with pytest.raises(ValueError, match='must name parts of the model that are trained, got: multi_modal_projector'):
        rates_by_name(model, {'multi_modal_projector': 1})


@pytest.mark.parametrize('outer', ['model', 'layers', 'model.layers'])
@pytest.mark.parametrize('inner', ['layers.0', 'model.layers.0'])
def test_inner_part_wins(outer, inner):
    """A leading ``model.`` of the outer name does not count, although it makes the name longer."""
    model = build_transformers_model(config=SMALL_TEXT)

    rates = rates_by_name(model, {outer: 0.5, inner: 0.25})
    rates_with_inner_first = rates_by_name(model, {inner: 0.25, outer: 0.5})

    assert rates['model.layers.0.mlp.up_proj.weight'] == 0.25
    assert rates['model.layers.1.mlp.up_proj.weight'] == 0.5
    assert rates['lm_head.weight'] is None
    assert rates_with_inner_first == rates


def test_parts_with_an_adapter(processor):
    """Parts are named as without an adapter, although peft renames all parameters."""
    pytest.importorskip('peft')
    lora = {'r': 2, 'modules_to_save': ['multi_modal_projector']}
    model = build_transformers_model(config=LLAVA, processor=processor, lora=lora)

    rates = rates_by_name(model, {'multi_modal_projector': 0.5, 'language_model.layers.1': 0.25})

    assert set(rates.values()) == {0.5, 0.25, None}
    assert_rates(rates, {'multi_modal_projector': 0.5, 'layers.1.': 0.25})
    name_of_parameter = next(name for name in rates if 'multi_modal_projector' in name)
    full_name, _, _ = name_of_parameter.partition('.modules_to_save')
    rates_with_full_name = rates_by_name(model, {full_name: 0.5})
    assert 0.5 in rates_with_full_name.values()


def test_part_of_all_parameters_keeps_arguments():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    settings = {'name': 'adamw', 'lr': 1e-3, 'parts': {'0': {'lr': 5e-4}}}
    optimizer = build_optimizer(model, settings)
    num_parameters = 0
    for group in optimizer.param_groups:
        assert group['lr'] == 5e-4
        num_parameters += len(group['params'])
    assert num_parameters == 2
