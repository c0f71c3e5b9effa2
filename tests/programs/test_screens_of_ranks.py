# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The screen of two ranks under the real launcher, if one of them fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.launch import FORKING_LAUNCHER, ROOT, environment
from tests.support.loaded import kill_loaded, start_loaded
from tests.support.programs import DIGITS, TINY_DIGITS, UNCHECKED

pytestmark = pytest.mark.slow

ENDED_BY_LAUNCHER = 143
"""The launcher returns the status of the first rank. If it ended that rank by SIGTERM (15), this is 128 + 15."""


def screen(folder: Path, ending: str, *overrides: str, **arguments: Any) -> tuple[int, list[str]]:
    """Runs two ranks with a callback of ``tests.support.killer``. Returns the status and the lines of the screen.

    Lines that are empty are left out. A rank that does not react to SIGTERM is killed as soon as the launcher
    waits for it, which would take 30 seconds.
    """
    config = yaml.safe_load(Path(DIGITS).read_text())
    config['callbacks'][f'tests.support.killer.{ending}'] = {'batch': 1, **arguments}
    path = folder / 'run.yaml'
    path.write_text(yaml.safe_dump(config))
    settings = [*TINY_DIGITS, UNCHECKED, 'dataset.eval=null', f'report.folder={folder}', *overrides]
    # A pipe, so that a line can be read as soon as it is written.
    pipe = folder / 'screen'
    os.mkfifo(pipe)
    process = start_loaded(
        [*FORKING_LAUNCHER, '-n', '2', '-m', 'composer_tokacc.train', str(path), *settings],
        folder=ROOT,
        environment=environment(),
        stdout=pipe,
        stderr=pipe,
    )
    lines = []
    try:
        with pipe.open() as output:
            for line in output:
                if line.startswith('Waiting up to'):
                    kill_stopped_ranks(process.pid)
                if line.strip():
                    lines.append(line.rstrip('\n'))
        process.join(60)
    finally:
        kill_loaded(process)
    return process.exitcode, lines


def kill_stopped_ranks(launcher: int) -> None:
    """Ends the ranks that :class:`tests.support.killer.StopRank` has stopped."""
    for rank in psutil.Process(launcher).children():
        if rank.status() == psutil.STATUS_STOPPED:
            rank.kill()


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith('error: ')]


def test_bad_sample_on_another_rank(tmp_path):
    status, lines = screen(tmp_path, 'FailOnRank', rank=1, bad_sample=True)
    assert status in (2, ENDED_BY_LAUNCHER)
    assert 'Traceback' not in '\n'.join(lines)
    assert errors(lines) == ['error: sample "s7" cannot be read']


def test_bug_on_another_rank(tmp_path):
    status, lines = screen(tmp_path, 'FailOnRank', rank=1, bad_sample=False)
    assert status in (1, ENDED_BY_LAUNCHER)
    tracebacks = [line for line in lines if 'Traceback' in line]
    assert len(tracebacks) == 1
    # Torch begins each line with the rank.
    error_lines = [line for line in lines if line.endswith("KeyError: 'a bug of ours'")]
    assert len(error_lines) == 1


def test_hanging_rank_is_reported_after_timeout(tmp_path):
    status, lines = screen(tmp_path, 'StopRank', 'trainer.dist_timeout=10', rank=1)
    assert status == 2
    (line,) = errors(lines)
    assert 'did not answer within `trainer.dist_timeout`' in line
