# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which errors become one line, with which key, and which keep their traceback."""

from __future__ import annotations

import errno
import pickle
import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.data import BadSampleError
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, TrainConfig, runner
from composer_tokacc.programs.errors import LONGEST_LINE, building, one_line, refuse
from composer_tokacc.refusals import InvalidInputError, NotExactError


def fail(source: str, module: str = 'my_package.part') -> None:
    """Runs a line in a module of that name."""
    exec(compile(source, module, 'exec'), {'__name__': module, 'torch': torch})


def caught_from(call):
    """Returns the error that a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def run_and_raise(error, monkeypatch):
    """Returns the exit status of a program that raises an error while it runs."""
    monkeypatch.setattr(runner, 'load_config', lambda *_: TrainConfig())
    monkeypatch.setattr(runner, 'check_config', lambda *_, **__: None)

    def program(config):
        raise error

    return runner.run_program(program, 'a.yaml', [])


@pytest.mark.parametrize(
    ('raise_it', 'expected'),
    [
        (lambda: torch.optim.AdamW([torch.zeros(1)], lr=-1.0), '`optimizer`: ValueError: Invalid learning rate: -1.0'),
        (lambda: torch.optim.AdamW([torch.zeros(1)], lrr=1), '`optimizer`: TypeError: '),
        (lambda: fail('{}["a key"]'), "`optimizer`: KeyError: 'a key'"),
        (lambda: CostModel(launch=-1.0), '`optimizer`: `launch` must be finite'),
    ],
)
def test_what_a_part_raises_is_one_line(raise_it, expected, caplog):
    with pytest.raises(ConfigError) as caught, building('optimizer'):
        raise_it()
    assert str(caught.value).startswith(expected)
    assert caught.value.path == 'optimizer'
    assert caught.value.__cause__ is not None


def test_a_bug_of_ours_keeps_its_kind():
    with pytest.raises(KeyError) as caught, building('optimizer'):
        fail('{}["a key"]', 'composer_tokacc.owner')
    assert caught.type is KeyError


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (ConfigError('loader', 'must be less'), '`loader` must be less'),
        (BadSampleError('sample "7" is broken'), 'sample "7" is broken'),
        (OSError(errno.ENOSPC, 'No space left'), 'the disk must have room'),
        (NotExactError('the step is not exact'), 'the step is not exact'),
        (caught_from(lambda: torch.nn.Linear(2, 2)(torch.zeros(3, 3))), 'RuntimeError: .*mat1 and mat2'),
    ],
)
def test_what_ends_a_run_is_one_line(error, message, monkeypatch, capsys):
    assert run_and_raise(error, monkeypatch) == 2
    assert re.match(f'error: {message}', capsys.readouterr().err)


@pytest.mark.parametrize('module', ['my_package.callback', 'composer_tokacc.algorithm'])
@pytest.mark.parametrize('bug', ['{}["a key"]', 'int("0.5")', 'torch.zeros(2) + torch.zeros(3)'])
def test_a_bug_of_a_user_or_of_ours_keeps_its_traceback(bug, module, monkeypatch):
    error = caught_from(lambda: fail(bug, module))
    with pytest.raises(type(error)):
        run_and_raise(error, monkeypatch)


def test_an_error_survives_the_way_between_ranks():
    with pytest.raises(ConfigError) as caught, building('optimizer'):
        torch.optim.AdamW([torch.zeros(1)], lr=-1.0)
    for error in (caught.value, ConfigError('loader', 'must be less'), ConfigError('', 'no key')):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.path) == (type(error), str(error), error.path)


def test_a_long_value_loses_its_middle():
    line = one_line(ConfigError('seed', f'must be less, got: {"9" * 200_000}. Do this'))
    assert len(line) < LONGEST_LINE + 50
    assert line.startswith('error: `seed` must be less')
    assert line.endswith('. Do this')


def test_one_rank_of_a_node_speaks_where_all_meet_the_mistake(monkeypatch, capsys):
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert refuse(ConfigError('', 'wrong'), on_all_ranks=True) == 0
    assert capsys.readouterr().err == ''
    assert refuse(ConfigError('', 'wrong')) == 2
    assert capsys.readouterr().err == 'error: wrong\n'
    monkeypatch.setenv('LOCAL_RANK', '0')
    assert refuse(ConfigError('', 'wrong'), on_all_ranks=True) == 2
    assert capsys.readouterr().err == 'error: wrong\n'


class _RefusedDataset(Dataset):
    """Raises an error when a worker process reads it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize('kind', [BadSampleError, InvalidInputError, NotExactError])
def test_refusal_of_a_worker_process_is_one_line(kind, monkeypatch, capsys):
    dataset = _RefusedDataset(kind('sample "a": broken'))
    error = caught_from(lambda: next(iter(DataLoader(dataset, num_workers=1))))
    assert run_and_raise(error, monkeypatch) == 2
    assert capsys.readouterr().err == 'error: sample "a": broken\n'
