# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Refuses a step if the padding of its rows depends on the number of ranks, and may change their losses.

Each rank pads to its own longest row. If all rows were in one batch, some would have more padding. More padding on the
right changes nothing. On the left it may change a row in two ways:

- If the first token has a label, the pad before it predicts that label.
- Some models count positions from the first column, or compute the pads (a recurrent network).

If a row is changed, the gradient depends on the number of ranks.

A rotary embedding that changes beyond some width (dynamic, long-rope) must be the same on all ranks, whichever side is
padded. Otherwise, too, the gradient depends on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from composer_tokacc.batch import IGNORE_INDEX, labels_of
from composer_tokacc.checks.cut_rules import CutRules
from composer_tokacc.collectives import all_gather_object, are_equal_on_ranks, get_world_size
from composer_tokacc.counting import LossRule
from composer_tokacc.layout import RowFacts
from composer_tokacc.layout.facts import is_beyond_rotary_limit
from composer_tokacc.refusals import NotExactError

log = logging.getLogger(__name__)

FIRST_LABEL = 'the first token of a row has a label, which the pad before it would predict'
"""The reason against more padding that the user can remove by masking a label."""


@dataclass(frozen=True)
class RankWidth:
    """The padded width of the rows of one rank, and whether another width would change the rows."""

    width: int
    pads_left: bool
    """Whether some row has padding on the left."""
    reason: str
    """Why more padding on the left may change the losses of these rows; empty: no reason is known.

    Rows without padding may have a reason, too, because they get some if another rank pads on the left."""
    is_beyond_rotary_limit: bool | None = None
    """Whether rows are so wide that the rotary embedding depends on the width. None: no row has a label, or the model
    has no such limit."""

    @classmethod
    def of(cls, facts_of_batches: Sequence[RowFacts], rules: CutRules | None, rule: LossRule | None) -> RankWidth:
        """Returns the width of the rows of this rank, and finds out whether another width would change them.

        Args:
            facts_of_batches: The facts of the batch, or of each microbatch that the loader has made. Empty if rows
                cannot be told apart, or if there is only one rank. Then nothing is compared, and the width is 0.
            rules: How rows may be cut. None: the run does not trim rows, so no check has shown the effect of padding.
            rule: The loss rule of the model. None: it is not known.
        """
        width = 0
        pads_left = False
        for facts in facts_of_batches:
            width = max(width, facts.width)
            pads_left |= facts.is_padded and facts.side == 'left'
        return cls(
            width=width,
            pads_left=pads_left,
            reason=_reason_against_padding(facts_of_batches, rules, rule),
            is_beyond_rotary_limit=_are_beyond_rotary_limit(facts_of_batches),
        )


class WidthSums(NamedTuple):
    """Sums over ranks that show whether their widths differ, and whether that may matter, see :func:`check_widths`."""

    num_beyond: int = 0  # ranks with rows beyond the limit of a rotary embedding
    num_within: int = 0  # ranks with rows within it
    num_left: int = 0  # ranks with padding on the left
    num_with_reason: int = 0  # ranks that know why more padding may change the losses
    # The sums of widths and of their squares show whether all ranks have the same width.
    widths: int = 0
    squared_widths: int = 0

    @classmethod
    def of(cls, rank_width: RankWidth) -> WidthSums:
        """Returns what one rank adds to the sums."""
        return cls(
            num_beyond=rank_width.is_beyond_rotary_limit is True,
            num_within=rank_width.is_beyond_rotary_limit is False,
            num_left=rank_width.pads_left,
            num_with_reason=bool(rank_width.reason),
            widths=rank_width.width,
            squared_widths=rank_width.width**2,
        )


def _are_beyond_rotary_limit(facts_of_batches: Sequence[RowFacts]) -> bool | None:
    """Returns whether some rows are beyond the limit of the rotary embedding; None: no row has a label, or no limit."""
    are_beyond = None
    for facts in facts_of_batches:
        if facts.layout.width_limit is None:
            continue
        has_label = labels_of(facts.batch) != IGNORE_INDEX
        if not has_label.any():
            continue
        # One microbatch of a pre-split batch is enough. The split then joins all microbatches, and all rows get the
        # widest width.
        if is_beyond_rotary_limit(facts):
            return True
        are_beyond = False
    return are_beyond


def _reason_against_padding(
    facts_of_batches: Sequence[RowFacts],
    rules: CutRules | None,
    rule: LossRule | None,
) -> str:
    """Returns why more padding on the left may change the losses of some rows; empty: no reason is known."""
    # Rows that are padded on the right get no padding on the left. All others may, if the batch is wider: those that
    # are padded on the left, and those that are not padded.
    may_get_padding = [facts for facts in facts_of_batches if not (facts.is_padded and facts.side == 'right')]
    # A label on a first token is named first, because the user can mask it. It may also be why the other reason holds:
    # rows with such a label are never trimmed, so the check cannot see how the model counts positions.
    may_shift_labels = rule is None or rule.shifts_labels
    if may_shift_labels and any(any(facts.has_first_label) for facts in may_get_padding):
        return FIRST_LABEL
    if any(_may_depend_on_padding(facts, rules) for facts in may_get_padding):
        return 'more padding changes their losses (the model may count positions from the first column)'
    return ''


def _may_depend_on_padding(facts: RowFacts, rules: CutRules | None) -> bool:
    """Returns whether more padding on the left may change the losses of these rows, apart from their first labels.

    Rows without padding may change as well, because they would get some in one forward over all rows.
    """
    if rules is None:
        return False  # nothing is known, and check_widths() warns of that
    if rules.packing:
        return False  # packed rows have no padding
    if rules.depends_on_left_padding(facts):
        return True  # the check has trimmed such rows, and their losses have changed
    if rules.has_trimmed_left(facts):
        return False  # the check has trimmed such rows, and their losses stayed the same
    # The check has not trimmed such rows, for one of three reasons:
    # 1. They may not be trimmed (`may_be_trimmed`, which does not look at labels): they are beyond a rotary limit, or
    #    have audio along the text (Voxtral). Both kinds of models have rotary embeddings, which see only distances.
    #    (check_widths() compares the limit itself.) Or the batch has no input text (Whisper).
    # 2. They have no padding.
    # 3. Their first token has a label, which the pad before it predicts.
    # In cases 2 and 3 the model may count positions from the first column. `position_ids` in the batch would prove
    # nothing, because the model may ignore them.
    is_first_case = facts.is_padded and not facts.may_be_trimmed
    return not is_first_case


def check_widths(
    sums: WidthSums,
    width_of_rank: Callable[[], RankWidth],
    *,
    are_sums_outdated: bool,
    is_trimmed: bool,
) -> None:
    """Raises RuntimeError on all ranks if padding on the left, up to the width of the widest rank, would change rows.

    Rows without padding count as well, but only if some rank pads on the left. It also raises if only some ranks have
    rows beyond the limit of a rotary embedding. If the sums show unequal widths that may matter, the ranks exchange
    their widths, which is a collective.

    Args:
        sums: The sums over the ranks.
        width_of_rank: Returns the width of this rank by the rules that hold now. Called only for this exchange.
        are_sums_outdated: Whether the first-batch check ran after the sums were made. It may have found that padding
            matters, which the sums do not show. So the ranks exchange their widths. It must be the same on all ranks.
        is_trimmed: Whether the run trims rows. If not, :meth:`RankWidth.of` gets no rules, and no check shows whether
            the model counts positions from the first column. Then unequal widths give a warning.
    """
    if sums.num_beyond and sums.num_within:
        raise NotExactError(
            'All ranks must have rows on one side of the width at which the rotary embedding of this model begins to '
            f'depend on the width, got: {sums.num_beyond} ranks beyond it and {sums.num_within} within. The gradient '
            'would depend on the number of ranks. Pad all rows to one width, or shorten them (docs/errors.md#ranks).'
        )
    are_equal = are_equal_on_ranks(sums.widths, sums.squared_widths, get_world_size())
    if are_equal or not sums.num_left:
        return
    if not is_trimmed:
        _warn_of_unknown_positions()
    may_matter = sums.num_with_reason > 0 or are_sums_outdated
    if not may_matter:
        return
    widths = all_gather_object(width_of_rank())
    widest = max(rank_width.width for rank_width in widths)
    # The reason of a rank that is as wide as the widest does not matter, because its rows get no more padding.
    for rank, rank_width in enumerate(widths):
        if rank_width.reason and rank_width.width < widest:
            if rank_width.reason == FIRST_LABEL:
                remedy = 'mask that label (-100) and give `position_ids`'
            else:
                # Only if rows may be trimmed can the check see that positions are given. It never trims a row that has
                # a label on its first token, also if it is a row of another rank.
                remedy = 'give `position_ids` and mask labels (-100) of first tokens'
            raise NotExactError(
                f'Rows padded on the left must be equally wide on all ranks, got: {rank_width.width} on rank {rank}, '
                f'{widest} on another, and {rank_width.reason}. The gradient would depend on the number of ranks. '
                f'Pad all rows to one width, pad on the right, or {remedy} (docs/errors.md#padding).'
            )


@cache
def _warn_of_unknown_positions() -> None:
    """Warns once that nothing shows whether unequal padding on the left changes the gradient."""
    log.warning(
        'Rows padded on the left have other widths on other ranks. If the model counts positions from the first '
        'column, the gradient depends on the number of ranks. That was not checked: use token_data_spec(), or pad '
        'on the right (docs/errors.md#padding).'
    )
