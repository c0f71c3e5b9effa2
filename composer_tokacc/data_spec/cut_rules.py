# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How rows may be cut so that each keeps its gradient; found by the first-batch check, obeyed by the split."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer_tokacc.batch import Batch
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.kinds import has_positions, widest_like


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay what they are in the device batch.

    Args:
        left: For rows padded on the left: ``'trim'``; ``'columns'``: trim, and write the columns that are left as
            ``position_ids``, for models that count positions from column 0; ``'keep'`` the padding.
        left_width: Width up to which ``left`` was shown to hold. Wider batches keep their padding until one was looked
            at as well.
        left_given: Whether it was shown for batches that bring ``position_ids``; of the others the same is true.
        right: For rows padded on the right: ``'trim'`` or ``'keep'``.
        companions: Whether a microbatch without media needs a zero-weight row with media beside it, where others of
            the step have media. (Mllama skips its cross-attention in a batch without images, but lets a text row
            beside a row with an image attend to padding.)
        packing: How a microbatch's rows become one packed row: ``''``: not at all; ``'documents'``: the model's own
            attention is computed document by document; ``'positions'``: it finds documents by ``position_ids`` itself.
    """

    left: str = 'keep'
    left_width: int = sys.maxsize
    left_given: bool = False
    right: str = 'keep'
    companions: bool = False
    packing: str = ''

    def way(self, side: str, batch: Batch) -> str:
        """Returns what becomes of the padding of a batch of tokens that is on such a side."""
        if side == 'right':
            return self.right
        is_shown = has_positions(batch) == self.left_given and batch['input_ids'].shape[1] <= self.left_width
        return self.left if is_shown else 'keep'

    def with_side_of(self, known: CutRules, side: str) -> CutRules:
        """Returns these rules with what is known of rows padded on that side, where nothing was learnt of them."""
        return replace(self, **{name: value for name, value in vars(known).items() if name.startswith(side)})


def padded_candidates(layout: BatchLayout, rows: Batch, known: CutRules) -> Iterator[CutRules]:
    """Gives the rules of padded microbatches that are to be tried on such rows, cheapest first.

    Args:
        layout: How tensors belong to rows.
        rows: A few rows, as the loader padded them.
        known: Rules that were found on other rows.
    """
    side, media = layout.padding_side(rows), layout.media_per_row(rows)
    companions = [False] if all(media) or not any(media) else [False, True]
    known = replace(known, packing='', companions=known.companions or bool(layout.family.coupling))
    ways: tuple[str, ...] = ('trim', 'columns', 'keep') if side == 'left' else ('trim', 'keep')
    if bool(layout.real_positions(rows).all()):
        ways = (getattr(known, side),)  # nothing to trim, so nothing is learnt of trimming
    elif side == 'left':
        known = replace(known, left_width=widest_like(layout.width(rows)), left_given=has_positions(rows))
    for way in ways:
        for companion in companions:
            yield replace(known, **{side: way, 'companions': companion or known.companions})
