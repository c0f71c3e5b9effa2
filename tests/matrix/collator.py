# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A collator for text and media. It does not use the package, so that a fault of the package cannot hide in batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

__all__ = ['Row', 'cat_padded', 'join']

Row = dict[str, Any]
_FILLS = {
    'input_ids': 0,
    'attention_mask': 0,
    'labels': -100,
    'token_type_ids': 0,
    'mm_token_type_ids': 0,
}


def join(rows: Sequence[Row], *, side: str, multiple: int = 1, slots: bool = False) -> Row:
    """Joins rows into a batch.

    Args:
        rows: The rows.
        side: ``'left'`` or ``'right'``: where the text is padded.
        multiple: The width is rounded up to a multiple of it.
        slots: Whether media have a slot dimension, (rows, slots, ...). If not, the media of all rows come one after the
            other, (media, ...).
    """
    longest_row = max(row['input_ids'].shape[1] for row in rows)
    width = math.ceil(longest_row / multiple) * multiple
    keys_in_order = dict.fromkeys(chain.from_iterable(rows))
    batch: Row = {}
    for key in keys_in_order:
        values = [row[key] for row in rows if key in row]
        first_value = values[0]
        if isinstance(first_value, list):
            batch[key] = list(chain.from_iterable(values))
        elif key in _FILLS or key == 'cross_attention_mask':
            batch[key] = _joined_text(rows, key, first_value, width, side)
        elif slots:
            no_slot = first_value.new_zeros(1, 0, *first_value.shape[2:])
            batch[key] = cat_padded([row.get(key, no_slot) for row in rows])
        elif key == 'batch_num_images':  # a number for each row
            no_images = first_value.new_zeros(1)
            batch[key] = torch.cat([row.get(key, no_images) for row in rows])
        else:
            batch[key] = cat_padded(values)
    return batch


def _joined_text(rows: Sequence[Row], key: str, like: Tensor, width: int, side: str) -> Tensor:
    """Joins an entry of the text, padded to ``width``, and to the most slots of any row.

    The labels of a decoder are padded to the widest of them.

    Args:
        rows: The rows.
        key: The name of the entry.
        like: The entry of one row. Rows without the entry get zeros like it.
        width: The width of the batch.
        side: Where the text is padded.
    """
    fill = _FILLS.get(key, 0)
    values = []
    is_of_decoder = False
    for row in rows:
        value = row[key] if key in row else _zeros(row, like)
        if value.shape[1] != row['input_ids'].shape[1]:
            is_of_decoder = True
        values.append(value)
    if is_of_decoder:
        return cat_padded(values, fill=fill)

    padded_values = [_pad(value, width, side, fill) for value in values]
    return cat_padded(padded_values)


def _zeros(row: Row, like: Tensor) -> Tensor:
    """Returns zeros for a row without images: (1, width of its text), or (1, width, 0, ...) if entries have slots."""
    shape = [1, row['input_ids'].shape[1]]
    if like.dim() > 2:
        shape += [0, *like.shape[3:]]
    return like.new_zeros(shape)


def _pad(value: Tensor, width: int, side: str, fill: int) -> Tensor:
    """Pads dimension 1 to a width, on the left or right."""
    num_pads = width - value.shape[1]
    pads = value.new_full((value.shape[0], num_pads, *value.shape[2:]), fill)
    if side == 'left':
        return torch.cat([pads, value], dim=1)
    return torch.cat([value, pads], dim=1)


def cat_padded(values: Sequence[Tensor], fill: float = 0) -> Tensor:
    """Joins tensors along dimension 0. The other dimensions are padded at their ends."""
    shapes = [value.shape[1:] for value in values]
    largest_shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
    num_entries = sum(len(value) for value in values)
    joined = values[0].new_full((num_entries, *largest_shape), fill)
    start = 0
    for value in values:
        end = start + len(value)
        other_dimensions = [slice(size) for size in value.shape[1:]]
        joined[(slice(start, end), *other_dimensions)] = value
        start = end
    return joined
