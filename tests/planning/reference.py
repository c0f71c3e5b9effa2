# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Slow, obvious versions of the planner's functions, and checks of a plan. ``images`` are image tokens of each row."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from composer_tokacc.planning import CostModel, CutOptions, MicrobatchPlan, Rows
from composer_tokacc.planning.rows import OrderedRows


def sorted_rows(lengths, max_tokens, images=None, max_images=None, cost=None) -> OrderedRows:
    options = CutOptions(max_tokens=max_tokens, max_image_tokens=max_images, cost=cost or CostModel())
    rows = Rows(lengths, options, image_tokens=images)
    return rows.by_length()


def price_of(cost: CostModel, num_rows: int, width: int, image_tokens: int = 0) -> float:
    """Cost of a microbatch, by the formula in words."""
    return num_rows * (width + width**2 / cost.quadratic) + cost.vision_per_token * image_tokens + cost.launch


def fits(lengths, images, rows, max_tokens, max_images) -> bool:
    """Whether rows may share a microbatch: the caps hold, or a row is alone."""
    if len(rows) == 1:
        return True
    area = len(rows) * max(lengths[row] for row in rows)
    return area <= max_tokens and (max_images is None or sum(images[row] for row in rows) <= max_images)


def least_padded(lengths, max_tokens, price, order=None, images=None, max_images=None) -> dict[int, float]:
    """Least padded price of contiguous cuts of `order`, for each possible number of microbatches."""
    order = list(range(len(lengths))) if order is None else list(order)
    images = images if images is not None else [0] * len(lengths)

    @functools.cache
    def best(start: int) -> dict[int, float]:
        if start == len(order):
            return {0: 0.0}
        least: dict[int, float] = {}
        for end in range(start + 1, len(order) + 1):
            rows = order[start:end]
            if not fits(lengths, images, rows, max_tokens, max_images):
                break
            price_of_first = len(rows) * price(max(lengths[row] for row in rows))
            for count, price_of_others in best(end).items():
                total = price_of_first + price_of_others
                least[count + 1] = min(least.get(count + 1, np.inf), total)
        return least

    return best(0)


def fits_alone(row, lengths, images, max_tokens, max_images) -> bool:
    """Whether a row by itself breaks no cap."""
    if lengths[row] > max_tokens:
        return False
    return max_images is None or images is None or images[row] <= max_images


def partitions(rows):
    """Yields all ways to divide rows into microbatches."""
    if not rows:
        yield []
        return
    first = rows[0]
    for partition in partitions(rows[1:]):
        yield [[first], *partition]
        for k, block in enumerate(partition):
            yield [*partition[:k], [first, *block], *partition[k + 1 :]]


def check_cut(microbatches, lengths, max_tokens, images=None, max_images=None) -> None:
    """Checks that every row is in one microbatch, and that no cap is broken."""
    images = images if images is not None else [0] * len(lengths)
    assert Counter(row for rows in microbatches for row in rows) == Counter(range(len(lengths)))
    for rows in microbatches:
        assert fits(lengths, images, rows, max_tokens, max_images), (rows, [lengths[row] for row in rows])


def check_plan(plan: MicrobatchPlan, lengths, num_ranks, max_tokens, images=None, max_images=None) -> None:
    """Checks a plan of either objective."""
    assert len(plan.ranks) == num_ranks
    assert all(len(rank) >= 1 for rank in plan.ranks), 'a rank without a microbatch'
    real = [microbatch for rank in plan.ranks for microbatch in rank if not microbatch.filled]
    check_cut([microbatch.indices for microbatch in real], lengths, max_tokens, images, max_images)
    oversize = {row for row in range(len(lengths)) if not fits_alone(row, lengths, images, max_tokens, max_images)}
    assert set(plan.stats.oversize) == oversize
    for rank in plan.ranks:
        for microbatch in rank:
            longest = max(lengths[row] for row in microbatch.indices)
            assert microbatch.width >= longest
            if not oversize.intersection(microbatch.indices):
                assert microbatch.num_tokens <= max_tokens
            assert not microbatch.filled or len(microbatch.indices) == 1
    assert plan.stats.filled == sum(microbatch.filled for rank in plan.ranks for microbatch in rank)
    assert 0.0 < plan.stats.share_of_bound <= 1.0 + 1e-9


def check_slots(plan: MicrobatchPlan, images) -> None:
    """Checks a plan for 'fsdp': equal counts on all ranks, and step slots only with images or only without."""
    for slot in zip(*plan.ranks, strict=True):
        has_images = {any(images[row] for row in microbatch.indices) for microbatch in slot}
        assert len(has_images) == 1, slot
