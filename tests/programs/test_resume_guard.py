# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs resumed with the data of their checkpoint, with other data, and with the same data elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from PIL import Image

from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.checkpoints import SameData
from composer_tokacc.train import main
from examples.digits import build_digits_processor
from tests.support.launch import ROOT, launch_json, launch_program
from tests.support.programs import DIGITS, QUIET, TINY_DIGITS, TINY_MODEL

LLAVA = str(ROOT / 'yamls' / 'llava_json.yaml')
COLORS = {'red': (220, 20, 20), 'green': (20, 200, 20), 'blue': (20, 20, 220)}


def write_data(folder, *, answer='It is', num_samples=12):
    (folder / 'images').mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(num_samples):
        name = list(COLORS)[index % 3]
        Image.new('RGB', (40, 30 + index % 3), COLORS[name]).save(folder / 'images' / f'{name}.png')
        turns = [{'from': 'human', 'value': '<image>Which?'}, {'from': 'gpt', 'value': f'{answer} {name}.'}]
        records.append({'image': f'{name}.png', 'conversations': turns})
    (folder / 'data.json').write_text(json.dumps(records))


def command(data, checkpoints, *further):
    return [
        LLAVA,
        f'dataset.path={data}/data.json',
        f'dataset.image_dir={data}/images',
        *TINY_MODEL,
        *QUIET,
        'dataset.processor.vocab_size=300',
        'loader.global_batch_size=4',
        'scheduler.t_warmup=1ba',
        'trainer.max_duration=2ba',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={checkpoints}',
        f'report.folder={checkpoints}',
        *further,
    ]


@pytest.fixture(scope='module')
def first_run(tmp_path_factory):
    """A run of two steps: its data, its checkpoints."""
    folder = tmp_path_factory.mktemp('first')
    write_data(folder / 'data')
    assert main(command(folder / 'data', folder / 'checkpoints')) == 0
    return folder / 'data', folder / 'checkpoints'


@pytest.fixture
def copied(first_run, tmp_path):
    """The same, to be changed."""
    for source, name in zip(first_run, ('data', 'checkpoints'), strict=True):
        shutil.copytree(source, tmp_path / name, symlinks=True)
    return tmp_path / 'data', tmp_path / 'checkpoints'


class Named(list):
    """A dataset that says what it is."""

    def identity(self):
        return list(self)


def steps(checkpoints):
    return json.loads((checkpoints / 'result.json').read_text())['steps']


def refusal(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith('error: a resumed run must have the data'), lines[-5:]
    return lines[-1]


def test_the_same_data_elsewhere_are_the_same(copied, tmp_path):
    data, checkpoints = copied
    shutil.move(data, tmp_path / 'moved')
    further = ['trainer.max_duration=4ba', 'loader.num_workers=1', 'dataset.max_length=500', 'microbatching.size=1']
    assert main(command(tmp_path / 'moved', checkpoints, *further)) == 0
    assert steps(checkpoints) == 4


@pytest.mark.parametrize('change', ['longer text', 'image', 'fewer'])
def test_other_data_under_the_same_name_are_refused_before_a_step(change, copied, capsys):
    data, checkpoints = copied
    if change == 'image':
        Image.new('RGB', (400, 30), 'yellow').save(data / 'images' / 'red.png')
    else:
        # The tokenizer is trained on the text, so that another text may give the model another shape.
        answer = 'I should say that in all likelihood this is' if change == 'longer text' else 'It is'
        write_data(data, answer=answer, num_samples=9 if change == 'fewer' else 12)
    before = sorted(checkpoints.iterdir())
    assert main(command(data, checkpoints, 'trainer.max_duration=4ba')) == 2
    line = refusal(capsys)
    number = {'fewer': 9}.get(change, 12)
    assert 'data ' in line
    assert ' of 12 samples there, ' in line
    assert f' of {number} samples here' in line
    assert ('vocabulary' in line.partition('got: ')[2]) == ('text' in change)
    assert 'trainer.save_folder' in line
    assert sorted(checkpoints.iterdir()) == before


def test_other_data_are_taken_where_that_is_wanted(copied, caplog):
    data, checkpoints = copied
    Image.new('RGB', (400, 30), 'yellow').save(data / 'images' / 'red.png')
    assert main(command(data, checkpoints, 'trainer.max_duration=4ba', 'loader.on_other_data=warn')) == 0
    assert steps(checkpoints) == 4
    assert sum('got: other data' in message for message in caplog.messages) == 1


def test_another_processor_is_named(first_run, tmp_path, capsys):
    data, checkpoints = first_run
    saved = (checkpoints / 'latest-rank0.pt').resolve()
    further = [f'trainer.load_path={saved}', 'trainer.autoresume=false', 'model.config.vision_config.image_size=48']
    assert main(command(data, tmp_path, *further)) == 2
    assert 'got: other processor (processor ' in refusal(capsys)


def test_weights_of_another_run_are_only_weights(first_run, tmp_path):
    checkpoints = first_run[1]
    write_data(tmp_path / 'other')
    Image.new('RGB', (400, 30), 'yellow').save(tmp_path / 'other' / 'images' / 'red.png')
    saved = (checkpoints / 'latest-rank0.pt').resolve()
    new = ['trainer.load_weights_only=true', f'trainer.load_path={saved}', 'trainer.run_name=other']
    assert main(command(tmp_path / 'other', tmp_path / 'checkpoints', *new)) == 0
    assert steps(tmp_path / 'checkpoints') == 2


def test_a_checkpoint_without_fingerprints_is_resumed(copied):
    data, checkpoints = copied
    saved = (checkpoints / 'latest-rank0.pt').resolve()
    content = torch.load(saved, weights_only=False)
    del content['state']['callbacks']['SameData']
    torch.save(content, saved)
    write_data(data, num_samples=9)
    assert main(command(data, checkpoints, 'trainer.max_duration=4ba')) == 0
    assert steps(checkpoints) == 4


def test_a_dataset_that_says_nothing_about_itself_is_known_by_samples(tmp_path, capsys):
    arguments = [
        DIGITS,
        *TINY_DIGITS,
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={tmp_path}/checkpoints',
        f'report.folder={tmp_path}',
    ]
    assert main([*arguments, 'trainer.max_duration=1ba']) == 0
    assert main([*arguments, 'trainer.max_duration=2ba']) == 0
    assert main([*arguments, 'trainer.max_duration=3ba', 'dataset.seed=5']) == 2
    assert 'got: other data (data ' in refusal(capsys)


@pytest.mark.parametrize(
    ('lora', 'differing'),
    [
        ('{r: 2, alpha: 8}', 'model.lora.alpha (model.lora.alpha 4 there, 8 here)'),
        (
            'null',
            'model.lora.alpha and model.lora.dropout and model.lora.bias and model.lora.use_rslora '
            '(model.lora.alpha 4 there, null here',
        ),
    ],
)
def test_another_adapter_of_the_same_shapes_is_named(adapted, lora, differing, tmp_path, capsys):
    shutil.copytree(adapted, tmp_path / 'run', symlinks=True)
    assert main(adapted_run(tmp_path / 'run', 2, lora)) == 2
    line = refusal(capsys)
    assert f'got: other {differing}' in line
    assert '. Set it back, or for a new run give another trainer.run_name' in line


def test_the_same_adapter_in_other_words_is_resumed(adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / 'run', symlinks=True)
    assert main(adapted_run(tmp_path / 'run', 2, '{r: 2, alpha: 4.0, dropout: 0}')) == 0
    assert steps(tmp_path / 'run') == 2


def adapted_run(folder, num_steps, lora):
    return [
        DIGITS,
        *TINY_DIGITS,
        f'model.lora={lora}',
        'dataset.eval=null',
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={folder}',
        f'report.folder={folder}',
        f'trainer.max_duration={num_steps}ba',
    ]


@pytest.fixture(scope='module')
def adapted(tmp_path_factory):
    """The folder of a run of one step with LoRA."""
    pytest.importorskip('peft')
    folder = tmp_path_factory.mktemp('adapted')
    assert main(adapted_run(folder, 1, '{r: 2}')) == 0
    return folder


@pytest.mark.slow
def test_two_ranks_refuse_in_one_line_and_resume_what_one_began(copied):
    data, checkpoints = copied
    launch_program('composer_tokacc.train', *command(data, checkpoints, 'trainer.max_duration=4ba'), ranks=2)
    assert steps(checkpoints) == 4
    write_data(data, num_samples=9)
    refused = ['composer_tokacc.train', *command(data, checkpoints, 'trainer.max_duration=6ba')]
    for status, printed in launch_json('tests/ranks/refused_program.py', *refused, ranks=2):
        assert status == 2
        assert len(re.findall('^error: a resumed run must have the data', printed, re.MULTILINE)) == 1, printed
        assert 'Traceback' not in printed


@pytest.mark.parametrize('saved', [True, False])
def test_a_sharded_checkpoint_is_read_with_and_without_fingerprints(saved, tmp_path):
    dataset = Named(['a', 'b'])
    callback = SameData(dataset, build_digits_processor(), adapter={}, trainer={'load_path': f'{tmp_path}/ep1'})
    state = {'model': {'weight': torch.ones(3)}, 'callbacks': {'SameData': callback.state_dict()} if saved else {}}
    dist_cp.save({'state': state}, checkpoint_id=tmp_path / 'ep1')
    dataset[0] = 'c'
    other = SameData(dataset, build_digits_processor(), adapter={}, trainer={'load_path': f'{tmp_path}/{{run_name}}'})
    for one in (callback, other):
        if saved and one is other:
            with pytest.raises(ConfigError, match=r'got: other data \(data .* of 2 samples there, .* here\)'):
                one.before_load(SimpleNamespace(run_name='ep1', optimizers=[]), None)
        else:
            one.before_load(SimpleNamespace(run_name='ep1', optimizers=[]), None)
        # What a sharded checkpoint lacks must not be asked of it.
        assert one.state_dict() == {}
        one.after_load(None, None)
        assert one.state_dict()['fingerprints']


def before_load(model, path, **trainer):
    """What a run with the model makes of a checkpoint."""
    given = {'load_path': str(path), **trainer}
    callback = SameData(Named('ab'), build_digits_processor(), adapter={}, model=model, trainer=given)
    optimizers = [torch.optim.SGD([torch.zeros(1)])]
    callback.before_load(SimpleNamespace(run_name='run', fsdp_enabled=False, optimizers=optimizers), None)


def layers(*sizes):
    return torch.nn.Sequential(*(torch.nn.Linear(one, other) for one, other in pairwise(sizes)))


@pytest.mark.parametrize('is_sharded', [True, False])
def test_a_checkpoint_of_another_model_is_refused_in_one_line(is_sharded, tmp_path):
    state = {'model': layers(4, 4, 4).state_dict(), 'optimizers': {'SGD': {'step': 1}}, 'callbacks': {}}
    state['timestamp'] = {'Timestamp': {'batch': 1}}
    path, quantised = tmp_path / 'ep1', tmp_path / 'ep2'
    integers = {name: value.to(torch.int8) for name, value in state['model'].items()}
    for place, weights in ((path, state['model']), (quantised, integers)):
        saved = {'state': {**state, 'model': weights}}
        dist_cp.save(saved, checkpoint_id=place) if is_sharded else torch.save(saved, place)
    before_load(layers(4, 4, 4), path)
    with pytest.raises(ConfigError, match=r"4 others of 4 weights .*'not of floats'\] there"):
        before_load(layers(4, 4, 4), quantised)
    others = {
        r'2 others of 4 weights \(1.weight: \[4, 4\] there, \[3, 4\] here\)': layers(4, 4, 3),
        r'2 others of 4 weights \(2.weight: missing\)': layers(4, 4, 4, 4),
        r'2 others of 4 weights \(1.weight: unknown\)': layers(4, 4),
    }
    for message, model in others.items():
        with pytest.raises(ConfigError, match=f'must be of the same model, got: .*{message}'):
            before_load(model, path)
    # As Composer takes them where it is told to.
    partly = {'load_weights_only': True, 'load_strict_model_weights': False}
    before_load(layers(4, 4, 4, 4), path, **partly)
    with pytest.raises(ConfigError, match='2 others'):
        before_load(layers(4, 4, 3), path, **partly)


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused_with_its_path(tmp_path):
    torch.save({'state': {'model': {}, 'callbacks': Evil(tmp_path / 'ran')}}, tmp_path / 'ep1.pt')
    with pytest.raises(ConfigError, match=r'hold only tensors and plain values, got: .*ep1.pt'):
        before_load(layers(4, 4), tmp_path / 'ep1.pt')
    assert not (tmp_path / 'ran').exists()


def test_a_tied_head_may_be_stored_once(tmp_path):
    model = layers(4, 4, 4)
    model[1].weight = model[0].weight
    weights = {name: value for name, value in model.state_dict().items() if name != '1.weight'}
    torch.save({'state': {'model': weights, 'callbacks': {}}}, tmp_path / 'ep1')
    before_load(model, tmp_path / 'ep1', load_weights_only=True)
    with pytest.raises(ConfigError, match=r'the state of the optimizer SGD to go on from, got: .*ep1 with \[\]'):
        before_load(model, tmp_path / 'ep1')


def fingerprints(**settings):
    return SameData(Named('ab'), build_digits_processor(), adapter={}, optimizer=settings, trainer={}).state_dict()


@pytest.mark.parametrize(
    ('settings', 'refused'),
    [
        ({'lr': 0.1, 'betas': (0.9, 0.95), 'fused': True}, ''),
        ({'lr': 0.2, 'betas': (0.9, 0.95)}, r'optimizer\.lr 0\.1 there, 0\.2 here'),
        ({'lr': 0.1, 'betas': (0.9, 0.99)}, r'optimizer\.betas'),
        ({'lr': 0.1, 'of_another_torch': 1}, ''),
    ],
)
def test_settings_of_an_optimizer_are_compared(settings, refused):
    callback = SameData(Named('ab'), build_digits_processor(), adapter={}, optimizer=settings, trainer={})
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        callback.load_state_dict(fingerprints(lr=0.1, betas=[0.9, 0.95], fused=False))


@pytest.mark.parametrize('further', [[], ['trainer.load_weights_only=true']])
def test_a_larger_model_does_not_take_a_smaller_ones_checkpoint(further, first_run, tmp_path, capsys):
    data, checkpoints = first_run
    saved = (checkpoints / 'latest-rank0.pt').resolve()
    other = ['trainer.autoresume=false', f'trainer.load_path={saved}', 'model.config.text_config.num_hidden_layers=3']
    assert main(command(data, tmp_path, *other, *further)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f'error: the checkpoint must be of the same model, got: {saved} with 9 others of')
    assert 'Give the `model` of that run' in line
