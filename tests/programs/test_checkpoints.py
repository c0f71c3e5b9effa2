# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import fcntl
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from composer import Trainer
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.utils import dist

from composer_tokacc.programs import ConfigError
from composer_tokacc.programs.checkpoints import arguments_to_resume, find_damage, lock_folders, reading_checkpoint
from composer_tokacc.train import main
from tests.support.launch import launch_json
from tests.support.programs import DIGITS, TINY_DIGITS


def save_weights(path: Path) -> Path:
    """Writes a file that no run can go on from."""
    torch.save({'state': {'model': {'weight': torch.randn(64, 64)}}}, path)
    return path


def save_run(path: Path, *, steps: int, run_name: str = 'run') -> Path:
    """Writes a checkpoint that a run can go on from: a file, or a folder if the name has no ending."""
    state = {
        'model': {'weight': torch.randn(64, 64)},
        'optimizers': {'SGD': {'param_groups': {'lr': 0.1}}},
        'timestamp': {'Timestamp': {'batch': steps}},
        'run_name': run_name,
    }
    if path.suffix:
        torch.save({'state': state}, path)
    else:
        save_sharded_checkpoint(path, {'state': state})
    return path


def link_latest(path: Path) -> None:
    path.with_name('latest-rank0.pt').symlink_to(path.name)


def resume_from(folder: Path, **options) -> str | None:
    """Returns the checkpoint that a run goes on from, if it searches for one in the folder."""
    trainer = {'autoresume': True, 'save_folder': str(folder), 'run_name': 'run', **options}
    return arguments_to_resume(trainer).get('load_path')


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-500])


def flip_a_byte_of_the_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b'')


@pytest.mark.parametrize('damage_file', [truncate, flip_a_byte_of_the_weights, empty, Path.unlink])
def test_newest_intact_checkpoint_is_taken(damage_file, tmp_path, capsys):
    save_run(tmp_path / 'ep0-ba2-rank0.pt', steps=2)
    older = save_run(tmp_path / 'ep0-ba4-rank0.pt', steps=4)
    latest = save_run(tmp_path / 'ep0-ba6-rank0.pt', steps=6)
    save_run(tmp_path / 'ep0-ba8-rank0.pt', steps=8, run_name='other')
    link_latest(latest)
    assert resume_from(tmp_path) == str(latest)

    damage_file(latest)

    assert resume_from(tmp_path) == str(older)
    assert f'{latest} is damaged (' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['ba{}.pt', 'rank0-ba{}.pt', 'ep0-ba{}-rank0-run.pt', 'run.ba{}'])
def test_names_of_other_forms(name, tmp_path):
    """`save_filename` may name the rank anywhere, or not at all. Files of other programs are left out."""
    save_weights(tmp_path / 'weights.zip')
    (tmp_path / '.lock').touch()
    os.mkfifo(tmp_path / 'pipe')
    older = save_run(tmp_path / name.format(4), steps=4)
    latest = save_run(tmp_path / name.format(6), steps=6)
    link_latest(latest)
    truncate(latest)
    assert resume_from(tmp_path) == str(older)
    (tmp_path / 'latest-rank0.pt').unlink()
    assert resume_from(tmp_path) == str(older)


@pytest.mark.parametrize('name', ['ep0-ba{}-rank0.pt', 'ep0-ba{}'])
def test_copy_without_the_link_is_resumed(name, tmp_path):
    """If the run began again, it would overwrite the checkpoints. The copy has other times."""
    save_weights(tmp_path / 'weights.pt')
    assert resume_from(tmp_path) is None
    latest = save_run(tmp_path / name.format(10), steps=10)
    older = save_run(tmp_path / name.format(9), steps=9)
    for checkpoint, time in (latest, 1e9), (older, 2e9):
        os.utime(checkpoint, (time, time))
    save_run(tmp_path / name.format(11), steps=11, run_name='other')
    assert resume_from(tmp_path) == str(latest)
    assert resume_from(tmp_path, run_name='new') is None
    if latest.is_file():
        truncate(latest)
    else:
        (latest / '.metadata').unlink()  # torch writes it last
    assert resume_from(tmp_path) == str(older)


def test_damaged_latest_file_is_replaced(tmp_path):
    """A copy of a folder may hold a file in place of the link."""
    older = save_run(tmp_path / 'ep0-ba4-rank0.pt', steps=4)
    latest = save_run(tmp_path / 'latest-rank0.pt', steps=6)
    truncate(latest)
    assert resume_from(tmp_path) == str(older)


def test_folder_in_place_of_the_link_is_refused(tmp_path):
    """As in a copy that followed links. Composer would fail when it saves the next checkpoint."""
    save_sharded_checkpoint(tmp_path / 'latest-rank0.pt')
    with pytest.raises(ConfigError, match=r'must have a link to its latest checkpoint, got: .*, a folder'):
        resume_from(tmp_path)


@pytest.fixture
def only_damaged(tmp_path):
    """The only checkpoint of a folder, which is damaged."""
    path = save_weights(tmp_path / 'ep0-ba2-rank0.pt')
    link_latest(path)
    truncate(path)
    return path


def test_no_intact_checkpoint_is_one_line(only_damaged):
    """Only the link is removed, because the folder may hold checkpoints of other runs."""
    with pytest.raises(ConfigError, match=r'no other of the run run .*Remove \S*/latest-rank0\.pt to') as caught:
        resume_from(only_damaged.parent)
    assert str(only_damaged) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_latest_checkpoint_whose_folder_is_gone(tmp_path):
    (tmp_path / 'latest-rank0.pt').symlink_to('ep1/ba2.pt')
    with pytest.raises(ConfigError, match=r'ep1/ba2\.pt.*no other'):
        resume_from(tmp_path)


def test_latest_checkpoint_that_the_system_refuses(tmp_path):
    """As with a lost network folder, no status of the file behind the link can be read. Here its name is too long."""
    older = save_run(tmp_path / 'ep0-ba2-rank0.pt', steps=2)
    (tmp_path / 'latest-rank0.pt').symlink_to('x' * 300)
    assert resume_from(tmp_path) == str(older)


@pytest.mark.parametrize('options', [{'autoresume': False}, {'save_folder': 's3://bucket/run'}])
def test_runs_that_search_no_checkpoint(options, only_damaged):
    assert resume_from(only_damaged.parent, **options) is None


def test_folders_of_nodes_need_a_link(tmp_path, monkeypatch):
    """Composer, which broadcasts the checkpoint to nodes without it, would begin at step 0 without the link."""

    def gather(value):
        value_of_other_node = False if value is True else value
        return [value, value_of_other_node]

    monkeypatch.setattr(dist, 'all_gather_object', gather)
    trainer = {'autoresume': True, 'save_folder': str(tmp_path), 'run_name': 'run'}
    checkpoint = save_run(tmp_path / 'ep0-ba2-rank0.pt', steps=2)
    with pytest.raises(ConfigError, match=f'ln -sfn {checkpoint} {tmp_path}/latest-rank0.pt'):
        arguments_to_resume(trainer)
    link_latest(checkpoint)
    assert arguments_to_resume(trainer) == {}


def test_run_without_a_checkpoint_is_new(tmp_path):
    trainer = {'autoresume': True, 'save_folder': str(tmp_path), 'run_name': 'run'}
    assert arguments_to_resume(trainer) == {'autoresume': False}


class UploadingLogger(LoggerDestination):
    def can_upload_files(self) -> bool:
        return True


def test_composer_searches_loggers_for_a_checkpoint(tmp_path):
    """On a new machine the folder is empty. Composer's `autoresume` downloads the latest checkpoint from a logger."""
    trainer = {'autoresume': True, 'save_folder': str(tmp_path), 'run_name': 'run'}
    assert arguments_to_resume(trainer, [InMemoryLogger(), UploadingLogger()]) == {}
    assert arguments_to_resume(trainer, [InMemoryLogger()]) == {'autoresume': False}

    latest = save_weights(tmp_path / 'ep0-ba4-rank0.pt')
    link_latest(latest)
    assert arguments_to_resume(trainer, [UploadingLogger()])['load_path'] == str(latest)


@pytest.mark.parametrize('variable', ['COMPOSER_RUN_NAME', 'RUN_NAME'])
def test_run_name_of_environment(variable, tmp_path, monkeypatch):
    older = save_run(tmp_path / 'ep0-ba4-rank0.pt', steps=4, run_name='mine')
    latest = save_run(tmp_path / 'ep0-ba6-rank0.pt', steps=6, run_name='mine')
    (tmp_path / 'latest-mine.pt').symlink_to(latest.name)
    truncate(latest)
    options = {'run_name': None, 'save_latest_filename': 'latest-{run_name}.pt'}
    assert resume_from(tmp_path, **options) is None  # Composer refuses `autoresume` without a name
    monkeypatch.setenv(variable, 'mine')
    assert resume_from(tmp_path, **options) == str(older)


def save_sharded_checkpoint(folder: Path, content: dict[str, Any] | None = None) -> None:
    """Writes the folder of a checkpoint with one part. Default: of one weight."""
    options = {}
    if 'no_dist' in inspect.signature(dcp.save).parameters:  # from torch 2.7 on
        options['no_dist'] = True
    writer = dcp.FileSystemWriter(folder)
    dcp.save(content or {'weight': torch.randn(100)}, storage_writer=writer, **options)


def test_damaged_part_of_sharded_checkpoint(tmp_path):
    folder = tmp_path / 'ep0-ba2'
    save_sharded_checkpoint(folder)
    assert find_damage(folder) == ''

    (part,) = folder.glob('*.distcp')
    content = part.read_bytes()
    part.write_bytes(content[:-100])
    assert find_damage(folder) == f'{part.name} is too short'

    (folder / '.metadata').unlink()
    assert '.metadata' in find_damage(folder)


def test_full_disk_is_not_a_damaged_checkpoint(tmp_path):
    """A sharded checkpoint is first written as one file."""
    with pytest.raises(ConfigError, match='the disk must have room'), reading_checkpoint(tmp_path):
        raise RuntimeError('[enforce fail at inline_container.cc:659] . unexpected pos 704 vs 598')


def test_folder_belongs_to_one_run(tmp_path):
    folders = {'trainer.save_folder': tmp_path, 'report.folder': tmp_path}
    of_report = {'trainer.save_folder': None, 'report.folder': tmp_path}
    with lock_folders(folders), pytest.raises(ConfigError, match=r'^`report.folder` .* another run'):
        lock_folders(of_report).__enter__()
    with lock_folders(of_report):
        pass
    with lock_folders({}), lock_folders({'trainer.save_folder': None}):  # runs without a folder
        pass


@pytest.mark.parametrize(
    ('number', 'is_refused'),
    [(errno.ENOLCK, False), (errno.EPERM, True), (errno.EROFS, True), (errno.ENOSPC, True)],
)
def test_file_system_without_locks(number, is_refused, tmp_path, monkeypatch, capsys):
    """A run must not begin if its folder cannot be written, or if another user's run may have locked it."""
    error = OSError(number, 'cannot lock')

    def refuse(*_):
        raise error

    monkeypatch.setattr(fcntl, 'flock', refuse)
    if is_refused:
        with pytest.raises(OSError, match='cannot lock'):
            lock_folders({'report.folder': tmp_path}).__enter__()
        return
    with lock_folders({'report.folder': tmp_path}):
        pass
    assert 'cannot lock' in capsys.readouterr().err


def test_report_folder_belongs_to_one_run(tmp_path, capsys):
    """Without checkpoints, too: the metrics of both runs would be in one file."""
    command = [DIGITS, *TINY_DIGITS, f'report.folder={tmp_path}/{{run_name}}', 'trainer.run_name=mine']
    with lock_folders({'report.folder': tmp_path / 'mine'}):
        assert main(command) == 2
    assert '`report.folder` must be free, got: ' in capsys.readouterr().err


@pytest.mark.slow
def test_shared_folder_resumes_whole_state(tmp_path):
    """Arguments for another `load_path` must not leave parts of the run's own checkpoint unread."""
    latest = save_weights(tmp_path / 'latest-rank0.pt')
    first_rank, second_rank = launch_json('tests/ranks/shared_folder.py', str(tmp_path), ranks=2)
    assert first_rank == second_rank
    arguments = json.loads(first_rank)
    assert arguments.pop('load_path') == str(latest)
    assert arguments.keys() >= {'load_ignore_keys', 'load_exclude_algorithms', 'load_weights_only'}
    parameters = inspect.signature(Trainer).parameters
    for name, argument in arguments.items():
        assert argument == parameters[name].default, name


@pytest.mark.slow
def test_ranks_resume_a_sharded_copy_without_link(tmp_path):
    """Only the first rank reads the checkpoints. It must not wait for the others."""
    checkpoint = save_run(tmp_path / 'ep0-ba2', steps=2)
    first_rank, second_rank = launch_json('tests/ranks/shared_folder.py', str(tmp_path), ranks=2)
    assert first_rank == second_rank
    assert json.loads(first_rank)['load_path'] == str(checkpoint)
