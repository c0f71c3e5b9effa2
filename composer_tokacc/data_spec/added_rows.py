# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Zero-weight rows: they keep ranks in step and modules in use, and change neither gradient nor sample count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch
from composer_tokacc.layout import BatchLayout
from composer_tokacc.metadata import METADATA_PREFIX, num_rows, with_metadata


def zero_weight(batch: Batch) -> dict[str, Any]:
    """A copy without labels, whose rows are no samples."""
    none = [0] * num_rows(batch)
    emptied = {**batch, 'labels': torch.full_like(batch['labels'], IGNORE_INDEX)}
    return with_metadata(emptied, loss_tokens=none, real_tokens=none, samples=none, weights=none)


def smallest_row(
    layout: BatchLayout, batches: Sequence[tuple[Batch, Sequence[int], Sequence[int]]]
) -> dict[str, Any] | None:
    """The smallest row with media, weighing nothing; None where there is none.

    Args:
        layout: How tensors belong to rows.
        batches: Each with the columns that its rows need, and the number of media in each row.
    """
    sizes = [
        ((number, length), which, row)
        for which, (_, lengths, media) in enumerate(batches)
        for row, (length, number) in enumerate(zip(lengths, media, strict=True))
        if number
    ]
    if not sizes:
        return None
    _, which, row = min(sizes)
    return zero_weight(layout.trim(layout.select(batches[which][0], [row])))


def blank_row(layout: BatchLayout, batch: Batch, unit: str) -> dict[str, Any] | None:
    """A zero-weight row with media of the unit, made from the model's config to join this batch; None: it cannot be."""
    blank = layout.blank_row(unit, like=batch)
    return None if blank is None else zero_weight(blank)


def add_rows(layout: BatchLayout, microbatch: Batch, rows: Sequence[Batch]) -> dict[str, Any]:
    """The microbatch with zero-weight rows behind its own."""
    per_row = {key for key, value in microbatch.items() if isinstance(value, (list, tuple))}
    fitting = [_with_lists(row, microbatch, per_row) for row in rows]
    # Under the mask any id will do that is no placeholder. A row may begin with one.
    ids = microbatch['input_ids']
    plain = torch.ones_like(ids, dtype=torch.bool)
    for unit, media in layout.family.media.items():
        found = media.placeholders(microbatch, layout.config, unit)
        plain &= ~found if found is not None else True
    side, positions = layout.padding_side(microbatch), microbatch.get('position_ids')
    if positions is not None and positions.dim() == 2:  # trimming has written them; a row of no weight takes any
        fitting = [{'position_ids': torch.arange(layout.width(row))[None], **row} for row in fitting]
    return layout.concat([microbatch, *fitting], padding_side=side, pad_token_id=int(ids[plain][-1]))


class AddedRow(NamedTuple):
    """A zero-weight row with media, and what it takes of a microbatch."""

    row: Batch
    width: int
    image_tokens: int


class MediaRows:
    """What media the rows of a rank's step have, and zero-weight rows with media, made when they are asked for.

    Args:
        layout: How tensors belong to rows.
        batches: Each with the columns that its rows need.
    """

    def __init__(self, layout: BatchLayout, batches: Sequence[tuple[Batch, Sequence[int]]]) -> None:
        self._layout, self._batches = layout, batches
        self._counts: dict[int, dict[str, list[int]]] = {}
        self._made: dict[str, AddedRow | None] = {}
        self.needed: Sequence[str] = ()
        """Media that a microbatch must have."""

    def held(self, batch: Batch, rows: Sequence[int]) -> set[str]:
        """Media that some of these rows have."""
        return {unit for unit, counts in self._counts_of(batch).items() if any(counts[row] for row in rows)}

    @cached_property
    def present(self) -> set[str]:
        """Media that some row has."""
        found: set[str] = set()
        everything = set(MODALITIES if self._layout.extra else self._layout.family.media)
        for batch, _ in self._batches:
            if everything <= found:
                break
            found |= {unit for unit, counts in self._counts_of(batch).items() if any(counts)}
        return found

    def _counts_of(self, batch: Batch) -> dict[str, list[int]]:
        """How many of each of its media every row has; found out when it is asked for, as it takes a while."""
        if id(batch) not in self._counts:
            layout = self._layout
            self._counts[id(batch)] = {unit: layout.units_per_row(batch, unit) for unit in layout.media_of(batch)}
        return self._counts[id(batch)]

    def missing(self, batch: Batch, rows: Sequence[int]) -> list[AddedRow]:
        """For each of the media that are needed and that none of these rows has a row with them."""
        held = self.held(batch, rows) if self.needed else set()
        if self._layout.family.one_kind and held:
            return []
        return [row for unit in self.needed if unit not in held and (row := self.row(unit)) is not None]

    def row(self, unit: str) -> AddedRow | None:
        """The smallest row with the media, or a blank one where that is smaller; None: neither can be had."""
        if unit not in self._made:
            found = [blank_row(self._layout, self._batches[0][0], unit)]
            if unit in self.present:
                counted = [
                    (batch, lengths, self._counts_of(batch).get(unit, [0] * len(lengths)))
                    for batch, lengths in self._batches
                ]
                found.insert(0, smallest_row(self._layout, counted))
            self.take(unit, min(filter(None, found), key=self._layout.width, default=None))
        return self._made[unit]

    def take(self, unit: str, row: Batch | None) -> None:
        """The row with these media shall be that one."""
        layout = self._layout
        tokens = sum(layout.image_tokens_per_row(row)) if row is not None and layout.config is not None else 0
        self._made[unit] = None if row is None else AddedRow(row, layout.width(row), tokens)


def _with_lists(row: Batch, microbatch: Batch, per_row: set[str]) -> dict[str, Any]:
    """The row with just the lists that the microbatch has; what a blank row cannot know is None, or no media."""
    kept = {key: value for key, value in row.items() if not isinstance(value, (list, tuple)) or key in per_row}
    for key in per_row - kept.keys():
        is_count = key.startswith('num_') or key == f'{METADATA_PREFIX}microbatches'
        kept[key] = microbatch[key][:1] if key == f'{METADATA_PREFIX}rule' else [0 if is_count else None]
    return kept
