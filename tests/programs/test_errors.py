# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Errors of users become one line that names the key. Bugs in a step keep their traceback."""

from __future__ import annotations

import errno
import logging
import pickle
import re

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.data import BadSampleError
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, TrainConfig, runner
from composer_tokacc.programs.errors import LONGEST_LINE, building, one_line, refuse
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.train import main
from tests.support.programs import DIGITS


def run_line(source: str, module: str = 'my_package.part') -> None:
    """Runs a line of code as if it stood in a module of that name."""
    exec(compile(source, module, 'exec'), {'__name__': module, 'torch': torch})


def caught_from(call):
    """Returns the error that a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def run_and_raise(error, monkeypatch):
    """Returns the exit status of a program that raises an error while it runs."""
    monkeypatch.setattr(runner, 'load_config', lambda *_, **__: TrainConfig())
    monkeypatch.setattr(runner, 'check_config', lambda *_, **__: None)

    def program(config):
        raise error

    return runner.run_program(program, 'a.yaml', [])


@pytest.mark.parametrize(
    ('raise_it', 'expected'),
    [
        (
            lambda: torch.optim.AdamW([torch.zeros(1)], lr=-1.0),
            '`optimizer` cannot be used: ValueError: Invalid learning rate: -1.0',
        ),
        (lambda: torch.optim.AdamW([torch.zeros(1)], lrr=1), '`optimizer` cannot be used: TypeError: '),
        (lambda: run_line('{}["a key"]'), "`optimizer` cannot be used: KeyError: 'a key'"),
        (
            lambda: run_line('import absent_package', 'composer_tokacc.owner'),
            '`optimizer` cannot be used: ModuleNotFoundError: ',
        ),
        (lambda: CostModel(launch=-1.0), '`optimizer` cannot be used: `launch` must be finite'),
    ],
)
def test_error_of_part_is_one_line(raise_it, expected):
    with pytest.raises(ConfigError) as caught, building('optimizer'):
        raise_it()
    assert str(caught.value).startswith(expected)
    assert '\n' not in str(caught.value)
    assert caught.value.path == 'optimizer'
    assert caught.value.__cause__ is not None


def test_debug_level_shows_the_traceback(capsys):
    """Also of an error before the Trainer is built, which configures the log."""
    try:
        assert main([DIGITS, 'trainer.python_log_level=debug', 'optimizer.lr=-1']) == 2
    finally:
        logging.getLogger('composer_tokacc').setLevel(logging.NOTSET)
    *traceback, line = capsys.readouterr().err.splitlines()
    assert 'Traceback (most recent call last):' in traceback
    assert line == 'error: `optimizer` cannot be used: ValueError: Invalid learning rate: -1'


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (ConfigError('loader', 'must be less'), '`loader` must be less'),
        (BadSampleError('sample "7" is broken'), 'sample "7" is broken'),
        (OSError(errno.ENOSPC, 'No space left'), 'the disk must have room'),
        (NotExactError('the step is not exact'), 'the step is not exact'),
        (
            CheckpointException('read', {0: (ValueError('bad bytes'), [])}),
            'a sharded .*got: ValueError: bad bytes.*load_path.*save_folder',
        ),
        (caught_from(lambda: torch.nn.Linear(2, 2)(torch.zeros(3, 3))), 'RuntimeError: .*mat1 and mat2'),
    ],
)
def test_error_ending_a_run_is_one_line(error, message, monkeypatch, capsys):
    assert run_and_raise(error, monkeypatch) == 2
    assert re.fullmatch(f'error: {message}.*\n', capsys.readouterr().err)


@pytest.mark.parametrize('module', ['my_package.callback', 'composer_tokacc.algorithm'])
@pytest.mark.parametrize('bug', ['{}["a key"]', 'int("0.5")', 'torch.zeros(2) + torch.zeros(3)'])
def test_bug_keeps_its_traceback(bug, module, monkeypatch):
    error = caught_from(lambda: run_line(bug, module))
    with pytest.raises(type(error)):
        run_and_raise(error, monkeypatch)


def test_error_survives_pickling():
    """Ranks send errors to each other."""
    with pytest.raises(ConfigError) as caught, building('optimizer'):
        torch.optim.AdamW([torch.zeros(1)], lr=-1.0)
    for error in (caught.value, ConfigError('loader', 'must be less'), ConfigError('', 'no key')):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.path == error.path


def test_a_long_value_loses_its_middle():
    line = one_line(ConfigError('seed', f'must be less, got: {"9" * 200_000}. Do this'))
    assert len(line) < LONGEST_LINE + 50
    assert line.startswith('error: `seed` must be less')
    assert line.endswith('. Do this')


@pytest.mark.parametrize(
    ('local_rank', 'on_all_ranks', 'status', 'printed'),
    [('0', True, 2, 'error: wrong\n'), ('1', True, 0, ''), ('1', False, 2, 'error: wrong\n')],
)
def test_one_rank_prints_error_of_all(local_rank, on_all_ranks, status, printed, monkeypatch, capsys):
    monkeypatch.setenv('LOCAL_RANK', local_rank)
    assert refuse(ConfigError('', 'wrong'), on_all_ranks=on_all_ranks) == status
    assert capsys.readouterr().err == printed


class _RefusedDataset(Dataset):
    """Raises an error when a worker process reads it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize('error_class', [BadSampleError, InvalidInputError, NotExactError])
def test_refusal_of_worker_is_one_line(error_class, monkeypatch, capsys):
    dataset = _RefusedDataset(error_class('sample "a": broken'))
    error = caught_from(lambda: next(iter(DataLoader(dataset, num_workers=1))))
    assert run_and_raise(error, monkeypatch) == 2
    assert capsys.readouterr().err == 'error: sample "a": broken\n'
