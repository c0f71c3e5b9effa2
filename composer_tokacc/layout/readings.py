# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds out how unregistered tensors belong to rows: those that neither a family nor the user has registered.

A *reading* is a way in which a tensor can belong to rows, such as "one entry per row" (:class:`Reading`). The name and
the shape of a tensor, the config and the batch tell the possible readings. Shapes can mislead: a memory of 16 states
looks like text if the text happens to be 16 tokens wide. So each key has a list of possible readings, which only gets
shorter during a fit: a reading that one batch has ruled out does not come back. The first reading of the list is used.

If that reading is media, ``item_counts.py`` finds out which entries belong to which row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from composer_tokacc.batch import Batch, text_of
from composer_tokacc.layout.item_counts import carried_counts
from composer_tokacc.layout.placeholders import has_any_id, modality_of, named_ids, tensors_named_after
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


# The readings that one batch allows.


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
    # The name says that the tensor holds media. Two shapes make this doubtful.
    if shape == (num_rows,):
        # It may be a column of the dataset, such as `image_id`. If the batch has the tensor, but no items, it is one.
        if _may_have_items(batch, modality, config, registered):
            return (Reading.MEDIA, Reading.ROWS)
        return (Reading.ROWS, Reading.MEDIA)
    if shape[:2] == (num_rows, width) and not value.is_floating_point():
        # It may tell which tokens are of images. Or it is a mask of media, and has this shape by chance.
        if _looks_like_mask_of_media(batch, value, modality):
            return (Reading.MEDIA, Reading.TEXT)
        return (Reading.TEXT, Reading.MEDIA)
    return (Reading.MEDIA,)


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


def _may_have_items(
    batch: Batch,
    modality: str,
    config: Any,
    registered: Mapping[str, Entry],
) -> bool:
    """Returns whether a batch may have items of a modality: images, videos or audios.

    It may if it has a tensor of media of two or more dimensions that is not empty, a number above 0 in ``num_images``
    (or ``num_videos``, ...), or a placeholder. A tensor ``(rows,)`` shows nothing, because it may be a column of the
    dataset. Without a config the placeholders are not known. Then only numbers that are all 0 show that it has none.
    """
    for key, value in tensors_named_after(modality, batch).items():
        is_registered_for_rows = key in registered and not registered[key].is_media
        if value.dim() > 1 and value.numel() and not is_registered_for_rows:
            return True
    carried = carried_counts(batch, modality)
    if carried is not None and any(carried):
        return True
    if config is None:
        return not carried  # `[]` tells nothing either
    ids = named_ids(config, modality)
    return bool(has_any_id(text_of(batch), ids).any())


def _looks_like_mask_of_media(batch: Batch, mask: torch.Tensor, modality: str) -> bool:
    """Returns whether a tensor in the shape of the text fits media of the batch as their mask.

    LFM2-VL masks the patches of a tile, GLM-ASR the frames of an audio. Such a mask ``(entries, size)`` comes with
    media that are floats ``(entries, ..., size, ...)``: a mask ``(3, 80)`` with audios ``(3, 128, 80)``.
    """
    num_entries, size = mask.shape[:2]
    for value in tensors_named_after(modality, batch).values():
        is_media = value.is_floating_point() and value.dim() > mask.dim()
        if is_media and len(value) == num_entries and size in value.shape[1:]:
            return True
    return False


def has_audio_along_text(batch: Batch, config: Any) -> bool:
    """Returns whether each token of the text has a fixed number of audio frames (Voxtral Realtime).

    Such text cannot be trimmed, because the frames would have to be trimmed with it.
    """
    num_rows, width = text_of(batch).shape[:2]
    has_frames_for_tokens = False
    for value in tensors_named_after('audio', batch).values():
        if value.dim() == 3 and len(value) == num_rows and value.shape[-1] % width == 0:
            has_frames_for_tokens = True
    # If audios have placeholders, the frames belong to these, and the shape is a coincidence.
    return has_frames_for_tokens and not named_ids(config, 'audio')


# The readings that several batches allow.


def agreed_readings(earlier: Sequence[Reading], later: Sequence[Reading]) -> tuple[Reading, ...]:
    """Returns the readings that two batches both allow, the most likely one first.

    Both sequences begin with the most likely reading. If a reading has different places in them, the worse one counts.

    Two readings can have the same place then. For example, a batch with images gives (MEDIA, ROWS) for ``image_id``,
    and one without images (ROWS, MEDIA). The second batch is right, because the tensor is there without an image. So
    MEDIA comes last, as it does in all such pairs.
    """
    # sorted() keeps the order of readings with the same place. It is the order of the enum: TEXT, ROWS, MEDIA, ...
    common = [reading for reading in Reading if reading in earlier and reading in later]
    return tuple(sorted(common, key=lambda reading: max(earlier.index(reading), later.index(reading))))


def joined_readings(first: Readings, second: Readings) -> Readings:
    """Returns the readings of each key that both allow. If only one of them has a key, the key keeps its readings.

    Raises:
        ValueError: If a key has none left, because it means different things in two batches.
    """
    joined = {**first, **second}
    for key, earlier in first.items():
        if key not in second:
            continue
        later = second[key]
        joined[key] = agreed_readings(earlier, later)
        if not joined[key]:
            later_meaning = ' or '.join(reading.value for reading in later)
            earlier_meaning = ' or '.join(reading.value for reading in earlier)
            raise InvalidInputError(
                f'`batch[{key!r}]` must mean the same in every batch, got: {later_meaning}, where earlier batches '
                f'hold {earlier_meaning}. Register it: `layout.with_entries({key}=Entry(unit=...))`.'
            )
    return joined


# The `Entry` of a reading.


def entry_of_reading(reading: Reading, batch: Batch, key: str) -> Entry:
    """Returns how the tensor ``batch[key]`` belongs to rows by this reading."""
    if reading is Reading.MEDIA:
        return _entry_of_media(batch, key)
    return ENTRY_BY_READING[reading]


def _entry_of_media(batch: Batch, key: str) -> Entry:
    """Returns how a tensor of media belongs to rows. Its unit has the modality and the number of entries: 'image/12'.

    Nothing tells whether these 12 entries are images, tiles or patches. Another tensor of the batch may have 3 entries,
    one per image: it has the unit ``'image/3'``. :func:`.entries_per_row` divides the entries of each unit among rows.
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
    holds_patch_indices = str(key).endswith('_token_pooling') and pixels_key in batch
    return Entry(
        unit=inferred_unit(modality, num_entries),
        row_dim=row_dim,
        points_into=pixels_key if holds_patch_indices else None,
    )


def _lies_side_by_side(batch: Batch, value: torch.Tensor, modality: str) -> bool:
    """Returns whether the patches of all images lie side by side, ``(1, channels, side, patches x side)`` (MiniCPM-V).

    Then another tensor, ``(images, 2)``, holds the height and the width of each image in patches.
    """
    if value.dim() != 4 or value.shape[0] != 1:
        return False
    patch_side, total_width = value.shape[-2:]
    for sizes in tensors_named_after(modality, batch).values():
        if sizes.shape[1:] != (2,):
            continue
        num_patches = int(sizes.prod(dim=1).sum())
        if num_patches * patch_side == total_width:
            return True
    return False
