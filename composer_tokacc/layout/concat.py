# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Joins batches row by row: text padded to the widest, ragged media one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from composer_tokacc.layout.entries import Batch, EntryLayout
from composer_tokacc.layout.families import Entry
from composer_tokacc.layout.media import images_per_row

__all__ = ['concat']


def concat(layout: EntryLayout, batches: Sequence[Batch], *, padding_side: str, pad_token_id: int) -> dict[str, Any]:
    """One batch of all rows: see :meth:`composer_tokacc.layout.BatchLayout.concat`."""
    if padding_side not in ('left', 'right'):
        raise ValueError(f"`padding_side` must be 'left' or 'right', got: {padding_side!r}.")
    width = max(batch['input_ids'].shape[1] for batch in batches)
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for batch in batches for key in batch):
        first = next((batch[key] for batch in batches if batch.get(key) is not None), None)
        if isinstance(first, torch.Tensor):
            entry = _common_entry(layout, batches, key)
            if key == 'input_ids':
                entry = replace(entry, fill=pad_token_id)
            values = _with_absent(layout, batches, key, entry)
            joined[key] = _cat_padded(values, entry, width, padding_side)
        elif isinstance(first, (list, tuple)):
            _refuse_absent(batches, key)
            joined[key] = [item for batch in batches for item in batch[key]]
        else:
            joined[key] = first
    if 'num_images' in joined:
        # A one-row sample tells its tiles; once joined, only the placeholders would.
        joined['num_images'] = [count for batch in batches for count in _num_images(layout, batch)]
    return joined


def _num_images(layout: EntryLayout, batch: Batch) -> list[int]:
    is_ragged = bool(layout.tensors_of(batch, 'image'))
    return images_per_row(layout, batch) if is_ragged else list(batch['num_images'])


def _common_entry(layout: EntryLayout, batches: Sequence[Batch], key: str) -> Entry:
    """Sequence-shaped only if it is so in every batch: a decoder's labels may have the encoder's width by chance."""
    entries = [layout.entry_of(batch, key) for batch in batches if batch.get(key) is not None]
    return next((entry for entry in entries if not entry.seq_dims), entries[0])


def _refuse_absent(batches: Sequence[Batch], key: str) -> None:
    num_present = sum(batch.get(key) is not None for batch in batches)
    if num_present < len(batches):
        raise ValueError(
            f'`{key}` must be in every batch or in none, got: {num_present} of {len(batches)}. Encode all samples with '
            'the same processor.'
        )


def _with_absent(layout: EntryLayout, batches: Sequence[Batch], key: str, entry: Entry) -> list[torch.Tensor]:
    """The tensors to join; batches without one bring no media, or rows of the entry's ``absent`` value."""
    if entry.slot_dim is None and entry.is_media:
        return [batch[key] for batch in batches if batch.get(key) is not None]
    if entry.slot_dim is None and entry.absent is None:
        _refuse_absent(batches, key)
    like: torch.Tensor = next(batch[key] for batch in batches if batch.get(key) is not None)
    values = []
    for batch in batches:
        shape = list(like.shape)
        shape[entry.row_dim] = layout.num_rows(batch)
        for dim in entry.seq_dims:
            shape[dim] = batch['input_ids'].shape[1]
        if entry.slot_dim is not None:
            shape[entry.slot_dim] = 0
        values.append(batch[key] if batch.get(key) is not None else like.new_full(shape, entry.absent or 0))
    return values


def _cat_padded(values: Sequence[torch.Tensor], entry: Entry, width: int, side: str) -> torch.Tensor:
    """Concatenates along the rows, every other dimension padded to the largest."""
    row_dim = entry.row_dim % values[0].dim()
    seq_dims = {dim % values[0].dim() for dim in entry.seq_dims}
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    for dim in seq_dims:
        shape[dim] = width
    shape[row_dim] = sum(value.shape[row_dim] for value in values)
    joined = values[0].new_full(shape, entry.fill)
    start = 0
    for value in values:
        target = joined.narrow(row_dim, start, value.shape[row_dim])
        for dim, size in enumerate(value.shape):
            if dim != row_dim:
                from_left = dim in seq_dims and side == 'left'
                target = target.narrow(dim, target.shape[dim] - size if from_left else 0, size)
        target.copy_(value)
        start += value.shape[row_dim]
    return joined
