# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The export program reads checkpoints of the Trainer, and writes folders that transformers alone can load."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, BertConfig, BertForMaskedLM

from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.export import main
from composer_tokacc.programs import export_folder
from composer_tokacc.programs.export_folder import export_model
from composer_tokacc.programs.models import build_model
from composer_tokacc.train import main as train
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.launch import launch_json
from tests.support.loaded import run_loaded
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import text_model
from tests.support.training import fit, hugging_face, unchecked_rows

UNCHECKED = {'loss_tokens': 'causal', 'check_loss': False}
LOGITS_WITH_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, BertConfig, BertForMaskedLM
batch = torch.load(sys.argv[1])
logits = []
for folders in sys.argv[3:]:
    folder, *adapter = folders.split(' with ')
    model = AutoModelForImageTextToText.from_pretrained(folder)
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter[0])
    processor = AutoProcessor.from_pretrained([folder, *adapter][-1])
    assert type(processor).__name__ == 'LlavaProcessor', type(processor)
    ids = processor.apply_chat_template(
        [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}], tokenize=True, return_dict=True
    )['input_ids']
    assert len(ids), 'the chat template was exported'
    with torch.no_grad():
        logits.append(model.eval()(**batch).logits)
torch.save(logits, sys.argv[2])
assert not {'composer', 'composer_tokacc'} & set(sys.modules), 'only transformers is needed'
"""


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """The checkpoint of a run of two steps, and the folder that it exported at its end."""
    folder = tmp_path_factory.mktemp('trained')
    arguments = [f'trainer.save_folder={folder}', f'report.folder={folder}', 'report.export=true']
    assert train([DIGITS, *TINY_DIGITS, 'trainer.max_duration=2ba', *arguments]) == 0
    return folder / 'latest-rank0.pt', folder / 'exported'


def export(*arguments):
    """Runs the program, and returns its exit status."""
    return main([str(argument) for argument in arguments])


@functools.cache
def digits_batch():
    """Returns the tensors of a batch of four samples with up to three images."""
    processor = build_digits_processor()
    dataset = DigitsDataset(processor, num_samples=4, max_images=3)
    samples = [dataset[index] for index in range(4)]
    batch = VisionLanguageCollator(processor)(samples)
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def run_without_composer(code, *arguments, folder):
    """Runs code in a process that imports neither Composer nor this package."""
    done = run_loaded(['-c', code, *map(str, arguments)], folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]


def logits_of_exports(folder, *exports):
    """Returns the logits of each exported folder. An adapter is given as ``'BASE with ADAPTER'``."""
    torch.save(digits_batch(), folder / 'batch.pt')
    run_without_composer(LOGITS_WITH_TRANSFORMERS, 'batch.pt', 'logits.pt', *exports, folder=folder)
    return torch.load(folder / 'logits.pt')


def logits_of_checkpoint(path):
    """Returns the logits of a model that got its weights from a Composer checkpoint by hand."""
    from composer_tokacc.programs.models import build_transformers_model
    from composer_tokacc.programs.schema import load_config

    config = load_config(DIGITS, TINY_DIGITS)
    model = build_transformers_model(config=config.model.config, processor=build_digits_processor(), seed=99)
    checkpoint = torch.load(path, weights_only=False)
    weights = {}
    for name, value in checkpoint['state']['model'].items():
        weights[name.removeprefix('model.')] = value
    model.load_state_dict(weights)
    return logits_of(model)


def assert_same_inputs(processor, expected_processor):
    """Fails unless both processors make the same tensors of a text with an image."""
    image = Image.new('RGB', (8, 8), 'red')
    arguments = {'text': '<image> Which?', 'images': [image], 'return_tensors': 'pt'}
    inputs = processor(**arguments)
    for name, expected in expected_processor(**arguments).items():
        torch.testing.assert_close(inputs[name], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_exports_load_with_transformers_alone(trained, tmp_path):
    checkpoint, exported_at_the_end = trained
    exported = tmp_path / 'exported'

    assert export(checkpoint, exported) == 0

    expected = logits_of_checkpoint(checkpoint)
    for logits in logits_of_exports(tmp_path, exported, exported_at_the_end):
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert_same_inputs(AutoProcessor.from_pretrained(exported_at_the_end), build_digits_processor())


def arguments_of_sharded_run(folder, options):
    """Returns the arguments of a run of two steps that saves a sharded checkpoint after each."""
    return [
        *options,
        'dataset.eval=null',
        'trainer.max_duration=2ba',
        f'report.folder={folder}',
        'scheduler.t_warmup=0ba',
        'trainer.save_interval=1ba',
        'trainer.parallelism_config.fsdp={state_dict_type: sharded}',
        f'trainer.save_folder={folder}/checkpoints',
    ]


@pytest.mark.slow
def test_sharded_checkpoints_are_exported(trained, tmp_path):
    pytest.importorskip('peft')
    _, base = trained
    options_of_adapter = [
        *without_model(TINY_DIGITS),
        'model.config=null',
        f'model.pretrained={base}',
        'model.lora={r: 4, modules_to_save: [multi_modal_projector]}',
        'optimizer.lr=0.01',
    ]
    start_of_resumed = f'trainer.load_path={tmp_path}/adapter/checkpoints/ep0-ba1'
    options_of_runs = {
        'weights': TINY_DIGITS,
        'adapter': options_of_adapter,
        'resumed': [*options_of_adapter, start_of_resumed],
    }
    arguments_of_runs = []
    for name, options in options_of_runs.items():
        folder = tmp_path / name
        folder.mkdir()
        torch.save(digits_batch(), folder / 'batch.pt')
        arguments_of_runs.append(arguments_of_sharded_run(folder, options))
    sharded_weights = tmp_path / 'weights' / 'checkpoints' / 'ep0-ba2'
    sharded_adapter = tmp_path / 'adapter' / 'checkpoints' / 'ep0-ba2'
    exported = tmp_path / 'exported'
    exported_adapter = tmp_path / 'exported_adapter'
    merged = tmp_path / 'merged'

    logits_files = launch_json('tests/ranks/sharded_export.py', json.dumps(arguments_of_runs), DIGITS, ranks=2)
    assert export(sharded_weights, exported) == 0
    assert export(sharded_adapter, exported_adapter) == 0
    assert export(sharded_adapter, merged, 'merge=true') == 0

    expected_weights, expected_adapter, resumed_adapter = [torch.load(file) for file in logits_files]
    torch.testing.assert_close(resumed_adapter, expected_adapter, rtol=0, atol=0)
    exports = [exported, f'{base} with {exported_adapter}', merged]
    of_weights, of_adapter, of_merged = logits_of_exports(tmp_path, *exports)
    torch.testing.assert_close(of_weights, expected_weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_adapter, expected_adapter, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_merged, expected_adapter, rtol=1e-5, atol=1e-5)

    # Without one of its shards a checkpoint is refused.
    shard = next(sharded_weights.glob('__1_*.distcp'))
    shard.unlink()
    assert export(sharded_weights, tmp_path / 'damaged') == 2
    assert not (tmp_path / 'damaged').exists()


def without_model(arguments):
    return [argument for argument in arguments if not argument.startswith('model.')]


def tiny_config(*, tied=False):
    """Returns the configuration of a LLaVA. ``tied``: its head and its embeddings are one weight."""
    text_config = {**LLAVA['text_config'], 'tie_word_embeddings': tied, 'attention_bias': True}
    return {
        **LLAVA,
        'text_config': text_config,
        'tie_word_embeddings': tied,
        'vision_feature_layer': -2,
        'vision_feature_select_strategy': 'default',
    }


def write_base(folder, *, tied=False, dtype=torch.float32):
    """Writes a model to train adapters on, stored in the type. Returns it in float32."""
    base = build_model(config=tiny_config(tied=tied), processor=build_digits_processor()).model.to(dtype)
    base.save_pretrained(folder)
    return base.float()


def train_and_save(model, *batches, optimizer, folder):
    """Trains a step on each batch. Returns the path of the checkpoint."""
    with unchecked_rows():
        fit(model, *batches, optimizer=optimizer, save_folder=str(folder), **UNCHECKED)
    return folder / 'latest-rank0.pt'


def lora_checkpoint(folder, lora, *, tied=False, pretrained=True, dtype=torch.float32):
    """Trains an adapter for two large steps. ``dtype`` is the type in which its base is stored.

    Returns:
        The path of the checkpoint, the logits of the trained model, and the logits of its base.
    """
    pytest.importorskip('peft')
    base = write_base(folder / 'base', tied=tied, dtype=dtype)
    if pretrained:
        source = {'pretrained': str(folder / 'base')}
    else:
        source = {'config': tiny_config(tied=tied)}
    model = build_model(**source, processor=build_digits_processor(), lora={'r': 2, **lora})
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=0.03)
    checkpoint = train_and_save(
        model,
        digits_batch(),
        digits_batch(),
        optimizer=optimizer,
        folder=folder / 'checkpoints',
    )
    return checkpoint, logits_of(model.model), logits_of(base)


def trained_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def logits_of_folder(folder):
    return logits_of(AutoModelForImageTextToText.from_pretrained(folder))


def logits_of(model):
    with torch.no_grad():
        return model.eval()(**digits_batch()).logits


@pytest.mark.parametrize(
    ('lora', 'has_tied_embeddings'),
    [
        ({'modules_to_save': ['lm_head']}, True),
        ({'modules_to_save': ['embed_tokens', 'lm_head']}, True),
        # The adapter is merged into a weight that the embeddings share.
        ({'target_modules': ['q_proj', 'lm_head']}, True),
        # The loss reaches neither the last layer nor the last norm of the vision encoder.
        ({'modules_to_save': ['vision_tower', 'multi_modal_projector']}, False),
        ({'bias': 'all', 'use_rslora': True}, False),
        ({'use_dora': True}, False),
    ],
)
def test_exported_adapter_computes_the_same(tmp_path, lora, has_tied_embeddings):
    """As an adapter, and merged into its base."""
    peft = pytest.importorskip('peft')
    checkpoint, expected, logits_of_base = lora_checkpoint(tmp_path, lora, tied=has_tied_embeddings)
    assert (expected - logits_of_base).abs().max() > 0.1, 'training has changed the model'

    assert export(checkpoint, tmp_path / 'adapter') == 0
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / 'base')
    model_with_adapter = peft.PeftModel.from_pretrained(base, str(tmp_path / 'adapter'))
    torch.testing.assert_close(logits_of(model_with_adapter), expected, rtol=1e-6, atol=1e-6)

    assert export(checkpoint, tmp_path / 'merged', 'merge=true') == 0
    torch.testing.assert_close(logits_of_folder(tmp_path / 'merged'), expected, rtol=1e-5, atol=1e-6)


def test_adapter_merges_into_half_precision(tmp_path):
    checkpoint, expected, _ = lora_checkpoint(tmp_path, {}, dtype=torch.bfloat16)
    assert export(checkpoint, tmp_path / 'merged', 'merge=true') == 0
    torch.testing.assert_close(logits_of_folder(tmp_path / 'merged'), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('lora', [None, {'r': 2}])
def test_invalid_generation_config_is_kept(tmp_path, lora):
    """Vicuna, and so LLaVA-1.5, has a temperature but does not sample. transformers refuses to write that."""
    pytest.importorskip('peft')
    base = tmp_path / 'base'
    write_base(base)
    generation = {'do_sample': False, 'temperature': 0.9, 'top_p': 0.6, 'max_length': 4096}
    (base / 'generation_config.json').write_text(json.dumps(generation))
    model = build_model(pretrained=str(base), processor=build_digits_processor(), lora=lora)
    optimizer = torch.optim.SGD(trained_parameters(model), lr=0.1)
    checkpoint = train_and_save(model, digits_batch(), optimizer=optimizer, folder=tmp_path / 'checkpoints')

    merge = [] if lora is None else ['merge=true']
    assert export(checkpoint, tmp_path / 'exported', *merge) == 0

    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / 'exported')
    assert generation.items() <= exported.generation_config.to_dict().items()
    if lora is None:
        export_model(model, tmp_path / 'at_the_end')
        written = json.loads((tmp_path / 'at_the_end' / 'generation_config.json').read_text())
        assert written['temperature'] == 0.9


@pytest.fixture
def base_tied_by_config(tmp_path):
    """The folder of a model whose config ties head and embeddings, although its files hold different ones.

    Transformers 5 does not tie them then.
    """
    base = tmp_path / 'base'
    write_base(base)
    config_file = base / 'config.json'
    config = json.loads(config_file.read_text())
    config['tie_word_embeddings'] = True
    config['text_config']['tie_word_embeddings'] = True
    config_file.write_text(json.dumps(config))
    return base


def test_head_that_only_the_config_ties(base_tied_by_config, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(base_tied_by_config)
    composer_model = hugging_face(model)
    optimizer = torch.optim.SGD(trained_parameters(composer_model), lr=0.1)
    checkpoint = train_and_save(composer_model, digits_batch(), optimizer=optimizer, folder=tmp_path / 'checkpoints')

    assert export(checkpoint, tmp_path / 'exported') == 0

    exported_logits = logits_of_folder(tmp_path / 'exported')
    torch.testing.assert_close(exported_logits, logits_of(model), rtol=1e-6, atol=1e-6)


def test_head_stays_if_embeddings_grow(base_tied_by_config):
    processor = build_digits_processor()
    head = build_model(pretrained=str(base_tied_by_config), processor=processor).model.lm_head.weight
    processor.tokenizer.add_tokens([f'<new {number}>' for number in range(2 * len(head))])

    larger_model = build_model(pretrained=str(base_tied_by_config), processor=processor).model

    larger_head = larger_model.lm_head.weight
    assert len(larger_head) > len(head)
    assert torch.equal(larger_head[: len(head)], head)


def test_merge_into_another_base_is_refused(tmp_path, capsys):
    """The folder of the base may have been written again since the adapter was trained."""
    pytest.importorskip('peft')
    folder = tmp_path / 'base'
    base = write_base(folder, tied=True)
    build_digits_processor().save_pretrained(folder)
    overrides = [
        *without_model(TINY_DIGITS),
        'model.config=null',
        f'model.pretrained={folder}',
        'model.lora={r: 2, modules_to_save: [lm_head]}',
        'trainer.max_duration=1ba',
        'trainer.eval_interval=0',
        f'trainer.save_folder={tmp_path}',
        f'report.folder={tmp_path}',
    ]
    assert train([DIGITS, *overrides]) == 0
    assert export(tmp_path / 'latest-rank0.pt', tmp_path / 'merged', 'merge=true') == 0

    with torch.no_grad():
        base.lm_head.weight[-1] += 1
    base.save_pretrained(folder)
    assert export(tmp_path / 'latest-rank0.pt', tmp_path / 'other', 'merge=true') == 2
    assert 'the base of the adapter must have the weights that it was trained on' in capsys.readouterr().err


def test_adapter_without_a_base(tmp_path, capsys):
    """Its base was not read from a folder, so it can only be exported merged."""
    checkpoint, expected, _ = lora_checkpoint(tmp_path, {}, pretrained=False)

    assert export(checkpoint, tmp_path / 'adapter') == 2
    assert 'export with merge=true' in capsys.readouterr().err

    assert export(checkpoint, tmp_path / 'merged', 'merge=true') == 0
    torch.testing.assert_close(logits_of_folder(tmp_path / 'merged'), expected, rtol=1e-5, atol=1e-6)

    assert train([DIGITS, 'model.lora={r: 2}', 'report.export=true']) == 2
    assert '`report.export` must be false with FSDP, and for `model.lora` on a base' in capsys.readouterr().err


@pytest.mark.slow
def test_export_has_the_evaluated_average(tmp_path):
    """Composer's EMA evaluates an average of the weights, and saves it. Without checkpoints it is exported as well."""
    logits = []
    for name, save_folder in (('saved', tmp_path), ('not_saved', 'null')):
        overrides = [
            f'trainer.save_folder={save_folder}',
            f'report.folder={tmp_path}/{name}',
            'report.export=true',
            'algorithms.ema={half_life: 10ba}',
            'optimizer.lr=0.01',
            'scheduler.t_warmup=0ba',
            'trainer.eval_interval=3ba',
        ]
        assert train([DIGITS, *TINY_DIGITS, 'trainer.max_duration=3ba', *overrides]) == 0
        logits.append(logits_of_folder(tmp_path / name / 'exported'))
    assert export(tmp_path / 'latest-rank0.pt', tmp_path / 'checkpoint') == 0
    expected = logits_of_folder(tmp_path / 'checkpoint')
    for logits_of_export in logits:
        torch.testing.assert_close(logits_of_export, expected, rtol=1e-6, atol=1e-6)


def test_export_replaces_an_earlier_one(tmp_path):
    pytest.importorskip('peft')
    write_base(tmp_path / 'base')
    folder = tmp_path / 'exported'
    for lora in (None, {'r': 2}, None):
        model = build_model(pretrained=str(tmp_path / 'base'), processor=build_digits_processor(), lora=lora)
        export_model(model, folder)
        expected_file = 'model.safetensors' if lora is None else 'adapter_model.safetensors'
        weights_files = [path.name for path in folder.glob('*.safetensors')]
        has_adapter_config = (folder / 'adapter_config.json').exists()
        assert weights_files == [expected_file]
        assert has_adapter_config == (lora is not None)
        AutoProcessor.from_pretrained(folder)


def test_export_leaves_no_template_of_an_earlier_one(tmp_path):
    model = build_model(config=tiny_config(), processor=build_digits_processor())
    export_model(model, tmp_path)
    assert AutoProcessor.from_pretrained(tmp_path).chat_template
    files_of_user = [tmp_path / 'notes.json', tmp_path / 'train_config.json']
    for file in files_of_user:
        file.write_text('{}')

    model.processor.chat_template = None
    model.processor.tokenizer.chat_template = None
    export_model(model, tmp_path)
    assert AutoProcessor.from_pretrained(tmp_path).chat_template is None
    assert all(file.exists() for file in files_of_user)


def bytes_of_files(folder):
    return {path: path.read_bytes() for path in folder.rglob('*')}


def test_export_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    model = build_model(config=tiny_config(), processor=build_digits_processor())
    folder = tmp_path / 'exported'
    export_model(model, folder)
    earlier_files = bytes_of_files(folder)

    def fail(metadata, unfinished):
        raise OSError('no space left')

    monkeypatch.setattr(export_folder, '_write_processor', fail)
    for parameter in model.parameters():
        parameter.data.zero_()

    with pytest.raises(OSError, match='no space left'):
        export_model(model, folder)

    assert bytes_of_files(folder) == earlier_files


def damaged_checkpoints(checkpoint, folder):
    """Writes damaged copies of the checkpoint of an adapter. Returns the path of each, and the words of its error."""
    message_of = {}
    for part in ('lora_A', 'modules_to_save'):
        state = torch.load(checkpoint, weights_only=False)
        weights = state['state']['model']
        name = next(name for name in weights if part in name)

        weight = weights.pop(name)
        missing = folder / f'without_{part}.pt'
        torch.save(state, missing)
        message_of[missing] = 'must hold a whole adapter of its base, got: 1 missing'

        weights[name] = weight[:1]
        narrow = folder / f'narrow_{part}.pt'
        torch.save(state, narrow)
        message_of[narrow] = 'size mismatch'
    return message_of


def test_damaged_checkpoint_leaves_nothing(tmp_path, capsys):
    checkpoint, _, _ = lora_checkpoint(tmp_path, {'modules_to_save': ['multi_modal_projector']})
    exports = tmp_path / 'exports'
    for path, message in damaged_checkpoints(checkpoint, tmp_path).items():
        for merge in ([], ['merge=true']):
            assert export(path, exports / path.stem, *merge) == 2
            assert message in capsys.readouterr().err
    # A checkpoint that is complete, but whose base is damaged.
    (tmp_path / 'base' / 'config.json').unlink()
    assert export(checkpoint, exports / 'merged', 'merge=true') == 2
    assert '`base_model_name_or_path` cannot be used: ' in capsys.readouterr().err
    assert not list(exports.iterdir())


def test_unwritable_folder_is_one_line(tmp_path, capsys):
    checkpoint, _, _ = lora_checkpoint(tmp_path, {})
    file = tmp_path / 'file'
    file.write_text('keep')
    empty = tmp_path / 'empty'
    empty.mkdir()

    assert export(checkpoint, file / 'folder') == 2
    assert 'the folder to export to must be writable' in capsys.readouterr().err
    assert export(checkpoint, empty) == 0


def test_path_that_cannot_be_read_is_one_line(tmp_path, capsys):
    """The system refuses a name of 300 characters, as it refuses folders of other users."""
    name = 'x' * 300
    assert export(tmp_path / 'x.pt', tmp_path / name) == 2
    assert 'the folder to export to must be writable' in capsys.readouterr().err
    assert export(tmp_path / name, tmp_path / 'exported') == 2
    assert '`CHECKPOINT` must be a checkpoint file' in capsys.readouterr().err
    assert train([DIGITS, f'trainer.load_path={tmp_path / name}']) == 2
    assert '`trainer.load_path` must be a checkpoint file' in capsys.readouterr().err


def test_full_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / 'mine.txt').write_text('keep')
    assert export(tmp_path / 'x.pt', tmp_path) == 2
    assert 'must be absent or empty' in capsys.readouterr().err
    assert (tmp_path / 'mine.txt').read_text() == 'keep'


def test_missing_argument_shows_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        export('only-one')
    assert ended.value.code == 2
    assert 'usage' in capsys.readouterr().err


@pytest.mark.parametrize('can_generate', [True, False])
def test_model_with_tokenizer_of_composer(can_generate, tmp_path):
    """Composer saves the files of a tokenizer in another form than this package."""
    tokenizer = build_digits_processor().tokenizer
    if can_generate:
        inner = text_model()
    else:
        inner = BertForMaskedLM(BertConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=12, vocab_size=99))
    model = hugging_face(inner, tokenizer=tokenizer)
    state = {'model': model.state_dict(), 'integrations': {'huggingface': model.get_metadata()}}
    torch.save({'state': state}, tmp_path / 'checkpoint.pt')
    exported = tmp_path / 'exported'

    assert export(tmp_path / 'checkpoint.pt', exported) == 0

    exported_tokenizer = AutoTokenizer.from_pretrained(exported)
    assert exported_tokenizer('<image> Which?').input_ids == tokenizer('<image> Which?').input_ids
    assert exported_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert exported_tokenizer.chat_template == tokenizer.chat_template
    has_generation_config = (exported / 'generation_config.json').exists()
    assert has_generation_config == can_generate
