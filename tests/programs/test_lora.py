# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""LoRA: which parameters are trained, their gradient, and checkpoints that leave out the base model."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import BitsAndBytesConfig

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc import size as size_program
from composer_tokacc import train as train_program
from composer_tokacc import verify as verify_program
from composer_tokacc.programs.lora import four_bit_options, identify_adapter, with_adapter
from composer_tokacc.programs.models import build_model, build_transformers_model
from examples.digits import build_digits_processor
from tests.programs.test_models import LLAVA, assert_same_tensors, trained_names
from tests.support.families import FAMILIES
from tests.support.launch import launch_json, launch_program
from tests.support.process_group import group_of_one_rank
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.training import loader, reference_gradients, relative_error, train
from tests.test_train import assert_equal_bitwise, checkpoint

pytest.importorskip('peft')


@pytest.fixture
def pretrained(processor, tmp_path):
    """The folder of a base model, as on the hub."""
    folder = tmp_path / 'base'
    base = build_transformers_model(config=LLAVA, processor=processor)
    base.save_pretrained(folder)
    return str(folder)


def with_lora(processor, *, pretrained=None, **lora):
    """Returns a model with an adapter of rank 4. Its base is read from a folder, or has fresh weights."""
    settings = {'r': 4, **lora}
    if pretrained is None:
        return build_model(config=LLAVA, processor=processor, lora=settings)
    return build_model(pretrained=pretrained, processor=processor, lora=settings)


def randomize_adapters(model):
    """Peft starts at B = 0. Then the gradient of A is 0."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            parameter.data.normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize('lora', [{}, {'r': 4}])
def test_only_adapters_of_text_are_trained(processor, lora):
    model = build_model(config=LLAVA, processor=processor, lora=lora)

    names = trained_names(model)

    assert len(names) == 2 * 7 * 2  # two layers of seven linear modules, A and B
    for name in names:
        assert 'lora_' in name
        assert 'language_model' in name


def test_modules_to_save_are_fully_trained(processor):
    """The projector has two layers with a weight and a bias."""
    model = with_lora(processor, modules_to_save=['multi_modal_projector'])
    names = trained_names(model)
    names_of_projector = [name for name in names if 'multi_modal_projector.modules_to_save' in name]
    assert len(names_of_projector) == 4
    assert not any('vision_tower' in name for name in names)


def test_adapter_gradient_equals_one_forward(processor, batch):
    model = with_lora(processor, modules_to_save=['multi_modal_projector'])
    randomize_adapters(model)
    expected, _ = reference_gradients(model.model, batch)

    spec = token_data_spec(loader(batch))
    recorder, _, _ = train(model, spec, algorithms=[TokenAccumulation()], microbatch_size=3)

    assert recorder.gradients.keys() == trained_names(model)
    assert relative_error(recorder.gradients, expected) < 1e-6


def as_in_ddp(model):
    """Returns a module around the model, as DDP has it. Composer saves and loads the weights of that module."""
    return torch.nn.ModuleDict({'module': model})


def test_checkpoint_leaves_out_a_pretrained_base(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained, modules_to_save=['multi_modal_projector'])
    names = trained_names(model)
    names_in_ddp = {f'module.{name}' for name in names}
    assert set(model.state_dict()) == names
    assert set(as_in_ddp(model).state_dict()) == names_in_ddp


def test_checkpoint_keeps_base_without_a_folder(processor):
    model = with_lora(processor)
    all_names = {name for name, _ in model.named_parameters()}
    assert model.state_dict().keys() == all_names
    # Some releases of peft would look for the base '' on the hub.
    assert model.model.peft_config['default'].base_model_name_or_path is None


def test_checkpoint_without_base_is_loaded_strictly(processor, pretrained):
    model = with_lora(processor, pretrained=pretrained)
    randomize_adapters(model)
    loaded = with_lora(processor, pretrained=pretrained)
    loaded_in_ddp = with_lora(processor, pretrained=pretrained)
    weights = model.state_dict()
    weights_in_ddp = {f'module.{name}': weight for name, weight in weights.items()}
    incomplete_weights = dict(weights)
    incomplete_weights.popitem()

    loaded.load_state_dict(weights, strict=True)
    as_in_ddp(loaded_in_ddp).load_state_dict(weights_in_ddp, strict=True)

    assert_same_tensors(loaded.named_parameters(), model.named_parameters())
    assert_same_tensors(loaded_in_ddp.named_parameters(), model.named_parameters())
    with pytest.raises(RuntimeError, match='Missing key'):
        loaded.load_state_dict(incomplete_weights, strict=True)


@pytest.mark.filterwarnings('ignore:.*FullyShardedDataParallel|.*NO_SHARD|.*FSDP')
@pytest.mark.parametrize('is_full', [True, False])
def test_fsdp_1_saves_and_loads_trained_weights(is_full, processor, pretrained, tmp_path):
    """FSDP 1 adds to the names of the parameters, but not to those in a checkpoint."""
    model = with_lora(processor, pretrained=pretrained, modules_to_save=['multi_modal_projector'])
    names = trained_names(model)
    options = StateDictOptions(full_state_dict=is_full, strict=True)
    cpu = torch.device('cpu')
    with group_of_one_rank(tmp_path):
        model.model = FullyShardedDataParallel(model.model, use_orig_params=True, device_id=cpu)

        weights = get_model_state_dict(model, options=options)
        assert set(weights) == names
        set_model_state_dict(model, weights, options=options)  # renames the entries of `weights`

        with pytest.raises(RuntimeError, match='Missing key'):
            model.load_state_dict({}, strict=True)


@pytest.mark.parametrize(
    ('lora', 'message'),
    [
        ({'rank': 4}, '`model.lora` has no key rank. Known: alpha, bias'),
        ({'drop_out': 0.1}, 'has no key drop_out. Did you mean dropout'),
        ({'dropout': 2}, '`model.lora.dropout` must be less than 1, got: 2'),
        ({'modules_to_save': ['projektor']}, "modules_to_save` must name modules of the model, got: 'projektor'"),
        ({'modules_to_save': 'lm_head'}, "`model.lora.modules_to_save` must be a valid list, got: 'lm_head'"),
        ({'target_modules': []}, '`model.lora.target_modules` must '),
        ({'target_modules': ['q_projection']}, '`model.lora` cannot be used: .*q_projection'),
        ({'target_modules': '.*q_projection'}, '`model.lora` cannot be used: .*q_projection'),
        ({'target_modules': '(q_proj'}, '`model.lora` cannot be used: .*'),
        ({'target_modules': ['self_attn']}, '`model.lora` cannot be used: .*CLIPAttention'),
        ({'bias': 'some'}, "`model.lora.bias` must be 'none', 'all' or 'lora_only', got: 'some'"),
        ({'alpha': True}, '`model.lora.alpha` must be a valid number, got: True'),
        ({'bits': 8}, '`model.lora.bits` must be 4, got: 8'),
        ({'bits': 4}, '`model.lora.bits` needs the weights of `model.pretrained`'),
    ],
)
def test_mistyped_settings_are_named(processor, lora, message):
    with pytest.raises(ValueError, match=message.replace('[]', r'\[\]')):
        with_lora(processor, **lora)


@pytest.mark.parametrize('program', [train_program, size_program, verify_program])
@pytest.mark.parametrize(
    ('lora', 'message'),
    [
        ('{r: 0}', 'error: `model.lora.r` must be greater than or equal to 1, got: 0'),
        ('{target_modules: [q_projection]}', 'error: `model.lora` cannot be used: '),
    ],
)
def test_every_program_refuses_in_one_line(program, lora, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    overrides = [*TINY_DIGITS, f'model.lora={lora}', 'dataset.eval=null']

    assert program.main([DIGITS, *overrides]) == 2

    printed = capsys.readouterr().err
    assert message in printed
    assert 'Traceback' not in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
@pytest.mark.parametrize('program', [train_program, size_program, verify_program])
def test_four_bits_without_gpu_are_refused(program, pretrained, capsys):
    overrides = ['model.config=null', f'model.pretrained={pretrained}', 'model.lora={bits: 4}', 'trainer.device=cpu']

    assert program.main([DIGITS, *overrides]) == 2

    *_, last_line = capsys.readouterr().err.splitlines()
    assert last_line.startswith('error: `model')


def last_parts(names):
    """Returns the parts behind the last dot of each name."""
    return {name.rpartition('.')[2] for name in names}


def test_four_bits_are_for_text_only(processor, monkeypatch):
    try:
        BitsAndBytesConfig(load_in_4bit=True)
    except PackageNotFoundError:
        pytest.skip('this transformers asks for bitsandbytes itself')
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    model = build_transformers_model(config=LLAVA, processor=processor)
    linear_layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}

    options = four_bit_options({'modules_to_save': ['mlp']}, model, torch.bfloat16)

    not_rounded = set(options['quantization_config'].llm_int8_skip_modules)
    assert {'lm_head', 'model.multi_modal_projector.linear_1'} <= not_rounded
    rounded = linear_layers - not_rounded
    for name in rounded:
        assert 'language_model' in name
    assert last_parts(rounded) == {'q_proj', 'k_proj', 'v_proj', 'o_proj'}


@pytest.mark.parametrize('lora', [{}, {'modules_to_save': ['embed_tokens', 'lm_head']}])
def test_base_with_few_embeddings_is_refused(lora, pretrained):
    """New rows would be in no checkpoint of an adapter: neither peft nor the merged model would have them."""
    processor = build_digits_processor()
    processor.tokenizer.add_tokens(['<new>'])
    with pytest.raises(ValueError, match=r'`model.pretrained` must have embeddings for all tokens .* 36 < 37'):
        with_lora(processor, pretrained=pretrained, **lora)


@pytest.mark.parametrize(
    'other_lora',
    [
        pytest.param({'r': 2}, id='other rank'),
        pytest.param({'r': 4, 'modules_to_save': ['lm_head']}, id='further module'),
        pytest.param(None, id='no adapter'),
    ],
)
def test_weights_of_another_adapter_are_refused(processor, other_lora):
    model = with_lora(processor)
    other = build_model(config=LLAVA, processor=processor, lora=other_lora)
    message = r'Missing key|Unexpected key|size mismatch'
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(model.state_dict())


@pytest.fixture
def identity_of(processor):
    """A function that builds a model with these settings, and returns the identity of its adapter."""

    def build_and_identify(**settings):
        model = build_transformers_model(processor=processor, **settings)
        return identify_adapter(model)

    return build_and_identify


def change_one_embedding(folder, processor):
    """Changes one number of the weights in the folder of a base."""
    base = build_transformers_model(pretrained=folder, processor=processor)
    embedding = base.get_input_embeddings()
    embedding.weight.data[-1, -1] += 1
    base.save_pretrained(folder)


def test_identity_depends_on_the_base_weights(identity_of, processor, pretrained, tmp_path):
    """It does not depend on the folder or the precision.

    Other trained parameters show in the weights of the checkpoint.
    """
    lora = {'r': 4}
    other_lora = {'r': 2, 'alpha': 8, 'target_modules': ['q_proj'], 'modules_to_save': ['lm_head']}

    identity = identity_of(pretrained=pretrained, lora=lora)
    in_half_precision = identity_of(pretrained=pretrained, lora=lora, dtype='bfloat16')
    folder = str(tmp_path / 'moved')
    shutil.move(pretrained, folder)
    in_other_folder = identity_of(pretrained=folder, lora=lora)
    with_other_lora = identity_of(pretrained=folder, lora=other_lora)
    change_one_embedding(folder, processor)
    with_other_base = identity_of(pretrained=folder, lora=lora)

    assert in_half_precision == identity
    assert in_other_folder == identity
    assert with_other_lora['model.pretrained'] == identity['model.pretrained']
    assert with_other_base.pop('model.pretrained') != identity.pop('model.pretrained')
    assert with_other_base == identity


def test_identity_without_base_or_adapter(identity_of):
    assert 'model.pretrained' not in identity_of(config=LLAVA, lora={'r': 4})
    assert identity_of(config=LLAVA) == {}


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3', 'mllama'])
def test_default_adapts_every_familys_text(family):
    case = FAMILIES[family]()

    model = with_adapter(case.model, {'r': 2}, base=None)

    linear_layers = set()
    for name in trained_names(model):
        assert 'language_model' in name or 'text_model' in name
        module_name, _ = name.split('.lora_')
        linear_layers.add(module_name)
    assert last_parts(linear_layers) == {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'}


def test_trained_parameters_are_in_float32(processor):
    lora = {'r': 4, 'modules_to_save': ['multi_modal_projector', 'lm_head']}
    model = build_model(config=LLAVA, processor=processor, lora=lora, dtype='bfloat16')
    assert trained_names(model)
    for name, parameter in model.named_parameters():
        expected_dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == expected_dtype, name


@pytest.mark.parametrize(
    'lora',
    [
        pytest.param({'target_modules': 'all-linear', 'modules_to_save': ['embed_tokens']}, id='adapted encoder'),
        pytest.param({'modules_to_save': ['vision_tower']}, id='trained encoder'),
    ],
)
def test_unreached_layers_are_not_trained(lora, processor):
    """The features come from before the last of the encoder's three layers, so no loss reaches that layer."""
    config = {**LLAVA, 'vision_feature_layer': -2}

    model = build_model(config=config, processor=processor, lora={'r': 2, **lora})

    trained_in_encoder = [name for name in trained_names(model) if 'vision_tower' in name]
    assert any('.layers.1.' in name for name in trained_in_encoder)
    for name in trained_in_encoder:
        assert '.layers.2.' not in name
        assert 'post_layernorm' not in name


def test_whole_base_may_be_frozen(processor):
    """An adapter freezes its base anyway, so ``model.freeze`` may name all of it."""
    lora = {'r': 2}
    all_parts = ['vision_tower', 'language_model', 'multi_modal_projector', 'lm_head']
    frozen = build_model(config=LLAVA, processor=processor, freeze=all_parts, lora=lora)
    not_frozen = build_model(config=LLAVA, processor=processor, lora=lora)
    assert trained_names(frozen) == trained_names(not_frozen)


def test_frozen_parts_keep_their_biases(processor):
    """``bias`` trains biases of the base, except for those in parts that ``model.freeze`` names."""
    lora = {'r': 2, 'bias': 'all', 'modules_to_save': ['multi_modal_projector']}
    frozen_parts = ['vision_tower', 'multi_modal_projector']
    model = build_model(config=LLAVA, processor=processor, lora=lora)
    model_with_frozen_parts = build_model(config=LLAVA, processor=processor, freeze=frozen_parts, lora=lora)

    trained = trained_names(model_with_frozen_parts)
    kept = trained_names(model) - trained

    assert any('vision_tower' in name for name in kept)
    assert not any('vision_tower' in name for name in trained)
    assert all(name.endswith('.bias') for name in kept)
    assert any('multi_modal_projector.modules_to_save' in name for name in trained)


@pytest.mark.slow
def test_gradient_on_two_ranks_is_exact():
    results = launch_json('tests/ranks/lora.py', ranks=2)
    assert len(results) == 8  # every case of the program has run
    for name, error in results.items():
        assert error < 1e-6, name


def lora_run(base, folder, *overrides):
    """Runs four steps on two ranks with random dropout in the adapters. Returns the state of the last checkpoint."""
    tiny_digits = [override for override in TINY_DIGITS if not override.startswith('model.')]
    arguments = [
        *tiny_digits,
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
        *overrides,
    ]
    launch_program('composer_tokacc.train', DIGITS, *arguments, ranks=2)
    return checkpoint(folder / 'checkpoints' / 'latest-rank0.pt')


@pytest.mark.slow
def test_resumed_run_ends_bitwise_the_same(tmp_path):
    base = tmp_path / 'base'
    processor = build_digits_processor()
    config = {**LLAVA, 'vision_feature_select_strategy': 'default'}
    model = build_transformers_model(config=config, processor=processor)
    model.save_pretrained(base)
    processor.save_pretrained(base)
    after_two_steps = tmp_path / 'uninterrupted' / 'checkpoints' / 'ep0-ba2-rank0.pt'

    uninterrupted = lora_run(base, tmp_path / 'uninterrupted')
    resumed = lora_run(base, tmp_path / 'resumed', f'trainer.load_path={after_two_steps}')

    weights = resumed['model']
    assert int(resumed['timestamp']['Timestamp']['batch']) == 4
    for name in weights:
        assert 'lora_' in name or 'modules_to_save' in name
    assert_equal_bitwise(weights, uninterrupted['model'])
    assert_equal_bitwise(resumed['optimizers'], uninterrupted['optimizers'])
    weights_before = checkpoint(after_two_steps)['model']
    assert any(not torch.equal(weights_before[name], weight) for name, weight in weights.items())
