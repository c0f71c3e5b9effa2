# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How rows may be cut so that each keeps its gradient; found by the first-batch check, obeyed by the split."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer_tokacc.layout import RowFacts, widest_like


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay what they are in the device batch.

    Args:
        left: For rows padded on the left: ``'trim'``; ``'shift'``: trim, and write the columns that are left as
            ``position_ids``, for models that count positions from column 0; ``'keep'`` the padding.
        left_width: Width up to which ``left`` was shown to hold. Wider batches keep their padding until one was looked
            at as well.
        left_given: Whether it was shown for batches that bring ``position_ids``; of the others the same is true.
        right: For rows padded on the right: ``'trim'`` or ``'keep'``.
        needs_media: Whether a microbatch without media needs a dummy row with media, where others of the step have
            media. (Mllama skips its cross-attention in a batch without images, but lets a text row beside a row with an
            image attend to padding.)
        packing: How a microbatch's rows become one packed row: ``''``: not at all; ``'documents'``: the model's own
            attention is computed document by document; ``'positions'``: it finds documents by ``position_ids`` itself.
    """

    left: str = 'keep'
    left_width: int = sys.maxsize
    left_given: bool = False
    right: str = 'keep'
    needs_media: bool = False
    packing: str = ''

    def policy(self, facts: RowFacts) -> str:
        """Returns what becomes of a batch's padding: ``'trim'``, ``'shift'`` or ``'keep'``."""
        if not facts.may_be_trimmed:
            return 'keep'
        if facts.side == 'right':
            return self.right
        # Positions that the batch brings stay as they are where columns go; those that a model counts may not.
        is_shown = facts.has_positions == self.left_given and facts.width <= self.left_width
        return self.left if is_shown else 'keep'

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the columns that each row keeps; where rows are packed, its own alone."""
        if self.packing or facts.batch.get('input_ids') is None:
            return facts.lengths
        if self.policy(facts) == 'keep':
            return [facts.width] * len(facts.lengths)
        # The last pad before such a row predicts its first label, and would be gone.
        kept = zip(facts.has_label_behind_padding, facts.lengths, strict=True)
        return [facts.width if is_kept else length for is_kept, length in kept]

    def with_side_of(self, known: CutRules, side: str) -> CutRules:
        """Returns these rules with what is known of rows padded on that side, where nothing was learnt of them."""
        return replace(self, **{name: value for name, value in vars(known).items() if name.startswith(side)})


def padded_candidates(facts: RowFacts, known: CutRules) -> Iterator[CutRules]:
    """Gives the rules of padded microbatches to be tried on such rows, cheapest first; ``known``: found on others."""
    media = facts.media
    needs_media = [False] if all(media) or not any(media) else [False, True]
    known = replace(known, packing='', needs_media=known.needs_media or bool(facts.layout.family.coupling))
    policies: tuple[str, ...] = ('trim', 'shift', 'keep') if facts.side == 'left' else ('trim', 'keep')
    if not facts.is_padded or not facts.may_be_trimmed:
        policies = (getattr(known, facts.side),)  # nothing to trim, so nothing is learnt of trimming
    elif facts.side == 'left':
        known = replace(known, left_width=widest_like(facts.width), left_given=facts.has_positions)
    for policy in policies:
        for is_needed in needs_media:
            yield replace(known, **{facts.side: policy, 'needs_media': is_needed or known.needs_media})
