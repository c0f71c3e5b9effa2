# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs resumed with the data of their checkpoint, with other data, and with the same data elsewhere."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from composer.core import Callback
from PIL import Image
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_tokacc import TokenMonitor
from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.answers import Answers
from composer_tokacc.programs.checkpoints import SameData, arguments_to_resume
from composer_tokacc.programs.rehearsal import Rehearsal
from composer_tokacc.programs.schema import load_config
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sampling import SkipReadBatches
from composer_tokacc.train import main
from examples.digits import build_digits_processor
from tests.support.conversations import turns
from tests.support.launch import launch_json, launch_program
from tests.support.process_group import group_of_one_rank
from tests.support.programs import DIGITS, LLAVA, TINY_DIGITS, TINY_LLAVA, UNCHECKED
from tests.support.training import unchecked_rows

COLORS = {'red': (220, 20, 20), 'green': (20, 200, 20), 'blue': (20, 20, 220)}


@pytest.fixture(scope='module', autouse=True)
def _unchecked_rows():
    with unchecked_rows():
        yield


def write_data(folder, *, answer='It is', num_samples=12):
    (folder / 'images').mkdir(parents=True, exist_ok=True)
    records = []
    for name, color in COLORS.items():
        Image.new('RGB', (40, 30), color).save(folder / 'images' / f'{name}.png')
    names = itertools.cycle(COLORS)
    for name in itertools.islice(names, num_samples):
        conversation = turns('<image>Which?', f'{answer} {name}.')
        records.append({'image': f'{name}.png', 'conversations': conversation})
    (folder / 'data.json').write_text(json.dumps(records))


def write_longer_answers(folder):
    write_data(folder, answer='I should say that in all likelihood this is')


def write_fewer_samples(folder):
    write_data(folder, num_samples=9)


def write_another_image(folder):
    Image.new('RGB', (400, 30), 'yellow').save(folder / 'images' / 'red.png')


def command(data, checkpoints, *overrides):
    return [
        LLAVA,
        f'dataset.path={data}/data.json',
        f'dataset.image_dir={data}/images',
        *TINY_LLAVA,
        UNCHECKED,
        'trainer.max_duration=2ba',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={checkpoints}',
        f'report.folder={checkpoints}',
        *overrides,
    ]


@pytest.fixture(scope='module')
def first_run(tmp_path_factory):
    """The folder of a run of two steps: its data and its checkpoints."""
    folder = tmp_path_factory.mktemp('first')
    write_data(folder / 'data')
    assert main(command(folder / 'data', folder / 'checkpoints')) == 0
    return folder


@pytest.fixture
def latest(first_run):
    """The last checkpoint of the first run, which must not be changed."""
    return (first_run / 'checkpoints' / 'latest-rank0.pt').resolve()


@pytest.fixture
def data(first_run, tmp_path):
    """A copy of the first run's data, which a test may change."""
    return shutil.copytree(first_run / 'data', tmp_path / 'data')


@pytest.fixture
def checkpoints(first_run, tmp_path):
    """A copy of the first run's checkpoints, which a test may go on from."""
    return shutil.copytree(first_run / 'checkpoints', tmp_path / 'checkpoints', symlinks=True)


def steps(checkpoints):
    return json.loads((checkpoints / 'result.json').read_text())['steps']


def refusal(capsys):
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('error: a resumed run must have the data'), line
    return line


def test_the_same_data_may_be_moved(data, checkpoints, tmp_path):
    shutil.move(data, tmp_path / 'moved')
    overrides = ['trainer.max_duration=4ba', 'loader.num_workers=1', 'dataset.max_length=500', 'microbatching.size=1']
    assert main(command(tmp_path / 'moved', checkpoints, *overrides)) == 0
    assert steps(checkpoints) == 4


@pytest.mark.parametrize(
    ('change', 'num_samples', 'changes_vocabulary'),
    [
        # The tokenizer is trained on the text, so that another text may give the model another shape.
        (write_longer_answers, 12, True),
        (write_another_image, 12, False),
        (write_fewer_samples, 9, False),
    ],
)
def test_other_data_are_refused_before_steps(change, num_samples, changes_vocabulary, data, checkpoints, capsys):
    change(data)
    files_before = sorted(checkpoints.iterdir())
    assert main(command(data, checkpoints, 'trainer.max_duration=4ba')) == 2
    line = refusal(capsys)
    assert 'data ' in line
    assert ' of 12 samples there, ' in line
    assert f' of {num_samples} samples here' in line
    assert ('vocabulary' in line.partition('got: ')[2]) == changes_vocabulary
    assert 'trainer.save_folder' in line
    assert sorted(checkpoints.iterdir()) == files_before


def test_other_data_are_accepted_on_request(data, checkpoints, caplog):
    write_another_image(data)
    assert main(command(data, checkpoints, 'trainer.max_duration=4ba', 'loader.on_other_data=warn')) == 0
    assert steps(checkpoints) == 4
    assert sum('got: other data' in message for message in caplog.messages) == 1


def test_another_processor_is_named(first_run, latest, tmp_path, capsys):
    overrides = [f'trainer.load_path={latest}', 'trainer.autoresume=false', 'model.config.vision_config.image_size=48']
    assert main(command(first_run / 'data', tmp_path, *overrides)) == 2
    assert 'got: other processor (processor ' in refusal(capsys)


def test_weights_alone_take_other_data(latest, data, tmp_path):
    write_another_image(data)
    overrides = ['trainer.load_weights_only=true', f'trainer.load_path={latest}', 'trainer.run_name=other']
    assert main(command(data, tmp_path / 'new', *overrides)) == 0
    assert steps(tmp_path / 'new') == 2


def test_weights_alone_need_their_vocabulary(tmp_path, capsys):
    """The tokenizer is trained on the text. Here both have 300 tokens, so all shapes are the same."""
    answers = {
        'first': 'I should say that in all likelihood, given what we know of optics and pigments, this vivid thing is',
        'second': 'We would think: perhaps it looks like something quite cold; my friends call every hue zebra or jazz',
    }
    for name, answer in answers.items():
        write_data(tmp_path / name, answer=answer)
    assert main(command(tmp_path / 'first', tmp_path / 'checkpoints')) == 0
    path = (tmp_path / 'checkpoints' / 'latest-rank0.pt').resolve()
    overrides = ['trainer.load_weights_only=true', f'trainer.load_path={path}', 'trainer.run_name=other']
    arguments = command(tmp_path / 'second', tmp_path / 'new', *overrides)

    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('error: a run that loads the weights of a checkpoint must have its vocabulary')
    assert main([*arguments, 'loader.on_other_data=warn']) == 0


def digits_command(folder, num_steps, *overrides):
    return [
        DIGITS,
        *TINY_DIGITS,
        UNCHECKED,
        'dataset.eval=null',
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={folder}',
        f'report.folder={folder}',
        f'trainer.max_duration={num_steps}ba',
        *overrides,
    ]


def test_dataset_without_identity_compares_by_samples(tmp_path, capsys):
    """The digits have no ``identity()``, so some of their samples are fingerprinted instead."""
    assert main(digits_command(tmp_path, 1)) == 0
    assert main(digits_command(tmp_path, 2)) == 0
    assert main(digits_command(tmp_path, 3, 'dataset.seed=5')) == 2
    assert 'got: other data (data ' in refusal(capsys)


def adapted_command(folder, num_steps, lora):
    return digits_command(folder, num_steps, f'model.lora={lora}')


@pytest.fixture(scope='module')
def adapted_run(tmp_path_factory):
    """The folder of a run of one step with LoRA."""
    pytest.importorskip('peft')
    folder = tmp_path_factory.mktemp('adapted')
    assert main(adapted_command(folder, 1, '{r: 2}')) == 0
    return folder


@pytest.fixture
def adapted(adapted_run, tmp_path):
    """A copy of it, which a test may go on from."""
    return shutil.copytree(adapted_run, tmp_path / 'run', symlinks=True)


@pytest.mark.parametrize(
    ('lora', 'difference'),
    [
        ('{r: 2, alpha: 8}', 'model.lora.alpha (model.lora.alpha 4 there, 8 here)'),
        (
            'null',
            'model.lora.alpha and model.lora.dropout and model.lora.bias and model.lora.use_rslora '
            '(model.lora.alpha 4 there, None here',
        ),
    ],
)
def test_adapter_of_equal_shapes_is_named(lora, difference, adapted, capsys):
    assert main(adapted_command(adapted, 2, lora)) == 2
    line = refusal(capsys)
    assert f'got: other {difference}' in line
    assert '. Set it back, or for a new run give another trainer.run_name' in line


def test_weights_alone_of_an_adapter(adapted, tmp_path, capsys):
    """With another alpha they would be another model. Dropout may change."""
    path = (adapted / 'latest-rank0.pt').resolve()
    overrides = ['trainer.load_weights_only=true', f'trainer.load_path={path}', 'trainer.run_name=other']
    assert main([*adapted_command(tmp_path / 'new', 1, '{r: 2, alpha: 8}'), *overrides]) == 2
    error = capsys.readouterr().err
    assert 'with other model.lora.alpha (model.lora.alpha 4 there, 8 here)' in error
    assert 'load_weights_only' not in error, 'the run has this setting already'
    assert main([*adapted_command(tmp_path / 'new', 1, '{r: 2, dropout: 0.1}'), *overrides]) == 0


def test_an_adapter_written_differently_is_resumed(adapted):
    assert main(adapted_command(adapted, 2, '{r: 2, alpha: 4.0, dropout: 0}')) == 0
    assert steps(adapted) == 2


@pytest.mark.slow
def test_two_ranks_resume_and_refuse(data, checkpoints):
    """Two ranks resume the run of one rank. If the data are different, both refuse in one line."""
    launch_program('composer_tokacc.train', *command(data, checkpoints, 'trainer.max_duration=4ba'), ranks=2)
    assert steps(checkpoints) == 4
    write_fewer_samples(data)
    arguments = command(data, checkpoints, 'trainer.max_duration=6ba')
    results = launch_json('tests/ranks/refused_program.py', 'composer_tokacc.train', *arguments, ranks=2)
    for status, printed in results:
        assert status == 2
        assert len(re.findall('^error: a resumed run must have the data', printed, re.MULTILINE)) == 1, printed
        assert 'Traceback' not in printed


class Named(list):
    """A dataset that has an identity."""

    def identity(self):
        return list(self)


def same_data(dataset, *, optimizer=None, batches=None, on_other_data='raise', **options):
    return SameData(
        dataset,
        build_digits_processor(),
        adapter={},
        optimizer=optimizer or {},
        batches=batches,
        on_other_data=on_other_data,
        **options,
    )


@pytest.mark.parametrize('has_fingerprints', [True, False])
def test_sharded_checkpoint_with_and_without_fingerprints(has_fingerprints, tmp_path):
    state = SimpleNamespace(run_name='ep1', optimizers=[])
    callback = same_data(Named(['a', 'b']), trainer={'load_path': f'{tmp_path}/ep1'})
    callbacks = {'SameData': callback.state_dict()} if has_fingerprints else {}
    saved_state = {'model': {'weight': torch.ones(3)}, 'callbacks': callbacks}
    dist_cp.save({'state': saved_state}, checkpoint_id=tmp_path / 'ep1')

    callback.before_load(state, None)
    # Torch reads each entry of the state dict from the checkpoint, so it must be empty until loading is done.
    assert callback.state_dict() == {}
    callback.after_load(None, None)
    assert callback.state_dict()['fingerprints']

    on_other_data = same_data(Named(['c', 'b']), trainer={'load_path': f'{tmp_path}/{{run_name}}'})
    if has_fingerprints:
        with pytest.raises(ConfigError, match=r'got: other data \(data .* of 2 samples there, .* here\)'):
            on_other_data.before_load(state, None)
    else:
        on_other_data.before_load(state, None)


def before_load(model, path, *, shard=None, optimizer_class=torch.optim.SGD, **options):
    """Asks whether a run with the model and an optimizer may load a checkpoint. ``shard`` is a class of FSDP 1.

    Returns the callback that was asked.
    """
    callback = same_data(Named('ab'), model=model, trainer={'load_path': str(path), **options})
    if shard is not None:
        model[0] = shard(model[0], use_orig_params=True, device_id=torch.device('cpu'))
    optimizer = optimizer_class([torch.zeros(1)])
    state = SimpleNamespace(run_name='run', model=model, fsdp_enabled=shard is not None, optimizers=[optimizer])
    callback.before_load(state, None)
    return callback


def layers(*sizes):
    modules = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        modules.append(torch.nn.Linear(num_inputs, num_outputs))
    return torch.nn.Sequential(*modules)


def save_model(weights, path, is_sharded, optimizer_class=torch.optim.SGD):
    """Saves a checkpoint of Composer's form."""
    state = {
        'model': weights,
        'optimizers': {optimizer_class.__qualname__: {'state': {'step': 1}, 'param_groups': {'lr': 0.1}}},
        'callbacks': {},
        'timestamp': {'Timestamp': {'batch': 1}},
    }
    if is_sharded:
        dist_cp.save({'state': state}, checkpoint_id=path)
    else:
        torch.save({'state': state}, path)


@pytest.mark.parametrize('is_sharded', [True, False])
def test_checkpoint_of_another_model_is_refused(is_sharded, tmp_path):
    path = tmp_path / 'ep1'
    save_model(layers(4, 4, 4).state_dict(), path, is_sharded)
    before_load(layers(4, 4, 4), path)
    differences = {
        r'2 others among 4 weights \(1.weight: \[4, 4\] there, \[3, 4\] here\)': layers(4, 4, 3),
        r'2 others among 4 weights \(2.weight: missing\)': layers(4, 4, 4, 4),
        r'2 others among 4 weights \(1.weight: unknown\)': layers(4, 4),
    }
    for message, model in differences.items():
        with pytest.raises(ConfigError, match=f'must be of the same model, got: .*{message}'):
            before_load(model, path)
    # These options let Composer load only the weights that fit. Shapes must still agree.
    options = {'load_weights_only': True, 'load_strict_model_weights': False}
    before_load(layers(4, 4, 4, 4), path, **options)
    with pytest.raises(ConfigError, match='2 others'):
        before_load(layers(4, 4, 3), path, **options)


@pytest.mark.parametrize('is_sharded', [True, False])
def test_optimizer_class_inside_a_function(is_sharded, tmp_path):
    """Its qualified name has dots, as the keys of a sharded checkpoint have."""

    class Optimizer(torch.optim.SGD):
        pass

    path = tmp_path / 'ep1'
    save_model(layers(4, 4).state_dict(), path, is_sharded, Optimizer)
    before_load(layers(4, 4), path, optimizer_class=Optimizer)
    with pytest.raises(ConfigError, match='the state of the optimizer SGD to go on from'):
        before_load(layers(4, 4), path)


@pytest.mark.filterwarnings('ignore:.*FullyShardedDataParallel|.*NO_SHARD')
def test_missing_weights_under_fsdp_1(tmp_path):
    """FSDP 1 adds to the names of the parameters."""
    weights = layers(4, 4, 4).state_dict()
    save_model(weights, tmp_path / 'complete', is_sharded=False)
    del weights['0.bias']
    save_model(weights, tmp_path / 'incomplete', is_sharded=False)
    with group_of_one_rank(tmp_path):
        before_load(layers(4, 4, 4), tmp_path / 'complete', shard=FullyShardedDataParallel)
        with pytest.raises(ConfigError, match=r'1 others among 3 weights \(0.bias: missing\)'):
            before_load(layers(4, 4, 4), tmp_path / 'incomplete', shard=FullyShardedDataParallel)


@pytest.mark.parametrize('is_sharded', [True, False])
def test_checkpoint_of_integers_is_refused(is_sharded, tmp_path):
    path = tmp_path / 'ep1'
    model = layers(4, 4, 4)
    quantised = {name: weight.to(torch.int8) for name, weight in model.state_dict().items()}
    save_model(quantised, path, is_sharded)
    with pytest.raises(ConfigError, match=r'4 others among 4 weights .*\] not of floats there'):
        before_load(model, path)


def test_tied_head_may_be_stored_once(tmp_path):
    model = layers(4, 4, 4)
    model[1].weight = model[0].weight
    weights = model.state_dict()
    del weights['1.weight']
    torch.save({'state': {'model': weights, 'callbacks': {}}}, tmp_path / 'ep1')
    before_load(model, tmp_path / 'ep1', load_weights_only=True)
    with pytest.raises(ConfigError, match=r'the state of the optimizer SGD to go on from, got: .*ep1 with \[\]'):
        before_load(model, tmp_path / 'ep1')


def test_load_path_with_autoresume_is_compared(tmp_path):
    """`autoresume` stays if Composer searches loggers. If it finds a checkpoint there, that is compared, too."""
    path = tmp_path / 'ep1'
    save_model(layers(4, 4).state_dict(), path, is_sharded=False)
    options = {'load_weights_only': True, 'autoresume': True}
    with pytest.raises(ConfigError, match='must be of the same model'):
        before_load(layers(4, 3), path, **options)

    callback = before_load(layers(4, 4), path, **options)
    other = same_data(Named('cb'), trainer={})
    with pytest.raises(ConfigError, match='got: other data'):
        callback.load_state_dict(other.state_dict())


def resume_with_optimizer(settings):
    """Loads the state of a run whose optimizer has a learning rate, two betas, and is not fused."""
    saved_settings = {'lr': 0.1, 'betas': [0.9, 0.95], 'fused': False}
    saved = same_data(Named('ab'), optimizer=saved_settings, trainer={})
    callback = same_data(Named('ab'), optimizer={'lr': 0.1, **settings}, trainer={})
    callback.load_state_dict(saved.state_dict())


@pytest.mark.parametrize('settings', [{'betas': (0.9, 0.95), 'fused': True}, {'of_another_torch': 1}])
def test_equal_settings_of_an_optimizer_pass(settings):
    """Lists equal tuples. Settings that only choose an implementation, or that one torch lacks, do not count."""
    resume_with_optimizer(settings)


def test_other_betas_of_optimizer_are_refused():
    with pytest.raises(ConfigError, match=r'optimizer\.betas'):
        resume_with_optimizer({'betas': (0.9, 0.99)})


def resume_with_batches(batch_in_epoch, **options):
    """Loads the state of a run with twice as large batches."""
    saved = same_data(Named('ab'), batches={'loader.global_batch_size': 8}, trainer={})
    callback = same_data(Named('ab'), batches={'loader.global_batch_size': 4}, trainer={}, **options)
    callback.load_state_dict(saved.state_dict())
    timestamp = SimpleNamespace(batch_in_epoch=batch_in_epoch)
    callback.after_load(SimpleNamespace(timestamp=timestamp), None)


def test_other_batches_within_an_epoch(caplog):
    """They would repeat some samples of the epoch and leave others out."""
    with pytest.raises(ConfigError, match=r'batches .* got: .*: 8} there, .*: 4} here'):
        resume_with_batches(3)
    resume_with_batches(3, on_other_data='warn')
    assert 'goes on because of `loader.on_other_data`' in caplog.text
    caplog.clear()
    resume_with_batches(0)
    assert not caplog.records


def test_older_checkpoint_of_parts_resumes():
    """It does not say whether its parts were mixed."""
    saved = same_data(Named('ab'), batches={'seed': 1}, trainer={})
    callback = same_data(Named('ab'), batches={'seed': 1, 'loader.regroup_ranks': False}, trainer={})
    callback.load_state_dict(saved.state_dict())
    callback.after_load(SimpleNamespace(timestamp=SimpleNamespace(batch_in_epoch=3)), None)


def test_settings_of_batches_of_this_version_resume_later():
    """A later version may save more, and must still resume: see `_batches_as_saved_today` of `checkpoints.py`."""
    saved_batches = {
        'seed': 17,
        'loader.shuffle': True,
        'loader.drop_last': True,
        'loader.modality': 'mixed',
        'loader.global_batch_size': 64,
    }
    saved = same_data(Named('ab'), batches=saved_batches, trainer={})
    batches = source_of(load_config(DIGITS, [])).settings_of_batches()
    callback = same_data(Named('ab'), batches=batches, trainer={})
    callback.load_state_dict(saved.state_dict())
    callback.after_load(SimpleNamespace(timestamp=SimpleNamespace(batch_in_epoch=3)), None)


@pytest.mark.parametrize('callback', [Answers, Rehearsal, SkipReadBatches, TokenMonitor])
def test_other_callbacks_save_nothing(callback):
    """With a first key no older sharded checkpoint could be read: docs/architecture.md#what-a-checkpoint-holds."""
    assert callback.state_dict is Callback.state_dict


def test_autoresume_ignores_load_ignore_keys(tmp_path):
    """They are for another `load_path`, so the run's own checkpoint is still compared."""
    latest = tmp_path / 'latest-rank0.pt'
    save_model(layers(4, 4).state_dict(), latest, is_sharded=False)
    options = {
        'autoresume': True,
        'save_folder': str(tmp_path),
        'run_name': 'run',
        'load_ignore_keys': ['state/optimizers'],
    }
    options |= arguments_to_resume(options)
    path = options.pop('load_path')
    assert path == str(latest)
    with pytest.raises(ConfigError, match='must be of the same model'):
        before_load(layers(4, 3), path, **options)
    before_load(layers(4, 4), path, **options)
