# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hand-written batches of a few ids."""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc.layout.families import FAMILIES

__all__ = ['LLAVA', 'QWEN', 'TEXT', 'text_batch']

TEXT, LLAVA, QWEN = (
    next(family for family in FAMILIES if family.name == name) for name in ('text', 'LLaVA', 'Qwen-VL')
)


def text_batch(lengths: list[int], *, side: str = 'right', width: int | None = None, **entries: Any) -> dict[str, Any]:
    """Rows of ids 1, 2, ..., padded with 0 to ``width``."""
    width = width or max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if side == 'left' else slice(0, length)
        ids[row, span] = torch.arange(1, length + 1)
        mask[row, span] = 1
    return {'input_ids': ids, 'attention_mask': mask, 'labels': ids.masked_fill(mask == 0, -100), **entries}
