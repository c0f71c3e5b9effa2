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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from composer_tokacc.batch import MODALITIES
from composer_tokacc.layout.facts import RowFacts
from composer_tokacc.layout.found import Readings, agreed_readings, joined_readings
from composer_tokacc.layout.layout import media_entries

PADDED = 'rows padded'
"""How the names of all limits of padded rows begin."""
Limit = tuple[float, ...]
"""The largest values of a property that were seen. A smallest value is kept as its negative."""


@dataclass(frozen=True, kw_only=True)
class RowRanges:
    """What the rows of some batches were like.

    Args:
        limits: Limits of the properties that a batch had, by name. It is empty if it is enough to have seen one such
            batch. A name about images, videos or audios begins with that word.
        readings: Possible readings of the tensors that no family registers.
    """

    limits: Mapping[str, Limit] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)

    def missing(self, rows: RowRanges) -> list[str]:
        """Returns names of the properties in which the other rows lie outside of these ranges."""
        missing = []
        for name, needed in rows.limits.items():
            limit = self.limits.get(name)
            if limit is None or _larger(limit, needed) != limit:
                missing.append(name)
        for key, possible in rows.readings.items():
            # A key that is new, or whose most likely reading would change.
            earlier = self.readings.get(key)
            if earlier is None or agreed_readings(earlier, possible)[:1] != earlier[:1]:
                missing.append(f'the key {key!r}')
        return missing

    def joined(self, other: RowRanges) -> RowRanges:
        """Returns the smallest ranges that cover both."""
        limits = dict(self.limits)
        for name, limit in other.limits.items():
            limits[name] = _larger(limits.get(name, limit), limit)
        return RowRanges(limits=limits, readings=joined_readings(self.readings, other.readings))

    def without_padding(self) -> RowRanges:
        """Returns the ranges as if no row had padding. For rows on which trimming was not tried."""
        limits = {name: limit for name, limit in self.limits.items() if not name.startswith(PADDED)}
        return RowRanges(limits=limits, readings=self.readings)


def _larger(first: Limit, second: Limit) -> Limit:
    """Returns the larger of each two values."""
    return tuple(map(max, first, second))


def ranges_of(sources: Sequence[RowFacts], packed_total: int = 0) -> RowRanges:
    """Returns the ranges of the rows of a device batch.

    Args:
        sources: Facts of the batch, or of each of its microbatches.
        packed_total: The most tokens that a packed row made of these rows can have; 0: they are not packed.
    """
    lengths: list[int] = []
    media_per_row: list[int] = []
    has_holes = False
    readings: Readings = {}
    for facts in sources:
        lengths += facts.lengths
        media_per_row += facts.media
        has_holes = has_holes or any(facts.has_hole)
        readings = joined_readings(readings, facts.layout.readings_of(facts.batch))
    limits = _padded_limits([facts for facts in sources if facts.has_ids])
    if packed_total:
        limits['packed rows'] = (max(lengths), packed_total)
    for modality in MODALITIES:
        limit = _media_limit(modality, sources)
        if limit is not None:
            limits[f'{modality}s'] = limit
    has_media = any(media_per_row)
    if has_media and not all(media_per_row):
        limits['rows with and without media'] = ()
    if has_holes:
        limits['holes beside media' if has_media else 'holes'] = ()
    return RowRanges(limits=limits, readings=readings)


def _padded_limits(sources: Sequence[RowFacts]) -> dict[str, Limit]:
    """Returns the limits of the widths of all sources together, as if they were one padded batch."""
    limits: dict[str, Limit] = {}
    lengths: list[int] = []
    width = 0
    side = 'right'
    with_positions = ''
    for facts in sources:
        lengths += facts.lengths
        width = max(width, facts.width)
        # Rows without padding have the side 'right', so one 'left' decides.
        if facts.side == 'left':
            side = 'left'
        positions = ', with position_ids' if facts.has_positions else ''
        with_positions = with_positions or positions
        if facts.is_padded and facts.layout.width_matters(facts.batch):
            rows = 'all rows' if min(facts.lengths) > (facts.layout.width_limit or 0) else 'some rows'
            limits[f'{rows} wider than the rotary limit{positions}'] = ()
    # A row without padding shows nothing about trimming.
    padded_lengths = [length for length in lengths if length < width]
    if padded_lengths:
        limits[f'{PADDED} on the {side}{with_positions}'] = (-min(lengths), max(padded_lengths), width)
    return limits


def _media_limit(modality: str, sources: Sequence[RowFacts]) -> Limit | None:
    """Returns the limit of a modality's items; None: no row has any.

    It has the most items of a row, whether several rows have any, the sizes of the smallest and the largest item, and
    whether microbatches that a loader collates one by one pad items to different sizes.
    """
    counts: list[int] = []
    sizes: list[float] = []
    for facts in sources:
        counts += [count for count in facts.counts.get(modality, ()) if count]
        sizes += [size for size in facts.media_sizes(modality) if size is not None]
    if not counts:
        return None
    smallest, largest = min(sizes), max(sizes)
    # Items of one size need no padding, so their size does not matter.
    if smallest == largest:
        smallest, largest = math.inf, -math.inf
    return max(counts), len(counts) > 1, -smallest, largest, _is_ragged(modality, sources)


def _is_ragged(modality: str, sources: Sequence[RowFacts]) -> bool:
    """Returns whether microbatches pad a tensor of the modality to different sizes."""
    first_shapes: dict[str, torch.Size] = {}
    for facts in sources:
        for key, entry in media_entries(facts.layout, facts.batch).items():
            item_shape = facts.batch[key].shape[1:]
            if entry.modality == modality and item_shape != first_shapes.setdefault(key, item_shape):
                return True
    return False
