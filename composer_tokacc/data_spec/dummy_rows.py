# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of no weight: they keep ranks in step and encoders in use, and change neither gradient nor sample count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch
from composer_tokacc.layout import BatchLayout, RowFacts
from composer_tokacc.metadata import METADATA_PREFIX, num_rows, with_metadata


class DummyRow(NamedTuple):
    """A row of no weight with media, and what it takes of a microbatch."""

    row: Batch
    width: int
    image_tokens: int


class DummyRows:
    """A row of no weight for each modality of a step, made of this rank's batches when it is asked for."""

    def __init__(self, sources: Sequence[RowFacts]) -> None:
        self._layout, self._sources = sources[0].layout, sources
        self._made: dict[str, DummyRow | None] = {}
        self.needed: Sequence[str] = ()
        """Modalities that a microbatch must have."""

    @cached_property
    def present(self) -> set[str]:
        """Modalities that some row has."""
        every, found = set(MODALITIES if self._layout.extra else self._layout.family.media), set()
        for facts in self._sources:
            if not every <= found:  # counting media takes a while
                found |= {modality for modality, counts in facts.counts.items() if any(counts)}
        return found

    def missing(self, facts: RowFacts, rows: Sequence[int]) -> list[DummyRow]:
        """Returns a row for each modality that is needed and that none of these rows has."""
        if not self.needed:
            return []
        held = {modality for modality, counts in facts.counts.items() if any(counts[row] for row in rows)}
        if self._layout.family.one_kind and held:
            return []
        return [row for name in self.needed if name not in held and (row := self.row(name)) is not None]

    def row(self, modality: str) -> DummyRow | None:
        """Returns the smallest row of the step with the modality, or that of another rank; None: there is none."""
        if modality not in self._made:
            self.take(modality, smallest_row(self._sources, modality) if modality in self.present else None)
        return self._made[modality]

    def take(self, modality: str, row: Batch | None) -> None:
        """Makes that row the one with the modality."""
        layout = self._layout
        tokens = sum(layout.image_tokens_per_row(row)) if row is not None and layout.config is not None else 0
        self._made[modality] = None if row is None else DummyRow(row, layout.width(row), tokens)


def zero_weight(batch: Batch) -> dict[str, Any]:
    """Returns a copy without labels, whose rows are no samples."""
    none = [0] * num_rows(batch)
    emptied = {**batch, 'labels': torch.full_like(batch['labels'], IGNORE_INDEX)}
    facts = dict.fromkeys(('loss_tokens', 'real_tokens', 'samples', 'weights'), none)
    return with_metadata(emptied, **facts, sources=[None] * len(none))


def smallest_row(sources: Sequence[RowFacts], modality: str) -> dict[str, Any] | None:
    """Returns the smallest row with the modality: the fewest of it, then the shortest; of no weight."""
    sizes = [
        (number, facts.lengths[row], which, row)
        for which, facts in enumerate(sources)
        for row, number in enumerate(facts.counts.get(modality, ()))
        if number
    ]
    if not sizes:
        return None
    *_, which, row = min(sizes)
    layout = sources[which].layout
    return zero_weight(layout.trim(layout.select(sources[which].batch, [row])))


def add_rows(layout: BatchLayout, microbatch: Batch, rows: Sequence[Batch], side: str) -> dict[str, Any]:
    """Returns the microbatch with rows of no weight behind its own; ``side``: where the rows are padded.

    It is that of the batch: rows of one width, trimmed, show none, and may have been proven padded on the left alone.
    """
    per_row = {key for key, value in microbatch.items() if isinstance(value, (list, tuple))}
    fitting = [_with_lists(row, microbatch, per_row) for row in rows]
    # Under the mask any id will do that is no placeholder. A row may begin with one.
    ids = microbatch['input_ids']
    is_text = torch.ones_like(ids, dtype=torch.bool) if layout.config is None else ~layout.is_placeholder(microbatch)
    positions = microbatch.get('position_ids')
    if positions is not None and positions.dim() == 2:  # trimming has written them; a row of no weight takes any
        fitting = [{'position_ids': torch.arange(layout.width(row))[None], **row} for row in fitting]
    pad_token_id = int(ids[is_text][-1])
    return layout.concat([microbatch, *fitting], padding_side=side, pad_token_id=pad_token_id)


def _with_lists(row: Batch, microbatch: Batch, per_row: set[str]) -> dict[str, Any]:
    """Returns the row with just the lists of the microbatch; what a dummy cannot know is None, or no media."""
    kept = {key: value for key, value in row.items() if not isinstance(value, (list, tuple)) or key in per_row}
    for key in per_row - kept.keys():
        is_count = key.startswith('num_') or key == f'{METADATA_PREFIX}microbatches'
        kept[key] = microbatch[key][:1] if key == f'{METADATA_PREFIX}rule' else [0 if is_count else None]
    return kept
