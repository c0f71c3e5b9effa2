# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A callback that holds a resumed run to the data, the processor and the vocabulary of its checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dist_cp
from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.checkpoint import DefaultLoadPlanner

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
        on_other_data: ``'raise'``, or ``'warn'`` to go on.

    Raises:
        ConfigError: After loading, on all ranks.
    """

    def __init__(self, dataset: Any, processor: Any, *, on_other_data: str = 'raise') -> None:
        self.on_other_data = on_other_data
        num_samples = getattr(dataset, 'size', None) or len(dataset)  # StreamingDataset's own length is a rank's share
        self._now = {
            'data': f'{identify_data(dataset)} of {num_samples} samples',
            'processor': identify_processor(processor),
            'vocabulary': identify_vocabulary(processor),
        }
        self._then = ''
        self._loading = False

    def state_dict(self) -> dict[str, Any]:
        """The fingerprints, as one string; nothing while a checkpoint is loaded.

        A sharded one is loaded entry by entry, as the state of now has them, and fails for one that it lacks.
        """
        return {} if self._loading else {'fingerprints': json.dumps(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps those of the checkpoint."""
        self._then = state.get('fingerprints', '')

    def before_load(self, state: State, logger: Logger) -> None:
        """See :meth:`state_dict`."""
        self._loading = True

    def after_load(self, state: State, logger: Logger) -> None:
        """Compares."""
        self._loading = False
        then = json.loads(self._then or self._from_shards(state) or '{}')
        other = [name for name in then if then[name] != self._now.get(name)]
        if not other:
            return
        differing = ', '.join(f'{name} {_short(then[name])}, now {_short(self._now[name])}' for name in other)
        message = (
            f'a resumed run must have the data, processor and vocabulary of its checkpoint, got: other '
            f'{" and ".join(other)} (in {state.load_path}: {differing})'
        )
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError(
            f'{message}. For a new run type another trainer.run_name and trainer.save_folder, with trainer.load_path=... '
            'trainer.load_weights_only=true for one that starts from these weights; to go on: loader.on_other_data=warn'
        )

    def _from_shards(self, state: State) -> str:
        """The saved fingerprints of a sharded checkpoint, empty where it has none or its weights alone are loaded."""
        if not state.load_path or not Path(state.load_path).is_dir() or not int(state.timestamp.batch):
            return ''
        own = {'fingerprints': ''}
        saved = {'state': {'callbacks': {type(self).__qualname__: own}}}
        dist_cp.load(saved, checkpoint_id=state.load_path, planner=DefaultLoadPlanner(allow_partial_load=True))
        return own['fingerprints']


def _short(fingerprint: str) -> str:
    return fingerprint[:NUM_SHOWN] + fingerprint[32:]
