# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds out how many images, videos or audios each row has.

An image, a video or an audio is an item. A row of the batch has items. In its text, each item has placeholders, tokens
that stand for it. In a tensor of media, each item has entries, which are neighbours along one dimension: one entry, or
several, such as one per patch, tile or frame. Items and entries are in the order of the rows.

A batch may carry the numbers of items itself (:func:`carried_counts`). Otherwise the placeholders tell them. There are
two cases:

- The number of placeholders of each item is known. Then a row has as many items as its placeholders fill
  (:func:`items_by_placeholders`).
- It is not known. How many entries each row has is inferred from its placeholders in several ways
  (:func:`entries_per_row`). Not all of them fit every batch. A batch is refused if no way fits, or if two ways give
  different numbers. Before training, the first-batch check shows that the numbers of the first batch are right: it
  compares the gradients of its rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from composer_tokacc.batch import Batch, num_runs
from composer_tokacc.layout.placeholders import modality_of, tensors_named_after
from composer_tokacc.refusals import InvalidInputError


def carried_counts(batch: Batch, modality: str) -> list[int] | None:
    """Returns ``num_images`` (or ``num_videos``, ...) of a batch as a list; None if the batch has no such key.

    Raises ValueError unless they are integers from 0. Does not check that there is one for each row.
    """
    carried = batch.get(f'num_{modality}s')
    if carried is None:
        return None
    values = carried
    if isinstance(carried, torch.Tensor):
        values = carried.flatten().tolist()  # (rows,) or (rows, 1)
    if isinstance(values, Sequence):
        counts = [_count_of(value) for value in values]
        if min(counts, default=0) >= 0:
            return counts
    raise InvalidInputError(
        f'`num_{modality}s` must be a list of ints from 0, one per row, got: {carried}. Count the {modality}s of each '
        'row again.'
    )


def _count_of(value: Any) -> int:
    """Returns an integer of Python or numpy, or the one in a tensor or an array of one element. -1: it is none."""
    try:
        if isinstance(value, np.ndarray):
            value = value.item()
        return operator.index(value)
    except (TypeError, ValueError):
        return -1


# If the number of placeholders of each item is known.


def items_by_placeholders(
    unit: str,
    tokens_per_row: Sequence[int],
    tokens_per_item: Sequence[int],
) -> list[int]:
    """Returns the number of items of each row. ``unit`` names them in the message.

    Raises ValueError if an item would lie in two rows, see :func:`items_of_rows`.
    """
    items = items_of_rows(tokens_per_row, tokens_per_item)
    if items is None:
        raise InvalidInputError(
            f'`input_ids` must hold the placeholders of {len(tokens_per_item)} whole {unit}s, got: rows with '
            f'{tokens_per_row} placeholders, and {unit}s that need {tokens_per_item}. Do not cut rows inside their '
            f'{unit}s, and write no {unit} into the text. If the model has query tokens, give it and its processor the '
            'same `num_query_tokens`.'
        )
    return items


def items_of_rows(tokens_per_row: Sequence[int], tokens_per_item: Sequence[int]) -> list[int] | None:
    """Returns the number of items of each row; None if they do not fit, or if an item would lie in two rows.

    For example, rows of 20 and 10 tokens have 2 items and 1 item if all items have 10 tokens. No other answer is
    possible, because every item has tokens, and items are in the order of the rows.

    Args:
        tokens_per_row: Number of placeholders of each row.
        tokens_per_item: Number of placeholders of each item. They fit if all are at least 1, and if they add up to
            those of the rows.
    """
    if min(tokens_per_item, default=1) < 1 or sum(tokens_per_item) != sum(tokens_per_row):
        return None
    items_per_row = []
    next_item = 0
    for num_tokens in tokens_per_row:
        first_item = next_item
        remaining = num_tokens
        while remaining > 0:
            remaining -= tokens_per_item[next_item]
            next_item += 1
        if remaining < 0:  # the row ends inside of an item
            return None
        items_per_row.append(next_item - first_item)
    return items_per_row


def sums_of_groups(values: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Splits values into groups of these sizes, and returns the sum of each group."""
    sums = []
    start = 0
    for size in sizes:
        sums.append(sum(values[start : start + size]))
        start += size
    return sums


# If it is not known.


class _PlaceholderCounts(NamedTuple):
    """How many placeholders of a modality each row has."""

    tokens: list[int]
    """Number of placeholder tokens of each row."""
    runs: list[int]
    """Number of runs of placeholders of each row. A run is a sequence without a gap."""


def entries_per_row(
    batch: Batch,
    is_placeholder: torch.Tensor,
    modality: str,
    num_entries: int,
) -> list[int]:
    """Returns how many of the ``num_entries`` entries of a tensor of media belong to each row.

    For example, a batch has two rows, with 8 and 4 placeholders, and a tensor has 24 entries. If nothing tells that
    images have different sizes, each placeholder stands for two entries. So the rows have 16 and 8 entries.

    Args:
        batch: The tensors of media of the batch, and others that a family registers for them.
        is_placeholder: Marks the placeholders of the modality, bool ``(rows, width)``.
        modality: ``'image'``, ``'video'`` or ``'audio'``.
        num_entries: Number of entries of the tensor, of all rows together.

    Raises:
        ValueError: If nothing tells these numbers, or if two ways to find them disagree.
    """
    placeholders = _PlaceholderCounts(
        tokens=is_placeholder.sum(dim=1).tolist(),
        runs=num_runs(is_placeholder).tolist(),
    )
    num_rows = len(placeholders.tokens)
    # If no row has a placeholder, and there are as many entries as rows, each row has one.
    if not any(placeholders.tokens) and num_entries == num_rows:
        return [1] * num_rows
    # Each way that fits gives an answer: the number of entries of each row. The keys name the ways.
    answers = _answers_of_tensors(batch, modality, num_entries, placeholders)
    # If no tensor holds sizes that fit, all entries are assumed to have equally many placeholders.
    if not answers:
        entries = _entries_of_equal_size(num_entries, placeholders)
        if entries is not None:
            answers['placeholders'] = entries
    # If there are as many runs of placeholders as entries, each entry probably has one run. This is tried even if
    # sizes have given an answer: the numbers of a tensor may fit by chance, although they are not sizes. Then the
    # answers differ, and the batch is refused.
    if sum(placeholders.runs) == num_entries:
        answers['runs of placeholders'] = placeholders.runs
    distinct_answers = {tuple(entries) for entries in answers.values()}
    if len(distinct_answers) != 1:
        keys = [str(key) for key in batch if modality_of(key) == modality]
        raise InvalidInputError(
            f'`layout` must tell which of {num_entries} entries of {modality}s belong to which of {num_rows} rows '
            f'({", ".join(keys)}), got: {placeholders.tokens} placeholders in {placeholders.runs} runs by row, and '
            f'{answers or "no way to share them"}. Carry `num_{modality}s` in the batch, one int per row (of images, '
            f'tiles are counted), declare a column that is none of {modality}s '
            '(`layout.with_entries(name=Entry())`), or register the tensors: docs/families.md#not-there'
        )
    return list(distinct_answers.pop())


def _answers_of_tensors(
    batch: Batch,
    modality: str,
    num_entries: int,
    placeholders: _PlaceholderCounts,
) -> dict[str, list[int]]:
    """Returns the number of entries of each row, by the key of each tensor that tells it."""
    answers: dict[str, list[int]] = {}
    for key, value in tensors_named_after(modality, batch).items():
        # A mask of items or tiles holds no sizes.
        if value.is_floating_point() or value.dtype == torch.bool:
            continue
        if key == f'batch_num_{modality}s':  # LLaVA-OneVision: the number of entries of each row
            entries = _entries_by_counts(value, num_entries, placeholders)
        else:
            entries = _entries_by_sizes(value, num_entries, placeholders)
        if entries is not None:
            answers[key] = entries
    return answers


def _entries_by_counts(
    counts_of_rows: torch.Tensor,
    num_entries: int,
    placeholders: _PlaceholderCounts,
) -> list[int] | None:
    """Returns the numbers of a tensor as a list if they can be the numbers of entries of the rows, otherwise None.

    There must be one for each row, their sum must be ``num_entries``, and exactly the rows with placeholders must have
    entries. A processor that got all images in one list writes a 1 for each image, not a number for each row. Then the
    numbers fit only if each row has one image.
    """
    entries: list[int] = counts_of_rows.flatten().tolist()  # (rows,) or (rows, 1)
    if sum(entries) != num_entries or len(entries) != len(placeholders.tokens):
        return None
    for num_entries_of_row, num_tokens in zip(entries, placeholders.tokens, strict=True):
        if (num_entries_of_row > 0) != (num_tokens > 0):
            return None
    return entries


def _entries_by_sizes(
    sizes: torch.Tensor,
    num_entries: int,
    placeholders: _PlaceholderCounts,
) -> list[int] | None:
    """Returns the number of entries of each row if the tensor holds the size of each item; None: it does not.

    Sizes are grids of patches, ``(items, 2)`` or ``(items, 3)``, or numbers of patches or tiles, ``(items,)``.
    """
    if sizes.dim() not in (1, 2) or not sizes.numel():
        return None
    is_grid = sizes.dim() == 2
    # No side of a grid is 0, so a grid with a 0 is a mask. A number of tiles may be 0. Neither may be negative: the
    # product of two negative numbers would look like a grid.
    least_size = 1 if is_grid else 0
    if int(sizes.min()) < least_size:
        return None
    patches_of_items = sizes.prod(dim=1) if is_grid else sizes
    patches: list[int] = patches_of_items.tolist()
    num_patches = sum(patches)
    if not num_patches:
        return None
    items_per_row = _items_by_sizes(patches, placeholders)
    if items_per_row is None:
        return None
    # Either an entry is a patch, or a part of one, and all patches have equally many parts. (If the sizes are numbers
    # of tiles, these tiles are called patches here, and an entry may be a patch of a tile.)
    if num_entries % num_patches == 0:
        entries_per_patch = num_entries // num_patches
        patches_per_row = sums_of_groups(patches, items_per_row)
        return [entries_per_patch * count for count in patches_per_row]
    # Or an entry is an item. Then the sizes may be in pixels.
    if num_entries == len(patches):
        return items_per_row
    return None


def _items_by_sizes(patches: Sequence[int], placeholders: _PlaceholderCounts) -> list[int] | None:
    """Returns the number of items of each row; None if the placeholders do not tell.

    Placeholders may have three meanings. The first one that fits the totals of the batch is taken, and no other is
    tried. ``patches`` holds the number of patches, tiles or frames of each item.
    """
    num_tokens = sum(placeholders.tokens)
    num_patches = sum(patches)
    # Each placeholder may stand for a fixed number of patches, which the model merges. An item of 0 patches has no
    # placeholder, and items_of_rows() returns None, because nothing tells its row.
    if num_tokens and num_patches % num_tokens == 0:
        patches_per_token = num_patches // num_tokens
        if all(count % patches_per_token == 0 for count in patches):
            tokens_per_item = [count // patches_per_token for count in patches]
            return items_of_rows(placeholders.tokens, tokens_per_item)
    # Or each item has one run of placeholders, of any length. For example, a tile of InternVL has 256 placeholders.
    if sum(placeholders.runs) == len(patches):
        return list(placeholders.runs)
    # Or each frame of a video has one run, and `patches` are frames.
    if sum(placeholders.runs) == num_patches:
        return items_of_rows(placeholders.runs, patches)
    return None


def _entries_of_equal_size(num_entries: int, placeholders: _PlaceholderCounts) -> list[int] | None:
    """Returns the number of entries of each row, as if all entries had equally many placeholders.

    A row with one third of all placeholders has one third of the entries, which must be an integer. Returns None if it
    is not, or if there is no placeholder or no entry.
    """
    num_tokens = sum(placeholders.tokens)
    if not num_tokens or not num_entries:
        return None
    entries = []
    for num_tokens_of_row in placeholders.tokens:
        num_entries_of_row, remainder = divmod(num_entries * num_tokens_of_row, num_tokens)
        if remainder:
            return None
        entries.append(num_entries_of_row)
    return entries
