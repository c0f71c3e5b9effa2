# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.checkpoints import damage, find_checkpoint_to_resume, lock_folder


def saved(path: Path, *, age: int) -> Path:
    """A checkpoint file, so many seconds old."""
    torch.save({'state': {'model': {'weight': torch.randn(64, 64)}}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def trainer_of(folder: Path, latest: Path) -> dict:
    (folder / 'latest-rank0.pt').symlink_to(latest.name)
    return {'autoresume': True, 'save_folder': str(folder), 'run_name': 'run'}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def flip_a_byte_of_the_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b'')


@pytest.mark.parametrize('break_it', [truncate, flip_a_byte_of_the_weights, empty, Path.unlink])
def test_newest_intact_checkpoint_is_taken(break_it, tmp_path):
    saved(tmp_path / 'ep0-ba2-rank0.pt', age=30)
    older = saved(tmp_path / 'ep0-ba4-rank0.pt', age=20)
    latest = saved(tmp_path / 'ep0-ba6-rank0.pt', age=10)
    trainer = trainer_of(tmp_path, latest)
    assert find_checkpoint_to_resume(trainer) == f'going on from {latest}'
    break_it(latest)
    message = find_checkpoint_to_resume(trainer)
    assert message.startswith(f'going on from {older}: {latest} is damaged (')
    assert (tmp_path / 'latest-rank0.pt').resolve() == older.resolve()


def test_no_intact_checkpoint_is_one_line(tmp_path):
    latest = saved(tmp_path / 'ep0-ba2-rank0.pt', age=0)
    trainer = trainer_of(tmp_path, latest)
    truncate(latest)
    with pytest.raises(ConfigError, match=r'no other\. Remove') as caught:
        find_checkpoint_to_resume(trainer)
    assert str(latest) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_run_that_does_not_resume(tmp_path):
    latest = saved(tmp_path / 'ep0-ba2-rank0.pt', age=0)
    trainer = trainer_of(tmp_path, latest)
    truncate(latest)
    assert find_checkpoint_to_resume({**trainer, 'autoresume': False}) == ''
    assert find_checkpoint_to_resume({**trainer, 'save_folder': 's3://bucket/run'}) == ''


def test_damaged_part_of_sharded_checkpoint(tmp_path):
    folder = tmp_path / 'ep0-ba2'
    alone = {'no_dist': True} if 'no_dist' in inspect.signature(dcp.save).parameters else {}  # from torch 2.7 on
    dcp.save({'weight': torch.randn(100)}, storage_writer=dcp.FileSystemWriter(folder), **alone)
    assert damage(folder) == ''
    (part,) = folder.glob('*.distcp')
    part.write_bytes(part.read_bytes()[:-100])
    assert damage(folder) == f'{part.name} is too short'
    (folder / '.metadata').unlink()
    assert '.metadata' in damage(folder)


def test_folder_belongs_to_one_run(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ConfigError, match='another run is writing'), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass
    with lock_folder(None), lock_folder(None):
        pass


def test_damaged_latest_checkpoint_gives_way(tmp_path):
    older = saved(tmp_path / 'ep0-ba4-rank0.pt', age=20)
    truncate(saved(tmp_path / 'latest-rank0.pt', age=10))
    trainer = {'autoresume': True, 'save_folder': str(tmp_path), 'run_name': 'run'}
    assert find_checkpoint_to_resume(trainer).startswith(f'going on from {older}')
    assert (tmp_path / 'latest-rank0.pt').resolve() == older.resolve()
