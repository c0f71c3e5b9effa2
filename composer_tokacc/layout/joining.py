# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of :meth:`.BatchLayout.concat` that need no layout: which values of a key can be joined, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from composer_tokacc.batch import (
    IGNORE_INDEX,
    Batch,
    has_input_text,
    padding_positions,
    real_positions,
    sample_name,
    text_of,
)
from composer_tokacc.layout.tensors import Entry, shifted_pointers
from composer_tokacc.refusals import InvalidInputError

_NAME_OF_LABELS = re.compile(r'(?!is_|has_).*(labels?|label_ids|targets?)_?\d*$')
"""Matches names of labels of a second task, such as `ner_labels` or `labels2`, but not names of masks, such as
`label_mask` or `is_target`."""


# Values of several batches.


def values_of_rows(key: str, batches: Iterable[Batch]) -> list[Any]:
    """Returns one value for each row: an entry of a list, or the plain value that its batch has for all rows.

    The rows of a batch without the key have 0 if it is the key of a count, such as ``num_images``, and None otherwise.
    """
    missing = 0 if str(key).startswith('num_') else None  # keys need not be strings
    values: list[Any] = []
    for batch in batches:
        value = batch.get(key)
        if value is None:
            value = missing
        if isinstance(value, (list, tuple)):
            values += value
        else:
            num_rows = len(text_of(batch))
            values += [value] * num_rows
    return values


def check_present(key: str, present: Sequence[Batch], batches: Sequence[Batch]) -> None:
    """Raises ValueError if some batches lack the key. ``present`` are the batches that have it."""
    if len(present) < len(batches):
        raise InvalidInputError(
            f'`{key}` must be in every batch or in none, got: {len(present)} of {len(batches)}. Encode all samples '
            'with the same processor.'
        )


# Masks, which padding needs.


def with_masks(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Returns the batches with an ``attention_mask`` of ones if all have text, none has a mask, and no row is packed.

    The caller pads the batches afterwards. Without a mask a model would attend to the new padding. Batches with packed
    rows get no mask, because Transformers finds the documents of packed rows by their positions only if there is no
    mask.
    """
    masked: list[Batch] = []
    for batch in batches:
        batch_with_mask = with_mask(batch)
        if batch_with_mask is batch:
            return batches
        masked.append(batch_with_mask)
    return masked


def with_mask(batch: Batch) -> Batch:
    """Returns the batch with an ``attention_mask`` of ones if it has text and no mask, and no row is packed."""
    has_mask = batch.get('attention_mask') is not None
    if not has_input_text(batch) or has_mask or _may_be_packed(batch):
        return batch
    text = text_of(batch)
    # Not `ones_like(text)`, because ids of several codebooks have a third dimension.
    mask = torch.ones(text.shape[:2], dtype=text.dtype, device=text.device)
    return {**batch, 'attention_mask': mask}


def _may_be_packed(batch: Batch) -> bool:
    """Returns whether positions of the batch may begin again within a row: one is not larger than the one before it.

    True if they are not a tensor, because they are not read then.
    """
    positions = batch.get('position_ids')
    if positions is None:
        return False
    if not isinstance(positions, torch.Tensor):
        return True
    begins_again = positions[..., 1:] <= positions[..., :-1]
    if begins_again.dim() == 3:  # (axes, rows, width). Within an image, at least one axis rises with each token
        begins_again = begins_again.all(dim=0)
    return bool(begins_again.any())


# Tensors that can be joined.


def check_are_tensors(key: str, values: Sequence[object]) -> None:
    """Raises ValueError if some values of a key are tensors, and others are not."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(
                f'`{key}` must be a tensor in every batch that is joined, or in none, got: a tensor and a '
                f'{type(value).__name__}. Give every sample the same type.'
            )


def check_same_form(
    key: str,
    values: Sequence[torch.Tensor],
    entries: Sequence[Entry],
) -> None:
    """Raises ValueError if tensors of one key cannot be joined. ``entries`` say how each belongs to rows.

    They must have equally many dimensions, and the same padding value. The padding values of two masks differ if 0
    means "attend" in one of them, and "hide" in the other. If the rows of one batch share the tensor, no batch may have
    an entry for each of several rows.
    """
    numbers_of_dims = {value.dim() for value in values}
    fills = {entry.fill for entry in entries}
    is_shared = any(entry.unit == 'shared' for entry in entries)
    has_several_rows = any(value.dim() > 0 and len(value) > 1 for value in values)
    if len(numbers_of_dims) > 1 or len(fills) > 1 or (is_shared and has_several_rows):
        forms = sorted({f'{value.dtype} of shape {tuple(value.shape)}' for value in values})
        raise InvalidInputError(
            f'`{key}` must have the same form in all batches that are joined, got: {", ".join(forms)}. Give every '
            'sample the same number of dimensions, masks of one dtype, and every row an entry, or none.'
        )


def check_equal_clips(family: str, key: str, batches: Sequence[Batch]) -> None:
    """Raises ValueError if the videos of different batches have different numbers of frames.

    They are joined to one tensor without a mask, so the model would compute the frames that pad a shorter video.
    """
    batch_by_frames = {batch[key].shape[1]: batch for batch in batches}
    if len(batch_by_frames) > 1:
        names = []
        for num_frames in sorted(batch_by_frames):
            first_sample = sample_name(batch_by_frames[num_frames], 0)
            names.append(f'{num_frames} ({first_sample})')
        raise InvalidInputError(
            f'Videos of a batch must be of one number of frames for {family}, got: {", ".join(names)}. Take '
            'the same number of frames from each video: `dataset.video.num_frames`.'
        )


# How tensors are joined.


def entry_of_all(entries: Sequence[Entry]) -> Entry:
    """Returns how a tensor of the joined batch belongs to rows. ``entries`` say it for each batch, and may disagree.

    If the tensor is shared in one batch, it is shared in the joined batch. In a batch of one row, a shared tensor looks
    like one with an entry for that row. If it has no ``seq_dims`` in one batch, it has none, because a decoder's labels
    can have the encoder's width by chance.
    """
    for entry in entries:
        if entry.unit == 'shared':
            return entry
    for entry in entries:
        if not entry.seq_dims:
            return entry
    return entries[0]


def widest_shared(
    key: str,
    values: Sequence[torch.Tensor],
    entry: Entry,
    side: str,
) -> torch.Tensor:
    """Returns the widest of several tensors, each shared by the rows of its batch.

    The others must be the same as its beginning, or if text is padded on the left, the same as its end. For example,
    the positions 0 1 2 3 and 0 1 2 fit if text is padded on the right, so all rows get 0 1 2 3.

    Raises:
        ValueError: If one is not. Then its rows would get the values of another batch.
    """
    widest = max(values, key=torch.Tensor.numel)
    seq_dims = {dim % widest.dim() for dim in entry.seq_dims}
    for value in values:
        slices = []
        for dim, size in enumerate(value.shape):
            start = 0
            if side == 'left' and dim in seq_dims:
                start = max(widest.shape[dim] - size, 0)
            slices.append(slice(start, start + size))
        if not torch.equal(value, widest[tuple(slices)]):
            raise InvalidInputError(
                f'`{key}` must be the same for all rows, as it is shared by the rows of a batch, got: tensors that '
                f'differ, of shapes {[tuple(value.shape) for value in values]}. Give every batch one entry per row.'
            )
    return widest


def pointers_in_joined_pixels(
    pointers: Sequence[torch.Tensor],
    pixels: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns indices of patches, counted over the joined batch. Each batch counts its patches from 0.

    In the joined batch the patches of earlier batches come first. ``pixels`` has the pixels of each batch, ``(images,
    patches of an image, ...)``.
    """
    shifted = []
    first_patch = 0
    for pointers_of_batch, pixels_of_batch in zip(pointers, pixels, strict=True):
        shifted.append(shifted_pointers(pointers_of_batch, first_patch))
        first_patch += pixels_of_batch.shape[:2].numel()
    return shifted


def fill_of(key: str, batches: Sequence[Batch]) -> float:
    """Returns the value that pads an unregistered tensor along the text.

    It is the value that the collator has written on its own padding. If there is none, or several, labels get -100, and
    all others get 0. Integers are taken for labels if some are -100, or if the key is a name of labels.
    """
    value_on_padding = _value_on_padding(key, batches)
    if value_on_padding is not None:
        return value_on_padding
    if batches[0][key].dtype not in (torch.int16, torch.int32, torch.int64):
        return 0
    has_ignored = any(bool((batch[key] == IGNORE_INDEX).any()) for batch in batches)
    if has_ignored or _NAME_OF_LABELS.match(str(key)):
        return IGNORE_INDEX
    return 0


def _value_on_padding(key: str, batches: Sequence[Batch]) -> float | None:
    """Returns the value that a tensor has at all padding of the text; None if there is none, or several."""
    parts: list[torch.Tensor] = []
    for batch in batches:
        value: torch.Tensor = batch[key]
        is_padding = padding_positions(real_positions(batch))
        if value.shape[:2] == is_padding.shape:
            parts.append(value[is_padding].flatten())
    if not parts:
        return None
    padding = torch.cat(parts)
    if padding.numel() == 0:
        return None
    first = padding[0]
    # Unlike `==`, this finds NaN equal to NaN, which may mark missing values.
    is_first = torch.isclose(padding, first, rtol=0, atol=0, equal_nan=True)
    if not bool(is_first.all()):
        return None
    return first.item()
