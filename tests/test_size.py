# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The program on the digits run, and training at the size it suggests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_tokacc import size, train

YAML = str(Path(__file__).parents[1] / 'yamls' / 'digits.yaml')
SMALL = ['dataset.num_samples=256', 'loader.global_batch_size=32']


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def run_size(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    assert size.main([YAML, *SMALL, f'folder={tmp_path}/size', *arguments]) == 0
    assert (tmp_path / 'size' / 'size.png').exists()
    return json.loads((tmp_path / 'size' / 'size.json').read_text())


def test_digits_are_sized_and_a_smaller_device_gets_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roomy = run_size(tmp_path, 'num_ranks=2', 'device_memory_gib=8')
    printed = capsys.readouterr().out
    assert roomy['device_train_microbatch_size'] == 16
    assert roomy['yaml'].splitlines()[1] in printed
    assert 'size.json' in printed
    assert roomy['speedup']['split'] > 1
    # The second run finds length table and calibration in the cache.
    assert len(list((tmp_path / 'cache' / 'composer_tokacc' / 'memory').iterdir())) == 1
    held = sum(roomy['terms'].values())
    activations = held - roomy['terms']['parameters'] * 5  # gradients, two moments, DDP's buckets
    tight = run_size(tmp_path, 'num_ranks=2', f'device_memory_gib={(held - activations / 2) / 0.92}')
    assert len(list((tmp_path / 'cache' / 'composer_tokacc' / 'memory').iterdir())) == 1
    assert 1 <= tight['device_train_microbatch_size'] < 16
    assert tight['binds'] == 'text'


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['num_ranks=0'], '`num_ranks` must be at least 1, got: 0'),
        (
            ['num_ranks=two'],
            "`num_ranks` must be valid, got: Value 'two' of type 'str' could not be converted to Integer",
        ),
        (['num_ranks=3'], 'must be divisible by the number of ranks, got: 32 on 3 ranks'),
        (['device_memory_gib=-1'], '`microbatching.device_memory_gib` must be positive, got: -1'),
        (['device_memory_gib=0.01'], 'What would help: sharding with FSDP'),
        (['nonsense=1'], 'nonsense'),
    ],
)
def test_mistakes_are_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size.main([YAML, *SMALL, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error: ')
    assert message in error


@pytest.mark.slow
def test_training_at_the_suggested_size(tmp_path: Path) -> None:
    quick = ['trainer.max_duration=3ba', 'report.num_samples=0', 'report.picture=false', 'trainer.eval_interval=3ba']
    quick += [f'report.folder={tmp_path}/run', 'dataset.eval.num_samples=16', 'trainer.progress_bar=false']
    suggested = [f'microbatching.{setting}' for setting in ('device_train_microbatch_size=suggest',)]
    assert train.main([YAML, *SMALL, *quick, *suggested, 'microbatching.device_memory_gib=8']) == 0
    result = json.loads((tmp_path / 'run' / 'result.json').read_text())
    assert result['steps'] == 3
    assert train.main([YAML, *SMALL, *quick, *suggested, 'microbatching.device_memory_gib=0.01']) == 2


@pytest.mark.slow
def test_timed_steps_give_seconds(tmp_path: Path) -> None:
    timed = run_size(tmp_path, 'time_steps=true', 'num_ranks=1', 'device_memory_gib=8')
    assert timed['step_seconds']['stock'] > timed['step_seconds']['split'] > 0
