# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A collator for text and media. It does not use the package, so that a fault of the package cannot hide in batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

__all__ = ['Row', 'cat_padded', 'join']

Row = dict[str, Any]
_FILLS = {'input_ids': 0, 'attention_mask': 0, 'labels': -100, 'token_type_ids': 0, 'mm_token_type_ids': 0}


def join(rows: Sequence[Row], *, side: str, multiple: int = 1, slots: bool = False) -> Row:
    """Joins rows into a batch.

    Args:
        rows: The rows.
        side: ``'left'`` or ``'right'``: where the text is padded.
        multiple: The width is rounded up to a multiple of it.
        slots: Whether media have a slot dimension, (rows, slots, ...). If not, the media of all rows come one after the
            other, (media, ...).
    """
    longest = max(row['input_ids'].shape[1] for row in rows)
    width = math.ceil(longest / multiple) * multiple
    batch: Row = {}
    for key in dict.fromkeys(chain.from_iterable(rows)):
        present = [row[key] for row in rows if key in row]
        like = present[0]
        if isinstance(like, list):
            batch[key] = list(chain.from_iterable(present))
        elif key in _FILLS or key == 'cross_attention_mask':
            batch[key] = _joined_text(rows, key, like, width, side)
        elif slots:
            no_slot = like.new_zeros(1, 0, *like.shape[2:])
            batch[key] = cat_padded([row.get(key, no_slot) for row in rows])
        elif key == 'batch_num_images':  # a number for each row
            no_images = like.new_zeros(1)
            batch[key] = torch.cat([row.get(key, no_images) for row in rows])
        else:
            batch[key] = cat_padded(present)
    return batch


def _joined_text(rows: Sequence[Row], key: str, like: torch.Tensor, width: int, side: str) -> torch.Tensor:
    """Joins an entry of the text, padded to ``width``, and to the most slots of any row.

    The labels of a decoder are padded to the widest of them.
    """
    fill = _FILLS.get(key, 0)
    values = []
    is_of_decoder = False
    for row in rows:
        value = row[key] if key in row else _zeros(row, like)
        is_of_decoder |= value.shape[1] != row['input_ids'].shape[1]
        values.append(value)
    if is_of_decoder:
        return cat_padded(values, fill=fill)
    padded = [_pad(value, width, side, fill) for value in values]
    return cat_padded(padded)


def _zeros(row: Row, like: torch.Tensor) -> torch.Tensor:
    """Returns zeros for a row without images: (1, width of its text), or (1, width, 0, ...) if entries have slots."""
    shape = [1, row['input_ids'].shape[1]]
    if like.dim() > 2:
        shape += [0, *like.shape[3:]]
    return like.new_zeros(shape)


def _pad(value: torch.Tensor, width: int, side: str, fill: int) -> torch.Tensor:
    shape = (value.shape[0], width - value.shape[1], *value.shape[2:])
    pads = value.new_full(shape, fill)
    return torch.cat([pads, value] if side == 'left' else [value, pads], dim=1)


def cat_padded(values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
    """Joins tensors along dimension 0. The other dimensions are padded at their ends."""
    shapes = [value.shape for value in values]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    num_entries = sum(len(value) for value in values)
    joined = values[0].new_full((num_entries, *largest[1:]), fill)
    start = 0
    for value in values:
        end = start + len(value)
        inner = tuple(slice(size) for size in value.shape[1:])
        joined[(slice(start, end), *inner)] = value
        start = end
    return joined
