# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: one run at a time in a folder, what it goes on from is whole, and of the same model and data."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, format_name_with_dist, partial_format
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from composer_tokacc.cache import whole_file
from composer_tokacc.compat import composer_state_types
from composer_tokacc.data import identify_data, identify_processor, identify_vocabulary
from composer_tokacc.programs.errors import ConfigError, must

log = logging.getLogger(__name__)


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
    name = trainer.get('save_latest_filename') or 'latest-rank{rank}.pt'  # Composer's default
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
            with whole_file(link) as spare:
                spare.symlink_to(os.path.relpath(older, link.parent))
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
    if all(found):
        whole = {'load_path': latest, 'load_weights_only': False, 'load_strict_model_weights': True}
        return {'autoresume': False, **whole}
    return {} if any(found) else {'autoresume': False}  # where some found one, each node has a folder of its own


def damage(path: Path) -> str:
    """Returns why a checkpoint file, or the folder of a sharded one, cannot be loaded; empty if nothing is wrong."""
    try:
        if path.is_dir():
            parts = FileSystemReader(path).read_metadata().storage_data or {}
            ends = ((part.relative_path, part.offset + part.length) for part in parts.values())
            short = next((name for name, end in ends if (path / name).stat().st_size < end), '')
            return f'{short} is too short' if short else ''
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # reads it once, which a disk does faster than what follows
        return f'{broken} is not what was written' if broken else ''
    except Exception as error:  # whatever reading the pickled index of a damaged folder may raise
        return ' '.join(str(error).split()) or type(error).__name__


def check_checkpoint(what: str, path: Path) -> None:
    """Refuses what is no checkpoint by its kind: another folder, a pipe, a text."""
    if path.is_dir() and not (path / '.metadata').exists():
        found = 'a folder without `.metadata`. Name the folder of one step, such as checkpoints/ep1-ba100'
    elif not path.exists():
        found = 'which is not there'
    elif not path.is_dir() and not (path.is_file() and zipfile.is_zipfile(path)):
        found = 'which is compressed, not whole or not written by Composer'
    elif path.is_dir() and (reason := damage(path)):
        found = f'damaged ({reason})'
    else:
        return
    raise ConfigError(f'{what} must be a checkpoint file, or the folder of a sharded one, got: {path}, {found}')


def read_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Returns the state in a checkpoint file without running code that it may hold.

    Raises:
        ConfigError: If it is of another program, or holds more than tensors, plain values and what ``compat`` lists.
    """
    try:
        with torch.serialization.safe_globals(composer_state_types()):
            return dict(torch.load(path, map_location='cpu', mmap=mmap, weights_only=True)['state'])
    except Exception as error:
        said = ' '.join(str(error).partition('. ')[0].split())  # torch goes on to say how its code would be run
        requirement = 'the checkpoint must be whole and written by Composer, and hold tensors and plain values alone'
        raise ConfigError(f'{requirement}, got: {path} ({said})') from error


def remember_unused_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer's checkpoints name parameters that never had a gradient: torch stops at one that it lacks."""

    def complete(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        for group in state['param_groups']:
            for index in group['params']:
                state['state'].setdefault(index, {})
        return state

    optimizer.register_state_dict_post_hook(complete)


class SameData(Callback):
    """Refuses to resume with another model, other data, another processor, vocabulary or adapter, on all ranks.

    Of a model the names and shapes of the weights are compared; of the others fingerprints, unless weights alone are
    loaded or the checkpoint has none. The number of ranks and all that cuts batches may change.

    Args:
        dataset: The training set.
        processor: Its processor or tokenizer.
        adapter: See :func:`.identify_adapter`.
        model: Before the Trainer has it; None compares none.
        trainer: Arguments of the Trainer, which say where a checkpoint comes from.
        on_other_data: ``'raise'``, or ``'warn'`` to go on.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Any,
        *,
        adapter: Mapping[str, Any],
        model: torch.nn.Module | None = None,
        trainer: Mapping[str, Any],
        on_other_data: str = 'raise',
    ) -> None:
        self.model, self.trainer, self.on_other_data = model, trainer, on_other_data
        self._weights = None if model is None else _weights(model)  # before FSDP divides them
        size = getattr(dataset, 'size', None)  # StreamingDataset's: its length is that of a rank's share
        self._now = {
            'data': f'{identify_data(dataset)} of {size if isinstance(size, int) else len(dataset)} samples',
            'processor': identify_processor(processor),
            'vocabulary': identify_vocabulary(processor),
            **adapter,
        }
        self._loading, self._compared = False, False
        self._optimizers: list[torch.optim.Optimizer] = []
        self._settings: list[dict[str, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the fingerprints as one string; nothing while a sharded checkpoint is loaded."""
        return {} if self._loading else {'fingerprints': json.dumps(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares what could not be compared before."""
        if not self._compared:
            self._compare(state.get('fingerprints', ''))

    def before_load(self, state: State, logger: Logger) -> None:
        """Compares before other data have given the model other shapes."""
        self._loading, self._optimizers, self._settings = True, state.optimizers, _settings(state.optimizers)
        path, weights_only = _checkpoint(self.trainer, state.run_name)
        if path is not None:
            fingerprints, shapes, optimizers = _saved(path, type(self).__qualname__)
            self._compared = True
            if not weights_only:
                self._compare(fingerprints)
            if self.model is not None and not self.trainer.get('load_ignore_keys'):
                # Algorithms may have changed them since.
                own = self._weights if state.fsdp_enabled else _weights(self.model)
                strict = not weights_only or bool(self.trainer.get('load_strict_model_weights', True))
                _compare_weights(path, shapes, own or {}, strict=strict)
                optimizer = '' if weights_only else type(state.optimizers[0]).__qualname__
                if optimizer and optimizer not in optimizers:  # Composer would start it anew
                    raise ConfigError(
                        f'the checkpoint must hold timestamp and the state of the optimizer {optimizer} to go on from, '
                        f'got: {path} with {optimizers}. Set `trainer.load_weights_only=true` to start from its weights'
                    )

    def after_load(self, state: State, logger: Logger) -> None:
        """Refuses settings of the optimizer that the checkpoint's have replaced; and see :meth:`state_dict`."""
        self._loading, self.model = False, None
        pairs = zip(_settings(self._optimizers), self._settings, strict=False)
        other = [(name, then[name], now.get(name)) for then, now in pairs for name in then if name in now]
        if found := dict.fromkeys(f'{name} {then} there, {now} here' for name, then, now in other if then != now):
            self._refuse(f"a resumed run has its checkpoint's settings of the optimizer, got: {', '.join(found)}")

    def _compare(self, fingerprints: str) -> None:
        with must(
            '`fingerprints` of a checkpoint must be those that a run wrote', repr(fingerprints), TypeError, ValueError
        ):
            then = dict(json.loads(fingerprints or '{}'))
        other = [name for name in then if then[name] != self._now.get(name)]
        if not other:
            return
        differing = ', '.join(f'{one} {_short(then[one])} there, {_short(self._now.get(one))} here' for one in other)
        message = (
            'a resumed run must have the data, processor, vocabulary and adapter of its checkpoint, got: other '
            f'{" and ".join(other)} ({differing})'
        )
        self._refuse(message)

    def _refuse(self, message: str) -> None:
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError(
            f'{message}. Set it back, or for a new run type another trainer.run_name and trainer.save_folder, with '
            'trainer.load_path and trainer.load_weights_only=true if it starts from these weights; to go on: '
            'loader.on_other_data=warn'
        )


def _settings(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, str]]:
    """Returns those of each group of parameters, the learning rate as it was before any schedule."""
    found = []
    for one in optimizers:
        names = signature(type(one)).parameters.keys() - {'params', 'foreach', 'fused', 'capturable'}  # no counters
        for group in one.param_groups:
            before = {**group, 'lr': group.get('initial_lr', group['lr'])}
            found.append({name: json.dumps(before[name], default=str) for name in before if name in names})
    return found


def _checkpoint(trainer: Mapping[str, Any], run_name: str) -> tuple[Path | None, bool]:
    """Returns the local checkpoint that the Trainer will load, if any, and whether its weights alone."""
    latest = latest_checkpoint({**trainer, 'run_name': run_name})
    if latest is not None:
        latest = dist.all_gather_object(latest)[0]  # of rank 0 for all, as sharded ones have it
        if latest.exists():
            return latest, False
    load_path = trainer.get('load_path')
    path = None if load_path is None else Path(partial_format(load_path, run_name=run_name))
    return path if path and path.exists() else None, bool(trainer.get('load_weights_only'))


Shape = tuple[int | str, ...]
"""Sizes of a weight, and a word where it is not of floats: torch would cast an int8 weight without a word."""


def _shape(sizes: Sequence[int], dtype: torch.dtype) -> Shape:
    return (*sizes, *([] if dtype.is_floating_point else ['not of floats']))


def _saved(path: Path, name: str) -> tuple[str, dict[str, Shape], list[str]]:
    """Returns what the callback of that name saved, the shapes of the weights, and the optimizers that have a state."""
    if path.is_dir():
        saved: dict[str, Any] = {'state': {'callbacks': {name: {'fingerprints': ''}}}}
        load(saved, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        entries: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
        shapes = {
            key.removeprefix('state.model.'): _shape(entry.size, entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith('state.model.')
        }
        optimizers = sorted({key.split('.')[2] for key in entries if key.startswith('state.optimizers.')})
    else:  # mapped: weights stay where they are
        saved = {'state': read_state(path, mmap=True)}
        parts = {key: saved['state'].get(key) or {} for key in ('model', 'optimizers', 'timestamp')}
        if strange := [key for key, part in parts.items() if not isinstance(part, Mapping)]:
            raise ConfigError(
                f'the checkpoint must be one that Composer wrote, got: {path} whose {strange[0]} is damaged'
            )
        weights = parts['model']
        tensors = {key: weight for key, weight in weights.items() if isinstance(weight, torch.Tensor)}
        shapes = {key: _shape(weight.shape, weight.dtype) for key, weight in tensors.items()}
        optimizers = sorted(parts['optimizers']) if parts['timestamp'] else []
    with must('the checkpoint must be one that Composer wrote', f'{path} whose callbacks are damaged', ValueError):
        own = dict(saved['state'].get('callbacks') or {}).get(name) or {}
    return own.get('fingerprints', ''), shapes, optimizers


def _weights(model: torch.nn.Module) -> dict[str, tuple[Shape, int]]:
    """Returns shape and place in memory of each."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: (_shape(value.shape, value.dtype), value.data_ptr()) for name, value in tensors.items()}


def _compare_weights(path: Path, saved: dict[str, Shape], own: dict[str, tuple[Shape, int]], *, strict: bool) -> None:
    shapes = {name: shape for name, (shape, _) in own.items()}
    other = [name for name in shapes if name in saved and saved[name] != shapes[name]]
    # A head that is tied to the embeddings may be stored once.
    kept = {place for name, (_, place) in own.items() if name in saved}
    missing = [name for name, (_, place) in own.items() if name not in saved and place not in kept]
    unknown = [name for name in saved if name not in shapes]
    if not other and not (strict and (missing or unknown)):
        return
    named = [(missing, 'missing'), (unknown, 'unknown')] * strict + [(other, 'of other shapes')]
    found = [f'{len(names)} {what}' for names, what in named if names]
    first = (other or missing or unknown)[0]
    shown = f'{list(saved[first])} there, {list(shapes[first])} here' if other else 'missing' if missing else 'unknown'
    raise ConfigError(
        f'the checkpoint must be of the same model, got: {path} with {", ".join(found)} of {len(saved)} weights '
        f'({first}: {shown}). Give the `model` of that run, or another `trainer.run_name` and `trainer.save_folder`'
    )


def _short(value: Any) -> str:
    """Shortens fingerprints to their first eight characters."""
    return re.sub(r'\b([0-9a-f]{8})[0-9a-f]{24}\b', r'\1', json.dumps(value).strip('"'))
