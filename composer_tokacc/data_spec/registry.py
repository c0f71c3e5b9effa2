# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which split, and which layout, goes with a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from composer_tokacc.collectives import all_gather_object
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.layout import BatchLayout

if TYPE_CHECKING:
    from composer.core import State

_SPLITS: WeakValueDictionary[int, MicrobatchSplit] = WeakValueDictionary()


def register_split(dataloader: Any, split: MicrobatchSplit) -> None:
    """Lets :func:`split_of` find the split of a loader; the split must hold on to its loader."""
    _SPLITS[id(dataloader)] = split


def split_of(dataloader: Any) -> MicrobatchSplit | None:
    """Returns the split that ``token_data_spec`` made for a loader.

    The trainer shows an algorithm the loader, not the DataSpec, and nothing of ours may lie in a batch before
    BATCH_START: Composer's own algorithms clone every entry of it.
    """
    return _SPLITS.get(id(dataloader))


def layout_of(state: State, split: MicrobatchSplit | None) -> BatchLayout | None:
    """The layout that the user gave, else the model's own, else that of the batch; None: rows cannot be told apart."""
    if split is not None and split.given_layout is not None:
        return split.given_layout
    try:
        layout = BatchLayout.for_model(state.model)
    except TypeError:  # no config; a rank without media sees a text model
        layout = max(all_gather_object(BatchLayout.infer(state.batch)), key=lambda one: len(one.family.entries))
    if split is None:
        try:
            layout.select(state.batch, [0])
            layout.media_per_row(state.batch)
        except (KeyError, ValueError):  # only the user's own split knows
            return None
    return layout
