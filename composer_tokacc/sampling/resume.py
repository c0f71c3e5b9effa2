# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks that resume a run mid-epoch: nothing read twice, and random numbers where the dataset resumes by itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

from composer_tokacc.planning import check_state
from composer_tokacc.sampling.loader import RegroupingDataLoader


class SkipReadBatches(Callback):
    """Resumes mid-epoch without reading what was trained on before.

    Composer resumes by iterating the loader from the start of the epoch, discarding batches, and restoring the random
    number generators at the last of them. That stays as it is, and so does everything in the checkpoint; only
    the discarded batches are not read. Without this callback, or with another loader, all of them are, with the same
    result. Not with ``Trainer(spin_dataloaders=False)``, where Composer discards none.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Tells the loader what will be discarded."""
        loader = state.train_dataloader
        if isinstance(loader, RegroupingDataLoader):
            loader.skip_to(int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch))


class RestoreRandomState(Callback):
    """Restores the random number generators of every rank before the first batch of a resumed run.

    Composer restores them mid-epoch only at the last batch that it discards, and discards none where the dataset has a
    ``load_state_dict``, as StreamingDataset does: dropout then draws other masks than in the unbroken run.
    """

    def __init__(self) -> None:
        self._saved: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the generators of all ranks; a collective, as Composer's own is.

        As one string, because a sharded checkpoint is loaded entry by entry, and the number of ranks may have changed.
        """
        return {'generators': json.dumps([_plain(state) for state in reproducibility.get_rng_state()])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps them until the first batch."""
        check_state(state, {'generators'})
        self._saved = state['generators']

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Restores them once; the loader must not draw from them when it starts."""
        if self._saved is not None:
            reproducibility.load_rng_state([_restored(plain) for plain in json.loads(self._saved)])
            self._saved = None


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what Composer keeps of one rank, in numbers and strings."""
    version, numbers, gauss = state['python']
    name, keys, *rest = state['numpy']
    tensors = {key: value.tolist() for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {'python': [version, list(numbers), gauss], 'numpy': [name, keys.tolist(), *rest], **tensors}


def _restored(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the inverse of :func:`_plain`."""
    version, numbers, gauss = plain['python']
    name, keys, *rest = plain['numpy']
    tensors = {key: torch.tensor(plain[key], dtype=torch.uint8) for key in ('torch', 'cuda') if key in plain}
    return {
        'python': (version, tuple(numbers), gauss),
        'numpy': (name, np.array(keys, dtype=np.uint32), *rest),
        **tensors,
    }
