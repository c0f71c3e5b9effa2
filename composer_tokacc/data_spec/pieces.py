# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pieces: microbatches as lists of row numbers, before their tensors are made.

- :class:`.RowFacts`, here called facts, were read from the tensors of a batch: the length of each row, the side of its
  padding, its images.
- :class:`.CutRules` say how much of the padding may be removed, and whether rows are packed.
- A :class:`Piece` names some rows of the batch, and their widths under these rules.
- :data:`DummyRows` are rows without weight. They add a modality to a microbatch that must have it.
- :func:`build` makes a microbatch of each piece.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, BatchDict, sample_name
from composer_tokacc.checks.cut_rules import CutRules
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import BatchLayout, RowFacts
from composer_tokacc.layout.joining import values_of_rows, with_mask
from composer_tokacc.layout.layout import split_trimmed
from composer_tokacc.layout.pre_split import id_for_padding
from composer_tokacc.planning import CAPPED_SIZES, CutOptions, cut_rows, padded_widths
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import RowCounts, attach_row_counts, row_counts_of

log = logging.getLogger(__name__)

# Dummy rows. A microbatch gets one if it lacks a modality that all ranks must compute, or that the results of its own
# rows depend on (Mllama, see CutRules.needs_media). They change neither the gradient nor the number of samples.

DummyRows: TypeAlias = Mapping[str, RowFacts]
"""A dummy row for each modality that every microbatch must have: the facts of a batch that holds only this row. It may
come from another rank."""


def missing_dummies(dummies: DummyRows, facts: RowFacts, rows: Sequence[int]) -> list[RowFacts]:
    """Returns the dummy rows of the modalities that none of these rows of a batch has."""
    has_media = any(facts.media[row] for row in rows)  # of any modality
    if has_media and facts.layout.family.one_kind:
        # The model takes media of only one modality in a forward, so a dummy row must not add another.
        return []
    missing = []
    for modality, dummy in dummies.items():
        counts = facts.counts.get(modality)
        if counts is None or not any(counts[row] for row in rows):
            missing.append(dummy)
    return missing


def zero_weight(batch: Batch) -> BatchDict:
    """Returns the batch with all labels masked, and with counts by which no row is a sample."""
    labels = torch.full_like(batch['labels'], IGNORE_INDEX)
    without_labels = {**batch, 'labels': labels}
    counts = [RowCounts(samples=0, rule=row.rule) for row in row_counts_of(batch)]
    return attach_row_counts(without_labels, counts)


def smallest_row(facts_of_batches: Sequence[RowFacts], modality: str) -> BatchDict | None:
    """Returns the smallest row that has the modality, trimmed and without weight; None if no row has it.

    The smallest row is the one with the fewest items of the modality, for example images. Among rows with equally many
    items it is the shortest.
    """
    smallest: tuple[RowFacts, int] | None = None
    smallest_size = (sys.maxsize, 0)
    for facts in facts_of_batches:
        for row, num_items in enumerate(facts.counts.get(modality, ())):
            size = (num_items, facts.lengths[row])
            if num_items > 0 and size < smallest_size:
                smallest_size = size
                smallest = (facts, row)
    if smallest is None:
        return None
    facts, row = smallest
    return trimmed_dummy(facts, row)


def trimmed_dummy(facts: RowFacts, row: int) -> BatchDict:
    """Returns a row of the batch without its padding and without weight.

    If the row is the whole batch, the result shares tensors with it. The padding stays if each token has audio frames
    of its own (Voxtral Realtime).
    """
    (trimmed,) = split_trimmed(facts.layout, facts.batch, [[row]])
    return zero_weight(trimmed)


def add_rows(
    layout: BatchLayout,
    microbatch: Batch,
    dummies: Sequence[Batch],
    side: str,
) -> BatchDict:
    """Returns the microbatch with dummy rows after its own rows.

    Args:
        layout: Layout of the microbatch.
        microbatch: The rows that come first: those with weight, or a first dummy row.
        dummies: The dummy rows, each a batch of one row.
        side: Padding side of the device batch. The microbatch cannot show it, because after trimming it may have no
            padding.
    """
    batches: list[Batch] = [microbatch]
    for dummy in dummies:
        batches.append(_with_lists_of(microbatch, dummy))
    if any(batch.get('attention_mask') is not None for batch in batches):
        # A loader may give no masks. Then a batch has one only if the split has padded it. concat() refuses a mask that
        # only some batches have, so the others get a mask of ones.
        batches = [with_mask(batch) for batch in batches]
    pad_token_id = id_for_padding(layout, [microbatch])
    return layout.concat(batches, padding_side=side, pad_token_id=pad_token_id)


def _with_lists_of(microbatch: Batch, dummy: Batch) -> BatchDict:
    """Returns a dummy row with the same lists as the microbatch. ``concat`` refuses a list that one of them lacks.

    If the dummy row has no value for a list, it gets None or 0, see :func:`.values_of_rows`.
    """
    with_lists = {}
    for key, value in dummy.items():
        if not isinstance(value, (list, tuple)):
            with_lists[key] = value
    for key, value in microbatch.items():
        if isinstance(value, (list, tuple)):
            with_lists[key] = values_of_rows(key, [dummy])
    return with_lists


# Pieces.


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a batch that go through the model together.

    Args:
        facts: Facts of the batch. ``decoder_width`` is the width of a decoder's text, 0 if there is none.
        rules: How rows of the batch may be cut.
        options: The caps of a microbatch, and how to cut under them.
        rows: The rows of this piece, by their numbers in the batch.
        widths: Number of columns that each of these rows keeps.
        sizes: The value of each row, for each kind of size that has a cap in ``options``. For example, ``image_tokens``
            has the image tokens of each row, see :data:`.CAPPED_SIZES`.
        dummies: Facts of the dummy rows that are computed together with these rows, each of a batch of one row.
    """

    facts: RowFacts
    rules: CutRules
    options: CutOptions
    rows: Sequence[int]
    widths: Sequence[int]
    sizes: Mapping[str, Sequence[int]]
    dummies: Sequence[RowFacts] = ()

    @classmethod
    def from_facts(cls, facts: RowFacts, rules: CutRules, options: CutOptions) -> Piece:
        """Returns a piece of all rows of a batch."""
        sizes: dict[str, Sequence[int]] = {}
        for size in options.caps:
            if size == 'image_tokens':
                sizes[size] = facts.image_tokens
            elif size == 'loss_tokens':
                sizes[size] = [row.loss_tokens for row in row_counts_of(facts.batch)]
        rows = range(len(facts.lengths))
        return cls(facts, rules, options, rows, rules.widths(facts), sizes)

    def take(self, places: Iterable[int]) -> Piece:
        """Returns a piece of some of these rows, given by their places in this piece, with the same dummy rows."""
        chosen = list(places)
        rows = [self.rows[place] for place in chosen]
        widths = [self.widths[place] for place in chosen]
        sizes = {}
        for name, values in self.sizes.items():
            sizes[name] = [values[place] for place in chosen]
        return replace(self, rows=rows, widths=widths, sizes=sizes)

    @property
    def width(self) -> int:
        """Width of the microbatch before it gets its dummy rows and is packed, see :meth:`_padded_widths`."""
        return int(self._padded_widths().max())

    @property
    def columns(self) -> range:
        """The columns of the batch that the rows keep. All other columns hold only padding, which may be removed."""
        width = self.width
        first_column = 0
        if self.facts.side == 'left':
            first_column = self.facts.width - width
        return range(first_column, first_column + width)

    def _padded_widths(self) -> np.ndarray:
        """Returns the widths of the rows, each rounded up to ``width_multiple``.

        Rounding ends at the batch's width, and at the cap, so that it puts no row over the cap. A row that is over the
        cap already keeps its width.
        """
        widest_under_cap = self.options.max_tokens - self.facts.decoder_width
        limit = min(self.facts.width, widest_under_cap)
        return padded_widths(np.array(self.widths), self.options.width_multiple, limit)

    @property
    def fits(self) -> bool:
        """Whether the rows and their dummy rows together are within the caps. A single row may be over a cap, too."""
        if self._num_tokens > self.options.max_tokens:
            return False
        return all(self._total(size) <= cap for size, cap in self.options.caps.items())

    def _total(self, size: str) -> int:
        """Returns the sum of a capped size over the rows, and over their dummy rows as far as these count."""
        total = sum(self.sizes[size])
        # Dummy rows have image tokens, but no loss tokens. If the rows have no image tokens, those of their dummy rows
        # do not count either: to cut the piece would not help, because each part would need the same dummy rows.
        if size == 'image_tokens' and total > 0:
            for dummy in self.dummies:
                total += sum(dummy.image_tokens)
        return total

    @property
    def _num_tokens(self) -> int:
        """Tokens of the rows and their dummy rows together, with their padding if the rows are not packed."""
        dummy_widths = [dummy.width for dummy in self.dummies]
        if self.rules.packing:
            return sum(self.widths) + sum(dummy_widths)
        widest = max([self.width, *dummy_widths])
        # The decoder's text of a dummy row of another rank may be wider. Then all rows are padded to that width.
        decoder_widths = [dummy.decoder_width for dummy in self.dummies]
        widest_decoder = max([self.facts.decoder_width, *decoder_widths])
        num_rows = len(self.rows) + len(self.dummies)
        return num_rows * (widest + widest_decoder)

    def cut(self) -> list[Piece]:
        """Cuts the rows into pieces of least total cost, see :func:`.cut_rows`.

        A piece may not fit: dummy rows are not counted, and a row over a cap is a piece by itself.
        """
        # In the options, packing may still be 'auto'. The rules hold the decision.
        if self.rules.packing:
            widths = self.widths  # without decoder_width, because pack_rows() refuses the text of a decoder
            options = replace(self.options, packing=True)
        else:
            widths = self._padded_widths() + self.facts.decoder_width
            # These widths are rounded already. With a multiple of 1 the cut does not round them again.
            options = replace(self.options, packing=False, width_multiple=1)
        # `max_width` limits how far the cut rounds widths up. Here it rounds none: padded ones are rounded already, and
        # packed ones are never rounded.
        groups = cut_rows(widths, options, max_width=None, **self.sizes)
        return [self.take(group) for group in groups]

    def check_caps(self, indices: Sequence[int] | None) -> None:
        """Raises InvalidInputError if a row by itself is over a cap. With ``on_oversize='warn'`` it logs a warning.

        Call it on the piece of all rows of a batch, in which the place of a row is its number in the batch.
        ``indices`` holds the index of each row in the dataset, for the message; None: it is not known.
        """
        sizes = {'tokens': [width + self.facts.decoder_width for width in self.widths], **self.sizes}
        caps = {'tokens': self.options.max_tokens, **self.options.caps}
        for size, cap in caps.items():
            largest = max(sizes[size])
            if largest <= cap:
                continue
            row = sizes[size].index(largest)
            if indices is None or 'sample_ids' in self.facts.batch:
                name = sample_name(self.facts.batch, row)
            else:
                name = f'sample number {indices[row]} of the dataset'
            if size == 'tokens':
                setting = '`device_train_microbatch_size` x `slot_tokens`'
            else:
                setting = f'`{CAPPED_SIZES[size]}`'
            words = size.replace('_', ' ')  # such as 'image tokens'
            message = (
                f'A row must fit into a microbatch, got: {name} of {largest} {words}, over the cap of {cap} '
                f'({setting}). Raise it, shorten the sample, or measure the lengths again if a table of '
                'lengths promised less'
            )
            if self.options.on_oversize == 'raise':
                raise InvalidInputError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
            log.warning('%s. It is computed alone.', message)


# Microbatches.


def build(pieces: Sequence[Piece], attention: DocumentAttention | None = None) -> list[BatchDict]:
    """Returns the microbatch of each piece.

    The pieces may belong to several batches, because each microbatch of a pre-split batch is a batch here. Consecutive
    pieces of the same batch are selected together, so that the layout assigns media to rows only once for each batch.

    Args:
        pieces: The pieces.
        attention: The changed attention of the model. Needed to pack rows.
    """
    microbatches = []
    for _, group in groupby(pieces, key=lambda piece: id(piece.facts)):
        pieces_of_batch = list(group)
        rows_of_pieces = _trimmed_rows(pieces_of_batch)
        for piece, microbatch in zip(pieces_of_batch, rows_of_pieces, strict=True):
            layout = piece.facts.layout_of_rows
            if piece.dummies:
                dummies = [dummy.batch for dummy in piece.dummies]
                microbatch = add_rows(layout, microbatch, dummies, piece.facts.side)
            if piece.rules.packing:
                assert attention is not None  # the split changes the attention before it packs
                microbatch = pack_rows(layout, microbatch, attention)
            microbatches.append(microbatch)
    return microbatches


def _trimmed_rows(pieces: Sequence[Piece]) -> list[BatchDict]:
    """Returns the rows of each piece, with only the columns that they keep. All pieces are of the same batch."""
    facts = pieces[0].facts
    rows_of_pieces = [list(piece.rows) for piece in pieces]
    columns_of_pieces = [piece.columns for piece in pieces]
    all_rows = list(range(len(facts.lengths)))
    if rows_of_pieces == [all_rows]:
        # The only piece is the batch itself. It may have entries that split() refuses, because it cannot tell their
        # rows apart.
        (columns,) = columns_of_pieces
        return [facts.layout.narrow(facts.batch, columns.start, len(columns))]
    return facts.layout.split(facts.batch, rows_of_pieces, columns_of_pieces)
