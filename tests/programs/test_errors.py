# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which errors become one line, with which key, and which keep their traceback."""

from __future__ import annotations

import pickle

import pytest
import torch
from composer.core import Callback, Event

from composer_tokacc import train
from composer_tokacc.data import BadSampleError
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, models, registry
from composer_tokacc.programs.errors import LONGEST_LINE, building, one_line, refuse, training
from tests.support.programs import DIGITS, TINY_DIGITS
from tests.support.text import text_model


def fail(source: str, module: str = 'my_package.part') -> None:
    """Runs a line in a module of that name."""
    exec(compile(source, module, 'exec'), {'__name__': module, 'torch': torch})


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


@pytest.mark.parametrize(
    ('raise_it', 'kind'),
    [
        (lambda: fail('torch.empty(2).expand(3, 3)', 'composer_tokacc.owner'), RuntimeError),
        (lambda: fail('int("no number")', 'composer_tokacc.owner'), ValueError),
        (lambda: fail('{}["a key"]', 'composer_tokacc.owner'), KeyError),
        (lambda: (_ for _ in ()).throw(BadSampleError('sample "7"')), BadSampleError),
    ],
)
def test_bugs_of_ours_keep_their_kind(raise_it, kind):
    with pytest.raises(kind) as caught, building('optimizer'):
        raise_it()
    assert caught.type is kind


def test_in_training_only_hosts_are_told_in_one_line():
    with pytest.raises(ConfigError, match=r'^`trainer`: '), training():
        torch.nn.Linear(2, 2)(torch.zeros(3, 3))
    with pytest.raises(KeyError), training():
        fail('{}["a key"]')


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        fail('int("no number")', 'composer_tokacc.owner')

    monkeypatch.setattr(models, 'set_cache', broken)
    with pytest.raises(ValueError, match='invalid literal'):
        train.main([DIGITS, *TINY_DIGITS, 'dataset.eval=null'])


def test_a_forward_is_blamed_for_what_it_raises_and_not_for_a_hook_of_ours():
    inner = text_model()
    model = models._RunModel(inner, None, use_logits=True)
    ids = torch.tensor([[3, 4]])
    with pytest.raises(IndexError):
        model({'input_ids': ids + 10**6})
    with pytest.raises(ConfigError, match=r'^`model`: IndexError: '), training():
        model({'input_ids': ids + 10**6})
    bug = 'torch.zeros(2) + torch.zeros(3)'
    inner.model.layers[0].register_forward_pre_hook(lambda *_: fail(bug, 'composer_tokacc.owner'))
    with pytest.raises(RuntimeError) as caught, training():
        model({'input_ids': ids})
    assert caught.type is RuntimeError


class Failing(Callback):
    """Stands for one of Composer's."""

    def batch_end(self, state, logger):
        raise AttributeError('no such thing')


def test_a_part_that_fails_in_an_event_is_named(monkeypatch):
    monkeypatch.setattr(Failing, '__module__', 'composer.callbacks.failing')
    monkeypatch.setattr(registry, 'class_by_name', lambda kind, name: Failing)
    callback = registry.NamedPart('callbacks', 'callbacks.failing', 'failing', {}).build()
    with pytest.raises(ConfigError, match=r'^`callbacks.failing`: AttributeError: no such thing'):
        callback.run_event(Event.BATCH_END, None, None)


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


def test_a_bad_sample_of_a_worker_process_is_one_line(capsys):
    raised = 'Caught BadSampleError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n'
    assert refuse(BadSampleError(f'{raised}composer_tokacc.data.records.BadSampleError: sample "a": broken\n')) == 2
    assert capsys.readouterr().err == 'error: sample "a": broken\n'
