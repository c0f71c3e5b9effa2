# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The rules by which rows are cut into microbatches, and the interface of the class that cuts by them.

The class is ``MicrobatchSplit`` of `data_spec`. The checks do not import it, because `data_spec` imports the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from composer_tokacc.batch import Batch
from composer_tokacc.layout import BatchLayout, RowFacts

NOT_TRIED = 0
"""Stands in :class:`CutRules` in the place of a batch width, for padding that the first-batch check has not tried to
trim."""
FAILED = -1
"""Stands in the same place for padding that cannot be trimmed."""


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay the same as in the device batch.

    Each kind of padding has the width of a batch. Padding is trimmed in batches up to this width, because the
    first-batch check has shown on a batch of this width that trimming is exact. Wider batches keep their padding until
    the check has looked at one of them. If the width is :data:`NOT_TRIED` or :data:`FAILED`, all batches keep padding
    of this kind.

    Args:
        left: Width for rows padded on the left.
        left_with_positions: Width for rows padded on the left if their batch has ``position_ids``.
        right: Width for rows padded on the right.
        needs_media: Whether each microbatch without media gets a dummy row with media if other microbatches of the
            step have media. Mllama needs this: it skips its cross-attention only if the whole batch has no image.
        packing: How a microbatch's rows become one packed row. ``'documents'``: our :class:`.DocumentAttention`
            computes each row by itself; ``'positions'``: the model's own attention tells the rows apart by
            ``position_ids`` that restart; ``''``: rows are not packed.
    """

    left: int = NOT_TRIED
    left_with_positions: int = NOT_TRIED
    right: int = NOT_TRIED
    needs_media: bool = False
    packing: str = ''

    def trims(self, facts: RowFacts) -> bool:
        """Returns whether the padding of a batch is trimmed."""
        return facts.may_be_trimmed and facts.width <= self.trimmed_width(facts)

    def trimmed_width(self, facts: RowFacts) -> int:
        """Returns the width up to which batches with such rows are trimmed."""
        if facts.side == 'right':
            return self.right
        return self._left_width(facts)

    def _left_width(self, facts: RowFacts) -> int:
        """Returns the width for padding on the left of such rows."""
        # Positions in the batch are cut together with the tokens. Positions that the model counts itself may change. So
        # trimming has to be proven for each kind.
        if facts.has_positions:
            return self.left_with_positions
        return self.left

    def with_trimmed_width(self, facts: RowFacts, width: int) -> CutRules:
        """Returns rules with another width for such rows."""
        if facts.side == 'right':
            return replace(self, right=width)
        if facts.has_positions:
            return replace(self, left_with_positions=width)
        return replace(self, left=width)

    def depends_on_left_padding(self, facts: RowFacts) -> bool:
        """Returns whether the losses of these rows would change with the width of their padding on the left.

        Rows without padding count as well, because in a wider batch they would get some. Returns False if the check
        has not tried to trim rows on the left.
        """
        return self._left_width(facts) == FAILED

    def has_trimmed_left(self, facts: RowFacts) -> bool:
        """Returns whether the check has trimmed padding on the left of such rows, and no loss has changed."""
        return _is_trimmed(self._left_width(facts))

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the number of columns that each row keeps."""
        # A row that is packed keeps only its own tokens. (The split refuses to pack a row with a label behind padding,
        # see check_first_labels().) In a batch without input text (Whisper), each length is the full width, because
        # every position counts as a token.
        if self.packing or not facts.has_ids:
            return facts.lengths
        if not self.trims(facts):
            return [facts.width] * len(facts.lengths)
        widths = list(facts.lengths)
        for row, has_label in enumerate(facts.has_label_behind_padding):
            if has_label:
                # The last pad on the left predicts the label of the first token, so the row keeps its padding.
                widths[row] = facts.width
        return widths

    def cuts_like(self, other: CutRules) -> bool:
        """Returns whether both rules treat rows in the same way. Ignores the widths up to which padding is trimmed."""
        return (
            _is_trimmed(self.left) == _is_trimmed(other.left)
            and _is_trimmed(self.left_with_positions) == _is_trimmed(other.left_with_positions)
            and _is_trimmed(self.right) == _is_trimmed(other.right)
            and self.needs_media == other.needs_media
            and self.packing == other.packing
        )

    def with_earlier_width(self, earlier: CutRules, side: str) -> CutRules:
        """Returns these rules, but trims padding on ``side`` only up to the widths of the ``earlier`` rules.

        The check calls it if these rules were exact, but the rows that it has compared had nothing to trim. Then
        nothing shows that trimming is exact up to a new width. A kind of padding that these rules keep is still kept,
        because trimming it has failed or was not tried.
        """
        if side == 'right':
            return replace(self, right=_earlier_if_trimmed(self.right, earlier.right))
        return replace(
            self,
            left=_earlier_if_trimmed(self.left, earlier.left),
            left_with_positions=_earlier_if_trimmed(self.left_with_positions, earlier.left_with_positions),
        )


def _is_trimmed(width: int) -> bool:
    """Returns whether a width of :class:`CutRules` says that padding is trimmed."""
    return width not in (NOT_TRIED, FAILED)


def _earlier_if_trimmed(width: int, earlier_width: int) -> int:
    return earlier_width if _is_trimmed(width) else width


def padded_candidates(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields the rules without packing that the check tries on these rows, cheapest first.

    ``earlier`` are the current rules, which the check has found on other rows.
    """
    # `coupling` says how rows of this model family depend on the media of others. It is empty if that is not known.
    # Then the check finds it out, if some rows have media and others have none: each rule is tried without dummy rows
    # first, and then with them.
    needs_media = earlier.needs_media or bool(facts.layout.family.coupling)
    has_media = [count > 0 for count in facts.media]
    is_mixed = any(has_media) and not all(has_media)
    earlier = replace(earlier, packing='', needs_media=needs_media)
    for rules in _padding_rules(facts, earlier):
        yield rules
        if is_mixed and not needs_media:
            yield replace(rules, needs_media=True)


def _padding_rules(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields rules that trim the padding of these rows, and then rules that keep it.

    Only the width for this kind of padding differs from the ``earlier`` rules. If trimming this kind has failed before,
    it is not tried again.
    """
    if not facts.is_padded or not facts.may_be_trimmed:
        # Nothing can be trimmed, so the check can try no other rules.
        yield earlier
        return
    earlier_width = earlier.trimmed_width(facts)
    if earlier_width != FAILED:
        new_width = max(facts.width, earlier_width)
        yield earlier.with_trimmed_width(facts, new_width)
    # The check comes here only if the rules above have failed.
    yield earlier.with_trimmed_width(facts, FAILED)


class Cutter(Protocol):
    """Makes microbatches of rows by rules."""

    @property
    def rules(self) -> CutRules:
        """The rules by which the run cuts its batches now."""
        ...

    @property
    def must_pack(self) -> bool:
        """Whether the run stops if rows cannot be packed."""
        ...

    def candidates(self, facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
        """Yields the rules to try on some rows, the cheapest first. ``earlier`` are the rules proven on other rows."""
        ...

    def largest_packed_row(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of these batches can have. 0: rows are not packed.

        ``microbatch_size`` is Composer's ``device_train_microbatch_size``, see :func:`.token_budget`.
        """
        ...

    def assemble(self, facts: RowFacts, rows: Sequence[int], rules: CutRules) -> Batch:
        """Returns the microbatch of some rows, packed by the rules, or trimmed as narrow as the rules allow.

        Args:
            facts: Facts about the batch that holds the rows. They hold the batch itself, too.
            rows: Indices of the rows in the batch.
            rules: The rules.
        """
        ...

    def adopt(self, rules: CutRules, layout: BatchLayout | None, *, has_loss_in_dummies: bool) -> None:
        """Cuts by these rules from now on, because the check has found them to be exact.

        Args:
            rules: The rules.
            layout: How tensors belong to rows. The check learns this from each batch.
            has_loss_in_dummies: Whether dummy rows add to a mean over tokens.
        """
        ...
