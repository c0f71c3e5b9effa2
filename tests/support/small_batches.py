# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hand-written batches of a few ids."""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc.layout.families import FAMILIES

__all__ = ['IMAGE', 'LLAVA', 'QWEN', 'TEXT', 'VIDEO', 'drawn_batch', 'numbered', 'numbers_of', 'text_batch']

TEXT, LLAVA, QWEN = (
    next(family for family in FAMILIES if family.name == name) for name in ('text', 'LLaVA', 'Qwen-VL')
)

IMAGE, VIDEO = 90, 91
PLACEHOLDERS = {'i': IMAGE, 'v': VIDEO}


def text_batch(lengths: list[int], *, side: str = 'right', width: int | None = None, **entries: Any) -> dict[str, Any]:
    """Rows of ids 1, 2, ..., padded with 0 to ``width``."""
    width = width or max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if side == 'left' else slice(0, length)
        ids[row, span] = torch.arange(1, length + 1)
        mask[row, span] = 1
    return {'input_ids': ids, 'attention_mask': mask, 'labels': ids.masked_fill(mask == 0, -100), **entries}


def drawn_batch(*rows: str, **entries: Any) -> dict[str, Any]:
    """Rows drawn as ``'1ii2'``: a digit is its own id, ``i`` and ``v`` stand for an image and a video.

    They are padded on the right with 0.
    """
    batch = text_batch([len(row) for row in rows], **entries)
    for row, drawing in enumerate(rows):
        for place, character in enumerate(drawing):
            batch['input_ids'][row, place] = PLACEHOLDERS[character] if character in 'iv' else int(character)
    return batch


def numbered(count: int, *shape: int) -> torch.Tensor:
    """Entries of a shape, filled with 0, 1, 2, ...: :func:`numbers_of` tells which of them a row got."""
    numbers = torch.arange(count).view(count, *[1] * len(shape))
    return numbers.expand(count, *shape).contiguous()


def numbers_of(entries: torch.Tensor) -> list[int]:
    """The first number in each entry."""
    return entries.reshape(len(entries), -1)[:, 0].tolist()
