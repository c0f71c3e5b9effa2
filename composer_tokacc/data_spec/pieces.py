# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Pieces: rows of a batch that go through the model together, and the microbatches that are built of them.

:class:`CutRules` say how rows may be cut. A :class:`Piece` is some rows of a batch, with their widths under these
rules. :class:`DummyRows` are rows without weight, which keep ranks in step and encoders in use. Pieces only hold
numbers; :func:`build` makes microbatches of them, and is the first to touch a tensor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, BatchDict, labels_of, sample_name
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import BatchLayout, RowFacts
from composer_tokacc.planning import CAPPED_SIZES, CutOptions, cut_rows
from composer_tokacc.row_counts import ROWS_KEY, RowCounts, is_counted, rows_of, with_rows

log = logging.getLogger(__name__)

LEFT_POLICIES = ('trim', 'shift', 'keep')
RIGHT_POLICIES = ('trim', 'keep')
"""Padding policies, cheapest first. A policy that failed once is not tried again in a fit."""


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay the same as in the device batch.

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
            (Mllama skips its cross-attention in a batch without images, but in a batch with an image its text rows
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
        """Returns the padding policy of a batch: ``'trim'``, ``'shift'`` or ``'keep'``."""
        name = _policy_name(facts)
        if not facts.may_be_trimmed or facts.width > getattr(self, f'{name}_width'):
            return 'keep'
        return getattr(self, name)

    def widths(self, facts: RowFacts) -> list[int]:
        """Returns the width that each row keeps; if rows are packed, its own length."""
        if self.packing or not facts.has_ids:
            return facts.lengths
        if self.policy(facts) == 'keep':
            return [facts.width] * len(facts.lengths)
        widths = []
        for length, has_label in zip(facts.lengths, facts.has_label_behind_padding, strict=True):
            # The last pad before such a row predicts its first label, and would be gone.
            widths.append(facts.width if has_label else length)
        return widths

    def cuts_like(self, other: CutRules) -> bool:
        """Returns whether both cut in the same way. The widths up to which that was shown may differ."""
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


def _policy_name(facts: RowFacts) -> str:
    if facts.side == 'right':
        return 'right'
    # Positions of the batch stay as they are when columns are cut off. Positions that the model counts may not.
    return 'given' if facts.has_positions else 'left'


def padded_candidates(facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
    """Yields the rules of padded microbatches to try on such rows, cheapest first.

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
    """Yields the rules with each padding policy that may hold for such rows."""
    if not facts.is_padded or not facts.may_be_trimmed:
        yield earlier  # nothing can be trimmed, so nothing is learnt about trimming
        return
    name = _policy_name(facts)
    policies: Sequence[str] = RIGHT_POLICIES if name == 'right' else LEFT_POLICIES
    earlier_policy: str = getattr(earlier, name)
    earlier_width: int = getattr(earlier, f'{name}_width')
    was_shown = earlier_width != sys.maxsize
    if was_shown:
        policies = policies[policies.index(earlier_policy) :]
    for policy in policies:
        width = facts.width
        if was_shown and policy == earlier_policy:
            width = max(width, earlier_width)
        yield replace(earlier, **{name: policy, f'{name}_width': width})


# Dummy rows.


@dataclass(frozen=True, eq=False)
class DummyRow:
    """A row without weight that has media, and its share of the caps."""

    batch: Batch
    width: int
    image_tokens: int


class DummyRows:
    """The smallest row with each modality in the batches of this rank, without weight.

    They change neither gradient nor number of samples.

    Args:
        sources: Facts of this rank's batch, or of each of its microbatches.
    """

    def __init__(self, sources: Sequence[RowFacts]) -> None:
        self._sources = sources
        self._layout = sources[0].layout
        self._rows: dict[str, DummyRow | None] = {}
        self.needed: Sequence[str] = ()
        """Modalities that every microbatch must have."""

    @cached_property
    def present(self) -> set[str]:
        """Modalities that some row has."""
        possible = set(MODALITIES if self._layout.extra else self._layout.family.media)
        present: set[str] = set()
        for facts in self._sources:
            if possible <= present:  # counting media takes a while
                break
            present |= {modality for modality, counts in facts.counts.items() if any(counts)}
        return present

    def missing(self, facts: RowFacts, rows: Sequence[int]) -> list[DummyRow]:
        """Returns a dummy row for each needed modality that none of these rows has."""
        if not self.needed:
            return []
        present = set()
        for modality, counts in facts.counts.items():
            if any(counts[row] for row in rows):
                present.add(modality)
        if self._layout.family.one_kind and present:
            return []
        missing = [self.row(modality) for modality in self.needed if modality not in present]
        return [row for row in missing if row is not None]

    def row(self, modality: str) -> DummyRow | None:
        """Returns the dummy row with a modality: of this rank, or the one that was set; None: there is none."""
        if modality not in self._rows:
            row = None
            if modality in self.present:
                row = smallest_row(self._sources, modality)
            self.set_row(modality, row)
        return self._rows[modality]

    def set_row(self, modality: str, row: Batch | None) -> None:
        """Sets the dummy row with a modality."""
        if row is None:
            self._rows[modality] = None
            return
        tokens = 0
        if self._layout.config is not None:
            tokens = sum(self._layout.image_tokens_per_row(row))
        self._rows[modality] = DummyRow(row, self._layout.width(row), tokens)


def zero_weight(batch: Batch) -> BatchDict:
    """Returns a copy without labels, whose rows count as no sample."""
    labels = torch.full_like(batch['labels'], IGNORE_INDEX)
    rows = [RowCounts(samples=0, rule=row.rule) for row in rows_of(batch)]
    return with_rows({**batch, 'labels': labels}, rows)


def smallest_row(sources: Sequence[RowFacts], modality: str) -> BatchDict | None:
    """Returns the row with the fewest items of a modality, and of these the shortest, without weight."""
    smallest: tuple[int, int] | None = None
    row_batch = None
    for facts in sources:
        for row, num_items in enumerate(facts.counts.get(modality, ())):
            size = num_items, facts.lengths[row]
            if num_items and (smallest is None or size < smallest):
                smallest = size
                row_batch = facts, row
    if row_batch is None:
        return None
    facts, row = row_batch
    return zero_weight(facts.layout.trim(facts.layout.select(facts.batch, [row])))


def add_rows(layout: BatchLayout, microbatch: Batch, rows: Sequence[Batch], side: str) -> BatchDict:
    """Returns the microbatch with dummy rows behind its own.

    Args:
        layout: Of the microbatch.
        microbatch: The rows with weight.
        rows: The dummy rows, each a batch of one row.
        side: Padding side of the device batch. Trimmed rows of one width do not show it, and the cut may only have been
            shown for it.
    """
    fitting = [_with_lists_of(microbatch, row) for row in rows]
    positions = microbatch.get('position_ids')
    if positions is not None and positions.dim() == 2:
        # Trimming has written them. A row without weight may have any.
        fitting = [{'position_ids': torch.arange(layout.width(row))[None], **row} for row in fitting]
    # Any id may stand on padding except a placeholder. A row may begin with one.
    ids = microbatch['input_ids']
    is_text = torch.ones_like(ids, dtype=torch.bool)
    if layout.config is not None:
        is_text = ~layout.is_placeholder(microbatch)
    pad_token_id = int(ids[is_text][-1])
    return layout.concat([microbatch, *fitting], padding_side=side, pad_token_id=pad_token_id)


def _with_lists_of(microbatch: Batch, row: Batch) -> BatchDict:
    """Returns a dummy row with the same lists as a microbatch. Unknown values are None, unknown counts 0."""
    fitting = {key: value for key, value in row.items() if not isinstance(value, (list, tuple))}
    for key, value in microbatch.items():
        if not isinstance(value, (list, tuple)):
            continue
        if key == ROWS_KEY:
            fitting[key] = [RowCounts(samples=0, rule=value[0].rule)]
        elif key in row:
            fitting[key] = row[key]
        else:
            fitting[key] = [0 if key.startswith('num_') else None]
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
        dummies: Dummy rows that are computed with them.
    """

    facts: RowFacts
    rules: CutRules
    options: CutOptions
    rows: Sequence[int]
    widths: Sequence[int]
    sizes: Mapping[str, Sequence[int]]
    dummies: Sequence[DummyRow] = ()

    @classmethod
    def from_facts(cls, facts: RowFacts, rules: CutRules, options: CutOptions) -> Piece:
        """Returns a piece of all rows of a batch."""
        rows = range(len(facts.lengths))
        return cls(facts, rules, options, rows, rules.widths(facts), _capped_sizes(facts, options))

    def take(self, places: Iterable[int]) -> Piece:
        """Returns some of these rows, by their places in this piece."""
        chosen = list(places)
        sizes = {}
        for name, values in self.sizes.items():
            sizes[name] = [values[place] for place in chosen]
        return replace(
            self,
            rows=[self.rows[place] for place in chosen],
            widths=[self.widths[place] for place in chosen],
            sizes=sizes,
        )

    @property
    def width(self) -> int:
        """Width of the trimmed rows."""
        return self._rounded_up(max(self.widths))

    def _rounded_up(self, width: int) -> int:
        multiple = self.options.width_multiple
        return min(-(-width // multiple) * multiple, self.facts.width)

    @property
    def fits(self) -> bool:
        """Whether the rows are within the caps, together with their dummy rows."""
        dummy_widths = [row.width for row in self.dummies]
        if self.rules.packing:
            # One row of them all, as wide as they are together.
            num_tokens = sum(self.widths) + sum(dummy_widths)
        else:
            widest = max([self.width, *dummy_widths]) + self.facts.decoder_width
            num_tokens = (len(self.rows) + len(self.dummies)) * widest
        return num_tokens <= self.options.max_tokens and self._fits_capped_sizes

    @property
    def _fits_capped_sizes(self) -> bool:
        # Dummy rows have no loss tokens.
        sizes_of_dummies = {'image_tokens': sum(row.image_tokens for row in self.dummies)}
        for name, cap in self.options.caps.items():
            total = sum(self.sizes[name])
            # If the dummy rows alone are over the cap, fewer rows would not help.
            if total > 0 and total + sizes_of_dummies.get(name, 0) > cap:
                return False
        return True

    def cut(self) -> list[Piece]:
        """Returns the rows in pieces of least cost under the caps."""
        options = replace(self.options, packing=bool(self.rules.packing))
        widths = self.widths
        max_width = None
        if not options.packing:
            decoder_width = self.facts.decoder_width
            max_width = self.facts.width + decoder_width
            if decoder_width:
                # Widths are rounded up without the decoder's text, so the cut must not round them again.
                widths = [self._rounded_up(width) + decoder_width for width in widths]
                options = replace(options, width_multiple=1)
        groups = cut_rows(widths, options, max_width=max_width, **self.sizes)
        return [self.take(group) for group in groups]

    def check_caps(self, indices: Sequence[int] | None) -> None:
        """Raises ValueError for the row that is furthest over a cap, or warns of it.

        ``indices`` are the places of the rows in the dataset, if they are known.
        """
        num_tokens = [width + self.facts.decoder_width for width in self.widths]
        setting = '`device_train_microbatch_size` x `slot_tokens`'
        self._check_cap(num_tokens, 'tokens', self.options.max_tokens, setting, indices)
        for size, cap in self.options.caps.items():
            self._check_cap(self.sizes[size], size.replace('_', ' '), cap, f'`{CAPPED_SIZES[size]}`', indices)

    def _check_cap(
        self, sizes: Sequence[int], unit: str, cap: int, setting: str, indices: Sequence[int] | None
    ) -> None:
        largest = max(sizes)
        if largest <= cap:
            return
        row = list(sizes).index(largest)
        name = sample_name(self.facts.batch, row)
        if indices is not None and 'sample_ids' not in self.facts.batch:
            name = f'sample number {indices[row]} of the dataset'
        message = (
            f'A row must fit into a microbatch, got: {name} of {largest} {unit}, over the cap of {cap} ({setting}). '
            'Raise it, shorten the sample, or measure the lengths again if a table of lengths promised less'
        )
        if self.options.on_oversize == 'raise':
            raise ValueError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
        log.warning('%s. It is computed alone.', message)


def _capped_sizes(facts: RowFacts, options: CutOptions) -> dict[str, Sequence[int]]:
    """Returns the sizes of all rows that have a cap, by name."""
    sizes: dict[str, Sequence[int]] = {}
    if 'image_tokens' in options.caps:
        sizes['image_tokens'] = facts.image_tokens
    if 'loss_tokens' in options.caps:
        sizes['loss_tokens'] = _loss_tokens(facts.batch)
    return sizes


def _loss_tokens(batch: Batch) -> list[int]:
    """Returns the loss tokens of each row. If the batch is not counted yet, all labels count."""
    if is_counted(batch):
        return [row.loss_tokens for row in rows_of(batch)]
    return (labels_of(batch) != IGNORE_INDEX).sum(dim=1).tolist()


# Microbatches.


def build(pieces: Sequence[Piece], attention: DocumentAttention | None = None) -> Iterator[BatchDict]:
    """Yields the microbatch of each piece. Pieces of one batch lie together, so that its media are counted once."""
    for _, group in groupby(pieces, key=lambda piece: id(piece.facts)):
        pieces_of_batch = list(group)
        facts = pieces_of_batch[0].facts
        if len(pieces_of_batch) == 1 and list(pieces_of_batch[0].rows) == list(range(len(facts.lengths))):
            selected = [dict(facts.batch)]
        else:
            selected = facts.layout.split(facts.batch, [piece.rows for piece in pieces_of_batch])
        for piece, rows in zip(pieces_of_batch, selected, strict=True):
            yield _built(piece, rows, attention)


def _built(piece: Piece, rows: BatchDict, attention: DocumentAttention | None) -> BatchDict:
    layout = piece.facts.layout
    microbatch = _trimmed(piece, rows)
    if piece.dummies:
        dummies = [dummy.batch for dummy in piece.dummies]
        microbatch = add_rows(layout, microbatch, dummies, piece.facts.side)
    if piece.rules.packing:
        microbatch = pack_rows(layout, microbatch, attention)
    return microbatch


def _trimmed(piece: Piece, rows: BatchDict) -> BatchDict:
    """Returns the rows of a piece without the columns that none of them needs, as far as the rules allow."""
    facts = piece.facts
    width = piece.width
    if width == facts.width or piece.rules.packing:
        return rows
    start = facts.width - width if facts.side == 'left' else 0
    trimmed = facts.layout.narrow(rows, start, width)
    if start and piece.rules.policy(facts) == 'shift' and not facts.has_positions:
        # The model would count positions from its first column. They must stay the same as in the device batch.
        positions = torch.arange(start, start + width)
        trimmed['position_ids'] = positions.expand(len(piece.rows), width).contiguous()
    return trimmed
