# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Selects the entries of some rows from a tensor, and joins tensors of several batches.

The entries of a tensor are its slices along one dimension. Each stands for a unit: a row, an image, a patch and so on.
An :class:`Entry` names the unit, and so tells how the tensor belongs to the rows of its batch. For example, a batch has
two rows, and the first row has two images:

- ``input_ids``, ``(2, 9)``, has the ``Entry(seq_dims=(1,))``. Each of its 2 entries is a row.
- ``pixel_values``, ``(2, 3, 64, 64)``, has the ``Entry(unit='image')``. Each of its 2 entries is an image.

To select the second row is to take entry 1 of ``input_ids`` and no entry of ``pixel_values``.

The functions copy no more than they must, because the tensors of images are large. Rows of page-locked tensors are
copied to page-locked memory, because they are moved to the GPU later.
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
    """A unit that is a part of an image or video, such as a patch."""

    modality: str
    grid_key: str
    """Key of the tensor that holds the grid of each image or video, ``(items, 3)``: the number of parts in time, height
    and width. The product is the number of its parts."""


PART_UNITS = {
    'patch': PartUnit('image', 'image_grid_thw'),
    'video_patch': PartUnit('video', 'video_grid_thw'),
}
"""Units that are parts of an image or video. A model whose grids have another key needs a unit of its own here."""
GRID_KEYS = tuple(part.grid_key for part in PART_UNITS.values())
"""Keys of all grids. A batch with one of them has images or videos that are cut into patches."""


def inferred_unit(modality: str, num_entries: int) -> str:
    """Returns the unit of a tensor that is not registered, such as ``'image/12'``: it has 12 entries of images.

    Nothing tells whether these entries are images, tiles or patches. Only tensors with equally many entries have the
    same unit.
    """
    return f'{modality}/{num_entries}'


def parse_unit(unit: str) -> tuple[str, int | None]:
    """Returns modality and number of entries of an inferred unit; for any other unit, the unit itself and None."""
    modality, _, num_entries = unit.partition('/')
    if num_entries.isdecimal():
        return modality, int(num_entries)
    return unit, None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor of a batch belongs to its rows. One ``Entry`` describes all entries of the tensor.

    Args:
        unit: What an entry stands for. ``'row'``: a row. ``'image'``, ``'patch'``, ``'video'``, ``'video_patch'``,
            ``'audio'``: an image, a patch, ..., in the order of the rows; a row has any number of them. ``'shared'``:
            the tensor has no entries, because all rows use the whole tensor. Any other name is allowed if the batch
            carries ``num_<name>s``, one number per row; no dummy row is added to provide one. Tensors that are not
            registered get an inferred unit, see ``inferred_unit()``.
        row_dim: The dimension along which the entries lie.
        seq_dims: Dimensions along the text of a row. They are padded and trimmed together with it.
        slot_dim: The dimension along which a row has slots for its images (Idefics3), ``(rows, slots, ...)``. The unit
            is ``'row'`` then. All rows have as many slots as the row with the most images needs. Unused slots hold
            padding.
        fill: Padding value.
        absent: Value for the rows of a batch without this tensor, if it is joined with a batch that has it. None: such
            batches cannot be joined. Media need no value, because a row without media has no entry.
        points_into: Key of the pixel tensor, if the values are indices of its patches, counted over the whole batch.
            They are renumbered when rows are selected or joined. Negative values point to no patch and stay.
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
        """Whether the tensor belongs to images, videos, audios or other items of the rows.

        A batch whose rows have no such items does not have the tensor at all.
        """
        return self.unit not in ('row', 'shared') or self.slot_dim is not None

    @property
    def modality(self) -> str:
        """The modality of the entries, or of the slots. A unit without a modality is returned itself: ``'row'``."""
        if self.slot_dim is not None:
            return 'image'
        if self.unit in PART_UNITS:
            return PART_UNITS[self.unit].modality
        modality, _ = parse_unit(self.unit)
        return modality


# Only the next three functions ask about a GPU. Tests without a GPU replace some of them.

_has_gpu = cache(torch.cuda.is_available)
"""Cached, because it is called for every tensor of every microbatch and torch reads the environment each time."""


def _is_page_locked(value: torch.Tensor) -> bool:
    """Returns whether a tensor is page-locked. Without a GPU it asks nothing and returns False."""
    return _has_gpu() and value.is_pinned()


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of this shape whose values are not set. Type, device and page-locking are those of ``like``."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, pin_memory=_is_page_locked(like))


def take(
    value: torch.Tensor,
    dim: int,
    index: list[int],
) -> torch.Tensor:
    """Returns a copy of the entries at these indices along ``dim``. It is page-locked if the tensor is."""
    shape = list(value.shape)
    shape[dim] = len(index)
    # Without `out=`, the copy would not be page-locked.
    selected = _empty(shape, value)
    positions = torch.tensor(index, dtype=torch.long, device=value.device)
    return torch.index_select(value, dim, positions, out=selected)


def compact(view: torch.Tensor) -> torch.Tensor:
    """Returns the view if it has no gaps in memory. Otherwise returns a copy, page-locked if the view is."""
    if view.is_contiguous():
        return view
    return _empty(view.shape, view).copy_(view)


def cat_padded(
    values: Sequence[torch.Tensor],
    entry: Entry,
    width: int,
    side: str,
) -> torch.Tensor:
    """Joins tensors along ``entry.row_dim``, and pads their other dimensions with ``entry.fill``.

    Dimensions along the text are padded to ``width``, on ``side``. All others are padded at their end to the largest
    size among the tensors.
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
    first_entry = 0
    for value in values:
        num_entries = value.shape[row_dim]
        # The part of `joined` that gets this value: its entries, and in each other dimension its size.
        part = joined.narrow(row_dim, first_entry, num_entries)
        for dim, size in enumerate(value.shape):
            if dim == row_dim:
                continue
            start = 0
            if dim in seq_dims and side == 'left':
                start = width - size
            part = part.narrow(dim, start, size)
        part.copy_(value)
        first_entry += num_entries
    return joined


def _narrowed_to(value: torch.Tensor, columns: range, entry: Entry) -> torch.Tensor:
    """Returns a view of these columns of a tensor. If it loses no column, the tensor itself is returned."""
    for dim in entry.seq_dims:
        if len(columns) < value.shape[dim]:
            value = value.narrow(dim, columns.start, len(columns))
    return value


def select_columns(batch: Batch, entry_by_key: Mapping[str, Entry], columns: range) -> dict[str, Any]:
    """Returns the batch with these columns of its text. A tensor that loses no column is shared with the batch."""
    selected: dict[str, Any] = dict(batch)
    for key, entry in entry_by_key.items():
        value = _narrowed_to(batch[key], columns, entry)
        if value is not batch[key]:
            # Composer's LanguageCrossEntropy views labels flat, which torch refuses for a tensor with gaps.
            selected[key] = compact(value)
    return selected


RowOffsets = Mapping[str, Sequence[int]]
"""For each unit, the index of the first entry of each row, then the number of all entries. Row i has the entries
``offsets[unit][i]:offsets[unit][i + 1]``. For example, ``offsets['image']`` is ``[0, 2, 2, 3]`` if three rows have 2, 0
and 1 images."""


def select_rows(
    batch: Batch,
    entry_by_key: Mapping[str, Entry],
    offsets: RowOffsets,
    rows: Sequence[int],
    columns: range,
) -> dict[str, Any]:
    """Returns a batch of these rows, in this order. If they have no entry of a media tensor, it lacks the tensor.

    Args:
        batch: The batch.
        entry_by_key: How each tensor of the batch belongs to rows.
        offsets: The offsets of every unit of ``entry_by_key``.
        rows: The indices of the rows in the batch.
        columns: The columns of the text that the rows keep.
    """
    selected: dict[str, Any] = {}
    for key, value in batch.items():
        entry = entry_by_key.get(key)
        if entry is None:
            # The value is not a tensor. A list has one entry per row, any other value belongs to all rows.
            selected[key] = value
            if isinstance(value, (list, tuple)):
                selected[key] = [value[row] for row in rows]
        elif entry.unit == 'shared':
            narrowed = _narrowed_to(value, columns, entry)
            selected[key] = narrowed
            if narrowed is not value:
                selected[key] = compact(narrowed)  # for the same reason as in select_columns()
        else:
            of_rows = _tensor_of_rows(key, batch, entry_by_key, offsets, rows, columns)
            # Models do not take empty tensors of images.
            if not entry.is_media or of_rows.numel() > 0:
                selected[key] = of_rows
    return selected


def _tensor_of_rows(
    key: str,
    batch: Batch,
    entry_by_key: Mapping[str, Entry],
    offsets: RowOffsets,
    rows: Sequence[int],
    columns: range,
) -> torch.Tensor:
    """Returns the entries of these rows of ``batch[key]``. For the arguments see :func:`select_rows`."""
    value: torch.Tensor = batch[key]
    entry = entry_by_key[key]
    unit_offsets = offsets[entry.unit]
    _check_num_entries(key, value, entry, unit_offsets)
    # Columns first, so that the other columns are not copied.
    narrowed = _narrowed_to(value, columns, entry)
    of_rows = take(narrowed, entry.row_dim, _entries_of_rows(rows, unit_offsets))
    if entry.slot_dim is not None:
        of_rows = _without_unused_slots(of_rows, entry.slot_dim, offsets['image'], rows)
    if entry.points_into is not None:
        # The pixel tensor is (entries, patches of an entry, ...).
        patches_per_entry = batch[entry.points_into].shape[1]
        pixel_offsets = offsets[entry_by_key[entry.points_into].unit]
        of_rows = _renumber_patches(of_rows, unit_offsets, pixel_offsets, patches_per_entry, rows)
    return of_rows


def _check_num_entries(
    key: str,
    value: torch.Tensor,
    entry: Entry,
    unit_offsets: Sequence[int],
) -> None:
    """Raises ValueError if a tensor has another number of entries than the rows of the batch have units."""
    num_entries = value.shape[entry.row_dim]
    if num_entries != unit_offsets[-1]:
        units_per_row = [end - start for start, end in pairwise(unit_offsets)]
        raise InvalidInputError(
            f'`batch[{key!r}]` must have {unit_offsets[-1]} entries along dimension {entry.row_dim}, one for each '
            f'{entry.unit} ({units_per_row} by row), got: {num_entries}. Keep its entries and the rows together in the '
            'collator, or encode each sample by itself and join them with `BatchLayout.concat`.'
        )


def _entries_of_rows(rows: Sequence[int], unit_offsets: Sequence[int]) -> list[int]:
    """Returns the indices of the entries of these rows, in the order of the rows."""
    index: list[int] = []
    for row in rows:
        index += range(unit_offsets[row], unit_offsets[row + 1])
    return index


def _without_unused_slots(
    value: torch.Tensor,
    slot_dim: int,
    image_offsets: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """Returns the tensor of the chosen rows with as many image slots as their row with the most images needs."""
    most_images = 0
    for row in rows:
        most_images = max(most_images, image_offsets[row + 1] - image_offsets[row])
    num_slots = min(most_images, value.shape[slot_dim])  # a tensor may have fewer slots than `pixel_values`
    narrowed = value.narrow(slot_dim, 0, num_slots)
    # The models view rows and slots as one dimension, which torch refuses for a tensor with gaps.
    return compact(narrowed)


def _renumber_patches(
    pointers: torch.Tensor,
    pointer_offsets: Sequence[int],
    pixel_offsets: Sequence[int],
    patches_per_entry: int,
    rows: Sequence[int],
) -> torch.Tensor:
    """Turns indices of patches of the whole batch into indices of the same patches in a batch of the chosen rows.

    For example, the two rows of a batch have an image of 100 patches each. The pointers of the second row are 100 to
    199. If only this row is chosen, they become 0 to 99.

    Args:
        pointers: The indices that the chosen rows hold, still counted over the whole batch.
        pointer_offsets: Offsets of the pointers of all rows of the batch, as in :data:`RowOffsets`.
        pixel_offsets: Offsets of the entries of the pixel tensor, which may be tiles (Molmo 2).
        patches_per_entry: Number of patches of an entry of the pixel tensor. All have equally many.
        rows: Indices of the chosen rows.
    """
    num_pointers = [pointer_offsets[row + 1] - pointer_offsets[row] for row in rows]
    pointers_of_rows = [pointers[:0]]  # torch.cat() needs a tensor, even if there is no row
    new_first_patch = 0
    for row, old_pointers in zip(rows, pointers.split(num_pointers), strict=True):
        old_first_patch = patches_per_entry * pixel_offsets[row]
        new_pointers = shifted_pointers(old_pointers, new_first_patch - old_first_patch)
        pointers_of_rows.append(new_pointers)
        num_pixel_entries = pixel_offsets[row + 1] - pixel_offsets[row]
        new_first_patch += patches_per_entry * num_pixel_entries
    return torch.cat(pointers_of_rows)


def shifted_pointers(pointers: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns indices of patches with ``shift`` added. Negative values stay, because they point to no patch."""
    return torch.where(pointers < 0, pointers, pointers + shift)
