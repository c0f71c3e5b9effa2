# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs of many ranks and of several nodes, rehearsed on one machine: they train as one rank does, and go on as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from composer_tokacc.train import main
from tests.support.launch import launch_nodes, launch_program
from tests.support.programs import DIGITS, TINY_DIGITS, UNCHECKED, result_of

pytestmark = pytest.mark.slow

TINY = [setting for setting in TINY_DIGITS if not setting.startswith(('scheduler', 'trainer.max', 'trainer.eval'))]


def arguments(folder: Path, steps: int) -> list[str]:
    """Writes the YAML file of a run of the demo, and returns its path and further settings."""
    config = yaml.safe_load(Path(DIGITS).read_text())
    # Plain gradient descent, because Adam amplifies the round-off of gradients near 0.
    config['optimizer'] = {'name': 'sgd', 'lr': 0.1}
    config['scheduler'] = {'name': 'constant'}
    config['trainer'] |= {
        'max_duration': f'{steps}ba',
        'eval_interval': '2ba',
        'autoresume': True,
        'save_interval': '2ba',
        'save_folder': f'{folder}/checkpoints',
    }
    config['report']['folder'] = str(folder)
    path = folder / 'run.yaml'
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return [str(path), *TINY]


def weights_of(folder: Path) -> dict:
    """Returns the weights of the last checkpoint of a run."""
    checkpoint = torch.load(folder / 'checkpoints' / 'latest-rank0.pt', weights_only=False)
    return checkpoint['state']['model']


def assert_same_evaluation(result: dict, expected: dict) -> None:
    loss = result['eval']['LanguageCrossEntropy']
    expected_loss = expected['eval']['LanguageCrossEntropy']
    assert loss == pytest.approx(expected_loss, rel=1e-5)


# Kept for the session, because tests of other files run between the tests of two and of four ranks.
@pytest.fixture(scope='session')
def one_rank(tmp_path_factory):
    """The folders of two steps and of four, by their number."""
    folders = {}
    for steps in (2, 4):
        folder = tmp_path_factory.mktemp(f'one_{steps}')
        assert main([*arguments(folder, steps), UNCHECKED]) == 0
        folders[steps] = folder
    return folders


def train_sharded(folder, *, steps, ranks):
    """Trains, or goes on, with FSDP. Returns the result of the run."""
    fsdp = 'trainer.parallelism_config.fsdp={state_dict_type: sharded}'
    launch_program('composer_tokacc.train', *arguments(folder, steps), fsdp, ranks=ranks)
    return result_of(folder)


@pytest.fixture(scope='session')
def two_sharded_ranks(tmp_path_factory):
    """The folder of two steps, and their result."""
    folder = tmp_path_factory.mktemp('two_sharded_ranks')
    result = train_sharded(folder, steps=2, ranks=2)
    return folder, result


def test_two_nodes_train_as_one_rank(one_rank, tmp_path):
    """And one rank goes on from their checkpoint. Each node has one rank, whose local number is not its global one."""
    screens = launch_nodes(['-m', 'composer_tokacc.train', *arguments(tmp_path, 2)], nodes=2, ranks=1)
    for screen in screens:
        assert 'Traceback' not in screen
    result = result_of(tmp_path)
    expected = result_of(one_rank[2])
    assert result['samples'] == expected['samples'] == 16
    assert_same_evaluation(result, expected)
    torch.testing.assert_close(weights_of(tmp_path), weights_of(one_rank[2]), rtol=0, atol=1e-6)

    assert main([*arguments(tmp_path, 4), UNCHECKED]) == 0
    resumed = result_of(tmp_path)
    assert resumed['first_step'] == 2
    torch.testing.assert_close(weights_of(tmp_path), weights_of(one_rank[4]), rtol=0, atol=2e-6)


@pytest.mark.parametrize(('ranks', 'steps'), [(2, 2), (4, 4)])
def test_fsdp2_trains_as_one_rank(ranks, steps, one_rank, two_sharded_ranks):
    """Two ranks make two steps. Four ranks resume from their checkpoint. Some ranks have only text in a step."""
    folder, result = two_sharded_ranks
    if ranks == 4:
        result = train_sharded(folder, steps=steps, ranks=ranks)
        assert result['first_step'] == 2
    expected = result_of(one_rank[steps])
    assert result['loss']['last'] == pytest.approx(expected['loss']['last'], rel=1e-5)
    assert_same_evaluation(result, expected)
