# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pieces: rows of a batch that go through the model together, under the caps; and the microbatches built of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import sample_name
from composer_tokacc.data_spec.cut_rules import CutRules
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.dummy_rows import DummyRow, add_rows
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import RowFacts
from composer_tokacc.metadata import loss_tokens_of
from composer_tokacc.planning import CAPPED_SIZES, CutOptions, cut_rows

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Some rows of a batch, how they may be cut, and the dummy rows that are computed beside them."""

    facts: RowFacts
    rules: CutRules
    options: CutOptions
    rows: list[int]
    widths: list[int]
    """Columns that each of them keeps."""
    sizes: dict[str, list[int]]
    """Of each of them, the sizes that have a cap (``CutOptions.caps``), by name."""
    dummies: Sequence[DummyRow] = ()

    @classmethod
    def from_facts(cls, facts: RowFacts, rules: CutRules, options: CutOptions) -> Piece:
        """Returns all rows of a batch."""
        rows = list(range(len(facts.lengths)))
        return cls(facts, rules, options, rows, rules.widths(facts), _capped_sizes(facts, options))

    def take(self, which: Iterable[int]) -> Piece:
        """Returns some of these rows."""
        which = list(which)
        rows = [self.rows[place] for place in which]
        widths = [self.widths[place] for place in which]
        sizes = {}
        for name, values in self.sizes.items():
            sizes[name] = [values[place] for place in which]
        return self._replace(rows=rows, widths=widths, sizes=sizes)

    @property
    def width(self) -> int:
        """Columns of their text once trimmed."""
        multiple = self.options.width_multiple
        return min(-(-max(self.widths) // multiple) * multiple, self.facts.width)

    @property
    def fits(self) -> bool:
        """Whether they are within the caps, together with their dummy rows."""
        num_rows, dummy_widths = len(self.rows) + len(self.dummies), [row.width for row in self.dummies]
        size = num_rows * (max([self.width, *dummy_widths]) + self.facts.decoder_width)
        if self.rules.packing:  # one row of them all, as wide as they are together
            size = sum(self.widths) + sum(dummy_widths)
        return size <= self.options.max_tokens and self._fits_capped_sizes()

    def _fits_capped_sizes(self) -> bool:
        # Dummy rows have no loss tokens.
        sizes_of_dummies = {'image_tokens': sum(row.image_tokens for row in self.dummies)}
        for name, cap in self.options.caps.items():
            total = sum(self.sizes[name])
            # A dummy row that is over a cap by itself stays so, however few rows are with it.
            if total > 0 and total + sizes_of_dummies.get(name, 0) > cap:
                return False
        return True

    def cut(self) -> list[Piece]:
        """Returns the rows in pieces of least cost under the caps."""
        options, widths, max_width = replace(self.options, packing=bool(self.rules.packing)), self.widths, None
        if not options.packing:
            extra = self.facts.decoder_width
            max_width = self.facts.width + extra
            if extra:  # what is rounded up is the width without it
                widths = [self.take([k]).width + extra for k in range(len(self.rows))]
                options = replace(options, width_multiple=1)
        groups = cut_rows(widths, options, max_width=max_width, **self.sizes)
        return [self.take(group) for group in groups]

    def check_caps(self, indices: Sequence[int] | None) -> None:
        """Refuses (ValueError) or names the row furthest over a cap; ``indices``: in the dataset, if they are known."""
        sizes_in_tokens, options = [width + self.facts.decoder_width for width in self.widths], self.options
        checks = [(sizes_in_tokens, options.max_tokens, 'tokens', '`device_train_microbatch_size` x `slot_tokens`')]
        for size, cap in options.caps.items():
            checks.append((self.sizes[size], cap, size.replace('_', ' '), f'`{CAPPED_SIZES[size]}`'))
        for sizes, cap, unit, setting in checks:
            if max(sizes) <= cap:
                continue
            row = max(range(len(sizes)), key=sizes.__getitem__)
            name = sample_name(self.facts.batch, row)
            if indices is not None and 'sample_ids' not in self.facts.batch:
                name = f'sample number {indices[row]} of the dataset'
            message = (
                f'A row must fit into a microbatch, got: {name} of {sizes[row]} {unit}, over the cap of {cap} '
                f'({setting}). Raise it, shorten the sample, or measure the lengths again if a table of lengths '
                'promised less'
            )
            if options.on_oversize == 'raise':
                raise ValueError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
            log.warning('%s. It is computed alone.', message)


def _capped_sizes(facts: RowFacts, options: CutOptions) -> dict[str, list[int]]:
    """Returns the sizes of all rows that have a cap, by name."""
    sizes = {}
    if 'image_tokens' in options.caps:
        sizes['image_tokens'] = facts.image_tokens
    if 'loss_tokens' in options.caps:
        sizes['loss_tokens'] = loss_tokens_of(facts.batch)
    return sizes


def build(pieces: Sequence[Piece], attention: DocumentAttention | None = None) -> Iterator[dict[str, Any]]:
    """Gives the microbatch of each piece; those of one batch lie together, so that its rows are counted once."""
    for _, of_source in groupby(pieces, key=lambda piece: id(piece.facts)):
        same = list(of_source)
        facts = same[0].facts
        is_whole = len(same) == 1 and same[0].rows == list(range(len(facts.lengths)))
        rows_of = [dict(facts.batch)] if is_whole else facts.layout.split(facts.batch, [piece.rows for piece in same])
        for piece, rows in zip(same, rows_of, strict=True):
            microbatch = _trimmed(piece, rows)
            if piece.dummies:
                microbatch = add_rows(facts.layout, microbatch, [dummy.row for dummy in piece.dummies], facts.side)
            yield pack_rows(facts.layout, microbatch, attention) if piece.rules.packing else microbatch


def _trimmed(piece: Piece, rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the rows of a piece without the columns that none of them needs, as far as the rules allow."""
    facts, rules, width = piece.facts, piece.rules, piece.width
    if width == facts.width or rules.packing:
        return rows
    start = facts.width - width if facts.side == 'left' else 0
    kept = facts.layout.narrow(rows, start, width)
    if start and rules.policy(facts) == 'shift' and not facts.has_positions:
        # The model counts positions from column 0 of what it is given: it shall count on from where it would have.
        positions = torch.arange(start, start + width)
        kept['position_ids'] = positions.expand(len(piece.rows), width).contiguous()
    return kept
