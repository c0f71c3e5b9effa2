# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which errors become one line, in whose words, and which keep their traceback."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import train
from composer_tokacc.data import BadSampleError
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.schema import refuse, section
from tests.support.programs import DIGITS, TINY_DIGITS


def test_an_argument_is_named_as_in_the_file():
    said = r'^`microbatching\.cost\.launch` must be finite and not negative, got: -1'
    with pytest.raises(ConfigError, match=said), section('microbatching.cost', ['launch']):
        CostModel(launch=-1)
    with pytest.raises(ConfigError, match=r'^`loader`: `launch` must be'), section('loader', ['num_workers']):
        CostModel(launch=-1)


@pytest.mark.parametrize(
    ('fail', 'kind'),
    [
        (lambda: torch.empty(2).expand(3, 3), RuntimeError),
        (lambda: torch.tensor([[1], [2, 3]]), ValueError),
        (lambda: int('no number'), ValueError),
        (lambda: (_ for _ in ()).throw(BadSampleError('sample "7"')), BadSampleError),
        (lambda: CostModel(lunch=-1), TypeError),  # pyright: ignore[reportCallIssue]
    ],
)
def test_errors_of_others_keep_their_kind(fail, kind):
    with pytest.raises(kind) as caught, section('dataset'):
        fail()
    assert caught.type is kind


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise ValueError('a fault inside torch')

    monkeypatch.setattr(torch.nn.Module, 'train', broken)
    with pytest.raises(ValueError, match='a fault inside torch'):
        train.main([DIGITS, *TINY_DIGITS, 'dataset.eval=null'])


def test_one_rank_of_a_node_speaks_where_all_meet_the_mistake(monkeypatch, capsys):
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert refuse(ConfigError('wrong'), on_all_ranks=True) == 0
    assert capsys.readouterr().err == ''
    assert refuse(ConfigError('wrong')) == 2
    assert capsys.readouterr().err == 'error: wrong\n'
    monkeypatch.setenv('LOCAL_RANK', '0')
    assert refuse(ConfigError('wrong'), on_all_ranks=True) == 2
    assert capsys.readouterr().err == 'error: wrong\n'


def test_a_bad_sample_of_a_worker_process_is_one_line(capsys):
    raised = 'Caught BadSampleError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n'
    assert refuse(BadSampleError(f'{raised}composer_tokacc.data.records.BadSampleError: sample "a": broken\n')) == 2
    assert capsys.readouterr().err == 'error: sample "a": broken\n'
