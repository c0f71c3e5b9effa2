# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The export program, from checkpoints as the Trainer writes them to folders that know nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.export import main
from composer_tokacc.programs.export_folder import export_model
from composer_tokacc.programs.models import build_model
from composer_tokacc.train import main as train
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.launch import launch_json
from tests.support.programs import DIGITS, QUIET, TINY_DIGITS
from tests.support.training import fit

LOAD_ALONE = """
import sys, torch
from transformers import AutoModelForImageTextToText, AutoProcessor
batch, logits = torch.load(sys.argv[1]), []
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
    assert len(ids), 'the chat template came along'
    with torch.no_grad():
        logits.append(model.eval()(**batch).logits)
torch.save(logits, sys.argv[2])
assert not {'composer', 'composer_tokacc'} & set(sys.modules), 'loaded by transformers alone'
"""

ANSWER_ALONE = """
import json, sys
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
folder, questions = sys.argv[1], json.load(open(sys.argv[2]))
processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
answers = []
for question in questions:
    text = processor.apply_chat_template(question['messages'], add_generation_prompt=True)
    images = [Image.open(path) for path in question['images']] or None
    inputs = processor(text=text, images=images, return_tensors='pt', add_special_tokens=False)
    generated = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = processor.decode(generated[0, inputs['input_ids'].shape[1]:], skip_special_tokens=True)
    answers.append(answer.strip())
json.dump(answers, open(sys.argv[3], 'w'))
assert not {'composer', 'composer_tokacc', 'examples'} & set(sys.modules), 'loaded by transformers alone'
"""


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """The checkpoint of a run of two steps, and the folder that it exported at its end."""
    folder = tmp_path_factory.mktemp('trained')
    arguments = [f'trainer.save_folder={folder}', f'report.folder={folder}', 'report.export=true']
    assert train([DIGITS, *TINY_DIGITS, 'trainer.max_duration=2ba', *arguments]) == 0
    return folder / 'latest-rank0.pt', folder / 'exported'


def a_batch():
    processor = build_digits_processor()
    dataset = DigitsDataset(processor, num_samples=4, max_images=3)
    batch = VisionLanguageCollator(processor)([dataset[index] for index in range(4)])
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def run_alone(code, *arguments, folder):
    """In a process that imports neither Composer nor this package."""
    command = [sys.executable, '-c', code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


def logits_of_exports(folder, *exports):
    """Logits of each folder, or of an adapter: ``'BASE with ADAPTER'``."""
    torch.save(a_batch(), folder / 'batch.pt')
    run_alone(LOAD_ALONE, 'batch.pt', 'logits.pt', *exports, folder=folder)
    return torch.load(folder / 'logits.pt')


def logits_of_checkpoint(path):
    """Logits of the weights in a Composer checkpoint, put into a model by hand."""
    from composer_tokacc.programs.models import build_transformers_model
    from composer_tokacc.programs.schema import load_config

    config = load_config(DIGITS, TINY_DIGITS)
    model = build_transformers_model(config=config.model.config, processor=build_digits_processor(), seed=99)
    weights = torch.load(path, weights_only=False)['state']['model']
    model.load_state_dict({name.removeprefix('model.'): value for name, value in weights.items()})
    with torch.no_grad():
        return model.eval()(**a_batch()).logits


@pytest.mark.slow
def test_exports_load_with_transformers_alone(trained, tmp_path):
    checkpoint, exported_at_the_end = trained
    assert main([str(checkpoint), str(tmp_path / 'exported')]) == 0
    expected = logits_of_checkpoint(checkpoint)
    for found in logits_of_exports(tmp_path, tmp_path / 'exported', exported_at_the_end):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    arguments = {'text': '<image> Which?', 'images': [Image.new('RGB', (8, 8), 'red')], 'return_tensors': 'pt'}
    inputs = AutoProcessor.from_pretrained(exported_at_the_end)(**arguments)
    for name, value in build_digits_processor()(**arguments).items():
        torch.testing.assert_close(inputs[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_sharded_checkpoints_are_exported(trained, tmp_path):
    pytest.importorskip('peft')
    _, base = trained
    runs = {
        'weights': [],
        'adapter': [
            'model.config=null',
            f'model.pretrained={base}',
            'model.lora={r: 4, modules_to_save: [multi_modal_projector]}',
            'optimizer.lr=0.01',
        ],
    }
    runs['resumed'] = [*runs['adapter'], f'trainer.load_path={tmp_path}/adapter/checkpoints/ep0-ba1']
    every = []
    for name, own in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        torch.save(a_batch(), folder / 'batch.pt')
        common = [each for each in TINY_DIGITS if not (own and each.startswith('model.'))]
        every.append(
            [
                *common,
                *own,
                'dataset.eval=null',
                'trainer.max_duration=2ba',
                f'report.folder={folder}',
                'scheduler.t_warmup=0ba',
                'trainer.save_interval=1ba',
                'trainer.parallelism_config.fsdp={state_dict_type: sharded}',
                f'trainer.save_folder={folder}/checkpoints',
            ]
        )
    files = launch_json('tests/ranks/sharded_export.py', json.dumps(every), DIGITS, ranks=2)
    expected = {name: torch.load(file) for name, file in zip(runs, files, strict=True)}
    torch.testing.assert_close(expected['resumed'], expected['adapter'], rtol=0, atol=0)
    sharded = {name: tmp_path / name / 'checkpoints' / 'ep0-ba2' for name in runs}
    assert main([str(sharded['weights']), str(tmp_path / 'exported')]) == 0
    assert main([str(sharded['adapter']), str(tmp_path / 'kept')]) == 0
    assert main([str(sharded['adapter']), str(tmp_path / 'merged'), 'merge=true']) == 0
    exports = tmp_path / 'exported', f'{base} with {tmp_path}/kept', tmp_path / 'merged'
    whole, kept, merged = logits_of_exports(tmp_path, *exports)
    torch.testing.assert_close(whole, expected['weights'], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kept, expected['adapter'], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged, expected['adapter'], rtol=1e-5, atol=1e-5)

    # A shard that is gone.
    next(sharded['weights'].glob('__1_*.distcp')).unlink()
    assert main([str(sharded['weights']), str(tmp_path / 'damaged')]) == 2
    assert not (tmp_path / 'damaged').exists()


def tiny_config(*, tied=False):
    text = {**LLAVA['text_config'], 'tie_word_embeddings': tied}
    config = {**LLAVA, 'text_config': text, 'tie_word_embeddings': tied, 'vision_feature_layer': -2}
    return {**config, 'vision_feature_select_strategy': 'default'}


def lora_checkpoint(folder, lora, *, tied=False, pretrained=True, dtype=torch.float32):
    """A checkpoint after two large steps, the logits of its model, and those of its base, stored in that type."""
    processor = build_digits_processor()
    source = {'config': tiny_config(tied=tied)}
    base = build_model(**source, processor=processor).model.to(dtype)
    base.save_pretrained(folder / 'base')
    base.float()
    if pretrained:
        source = {'pretrained': str(folder / 'base')}
    model = build_model(**source, processor=processor, lora={'r': 2, **lora})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, kept = torch.optim.AdamW(trained, lr=0.03), str(folder / 'checkpoints')
    fit(model, a_batch(), a_batch(), optimizer=optimizer, save_folder=kept)
    return folder / 'checkpoints' / 'latest-rank0.pt', logits_of(model.model), logits_of(base)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(**a_batch()).logits


@pytest.mark.parametrize(
    ('lora', 'tied'),
    [
        ({'modules_to_save': ['lm_head']}, True),
        ({'modules_to_save': ['embed_tokens', 'lm_head']}, True),
        # Merged into a weight that is the embeddings' too.
        ({'target_modules': ['q_proj', 'lm_head']}, True),
        # Its last layer and norm are reached by no loss.
        ({'modules_to_save': ['vision_tower', 'multi_modal_projector']}, False),
        ({'bias': 'all', 'use_rslora': True}, False),
        ({'use_dora': True}, False),
    ],
)
def test_adapter_and_merged_model_have_logits(tmp_path, lora, tied):
    peft = pytest.importorskip('peft')
    checkpoint, expected, before = lora_checkpoint(tmp_path, lora, tied=tied)
    assert (expected - before).abs().max() > 0.1
    assert main([str(checkpoint), str(tmp_path / 'adapter')]) == 0
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / 'base')
    found = logits_of(peft.PeftModel.from_pretrained(base, str(tmp_path / 'adapter')))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert main([str(checkpoint), str(tmp_path / 'merged'), 'merge=true']) == 0
    found = logits_of(AutoModelForImageTextToText.from_pretrained(tmp_path / 'merged'))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_adapter_of_half_precision_is_merged(tmp_path):
    pytest.importorskip('peft')
    checkpoint, expected, _ = lora_checkpoint(tmp_path, {}, dtype=torch.bfloat16)
    assert main([str(checkpoint), str(tmp_path / 'merged'), 'merge=true']) == 0
    found = logits_of(AutoModelForImageTextToText.from_pretrained(tmp_path / 'merged'))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('lora', [None, {'r': 2}])
def test_unwritable_generation_config_is_kept(tmp_path, lora):
    """Vicuna's, and so LLaVA-1.5's: greedy, with a temperature."""
    pytest.importorskip('peft')
    build_model(config=tiny_config(), processor=build_digits_processor()).model.save_pretrained(tmp_path / 'base')
    generation = {'do_sample': False, 'temperature': 0.9, 'top_p': 0.6, 'max_length': 4096}
    (tmp_path / 'base' / 'generation_config.json').write_text(json.dumps(generation))
    processor = build_digits_processor()
    model = build_model(pretrained=str(tmp_path / 'base'), processor=processor, lora=lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fit(model, a_batch(), optimizer=torch.optim.SGD(trained, lr=0.1), save_folder=str(tmp_path / 'again'))
    merge = [] if lora is None else ['merge=true']
    assert main([str(tmp_path / 'again' / 'latest-rank0.pt'), str(tmp_path / 'exported'), *merge]) == 0
    kept = AutoModelForImageTextToText.from_pretrained(tmp_path / 'exported').generation_config.to_dict()
    assert {name: kept[name] for name in generation} == generation
    if lora is None:
        export_model(model, tmp_path / 'at_the_end')
        assert json.loads((tmp_path / 'at_the_end' / 'generation_config.json').read_text())['temperature'] == 0.9


def test_adapter_without_a_base(tmp_path, capsys):
    pytest.importorskip('peft')
    checkpoint, expected, _ = lora_checkpoint(tmp_path, {}, pretrained=False)
    assert main([str(checkpoint), str(tmp_path / 'adapter')]) == 2
    assert 'export with merge=true' in capsys.readouterr().err
    assert main([str(checkpoint), str(tmp_path / 'merged'), 'merge=true']) == 0
    found = logits_of(AutoModelForImageTextToText.from_pretrained(tmp_path / 'merged'))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert train([DIGITS, 'model.lora={r: 2}', 'report.export=true']) == 2
    assert '`report.export` must be false with FSDP, and for `model.lora` on a base' in capsys.readouterr().err


def test_export_replaces_an_earlier_one(tmp_path):
    pytest.importorskip('peft')
    build_model(config=tiny_config(), processor=build_digits_processor()).model.save_pretrained(tmp_path / 'base')
    folder = tmp_path / 'exported'
    for lora in (None, {'r': 2}, None):
        model = build_model(pretrained=str(tmp_path / 'base'), processor=build_digits_processor(), lora=lora)
        export_model(model, folder)
        assert {path.name for path in folder.glob('*.safetensors')} == {
            'model.safetensors' if lora is None else 'adapter_model.safetensors'
        }
        assert (folder / 'adapter_config.json').exists() == (lora is not None)
        AutoProcessor.from_pretrained(folder)


def test_damaged_checkpoint_leaves_nothing(tmp_path, capsys):
    pytest.importorskip('peft')
    checkpoint, _, _ = lora_checkpoint(tmp_path, {'modules_to_save': ['multi_modal_projector']})
    (tmp_path / 'half.pt').write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])
    damages = {'half': 'compressed, incomplete or not written by Composer'}
    for part in ('lora_A', 'modules_to_save'):
        content = torch.load(checkpoint, weights_only=False)
        weights = content['state']['model']
        name = next(name for name in weights if part in name)
        narrow = {**weights, name: weights[name][:1]}
        del weights[name]
        torch.save(content, tmp_path / f'without_{part}.pt')
        content['state']['model'] = narrow
        torch.save(content, tmp_path / f'narrow_{part}.pt')
        damages |= {
            f'without_{part}': 'must hold a whole adapter of its base, got: 1 missing',
            f'narrow_{part}': 'size mismatch',
        }
    for name, message in damages.items():
        for merge in ([], ['merge=true']):
            assert main([str(tmp_path / f'{name}.pt'), str(tmp_path / 'out' / name), *merge]) == 2
            assert message in capsys.readouterr().err
    (tmp_path / 'base' / 'config.json').unlink()
    assert main([str(checkpoint), str(tmp_path / 'out' / 'merged'), 'merge=true']) == 2
    assert '`base_model_name_or_path`: ' in capsys.readouterr().err
    assert not list((tmp_path / 'out').iterdir())


def test_unwritable_folder_is_one_line(tmp_path, capsys):
    checkpoint, _, _ = lora_checkpoint(tmp_path, {})
    (tmp_path / 'file').write_text('keep')
    assert main([str(checkpoint), str(tmp_path / 'file' / 'folder')]) == 2
    assert 'the folder to export to must be writable' in capsys.readouterr().err
    (tmp_path / 'empty').mkdir()
    assert main([str(checkpoint), str(tmp_path / 'empty')]) == 0
    assert main([str(checkpoint), str(tmp_path / 'empty')]) == 2


def test_full_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / 'mine.txt').write_text('keep')
    assert main([str(tmp_path / 'x.pt'), str(tmp_path)]) == 2
    assert 'must be absent or empty' in capsys.readouterr().err
    assert (tmp_path / 'mine.txt').read_text() == 'keep'


def test_a_mistyped_command_says_how(capsys):
    assert main(['only-one']) == 2
    assert 'usage' in capsys.readouterr().err


@pytest.mark.slow
def test_exported_demo_gives_reported_answers(tmp_path):
    quick = [
        'trainer.max_duration=150ba',
        'trainer.eval_interval=150ba',
        'report.num_samples=48',
        'report.picture=false',
        'report.export=true',
        f'report.folder={tmp_path}',
        'dataset.num_samples=2048',
        'dataset.eval.num_samples=96',
    ]
    assert train([DIGITS, *quick, *QUIET]) == 0
    reported = json.loads((tmp_path / 'result.json').read_text())['answers']
    dataset, questions = DigitsDataset(split='eval', num_samples=96), []
    for answer in reported:
        index = int(answer['sample_id'].rpartition('-')[2])
        messages, images, _ = dataset.conversation(index)
        paths = [str(tmp_path / f'{index}-{number}.png') for number in range(len(images))]
        for image, path in zip(images, paths, strict=True):
            image.save(path)
        questions.append({'messages': messages[:-1], 'images': paths})
    (tmp_path / 'questions.json').write_text(json.dumps(questions))
    run_alone(ANSWER_ALONE, 'exported', 'questions.json', 'answers.json', folder=tmp_path)
    assert json.loads((tmp_path / 'answers.json').read_text()) == [answer['generated'] for answer in reported]
    num_right = sum(answer['generated'] == answer['expected'] for answer in reported)
    assert num_right >= 6, 'it has learnt something, so that answers differ'
