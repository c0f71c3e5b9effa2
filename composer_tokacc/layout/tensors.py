# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tensors of some rows, and of several batches: the copies that a cut makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from composer_tokacc.batch import Batch
from composer_tokacc.layout.families import Entry

# Memory. These three are all that touch it, so that tests can stand in for a GPU.


_has_gpu = cache(torch.cuda.is_available)
"""Asked of every tensor of every microbatch, and torch reads the environment each time."""


def _on_the_way_to_a_gpu(value: torch.Tensor) -> bool:
    # For metrics of training Composer deep-copies each microbatch after its move to the device, and a deep copy of a
    # view copies all that it is a view of. The move to a GPU makes it a tensor of its own; on the CPU nothing does.
    return _has_gpu() and value.device.type == 'cpu'


def _is_page_locked(value: torch.Tensor) -> bool:
    return _has_gpu() and value.is_pinned()


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, pin_memory=_is_page_locked(like))


def take(value: torch.Tensor, dim: int, index: list[int]) -> torch.Tensor:
    """The entries at the indices: a view where that is allowed, otherwise one copy, page-locked if the tensor was."""
    if index and index == list(range(index[0], index[-1] + 1)):
        view = value.narrow(dim, index[0], len(index))
        if view.is_contiguous() and _on_the_way_to_a_gpu(value):
            return view
        return _empty(view.shape, value).copy_(view)
    shape = list(value.shape)
    shape[dim] = len(index)
    target = _empty(shape, value)
    return torch.index_select(value, dim, torch.tensor(index, dtype=torch.long, device=value.device), out=target)


def compact(view: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Returns the view, or where it has gaps a copy without."""
    return view if view.is_contiguous() else _empty(view.shape, like).copy_(view)


def cat_padded(values: Sequence[torch.Tensor], entry: Entry, width: int, side: str) -> torch.Tensor:
    """Concatenates along the rows, every other dimension padded to the largest."""
    row_dim = entry.row_dim % values[0].dim()
    seq_dims = {dim % values[0].dim() for dim in entry.seq_dims}
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    for dim in seq_dims:
        shape[dim] = width
    shape[row_dim] = sum(value.shape[row_dim] for value in values)
    joined = values[0].new_full(shape, entry.fill)
    start = 0
    for value in values:
        target = joined.narrow(row_dim, start, value.shape[row_dim])
        for dim, size in enumerate(value.shape):
            if dim != row_dim:
                from_left = dim in seq_dims and side == 'left'
                target = target.narrow(dim, target.shape[dim] - size if from_left else 0, size)
        target.copy_(value)
        start += value.shape[row_dim]
    return joined


def select_rows(
    batch: Batch, entries: Mapping[str, Entry], ends: Mapping[str, Sequence[int]], rows: Sequence[int]
) -> dict[str, Any]:
    """Returns the batch of the rows; ``ends``: by unit, how many there are up to each row and in all."""
    selected: dict[str, Any] = {}
    for key, value in batch.items():
        entry = entries.get(key)
        if entry is None:
            selected[key] = [value[row] for row in rows] if isinstance(value, (list, tuple)) else value
            continue
        chosen = _select_units(key, value, entry, ends, rows)
        if entry.points_into is not None:  # numbers of patches, counted over the chosen rows
            size, of_pixels = batch[entry.points_into].shape[1], ends[entries[entry.points_into].unit]
            starts = [0, *accumulate(size * (of_pixels[row + 1] - of_pixels[row]) for row in rows)]
            shifts = [start - size * of_pixels[row] for start, row in zip(starts, rows, strict=False)]
            chosen = renumber(chosen, [ends[entry.unit][row + 1] - ends[entry.unit][row] for row in rows], shifts)
        # A model takes no image entries for no images, rather than empty ones.
        if not entry.is_media or chosen.numel() > 0:
            selected[key] = chosen
    return selected


def _select_units(
    key: str, value: torch.Tensor, entry: Entry, ends: Mapping[str, Sequence[int]], rows: Sequence[int]
) -> torch.Tensor:
    if entry.unit == 'shared':
        return value
    of_unit = ends[entry.unit]
    if of_unit[-1] != value.shape[entry.row_dim]:
        raise ValueError(
            f'`batch[{key!r}]` must have {of_unit[-1]} entries, one per {entry.unit} of its rows, got: '
            f'{value.shape[entry.row_dim]} (by row: {[end - start for start, end in pairwise(of_unit)]}).'
        )
    chosen = take(value, entry.row_dim, [unit for row in rows for unit in range(of_unit[row], of_unit[row + 1])])
    if entry.slot_dim is not None:
        num_slots = max((ends['image'][row + 1] - ends['image'][row] for row in rows), default=0)
        # The models view rows and slots as one dimension, which a narrowed tensor does not allow.
        chosen = compact(chosen.narrow(entry.slot_dim, 0, min(num_slots, chosen.shape[entry.slot_dim])), like=value)
    return chosen


def renumber(value: torch.Tensor, counts: Sequence[int], shifts: Sequence[int]) -> torch.Tensor:
    """Returns numbers that count patches, with a shift for each run of entries; negative ones stay as they are."""
    shift = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(counts)).to(value)
    return torch.where(value < 0, value, value + shift.view(-1, *[1] * (value.dim() - 1)))
