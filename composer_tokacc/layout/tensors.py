# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Selects the entries of some rows from a tensor, and joins tensors of several batches. Copies only if it must.

An :class:`Entry` says how a tensor belongs to the rows of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import Batch
from composer_tokacc.refusals import InvalidInputError


class PartUnit(NamedTuple):
    """A unit that is a part of an item, such as a patch of an image."""

    modality: str
    grid_key: str
    """Key of the grid, ``(items, 3)``. The product of the three numbers of an item is the number of its parts."""


PART_UNITS = {
    'patch': PartUnit('image', 'image_grid_thw'),
    'video_patch': PartUnit('video', 'video_grid_thw'),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor of a batch belongs to its rows.

    Args:
        unit: The unit of the entries along ``row_dim``. ``'row'``: each row has one. ``'image'``, ``'patch'``,
            ``'video'``, ``'video_patch'``, ``'audio'``: a row has any number, in the order of the rows. ``'shared'``:
            the tensor belongs to all rows. Any other name is allowed if the batch carries ``num_<name>s``, one number
            per row. Such entries go with their rows, but this package makes no dummy rows with them. ``found.py`` also
            writes ``'image/12'``: 12 entries of images, whose rows are inferred.
        row_dim: The dimension that enumerates the units.
        seq_dims: Dimensions along the text of a row. They are padded and trimmed together with it.
        slot_dim: A dimension along the images of a row, padded to the row with the most images (Idefics3).
        fill: Padding value.
        absent: Value of the rows of a batch without this tensor, if it is joined with a batch that has it. None: such
            batches cannot be joined. Media entries need none.
        points_into: Key of the pixel tensor, if the values are numbers of its patches, counted over the whole batch.
            They are renumbered when rows are selected or joined. Negative values stay.
    """

    unit: str = 'row'
    row_dim: int = 0
    seq_dims: tuple[int, ...] = ()
    slot_dim: int | None = None
    fill: float = 0
    absent: float | None = None
    points_into: str | None = None

    @property
    def is_media(self) -> bool:
        """Whether the tensor exists only if there are images, videos, audios or items of another unit."""
        return self.unit not in ('row', 'shared') or self.slot_dim is not None

    @property
    def modality(self) -> str:
        """The modality of the entries. A unit without a modality, such as ``'row'``, stays as it is."""
        if self.slot_dim is not None:
            return 'image'
        if self.unit in PART_UNITS:
            return PART_UNITS[self.unit].modality
        return self.unit.partition('/')[0]


# Only the next four names ask about a GPU, so that tests can replace them.

_has_gpu = cache(torch.cuda.is_available)
"""Cached, because it is called for every tensor of every microbatch and torch reads the environment each time."""


def _on_the_way_to_a_gpu(value: torch.Tensor) -> bool:
    # If the microbatch moves to a GPU, the move copies it, so a view saves one copy. On a CPU the view would stay.
    # Composer deep-copies each microbatch for the metrics of training, and a deep copy of a view copies the whole
    # tensor behind it.
    return _has_gpu() and value.device.type == 'cpu'


def _is_page_locked(value: torch.Tensor) -> bool:
    return _has_gpu() and value.is_pinned()


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, pin_memory=_is_page_locked(like))


def take(
    value: torch.Tensor,
    dim: int,
    index: list[int],
) -> torch.Tensor:
    """Returns the entries at the indices: a view if possible, otherwise one copy, page-locked if the tensor was."""
    start = index[0] if index else 0
    end = start + len(index)
    if index == list(range(start, end)) and _on_the_way_to_a_gpu(value):
        view = value.narrow(dim, start, len(index))
        if view.is_contiguous():
            return view
    shape = list(value.shape)
    shape[dim] = len(index)
    selected = _empty(shape, value)
    positions = torch.tensor(index, dtype=torch.long, device=value.device)
    return torch.index_select(value, dim, positions, out=selected)


def compact(view: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Returns the view, or a copy if the view has gaps."""
    if view.is_contiguous():
        return view
    return _empty(view.shape, like).copy_(view)


def cat_padded(
    values: Sequence[torch.Tensor],
    entry: Entry,
    width: int,
    side: str,
) -> torch.Tensor:
    """Joins tensors along ``entry.row_dim``, with every other dimension padded to its largest size.

    Dimensions along the text are padded to ``width``, on the side ``side``; all others at their end.
    """
    num_dims = values[0].dim()
    row_dim = entry.row_dim % num_dims
    seq_dims = {dim % num_dims for dim in entry.seq_dims}
    shapes = [value.shape for value in values]
    shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
    for dim in seq_dims:
        shape[dim] = width
    shape[row_dim] = sum(value.shape[row_dim] for value in values)
    # One sample may hold an int where another holds a float. The float must not be rounded.
    dtype = values[0].dtype
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    joined = values[0].new_full(shape, entry.fill, dtype=dtype)
    start = 0
    for value in values:
        num_entries = value.shape[row_dim]
        target = joined.narrow(row_dim, start, num_entries)
        for dim, size in enumerate(value.shape):
            if dim == row_dim:
                continue
            is_padded_before = dim in seq_dims and side == 'left'
            offset = target.shape[dim] - size if is_padded_before else 0
            target = target.narrow(dim, offset, size)
        target.copy_(value)
        start += num_entries
    return joined


RowOffsets = Mapping[str, Sequence[int]]
"""Where the entries of each row begin, by unit. Row i has the entries ``offsets[i]:offsets[i + 1]``, so the last offset
is the number of all entries."""


def select_rows(
    batch: Batch,
    entries: Mapping[str, Entry],
    offsets: RowOffsets,
    rows: Sequence[int],
) -> dict[str, Any]:
    """Returns a batch of these rows, in this order.

    Args:
        batch: The batch.
        entries: How each tensor belongs to rows.
        offsets: Where the entries of each row of the batch begin, for every unit.
        rows: Numbers of rows.
    """
    selected: dict[str, Any] = {}
    for key, value in batch.items():
        entry = entries.get(key)
        if entry is None:
            selected[key] = value
            if isinstance(value, (list, tuple)):
                selected[key] = [value[row] for row in rows]
            continue
        chosen = _select_units(key, value, entry, offsets, rows)
        if entry.points_into is not None:
            patches_per_item = batch[entry.points_into].shape[1]
            item_offsets = offsets[entries[entry.points_into].unit]
            chosen = _repointed(chosen, offsets[entry.unit], item_offsets, patches_per_item, rows)
        # Rows without images get no image tensors at all. Models do not take empty ones.
        if not entry.is_media or chosen.numel() > 0:
            selected[key] = chosen
    return selected


def _repointed(
    pointers: torch.Tensor,
    pointer_offsets: Sequence[int],
    item_offsets: Sequence[int],
    patches_per_item: int,
    rows: Sequence[int],
) -> torch.Tensor:
    """Renumbers pointers to patches, so that they count the patches of the chosen rows instead of the whole batch.

    Args:
        pointers: Pointers of the chosen rows.
        pointer_offsets: Where the pointers of each row of the batch begin.
        item_offsets: Where the images of each row of the batch begin.
        patches_per_item: Patches of an image.
        rows: Numbers of the chosen rows.
    """
    num_pointers = []
    shifts = []
    new_first_patch = 0
    for row in rows:
        num_pointers.append(pointer_offsets[row + 1] - pointer_offsets[row])
        old_first_patch = patches_per_item * item_offsets[row]
        shifts.append(new_first_patch - old_first_patch)
        num_items = item_offsets[row + 1] - item_offsets[row]
        new_first_patch += patches_per_item * num_items
    return renumber(pointers, num_pointers, shifts)


def _select_units(
    key: str,
    value: torch.Tensor,
    entry: Entry,
    offsets: RowOffsets,
    rows: Sequence[int],
) -> torch.Tensor:
    """Returns the entries of some rows, in the order of ``rows``, without image slots that none of these rows needs."""
    if entry.unit == 'shared':
        return value
    unit_offsets = offsets[entry.unit]
    if unit_offsets[-1] != value.shape[entry.row_dim]:
        units_per_row = [end - start for start, end in pairwise(unit_offsets)]
        raise InvalidInputError(
            f'`batch[{key!r}]` must have {unit_offsets[-1]} entries, one for each {entry.unit} ({units_per_row} by '
            f'row), got: {value.shape[entry.row_dim]}. Keep its entries and the rows together in the collator.'
        )
    index: list[int] = []
    for row in rows:
        index += range(unit_offsets[row], unit_offsets[row + 1])
    chosen = take(value, entry.row_dim, index)
    if entry.slot_dim is None:
        return chosen
    image_offsets = offsets['image']
    most_images = 0
    for row in rows:
        most_images = max(most_images, image_offsets[row + 1] - image_offsets[row])
    num_slots = min(most_images, chosen.shape[entry.slot_dim])
    narrowed = chosen.narrow(entry.slot_dim, 0, num_slots)
    # The models view rows and slots as one dimension, which a narrowed tensor does not allow.
    return compact(narrowed, like=value)


def renumber(value: torch.Tensor, counts: Sequence[int], shifts: Sequence[int]) -> torch.Tensor:
    """Adds ``shifts[0]`` to the first ``counts[0]`` entries, and so on. Negative numbers stay as they are."""
    shift_of_entry = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(counts))
    shift_of_entry = shift_of_entry.to(value)
    inner_dims = [1] * (value.dim() - 1)
    shifted = value + shift_of_entry.view(-1, *inner_dims)
    return torch.where(value < 0, value, shifted)
