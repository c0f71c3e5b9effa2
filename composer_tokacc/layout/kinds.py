# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Kinds of rows that a cut may treat unlike: by their padding, their media, their positions and their width."""

from __future__ import annotations

import sys

from composer_tokacc.batch import MODALITIES, Batch
from composer_tokacc.layout.layout import BatchLayout, padding_side_of
from composer_tokacc.layout.ready import microbatches_of

WIDTHS = tuple(2**power for power in range(4, 21))
KINDS = ('left', 'right', *MODALITIES, 'mixed', 'positions', *(f'left over {width}' for width in WIDTHS))
"""What rows of a batch can be like, as far as it matters to a cut: padded on the left or right, with media of a kind,
or some with media and some without; padded on the left with ``position_ids`` given, or wider than any before (Llama 4
and Ministral 3 scale attention by the column, but not in the first thousands of columns)."""


def kinds_of(layout: BatchLayout | None, batch: Batch) -> tuple[int, ...]:
    """Which of :data:`KINDS` the batch has, as ones and zeros."""
    of_each = [_names_of_kinds(layout, one) for one in microbatches_of(batch)]
    found = set().union(*of_each)
    has_media = [not names.isdisjoint(MODALITIES) for names in of_each]
    if any(has_media) and not all(has_media):
        found.add('mixed')
    return tuple(int(kind in found) for kind in KINDS)


def _names_of_kinds(layout: BatchLayout | None, batch: Batch) -> set[str]:
    if layout is None or batch.get('input_ids') is None:
        return set()
    real = layout.real_positions(batch)
    side = '' if bool(real.all()) else padding_side_of(real)
    media = {unit: layout.units_per_row(batch, unit) for unit in layout.media_of(batch)}
    has_media = [any(counts) for counts in zip(*media.values(), strict=True)]
    found = {side, *(unit for unit, counts in media.items() if any(counts))}
    if any(has_media) and not all(has_media):
        found.add('mixed')
    if side == 'left':
        found ^= {'left', 'positions'} if has_positions(batch) else set()
        found |= {f'left over {width}' for width in WIDTHS if layout.width(batch) > width}
    return found


def has_positions(batch: Batch) -> bool:
    """Whether the batch says which positions its tokens have."""
    return batch.get('position_ids') is not None


def widest_like(width: int) -> int:
    """Returns the width of the widest batch that is of the kinds of one so wide."""
    return next((limit for limit in WIDTHS if width <= limit), sys.maxsize)
