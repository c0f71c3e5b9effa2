# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Microbatches of pieces: rows selected, trimmed, completed by dummy rows, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from composer_tokacc.data_spec.cut_rules import CutRules
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.dummy_rows import add_rows
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.data_spec.pieces import Piece
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CutOptions


def build(
    layout: BatchLayout,
    pieces: Sequence[Piece],
    rules: CutRules,
    options: CutOptions,
    attention: DocumentAttention | None = None,
) -> Iterator[dict[str, Any]]:
    """Gives the microbatch of each piece; those of one batch lie together, so that its rows are counted once."""
    for _, of_source in groupby(pieces, key=lambda piece: id(piece.facts)):
        same = list(of_source)
        selected = layout.split(same[0].facts.batch, [piece.rows for piece in same])
        for piece, rows in zip(same, selected, strict=True):
            microbatch = _trimmed(layout, piece, rows, rules, options)
            if piece.dummies:
                microbatch = add_rows(layout, microbatch, [dummy.row for dummy in piece.dummies])
            yield pack_rows(layout, microbatch, attention) if rules.packing else microbatch


def _trimmed(
    layout: BatchLayout, piece: Piece, rows: dict[str, Any], rules: CutRules, options: CutOptions
) -> dict[str, Any]:
    """Returns the rows of a piece without the columns that none of them needs, as far as the rules allow."""
    facts, width = piece.facts, piece.width(options)
    if width == facts.width or rules.packing:
        return rows
    start = facts.width - width if facts.side == 'left' else 0
    kept = layout.narrow(rows, start, width)
    if start and rules.policy(facts) == 'shift' and not facts.has_positions:
        # The model counts positions from column 0 of what it is given: it shall count on from where it would have.
        positions = torch.arange(start, start + width)
        kept['position_ids'] = positions.expand(len(piece.rows), width).contiguous()
    return kept
