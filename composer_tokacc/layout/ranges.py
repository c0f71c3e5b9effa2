# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which rows the first-batch check has looked at, as ranges.

The check shows on a few rows that no cut changes their gradient. This holds for other rows only if the model treats
them alike. But models change at some size. DeepSeek-V3.2 attends to the best k keys as soon as there are more than k
columns, Llama 4 scales attention from some column on, HunYuan-VL numbers the images of a batch, Qwen3-Omni pads short
audios to the longest one, and in GLM-ASR the padding changes the output. Nobody knows these thresholds beforehand.

So the ranges are exact: a row outside of them is looked at before the step is cut, and the ranges grow to include it. A
range ends at the smallest and the largest value that was seen, never at a rounded one, because a threshold could lie in
between. Random lengths set a new maximum about log(n) times in n steps: with the lengths of AI2D, ChartQA and DocVQA,
rows lie outside of a range in 8 to 12 of the first 200 steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from composer_tokacc.batch import MODALITIES
from composer_tokacc.layout.facts import RowFacts
from composer_tokacc.layout.families import TEXT_ENTRIES
from composer_tokacc.layout.found import Readings, agreed_readings, joined_readings


class Padding(Enum):
    """Side of the padding, and whether the batch gives positions. The value completes the phrase "rows padded ..."."""

    RIGHT = 'on the right'
    RIGHT_WITH_POSITIONS = 'on the right, with position_ids'
    LEFT = 'on the left'
    LEFT_WITH_POSITIONS = 'on the left, with position_ids'

    @classmethod
    def of(
        cls,
        side: str,
        *,
        has_positions: bool,
    ) -> Padding:
        """Returns the member for a side, ``'left'`` or ``'right'``."""
        if side == 'left':
            return cls.LEFT_WITH_POSITIONS if has_positions else cls.LEFT
        return cls.RIGHT_WITH_POSITIONS if has_positions else cls.RIGHT


class RotaryCase(Enum):
    """How a padded batch exceeds the width limit of the rotary embedding: see :attr:`.BatchLayout.width_limit`."""

    COLUMNS_ABOUT_LIMIT = 'some rows wider than the rotary limit'
    COLUMNS_OVER_LIMIT = 'all rows wider than the rotary limit'
    POSITIONS_ABOUT_LIMIT = 'some rows wider than the rotary limit, with position_ids'
    POSITIONS_OVER_LIMIT = 'all rows wider than the rotary limit, with position_ids'


@dataclass(frozen=True)
class PaddedRange:
    """Widths of padded rows.

    Args:
        shortest: Tokens of the shortest row, the least that a trimmed row can have.
        longest: Tokens of the longest row that has padding. A row without padding shows nothing about trimming.
        width: Padded width, the widest that was seen.
    """

    shortest: int
    longest: int
    width: int

    def covers(self, other: PaddedRange) -> bool:
        """Returns whether the other range lies inside of this one."""
        return self.shortest <= other.shortest and self.longest >= other.longest and self.width >= other.width

    def joined(self, other: PaddedRange) -> PaddedRange:
        """Returns the smallest range that covers both."""
        return PaddedRange(
            shortest=min(self.shortest, other.shortest),
            longest=max(self.longest, other.longest),
            width=max(self.width, other.width),
        )


@dataclass(frozen=True)
class PackedRange:
    """Sizes of packed rows: tokens of the longest document, and of all documents of a row together."""

    longest: int
    total: int

    def covers(self, other: PackedRange) -> bool:
        """Returns whether the other range lies inside of this one."""
        return self.longest >= other.longest and self.total >= other.total

    def joined(self, other: PackedRange) -> PackedRange:
        """Returns the smallest range that covers both."""
        return PackedRange(longest=max(self.longest, other.longest), total=max(self.total, other.total))


@dataclass(frozen=True)
class MediaRange:
    """Images, videos or audios of some rows.

    Args:
        most_items: The most items of one row.
        in_several_rows: Whether two rows of one batch have any.
        smallest: Placeholders of the smallest item in a batch with items of several sizes; None: no batch had several.
        largest: Placeholders of the largest item in a batch with items of several sizes.
        is_ragged: Whether microbatches that a loader collates one by one pad items to different sizes.
    """

    most_items: int
    in_several_rows: bool = False
    smallest: float | None = None
    largest: float | None = None
    is_ragged: bool = False

    def covers(self, other: MediaRange) -> bool:
        """Returns whether the other range lies inside of this one."""
        return self.joined(other) == self

    def joined(self, other: MediaRange) -> MediaRange:
        """Returns the smallest range that covers both."""
        smallest = [size for size in (self.smallest, other.smallest) if size is not None]
        largest = [size for size in (self.largest, other.largest) if size is not None]
        return MediaRange(
            most_items=max(self.most_items, other.most_items),
            in_several_rows=self.in_several_rows or other.in_several_rows,
            smallest=min(smallest, default=None),
            largest=max(largest, default=None),
            is_ragged=self.is_ragged or other.is_ragged,
        )


@dataclass(frozen=True, kw_only=True)
class RowRanges:
    """Ranges of the rows of some batches.

    Args:
        padded: Widths, for each kind of padding.
        packed: Sizes of packed rows; None: none were packed.
        media: Items by modality, ``'image'``, ``'video'`` and ``'audio'``.
        rotary: How batches exceeded the width limit of the rotary embedding.
        has_mixed_rows: Whether a batch had rows with media and rows without any.
        has_holes: Whether a row had positions that are not attended between attended ones.
        has_holes_beside_media: The same in a batch with media.
        readings: Possible readings of the tensors that no family registers.
    """

    padded: Mapping[Padding, PaddedRange] = field(default_factory=dict)
    packed: PackedRange | None = None
    media: Mapping[str, MediaRange] = field(default_factory=dict)
    rotary: frozenset[RotaryCase] = frozenset()
    has_mixed_rows: bool = False
    has_holes: bool = False
    has_holes_beside_media: bool = False
    readings: Readings = field(default_factory=dict)

    def missing(self, rows: RowRanges) -> list[str]:
        """Returns names of the properties in which the other rows lie outside of these ranges.

        A name about images, videos or audios begins with that word.
        """
        missing = []
        for padding, needed in rows.padded.items():
            padded = self.padded.get(padding)
            if padded is None or not padded.covers(needed):
                missing.append(f'rows padded {padding.value}')
        if rows.packed is not None and (self.packed is None or not self.packed.covers(rows.packed)):
            missing.append('packed rows')
        for modality, needed in rows.media.items():
            media = self.media.get(modality)
            if media is None or not media.covers(needed):
                missing.append(f'{modality}s')
        missing += [case.value for case in rows.rotary - self.rotary]
        # For these it is enough to have seen one such batch.
        if rows.has_mixed_rows and not self.has_mixed_rows:
            missing.append('rows with and without media')
        if rows.has_holes and not self.has_holes:
            missing.append('holes')
        if rows.has_holes_beside_media and not self.has_holes_beside_media:
            missing.append('holes beside media')
        missing += self._keys_of_another_meaning(rows.readings)
        return missing

    def _keys_of_another_meaning(self, readings: Readings) -> list[str]:
        """Returns names of the keys that are new, or whose most likely reading would change."""
        names = []
        for key, possible in readings.items():
            earlier = self.readings.get(key)
            if earlier is None or agreed_readings(earlier, possible)[:1] != earlier[:1]:
                names.append(f'the key {key!r}')
        return names

    def joined(self, other: RowRanges) -> RowRanges:
        """Returns the smallest ranges that cover both."""
        padded = dict(self.padded)
        for padding, padded_range in other.padded.items():
            padded[padding] = padded_range.joined(padded.get(padding, padded_range))
        media = dict(self.media)
        for modality, media_range in other.media.items():
            media[modality] = media_range.joined(media.get(modality, media_range))
        packed = self.packed or other.packed
        if packed is not None and other.packed is not None:
            packed = packed.joined(other.packed)
        return RowRanges(
            padded=padded,
            packed=packed,
            media=media,
            rotary=self.rotary | other.rotary,
            has_mixed_rows=self.has_mixed_rows or other.has_mixed_rows,
            has_holes=self.has_holes or other.has_holes,
            has_holes_beside_media=self.has_holes_beside_media or other.has_holes_beside_media,
            readings=joined_readings(self.readings, other.readings),
        )

    def without_padding(self) -> RowRanges:
        """Returns the ranges as if no row had padding. For rows on which trimming was not tried."""
        return replace(self, padded={})


def ranges_of(sources: Sequence[RowFacts], packed_total: int = 0) -> RowRanges:
    """Returns the ranges of the rows of a device batch.

    Args:
        sources: Facts of the batch, or of each of its microbatches.
        packed_total: The most tokens that a packed row made of these rows can have; 0: they are not packed.
    """
    media = {}
    for modality in MODALITIES:
        media_range = _media_range(modality, sources)
        if media_range is not None:
            media[modality] = media_range
    media_per_row: list[int] = []
    has_holes = False
    longest = 0
    readings: Readings = {}
    for facts in sources:
        media_per_row += facts.media
        has_holes = has_holes or any(facts.has_hole)
        longest = max([longest, *facts.lengths])
        readings = joined_readings(readings, facts.layout.readings_of(facts.batch))
    has_media = any(media_per_row)
    packed = None
    if packed_total:
        packed = PackedRange(longest=longest, total=packed_total)
    return RowRanges(
        padded=_padded_ranges([facts for facts in sources if facts.has_ids]),
        packed=packed,
        media=media,
        rotary=frozenset(_rotary_cases(sources)),
        has_mixed_rows=has_media and not all(media_per_row),
        has_holes=has_holes and not has_media,
        has_holes_beside_media=has_holes and has_media,
        readings=readings,
    )


def _padded_ranges(sources: Sequence[RowFacts]) -> dict[Padding, PaddedRange]:
    """Returns the range of widths of all sources together, as if they were one padded batch; empty without padding."""
    lengths: list[int] = []
    width = 0
    side = 'right'
    has_positions = False
    for facts in sources:
        lengths += facts.lengths
        width = max(width, facts.width)
        # Rows without padding have the side 'right', so one 'left' decides.
        if facts.side == 'left':
            side = 'left'
        has_positions = has_positions or facts.has_positions
    padded_lengths = [length for length in lengths if length < width]
    if not padded_lengths:
        return {}
    padding = Padding.of(side, has_positions=has_positions)
    return {padding: PaddedRange(shortest=min(lengths), longest=max(padded_lengths), width=width)}


def _rotary_cases(sources: Sequence[RowFacts]) -> set[RotaryCase]:
    cases = set()
    for facts in sources:
        if not (facts.has_ids and facts.is_padded and facts.layout.width_matters(facts.batch)):
            continue
        is_over = min(facts.lengths) > (facts.layout.width_limit or 0)
        if facts.has_positions:
            cases.add(RotaryCase.POSITIONS_OVER_LIMIT if is_over else RotaryCase.POSITIONS_ABOUT_LIMIT)
        else:
            cases.add(RotaryCase.COLUMNS_OVER_LIMIT if is_over else RotaryCase.COLUMNS_ABOUT_LIMIT)
    return cases


def _media_range(modality: str, sources: Sequence[RowFacts]) -> MediaRange | None:
    """Returns the range of a modality's items; None: no row has any."""
    counts: list[int] = []
    sizes: list[float] = []
    for facts in sources:
        counts += [count for count in facts.counts.get(modality, ()) if count]
        sizes += [size for size in facts.media_sizes(modality) if size is not None]
    if not counts:
        return None
    smallest = None
    largest = None
    # Items of one size need no padding, so their size does not matter.
    if min(sizes) < max(sizes):
        smallest = min(sizes)
        largest = max(sizes)
    return MediaRange(
        most_items=max(counts),
        in_several_rows=len(counts) > 1,
        smallest=smallest,
        largest=largest,
        is_ragged=_is_ragged(modality, sources),
    )


def _is_ragged(modality: str, sources: Sequence[RowFacts]) -> bool:
    """Returns whether microbatches pad a tensor of the modality to different sizes."""
    first_shapes: dict[str, torch.Size] = {}
    for facts in sources:
        for key, value in facts.batch.items():
            if key in TEXT_ENTRIES or not isinstance(value, torch.Tensor):
                continue
            item_shape = value.shape[1:]
            if item_shape != first_shapes.setdefault(key, item_shape):
                entry = facts.layout.entry_of(facts.batch, key)
                if entry.is_media and entry.modality == modality:
                    return True
    return False
