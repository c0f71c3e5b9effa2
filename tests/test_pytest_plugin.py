# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fixture ``token_exact``, in tests of others."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser

from tests.support.launch import ROOT

pytest_plugins = 'pytester'

LOOPS = """
import pytest, torch

ROWS = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]])

def step(model, weights):
    for ids, weight in zip(ROWS, weights):
        loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        (loss * weight).backward()

@pytest.mark.parametrize('weights', [(4 / 5, 1 / 5), (1 / 2, 1 / 2)], ids=['tokens', 'means'])
def test_loop(token_exact, weights):
    model = torch.nn.Embedding(9, 9)
    with token_exact(model):
        step(model, weights)

def test_one_token_counts_twice(token_exact):
    model = torch.nn.Embedding(9, 9)
    with token_exact(model):
        losses = torch.nn.functional.cross_entropy(model(ROWS[0])[0, :-1], ROWS[0][0, 1:], reduction='none')
        (losses * torch.tensor([1, 1, 2, 1])).mean().backward()
"""


def test_the_fixture_passes_exact_steps_and_names_the_tokens_of_others(pytester):
    pytester.makepyfile(LOOPS)
    plugins = ('no:composer_tokacc', 'composer_tokacc.pytest_plugin', 'no:cacheprovider')  # installed with it or before
    done = pytester.runpytest_inprocess(*(word for plugin in plugins for word in ('-p', plugin)))
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines([
        '*got: the heaviest weighs 4.0000 times the lightest.',
        'backward 2: all of 1 tokens with loss: 4 times the median',
        'Divide by the loss tokens*',
        '*got: the heaviest weighs 2.0000 times the lightest.',
        'backward 1: number 3 of 4 tokens with loss: 2 times the median',
    ])  # fmt: skip


def test_pytest_finds_it_and_loads_nothing_for_it():
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    [line] = setup['options.entry_points']['pytest11'].split('\n')[1:]
    module = line.split(' = ')[1]
    code = f'import sys, {module}; assert {module}.token_exact; assert not {{"torch", "composer"}} & set(sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
