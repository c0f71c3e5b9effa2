# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A callback that holds a resumed run to the data, the processor and the vocabulary of its checkpoint."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, format_name_with_dist, partial_format
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from composer_tokacc.data.identity import identify_data, identify_processor, identify_vocabulary
from composer_tokacc.programs.schema import ConfigError

__all__ = ['SameData']

log = logging.getLogger(__name__)

NUM_SHOWN = 8
"""Characters of a fingerprint that a message shows."""


class SameData(Callback):
    """Refuses to resume with other data, another processor or another vocabulary; their fingerprints are saved.

    Nothing is compared where weights alone are loaded, or where the checkpoint is older than this callback. The number
    of ranks and all that cuts batches may change.

    Args:
        dataset: The training set.
        processor: Its processor or tokenizer.
        trainer: Arguments of the Trainer, which say where a checkpoint comes from.
        on_other_data: ``'raise'``, or ``'warn'`` to go on.

    Raises:
        ConfigError: Before weights are loaded, on all ranks; from a remote or compressed checkpoint after that.
    """

    def __init__(
        self, dataset: Any, processor: Any, *, trainer: Mapping[str, Any], on_other_data: str = 'raise'
    ) -> None:
        self.trainer = trainer
        self.on_other_data = on_other_data
        size = getattr(dataset, 'size', None)  # StreamingDataset's: its length is that of a rank's share
        self._now = {
            'data': f'{identify_data(dataset)} of {size if isinstance(size, int) else len(dataset)} samples',
            'processor': identify_processor(processor),
            'vocabulary': identify_vocabulary(processor),
        }
        self._loading, self._compared = False, False

    def state_dict(self) -> dict[str, Any]:
        """The fingerprints, as one string; nothing while a checkpoint is loaded.

        A sharded one is loaded entry by entry, as the state of now has them, and fails for one that it lacks.
        """
        return {} if self._loading else {'fingerprints': json.dumps(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares what could not be compared before."""
        if not self._compared:
            self._compare(state.get('fingerprints', ''))

    def before_load(self, state: State, logger: Logger) -> None:
        """Compares before other data have given the model other shapes."""
        self._loading = True
        path = _checkpoint(self.trainer, state.run_name)
        if path is not None:
            with suppress(pickle.UnpicklingError, RuntimeError):  # compressed: Composer knows how to read it
                fingerprints = _saved_fingerprints(path, type(self).__qualname__)
                self._compared = True
                self._compare(fingerprints)

    def after_load(self, state: State, logger: Logger) -> None:
        """See :meth:`state_dict`."""
        self._loading = False

    def _compare(self, fingerprints: str) -> None:
        then = json.loads(fingerprints or '{}')
        other = [name for name in then if then[name] != self._now.get(name)]
        if not other:
            return
        differing = ', '.join(f'{name} {_short(then[name])} there, {_short(self._now[name])} here' for name in other)
        message = (
            'a resumed run must have the data, the processor and the vocabulary of its checkpoint, got: other '
            f'{" and ".join(other)} ({differing})'
        )
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError(
            f'{message}. For a new run type another trainer.run_name and trainer.save_folder, with trainer.load_path '
            'and trainer.load_weights_only=true if it starts from these weights; to go on: loader.on_other_data=warn'
        )


def _checkpoint(trainer: Mapping[str, Any], run_name: str) -> Path | None:
    """The local checkpoint that the Trainer will resume from, a folder if it is sharded."""
    if trainer.get('autoresume'):
        name = trainer.get('save_latest_filename') or 'latest-rank{rank}.pt'
        latest = format_name_with_dist(os.path.join(trainer['save_folder'], name), run_name)
        latest = dist.all_gather_object(latest)[0]  # of rank 0 for all, as sharded ones have it
        if os.path.exists(latest):
            return Path(latest)
    load_path = trainer.get('load_path')
    if load_path is None or trainer.get('load_weights_only'):
        return None
    path = Path(partial_format(load_path, run_name=run_name))
    return path if path.exists() else None


def _saved_fingerprints(path: Path, name: str) -> str:
    """What the callback of that name has saved in a checkpoint, empty if it has not."""
    if path.is_dir():
        saved: dict[str, Any] = {'state': {'callbacks': {name: {'fingerprints': ''}}}}
        load(saved, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    else:  # mapped: weights stay where they are
        saved = torch.load(path, map_location='cpu', mmap=True, weights_only=False)
    return dict(saved['state'].get('callbacks') or {}).get(name, {}).get('fingerprints', '')


def _short(fingerprint: str) -> str:
    return fingerprint[:NUM_SHOWN] + fingerprint[32:]
