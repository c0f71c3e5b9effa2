# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How each tensor of a batch belongs to its rows: the facts that layout, media and concat stand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from composer_tokacc.layout.families import TEXT_ENTRIES, Entry, Family

__all__ = ['Batch', 'EntryLayout']

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """The entries of a batch; :class:`.BatchLayout` adds what can be done with its rows.

    Args:
        family: The model family's media tensors.
        image_token_id: Placeholder id of an image, needed where the batch carries no ``num_images`` list.
        merge_size: Side of the patch square that becomes one token (Qwen-VL).
        extra: Entries registered on top, by key: see :meth:`with_entries`.
    """

    family: Family
    image_token_id: int | None = None
    merge_size: int = 2
    extra: Mapping[str, Entry] = field(default_factory=dict)

    def num_rows(self, batch: Batch) -> int:
        """Number of rows."""
        return len(batch['input_ids'])

    def entry(self, key: str, value: torch.Tensor) -> Entry:
        """How one tensor belongs to rows; unknown keys are refused by name."""
        for entries in (self.extra, self.family.entries, TEXT_ENTRIES):
            if key in entries:
                if key != 'attention_mask' or value.dim() == 2:
                    return entries[key]
                # (rows, width, width) and (rows, heads, width, width) carry the width twice; 0 in an additive mask
                # would attend.
                fill = torch.finfo(value.dtype).min if value.dtype.is_floating_point else 0
                return Entry(seq_dims=(-2, -1), fill=fill)
        raise ValueError(
            f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, got: a tensor of shape '
            f'{tuple(value.shape)}. Register it: `layout.with_entries({key}=Entry(unit=...))`, with unit one of '
            "'row', 'image', 'patch', 'video', 'video_patch', 'shared'."
        )

    def entry_of(self, batch: Batch, key: str) -> Entry:
        """As :meth:`entry`, but a tensor with a width of its own (a decoder's labels) is not sequence-shaped."""
        value, width = batch[key], batch['input_ids'].shape[1]
        entry = self.entry(key, value)
        is_decoders = key == 'labels' and 'decoder_input_ids' in batch
        has_width = all(value.shape[dim] == width for dim in entry.seq_dims) and not is_decoders
        return entry if has_width else replace(entry, seq_dims=())

    def tensors_of(self, batch: Batch, unit: str) -> dict[str, torch.Tensor]:
        """The tensors that have one entry per unit, by key."""
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        return {key: value for key, value in tensors.items() if self.entry(key, value).unit == unit}
