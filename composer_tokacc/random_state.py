# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Random numbers of a run resumed mid-epoch from a dataset that resumes by itself."""

from __future__ import annotations

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

__all__ = ['RestoreRandomState']


class RestoreRandomState(Callback):
    """Restores the random number generators of every rank before the first batch of a resumed run.

    Composer restores them mid-epoch only at the last batch that it discards, and discards none where the dataset has a
    ``load_state_dict``, as StreamingDataset does: dropout then draws other masks than in the unbroken run.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The generators of all ranks; a collective, as Composer's own is."""
        return {'rng': reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps them until the first batch."""
        self._saved = state['rng']

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Restores them once; the loader must not draw from them when it starts."""
        if self._saved is not None:
            reproducibility.load_rng_state(self._saved)
            self._saved = None
