# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks for runs that resume mid-epoch: one skips batches without reading them, one restores random numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

from composer_tokacc.sampling.loader import RegroupingDataLoader


class SkipReadBatches(Callback):
    """Resumes mid-epoch without reading the batches that were trained on before.

    Composer resumes by iterating the loader from the start of the epoch. It discards the batches that the run has
    trained on, and restores the random number generators at the last of them. With this callback a
    :class:`RegroupingDataLoader` yields markers for the batches that will be discarded, and does not read them. Without
    it, or with another loader, all of them are read, with the same result. It may be added or removed between two
    starts of a run. Do not use it with ``Trainer(spin_dataloaders=False)``. Then Composer discards no batches, and the
    model would get the markers.

    Workers of the loader draw other random numbers than in the unbroken run, because their seed depends on the first
    batch that is read. A run whose dataset draws none in its workers is resumed bitwise.
    """

    def fit_start(
        self,
        state: State,
        logger: Logger,
    ) -> None:
        """Tells the loader which batches will be discarded."""
        loader = state.train_dataloader
        if isinstance(loader, RegroupingDataLoader):
            epoch = int(state.timestamp.epoch)
            batch_in_epoch = int(state.timestamp.batch_in_epoch)
            loader.skip_to(epoch, batch_in_epoch)


class RestoreRandomState(Callback):
    """Restores the random number generators of every rank before the first batch of a resumed run.

    It is needed for a dataset with a ``load_state_dict``, such as StreamingDataset. Mid-epoch, Composer restores the
    generators at the last batch that it discards. For such a dataset it discards none, so dropout would draw other
    masks than in the unbroken run.

    Give a StreamingDataLoader its own ``generator``. Otherwise it draws a seed from torch's generator when a resumed
    run begins to read, after this callback. The unbroken run draws none mid-epoch, so all later random numbers would
    differ.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None
        """Loaded states of the generators, one entry a rank, until they are restored."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators of all ranks; a collective, because Composer's function gathers them.

        They are one string, because a sharded checkpoint must have the same entries as the state of the run that loads
        it. A list would have an entry for each rank, so it could not be loaded on another number of ranks. For the same
        reason no further key may be added: older sharded checkpoints would lack it.
        """
        states = reproducibility.get_rng_state()
        # Tensors and arrays become lists.
        return {'generators': json.dumps(states, default=lambda array: array.tolist())}

    def load_state_dict(
        self,
        state: dict[str, Any],
    ) -> None:
        """Keeps the saved states. :meth:`before_dataloader` restores them."""
        saved = json.loads(state['generators'])
        self._saved = [_restored(entries) for entries in saved]

    def before_dataloader(
        self,
        state: State,
        logger: Logger,
    ) -> None:
        """Restores the saved states before the first batch is read, and does nothing before later ones.

        On more ranks than were saved, Composer warns, and the generators of the new ranks stay as they are.
        """
        if self._saved is not None:
            reproducibility.load_rng_state(self._saved)
            self._saved = None


def _restored(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the states of the generators of one rank, with the types that Composer's function takes."""
    # What `random.getstate()` and `np.random.get_state()` return. JSON has made lists of tuples and arrays.
    version, numbers, next_gauss = plain['python']
    name, keys, position, has_gauss, cached_gauss = plain['numpy']
    restored: dict[str, Any] = {
        'python': (version, tuple(numbers), next_gauss),
        'numpy': (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gauss),
    }
    for key in ('torch', 'cuda'):
        if key in plain:
            restored[key] = torch.tensor(plain[key], dtype=torch.uint8)
    return restored
