# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Callbacks for runs that resume mid-epoch: one reads no batch in vain, the other restores random numbers."""

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
    it, or with another loader, all of them are read, with the same result. Checkpoints do not depend on it. Do not use
    it with ``Trainer(spin_dataloaders=False)``. Then Composer discards no batches, and the model would get the markers.
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

    If a run resumes mid-epoch, Composer restores them at the last batch that it discards. It discards none if the
    dataset has a ``load_state_dict``, as StreamingDataset does. Then dropout would draw other masks than in the
    unbroken run.

    Give a StreamingDataLoader its own ``generator``. Without one it draws a seed from torch's generator when its
    first batch is read, which is after this callback. The unbroken run draws a seed only at the start of the epoch.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None
        """Loaded states of the generators, one entry a rank, until they are restored."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators of all ranks. A collective, as Composer's own function is.

        They are one string. With an entry for each rank, a sharded checkpoint could not be loaded on another number of
        ranks, because it must have the same entries as the state of the run that loads it.
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
        """Restores the saved states before the first batch is read, and does nothing before later ones."""
        if self._saved is not None:
            reproducibility.load_rng_state(self._saved)
            self._saved = None


def _restored(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the states of the generators of one rank, with the types that Composer's function takes."""
    version, numbers, gauss = plain['python']
    name, keys, *position_and_gauss = plain['numpy']
    restored: dict[str, Any] = {
        'python': (version, tuple(numbers), gauss),
        'numpy': (name, np.array(keys, dtype=np.uint32), *position_and_gauss),
    }
    for key in ('torch', 'cuda'):
        if key in plain:
            restored[key] = torch.tensor(plain[key], dtype=torch.uint8)
    return restored
