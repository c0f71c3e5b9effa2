# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Layouts of tensors that no family registers.

The name and the shape of a tensor, the config and the batch tell how it belongs to rows. Shapes can mislead: a memory
of 16 states looks like text if the text happens to be 16 tokens wide. So each key has a list of possible readings,
which only gets shorter during a fit: a reading that one batch has ruled out does not come back.

An item is an image, a video or an audio. A tensor of items has one entry per item, or several: one per patch, tile or
frame. The placeholders in the text tell which entries belong to which row, if only one answer fits. The first-batch
check proves the answer for the first batch. A batch with no answer, or with two, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import MODALITIES, Batch, text_of
from composer_tokacc.layout.families import TEXT_FAMILY, Family, Media
from composer_tokacc.layout.placeholders import has_any_id, modality_of, placeholder_ids
from composer_tokacc.layout.tensors import Entry
from composer_tokacc.refusals import InvalidInputError


class Reading(Enum):
    """A way in which a tensor can belong to rows. The value completes the sentence "this tensor holds ..."."""

    TEXT = 'one value per token, (rows, width, ...)'
    ROWS = 'one entry per row, (rows, ...)'
    MEDIA = 'entries of images, videos or audios'
    SHARED_TEXT = 'one row of text for all rows, (1, width)'
    SHARED = 'one value for all rows'


Readings = Mapping[str, tuple[Reading, ...]]
"""The possible readings of each key, the most likely one first."""

ORDER = list(Reading)
"""Decides between readings that two batches put in opposite orders."""

ENTRIES = {
    Reading.TEXT: Entry(seq_dims=(1,)),
    Reading.ROWS: Entry(),
    Reading.SHARED_TEXT: Entry(unit='shared', seq_dims=(1,)),
    Reading.SHARED: Entry(unit='shared'),
}
"""How a tensor belongs to rows, by its reading; a tensor of media depends on the batch."""


def inferred_family(config: Any) -> Family:
    """Returns the family of a model that is not in ``FAMILIES``. Its config names its modalities.

    Encoders of images and audios have a config of their own. Videos go through the encoder of images.
    """
    vision_config = getattr(config, 'vision_config', None)
    audio_config = getattr(config, 'audio_config', None)
    encoders = {'image': vision_config, 'audio': audio_config}
    media = {}
    for modality in MODALITIES:
        has_encoder = encoders.get(modality) is not None
        if has_encoder or placeholder_ids(config, modality):
            media[modality] = Media()
    if not media:
        return TEXT_FAMILY
    return Family(name=config.model_type, media=media)


# The meaning of a key.


def possible_readings(
    batch: Batch,
    key: str,
) -> tuple[Reading, ...]:
    """Returns the possible readings of an unregistered tensor, the most likely one first; empty if there is none."""
    num_rows, width = text_of(batch).shape[:2]
    value: torch.Tensor = batch[key]
    shape = tuple(value.shape)
    if not shape:
        return (Reading.SHARED,)
    has_text_shape = shape[:2] == (num_rows, width)
    modality = modality_of(key)
    if modality is not None:
        # Pixels are floats. Integers can be a mask over the text, although the name speaks of media.
        if value.is_floating_point() or not has_text_shape:
            return (Reading.MEDIA,)
        if _masks_media(batch, value, modality):
            return (Reading.MEDIA, Reading.TEXT)
        return (Reading.TEXT, Reading.MEDIA)
    readings = []
    if has_text_shape:
        readings.append(Reading.TEXT)
    if shape[0] == num_rows:
        readings.append(Reading.ROWS)
    if shape == (1, width):
        readings.append(Reading.SHARED_TEXT)
    if shape == (1,):
        readings.append(Reading.SHARED)
    return tuple(readings)


def agreed_readings(earlier: Sequence[Reading], later: Sequence[Reading]) -> tuple[Reading, ...]:
    """Returns the readings that two batches both allow, the most likely one first.

    A reading is as unlikely as in the batch that ranks it lower.
    """
    common = [reading for reading in earlier if reading in later]

    def unlikeliness(reading: Reading) -> tuple[int, int]:
        lower_rank = max(earlier.index(reading), later.index(reading))
        return lower_rank, ORDER.index(reading)

    return tuple(sorted(common, key=unlikeliness))


def joined_readings(first: Readings, second: Readings) -> Readings:
    """Returns the readings of each key that both allow. A key of only one of them keeps its readings.

    Raises:
        ValueError: If a key has none left, because it means different things in two batches.
    """
    joined = dict(first)
    for key, possible in second.items():
        earlier = joined.get(key, possible)
        joined[key] = agreed_readings(earlier, possible)
        if not joined[key]:
            raise InvalidInputError(meaning_has_changed(key, earlier, possible))
    return joined


def meaning_has_changed(key: str, earlier: Sequence[Reading], possible: Sequence[Reading]) -> str:
    """Returns the message for a key that can no longer mean the same as in earlier batches."""
    later_meaning = ' or '.join(reading.value for reading in possible) or 'none of these'
    earlier_meaning = ' or '.join(reading.value for reading in earlier)
    return (
        f'`batch[{key!r}]` must mean the same in every batch, got: {later_meaning}, where earlier batches '
        f'hold {earlier_meaning}. '
        f'Register it: `layout.with_entries({key}=Entry(unit=...))`.'
    )


def entry_of_reading(reading: Reading, batch: Batch, key: str) -> Entry:
    """Returns how the tensor belongs to rows if it is read in that way."""
    if reading is Reading.MEDIA:
        return _entry_of_media(batch, key)
    return ENTRIES[reading]


def _entry_of_media(batch: Batch, key: str) -> Entry:
    value: torch.Tensor = batch[key]
    modality = modality_of(key)
    assert modality is not None
    row_dim = -1 if _lies_side_by_side(batch, value, modality) else 0
    pixels = 'pixel_values_videos' if modality == 'video' else 'pixel_values'
    # In Molmo 2 such a tensor holds numbers of patches, counted over the batch.
    has_patch_numbers = key.endswith('_token_pooling') and pixels in batch
    return Entry(
        unit=f'{modality}/{value.shape[row_dim]}',
        row_dim=row_dim,
        points_into=pixels if has_patch_numbers else None,
    )


def _masks_media(batch: Batch, mask: torch.Tensor, modality: str) -> bool:
    """Returns whether the shape of a mask fits a float tensor of the same modality.

    LFM2-VL masks the patches of a tile, GLM-ASR the frames of an audio. Such a mask can be as wide as the text.
    """
    num_entries, mask_width = mask.shape[:2]
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if modality_of(key) != modality or value.dim() <= mask.dim():
            continue
        if len(value) == num_entries and mask_width in value.shape[1:]:
            return True
    return False


def _lies_side_by_side(batch: Batch, value: torch.Tensor, modality: str) -> bool:
    """Returns whether the patches of all images lie side by side, ``(1, channels, side, patches x side)`` (MiniCPM-V).

    Then another tensor holds the height and the width of each image, in patches.
    """
    if value.dim() < 3 or value.shape[0] != 1:
        return False
    patch_side = value.shape[-2]
    for key, sizes in batch.items():
        if key == 'input_ids' or modality_of(key) != modality:
            continue
        if not isinstance(sizes, torch.Tensor) or sizes.shape[1:] != (2,):
            continue
        num_patches = int(sizes.prod(dim=1).sum())
        if num_patches * patch_side == value.shape[-1]:
            return True
    return False


def has_audio_along_text(batch: Batch, config: Any) -> bool:
    """Returns whether an audio has a fixed number of frames per token (Voxtral Realtime).

    Such text cannot be trimmed, because the frames would have to be trimmed with it.
    """
    num_rows, width = text_of(batch).shape[:2]
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or modality_of(key) != 'audio':
            continue
        if value.dim() == 3 and len(value) == num_rows and value.shape[-1] % width == 0:
            return not placeholder_ids(config, 'audio')
    return False


# How many images, videos or audios each row has.


def carried_counts(batch: Batch, modality: str) -> list[int] | None:
    """Returns ``num_images`` (or ``num_videos``, ...), one number per row; None if the batch does not have it."""
    carried = batch.get(f'num_{modality}s')
    if carried is None:
        return None
    counts = carried
    if isinstance(carried, torch.Tensor):
        counts = carried.flatten().tolist()
    is_list = isinstance(counts, Sequence)
    if not is_list or not all(hasattr(count, '__index__') and count >= 0 for count in counts):
        raise InvalidInputError(
            f'`num_{modality}s` must be a list of ints from 0, one per row, got: {carried}. Count the {modality}s of '
            'each row again.'
        )
    return [int(count) for count in counts]


def lengths_of_runs(is_placeholder: torch.Tensor) -> list[list[int]]:
    """Returns the length of each run of placeholders without a gap, by row; the argument is ``(rows, width)`` bool."""
    num_rows = len(is_placeholder)
    lengths_of_rows: list[list[int]] = [[] for _ in range(num_rows)]
    padded = torch.nn.functional.pad(is_placeholder, (1, 1))
    left = padded[:, :-1]
    right = padded[:, 1:]
    is_change = left != right
    # `nonzero` goes row by row, so the start of a run is followed by its end.
    changes = is_change.nonzero().tolist()
    starts = changes[::2]
    ends = changes[1::2]
    for start, end in zip(starts, ends, strict=True):
        row, first_column = start
        _, end_column = end
        length = end_column - first_column
        lengths_of_rows[row].append(length)
    return lengths_of_rows


class _Placeholders(NamedTuple):
    """The placeholders of a modality in each row: how many there are, and how many runs without a gap."""

    tokens: list[int]
    runs: list[int]


def entries_per_row(
    batch: Batch,
    config: Any,
    modality: str,
    num_entries: int,
) -> list[int]:
    """Returns how many entries of a modality's tensors belong to each row.

    Raises:
        ValueError: If nothing tells, or if there are two answers.
    """
    ids = placeholder_ids(config, modality)
    is_placeholder = has_any_id(text_of(batch), ids)
    runs_of_rows = lengths_of_runs(is_placeholder)
    placeholders = _Placeholders(
        tokens=[sum(runs) for runs in runs_of_rows],
        runs=[len(runs) for runs in runs_of_rows],
    )
    num_tokens = sum(placeholders.tokens)
    num_rows = len(placeholders.tokens)
    # A model without placeholders attends to one item per row. Without a config the placeholders may just be unknown.
    if num_tokens == 0 and num_entries == num_rows and config is not None:
        return [1] * num_rows
    answers: dict[str, list[int]] = {}
    for key, value in batch.items():
        if modality_of(key) != modality:
            continue
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            continue
        if value.dtype == torch.bool:  # a mask of items or tiles
            continue
        entries = _entries_by_sizes(value, num_entries, placeholders)
        if entries is not None:
            answers[key] = entries
    # If no tensor tells sizes that fit, all items are taken to be equally large.
    if num_tokens and not answers:
        scaled = [num_entries * tokens for tokens in placeholders.tokens]
        if all(count % num_tokens == 0 for count in scaled):
            answers['placeholders'] = [count // num_tokens for count in scaled]
    if sum(placeholders.runs) == num_entries:
        answers['runs of placeholders'] = placeholders.runs
    distinct_answers = {tuple(entries) for entries in answers.values()}
    if len(distinct_answers) != 1:
        raise InvalidInputError(
            f'`layout` must tell which of {num_entries} entries of {modality}s belong to which of {num_rows} rows, '
            f'got: {placeholders.tokens} placeholders in {placeholders.runs} runs by row, and '
            f'{answers or "no way to share them"}. Carry `num_{modality}s` in the batch, one int per row, or register '
            'the tensors: docs/families.md#not-there'
        )
    return list(distinct_answers.pop())


def _entries_by_sizes(
    value: torch.Tensor,
    num_entries: int,
    placeholders: _Placeholders,
) -> list[int] | None:
    """Returns the entries of each row if ``value`` holds the size of each item; None if it does not seem to.

    Sizes are grids of patches, ``(items, 2 or 3)``, or numbers of tiles, ``(items,)``. An item may have no tile.
    """
    if value.dim() not in (1, 2) or not len(value):
        return None
    is_grid = value.dim() == 2
    patches_of_items = value.prod(dim=1) if is_grid else value
    patches: list[int] = patches_of_items.tolist()
    num_patches = sum(patches)
    is_mask = is_grid and min(patches) < 1  # a grid has no 0
    if not num_patches or is_mask:
        return None
    items = _items_by_sizes(patches, placeholders)
    if items is None:
        return None
    if num_entries % num_patches == 0:  # an entry is a patch, or a fixed part of one
        entries_per_patch = num_entries // num_patches
        return [entries_per_patch * count for count in sums_of_runs(patches, items)]
    if num_entries == len(patches):
        return items
    return None


def _items_by_sizes(patches: Sequence[int], placeholders: _Placeholders) -> list[int] | None:
    """Returns the items of each row. Tries three meanings of the placeholders; the first that fits the totals decides.

    ``patches`` is the number of patches (or tiles, or frames) of each item.
    """
    num_tokens = sum(placeholders.tokens)
    num_patches = sum(patches)
    # A placeholder stands for a fixed number of merged patches.
    if num_tokens and num_patches % num_tokens == 0:
        patches_per_token = num_patches // num_tokens
        if all(count % patches_per_token == 0 for count in patches):
            tokens_per_item = [count // patches_per_token for count in patches]
            return items_of_rows(placeholders.tokens, tokens_per_item)
    # Each item has one run of placeholders, of any length.
    if sum(placeholders.runs) == len(patches):
        return list(placeholders.runs)
    # Each frame of a video has one run.
    if sum(placeholders.runs) == num_patches:
        return items_of_rows(placeholders.runs, patches)
    return None


def sums_of_runs(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Returns the sum of the first ``counts[0]`` values, of the next ``counts[1]``, and so on."""
    sums = []
    start = 0
    for count in counts:
        sums.append(sum(values[start : start + count]))
        start += count
    return sums


def items_of_rows(tokens: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Returns the number of items of each row; None if an item would lie in two rows.

    Rows with 20 and 10 tokens, and items of 10 tokens each: the rows have 2 items and 1. There is at most one answer,
    because every item has tokens, and items come in the order of the rows.

    Args:
        tokens: Placeholders of each row.
        sizes: Placeholders of each item.
    """
    if not sizes or min(sizes) < 1 or sum(sizes) != sum(tokens):
        return None
    items = []
    next_item = 0
    for num_tokens in tokens:
        first_item = next_item
        while num_tokens > 0:
            num_tokens -= sizes[next_item]
            next_item += 1
        if num_tokens < 0:  # the row ends inside of an item
            return None
        items.append(next_item - first_item)
    return items
