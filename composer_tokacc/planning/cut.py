# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Cutting the rows of one rank: what a data loader's `split_batch` needs. No ranks, no objects, just row indices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from composer_tokacc.planning.area import AreaCuts
from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.in_order import least_cost_in_order
from composer_tokacc.planning.rows import check_rows, round_widths, sort_rows

__all__ = ['cut', 'cut_in_order']


def cut(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    image_tokens: Sequence[int] | np.ndarray | None = None,
    max_image_tokens: int | None = None,
    num_microbatches: int | None = None,
    width_multiple: int = 1,
    max_width: int | None = None,
    cost: CostModel | None = None,
) -> list[list[int]]:
    """Cut the rows of one rank into microbatches of least cost under hard caps, regrouping them by length.

    A microbatch is as wide as its longest row, rounded up to `width_multiple` but not past `max_width`; rows times
    width never exceeds `max_tokens`, the image tokens of its rows never exceed `max_image_tokens`, except for a row
    which alone breaks a cap: it goes alone.

    Args:
        lengths: Real length of each row in tokens, (n,).
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each row, (n,).
        max_image_tokens: Image budget of a microbatch.
        num_microbatches: Make exactly so many (one row each, and fewer, if there are fewer rows). By default as many
            as cost least.
        width_multiple: Round widths up to a multiple of this.
        max_width: Width of the collated batch, which rounding does not exceed.
        cost: Cost model of a microbatch.

    Returns:
        Row indices of each microbatch, ascending; the dearest microbatch first.

    Raises:
        ValueError: An argument is out of range, or the caps do not allow `num_microbatches`.

    Example:
        >>> cut([7, 2, 8, 2, 2], 16)
        [[0, 2], [1, 3, 4]]
    """
    cost = CostModel() if cost is None else cost
    sizes, images = check_rows(lengths, max_tokens, image_tokens, max_image_tokens, width_multiple, max_width)
    rows = sort_rows(sizes, images, cost, max_tokens, max_image_tokens, width_multiple, max_width)
    cuts = AreaCuts(rows)
    if num_microbatches is None:
        bounds = cuts.priced(cost.launch)
    else:
        check_count(num_microbatches, cuts.min_count)
        bounds = cuts.exactly(min(num_microbatches, len(rows)))
    starts, ends = bounds[:-1], bounds[1:]
    costs = (ends - starts) * rows.row_costs[starts] + cost.vision_per_token * (rows.images[ends] - rows.images[starts])
    dearest_first = np.argsort(-costs, kind='stable').tolist()
    return [sorted(rows.order[starts[k] : ends[k]].tolist()) for k in dearest_first]


def cut_in_order(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    image_tokens: Sequence[int] | np.ndarray | None = None,
    max_image_tokens: int | None = None,
    num_microbatches: int | None = None,
    width_multiple: int = 1,
    max_width: int | None = None,
    cost: CostModel | None = None,
) -> list[list[int]]:
    """Cut rows into microbatches of least cost under hard caps, without changing their order.

    Args:
        lengths: Real length of each row in tokens, (n,).
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each row, (n,).
        max_image_tokens: Image budget of a microbatch.
        num_microbatches: As in `cut`; also exact.
        width_multiple: As in `cut`.
        max_width: As in `cut`.
        cost: Cost model of a microbatch.

    Returns:
        Row indices of each microbatch; one after the other they are 0 to n - 1.

    Raises:
        ValueError: An argument is out of range, or the caps do not allow `num_microbatches`.

    Example:
        >>> cut_in_order([7, 2, 8, 2, 2], 16)
        [[0, 1], [2], [3, 4]]
    """
    cost = CostModel() if cost is None else cost
    sizes, images = check_rows(lengths, max_tokens, image_tokens, max_image_tokens, width_multiple, max_width)
    widths = round_widths(sizes, max_tokens, width_multiple, max_width)
    count = 0 if num_microbatches is None else min(num_microbatches, len(sizes))
    if num_microbatches is not None:
        check_count(num_microbatches, 1)
    image_cap = int(images.sum()) if max_image_tokens is None else max_image_tokens
    bounds, fewest = least_cost_in_order(widths, cost.rows(widths), images, max_tokens, image_cap, count, cost.launch)
    if num_microbatches is not None:
        check_count(num_microbatches, fewest)
    edges = bounds.tolist()
    return [list(range(start, end)) for start, end in pairwise(edges)]


def check_count(num_microbatches: int, fewest: int) -> None:
    """Refuse a number of microbatches that the caps do not allow."""
    if num_microbatches < fewest:
        raise ValueError(
            f'`num_microbatches` must be at least what the caps need, got: {num_microbatches} < {fewest}. '
            'Raise it, or `max_tokens` or `max_image_tokens`.'
        )
