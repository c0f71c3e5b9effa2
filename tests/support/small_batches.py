# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hand-written batches of a few ids."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from composer_tokacc import BatchLayout
from composer_tokacc.batch import BatchDict
from composer_tokacc.layout.families import FAMILIES

FAMILY_OF_NAME = {family.name: family for family in FAMILIES}
TEXT = FAMILY_OF_NAME['text']
LLAVA = FAMILY_OF_NAME['LLaVA']
QWEN = FAMILY_OF_NAME['Qwen']

IMAGE = 90
"""Id of the placeholder of an image."""
VIDEO = 91
PLACEHOLDERS = {'i': IMAGE, 'v': VIDEO}


def layout_of_model(model_type: str, **config: Any) -> BatchLayout:
    """Returns the layout of a model whose config has this ``model_type`` and these other attributes."""
    return BatchLayout.for_model(SimpleNamespace(model_type=model_type, **config))


def text_batch(lengths: list[int], *, side: str = 'right', width: int | None = None, **entries: Any) -> BatchDict:
    """Returns rows of ids 1, 2, ..., padded with 0 to ``width``. Every token has a label."""
    width = width or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        start = width - length if side == 'left' else 0
        ids[row, start : start + length] = torch.arange(1, length + 1)
    is_token = ids > 0
    return {
        'input_ids': ids,
        'attention_mask': is_token.long(),
        'labels': ids.masked_fill(~is_token, -100),
        **entries,
    }


def square_mask(batch: BatchDict) -> torch.Tensor:
    """Returns a causal mask, bool of shape (rows, 1, width, width): True if a position may attend to another."""
    is_real = batch['attention_mask'].bool()
    width = is_real.shape[1]
    is_causal = torch.ones(width, width).tril().bool()
    may_attend = is_causal & is_real[:, None, :]
    return may_attend[:, None]


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask as models add it to the scores: 0, or the lowest number where nothing is attended."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def drawn_batch(*rows: str, **entries: Any) -> BatchDict:
    """Returns rows drawn as ``'1ii2'``: a digit is its own id, ``i`` and ``v`` stand for an image and a video.

    They are padded on the right with 0.
    """
    lengths = [len(row) for row in rows]
    batch = text_batch(lengths, **entries)
    for row, drawing in enumerate(rows):
        for place, character in enumerate(drawing):
            token_id = PLACEHOLDERS.get(character) or int(character)
            batch['input_ids'][row, place] = token_id
    return batch


def numbered(count: int, *shape: int) -> torch.Tensor:
    """Returns entries of a shape, filled with 0, 1, 2, ...: :func:`numbers_of` tells which of them a row got."""
    numbers = torch.arange(count).repeat_interleave(math.prod(shape))
    return numbers.view(count, *shape)


def numbered_images(count: int) -> torch.Tensor:
    """Returns images of 2 by 2 pixels in three colors. The first is filled with 0, the next with 1, and so on."""
    return numbered(count, 3, 2, 2)


def numbers_of(entries: torch.Tensor) -> list[int]:
    """Returns the first number in each entry."""
    flat_entries = entries.reshape(len(entries), -1)
    return flat_entries[:, 0].tolist()
