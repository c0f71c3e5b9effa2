# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import gc
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch
from composer.core import Callback
from composer.loggers import LoggerDestination
from pydantic import Field

from composer_tokacc import TokenAccumulation
from composer_tokacc import train as program
from composer_tokacc.data import to_mds
from composer_tokacc.programs import ConfigError, TrainConfig, load_config
from composer_tokacc.programs.build import build_trainer_parts
from composer_tokacc.programs.config_checks import check_config, check_folders, notes_on
from composer_tokacc.programs.registry import (
    build_all,
    build_section,
    class_by_name,
    token_accumulation_options,
)
from composer_tokacc.programs.schema import LoaderConfig, MicrobatchingConfig, check_arguments, check_value
from composer_tokacc.programs.sources import source_of
from composer_tokacc.train import main
from tests.support.launch import ROOT, launch_json
from tests.support.programs import check_run

DIGITS = ROOT / 'yamls' / 'digits.yaml'
LLAVA = ROOT / 'yamls' / 'llava_json.yaml'


def refusal_of(path: Path, *overrides: str, num_ranks: int = 2) -> str:
    """Returns the error of a config. It must be one line, and come before data and model are built."""
    with pytest.raises(ConfigError) as caught:
        check_run(path, overrides, num_ranks=num_ranks)
    message = str(caught.value)
    assert '\n' not in message
    return message


@pytest.mark.parametrize(
    ('name', 'num_ranks', 'overrides'),
    [
        ('digits.yaml', 2, []),
        ('llava_json.yaml', 2, ['dataset.path=data.json']),
        ('llava_mixture.yaml', 2, ['dataset.parts.captions.path=a.json', 'dataset.parts.documents.path=b.json']),
        ('llava15_7b.yaml', 8, ['dataset.path=data.json']),
        ('llava15_7b_lora.yaml', 1, ['dataset.path=data.json']),
        ('llava15_7b.yaml', 16, ['dataset.path=[a.json,b.json]', 'dataset.image_dir=images']),
    ],
)
def test_every_yaml_of_the_repository_passes(name, num_ranks, overrides):
    check_config(load_config(ROOT / 'yamls' / name, overrides), num_ranks=num_ranks)


def test_overrides_win_and_keep_their_types():
    config = load_config(DIGITS, ['trainer.max_duration=5ba', 'model.freeze=[vision_tower]', 'optimizer.lr=3e-4'])
    assert isinstance(config, TrainConfig)
    assert config.trainer['max_duration'] == '5ba'
    assert config.model.freeze == ['vision_tower']
    assert config.optimizer['lr'] == 3e-4
    assert config.optimizer['name'] == 'adamw'


def test_algorithms_keep_their_order(tmp_path):
    file = tmp_path / 'a.yaml'
    file.write_text('algorithms: {token_accumulation: {}, gradient_clipping: {clipping_threshold: 1.0}, ema: {}}')
    assert list(load_config(file).algorithms) == ['token_accumulation', 'gradient_clipping', 'ema']


@pytest.mark.parametrize(
    ('override', 'expected'),
    [
        ('loadr.num_workers=1', 'loadr. Did you mean loader?'),
        ('loader.global_batch_sise=8', 'global_batch_sise. Did you mean global_batch_size?'),
        ('model.freez=[a]', 'freez. Did you mean freeze?'),
        ('dataset.evl.split=eval', 'evl. Did you mean eval?'),
        ('dataset.eval.num_smples=3', 'num_smples. Did you mean num_samples?'),
        ('algorithms.token_accumulaton={}', 'token_accumulaton. Did you mean token_accumulation?'),
        ('algorithms.token_accumulation.loss_token=auto', 'loss_token. Did you mean loss_tokens?'),
        ('callbacks.speed_monitr={}', 'speed_monitr. Did you mean speed_monitor?'),
        ('trainer.loggers.tensorbord={}', '`trainer.loggers` has no class tensorbord. Did you mean tensorboard?'),
        ('optimizer.name=adam_v', 'adam_v. Did you mean adam?'),
        ('optimizer.lrr=1', 'lrr. Did you mean lr?'),
        ('optimizer.parts={vision_tower: {lrr: 1}}', 'lrr. Did you mean lr?'),
        ('optimizer.parts={vision_tower: {name: adam}}', '`optimizer.parts.vision_tower` has no key name'),
        ('scheduler.alpha=0.1', 'alpha. Did you mean alpha_f?'),
        ('report.num_smples=2', 'num_smples. Did you mean num_samples?'),
        ('dataset.num_smples=2', 'num_smples. Did you mean num_samples?'),
        ('trainer.max_durration=2ep', 'max_durration. Did you mean max_duration?'),
        ('trainer.parallelism_config.fsdp.sharding_strateg=X', 'Did you mean sharding_strategy?'),
    ],
)
def test_misspelt_names_are_refused(override, expected):
    message = refusal_of(DIGITS, override)
    assert expected in message
    sections = override.partition('=')[0].split('.')[:-1]
    section = sections[-1] if sections else 'section'
    assert section in message, 'it says in which section to look'


@pytest.mark.parametrize(
    ('override', 'expected'),
    [
        # Types and choices of our sections.
        ('loader.global_batch_size=many', '`loader.global_batch_size`'),
        ('dataset.eval=3', '`dataset.eval` must be a mapping'),
        ('model.freeze=vision_tower', '`model.freeze`'),
        ('model.dtype=fp16', "must be 'float32', 'bfloat16' or 'float16', got: 'fp16'"),
        ('microbatching.device_train_microbatch_size=automatic', "must be 'auto' or 'suggest', got: 'automatic'"),
        ('microbatching.cost=3', '`microbatching.cost` must be a mapping, got: 3'),
        ('report.export=flase', "got: 'flase'"),
        ('seed=99999999999', 'must be less than 4294967296'),
        # Arguments of hosts and datasets.
        ('callbacks.lr_monitor=3', '`callbacks.lr_monitor` must be a mapping'),
        ('optimizer.lr=-1', '`optimizer` cannot be used: ValueError: Invalid learning rate: -1'),
        ('optimizer.lr=.nan', '`optimizer.lr` must be a finite number, got: nan'),
        ('scheduler.alpha_f=-5', '`scheduler.alpha_f` must be greater than or equal to 0, got: -5'),
        ('trainer.deterministic_mode=maybe', '`trainer.deterministic_mode` must be a valid boolean'),
        ('trainer.precision=3', '`trainer.precision` cannot be used: Unable to convert value(3)'),
        ('trainer.ddp_sync_strategy=[1]', '`trainer.ddp_sync_strategy` cannot be used: Unable to convert value([1])'),
        ('dataset.path=', '`dataset.path` must be'),
        ('dataset.eval={path: b.json, processor: {}}', '`dataset.eval.processor` must be left out here'),
        ('algorithms.gradient_clipping.clipping_type=nrom', "must be 'norm', 'value' or 'adaptive', got: 'nrom'"),
        # Our own rules.
        ('report.name=examples.digits.nothing', '`report.name` cannot be used: AttributeError: '),
        ('report.name=mine', '`report.name` must be a dotted name such as package.module.name, got: mine'),
        ('trainer.max_duration=null', '`trainer.max_duration` must be given'),
        ('trainer.max_duration=0ba', 'must be a longer time'),
        ('trainer.device_train_microbatch_size=4', 'must be left out here, because the program sets it, got: 4'),
        ('trainer.load_path=no/such.pt', 'got: no/such.pt, which is not there'),
        (
            'loader.exchange_ranks=true',
            '`loader.exchange_ranks` must be false for samples read by index, got: true. `loader.regroup_ranks` does',
        ),
    ],
)
def test_values_are_refused_by_key(override, expected):
    assert expected in refusal_of(LLAVA, 'dataset.path=data.json', override)


@pytest.mark.parametrize(
    'override',
    [
        'report={name: null}',
        'dataset.parts=null',
        'callbacks.nan_monitor=null',
        'algorithms={ema: {half_life: 10ba, smoothing: null}}',
    ],
)
def test_null_counts_as_left_out(override):
    check_run(LLAVA, ['dataset.path=data.json', override], num_ranks=1)


@pytest.mark.parametrize(
    ('fsdp', 'version', 'expected'),
    [
        ('{state_dict_type: shards}', '1', '`trainer.parallelism_config.fsdp.state_dict_type` must be'),
        ('{data_parallel_replicate_degree: 0}', '1', 'degree` must be'),
        ('{data_parallel_replicate_degree: two}', '1', 'degree` must be'),
        ('{sharding_strategy: HYBRID_SHARD}', '1', '`trainer.parallelism_config.fsdp.data_parallel_replicate_degree` '),
    ],
)
def test_impossible_groups_of_ranks_are_refused(fsdp, version, expected, monkeypatch):
    monkeypatch.setenv('FSDP_VERSION', version)
    override = f'trainer.parallelism_config={{fsdp: {fsdp}}}'
    assert expected in refusal_of(LLAVA, 'dataset.path=data.json', 'loader.global_batch_size=8', override, num_ranks=8)


@pytest.mark.parametrize(
    'fsdp',
    [
        '{}',
        '{sharding_strategy: full_shard, mixed_precision: pure}',
        '{data_parallel_replicate_degree: 2}',
        '{sharding_strategy: HYBRID_SHARD, data_parallel_replicate_degree: 4, data_parallel_shard_degree: 2}',
        '{data_parallel_replicate_degree: -1, data_parallel_shard_degree: 4}',
    ],
)
def test_groups_of_ranks_that_fit_pass(fsdp, monkeypatch):
    monkeypatch.delenv('FSDP_VERSION', raising=False)
    overrides = ['dataset.path=data.json', 'loader.global_batch_size=8', f'trainer.parallelism_config={{fsdp: {fsdp}}}']
    check_config(load_config(LLAVA, overrides), num_ranks=8)


def test_a_binary_file_is_no_config(tmp_path):
    (tmp_path / 'a.yaml').write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match='must be a YAML file'):
        load_config(tmp_path / 'a.yaml')


@pytest.mark.parametrize(
    ('override', 'num_ranks', 'expected'),
    [
        ('loader.global_batch_size=63', 2, 'got: 63 on 2 ranks'),
        ('loader.global_batch_size=2', 4, 'got: 2 on 4 ranks'),
        ('loader.global_eval_batch_size=5', 2, '`loader.global_eval_batch_size` must be divisible'),
    ],
)
def test_indivisible_batches_are_refused(override, num_ranks, expected):
    assert expected in refusal_of(DIGITS, override, num_ranks=num_ranks)


def test_logger_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    config = load_config(DIGITS, ['trainer.loggers.wandb={project: p}'])
    with pytest.raises(ConfigError, match=r'`trainer.loggers.wandb` cannot be used: .*mosaicml\[wandb\]'):
        build_trainer_parts(config)


def test_loggers_in_comments_of_yamls_exist(tmp_path):
    """A YAML file of the repository shows loggers in comments. Without the comment signs they must work."""
    text = (ROOT / 'yamls' / 'llava15_7b_lora.yaml').read_text()
    assert '\n  # loggers:' in text
    file = tmp_path / 'with_loggers.yaml'
    file.write_text(text.replace('\n  # loggers:', '\n  loggers:').replace('\n  #   ', '\n    '))
    config = load_config(file, ['dataset.path=data.json'])
    assert set(config.trainer['loggers']) == {'tensorboard', 'wandb', 'mlflow'}
    for name in config.trainer['loggers']:
        assert issubclass(class_by_name('trainer.loggers', name), LoggerDestination)


def test_missing_values_are_named():
    assert '`dataset.path` must be given' in refusal_of(LLAVA)


def test_paths_of_unread_data_may_be_missing(tmp_path):
    """``size`` reads no data if it has lengths. Any other value must be given also then."""
    file = tmp_path / 'a.yaml'
    file.write_text("seed: '???'\ndataset: {path: ['???', b.json], parts: {a: {path: '???'}}}\n")
    config = load_config(file, ['seed=1'], reads_data=False)
    assert config.dataset == {'path': ['not given', 'b.json'], 'parts': {'a': {'path': 'not given'}}}
    with pytest.raises(ConfigError, match='`seed` must be given'):
        load_config(file, reads_data=False)


@pytest.mark.parametrize(
    ('dataset', 'overrides'),
    [
        ('{name: llava}', []),
        ('{name: llava, path: [a.json, "???"], eval: {path: "${dataset.path}"}}', []),
        ('{name: llava, eval: "???"}', ['dataset.eval.max_length=9']),
        ('"???"', ['dataset.name=llava']),
        ('{name: llava, parts: {a: {path: "???"}, b: {}}}', []),
    ],
)
def test_config_of_unread_data(tmp_path, dataset, overrides):
    """It need not say where the data are. Its other keys are checked."""
    file = tmp_path / 'unread.yaml'
    sections = 'model: {config: {model_type: llama}}\ntrainer: {max_duration: 1ep}\n'
    file.write_text(f'{sections}loader: {{global_batch_size: 2}}\ndataset: {dataset}\n')
    check_config(load_config(file, overrides, reads_data=False), reads_data=False)
    with pytest.raises(ConfigError, match='must be given'):
        check_config(load_config(file, overrides))
    with pytest.raises(ConfigError, match='Did you mean max_length'):
        check_config(load_config(file, [*overrides, 'dataset.max_lengt=9'], reads_data=False), reads_data=False)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('- a\n- b\n', 'must hold sections'),
        ('model: [a\n', 'must be a YAML file that can be read, got: ParserError: '),
        ('seed: 1\nseed: 2\n', 'duplicate key'),
        ('seed: ${nothing}\n', 'nothing'),
        (
            'model: {config: {model_type: llama}}\ndataset: {name: examples.digits.DigitsDataset}\n',
            '`trainer.max_duration`',
        ),
        ('model: {config: {model_type: llama}}\n', '`dataset.name`'),
        ('model: {config: {model_type: llama}}\ndataset: {name: lava}\n', 'Did you mean llava?'),
    ],
)
def test_files_without_a_config_are_refused(tmp_path, text, expected):
    file = tmp_path / 'bad.yaml'
    file.write_text(text)
    assert expected in refusal_of(file)


def test_missing_file_is_refused():
    assert '`no/such.yaml` must be a YAML file' in refusal_of(Path('no/such.yaml'))


def test_other_arguments_than_overrides_are_refused():
    assert 'must be key=value, got: --lr' in refusal_of(DIGITS, '--lr')


def test_launcher_gives_number_of_ranks(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '3')
    with pytest.raises(ConfigError, match='64 on 3 ranks'):
        check_config(load_config(DIGITS))


def test_program_refuses_before_any_process_group(monkeypatch, capsys):
    def fail(*_, **__):
        raise AssertionError('a process group was started')

    monkeypatch.setattr('composer.utils.dist.initialize_dist', fail)
    status = main([str(DIGITS), 'loader.global_batch_sise=8'])
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ''
    assert printed.err.splitlines() == ['error: `loader` has no key global_batch_sise. Did you mean global_batch_size?']


def test_program_without_file_shows_its_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert 'composer -n 2 -m composer_tokacc.train yamls/digits.yaml' in capsys.readouterr().err


@pytest.mark.slow
def test_no_garbage_collection_at_the_end(monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, 'register', registered.append)
    main(['missing.yaml'])
    assert registered == [gc.freeze]


@pytest.mark.slow
def test_only_first_rank_prints_the_line():
    """The launcher ends all ranks as soon as one fails. So the other ranks neither fail nor print."""
    arguments = ['composer_tokacc.train', str(DIGITS), 'microbatching.device_train_microbatch_size=0']
    (status, printed), other_rank = launch_json('tests/ranks/refused_program.py', *arguments, ranks=2)
    assert status == 2
    (line,) = printed.splitlines()
    assert line.startswith('error:')
    assert "must be greater than or equal to 1, or must be 'auto' or 'suggest', got: 0" in line
    assert other_rank == [0, '']


def microbatch_size(path: Path, *overrides: str) -> object:
    return load_config(path, overrides).microbatching.device_train_microbatch_size


def test_size_is_short_for_long_name(tmp_path):
    file = tmp_path / 'a.yaml'
    file.write_text('microbatching: {size: 4}')
    assert microbatch_size(file) == 4
    assert microbatch_size(DIGITS, 'microbatching.size=suggest') == 'suggest', 'the override wins over the file'
    assert microbatch_size(file, 'microbatching.device_train_microbatch_size=2') == 2
    two_names = ['microbatching.size=2', 'microbatching.device_train_microbatch_size=2']
    assert 'got: both' in refusal_of(DIGITS, *two_names)


@pytest.mark.parametrize('value', ['4', '[4]', 'auto'])
def test_override_inside_no_section(tmp_path, value):
    file = tmp_path / 'a.yaml'
    file.write_text(f'microbatching: {value}')
    for override in ('microbatching.x=1', 'microbatching.size=1'):
        assert refusal_of(file, override).startswith('`microbatching` must be a mapping, got: ')


def test_override_inside_a_list(tmp_path):
    """It would replace the whole list, also one of references."""
    file = tmp_path / 'a.yaml'
    for betas in ('[0.9, 0.95]', '["${dataset.beta}", 0.95]'):
        file.write_text(f'optimizer: {{betas: {betas}}}\ndataset: {{beta: 0.9}}')
        assert refusal_of(file, 'optimizer.betas.1=0.99').startswith('`optimizer.betas` must be a mapping, got: [')


def test_override_below_a_number(tmp_path):
    file = tmp_path / 'a.yaml'
    file.write_text('dataset: {eval: 3}')
    message = refusal_of(file, 'dataset.eval.path=x')
    assert message.startswith('`dataset.eval` must be a mapping, got: 3. Change the file')
    assert load_config(file, ['dataset.eval={path: x}']).dataset == {'eval': {'path': 'x'}}
    # The second override is below the value of the first one.
    config = load_config(file, ['dataset.eval={path: x}', 'dataset.eval.split=test'])
    assert config.dataset == {'eval': {'path': 'x', 'split': 'test'}}


@pytest.mark.parametrize('value', ['null', '???', '${loader}'])
def test_override_fills_a_section(tmp_path, value):
    file = tmp_path / 'a.yaml'
    file.write_text(f'microbatching: {value}')
    assert microbatch_size(file, 'microbatching.size=1') == 1


def test_missing_package_of_a_dataset(monkeypatch):
    monkeypatch.setitem(sys.modules, 'streaming', None)  # as if it were not installed
    message = refusal_of(ROOT / 'yamls' / 'llava_streaming.yaml', 'dataset.local=shards')
    assert message.startswith('`dataset.name` llava_streaming needs mosaicml-streaming, got: none.')
    assert message.endswith("pip install 'composer_tokacc[streaming]'")


def test_missing_package_of_the_converter(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, 'streaming', None)
    assert to_mds.main(['data.json', 'images', str(tmp_path / 'out')]) == 2
    error = capsys.readouterr().err
    assert error == "error: shards need mosaicml-streaming. pip install 'composer_tokacc[streaming]'\n"


class TypedForCheckersOnly:
    """Its module imports a type only for type checkers, so its annotations cannot be evaluated."""

    def __init__(self, tracker: OnlyForTypeCheckers = None, folder: Path = '.') -> None:  # noqa: F821  # pyright: ignore
        self.tracker = tracker
        self.folder = folder


class AnnotatedWithText:
    def __init__(self, tracker: 'a tracker, or none' = None, folder: str = '.') -> None:  # noqa: F722  # pyright: ignore
        self.tracker = tracker
        self.folder = folder


class AnnotatedWithUnknownPart:
    def __init__(self, tracker: list['OnlyForTypeCheckers'] = (), folder: str = '.') -> None:  # noqa: F821, UP037  # pyright: ignore
        self.tracker = tracker
        self.folder = folder


class AnnotatedWithNameOfSchema:
    def __init__(self, tracker: 'Fraction' = Fraction(1, 2), folder: str = '.') -> None:  # noqa: UP037
        self.tracker = tracker
        self.folder = folder


class FocalLoss(Callback):
    """Its arguments have names of hosts' arguments, with other ranges."""

    def __init__(self, alpha: float = -0.5, window_size: int | None = 3) -> None:
        self.arguments = (alpha, window_size)


class OnlyMatrices(torch.optim.SGD):
    """Takes only matrices, as torch's Muon does. The matrices of an adapter fit."""

    def __init__(self, params, lr=0.1, **_):
        params = list(params)
        if any(parameter.dim() != 2 for parameter in params):
            raise ValueError('only 2D parameters')
        super().__init__(params, lr=lr)


def test_optimizer_of_matrices_passes():
    name = f'{__name__}.{OnlyMatrices.__name__}'
    check_config(load_config(LLAVA, ['dataset.path=data.json', f'optimizer.name={name}']), num_ranks=1)


def test_ranges_of_hosts_are_theirs(monkeypatch):
    monkeypatch.setitem(sys.modules, 'callbacks_of_user', SimpleNamespace(FocalLoss=FocalLoss))
    name = 'callbacks_of_user.FocalLoss'
    (callback,) = build_all('callbacks', {name: {'alpha': -1, 'window_size': None}})
    assert callback.arguments == (-1, None)
    with pytest.raises(ConfigError, match='alpha` must be a valid number'):
        build_all('callbacks', {name: {'alpha': 'much'}})
    scheduler = {'name': 'composer.optim.CosineAnnealingScheduler', 'alpha_f': -1}
    with pytest.raises(ConfigError, match='alpha_f` must be greater than or equal to 0'):
        build_section('scheduler', scheduler)


@pytest.mark.parametrize('name', ['token_accumulation', 'composer_tokacc.TokenAccumulation'])
def test_options_are_read_under_both_names(name):
    config = TrainConfig(algorithms={'ema': None, name: {'token_weights': 'sqrt'}})
    assert token_accumulation_options(config) == {'token_weights': 'sqrt'}
    assert token_accumulation_options(TrainConfig(algorithms={name: None})) == {}
    assert token_accumulation_options(TrainConfig()) == {}


def test_subclass_counts_as_the_algorithm(monkeypatch):
    """It is not built to find this out, because its constructor may have side effects, such as opening a log."""
    subclass = type('Subclass', (TokenAccumulation,), {'__init__': lambda self, token_weights: pytest.fail('built')})
    monkeypatch.setitem(sys.modules, 'algorithms_of_user', SimpleNamespace(Subclass=subclass))
    config = TrainConfig(algorithms={'algorithms_of_user.Subclass': {'token_weights': 'sqrt'}})
    assert source_of(config).token_weights == 'sqrt'
    assert notes_on(config) == []


def test_folders_of_environment_name_are_checked(tmp_path, monkeypatch):
    monkeypatch.setenv('RUN_NAME', 'mine')
    (tmp_path / 'mine' / 'result.json').mkdir(parents=True)
    with pytest.raises(ConfigError, match=r'^`report.folder` must have no folder, .*mine/result.json'):
        check_folders(TrainConfig(report={'folder': f'{tmp_path}/{{run_name}}'}))


def test_name_of_environment_is_enough_for_the_checkpoints(monkeypatch):
    config = load_config(DIGITS, ['trainer.run_name=null', 'trainer.save_folder="x/{run_name}"'])
    with pytest.raises(ConfigError, match=r'^`trainer.run_name` must be given'):
        check_config(config)
    monkeypatch.setenv('RUN_NAME', 'mine')
    check_config(config)


def test_notes_on_keys_without_effect():
    config = TrainConfig(
        algorithms={'token_accumulation': None},
        loader=LoaderConfig(global_eval_batch_size=4),
        microbatching=MicrobatchingConfig(device_memory_gib=8.0),
        trainer={'save_interval': '5ba', 'load_weights_only': True},
    )
    notes = notes_on(config)
    assert len(notes) == 4
    assert notes[0] == '`trainer.save_interval` has no effect without `trainer.save_folder`'
    config.trainer.update(save_folder='runs', load_path='ep1.pt')
    config.dataset['eval'] = {'path': 'eval.json'}
    config.microbatching.device_train_microbatch_size = 'suggest'
    assert notes_on(config) == []


def test_note_on_answers_that_nobody_gives():
    config = TrainConfig(algorithms={'token_accumulation': None}, report={'folder': 'runs', 'answers': 4})
    assert notes_on(config) == ['`report.answers` has no effect without `dataset.eval`']
    config.dataset['eval'] = {'path': 'eval.json'}
    assert notes_on(config) == []
    config.trainer['parallelism_config'] = {'fsdp': {}}
    assert notes_on(config) == ['`report.answers` has no effect with FSDP, because no rank holds the whole model']


def test_note_on_evaluation_of_trained_samples():
    dataset = {'name': 'llava', 'path': 'a.json', 'eval': {'max_length': 9}}
    config = TrainConfig(algorithms={'token_accumulation': None}, dataset=dataset)
    assert len(notes_on(config)) == 1
    dataset['parts'] = {'a': {'path': 'b.json'}, 'b': {'path': 'a.json'}}
    dataset['eval'] = {'path': 'b.json'}
    assert sum('`dataset.eval` has the `path` of training data' in note for note in notes_on(config)) == 1
    dataset['eval'] = {'path': 'c.json'}
    assert not any('`dataset.eval` has the `path`' in note for note in notes_on(config))


def test_note_on_evaluation_of_trained_shards():
    dataset = {'name': 'llava_streaming', 'local': 'cache', 'remote': 's3://shards', 'eval': {'shuffle': False}}
    config = TrainConfig(algorithms={'token_accumulation': None}, dataset=dataset)
    (note,) = notes_on(config)
    assert 'has the `local` and `remote` of training data' in note
    for other_shards in {'local': 'held_out'}, {'split': 'val'}, {'name': 'llava', 'path': 'eval.json'}:
        dataset['eval'] = other_shards
        assert notes_on(config) == []


def test_note_on_freeze_with_an_adapter():
    config = TrainConfig(algorithms={'token_accumulation': None})
    config.model.freeze = ['vision_tower']
    assert notes_on(config) == []
    config.model.lora = {'r': 2}
    assert len(notes_on(config)) == 1
    config.model.lora['bias'] = 'all'
    assert notes_on(config) == []


def test_no_note_on_keys_switched_off():
    """A null is on purpose: `trainer.save_folder=null` for a short trial of a file that saves."""
    config = TrainConfig(
        algorithms={'token_accumulation': None},
        dataset={'eval': None},
        loader=LoaderConfig(global_eval_batch_size=4),
        trainer={'save_folder': None, 'save_interval': '5ba'},
    )
    assert notes_on(config) == []


def test_notes_copy_no_objects():
    """A config that was made in Python may hold objects that cannot be copied."""
    config = TrainConfig(algorithms={'token_accumulation': None}, trainer={'profiler': threading.Lock()})
    assert notes_on(config) == []


def test_note_on_key_that_all_parts_replace():
    parts = {'a': {'path': 'a.json'}, 'b': {'path': 'b.json', 'max_length': 8}}
    dataset = {'path': 'c.json', 'max_length': 9, 'parts': parts, 'image_dir': None}
    config = TrainConfig(algorithms={'token_accumulation': None}, dataset=dataset)
    assert notes_on(config) == ['`dataset.path` has no effect, because each dataset has its own']
    dataset['eval'] = {'path': 'd.json'}
    assert len(notes_on(config)) == 1
    dataset['eval'] = {'max_length': 7}  # takes the path next to `parts`
    assert notes_on(config) == []


def test_note_on_share_that_all_parts_replace():
    """A key such as `epochs` is not for the eval set, so the eval set takes none from next to `parts`."""
    dataset = {'epochs': 3, 'parts': {'a': {'epochs': 2}, 'b': {}}, 'eval': {'path': 'd.json'}}
    config = TrainConfig(algorithms={'token_accumulation': None}, dataset=dataset)
    assert notes_on(config) == []
    dataset['parts']['b'] = {'epochs': 1}
    assert notes_on(config) == ['`dataset.epochs` has no effect, because each dataset has its own']


def test_note_on_weights_of_composer():
    (note,) = notes_on(TrainConfig())
    assert 'no `token_accumulation`' in note
    assert notes_on(TrainConfig(trainer={'accumulate_train_batch_on_tokens': True})) == []


def test_train_says_notes_on_first_rank(monkeypatch, capsys):
    monkeypatch.setattr(program, '_dry_run', lambda config: None)
    arguments = [str(DIGITS), 'dry_run=true', 'trainer.save_interval=5ba']
    assert main(arguments) == 0
    assert capsys.readouterr().err.count('note: ') == 1
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    assert main(arguments) == 0
    assert 'note: ' not in capsys.readouterr().err


@pytest.mark.parametrize(
    ('hint', 'value', 'expected'),
    [
        (Path | None, 'data.json', Path('data.json')),
        (set[str], ['a', 'b'], {'a', 'b'}),
        (list[tuple[int, int]], [[1, 2]], [(1, 2)]),
        (tuple[float, float], [0, 0.5], (0.0, 0.5)),
        (str | Path, 'data.json', 'data.json'),
        (Sequence[int], [1], [1]),
        (Iterable[int], [1], [1]),
        ([int], 'anything', 'anything'),  # an annotation that is no type is not checked
        ({'a': int}, 'anything', 'anything'),
    ],
)
def test_values_are_converted_to_their_annotation(hint, value, expected):
    converted = check_value('key', value, hint)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ('hint', 'value', 'message'),
    [
        (
            list[tuple[int, int]],
            [[1, '2']],
            "`key` must be a valid integer, got: '2'",
        ),
        (tuple[float, float], [0.5], '`key` must have more entries, got: [0.5]'),
        (tuple[float, float], [1, 2, 3], '`key` must have at most 2 items, not 3, got: [1, 2, 3]'),
        (Annotated[set[int], Field(min_length=2)], [1], '`key` must have at least 2 items, not 1, got: [1]'),
        (Annotated[str, Field(min_length=1)], '', "`key` must have at least 1 character, got: ''"),
        (set[str], 'a', "`key` must be a valid list, got: 'a'"),
        (dict[str, int], {1: 2}, '`key.1` as a key must be a valid string, got: 1'),
        (bool | Path, 3, '`key` must be a valid boolean, or must be a valid string, got: 3'),
        (SimpleNamespace, 'a', "`key` must be left out, got: 'a'"),
    ],
)
def test_values_that_no_conversion_fits(hint, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_value('key', value, hint)


@pytest.mark.parametrize(
    'callback',
    [TypedForCheckersOnly, AnnotatedWithText, AnnotatedWithUnknownPart, AnnotatedWithNameOfSchema],
)
@pytest.mark.parametrize('arguments', [{'tracker': 1}, {'folder': 'x'}])
def test_annotations_that_cannot_be_evaluated(callback, arguments):
    """Their values are not checked. The names of arguments are."""
    assert check_arguments('callbacks.mine', callback, arguments) == arguments
    with pytest.raises(ConfigError, match='trackr'):
        check_arguments('callbacks.mine', callback, {'trackr': 1})


def test_argument_of_program_must_be_taken():
    needs_processor = partial(AnnotatedWithText, processor=None)
    with pytest.raises(ConfigError, match=r'AnnotatedWithText.*processor=None'):
        check_arguments('dataset', needs_processor, {})
