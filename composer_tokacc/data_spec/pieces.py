# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pieces: rows of a batch that go through the model together, and the microbatches that are built of them.

:class:`CutRules` say how rows may be cut. A :class:`Piece` is some rows of a batch, with their widths under these
rules. :class:`DummyRows` are rows without weight. They keep ranks in step and encoders in use. Pieces only hold
numbers. :func:`build` makes microbatches of them, and is the first to touch a tensor.
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
from composer_tokacc.planning import CutOptions, cut_rows, padded_widths
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import RowCounts, rows_of, with_rows

log = logging.getLogger(__name__)

POLICIES = {
    'left': ('trim', 'shift', 'keep'),
    'left_with_positions': ('trim', 'shift', 'keep'),
    'right': ('trim', 'keep'),
}
"""Padding policies of each field of :class:`CutRules`, cheapest first. A policy that failed once is not tried again in
a fit."""


SETTINGS_OF_CAPS = {
    'tokens': '`device_train_microbatch_size` x `slot_tokens`',
    'image_tokens': '`max_image_tokens`',
    'loss_tokens': '`max_loss_tokens`',
}
"""What sets the cap of each size of a microbatch, for messages."""


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay the same as in the device batch.

    A policy holds up to the width of the batches on which the first-batch check has shown it. Wider batches keep their
    padding until the check has looked at one of them.

    Args:
        left: For rows padded on the left: ``'trim'``; ``'shift'``: trim, and write the numbers of the remaining columns
            as ``position_ids``, for models that count positions from column 0; ``'keep'`` the padding.
        left_width: Width up to which ``left`` was shown to hold.
        left_with_positions: As ``left``, but for batches that bring ``position_ids``.
        left_with_positions_width: Width up to which ``left_with_positions`` was shown to hold.
        right: For rows padded on the right: ``'trim'`` or ``'keep'``.
        right_width: Width up to which ``right`` was shown to hold.
        needs_media: Whether a microbatch without media needs a dummy row with media if others of the step have media.
            (Mllama skips its cross-attention in a batch without images, but in a batch with an image its text rows
            attend to padding images.)
        packing: How a microbatch's rows become one packed row: ``''``: not at all; ``'documents'``: the model's own
            attention is computed document by document; ``'positions'``: it finds documents by ``position_ids`` itself.
    """

    left: str = 'keep'
    left_width: int = sys.maxsize
    left_with_positions: str = 'keep'
    left_with_positions_width: int = sys.maxsize
    right: str = 'keep'
    right_width: int = sys.maxsize
    needs_media: bool = False
    packing: str = ''

    def policy(self, facts: RowFacts) -> str:
        """Returns the padding policy of a batch: ``'trim'``, ``'shift'`` or ``'keep'``."""
        name = _policy_name(facts)
        if not facts.may_be_trimmed or facts.width > getattr(self, f'{name}_width'):
            return 'keep'
        return getattr(self, name)

    def depends_on_left_padding(self, facts: RowFacts) -> bool:
        """Returns whether the check has shown that trimming rows like these on the left changes their losses.

        These rows may have no padding themselves. False if the check has trimmed no row on the left yet.
        """
        name = _left_policy_name(facts)
        policy = getattr(self, name)
        was_shown = getattr(self, f'{name}_width') != sys.maxsize
        return policy == 'shift' or (policy == 'keep' and was_shown)

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the width that each row keeps; if rows are packed, its own length.

        Without ``input_ids`` all rows keep their width, which is also their length: every position counts as attended.
        """
        if self.packing or not facts.has_ids:
            return facts.lengths
        if self.policy(facts) == 'keep':
            return [facts.width] * len(facts.lengths)
        widths = list(facts.lengths)
        for row, has_label in enumerate(facts.has_label_behind_padding):
            if has_label:
                # Trimming would remove the last pad before the row, which predicts the row's first label.
                widths[row] = facts.width
        return widths

    def cuts_like(self, other: CutRules) -> bool:
        """Returns whether both rules cut alike. Ignores the widths up to which their policies were shown to hold."""
        with_widths_of_other = replace(
            self,
            left_width=other.left_width,
            left_with_positions_width=other.left_with_positions_width,
            right_width=other.right_width,
        )
        return with_widths_of_other == other

    def with_side_of(self, earlier: CutRules, side: str) -> CutRules:
        """Returns these rules with the earlier policies of a side on which the check has not trimmed any row.

        A policy ``'keep'`` stays: it means that trimming was tried and has failed.
        """
        names = ('right',) if side == 'right' else ('left', 'left_with_positions')
        changed = {}
        for name in names:
            if getattr(self, name) != 'keep':
                width_name = f'{name}_width'
                changed[name] = getattr(earlier, name)
                changed[width_name] = getattr(earlier, width_name)
        return replace(self, **changed)


def _policy_name(facts: RowFacts) -> str:
    return 'right' if facts.side == 'right' else _left_policy_name(facts)


def _left_policy_name(facts: RowFacts) -> str:
    # If the batch brings positions, tokens keep their positions when columns are cut off. If the model counts the
    # positions itself, they may change.
    return 'left_with_positions' if facts.has_positions else 'left'


def padded_candidates(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields the rules without packing to try on these rows, cheapest first.

    ``earlier`` are the rules that were found on other rows.
    """
    has_media = [count > 0 for count in facts.media]
    is_mixed = any(has_media) and not all(has_media)
    needs_media = earlier.needs_media or bool(facts.layout.family.coupling)
    earlier = replace(earlier, packing='', needs_media=needs_media)
    for rules in _padding_rules(facts, earlier):
        yield rules
        if is_mixed and not needs_media:
            yield replace(rules, needs_media=True)


def _padding_rules(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields the earlier rules with each padding policy that may hold for these rows."""
    if not facts.is_padded or not facts.may_be_trimmed:
        # Nothing can be trimmed, so nothing is learnt about trimming.
        yield earlier
        return
    name = _policy_name(facts)
    policies = POLICIES[name]
    earlier_policy: str = getattr(earlier, name)
    earlier_width: int = getattr(earlier, f'{name}_width')
    was_shown = earlier_width != sys.maxsize
    if was_shown:
        # Cheaper policies have failed on other rows.
        policies = policies[policies.index(earlier_policy) :]
    for policy in policies:
        width = facts.width
        if was_shown and policy == earlier_policy:
            width = max(width, earlier_width)
        yield replace(earlier, **{name: policy, f'{name}_width': width})


# Dummy rows. They change neither the gradient nor the number of samples.

DummyRows: TypeAlias = Mapping[str, RowFacts]
"""For each modality that every microbatch must have, facts of a batch of one row that has it, without weight."""


def missing_dummies(dummies: DummyRows, facts: RowFacts, rows: Sequence[int]) -> list[RowFacts]:
    """Returns a dummy row for each modality that none of these rows of a batch has."""
    has_media = any(facts.media[row] for row in rows)
    if has_media and facts.layout.family.one_kind:
        return []
    missing = []
    for modality, dummy in dummies.items():
        counts = facts.counts.get(modality)
        if counts is None or not any(counts[row] for row in rows):
            missing.append(dummy)
    return missing


def zero_weight(batch: Batch) -> BatchDict:
    """Returns a copy in which all labels are masked and no row counts as a sample."""
    labels = torch.full_like(batch['labels'], IGNORE_INDEX)
    without_labels = {**batch, 'labels': labels}
    rows = [RowCounts(samples=0, rule=row.rule) for row in rows_of(batch)]
    return with_rows(without_labels, rows)


def smallest_row(facts_of_batches: Sequence[RowFacts], modality: str) -> BatchDict | None:
    """Returns the row with the fewest items of a modality, and of these the shortest, without weight."""
    candidates: list[tuple[RowFacts, int]] = []
    for facts in facts_of_batches:
        items_per_row = facts.counts.get(modality, ())
        for row, num_items in enumerate(items_per_row):
            if num_items > 0:
                candidates.append((facts, row))
    if not candidates:
        return None

    def size(candidate: tuple[RowFacts, int]) -> tuple[int, int]:
        facts, row = candidate
        return facts.counts[modality][row], facts.lengths[row]

    facts, row = min(candidates, key=size)
    selected = facts.layout.select(facts.batch, [row])
    trimmed = facts.layout.trim(selected)
    return zero_weight(trimmed)


def add_rows(
    layout: BatchLayout,
    microbatch: Batch,
    rows: Sequence[Batch],
    side: str,
) -> BatchDict:
    """Returns the microbatch with dummy rows behind its own.

    Args:
        layout: Layout of the microbatch.
        microbatch: The rows with weight.
        rows: The dummy rows, each a batch of one row.
        side: Padding side of the device batch. The check has shown that padding on this side changes nothing. It
            cannot be read from the microbatch, which may have no padding after trimming.
    """
    positions = microbatch.get('position_ids')
    has_positions = positions is not None and positions.dim() == 2
    batches: list[Batch] = [microbatch]
    for row in rows:
        fitting = _with_lists_of(microbatch, row)
        if has_positions:
            # Trimming has written positions. A row without weight may have any.
            any_positions = torch.arange(layout.width(row))[None]
            fitting.setdefault('position_ids', any_positions)
        batches.append(fitting)
    # Padding may have any id except a placeholder, so the last id of text will do.
    is_text = ~layout.is_placeholder(microbatch)
    text_ids = microbatch['input_ids'][is_text]
    pad_token_id = int(text_ids[-1])
    return layout.concat(batches, padding_side=side, pad_token_id=pad_token_id)


def _with_lists_of(microbatch: Batch, row: Batch) -> BatchDict:
    """Returns a dummy row with the lists of a microbatch. Unknown values are None, unknown counts are 0."""
    fitting = dict(row)
    for key, value in row.items():
        if isinstance(value, (list, tuple)):
            del fitting[key]
    for key, value in microbatch.items():
        if isinstance(value, (list, tuple)):
            unknown = [0] if key.startswith('num_') else [None]
            fitting[key] = row.get(key, unknown)
    return fitting


# Pieces.


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a batch that go through the model together.

    Args:
        facts: Of the batch.
        rules: How its rows may be cut.
        options: The caps, and how to cut under them.
        rows: Numbers of the rows in the batch.
        widths: Width that each of them keeps.
        sizes: Their sizes that have a cap (``CutOptions.caps``), by name, such as ``'image_tokens'``.
        dummies: Facts of the dummy rows that are computed with them.
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
                sizes[size] = [row.loss_tokens for row in rows_of(facts.batch)]
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
        """Width of the trimmed rows, rounded up to ``width_multiple``."""
        return int(self._padded_widths().max())

    def _padded_widths(self) -> np.ndarray:
        return padded_widths(np.array(self.widths), self.options.width_multiple, self.facts.width)

    @property
    def fits(self) -> bool:
        """Whether the rows and their dummy rows together are within the caps."""
        if self._num_tokens > self.options.max_tokens:
            return False
        for size, cap in self.options.caps.items():
            total = sum(self.sizes[size])
            # The image tokens of dummy rows count only if the rows have some, too. Rows without images cannot be cut
            # so that fewer image tokens remain.
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
            # All rows become one row, as wide as they are together.
            return sum(self.widths) + sum(dummy_widths)
        widest = max([self.width, *dummy_widths])
        num_rows = len(self.rows) + len(self.dummies)
        return num_rows * (widest + self.facts.decoder_width)

    def cut(self) -> list[Piece]:
        """Returns the rows in pieces of least cost under the caps."""
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
        """Raises ValueError if the largest row is over a cap. With ``on_oversize='warn'`` it logs a warning.

        A row counts without the columns that :attr:`width` adds by rounding up. If only they are over the cap, the row
        is computed alone.

        ``indices`` are the indices of the rows in the dataset, if they are known.
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
            message = (
                f'A row must fit into a microbatch, got: {name} of {largest} {unit}, over the cap of {cap} '
                f'({SETTINGS_OF_CAPS[size]}). Raise it, shorten the sample, or measure the lengths again if a table of '
                'lengths promised less'
            )
            if self.options.on_oversize == 'raise':
                raise InvalidInputError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
            log.warning('%s. It is computed alone.', message)


# Microbatches.


def build(pieces: Sequence[Piece], attention: DocumentAttention | None = None) -> list[BatchDict]:
    """Returns the microbatch of each piece.

    Consecutive pieces of the same batch are selected together, so that the media of the batch are counted once.
    """
    microbatches = []
    for _, group in groupby(pieces, key=lambda piece: id(piece.facts)):
        pieces_of_batch = list(group)
        facts = pieces_of_batch[0].facts
        rows_of_pieces = [list(piece.rows) for piece in pieces_of_batch]
        all_rows = list(range(len(facts.lengths)))
        if rows_of_pieces == [all_rows]:
            selected = [dict(facts.batch)]
        else:
            selected = facts.layout.split(facts.batch, rows_of_pieces)
        for piece, rows in zip(pieces_of_batch, selected, strict=True):
            microbatch = _trimmed(piece, rows)
            if piece.dummies:
                dummies = [dummy.batch for dummy in piece.dummies]
                microbatch = add_rows(facts.layout, microbatch, dummies, facts.side)
            if piece.rules.packing:
                microbatch = pack_rows(facts.layout, microbatch, attention)
            microbatches.append(microbatch)
    return microbatches


def _trimmed(piece: Piece, rows: BatchDict) -> BatchDict:
    """Returns the rows of a piece without the columns that none of them needs, as far as the rules allow."""
    facts = piece.facts
    width = piece.width
    if width == facts.width or piece.rules.packing:
        return rows
    start = facts.width - width if facts.side == 'left' else 0
    trimmed = facts.layout.narrow(rows, start, width)
    if start and piece.rules.policy(facts) == 'shift' and not facts.has_positions:
        # The model would count positions from the first remaining column. Tokens must keep the positions that they have
        # in the device batch.
        columns = torch.arange(start, start + width)
        positions = columns.expand(len(piece.rows), width)
        trimmed['position_ids'] = positions.contiguous()
    return trimmed
