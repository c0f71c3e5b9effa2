# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Zero-weight rows: they keep ranks in step and modules in use, and change neither gradient nor sample count."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc.counting import ADDED_ROWS, IGNORE_INDEX, LOSS_TOKENS, REAL_TOKENS
from composer_tokacc.layout import Batch, BatchLayout

__all__ = ['SpareImageRow', 'add_row', 'zero_weight']


def zero_weight(batch: Batch) -> dict[str, Any]:
    """A copy without labels, whose rows are marked as added: they are no samples."""
    num_rows = len(batch['input_ids'])
    emptied = {**batch, 'labels': torch.full_like(batch['labels'], IGNORE_INDEX), ADDED_ROWS: [True] * num_rows}
    for key in (LOSS_TOKENS, REAL_TOKENS):
        if key in batch:
            emptied[key] = [0] * num_rows
    return emptied


def add_row(layout: BatchLayout, microbatch: Batch, row: Batch) -> dict[str, Any]:
    """The microbatch, which has no images, with a zero-weight row behind its own."""
    marked = {**microbatch, ADDED_ROWS: [False] * layout.num_rows(microbatch)}
    row = {key: value for key, value in row.items() if key in marked or not isinstance(value, (list, tuple))}
    # Under the mask any id will do that is no image placeholder, and a microbatch without images has none.
    pad_token_id = int(microbatch['input_ids'][0, 0])
    return layout.concat([marked, row], padding_side=layout.padding_side(microbatch), pad_token_id=pad_token_id)


class SpareImageRow:
    """The smallest row with images of the batch; where it has none, one that this or another rank had before."""

    def __init__(self) -> None:
        self.row: dict[str, Any] | None = None

    def update(self, layout: BatchLayout, batch: Batch) -> None:
        """Finds the row. A collective until some rank has one, so all ranks must call it at the same step.

        The row comes from the batch itself where it can, so that a resumed run adds the row of the unbroken one.
        """
        mine = self._smallest(layout, batch)
        if self.row is None:
            found = [row for row in dist.all_gather_object(mine) if row is not None]
            self.row = min(found, key=_size) if found else None
        if mine is not None:
            self.row = mine

    def _smallest(self, layout: BatchLayout, batch: Batch) -> dict[str, Any] | None:
        images, lengths = layout.media_per_row(batch), layout.lengths(batch)
        rows = [row for row in range(len(images)) if images[row]]
        if not rows:
            return None
        smallest = min(rows, key=lambda row: (images[row], lengths[row]))
        return zero_weight(layout.trim(layout.select(batch, [smallest])))


def _size(row: Batch) -> int:
    return sum(value.numel() for value in row.values() if isinstance(value, torch.Tensor))
