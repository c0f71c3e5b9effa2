# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The checkpoint folder of a run before the run starts: one run at a time, and what `autoresume` will find is whole."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist, format_name_with_dist
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.filesystem import FileSystemReader

from composer_tokacc.compat import composer_state_types
from composer_tokacc.programs.errors import ConfigError, must

_LATEST = 'latest-rank{rank}.pt'
"""Composer's default for ``save_latest_filename``."""


def checkpoint_folder(trainer: Mapping[str, Any]) -> Path | None:
    """Returns where the run's checkpoints are, if on a disk of this machine."""
    folder = trainer.get('save_folder')
    if folder is None or '://' in folder:
        return None
    return Path(format_name_with_dist(folder, str(trainer.get('run_name'))))


def latest_checkpoint(trainer: Mapping[str, Any]) -> Path | None:
    """Returns Composer's link to this rank's latest checkpoint, there or not; None without ``autoresume``."""
    folder = checkpoint_folder(trainer)
    if folder is None or not trainer.get('autoresume'):
        return None
    name = trainer.get('save_latest_filename') or _LATEST
    return folder / format_name_with_dist(name, str(trainer.get('run_name')))


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Keeps other runs out of a folder while this one goes on; the lock of a killed process is gone with it."""
    if folder is None:
        yield
        return
    lock = FileLock(folder / '.lock')
    with must('`trainer.save_folder` must be a folder that can be written', folder, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f'`trainer.save_folder` must be free, got: {folder}, into which another run is writing. Wait for it, '
                'or give this one a `trainer.run_name` and a `trainer.save_folder` of its own'
            ) from error
    try:
        yield
    finally:
        lock.release()


def keep_to_whole_checkpoint(trainer: Mapping[str, Any]) -> str:
    """Points Composer's link to the newest whole checkpoint, and returns in one line what the run goes on from.

    A process that is killed while it writes, or a full disk, leaves part of a file behind.
    """
    link = latest_checkpoint(trainer)
    if link is None or not (link.is_symlink() or link.exists()):
        return ''
    latest = link.parent / os.readlink(link) if link.is_symlink() else link
    reason = damage(latest)
    if not reason:
        return f'going on from {latest}'
    others = (path for path in latest.parent.iterdir() if path != latest and not path.is_symlink())
    # Of the same rank: checkpoints of FSDP are folders, others files that end alike.
    alike = [path for path in others if path.name.split('-')[-1] == latest.name.split('-')[-1] or path.is_dir()]
    for older in sorted(alike, key=lambda path: path.stat().st_mtime, reverse=True):
        if not damage(older):
            spare = link.with_name(f'{link.name}.new')
            spare.unlink(missing_ok=True)
            spare.symlink_to(os.path.relpath(older, link.parent))
            spare.replace(link)
            return f'going on from {older}: {latest} is damaged ({reason})'
    raise ConfigError(
        f'`trainer.save_folder` must hold a whole checkpoint to go on from, got: {latest}, damaged ({reason}), and no '
        'other. Remove the folder to start anew, or give `trainer.load_path` with `trainer.autoresume=false`'
    )


def resume_on_shared_folder(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of the Trainer for nodes that share the checkpoint folder; none where ``autoresume`` will do.

    With that each node removes the same file of the folder, of which all nodes but one die.
    """
    link = latest_checkpoint(trainer)
    if link is None or dist.get_world_size() == dist.get_local_world_size():
        return {}
    latest = dist.all_gather_object(os.path.abspath(link))[0]  # of rank 0 for all, as Composer has it
    found = dist.all_gather_object(os.path.exists(latest))
    if any(found) and not all(found):  # each node has a folder of its own
        return {}
    whole = {'load_path': latest, 'load_weights_only': False, 'load_strict_model_weights': True}
    return {'autoresume': False, **(whole if all(found) else {})}


def damage(path: Path) -> str:
    """Returns why a checkpoint file, or the folder of a sharded one, cannot be loaded; empty if nothing is wrong."""
    try:
        if path.is_dir():
            parts = FileSystemReader(path).read_metadata().storage_data or {}
            ends: dict[str, int] = {}
            for part in parts.values():
                ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
            short = [name for name, end in ends.items() if (path / name).stat().st_size < end]
            return f'{short[0]} is too short' if short else ''
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # reads it once, which a disk does faster than what follows
        return f'{broken} is not what was written' if broken else ''
    except Exception as error:  # whatever reading the pickled index of a damaged folder may raise
        return ' '.join(str(error).split()) or type(error).__name__


def check_checkpoint(what: str, path: Path) -> None:
    """Refuses what is no checkpoint by its kind: another folder, a pipe, a text."""
    is_compressed = path.suffix not in ('', '.pt', '.pth')  # which Composer takes apart
    if path.is_dir() and not (path / '.metadata').exists():
        found = 'a folder without `.metadata`. Name the folder of one step, such as checkpoints/ep1-ba100'
    elif not path.exists():
        found = 'which is not there'
    elif not path.is_dir() and (not path.is_file() or not (is_compressed or zipfile.is_zipfile(path))):
        found = 'which is neither whole nor written by Composer'
    else:
        return
    raise ConfigError(f'{what} must be a checkpoint file, or the folder of a sharded one, got: {path}, {found}')


def read_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Loads a checkpoint file without running code that it may hold.

    Raises:
        pickle.UnpicklingError: If it holds more than tensors, plain values and what ``compat`` lists.
    """
    with torch.serialization.safe_globals(composer_state_types()):
        return torch.load(path, map_location='cpu', mmap=mmap, weights_only=True)


def remember_unused_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer's checkpoints name parameters that never had a gradient: torch stops at one that it lacks."""

    def complete(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        for group in state['param_groups']:
            for index in group['params']:
                state['state'].setdefault(index, {})
        return state

    optimizer.register_state_dict_post_hook(complete)
