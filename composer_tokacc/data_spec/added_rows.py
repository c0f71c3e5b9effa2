# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Zero-weight rows: they keep ranks in step and modules in use, and change neither gradient nor sample count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer_tokacc.counting import CARRIED, IGNORE_INDEX, num_rows, with_carried
from composer_tokacc.layout import Batch, BatchLayout

__all__ = ['add_rows', 'blank_row', 'smallest_row', 'zero_weight']


def zero_weight(batch: Batch) -> dict[str, Any]:
    """A copy without labels, whose rows are no samples."""
    none = [0] * num_rows(batch)
    emptied = {**batch, 'labels': torch.full_like(batch['labels'], IGNORE_INDEX)}
    return with_carried(emptied, loss_tokens=none, real_tokens=none, samples=none, weights=none)


def smallest_row(
    layout: BatchLayout, batches: Sequence[tuple[Batch, Sequence[int], Sequence[int]]]
) -> dict[str, Any] | None:
    """The smallest row with media, weighing nothing; None where there is none.

    Args:
        layout: How tensors belong to rows.
        batches: Each with the columns that its rows need, and the number of media in each row.
    """
    sizes = [
        ((number, length), which, row)
        for which, (_, lengths, media) in enumerate(batches)
        for row, (length, number) in enumerate(zip(lengths, media, strict=True))
        if number
    ]
    if not sizes:
        return None
    _, which, row = min(sizes)
    return zero_weight(layout.trim(layout.select(batches[which][0], [row])))


def blank_row(layout: BatchLayout, batch: Batch, unit: str) -> dict[str, Any] | None:
    """A zero-weight row with media of the unit, made from the model's config to join this batch; None: it cannot be."""
    blank = layout.blank_row(unit, like=batch)
    return None if blank is None else zero_weight(blank)


def add_rows(layout: BatchLayout, microbatch: Batch, rows: Sequence[Batch]) -> dict[str, Any]:
    """The microbatch with zero-weight rows behind its own."""
    per_row = {key for key, value in microbatch.items() if isinstance(value, (list, tuple))}
    fitting = [_with_lists(row, microbatch, per_row) for row in rows]
    # Under the mask any id will do that is no placeholder. A row may begin with one.
    ids = microbatch['input_ids']
    plain = torch.ones_like(ids, dtype=torch.bool)
    for unit, media in layout.family.media.items():
        found = media.placeholders(microbatch, layout.config, unit)
        plain &= ~found if found is not None else True
    side = layout.padding_side(microbatch)
    return layout.concat([microbatch, *fitting], padding_side=side, pad_token_id=int(ids[plain][-1]))


def _with_lists(row: Batch, microbatch: Batch, per_row: set[str]) -> dict[str, Any]:
    """The row with just the lists that the microbatch has; what a blank row cannot know is None, or no media."""
    kept = {key: value for key, value in row.items() if not isinstance(value, (list, tuple)) or key in per_row}
    for key in per_row - kept.keys():
        is_count = key.startswith('num_') or key == f'{CARRIED}microbatches'
        kept[key] = microbatch[key][:1] if key == f'{CARRIED}rule' else [0 if is_count else None]
    return kept
