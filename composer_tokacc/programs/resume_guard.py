# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Holds a resumed run to the model, data, processor, vocabulary and adapter of its checkpoint."""

from __future__ import annotations

import json
import logging
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, partial_format
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from composer_tokacc.data import identify_data, identify_processor, identify_vocabulary
from composer_tokacc.programs.checkpoints import latest_checkpoint, read_checkpoint
from composer_tokacc.programs.errors import ConfigError, must

log = logging.getLogger(__name__)


class SameData(Callback):
    """Refuses to resume with another model, other data, another processor, vocabulary or adapter, on all ranks.

    Of a model the names and shapes of the weights are compared; of the others fingerprints, unless weights alone are
    loaded or the checkpoint has none. The number of ranks and all that cuts batches may change.

    Args:
        dataset: The training set.
        processor: Its processor or tokenizer.
        adapter: See :func:`.identify_adapter`.
        model: The model, before the Trainer has it; None compares none.
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
        self.model = model
        # Before FSDP divides them.
        self._weights = None if model is None else _weights(model)
        self.trainer = trainer
        self.on_other_data = on_other_data
        size = getattr(dataset, 'size', None)  # StreamingDataset's: its length is that of a rank's share
        self._now = {
            'data': f'{identify_data(dataset)} of {size if isinstance(size, int) else len(dataset)} samples',
            'processor': identify_processor(processor),
            'vocabulary': identify_vocabulary(processor),
            **adapter,
        }
        self._loading, self._compared = False, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the fingerprints as one string; nothing while a sharded checkpoint is loaded."""
        return {} if self._loading else {'fingerprints': json.dumps(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares what could not be compared before."""
        if not self._compared:
            self._compare(state.get('fingerprints', ''))

    def before_load(self, state: State, logger: Logger) -> None:
        """Compares before other data have given the model other shapes."""
        self._loading = True
        path, weights_only = _checkpoint(self.trainer, state.run_name)
        # Composer knows how to read a compressed one.
        if path is not None and (path.is_dir() or zipfile.is_zipfile(path)):
            fingerprints, shapes, has_optimizer = _saved(path, type(self).__qualname__)
            self._compared = True
            if not weights_only:
                self._compare(fingerprints)
            if self.model is not None and not self.trainer.get('load_ignore_keys'):
                # Algorithms may have changed them since.
                own = self._weights if state.fsdp_enabled else _weights(self.model)
                strict = not weights_only or bool(self.trainer.get('load_strict_model_weights', True))
                _compare_weights(path, shapes, own or {}, strict=strict)
                if not (weights_only or has_optimizer):
                    raise ConfigError(
                        f'the checkpoint must hold the state of the optimizer to go on from, got: {path} without. Set '
                        '`trainer.load_weights_only=true` to start from its weights'
                    )

    def after_load(self, state: State, logger: Logger) -> None:
        """See :meth:`state_dict`."""
        self._loading, self.model = False, None

    def _compare(self, fingerprints: str) -> None:
        then = json.loads(fingerprints or '{}')
        other = [name for name in then if then[name] != self._now.get(name)]
        if not other:
            return
        pairs = [(name, _short(then[name]), _short(self._now.get(name))) for name in other]
        differing = ', '.join(f'{name} {there} there, {here} here' for name, there, here in pairs)
        message = (
            'a resumed run must have the data, processor, vocabulary and adapter of its checkpoint, got: other '
            f'{" and ".join(other)} ({differing})'
        )
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError(
            f'{message}. Set it back, or for a new run type another trainer.run_name and trainer.save_folder, with '
            'trainer.load_path and trainer.load_weights_only=true if it starts from these weights; to go on: '
            'loader.on_other_data=warn'
        )


def _checkpoint(trainer: Mapping[str, Any], run_name: str) -> tuple[Path | None, bool]:
    """Returns the local checkpoint that the Trainer will load, if any, and whether its weights alone."""
    latest = latest_checkpoint({**trainer, 'run_name': run_name})
    if latest is not None:
        latest = dist.all_gather_object(latest)[0]  # of rank 0 for all, as sharded ones have it
        if latest.exists():
            return latest, False
    load_path = trainer.get('load_path')
    if load_path is None:
        return None, False
    path = Path(partial_format(load_path, run_name=run_name))
    return path if path.exists() else None, bool(trainer.get('load_weights_only'))


def _saved(path: Path, name: str) -> tuple[str, dict[str, tuple[int, ...]], bool]:
    """Returns what the callback of that name saved, the shapes of the weights, and whether an optimizer's are there."""
    if path.is_dir():
        saved: dict[str, Any] = {'state': {'callbacks': {name: {'fingerprints': ''}}}}
        load(saved, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        entries: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
        prefix = 'state.model.'
        shapes = {
            key.removeprefix(prefix): tuple(entry.size)
            for key, entry in entries.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        has_optimizer = any(key.startswith('state.optimizers') for key in entries)
    else:  # mapped: weights stay where they are
        with must('the checkpoint must hold tensors and plain values alone', path, pickle.UnpicklingError):
            saved = read_checkpoint(path, mmap=True)
        weights = saved['state'].get('model') or {}
        shapes = {key: tuple(weight.shape) for key, weight in weights.items() if isinstance(weight, torch.Tensor)}
        has_optimizer = bool(saved['state'].get('optimizers'))
    return dict(saved['state'].get('callbacks') or {}).get(name, {}).get('fingerprints', ''), shapes, has_optimizer


def _weights(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    """Returns shape and place in memory of each."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: (tuple(value.shape), value.data_ptr()) for name, value in tensors.items()}


def _compare_weights(
    path: Path, saved: dict[str, tuple[int, ...]], own: dict[str, tuple[tuple[int, ...], int]], *, strict: bool
) -> None:
    shapes = {name: shape for name, (shape, _) in own.items()}
    other = [name for name in shapes if name in saved and saved[name] != shapes[name]]
    # A head that is tied to the embeddings may be stored once.
    kept = {place for name, (_, place) in own.items() if name in saved}
    missing = [name for name, (_, place) in own.items() if name not in saved and place not in kept]
    unknown = [name for name in saved if name not in shapes]
    if not other and not (strict and (missing or unknown)):
        return
    found = [f'{len(names)} {what}' for names, what in ((missing, 'missing'), (unknown, 'unknown')) if names and strict]
    found += [f'{len(other)} of other shapes'] * bool(other)
    first = (other or missing or unknown)[0]
    shown = f'{list(saved[first])} there, {list(shapes[first])} here' if other else 'missing' if missing else 'unknown'
    raise ConfigError(
        f'the checkpoint must be of the same model, got: {path} with {", ".join(found)} of {len(saved)} weights '
        f'({first}: {shown}). Give the `model` of that run, or another `trainer.run_name` and `trainer.save_folder`'
    )


def _short(value: Any) -> str:
    """Shortens fingerprints to their first eight characters."""
    return re.sub(r'\b([0-9a-f]{8})[0-9a-f]{24}\b', r'\1', json.dumps(value).strip('"'))
