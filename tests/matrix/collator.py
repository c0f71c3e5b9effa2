# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A collator of text, images, videos and sounds, written without the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ['Row', 'cat_padded', 'join']

Row = dict[str, Any]
_FILLS = {'input_ids': 0, 'attention_mask': 0, 'labels': -100, 'token_type_ids': 0, 'mm_token_type_ids': 0}


def join(rows: Sequence[Row], *, side: str, multiple: int = 1, slots: bool = False) -> Row:
    """One batch of rows: text padded on one side, images, videos and sounds one after the other."""
    width = max(row['input_ids'].shape[1] for row in rows)
    width = -(-width // multiple) * multiple
    batch: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        like = next(row[key] for row in rows if key in row)
        if isinstance(like, list):
            batch[key] = [item for row in rows for item in row[key]]
            continue
        if key in _FILLS or key == 'cross_attention_mask':
            is_decoders = any(row[key].shape[1] != row['input_ids'].shape[1] for row in rows if key in row)
            values = [row[key] if key in row else _zeros(row, like) for row in rows]
            if is_decoders:
                batch[key] = cat_padded(values, fill=_FILLS[key])
            else:
                batch[key] = torch.cat(_fit_slots([_pad(v, width, side, _FILLS.get(key, 0)) for v in values]))
        elif slots:
            batch[key] = cat_padded([row.get(key, like.new_zeros(1, 0, *like.shape[2:])) for row in rows])
        elif key == 'batch_num_images':  # images by row
            batch[key] = torch.cat([row.get(key, like.new_zeros(1)) for row in rows])
        else:
            batch[key] = cat_padded([row[key] for row in rows if key in row])
    return batch


def _zeros(row: Row, like: torch.Tensor) -> torch.Tensor:
    """What a row without images has in a text-shaped entry: no slots, where there are any."""
    rest = (0, *like.shape[3:]) if like.dim() > 2 else ()
    return like.new_zeros(1, row['input_ids'].shape[1], *rest)


def _pad(value: torch.Tensor, width: int, side: str, fill: int) -> torch.Tensor:
    shape = (value.shape[0], width - value.shape[1], *value.shape[2:])
    pads = value.new_full(shape, fill)
    return torch.cat([pads, value] if side == 'left' else [value, pads], dim=1)


def _fit_slots(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Slots (dimension 2, if there is one) padded to the most of any row."""
    if values[0].dim() < 3:
        return values
    most = max(value.shape[2] for value in values)
    return [
        torch.cat([value, value.new_zeros(*value.shape[:2], most - value.shape[2], *value.shape[3:])], dim=2)
        for value in values
    ]


def cat_padded(values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
    """Along dimension 0, the others padded at their ends."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    shape[0] = sum(len(value) for value in values)
    joined, start = values[0].new_full(shape, fill), 0
    for value in values:
        joined[(slice(start, start + len(value)), *(slice(size) for size in value.shape[1:]))] = value
        start += len(value)
    return joined
