# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which errors become one line, in whose words, and which keep their traceback."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from composer_tokacc import train
from composer_tokacc.data import BadSampleError
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.errors import in_words_of, refuse
from composer_tokacc.programs.runner import fault_of_part
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import text_model


@dataclass
class Sections:
    """As a config: two sections with a key of one name."""

    loader: dict = field(default_factory=lambda: {'num_workers': 2, 'cost': {'launch': -1}})
    dataset: dict = field(default_factory=lambda: {'num_workers': 3, 'eval': {'path': 'b'}})


@pytest.mark.parametrize(
    ('said', 'expected'),
    [
        ('`launch` must be finite, got: -1', '`loader.cost.launch` must be finite, got: -1'),
        ('`num_workers` must be less, got: 3', '`dataset.num_workers` must be less, got: 3'),
        ('`num_workers` must be less', '`loader.num_workers` must be less'),
        ('`loader` must be less', '`loader` must be less'),
        ('`path.more` must\nbe less', '`dataset.eval.path.more` must be less'),
        ('`unheard` must be less', '`unheard` must be less'),
    ],
)
def test_an_argument_is_named_as_in_the_file(said, expected):
    with pytest.raises(ConfigError) as caught, in_words_of(Sections()):
        raise_here(ValueError(said))
    assert str(caught.value) == expected


def raise_here(error):
    """As if by a line of the package."""
    exec(compile('raise error', 'owner', 'exec'), {'__name__': 'composer_tokacc.owner', 'error': error})


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
    with pytest.raises(kind) as caught, in_words_of(Sections()):
        fail()
    assert caught.type is kind


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise ValueError('a fault inside torch')

    monkeypatch.setattr(torch.nn.Module, 'train', broken)
    with pytest.raises(ValueError, match='a fault inside torch'):
        train.main([DIGITS, *TINY_DIGITS, 'dataset.eval=null'])


def test_a_forward_is_blamed_for_what_it_raises_and_not_for_a_hook_of_ours():
    config, model, ids = load_config(DIGITS, TINY_DIGITS), text_model(), torch.tensor([[3, 4]])
    with pytest.raises(IndexError) as caught:
        model(input_ids=ids + 10**6)
    assert fault_of_part(caught.value, config).startswith('`model` must take what `dataset`')
    ours = {'__name__': 'composer_tokacc.owner', 'lengthen': torch.nn.functional.pad}
    exec('def hook(*_): lengthen(None, (1, 1))', ours)
    model.model.layers[0].register_forward_pre_hook(ours['hook'])
    with pytest.raises(TypeError) as caught:
        model(input_ids=ids)
    assert fault_of_part(caught.value, config) == ''


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
