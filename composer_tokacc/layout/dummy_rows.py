# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Dummy rows: the smallest row with an image, a video or an audio, made of the model's config alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, text_of
from composer_tokacc.layout.layout import BatchLayout


def dummy_row(layout: BatchLayout, modality: str = 'image', *, like: Batch | None = None) -> dict[str, Any] | None:
    """Returns the smallest row with one image, video or audio, without labels.

    Joined with other rows it keeps the encoder in use; its loss has no tokens, so it changes no gradient.

    Args:
        layout: The model's.
        modality: ``'image'``, ``'video'`` or ``'audio'``.
        like: A batch to join it with: the row gets the entries of that batch that it lacks, other media excepted, and
            keeps none of the text entries that the batch does without. In lists it counts 0, says what all rows say, or
            None. None: ``attention_mask`` and ``labels``.

    Returns:
        dict | None: The row; None where the family has no such media, or its config does not tell their size.
    """
    media = layout.family.media.get(modality)
    if media is None or media.dummy is None or layout.config is None:
        return None
    row = media.dummy(layout.config)
    if row is None:
        return None
    if like is not None and 'pixel_values' in like and 'pixel_values_images' in row:
        row['pixel_values'] = row.pop('pixel_values_images')  # Video-LLaVA's newer processors say it so
    ids = row['input_ids']
    row = {**row, 'attention_mask': torch.ones_like(ids), 'labels': torch.full_like(ids, IGNORE_INDEX)}
    return row if like is None else _completed(layout, row, like)


def with_media(layout: BatchLayout, batch: Batch) -> Batch:
    """Returns the batch with media of no row, where it has none and the model takes no batch without: `has_queries`."""
    if not layout.family.has_queries or any(batch.get(key) is not None for key in layout.family.entries):
        return batch
    (modality,) = layout.family.media
    row = dummy_row(layout, modality) or {}
    device = text_of(batch).device
    return {**batch, **{key: row[key].to(device) for key in row.keys() & layout.family.entries.keys()}}


def _completed(layout: BatchLayout, row: dict[str, Any], like: Batch) -> dict[str, Any]:
    """Returns the row with the entries of a batch that it is to join, no more and no less but for its media."""
    width = layout.width(row)
    completed = {}
    for key, value in like.items():
        if key in row:
            completed[key] = row[key]
        elif isinstance(value, (list, tuple)):
            completed[key] = [_neutral(value)]
        elif not isinstance(value, torch.Tensor):
            completed[key] = value
        elif not (entry := layout.entry_of(like, key)).is_media and entry.unit != 'shared':
            shape = list(value.shape)
            shape[entry.row_dim] = 1
            for dim in entry.seq_dims:
                shape[dim] = width
            completed[key] = value.new_full(shape, entry.fill)
    needs = {key: value for key, value in row.items() if layout.entry_of(row, key).is_media}
    needs |= {key: row[key] for key in row if layout.entry_of(row, key).absent is not None}
    if 'position_ids' in completed:
        completed['position_ids'] = torch.arange(width).expand_as(completed['position_ids']).clone()
    return {**completed, **needs}


def _neutral(values: Sequence[Any]) -> Any:
    """Returns what a row that is no sample has in a list of per-row facts."""
    if isinstance(values[0], (int, float)):
        return type(values[0])()
    return values[0] if all(value == values[0] for value in values) else None
