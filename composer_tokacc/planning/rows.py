# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The rows of one plan, checked, widened and sorted; how far a microbatch may reach from each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from composer_tokacc.planning.cost import CostModel

__all__ = ['SortedRows', 'check_rows', 'sort_rows']


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Rows from the longest to the shortest, ties by index.

    Cutting this order contiguously is optimal for padded rectangles: swapping two rows of different length between two
    microbatches never narrows either of them.
    """

    order: np.ndarray
    """Index of each row in the caller's list, int64 (n,)."""
    widths: np.ndarray
    """Width of a microbatch that starts at the row, int64 (n,). Never increases."""
    row_costs: np.ndarray
    """Cost of one row of that width, without vision, float64 (n,). Never increases."""
    vision: np.ndarray
    """Cost in the vision tower of all rows before each row, float64 (n + 1,). Never decreases."""
    reach: np.ndarray
    """Where a microbatch that starts at the row must end at the latest, int64 (n,). Never decreases."""

    def __len__(self) -> int:
        return len(self.order)


def check_rows(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    image_tokens: Sequence[int] | np.ndarray | None,
    max_image_tokens: int | None,
    width_multiple: int,
    max_width: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Check what every cut takes, and return lengths and image tokens as int64 arrays.

    Raises:
        ValueError: One of them is out of range; the message says which and how to mend it.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or len(sizes) == 0:
        raise ValueError(f'`lengths` must hold at least one sample, got: shape {sizes.shape}.')
    if sizes.dtype.kind not in 'iu':
        raise ValueError(f'`lengths` must be integers, got: {sizes.dtype}. Pass token counts.')
    sizes = sizes.astype(np.int64)
    if int(sizes.min()) < 1:
        at = int(np.argmin(sizes))
        raise ValueError(f'`lengths` must be positive, got: {sizes[at]} at sample {at}. Leave empty samples out.')
    for name, value in (('max_tokens', max_tokens), ('width_multiple', width_multiple)):
        if value < 1:
            raise ValueError(f'`{name}` must be at least 1, got: {value}.')
    if max_width is not None and max_width < int(sizes.max()):
        raise ValueError(f'`max_width` must be at least the longest sample, got: {max_width} < {sizes.max()}.')
    if max_image_tokens is not None and max_image_tokens < 1:
        raise ValueError(f'`max_image_tokens` must be at least 1, got: {max_image_tokens}. Use None for no cap.')
    if image_tokens is None:
        if max_image_tokens is not None:
            raise ValueError('`image_tokens` must be given with `max_image_tokens`, got: None.')
        return sizes, np.zeros(len(sizes), dtype=np.int64)
    images = np.asarray(image_tokens)
    if images.shape != sizes.shape:
        raise ValueError(f'`image_tokens` must have one entry per sample, got: {len(images)} for {len(sizes)}.')
    images = images.astype(np.int64)
    if int(images.min()) < 0:
        at = int(np.argmin(images))
        raise ValueError(f'`image_tokens` must not be negative, got: {images[at]} at sample {at}.')
    return sizes, images


def round_widths(lengths: np.ndarray, max_tokens: int, width_multiple: int, max_width: int | None) -> np.ndarray:
    """Round lengths up to the multiple, but never past the collated width or past the cap by rounding alone."""
    if width_multiple == 1:
        return lengths
    rounded = -(-lengths // width_multiple) * width_multiple
    limit = max_tokens if max_width is None else min(max_tokens, max_width)
    return np.maximum(lengths, np.minimum(rounded, limit))


def sort_rows(
    lengths: np.ndarray,
    images: np.ndarray,
    cost: CostModel,
    max_tokens: int,
    max_image_tokens: int | None,
    width_multiple: int = 1,
    max_width: int | None = None,
    members: np.ndarray | None = None,
) -> SortedRows:
    """Sort checked rows (or the `members` among them) by length and find what each microbatch can hold at most."""
    order = np.argsort(-lengths if members is None else -lengths[members], kind='stable')
    if members is not None:
        order = members[order]
    lengths = lengths[order]
    widths = round_widths(lengths, max_tokens, width_multiple, max_width)
    num_rows = len(order)
    image_sums = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(images[order], out=image_sums[1:])
    start = np.arange(num_rows, dtype=np.int64)
    # The first row is the widest, so it alone says how many rows fit under the token cap.
    reach = start + max_tokens // widths
    if max_image_tokens is not None:
        reach = np.minimum(reach, np.searchsorted(image_sums, image_sums[:-1] + max_image_tokens, side='right') - 1)
    reach = np.clip(reach, start + 1, num_rows)  # a row over a cap is placed alone
    return SortedRows(
        order=order,
        widths=widths,
        row_costs=cost.rows(widths),
        vision=image_sums * cost.vision_per_token,
        reach=reach,
    )
