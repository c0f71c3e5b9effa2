# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The few rows of a batch by which a model is judged, with the labels that tell."""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, labels_of, real_positions
from composer_tokacc.counting import loss_mask
from composer_tokacc.layout import BatchLayout, describe
from composer_tokacc.metadata import without_metadata

MIN_ROWS = 4
"""Rows of a check, where the batch has as many: what one of them sees of the others differs."""
NUM_LABELS = 4
"""Labels of the row that is asked for the rule."""


def chosen_rows(layout: BatchLayout, batch: Batch, wanted: set[str], max_rows: int) -> dict[str, Any]:
    """Returns a few unlike rows, as the loader padded them, each with a label: first those of the wanted kinds."""
    facts, labels = describe(layout, batch), labels_of(batch)
    lengths, media, indices = facts.lengths, facts.media, range(len(facts.lengths))
    units = [unit for unit in MODALITIES if unit in wanted]
    first = facts.real.int().argmax(dim=1).tolist()
    wishes = [  # the less, the better
        [-length for length in lengths],
        lengths,
        *([not count for count in facts.counts.get(unit, [0] * len(lengths))] for unit in units),
        [count > 0 for count in media],
        # A label on the first token behind padding is the hardest to keep.
        [not 0 < at < len(row) or int(row[at]) == IGNORE_INDEX for at, row in zip(first, labels, strict=True)],
        [-count for count in media],
    ]
    # Rows with labels before those that need made-up ones; of several that are as good the shortest.
    bare = (labels[:, 1:] == IGNORE_INDEX).all(dim=1).tolist()
    best = [min(zip(bare, wish, lengths, indices, strict=True))[-1] for wish in wishes]
    rows = list(dict.fromkeys(best))[: max(max_rows, 2 + len(units))]
    others = sorted(set(indices) - set(rows), key=lambda row: (bare[row], lengths[row]))
    rows += others[: max(MIN_ROWS - len(rows), 0)]
    return _with_labels(layout, layout.select(without_metadata(batch), rows))


def _with_labels(layout: BatchLayout, batch: dict[str, Any]) -> dict[str, Any]:
    """Gives rows labels on all real positions but the first, as what leaks into a row may show nowhere else.

    Rows with media, whose placeholders a model may not count, keep theirs, as does the row with the longest prompt, by
    which a term over other positions shows; without any they get one on their last real position.
    """
    labels, ids = batch['labels'], batch.get('input_ids')
    if ids is None or ids.shape != labels.shape or 'decoder_input_ids' in batch:
        return batch
    labels = labels.clone()
    real, media = real_positions(batch), layout.media_per_row(batch)
    unlabelled = (real & (labels == IGNORE_INDEX)).sum(dim=1)
    for row in range(len(labels)):
        places = real[row].nonzero().flatten()[1:]
        own = labels[row, 1:][labels[row, 1:] != IGNORE_INDEX]
        if not own.numel() and len(places):
            labels[row, places[-1]] = ids[row, places[-1]]
        elif own.numel() and not media[row] and row != int(unlabelled.argmax()):
            empty = places[labels[row, places] == IGNORE_INDEX]
            labels[row, empty] = own[torch.arange(len(empty)) % len(own)]
    return {**batch, 'labels': labels}


def documents_of(packed: Batch) -> torch.Tensor:
    """Returns which document each position of a packed row belongs to, ``(1, width)``."""
    mask = packed.get('attention_mask')
    if mask is not None:
        return mask.int().argmax(dim=0)[None]
    positions = packed['position_ids']  # of text come first
    return (positions.flatten(0, -2)[:1] == 0).cumsum(dim=1) - 1


def with_unequal_row(layout: BatchLayout, rows: dict[str, Any], rule: str) -> dict[str, Any]:
    """Adds a row of fewer or more labels to rows of nearly as many.

    Among rows of equally many tokens a mean of the rows' means is a mean over tokens, and the formula proves nothing.
    """
    counts = loss_mask(rows, rule).sum(dim=1).tolist()
    if max(counts) >= 2 * min(counts) and max(counts) > min(counts):
        return rows
    lengths = describe(layout, rows).lengths
    copied = layout.select(rows, [*range(len(counts)), min(range(len(counts)), key=lambda row: lengths[row] < 4)])
    labels = copied['labels'] = copied['labels'].clone()
    counted = loss_mask(copied, rule)[-1].nonzero().flatten().tolist()
    if len(counted) > 1:
        labels[-1, counted[:-1]] = IGNORE_INDEX
    elif counted and (ids := copied.get('input_ids')) is not None and ids.shape == labels.shape:
        # Behind its first token, as a label there may be predicted from padding; ids of placeholders are no labels.
        places = real_positions(copied)[-1].nonzero().flatten().tolist()[1:]
        labels[-1, places] = int(labels[-1, counted[0]])
    return copied


def rule_batch(layout: BatchLayout | None, rows: Batch) -> dict[str, Any]:
    """Returns one of the rows with labels at which the rules differ: on its first position, and on an unattended one.

    All labels are one and the same token, of which the model can be sure at one position at most. Where rows cannot be
    told apart the others stay, without labels.
    """
    if layout is not None:
        counts = (labels_of(rows)[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
        media = layout.media_per_row(rows)  # with media if it can be, as some models take no other
        best = min(range(len(counts)), key=lambda row: (counts[row] < 2, counts[row] < NUM_LABELS, not media[row]))
        rows = layout.select(rows, [best])
    labels, mask, ids = labels_of(rows), rows.get('attention_mask'), rows.get('input_ids')
    mask = mask if isinstance(mask, torch.Tensor) and mask.shape == labels.shape else None
    attended = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask != 0
    places = (labels[0, 1:] != IGNORE_INDEX).nonzero().flatten() + 1
    if len(places) < 2:
        places = attended[0, 1:].nonzero().flatten() + 1
    places = places[-NUM_LABELS:].tolist() or [labels.shape[1] - 1]
    own = labels[labels != IGNORE_INDEX]  # else one of the row's tokens
    own = own if own.numel() or ids is None or ids.shape != labels.shape else ids.flatten()
    changed = {**rows, 'labels': torch.full_like(labels, IGNORE_INDEX)}
    changed['labels'][0, [0, *places]] = int(own[-1]) if own.numel() else 0
    if mask is not None and len(places) > 1:
        changed['attention_mask'] = mask.clone()
        changed['attention_mask'][0, places[-1]] = 0
    return changed
