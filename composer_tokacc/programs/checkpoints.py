# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: one run at a time writes to a folder, and only a complete one of the same model and data is resumed."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, format_name_with_dist, partial_format
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from composer_tokacc.cache import whole_file
from composer_tokacc.compat import composer_state_types
from composer_tokacc.data import identify_data, identify_processor, identify_vocabulary
from composer_tokacc.programs.errors import ConfigError, building, shorten
from composer_tokacc.programs.host_types import Processor, Section
from composer_tokacc.programs.schema import check_value

log = logging.getLogger(__name__)


def checkpoint_folder(trainer: Section) -> Path | None:
    """Returns the folder of the run's checkpoints, if it is on a disk of this machine."""
    folder = trainer.get('save_folder')
    if folder is None or '://' in folder:
        return None
    return Path(format_name_with_dist(folder, str(trainer.get('run_name'))))


def latest_checkpoint(trainer: Section) -> Path | None:
    """Returns Composer's link to this rank's latest checkpoint. It may not exist yet. None without ``autoresume``."""
    folder = checkpoint_folder(trainer)
    if folder is None or not trainer.get('autoresume'):
        return None
    name = trainer.get('save_latest_filename') or 'latest-rank{rank}.pt'  # Composer's default
    return folder / format_name_with_dist(name, str(trainer.get('run_name')))


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Keeps other runs out of a folder in this block. The system drops the lock of a killed process. None: no lock."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        acquired = FileLock(folder / '.lock').acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            'trainer.save_folder',
            f'must be free, got: {folder}, into which another run is writing. Wait for it, or give this one a '
            '`trainer.run_name` and a `trainer.save_folder` of its own',
        ) from error
    with acquired:
        yield


def find_checkpoint_to_resume(trainer: Section) -> str:
    """Points Composer's link to the newest complete checkpoint. Returns a line that names it, or an empty text.

    Composer itself would load the latest one, which is incomplete if the process was killed or the disk was full.
    """
    link = latest_checkpoint(trainer)
    if link is None or not (link.is_symlink() or link.exists()):
        return ''
    latest = link.parent / os.readlink(link) if link.is_symlink() else link
    reason = damage(latest)
    if not reason:
        return f'going on from {latest}'
    for older in _older_checkpoints(latest):
        if not damage(older):
            with whole_file(link) as new_link:
                new_link.symlink_to(os.path.relpath(older, link.parent))
            return f'going on from {older}: {latest} is damaged ({reason})'
    raise ConfigError(
        'trainer.save_folder',
        f'must hold a complete checkpoint to go on from, got: {latest}, damaged ({reason}), and no other. Remove the '
        'folder to start from the beginning, or give `trainer.load_path` with `trainer.autoresume=false`',
    )


def _older_checkpoints(latest: Path) -> list[Path]:
    """Returns the other checkpoints of the same rank, newest first."""
    checkpoints = []
    ending = latest.name.split('-')[-1]  # rank0.pt
    for path in latest.parent.iterdir():
        # A checkpoint of FSDP is a folder for all ranks.
        is_of_this_rank = path.is_dir() or path.name.split('-')[-1] == ending
        if path != latest and not path.is_symlink() and is_of_this_rank:
            checkpoints.append(path)
    return sorted(checkpoints, key=lambda path: path.stat().st_mtime, reverse=True)


def resume_on_shared_folder(trainer: Section) -> dict[str, Any]:
    """Returns arguments of the Trainer that replace ``autoresume`` if nodes share the checkpoint folder.

    With ``autoresume`` every node removes the same file from the folder. The first one succeeds, the others crash.
    """
    link = latest_checkpoint(trainer)
    if link is None or dist.get_world_size() == dist.get_local_world_size():
        return {}
    latest = dist.all_gather_object(os.path.abspath(link))[0]  # all ranks load the one of rank 0, as Composer does
    is_there = dist.all_gather_object(os.path.exists(latest))
    if all(is_there):
        return {
            'autoresume': False,
            'load_path': latest,
            'load_weights_only': False,
            'load_strict_model_weights': True,
        }
    if any(is_there):  # each node has its own folder, so `autoresume` works
        return {}
    return {'autoresume': False}  # no checkpoint yet: a fresh run


def damage(path: Path) -> str:
    """Returns why a checkpoint file, or the folder of a sharded one, cannot be loaded; empty if nothing is wrong."""
    try:
        if path.is_dir():
            return _damage_of_folder(path)
        with zipfile.ZipFile(path) as archive:
            # Reads the file once. Loading it takes longer than that.
            broken = archive.testzip()
        return f'{broken} is not what was written' if broken else ''
    except Exception as error:  # reading the pickled index of a damaged folder may raise anything
        return shorten(error, 300) or type(error).__name__


def _damage_of_folder(path: Path) -> str:
    storage = FileSystemReader(path).read_metadata().storage_data or {}
    for part in storage.values():
        num_bytes = (path / part.relative_path).stat().st_size
        if num_bytes < part.offset + part.length:
            return f'{part.relative_path} is too short'
    return ''


def check_checkpoint(key: str, path: Path) -> None:
    """Refuses a path that cannot be a checkpoint: another folder, a pipe, a text. ``key`` names it in the error."""
    reason = ''
    if os.path.isdir(path):
        details = damage(path)
        if details:
            reason = f'damaged ({details})'
    elif not os.path.isfile(path):
        reason = 'which is not there, or may not be read'
    elif not zipfile.is_zipfile(path):
        reason = 'which is compressed, incomplete or not written by Composer'
    if reason:
        raise ConfigError(
            key,
            'must be a checkpoint file, or the folder of one step of a sharded run, such as checkpoints/ep1-ba100, '
            f'got: {path}, {reason}',
        )


@contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """Turns any error while a checkpoint is read into one line, because a file of another program may hold anything."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        reason = str(error).partition('. ')[0]  # torch goes on to say how code in the file could be run
        raise ConfigError(
            '',
            'the checkpoint must be complete and written by Composer for a HuggingFaceModel, and hold only tensors and '
            f'plain values, got: {path} ({type(error).__name__}: {shorten(reason)})',
        ) from error


def read_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Returns the state in a checkpoint file without running code that it may hold.

    Raises:
        ConfigError: If another program wrote it, or it holds objects of classes that ``compat`` does not list.
    """
    with reading_checkpoint(path), torch.serialization.safe_globals(composer_state_types()):
        return dict(torch.load(path, map_location='cpu', mmap=mmap, weights_only=True)['state'])


def remember_unused_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that never had a gradient an empty state, because torch cannot load checkpoints that lack it."""

    def complete(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        for group in state['param_groups']:
            for index in group['params']:
                state['state'].setdefault(index, {})
        return state

    optimizer.register_state_dict_post_hook(complete)


Shape = tuple[int | str, ...]
"""Sizes of a weight. If it holds integers, ``'not of floats'`` is added, so that it differs from a weight of floats.
Torch would load one as the other without an error."""


def _shape(sizes: Sequence[int], dtype: torch.dtype) -> Shape:
    if dtype.is_floating_point:
        return tuple(sizes)
    return (*sizes, 'not of floats')


def _shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of the tensors among the weights, by name."""
    shapes = {}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            shapes[name] = _shape(value.shape, value.dtype)
    return shapes


@dataclass(frozen=True)
class SavedRun:
    """The part of a checkpoint that is compared with the run."""

    path: Path
    fingerprints: str
    """JSON that :class:`SameData` saved; empty if it saved nothing."""
    shapes: dict[str, Shape]
    """Shapes of the model's weights, by name."""
    optimizers: list[str]
    """Class names of the optimizers that have a state."""

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Reads a checkpoint file, or the folder of a sharded one, without its weights."""
        with reading_checkpoint(path):
            return cls._read_folder(path) if path.is_dir() else cls._read_file(path)

    @classmethod
    def _read_folder(cls, path: Path) -> SavedRun:
        # Torch fills in the entries that this mapping has, and reads no others.
        callbacks = {SameData.__qualname__: {'fingerprints': ''}}
        saved: dict[str, Any] = {'state': {'callbacks': callbacks}}
        load(saved, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        entries: Section = FileSystemReader(path).read_metadata().state_dict_metadata
        shapes = {}
        optimizers = set()
        for key, entry in entries.items():
            if key.startswith('state.model.') and isinstance(entry, TensorStorageMetadata):
                name = key.removeprefix('state.model.')
                shapes[name] = _shape(entry.size, entry.properties.dtype)
            elif key.startswith('state.optimizers.'):
                optimizers.add(key.split('.')[2])
        fingerprints = _fingerprints_of(saved['state'])
        return cls(path, fingerprints, shapes, sorted(optimizers))

    @classmethod
    def _read_file(cls, path: Path) -> SavedRun:
        state = read_state(path, mmap=True)  # mapped: the weights stay on the disk
        shapes = _shapes_of(state.get('model') or {})
        # A state without its timestamp counts as none, because Composer would use it from step 0.
        optimizers: dict[str, Any] = {}
        if dict(state.get('timestamp') or {}):
            optimizers = dict(state.get('optimizers') or {})
        return cls(path, _fingerprints_of(state), shapes, sorted(optimizers))


def _fingerprints_of(state: Section) -> str:
    """Returns the JSON that :class:`SameData` saved; empty if it saved nothing."""
    callbacks = dict(state.get('callbacks') or {})
    return (callbacks.get(SameData.__qualname__) or {}).get('fingerprints', '')


SPEED_SETTINGS = ('foreach', 'fused', 'capturable', 'differentiable')
"""Settings of an optimizer that do not change its result. A resumed run may have other ones."""


class SameData(Callback):
    """Refuses to resume with another model, data, order, processor, vocabulary, adapter or optimizer, on all ranks.

    Names and shapes of the model's weights are compared. The others are compared with fingerprints in the checkpoint,
    unless only weights are loaded. The number of ranks and everything that cuts batches may change.

    Args:
        dataset: The training set.
        processor: Its processor or tokenizer.
        adapter: See :func:`.identify_adapter`.
        optimizer: Settings of the optimizer by name. They are compared, because Composer would replace them in silence
            by the ones of the checkpoint.
        model: The model before the Trainer wraps it. None: no weights are compared.
        trainer: Arguments of the Trainer, which name the checkpoint.
        on_other_data: ``'raise'``, or ``'warn'`` to go on.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Processor,
        *,
        adapter: Section,
        optimizer: Section | None = None,
        model: torch.nn.Module | None = None,
        trainer: Section,
        on_other_data: str = 'raise',
    ) -> None:
        self.model = model
        self.trainer = trainer
        self.on_other_data = on_other_data
        self._shapes = {} if model is None else _shapes_of(model.state_dict())  # before FSDP divides them
        size = getattr(dataset, 'size', None)  # StreamingDataset's length counts one rank
        num_samples = size if isinstance(size, int) else len(dataset)
        self._fingerprints = {
            'data': f'{identify_data(dataset)} of {num_samples} samples',
            'processor': identify_processor(processor),
            'vocabulary': identify_vocabulary(processor),
            **adapter,
        }
        if hasattr(dataset, 'identity_of_order'):  # a sampler has a state, which it compares itself
            self._fingerprints['order'] = dataset.identity_of_order()
        for name, value in (optimizer or {}).items():
            if name not in SPEED_SETTINGS:
                # Through JSON and back, as a checkpoint has it: tuples become lists.
                as_json = json.dumps(value, default=str)
                self._fingerprints[f'optimizer.{name}'] = json.loads(as_json)
        self._is_loading = False
        """Whether a checkpoint is being loaded. Composer then calls :meth:`state_dict` to learn its entries."""
        self._is_compared = False
        """Whether :meth:`before_load` has read the checkpoint, so that :meth:`load_state_dict` compares nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the fingerprints as one string; nothing while a sharded checkpoint is loaded."""
        return {} if self._is_loading else {'fingerprints': json.dumps(self._fingerprints)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares the fingerprints if :meth:`before_load` could not read the checkpoint, as in an object store."""
        if not self._is_compared:
            self._compare_fingerprints(state.get('fingerprints', ''))

    def before_load(self, state: State, logger: Logger) -> None:
        """Compares before Composer loads, because Composer's error would only say which shapes do not fit."""
        self._is_loading = True
        path, weights_only = _checkpoint_to_load(self.trainer, state.run_name)
        if path is None:
            return
        saved = SavedRun.read(path)
        self._is_compared = True
        if not weights_only:
            self._compare_fingerprints(saved.fingerprints)
        if self.model is None or self.trainer.get('load_ignore_keys'):
            return
        # FSDP has divided the weights by now, so their earlier shapes are compared. Without FSDP the present ones are,
        # because algorithms may have changed the model since __init__().
        shapes = self._shapes if state.fsdp_enabled else _shapes_of(self.model.state_dict())
        is_strict = not weights_only or bool(self.trainer.get('load_strict_model_weights', True))
        required: list[str] = []
        if is_strict:
            # named_parameters() has tied weights, such as head and embeddings, only once. One of their names will do.
            required = [name for name, _ in self.model.named_parameters() if name in shapes]
        _compare_shapes(saved, shapes, required, is_strict=is_strict)
        optimizer = type(state.optimizers[0]).__qualname__
        if not weights_only and optimizer not in saved.optimizers:  # Composer would start with a new optimizer
            raise ConfigError(
                '',
                f'the checkpoint must hold timestamp and the state of the optimizer {optimizer} to go on from, got: '
                f'{path} with {saved.optimizers}. Set `trainer.load_weights_only=true` to start from its weights',
            )

    def after_load(self, state: State, logger: Logger) -> None:
        """Lets checkpoints hold the fingerprints again, and forgets the model."""
        self._is_loading = False
        self.model = None

    def _compare_fingerprints(self, fingerprints: str) -> None:
        with building('fingerprints'):  # of the checkpoint, which somebody may have changed
            saved = check_value('fingerprints', json.loads(fingerprints or '{}'), dict)
        differing = {}
        for name, saved_value in saved.items():
            # Another release of torch may have saved settings of the optimizer that this release does not have.
            is_old_setting = name.startswith('optimizer.') and name not in self._fingerprints
            value = self._fingerprints.get(name)
            if saved_value != value and not is_old_setting:
                differing[name] = f'{name} {_short(saved_value)} there, {_short(value)} here'
        if not differing:
            return
        details = ', '.join(differing.values())
        message = (
            'a resumed run must have the data, order, processor, vocabulary, adapter and optimizer of its checkpoint, '
            f'got: other {" and ".join(differing)} ({details})'
        )
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError(
            '',
            f'{message}. Set it back, or for a new run give another trainer.run_name and trainer.save_folder, with '
            'trainer.load_path and trainer.load_weights_only=true if it starts from these weights; to go on: '
            'loader.on_other_data=warn',
        )


def _checkpoint_to_load(trainer: Section, run_name: str) -> tuple[Path | None, bool]:
    """Returns the local checkpoint that the Trainer will load, if any, and whether only its weights."""
    latest = latest_checkpoint({**trainer, 'run_name': run_name})
    if latest is not None:
        latest = dist.all_gather_object(latest)[0]  # all ranks read the one of rank 0, as Composer does
        if latest.exists():
            return latest, False
    weights_only = bool(trainer.get('load_weights_only'))
    load_path = trainer.get('load_path')
    if load_path is not None:
        # Composer fills the names of ranks in the same way.
        path = Path(partial_format(load_path, run_name=run_name, rank=0, local_rank=0, node_rank=0))
        if path.exists():
            return path, weights_only
    return None, weights_only


def _compare_shapes(
    saved: SavedRun,
    shapes: Mapping[str, Shape],
    required: Sequence[str],
    *,
    is_strict: bool,
) -> None:
    """Refuses a checkpoint that lacks required weights, has some of another shape, or, if strict, has unknown ones."""
    differing = {name: 'missing' for name in required if name not in saved.shapes}
    for name, saved_shape in saved.shapes.items():
        shape = shapes.get(name)
        if shape is None and is_strict:
            differing[name] = 'unknown'
        elif shape is not None and shape != saved_shape:
            differing[name] = f'{list(saved_shape)} there, {list(shape)} here'
    if differing:
        name = next(iter(differing))
        raise ConfigError(
            '',
            f'the checkpoint must be of the same model, got: {saved.path} with {len(differing)} others among '
            f'{len(saved.shapes)} weights ({name}: {differing[name]}). Give the `model` of that run, or another '
            '`trainer.run_name` and `trainer.save_folder`',
        )


def _short(value: Any) -> str:
    """Shortens fingerprints, which have 32 hexadecimal digits, to the first eight."""
    return re.sub(r'\b([0-9a-f]{8})[0-9a-f]{24}\b', r'\1', json.dumps(value).strip('"'))
