# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA: what is trained, its gradient, and checkpoints that hold no more than that."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc import size as size_program
from composer_tokacc import train as train_program
from composer_tokacc import verify as verify_program
from composer_tokacc.programs.lora import four_bit_options, identify_adapter, keep_trained_only, with_adapter
from composer_tokacc.programs.models import build_model
from examples.digits import build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.families import FAMILIES
from tests.support.launch import launch_json, launch_program
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.training import loader, reference_gradients, relative_error, train
from tests.test_train import assert_equal_bitwise

pytest.importorskip('peft')


@pytest.fixture
def pretrained(processor, tmp_path):
    """A folder as the hub has it."""
    build_model(config=LLAVA, processor=processor).model.save_pretrained(tmp_path / 'base')
    return str(tmp_path / 'base')


def with_lora(processor, *, pretrained=None, **lora):
    source = {'config': LLAVA} if pretrained is None else {'pretrained': pretrained}
    return build_model(**source, processor=processor, lora={'r': 4, **lora})


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def stir(model):
    """Peft starts at B = 0, where A has no gradient at all."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            parameter.data.normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize('lora', [{}, {'r': 4}])
def test_the_language_models_adapters_alone_are_trained(processor, lora):
    names = trained(build_model(config=LLAVA, processor=processor, lora=lora))
    assert len(names) == 2 * 7 * 2  # two layers of seven linear modules, A and B
    assert all('lora_' in name and 'language_model' in name for name in names)


def test_modules_to_save_are_trained_whole(processor):
    names = trained(with_lora(processor, modules_to_save=['multi_modal_projector']))
    assert sum('multi_modal_projector.modules_to_save' in name for name in names) == 4
    assert not any('vision_tower' in name for name in names)


def test_the_adapters_gradient_is_that_of_the_whole_batch(processor, batch):
    model = with_lora(processor, modules_to_save=['multi_modal_projector'])
    stir(model)
    expected, _loss = reference_gradients(model.model, batch)
    recorder, _memory, _ = train(
        model, token_data_spec(loader(batch)), algorithms=[TokenAccumulation()], microbatch_size=3
    )
    assert recorder.gradients.keys() == trained(model)
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_a_checkpoint_leaves_out_a_base_that_can_be_loaded_again(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained, modules_to_save=['multi_modal_projector'])
    assert {name for name, _ in model.state_dict().items()} == trained(model)
    # Under DDP the state dict is asked of the module around it.
    around = torch.nn.ModuleDict({'module': model})
    assert {name.removeprefix('module.') for name in around.state_dict()} == trained(model)


def test_a_checkpoint_keeps_a_base_that_is_nowhere_else(processor):
    model = with_lora(processor)
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}


def test_a_checkpoint_without_its_base_is_loaded_strictly(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained)
    stir(model)
    other = with_lora(processor, pretrained=pretrained)
    other.load_state_dict(model.state_dict(), strict=True)
    for (name, found), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
    lacking = dict(list(model.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match='Missing key'):
        other.load_state_dict(lacking, strict=True)


@pytest.mark.parametrize(
    ('lora', 'message'),
    [
        ({'rank': 4}, '`model.lora` has no key rank. Known: alpha, bias'),
        ({'drop_out': 0.1}, 'has no key drop_out. Did you mean dropout'),
        ({'r': -1}, '`model.lora.r` must be greater than or equal to 1, got: -1'),
        ({'r': 2.5}, '`model.lora.r` must be a valid integer, got: 2.5'),
        ({'alpha': 'abc'}, "`model.lora.alpha` must be a valid number, got: 'abc'"),
        ({'dropout': 2}, '`model.lora.dropout` must be less than 1, got: 2'),
        ({'modules_to_save': ['projektor']}, "modules_to_save` must name modules of the model, got: 'projektor'"),
        ({'modules_to_save': 'lm_head'}, "`model.lora.modules_to_save` must be a list, got: 'lm_head'"),
        ({'target_modules': []}, '`model.lora.target_modules` must '),
        ({'target_modules': ['q_projection']}, '`model.lora`: .*q_projection'),
        ({'target_modules': '.*q_projection'}, '`model.lora`: .*q_projection'),
        ({'target_modules': '(q_proj'}, '`model.lora`: .*'),
        ({'target_modules': ['self_attn']}, '`model.lora`: .*CLIPAttention'),
        ({'bias': 'some'}, "`model.lora.bias` must be 'none', 'all' or 'lora_only', got: 'some'"),
        ({'bias': 3}, "`model.lora.bias` must be 'none', 'all' or 'lora_only', got: 3"),
        ({'use_dora': 'maybe'}, "`model.lora.use_dora` must be a valid boolean, got: 'maybe'"),
        ({'alpha': True}, '`model.lora.alpha` must be a valid number, got: True'),
        ({'bits': 8}, '`model.lora.bits` must be 4, got: 8'),
        ({'bits': 4}, '`model.lora.bits` needs the weights of `model.pretrained`'),
    ],
)
def test_mistyped_settings_are_named(processor, lora, message):
    with pytest.raises(ValueError, match=message.replace('[]', r'\[\]')):
        with_lora(processor, **lora)


def test_another_package_of_the_name_peft_is_one_line(processor, monkeypatch):
    import peft

    monkeypatch.delattr(peft, 'LoraConfig')
    with pytest.raises(ValueError, match=r'`model.lora`: ImportError: '):
        with_lora(processor, r=2)


@pytest.mark.parametrize('program', [train_program, size_program, verify_program])
@pytest.mark.parametrize(
    ('lora', 'message'),
    [
        ('{r: -1}', 'error: `model.lora.r` must be greater than or equal to 1, got: -1'),
        ('{target_modules: [q_projection]}', 'error: `model.lora`: '),
    ],
)
def test_every_program_says_them_in_one_line(program, lora, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert program.main([DIGITS, *TINY_DIGITS, f'model.lora={lora}', 'dataset.eval=null']) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert 'Traceback' not in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
@pytest.mark.parametrize('program', [train_program, size_program, verify_program])
def test_four_bits_without_a_gpu_are_refused_in_one_line(program, pretrained, capsys):
    settings = ['model.config=null', f'model.pretrained={pretrained}', 'model.lora={bits: 4}', 'trainer.device=cpu']
    assert program.main([DIGITS, *settings]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith('error: `model')


@pytest.mark.skipif(find_spec('optimum') is not None, reason='optimum is installed')
def test_a_base_that_needs_a_package_which_is_not_there_is_refused(processor, pretrained):
    """As for one in 4 bits where bitsandbytes is too old, transformers says so by an ImportError."""
    path = Path(pretrained, 'config.json')
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, 'quantization_config': {'quant_method': 'gptq', 'bits': 4}}))
    with pytest.raises(ValueError, match=r'`model.pretrained`: .*optimum'):
        build_model(pretrained=pretrained, processor=processor, lora={'r': 4})


def test_in_four_bits_are_the_language_models_layers_and_no_others(processor, monkeypatch):
    try:
        BitsAndBytesConfig(load_in_4bit=True)
    except PackageNotFoundError:
        pytest.skip('this transformers asks for bitsandbytes itself')
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    model = build_model(config=LLAVA, processor=processor).model
    options = four_bit_options({'modules_to_save': ['mlp']}, model, torch.bfloat16)
    kept = set(options['quantization_config'].llm_int8_skip_modules)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    rounded = {name.rpartition('.')[2] for name in linear - kept}
    assert rounded == {'q_proj', 'k_proj', 'v_proj', 'o_proj'}
    assert all('language_model' in name for name in linear - kept)
    assert {'lm_head', 'model.multi_modal_projector.linear_1'} <= kept


def test_a_base_without_room_for_the_processors_tokens_is_refused(pretrained):
    """Its new rows would be those of no adapter: neither peft nor the merged model has them."""
    processor = build_digits_processor()
    processor.tokenizer.add_tokens(['<new>'])
    for lora in ({}, {'modules_to_save': ['embed_tokens', 'lm_head']}):
        with pytest.raises(ValueError, match=r'`model.pretrained` must have embeddings for all tokens .* 36 < 37'):
            with_lora(processor, pretrained=pretrained, **lora)


@pytest.mark.parametrize('other', [{'r': 2}, {'r': 4, 'modules_to_save': ['lm_head']}, None])
def test_a_checkpoint_of_another_adapter_or_none_is_refused(processor, other):
    models = [build_model(config=LLAVA, processor=processor, lora=lora) for lora in ({'r': 4}, other)]
    for model, source in (models, models[::-1]):
        with pytest.raises(RuntimeError, match=r'Missing key|Unexpected key|size mismatch'):
            model.load_state_dict(source.state_dict())


def test_an_adapter_is_known_by_its_base_wherever_that_lies(processor, pretrained, tmp_path):
    def identified(**settings):
        return identify_adapter(build_model(processor=processor, **settings).model)

    known = identified(pretrained=pretrained, lora={'r': 4})
    assert identified(pretrained=pretrained, lora={'r': 4}, dtype='bfloat16') == known
    # What else is trained, and where, shows in the weights.
    further = {'r': 2, 'alpha': 8, 'target_modules': ['q_proj'], 'modules_to_save': ['lm_head']}
    shutil.move(pretrained, tmp_path / 'moved')
    moved = str(tmp_path / 'moved')
    assert identified(pretrained=moved, lora={'r': 4}) == known
    assert identified(pretrained=moved, lora=further)['model.pretrained'] == known['model.pretrained']
    other = build_model(pretrained=moved, processor=processor).model
    other.get_input_embeddings().weight.data[-1, -1] += 1
    other.save_pretrained(moved)
    found = identified(pretrained=moved, lora={'r': 4})
    assert {name for name in known if known[name] != found[name]} == {'model.pretrained'}
    assert 'model.pretrained' not in identified(config=LLAVA, lora={'r': 4})
    assert identified(config=LLAVA) == {}


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3', 'mllama'])
def test_by_default_every_familys_language_model_is_adapted_and_no_tower(family):
    model = with_adapter(FAMILIES[family]().model, {'r': 2}, base=None)
    modules = {name.split('.lora_')[0] for name in trained(model)}
    assert all('language_model' in name or 'text_model' in name for name in modules)
    linear = {name.rpartition('.')[2] for name in modules}
    assert {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'} == linear


def test_what_is_trained_is_kept_in_float32(processor):
    lora = {'r': 4, 'modules_to_save': ['multi_modal_projector', 'lm_head']}
    model = build_model(config=LLAVA, processor=processor, lora=lora, dtype='bfloat16')
    types = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def test_what_no_loss_reaches_is_not_trained_by_an_adapter_either(processor):
    # The features are those before the last of three layers.
    config = {**LLAVA, 'vision_feature_layer': -2}
    lora = {'r': 2, 'target_modules': 'all-linear', 'modules_to_save': ['embed_tokens']}
    model = build_model(config=config, processor=processor, lora=lora)
    towers = [name for name in trained(model) if 'vision_tower' in name]
    assert any('.layers.1.' in name for name in towers)
    assert not any('.layers.2.' in name or 'post_layernorm' in name for name in towers)
    model = build_model(config=config, processor=processor, lora={'r': 2, 'modules_to_save': ['vision_tower']})
    towers = [name for name in trained(model) if 'vision_tower' in name]
    assert any('.layers.1.' in name for name in towers)
    assert not any('.layers.2.' in name or 'post_layernorm' in name for name in towers)


@pytest.mark.slow
def test_an_adapters_checkpoint_is_a_twentieth_of_a_model_of_a_billion_weights():
    # TinyLlama 1.1B behind CLIP's large tower and LLaVA's projector, which is trained whole; 1.4 billion in all.
    text = {
        'model_type': 'llama',
        'hidden_size': 2048,
        'intermediate_size': 5632,
        'num_hidden_layers': 22,
        'num_attention_heads': 32,
        'num_key_value_heads': 4,
        'vocab_size': 32064,
    }
    config = {'model_type': 'llava', 'text_config': text}  # CLIP's large tower is the default
    with torch.device('meta'):
        model = build_model(
            config=config, dtype='bfloat16', lora={'r': 16, 'modules_to_save': ['multi_modal_projector']}
        )
    assert 1.4e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e9
    whole = sum(value.nbytes for value in model.state_dict().values())
    keep_trained_only(model)
    adapter = sum(value.nbytes for value in model.state_dict().values())
    assert adapter < 0.05 * whole
    # With AdamW's two moments of all that is trained, against the weights alone.
    assert 3 * adapter < 0.1 * whole


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one_forward():
    results = launch_json('tests/ranks/lora.py', ranks=2)
    assert {name.split()[0] for name in results} == {'ddp', 'fsdp'}
    wrong = {name: error for name, error in results.items() if not error < 1e-6}
    assert not wrong, wrong


def lora_run(base, folder, *arguments):
    """A run of four steps of two ranks with random dropout in the adapters; returns its last checkpoint."""
    arguments = [
        *(each for each in TINY_DIGITS if not each.startswith('model.')),
        'model.config=null',
        f'model.pretrained={base}',
        f'trainer.save_folder={folder}/checkpoints',
        'model.lora={r: 4, dropout: 0.2, modules_to_save: [multi_modal_projector]}',
        'optimizer.lr=0.01',
        'scheduler.t_warmup=0ba',
        'scheduler.t_max=4ba',
        'dataset.eval=null',
        'report.num_samples=0',
        f'report.folder={folder}/report',
        'trainer.max_duration=4ba',
        'trainer.save_interval=2ba',
        *arguments,
    ]
    launch_program('composer_tokacc.train', DIGITS, *arguments, ranks=2)
    return torch.load(folder / 'checkpoints' / 'latest-rank0.pt', weights_only=False)['state']


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    base = tmp_path / 'base'
    build_model(
        config={**LLAVA, 'vision_feature_select_strategy': 'default'}, processor=build_digits_processor()
    ).model.save_pretrained(base)
    build_digits_processor().save_pretrained(base)
    whole = lora_run(base, tmp_path / 'whole')
    half = tmp_path / 'whole' / 'checkpoints' / 'ep0-ba2-rank0.pt'
    resumed = lora_run(base, tmp_path / 'resumed', f'trainer.load_path={half}')
    assert int(resumed['timestamp']['Timestamp']['batch']) == 4
    assert all('lora_' in name or 'modules_to_save' in name for name in resumed['model'])
    assert_equal_bitwise(resumed['model'], whole['model'])
    assert_equal_bitwise(resumed['optimizers'], whole['optimizers'])
    before = torch.load(half, weights_only=False)['state']['model']
    assert any(not torch.equal(before[name], value) for name, value in whole['model'].items())
