# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Several ranks in step: encoders are used on all ranks alike, and counts are equal where they must be.

An encoder that one rank leaves unused makes FSDP hang, which gathers its weights in every microbatch. DDP waits for
gradients where it reduces them, in most runs in the last one alone: there ``ReductionWatch`` gives it zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from composer_tokacc.batch import MODALITIES
from composer_tokacc.collectives import from_any_rank, max_over_ranks
from composer_tokacc.data_spec.cut_rules import CutRules
from composer_tokacc.data_spec.dummy_rows import DummyRows, zero_weight
from composer_tokacc.data_spec.pieces import Piece
from composer_tokacc.layout import RowFacts
from composer_tokacc.metadata import num_rows, with_metadata
from composer_tokacc.planning import CutOptions

FEW_TOKENS = 8
"""Of a text that only keeps a rank in step; models with convolutions take no fewer."""


def _dummies_of_ranks(sources: Sequence[RowFacts]) -> DummyRows:
    """Returns the dummy rows that ranks need beside this rank's batches; a collective."""
    dummies = DummyRows(sources)
    has = [modality in dummies.present for modality in MODALITIES]
    flags = max_over_ranks([*has, *(not one for one in has)])
    in_use, lacked = (list(compress(MODALITIES, one)) for one in (flags[: len(has)], flags[len(has) :]))
    dummies.needed = in_use[:1] if sources[0].layout.family.one_kind else in_use
    for modality in dummies.needed:
        if modality in lacked:  # by some rank, which gets the row of another
            own = dummies.row(modality)
            row = from_any_rank(None if own is None else own.row)
            if own is None:
                dummies.take(modality, row)
    return dummies


def with_dummies(pieces: Sequence[Piece], dummies: DummyRows) -> list[Piece]:
    """Returns each piece with rows of the modalities that it lacks; halved until they fit under the caps as well."""
    done: list[Piece] = []
    pending = list(reversed(pieces))
    while pending:
        piece = pending.pop()
        completed, count = piece._replace(dummies=dummies.missing(piece.facts, piece.rows)), len(piece.rows)
        if count > 1 and completed.dummies and not completed.fits:
            pending += [piece.take(range(count // 2, count)), piece.take(range(count // 2))]
        else:
            done.append(completed)
    return done


def in_step(
    sources: Sequence[RowFacts], pieces: Sequence[Piece], rules: CutRules, options: CutOptions, *,
    takes_media: bool, reduces_once: bool,
) -> tuple[list[Piece], list[dict[str, Any]]]:  # fmt: skip
    """Returns this rank's pieces with their dummy rows, and the empty microbatches behind them; a collective.

    There are no pieces where this rank has no sample. ``takes_media``: whether the model takes any, the same on all
    ranks; ``reduces_once``: whether ranks meet in the last microbatch alone.
    """
    dummies = _dummies_of_ranks(sources) if takes_media else DummyRows(sources)
    # A text row must not see an image where no row of the step has one: a microbatch of its own, the last, uses the
    # encoder, if ranks meet in each.
    stays_text = rules.needs_media and not dummies.needed
    need_none = stays_text or (reduces_once and not rules.needs_media)
    planned = list(pieces) if need_none else with_dummies(pieces, dummies)
    count = max(len(planned) + (stays_text and not reduces_once), 1)
    if options.equal_counts is True or (options.equal_counts == 'auto' and not reduces_once):
        (count,) = max_over_ranks([count])
    num_empty = count - len(planned)
    return planned, [_empty_microbatch(sources, dummies, len(planned))] * num_empty if num_empty else []


def _empty_microbatch(sources: Sequence[RowFacts], dummies: DummyRows, num_planned: int) -> dict[str, Any]:
    """Returns a microbatch of no weight: a row of each modality that is needed, else a few tokens of the shortest."""
    rows = [row.row for modality in dummies.needed if (row := dummies.row(modality)) is not None]
    if rows:
        empty = sources[0].layout.concat(rows)
    else:
        facts = min(sources, key=lambda one: min(one.lengths))
        layout, row = facts.layout, facts.lengths.index(min(facts.lengths))
        empty = zero_weight(layout.trim(layout.select(facts.batch, [row])))
        width = layout.width(empty)
        if not facts.media[row] and 'input_ids' in empty and width > FEW_TOKENS:
            empty = layout.narrow(empty, width - FEW_TOKENS if facts.side == 'left' else 0, FEW_TOKENS)
    return with_metadata(empty, microbatches=[num_planned] * num_rows(empty))
