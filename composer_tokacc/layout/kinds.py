# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Kinds of rows that a cut may treat unlike: by their padding, their media, their positions and their width."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from composer_tokacc.batch import MODALITIES
from composer_tokacc.layout.facts import RowFacts

WIDTHS = tuple(2**power for power in range(4, 21))
ROW_KINDS = ('left', 'right', *MODALITIES, 'mixed', 'positions', *(f'left over {width}' for width in WIDTHS))
"""What rows of a batch can be like, as far as it matters to a cut: padded on the left or right, with media of a kind,
or some with media and some without; padded on the left with ``position_ids`` given, or wider than any before (Llama 4
and Ministral 3 scale attention by the column, but not in the first thousands of columns)."""


def kinds_of(sources: Sequence[RowFacts]) -> tuple[int, ...]:
    """Returns which of :data:`ROW_KINDS` some batches have, as ones and zeros."""
    found: set[str] = set()
    for facts in sources:
        if facts.batch.get('input_ids') is None:
            continue
        found |= {modality for modality, counts in facts.counts.items() if any(counts)}
        if facts.is_padded:
            found.add('positions' if facts.side == 'left' and facts.has_positions else facts.side)
        if facts.is_padded and facts.side == 'left':
            found |= {f'left over {width}' for width in WIDTHS if facts.width > width}
    with_media = [bool(count) for facts in sources for count in facts.media]
    if any(with_media) and not all(with_media):
        found.add('mixed')
    return tuple(int(kind in found) for kind in ROW_KINDS)


def widest_like(width: int) -> int:
    """Returns the width of the widest batch that is of the kinds of one so wide."""
    return next((limit for limit in WIDTHS if width <= limit), sys.maxsize)
