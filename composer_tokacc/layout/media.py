# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How many images, patches, videos of a batch belong to each row."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from composer_tokacc.layout.entries import Batch, EntryLayout

__all__ = ['count_units', 'images_per_row']


def count_units(layout: EntryLayout, batch: Batch, unit: str) -> list[int]:
    """How many of a unit (``'image'``, ``'patch'``, ...) every row holds.

    Raises:
        ValueError: If the batch does not tell.
    """
    if unit == 'row':
        return [1] * layout.num_rows(batch)
    if unit == 'image':
        return images_per_row(layout, batch)
    if unit == 'patch':
        return _patches(batch['image_grid_thw'], images_per_row(layout, batch))
    if unit == 'video_patch':
        return _patches(batch['video_grid_thw'], _carried(layout, batch, 'video'))
    return _carried(layout, batch, unit)


def images_per_row(layout: EntryLayout, batch: Batch) -> list[int]:
    """Number of images of each row: by slots, by the carried ``num_images``, or by the image placeholders.

    Where the processor cuts an image into tiles, each tile is an image.

    Raises:
        ValueError: If nothing tells which images belong to which row.
    """
    num_rows = layout.num_rows(batch)
    carried = batch.get('num_images')
    pixels = batch.get('image_grid_thw')
    pixels = batch.get('pixel_values') if pixels is None else pixels
    if pixels is None:
        return list(carried) if carried is not None else [0] * num_rows
    if layout.family.slots is not None:
        occupied = layout.family.slots(batch)
        return (occupied * torch.arange(1, occupied.shape[1] + 1, device=occupied.device)).amax(dim=1).tolist()
    if num_rows == 1:
        return [len(pixels)]
    # The carried number is the user's: it says nothing where images were cut into tiles.
    if carried is not None and sum(carried) == len(pixels):
        return list(carried)
    return _match_placeholders(layout, batch, len(pixels))


def _carried(layout: EntryLayout, batch: Batch, unit: str) -> list[int]:
    """The batch's own list ``num_<unit>s``, held against the tensors that have one entry per unit."""
    sizes = {len(value) for value in layout.tensors_of(batch, unit).values()}
    if layout.num_rows(batch) == 1 and len(sizes) == 1:
        return [*sizes]
    counts = list(batch.get(f'num_{unit}s', [0] * layout.num_rows(batch)))
    if any(sum(counts) != size for size in sizes):
        raise ValueError(
            f'`num_{unit}s` must sum to the {max(sizes)} {unit}s of the batch, got: {counts}. Carry it in the batch, '
            'one int per row.'
        )
    return counts


def _patches(grid: torch.Tensor, counts: list[int]) -> list[int]:
    ends = [0, *accumulate(grid.prod(dim=1).tolist())]
    rows = [0, *accumulate(counts)]
    return [ends[end] - ends[start] for start, end in pairwise(rows)]


def _match_placeholders(layout: EntryLayout, batch: Batch, num_images: int) -> list[int]:
    remedy = 'Carry `num_images` (one int per row, tiles counted) in the batch'
    if layout.image_token_id is None:
        raise ValueError(
            f'`layout` must tell which of {num_images} images belong to which of {layout.num_rows(batch)} rows, got: '
            f'no image token id, and `num_images`={batch.get("num_images")}. {remedy}, or pass '
            '`layout=BatchLayout.for_model(model)`.'
        )
    is_image = batch['input_ids'] == layout.image_token_id
    tokens = is_image.sum(dim=1).tolist()
    by_size = _match_sizes(tokens, _image_sizes(layout, batch, num_images, sum(tokens)))
    if by_size is not None:
        return by_size
    starts = is_image.clone()
    starts[:, 1:] &= ~is_image[:, :-1]
    runs = starts.sum(dim=1).tolist()
    if sum(runs) != num_images:
        raise ValueError(
            f'`input_ids` must hold placeholders for {num_images} images, got: {tokens} image tokens by row in '
            f'{sum(runs)} runs, which does not tell the images apart. {remedy}.'
        )
    return runs


def _image_sizes(layout: EntryLayout, batch: Batch, num_images: int, num_tokens: int) -> list[int]:
    """Placeholders of each image, or an empty list where the batch does not tell."""
    sizes = layout.family.image_tokens(batch, layout.merge_size) if layout.family.image_tokens else []
    if sizes and sizes[0] == -1:
        return [num_tokens // num_images] * num_images if num_tokens % num_images == 0 else []
    return sizes


def _match_sizes(tokens: list[int], sizes: list[int]) -> list[int] | None:
    """Images per row, where rows hold whole images: 20 and 10 tokens of images of 10 are 2 and 1."""
    ends, row_ends = list(accumulate(sizes)), list(accumulate(tokens))
    if not sizes or row_ends[-1] != ends[-1] or any(end not in (0, *ends) for end in row_ends):
        return None
    return [sum(start < end <= stop for end in ends) for start, stop in pairwise([0, *row_ends])]
