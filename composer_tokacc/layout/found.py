# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds out how unregistered tensors belong to rows: those that neither a family nor the user has registered.

A *reading* is a way in which a tensor can belong to rows, such as "one entry per row" (:class:`Reading`). The name and
the shape of a tensor, the config and the batch tell the possible readings. Shapes can mislead: a memory of 16 states
looks like text if the text happens to be 16 tokens wide. So each key has a list of possible readings, which only gets
shorter during a fit: a reading that one batch has ruled out does not come back. The first reading of the list is used.

If that reading is media, the rows of its entries must be found, too. An item is an image, a video or an audio. A tensor
of media has one entry per item, or several: one per patch, tile or frame. How many entries each row has is inferred
from the placeholders in its text, in several ways. Not all of them fit every batch. A batch is refused if no way fits,
or if two ways give different numbers. Before training, the first-batch check shows that the numbers of the first batch
are right: it compares the gradients of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from composer_tokacc.batch import MODALITIES, Batch, num_runs, text_of
from composer_tokacc.layout.families import TEXT_FAMILY, Family, Media
from composer_tokacc.layout.placeholders import has_any_id, modality_of, placeholder_ids
from composer_tokacc.layout.tensors import Entry, inferred_unit
from composer_tokacc.refusals import InvalidInputError


class Reading(Enum):
    """A way in which a tensor can belong to rows. The value completes the sentence "this tensor holds ...".

    The order breaks ties, see :func:`agreed_readings`.
    """

    TEXT = 'one value per token, (rows, width, ...)'
    ROWS = 'one entry per row, (rows, ...)'
    MEDIA = 'entries of images, videos or audios'
    SHARED_TEXT = 'one row of text for all rows, (1, width)'
    SHARED = 'one value for all rows'


Readings = Mapping[str, tuple[Reading, ...]]
"""The possible readings of each key, the most likely one first."""

ENTRY_BY_READING = {
    Reading.TEXT: Entry(seq_dims=(1,)),
    Reading.ROWS: Entry(),
    Reading.SHARED_TEXT: Entry(unit='shared', seq_dims=(1,)),
    Reading.SHARED: Entry(unit='shared'),
}
"""How a tensor belongs to rows, by its reading. For media see :func:`_entry_of_media`."""


def inferred_family(config: Any) -> Family:
    """Returns the family of a model that is not in ``FAMILIES``, with the modalities that its config names.

    A config names a modality by its placeholders, or by the config of its encoder; videos only by their placeholders.
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


# The readings of a key.


def possible_readings(
    batch: Batch,
    key: str,
    config: Any,
    registered: Mapping[str, Entry],
) -> tuple[Reading, ...]:
    """Returns the possible readings of an unregistered tensor, the most likely one first; empty if there is none.

    Args:
        batch: The batch.
        key: The key of the tensor.
        config: The config of the model, or None.
        registered: How the tensors of registered keys belong to rows.
    """
    num_rows, width = text_of(batch).shape[:2]
    value: torch.Tensor = batch[key]
    shape = tuple(value.shape)
    if not shape:
        return (Reading.SHARED,)
    modality = modality_of(key)
    if modality is None:
        return _readings_by_shape(shape, num_rows, width)
    # The name of the tensor says that it holds media.
    if shape == (num_rows,):
        # But a column of the dataset may have such a name, too, such as `image_id`. A batch that has the tensor, but no
        # items, shows that it is a column.
        if _may_have_items(batch, modality, config, registered):
            return (Reading.MEDIA, Reading.ROWS)
        return (Reading.ROWS, Reading.MEDIA)
    if value.is_floating_point() or shape[:2] != (num_rows, width):
        return (Reading.MEDIA,)
    # Integers in the shape of the text may be a mask over its tokens.
    if _masks_media(batch, value, modality):
        return (Reading.MEDIA, Reading.TEXT)
    return (Reading.TEXT, Reading.MEDIA)


def _readings_by_shape(
    shape: tuple[int, ...],
    num_rows: int,
    width: int,
) -> tuple[Reading, ...]:
    """Returns the possible readings of a tensor whose name tells nothing. ``width`` is the width of the text."""
    readings = []
    if shape[:2] == (num_rows, width):
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

    Both sequences begin with the most likely reading. If a reading has different places in them, the worse one counts.
    Two readings have the same place only if one batch finds media more likely than rows (or text), and the other batch
    less likely. Then media comes second. The other batch is the better evidence: it has the tensor, but no items that
    the tensor fits.
    """
    # Readings with equal places keep this order, in which media comes after text and rows.
    common = [reading for reading in Reading if reading in earlier and reading in later]
    return tuple(sorted(common, key=lambda reading: max(earlier.index(reading), later.index(reading))))


def joined_readings(first: Readings, second: Readings) -> Readings:
    """Returns the readings of each key that both allow. If only one of them has a key, the key keeps its readings.

    Raises:
        ValueError: If a key has none left, because it means different things in two batches.
    """
    joined = dict(first)
    for key, possible in second.items():
        earlier = joined.get(key, possible)
        joined[key] = agreed_readings(earlier, possible)
        if not joined[key]:
            later_meaning = ' or '.join(reading.value for reading in possible)
            earlier_meaning = ' or '.join(reading.value for reading in earlier)
            raise InvalidInputError(
                f'`batch[{key!r}]` must mean the same in every batch, got: {later_meaning}, where earlier batches '
                f'hold {earlier_meaning}. Register it: `layout.with_entries({key}=Entry(unit=...))`.'
            )
    return joined


def entry_of_reading(reading: Reading, batch: Batch, key: str) -> Entry:
    """Returns how the tensor ``batch[key]`` belongs to rows by this reading."""
    if reading is Reading.MEDIA:
        return _entry_of_media(batch, key)
    return ENTRY_BY_READING[reading]


def _entry_of_media(batch: Batch, key: str) -> Entry:
    """Returns the ``Entry`` of a tensor of media. Its unit is the modality and the number of entries: ``'image/12'``.

    Tensors of one modality may have an entry per image, tile or patch. So the modality alone does not tell how many
    entries a row has. Tensors with equally many entries have the same unit, and :func:`entries_per_row` divides these
    12 entries among the rows.
    """
    value: torch.Tensor = batch[key]
    modality = modality_of(key)
    assert modality is not None  # only names with a modality are read as media
    row_dim = 0
    if _lies_side_by_side(batch, value, modality):
        row_dim = -1
    num_entries = value.shape[row_dim]
    pixels_key = 'pixel_values'
    if modality == 'video':
        pixels_key = 'pixel_values_videos'
    # In Molmo 2 a tensor with this name holds indices of patches in the pixels of the whole batch.
    holds_patch_indices = key.endswith('_token_pooling') and pixels_key in batch
    return Entry(
        unit=inferred_unit(modality, num_entries),
        row_dim=row_dim,
        points_into=pixels_key if holds_patch_indices else None,
    )


def _tensors_of(batch: Batch, modality: str) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names tell this modality, by key."""
    tensors = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and modality_of(key) == modality:
            tensors[key] = value
    return tensors


def _may_have_items(
    batch: Batch,
    modality: str,
    config: Any,
    registered: Mapping[str, Entry],
) -> bool:
    """Returns whether a batch may have items of a modality.

    It may if it has a tensor of media of two or more dimensions that is not empty, a number above 0 in ``num_images``
    (or ``num_videos``, ...), or a placeholder. A tensor ``(rows,)`` shows nothing, because it may be a column of the
    dataset. Without a config the placeholders are not known. Then the answer is True, unless the numbers are all 0.
    """
    for key, value in _tensors_of(batch, modality).items():
        is_registered_for_rows = key in registered and not registered[key].is_media
        if value.dim() > 1 and value.numel() and not is_registered_for_rows:
            return True
    carried = carried_counts(batch, modality)
    if any(carried or []):
        return True
    if config is None:
        return not carried
    ids = placeholder_ids(config, modality)
    return bool(has_any_id(text_of(batch), ids).any())


def _masks_media(batch: Batch, mask: torch.Tensor, modality: str) -> bool:
    """Returns whether a tensor in the shape of the text may be a mask of media, and has this shape by chance.

    LFM2-VL masks the patches of a tile, GLM-ASR the frames of an audio. Such a mask ``(entries, size)`` comes with
    media that are floats ``(entries, ..., size, ...)``.
    """
    num_entries, size = mask.shape[:2]
    for value in _tensors_of(batch, modality).values():
        is_media = value.is_floating_point() and value.dim() > mask.dim()
        if is_media and len(value) == num_entries and size in value.shape[1:]:
            return True
    return False


def _lies_side_by_side(batch: Batch, value: torch.Tensor, modality: str) -> bool:
    """Returns whether the patches of all images lie side by side, ``(1, channels, side, patches x side)`` (MiniCPM-V).

    Then another tensor, ``(images, 2)``, holds the height and the width of each image in patches.
    """
    if value.dim() != 4 or value.shape[0] != 1:
        return False
    patch_side, total_width = value.shape[-2:]
    for sizes in _tensors_of(batch, modality).values():
        if sizes.shape[1:] != (2,):
            continue
        num_patches = int(sizes.prod(dim=1).sum())
        if num_patches * patch_side == total_width:
            return True
    return False


def has_audio_along_text(batch: Batch, config: Any) -> bool:
    """Returns whether each token of the text has a fixed number of audio frames (Voxtral Realtime).

    Such text cannot be trimmed, because the frames would have to be trimmed with it.
    """
    num_rows, width = text_of(batch).shape[:2]
    for value in _tensors_of(batch, 'audio').values():
        if value.dim() == 3 and len(value) == num_rows and value.shape[-1] % width == 0:
            # If audios have placeholders, the frames belong to these, and the shape is a coincidence.
            return not placeholder_ids(config, 'audio')
    return False


# How many images, videos or audios each row has.


def carried_counts(batch: Batch, modality: str) -> list[int] | None:
    """Returns ``num_images`` (or ``num_videos``, ...) as a list; None if the batch has no such key.

    Raises ValueError unless they are integers from 0. Does not check that there is one for each row.
    """
    carried = batch.get(f'num_{modality}s')
    if carried is None:
        return None
    counts = carried
    if isinstance(carried, torch.Tensor):
        counts = carried.flatten().tolist()
    is_list = isinstance(counts, Sequence)
    # Integers of numpy have `__index__`, too.
    if not is_list or not all(hasattr(count, '__index__') and count >= 0 for count in counts):
        raise InvalidInputError(
            f'`num_{modality}s` must be a list of ints from 0, one per row, got: {carried}. Count the {modality}s of '
            'each row again.'
        )
    return [int(count) for count in counts]


def lengths_of_runs(is_placeholder: torch.Tensor) -> list[list[int]]:
    """Returns the lengths of the runs of placeholders in each row. A run is a sequence without a gap.

    ``is_placeholder`` is ``(rows, width)`` bool.
    """
    # A False column on both sides, so that each run has a first column and a column after its last one.
    is_change = F.pad(is_placeholder, (1, 1)).diff(dim=1)  # for bools a difference is the exclusive or
    # Row by row, and in each row from left to right, so each first column is followed by the end column of its run.
    changes = is_change.nonzero().tolist()
    lengths_of_rows: list[list[int]] = [[] for _ in range(len(is_placeholder))]
    for (row, first_column), (_, end_column) in zip(changes[::2], changes[1::2], strict=True):
        lengths_of_rows[row].append(end_column - first_column)
    return lengths_of_rows


class _PlaceholderCounts(NamedTuple):
    """How many placeholders of a modality each row has."""

    tokens: list[int]
    """Number of placeholder tokens of each row."""
    runs: list[int]
    """Number of runs of placeholders of each row."""


def entries_per_row(
    batch: Batch,
    is_placeholder: torch.Tensor,
    modality: str,
    num_entries: int,
) -> list[int]:
    """Returns how many of the ``num_entries`` entries of a tensor of media belong to each row.

    ``is_placeholder`` marks the placeholders of the modality, bool ``(rows, width)``.

    Raises:
        ValueError: If nothing tells these numbers, or if two ways to find them disagree.
    """
    placeholders = _PlaceholderCounts(
        tokens=is_placeholder.sum(dim=1).tolist(),
        runs=num_runs(is_placeholder).tolist(),
    )
    num_tokens = sum(placeholders.tokens)
    num_rows = len(placeholders.tokens)
    # If no row has a placeholder, and there are as many entries as rows, each row has one.
    if num_tokens == 0 and num_entries == num_rows:
        return [1] * num_rows
    # Each way to find the numbers gives an answer, the entries of each row, or none. The keys name the ways.
    answers: dict[str, list[int]] = {}
    for key, value in _tensors_of(batch, modality).items():
        # A mask of items or tiles holds no sizes.
        if value.is_floating_point() or value.dtype == torch.bool:
            continue
        if key == f'batch_num_{modality}s':  # LLaVA-OneVision: the number of entries of each row
            entries = _entries_by_rows(value, num_entries, placeholders)
        else:
            entries = _entries_by_sizes(value, num_entries, placeholders)
        if entries is not None:
            answers[key] = entries
    # If no tensor holds sizes that fit, all entries are assumed to have equally many placeholders. The entries of a row
    # are then num_entries * tokens / num_tokens, which must be an integer.
    if num_tokens and num_entries and not answers:
        products = [num_entries * tokens for tokens in placeholders.tokens]
        if all(product % num_tokens == 0 for product in products):
            answers['placeholders'] = [product // num_tokens for product in products]
    # If there are as many runs of placeholders as entries, each entry probably has one run. This is tried even if
    # sizes have given an answer: the numbers of a tensor may fit by chance, although they are not sizes. Then the
    # answers differ, and the batch is refused.
    if sum(placeholders.runs) == num_entries:
        answers['runs of placeholders'] = placeholders.runs
    distinct_answers = {tuple(entries) for entries in answers.values()}
    if len(distinct_answers) != 1:
        keys = [key for key in batch if modality_of(key) == modality]
        raise InvalidInputError(
            f'`layout` must tell which of {num_entries} entries of {modality}s belong to which of {num_rows} rows '
            f'({", ".join(keys)}), got: {placeholders.tokens} placeholders in {placeholders.runs} runs by row, and '
            f'{answers or "no way to share them"}. Carry `num_{modality}s` in the batch, one int per row (of images, '
            f'tiles are counted), declare a column that is none of {modality}s '
            '(`layout.with_entries(name=Entry())`), or register the tensors: docs/families.md#not-there'
        )
    return list(distinct_answers.pop())


def _entries_by_rows(
    value: torch.Tensor,
    num_entries: int,
    placeholders: _PlaceholderCounts,
) -> list[int] | None:
    """Returns the numbers in ``value`` if they can be the numbers of entries of the rows, otherwise None.

    There must be one for each row, their sum must be ``num_entries``, and exactly the rows with placeholders must have
    entries. A processor that got all images in one list writes a 1 for each image, not a number for each row. Then the
    numbers fit only if each row has one image.
    """
    entries: list[int] = value.tolist()
    if sum(entries) != num_entries or len(entries) != len(placeholders.tokens):
        return None
    for num_entries_of_row, num_tokens in zip(entries, placeholders.tokens, strict=True):
        if (num_entries_of_row > 0) != (num_tokens > 0):
            return None
    return entries


def _entries_by_sizes(
    value: torch.Tensor,
    num_entries: int,
    placeholders: _PlaceholderCounts,
) -> list[int] | None:
    """Returns the number of entries of each row if ``value`` holds the size of each item; None: it does not.

    Sizes are grids of patches, ``(items, 2)`` or ``(items, 3)``, or numbers of patches or tiles, ``(items,)``.
    """
    if value.dim() not in (1, 2) or not len(value):
        return None
    is_grid = value.dim() == 2
    patches_of_items = value.prod(dim=1) if is_grid else value
    patches: list[int] = patches_of_items.tolist()
    num_patches = sum(patches)
    # No side of a grid is 0, so a grid with a 0 is a mask. A number of tiles may be 0.
    is_mask = is_grid and min(patches) < 1
    if not num_patches or is_mask:
        return None
    items_per_row = _items_by_sizes(patches, placeholders)
    if items_per_row is None:
        return None
    if num_entries % num_patches == 0:
        # An entry is a patch, or if sizes are numbers of tiles, one of equally many parts of a tile.
        entries_per_patch = num_entries // num_patches
        patches_per_row = sums_of_groups(patches, items_per_row)
        return [entries_per_patch * count for count in patches_per_row]
    if num_entries == len(patches):  # an entry is an item. The sizes may be in pixels
        return items_per_row
    return None


def _items_by_sizes(patches: Sequence[int], placeholders: _PlaceholderCounts) -> list[int] | None:
    """Returns the number of items of each row; None if the placeholders do not tell.

    Placeholders may have three meanings. The first one that fits the totals of the batch decides. ``patches`` holds the
    number of patches, tiles or frames of each item.
    """
    num_tokens = sum(placeholders.tokens)
    num_patches = sum(patches)
    # Each placeholder may stand for a fixed number of patches, which the model merges.
    if num_tokens and num_patches % num_tokens == 0:
        patches_per_token = num_patches // num_tokens
        if all(count % patches_per_token == 0 for count in patches):
            tokens_per_item = [count // patches_per_token for count in patches]
            return items_of_rows(placeholders.tokens, tokens_per_item)
    # Or each item has one run of placeholders, of any length.
    if sum(placeholders.runs) == len(patches):
        return list(placeholders.runs)
    # Or each frame of a video has one run, and `patches` are frames.
    if sum(placeholders.runs) == num_patches:
        return items_of_rows(placeholders.runs, patches)
    return None


def sums_of_groups(values: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Splits values into groups of these sizes, and returns the sum of each group."""
    sums = []
    start = 0
    for size in sizes:
        sums.append(sum(values[start : start + size]))
        start += size
    return sums


def items_of_rows(tokens: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Returns the number of items of each row; None if the sizes do not fit, or if an item would lie in two rows.

    For example, rows of 20 and 10 tokens have 2 items and 1 item if all items have 10 tokens. No other answer is
    possible, because every item has tokens, and items are in the order of the rows.

    Args:
        tokens: Number of placeholders of each row.
        sizes: Number of placeholders of each item. They fit if all are at least 1, and if they add up to the tokens.
    """
    if min(sizes, default=1) < 1 or sum(sizes) != sum(tokens):
        return None
    items = []
    next_item = 0
    for num_tokens in tokens:
        first_item = next_item
        remaining = num_tokens
        while remaining > 0:
            remaining -= sizes[next_item]
            next_item += 1
        if remaining < 0:  # the row ends inside of an item
            return None
        items.append(next_item - first_item)
    return items
