# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about the rows of a collated batch: all that a cut must know of them, described once; kinds of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from composer_tokacc.batch import (
    IGNORE_INDEX,
    MODALITIES,
    Batch,
    attended_positions,
    lengths_of,
    own_labels,
    real_positions,
    side_of,
    text_of,
)
from composer_tokacc.layout.families import TEXT_ENTRIES, Entry
from composer_tokacc.layout.found import has_sound_along_text
from composer_tokacc.layout.layout import BatchLayout
from composer_tokacc.layout.placeholders import stand_at, token_ids
from composer_tokacc.layout.pre_split import PreSplitBatch

WIDTHS = tuple(2**power for power in range(4, 21))
MEDIA_SIZES = tuple(2**power for power in range(17))
UNLIKE = ('together', 'ragged', *(f'{bound} {size}' for bound in ('under', 'over') for size in MEDIA_SIZES))
ROW_KINDS = (
    'left', 'right', 'holes', 'holes beside media', *MODALITIES, 'mixed', 'positions',
    *(f'left over {width}' for width in WIDTHS),
    *(f'{what} {bound} limit' for what in ('columns', 'positions') for bound in ('about', 'over')),
    *(f'{modality} {how}' for modality in MODALITIES for how in UNLIKE),
)  # fmt: skip
"""What rows of a batch can be like, as far as it matters to a cut: padded on the left or right, or with positions in
between that are not attended; with media of a kind, or some with media and some without; padded on the left with
``position_ids`` given, or wider than any before (Llama 4 and Ministral 3 scale attention by the column, but not in the
first thousands of columns), or than the rotary embedding leaves alone, where it goes by the largest position. Several
with media of a kind (HunYuan-VL numbers images over the batch), of unlike sizes, smaller or larger than any before
(Qwen3-Omni pads sounds to the longest of the batch, but only those below a second), or padded otherwise in each
microbatch that a loader collates by itself (GLM-ASR hears the padding)."""


@dataclass(frozen=True)
class RowFacts:
    """The rows of one collated batch, as :func:`describe` finds them.

    Args:
        batch: The batch itself, whose rows are selected later.
        layout: How its tensors belong to rows.
        side: Where the rows are padded, ``'left'`` or ``'right'``.
        width: Padded width of the rows.
        is_padded: Whether some position is padding.
        real: Which positions are attended or labelled, ``(rows, width)`` bool.
    """

    batch: Batch = field(repr=False)
    layout: BatchLayout = field(repr=False)
    side: str
    width: int
    is_padded: bool
    real: torch.Tensor = field(repr=False)

    @cached_property
    def lengths(self) -> list[int]:
        """Columns that each row needs by itself; not asked for by all who ask for the side."""
        return lengths_of(self.real, self.side)

    @property
    def has_positions(self) -> bool:
        """Whether the batch says which positions its tokens have."""
        return self.batch.get('position_ids') is not None

    @cached_property
    def may_be_trimmed(self) -> bool:
        """Whether columns of the rows' text may go at all: not where positions depend on the width, or sound has it."""
        layout, batch = self.layout, self.batch
        return batch.get('input_ids') is not None and not (
            layout.width_matters(batch) or has_sound_along_text(batch, layout.config)
        )

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """Number of images, videos and audios of each row, by modality, where the batch has tensors of it."""
        layout, batch = self.layout, self.batch
        return {modality: layout.units_per_row(batch, modality) for modality in layout.media_of(batch)}

    @cached_property
    def media(self) -> list[int]:
        """Number of images, videos and audios of each row."""
        return [sum(of_row) for of_row in zip(*self.counts.values(), strict=True)] or [0] * len(self.real)

    def media_sizes(self, modality: str) -> list[float | None]:
        """Returns how many placeholders an item of a modality has in each row, on average; None: it has no item."""
        counts = self.counts.get(modality, [])
        if not any(counts):
            return [None] * len(self.real)
        tokens = stand_at(text_of(self.batch), token_ids(self.layout.config, modality)).sum(dim=1).tolist()
        return [number / count if count else None for number, count in zip(tokens, counts, strict=True)]

    @cached_property
    def image_tokens(self) -> list[int]:
        """Placeholders of images, videos and audios in each row."""
        return self.layout.image_tokens_per_row(self.batch)

    @cached_property
    def decoder_width(self) -> int:
        """Columns of a text of its own that a decoder is given, where the rows' is an encoder's; never trimmed."""
        texts = {key: self.batch.get(key) for key in ('labels', 'decoder_input_ids') if 'input_ids' in self.batch}
        widths = [
            text.shape[1] for key, text in texts.items()
            if isinstance(text, torch.Tensor) and text.dim() == 2 and not self.layout.entry_of(self.batch, key).seq_dims
        ]  # fmt: skip
        return max(widths, default=0)

    @cached_property
    def has_hole(self) -> list[bool]:
        """Which rows have positions that are not attended between some that are: models count them or not."""
        attended = attended_positions(self.batch)
        starts = (attended[:, 1:] > attended[:, :-1]).sum(dim=1) + attended[:, 0]
        return (starts > 1).tolist()

    @cached_property
    def has_label_behind_padding(self) -> list[bool]:
        """Which left-padded rows have a label on their first token: a pad predicts it, which trimming would take."""
        labels = own_labels(self.batch)
        if labels is None or self.side != 'left':
            return [False] * len(self.real)
        first = self.real.int().argmax(dim=1)
        labelled = labels.gather(1, first[:, None])[:, 0] != IGNORE_INDEX
        return (labelled & (first > 0)).tolist()


def describe(layout: BatchLayout, batch: Batch) -> RowFacts:
    """Returns the facts about a batch's rows; one look at its masks and labels, and at its media when asked."""
    real = real_positions(batch)
    return RowFacts(batch, layout, side_of(real), layout.width(batch), not bool(real.all()), real)


def describe_all(layout: BatchLayout | None, batch: Batch) -> list[RowFacts]:
    """Returns the facts of a device batch, or of each of its microbatches; none where rows cannot be told apart.

    A pre-split batch is described once, for as long as its microbatches keep their tensors.
    """
    if layout is None:
        return []
    if not isinstance(batch, PreSplitBatch):
        return [describe(layout, batch)]
    texts = [one.get(key) for one in batch.microbatches for key in ('input_ids', 'attention_mask', 'labels')]
    known, found_in = batch.described, [layout, *texts]
    if not known or any(old is not new for old, new in zip(known[0], found_in, strict=True)):
        batch.described = found_in, [describe(layout, one) for one in batch.microbatches]
    return batch.described[1]


def kinds_of(sources: Sequence[RowFacts]) -> tuple[int, ...]:
    """Returns which of :data:`ROW_KINDS` some batches have, as ones and zeros."""
    found: set[str] = set()
    for facts in sources:
        if facts.batch.get('input_ids') is None:
            continue
        found |= {modality for modality, counts in facts.counts.items() if any(counts)}
        if facts.is_padded:
            found.add('positions' if facts.side == 'left' and facts.has_positions else facts.side)
        if facts.is_padded and facts.side == 'left':
            found |= {f'left over {width}' for width in WIDTHS if facts.width > width}
        if facts.is_padded and facts.layout.width_matters(facts.batch):
            bound = 'about' if min(facts.lengths) <= (facts.layout.width_limit or 0) else 'over'
            found.add(f'{"positions" if facts.has_positions else "columns"} {bound} limit')
    for modality in MODALITIES:
        found |= _media_kinds(modality, [size for facts in sources for size in facts.media_sizes(modality)])
    if len(sources) > 1:
        found |= _ragged_kinds(sources)
    with_media = [bool(count) for facts in sources for count in facts.media]
    if any(with_media) and not all(with_media):
        found.add('mixed')
    if any(any(facts.has_hole) for facts in sources):
        found.add('holes beside media' if any(with_media) else 'holes')
    return tuple(int(kind in found) for kind in ROW_KINDS)


def _media_kinds(modality: str, media_sizes: Sequence[float | None]) -> set[str]:
    """Returns the kinds that rows with media of these sizes are of together; none where one alone has any."""
    sizes = [size for size in media_sizes if size is not None]
    if len(sizes) < 2:
        return set()
    found, least, most = {f'{modality} together'}, min(sizes), max(sizes)
    if least < most:
        found |= {f'{modality} under {size}' for size in MEDIA_SIZES if least < size}
        found |= {f'{modality} over {size}' for size in MEDIA_SIZES if most > size}
    return found


def _ragged_kinds(sources: Sequence[RowFacts]) -> set[str]:
    """Returns the kinds of media that some microbatches pad to another size than others."""
    first: dict[str, torch.Size] = {}
    found: set[str] = set()
    for facts in sources:
        for key, value in facts.batch.items():
            if key in TEXT_ENTRIES or not isinstance(value, torch.Tensor):
                continue
            if value.shape[1:] != first.setdefault(key, value.shape[1:]):
                entry = facts.layout.entry_of(facts.batch, key)
                modality = 'image' if entry.slot_dim is not None else entry.unit.partition('/')[0]
                found |= {f'{modality} ragged'} if entry.is_media else set()
    return found


def media_entries(layout: BatchLayout, batch: Batch) -> dict[str, Entry]:
    """Returns how the tensors of images, videos and audios of a batch belong to rows, by key."""
    entries = {key: layout.entry_of(batch, key) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    return {key: entry for key, entry in entries.items() if entry.is_media}


def widest_like(width: int) -> int:
    """Returns the width of the widest batch that is of the kinds of one so wide."""
    return next((limit for limit in WIDTHS if width <= limit), sys.maxsize)
