# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pieces: microbatches as lists of row numbers, before their tensors are made.

- :class:`.RowFacts`, here called facts, were read from the tensors of a batch: the length of each row, the side of its
  padding, its images.
- :class:`CutRules` say how much of the padding may be removed, and whether rows are packed.
- A :class:`Piece` names some rows of the batch, and their widths under these rules.
- :data:`DummyRows` are rows without weight. They add a modality to a microbatch that must have it.
- :func:`build` makes a microbatch of each piece.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, BatchDict, sample_name
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import BatchLayout, RowFacts
from composer_tokacc.layout.layout import values_of_rows
from composer_tokacc.layout.pre_split import id_for_padding
from composer_tokacc.planning import CAPPED_SIZES, CutOptions, cut_rows, padded_widths
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import RowCounts, attach_row_counts, row_counts_of

log = logging.getLogger(__name__)

NOT_TRIED = 0
"""Width in :class:`CutRules` of padding that the first-batch check has not tried to trim."""
FAILED = -1
"""Width in :class:`CutRules` of padding that cannot be trimmed."""


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay the same as in the device batch.

    Each kind of padding has a width. Padding is trimmed in batches up to this width, because the first-batch check has
    shown on a batch of this width that trimming is exact. Wider batches keep their padding until the check has looked
    at one of them. If the width is :data:`NOT_TRIED` or :data:`FAILED`, all batches keep padding of this kind.

    Args:
        left: Width for rows padded on the left.
        left_with_positions: Width for rows padded on the left if their batch has ``position_ids``.
        right: Width for rows padded on the right.
        needs_media: Whether each microbatch without media gets a dummy row with media if other microbatches of the
            step have media. Mllama needs this: it skips its cross-attention only if the whole batch has no image.
        packing: How a microbatch's rows become one packed row. ``'documents'``: our :class:`DocumentAttention` computes
            each row by itself; ``'positions'``: the model's own attention tells the rows apart by ``position_ids`` that
            restart; ``''``: rows are not packed.
    """

    left: int = NOT_TRIED
    left_with_positions: int = NOT_TRIED
    right: int = NOT_TRIED
    needs_media: bool = False
    packing: str = ''

    def trims(self, facts: RowFacts) -> bool:
        """Returns whether the padding of a batch is trimmed."""
        return facts.may_be_trimmed and facts.width <= getattr(self, _padding_name(facts))

    def depends_on_left_padding(self, facts: RowFacts) -> bool:
        """Returns whether the losses of these rows would change with the width of their padding on the left.

        Rows without padding count as well, because in a wider batch they would get some. Returns False if the check
        has not tried to trim rows on the left.
        """
        return getattr(self, _left_padding_name(facts)) == FAILED

    def has_trimmed_left(self, facts: RowFacts) -> bool:
        """Returns whether the check has trimmed padding on the left of such rows, and no loss has changed."""
        return getattr(self, _left_padding_name(facts)) > 0

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the number of columns that each row keeps."""
        # A row that is packed keeps only its own tokens. Without ids or vectors (Whisper) each length is the full
        # width, because every position counts as a token.
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
        for name in ('left', 'left_with_positions', 'right'):
            is_trimmed = getattr(self, name) > 0
            is_trimmed_by_other = getattr(other, name) > 0
            if is_trimmed != is_trimmed_by_other:
                return False
        return self.needs_media == other.needs_media and self.packing == other.packing

    def with_earlier_width(self, earlier: CutRules, side: str) -> CutRules:
        """Returns these rules, but trims padding on ``side`` only up to the widths of the ``earlier`` rules.

        The check calls it if these rules were exact, but no row was trimmed. Then nothing shows that trimming is exact
        up to a new width. A kind of padding that these rules keep is still kept, because trimming it has failed or was
        not tried.
        """
        names = ('left', 'left_with_positions')
        if side == 'right':
            names = ('right',)
        changed = {}
        for name in names:
            is_trimmed = getattr(self, name) > 0
            if is_trimmed:
                changed[name] = getattr(earlier, name)
        return replace(self, **changed)


def _padding_name(facts: RowFacts) -> str:
    """Returns the field of :class:`CutRules` that holds the width for these rows."""
    return 'right' if facts.side == 'right' else _left_padding_name(facts)


def _left_padding_name(facts: RowFacts) -> str:
    """Returns the field for rows that are padded on the left."""
    # Positions in the batch are cut together with the tokens. Positions that the model counts itself may change.
    return 'left_with_positions' if facts.has_positions else 'left'


def padded_candidates(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields the rules without packing that the check tries on these rows, cheapest first.

    ``earlier`` are the current rules, which the check has found on other rows.
    """
    # `coupling` says how rows of this model family depend on the media of others. It is empty if they do not.
    needs_media = earlier.needs_media or bool(facts.layout.family.coupling)
    # In other families the check finds out, but only a batch of rows with and without media can show it.
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
    name = _padding_name(facts)
    earlier_width: int = getattr(earlier, name)
    if earlier_width != FAILED:
        new_width = max(facts.width, earlier_width)
        yield replace(earlier, **{name: new_width})
    yield replace(earlier, **{name: FAILED})


# Dummy rows. A microbatch gets one if it lacks a modality that all ranks must compute, or that its own rows depend on.
# They change neither the gradient nor the number of samples.

DummyRows: TypeAlias = Mapping[str, RowFacts]
"""A dummy row for each modality that every microbatch must have: the facts of a batch that holds only this row."""


def missing_dummies(dummies: DummyRows, facts: RowFacts, rows: Sequence[int]) -> list[RowFacts]:
    """Returns a dummy row for each modality that none of these rows of a batch has."""
    has_media = any(facts.media[row] for row in rows)
    if has_media and facts.layout.family.one_kind:
        # In a forward, this model takes media of only one modality.
        return []
    missing = []
    for modality, dummy in dummies.items():
        counts = facts.counts.get(modality)
        if counts is None or not any(counts[row] for row in rows):
            missing.append(dummy)
    return missing


def zero_weight(batch: Batch) -> BatchDict:
    """Returns a copy of the batch in which all labels are masked and no row counts as a sample."""
    labels = torch.full_like(batch['labels'], IGNORE_INDEX)
    without_labels = {**batch, 'labels': labels}
    counts = [RowCounts(samples=0, rule=row.rule) for row in row_counts_of(batch)]
    return attach_row_counts(without_labels, counts)


def smallest_row(facts_of_batches: Sequence[RowFacts], modality: str) -> BatchDict | None:
    """Returns a copy of the smallest row that has the modality, without weight; None if no row has it.

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
    selected = facts.layout.select(facts.batch, [row])
    trimmed = facts.layout.trim(selected)
    return zero_weight(trimmed)


def add_rows(
    layout: BatchLayout,
    microbatch: Batch,
    rows: Sequence[Batch],
    side: str,
) -> BatchDict:
    """Returns the microbatch with dummy rows after its own rows.

    Args:
        layout: Layout of the microbatch.
        microbatch: The rows with weight.
        rows: The dummy rows, each a batch of one row.
        side: Padding side of the device batch. The microbatch cannot show it, because after trimming it may have no
            padding.
    """
    batches: list[Batch] = [microbatch]
    for row in rows:
        batches.append(_with_lists_of(microbatch, row))
    pad_token_id = id_for_padding(layout, [microbatch])
    return layout.concat(batches, padding_side=side, pad_token_id=pad_token_id)


def _with_lists_of(microbatch: Batch, row: Batch) -> BatchDict:
    """Returns a dummy row with the same lists as the microbatch. ``concat`` refuses one that only some batches have."""
    dummy = dict(row)
    for key, value in row.items():
        if isinstance(value, (list, tuple)):
            del dummy[key]
    for key, value in microbatch.items():
        if isinstance(value, (list, tuple)):
            dummy[key] = values_of_rows(key, [row])
    return dummy


# Pieces.


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a batch that go through the model together.

    Args:
        facts: Facts of the batch.
        rules: How rows of the batch may be cut.
        options: The caps of a microbatch, and how to cut under them.
        rows: The rows of this piece, by their numbers in the batch.
        widths: Number of columns that each of these rows keeps.
        sizes: For each size that has a cap in ``options``, its value in each of these rows. The keys are
            ``'image_tokens'`` and ``'loss_tokens'``.
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
        """Returns a piece of some of these rows, given by their places in this piece."""
        chosen = list(places)
        rows = [self.rows[place] for place in chosen]
        widths = [self.widths[place] for place in chosen]
        sizes = {}
        for name, values in self.sizes.items():
            sizes[name] = [values[place] for place in chosen]
        return replace(self, rows=rows, widths=widths, sizes=sizes)

    @property
    def width(self) -> int:
        """Width of the widest row, rounded up to ``width_multiple``. Dummy rows do not count."""
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
        """Returns the widths of the rows, each rounded up to ``width_multiple``, but at most to the batch's width."""
        # Rounding must not put a row that fits by itself over the cap. A row over this limit keeps its width.
        widest_under_cap = self.options.max_tokens - self.facts.decoder_width
        limit = min(self.facts.width, widest_under_cap)
        return padded_widths(np.array(self.widths), self.options.width_multiple, limit)

    @property
    def fits(self) -> bool:
        """Whether the rows and their dummy rows together are within the caps."""
        if self._num_tokens > self.options.max_tokens:
            return False
        for size, cap in self.options.caps.items():
            total = sum(self.sizes[size])
            # Image tokens of dummy rows only count if the rows have image tokens themselves. Otherwise cutting the
            # piece would not help, because each part would need the same dummy rows.
            if size == 'image_tokens' and total > 0:
                for dummy in self.dummies:
                    total += sum(dummy.image_tokens)
            if total > cap:
                return False
        return True

    @property
    def _num_tokens(self) -> int:
        """Tokens of the rows and their dummy rows together, with padding."""
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
        """Returns the rows in pieces under the caps, so that the total cost is least."""
        # In the options, packing may still be 'auto'. The rules hold the decision.
        if self.rules.packing:
            widths = self.widths
            options = replace(self.options, packing=True)
        else:
            widths = self._padded_widths() + self.facts.decoder_width
            # Only the encoder's text is rounded up. The cut must not round its sum with the decoder's text again.
            options = replace(self.options, packing=False, width_multiple=1)
        groups = cut_rows(
            widths,
            options,
            image_tokens=self.sizes.get('image_tokens'),
            loss_tokens=self.sizes.get('loss_tokens'),
        )
        return [self.take(group) for group in groups]

    def check_caps(self, indices: Sequence[int] | None) -> None:
        """Raises ValueError if a row by itself is over a cap. With ``on_oversize='warn'`` it logs a warning.

        Call it on the piece of all rows, before some of them are taken. The message names a row by its entry in
        ``sample_ids``. If the batch has none, it names the row by its index in the dataset, which ``indices`` holds for
        each row. With None it has only the number of the row in the batch.
        """
        sizes = {'tokens': [width + self.facts.decoder_width for width in self.widths], **self.sizes}
        caps = {'tokens': self.options.max_tokens, **self.options.caps}
        for size, cap in caps.items():
            largest = max(sizes[size])
            if largest <= cap:
                continue
            row = sizes[size].index(largest)
            name = sample_name(self.facts.batch, row)
            if indices is not None and 'sample_ids' not in self.facts.batch:
                name = f'sample number {indices[row]} of the dataset'
            unit = size.replace('_', ' ')
            setting = CAPPED_SIZES.get(size, 'device_train_microbatch_size` x `slot_tokens')
            message = (
                f'A row must fit into a microbatch, got: {name} of {largest} {unit}, over the cap of {cap} '
                f'(`{setting}`). Raise it, shorten the sample, or measure the lengths again if a table of '
                'lengths promised less'
            )
            if self.options.on_oversize == 'raise':
                raise InvalidInputError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
            log.warning('%s. It is computed alone.', message)


# Microbatches.


def build(pieces: Sequence[Piece], attention: DocumentAttention | None = None) -> list[BatchDict]:
    """Returns the microbatch of each piece.

    The pieces may belong to several batches, because each microbatch of a pre-split batch counts as one. Consecutive
    pieces of the same batch are selected together, so that the layout assigns media to rows only once for each batch.

    Args:
        pieces: The pieces.
        attention: The changed attention of the model. Needed to pack rows.
    """
    microbatches = []
    for _, group in groupby(pieces, key=lambda piece: id(piece.facts)):
        pieces_of_batch = list(group)
        facts = pieces_of_batch[0].facts
        rows_of_pieces = [list(piece.rows) for piece in pieces_of_batch]
        columns = [piece.columns for piece in pieces_of_batch]
        all_rows = list(range(len(facts.lengths)))
        if rows_of_pieces == [all_rows]:
            # The only piece is the batch itself. It may have entries that split() refuses, because it cannot tell their
            # rows apart.
            (kept_columns,) = columns
            selected = [facts.layout.narrow(facts.batch, kept_columns.start, len(kept_columns))]
        else:
            selected = facts.layout.split(facts.batch, rows_of_pieces, columns)
        for piece, microbatch in zip(pieces_of_batch, selected, strict=True):
            if piece.dummies:
                dummies = [dummy.batch for dummy in piece.dummies]
                microbatch = add_rows(facts.layout, microbatch, dummies, facts.side)
            if piece.rules.packing:
                assert attention is not None  # the split changes the attention before it packs
                microbatch = pack_rows(facts.layout, microbatch, attention)
            microbatches.append(microbatch)
    return microbatches
