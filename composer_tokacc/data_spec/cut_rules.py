# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How rows may be cut so that each keeps its gradient; found by the first-batch check, obeyed by the split."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from composer_tokacc.layout import RowFacts

LEFT_POLICIES = ('trim', 'shift', 'keep')
RIGHT_POLICIES = ('trim', 'keep')
"""Padding policies, cheapest first. A policy that failed once is not tried again in a fit."""


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay what they are in the device batch.

    A policy holds up to the width at which it was shown. Wider batches keep their padding until the check has looked at
    one of them.

    Args:
        left: For rows padded on the left: ``'trim'``; ``'shift'``: trim, and write the numbers of the remaining columns
            as ``position_ids``, for models that count positions from column 0; ``'keep'`` the padding.
        left_width: Width up to which ``left`` was shown to hold.
        given: The same for rows padded on the left in a batch that brings ``position_ids``.
        given_width: Width up to which ``given`` was shown to hold.
        right: For rows padded on the right: ``'trim'`` or ``'keep'``.
        right_width: Width up to which ``right`` was shown to hold.
        needs_media: Whether a microbatch without media needs a dummy row with media if others of the step have media.
            (Mllama skips its cross-attention in a batch without images, but lets a text row beside a row with an image
            attend to padding.)
        packing: How a microbatch's rows become one packed row: ``''``: not at all; ``'documents'``: the model's own
            attention is computed document by document; ``'positions'``: it finds documents by ``position_ids`` itself.
    """

    left: str = 'keep'
    left_width: int = sys.maxsize
    given: str = 'keep'
    given_width: int = sys.maxsize
    right: str = 'keep'
    right_width: int = sys.maxsize
    needs_media: bool = False
    packing: str = ''

    def policy(self, facts: RowFacts) -> str:
        """Returns what becomes of a batch's padding: ``'trim'``, ``'shift'`` or ``'keep'``."""
        name = policy_name(facts)
        if not facts.may_be_trimmed or facts.width > getattr(self, f'{name}_width'):
            return 'keep'
        return getattr(self, name)

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the columns that each row keeps; if rows are packed, only its own."""
        if self.packing or not facts.has_ids:
            return facts.lengths
        if self.policy(facts) == 'keep':
            return [facts.width] * len(facts.lengths)
        # The last pad before such a row predicts its first label, and would be gone.
        is_kept = facts.has_label_behind_padding
        return [facts.width if kept else length for kept, length in zip(is_kept, facts.lengths, strict=True)]

    def cuts_like(self, other: CutRules) -> bool:
        """Returns whether both cut in the same way, whatever the width up to which that was shown."""
        names = ('left', 'given', 'right', 'needs_media', 'packing')
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def with_side_of(self, earlier: CutRules, side: str) -> CutRules:
        """Returns these rules with the earlier policies of that side, because no row was trimmed on it.

        If the padding must be kept, trimming was tried and has failed: that stays.
        """
        names = ('right',) if side == 'right' else ('left', 'given')
        changed = {}
        for name in names:
            if getattr(self, name) != 'keep':
                changed[name] = getattr(earlier, name)
                changed[f'{name}_width'] = getattr(earlier, f'{name}_width')
        return replace(self, **changed)


def policy_name(facts: RowFacts) -> str:
    """Returns the name of the policy for the padding of a batch."""
    if facts.side == 'right':
        return 'right'
    # Given positions stay as they are when columns go; positions that the model counts itself may not.
    return 'given' if facts.has_positions else 'left'


def padded_candidates(facts: RowFacts, known: CutRules) -> Iterator[CutRules]:
    """Gives the rules of padded microbatches to be tried on such rows, cheapest first; ``known``: found on others."""
    has_media = [count > 0 for count in facts.media]
    is_mixed = any(has_media) and not all(has_media)
    needs_media = known.needs_media or bool(facts.layout.family.coupling)
    known = replace(known, packing='', needs_media=needs_media)
    for rules in _rules_of_padding(facts, known):
        yield rules
        if is_mixed and not needs_media:
            yield replace(rules, needs_media=True)


def _rules_of_padding(facts: RowFacts, known: CutRules) -> Iterator[CutRules]:
    """Gives the rules with each padding policy that may hold for such rows."""
    if not facts.is_padded or not facts.may_be_trimmed:
        yield known  # there is nothing to trim, so nothing is learnt of trimming
        return
    name = policy_name(facts)
    policies: Sequence[str] = RIGHT_POLICIES if name == 'right' else LEFT_POLICIES
    earlier, earlier_width = getattr(known, name), getattr(known, f'{name}_width')
    was_shown = earlier_width != sys.maxsize
    if was_shown:
        policies = policies[policies.index(earlier) :]
    for policy in policies:
        width = facts.width
        if was_shown and policy == earlier:
            width = max(width, earlier_width)
        yield replace(known, **{name: policy, f'{name}_width': width})
