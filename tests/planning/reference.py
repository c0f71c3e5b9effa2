# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples under caps, slow and obvious versions of the planner's functions, and checks of its results."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, MicrobatchPlan, Rows, plan_microbatches
from composer_tokacc.planning.rows import OrderedRows


def total_of(sizes: Sequence[int], rows: Sequence[int]) -> int:
    """Returns the sum of the sizes of some rows."""
    return sum(sizes[row] for row in rows)


@dataclass
class Samples:
    """Samples with their sizes, and the caps on the sums over a microbatch. A cap of None does not hold."""

    lengths: list[int]
    max_tokens: int
    images: list[int] = field(default_factory=list)
    """Image tokens of each sample. Empty: none."""
    labels: list[int] = field(default_factory=list)
    """Loss tokens of each sample. Empty: none."""
    max_images: int | None = None
    max_labels: int | None = None

    def __post_init__(self) -> None:
        num_samples = len(self.lengths)
        self.images = self.images or [0] * num_samples
        self.labels = self.labels or [0] * num_samples

    @property
    def tables(self) -> dict[str, list[int]]:
        return {
            'image_tokens': self.images,
            'loss_tokens': self.labels,
        }

    @property
    def caps(self) -> dict[str, int | None]:
        return {
            'max_tokens': self.max_tokens,
            'max_image_tokens': self.max_images,
            'max_loss_tokens': self.max_labels,
        }

    def sorted_rows(self, cost: CostModel | None = None) -> OrderedRows:
        """Returns the rows by length, as the planner's own functions take them."""
        options = CutOptions(cost=cost or CostModel(), **self.caps)
        rows = Rows(self.lengths, options, **self.tables)
        return rows.by_length()

    def plan(self, num_ranks: int, **options: Any) -> MicrobatchPlan:
        """Returns the plan of these samples under their caps."""
        arguments = {**self.caps, **self.tables, **options}
        return plan_microbatches(self.lengths, num_ranks=num_ranks, **arguments)

    def width(self, rows: Sequence[int]) -> int:
        """Returns the length of the longest of these rows."""
        return max(self.lengths[row] for row in rows)

    def keep_caps(self, rows: Sequence[int], *, is_packed: bool = False) -> bool:
        """Returns whether a microbatch of these rows breaks no cap."""
        num_tokens = len(rows) * self.width(rows)
        if is_packed:
            num_tokens = total_of(self.lengths, rows)
        if num_tokens > self.max_tokens:
            return False
        if self.max_images is not None and total_of(self.images, rows) > self.max_images:
            return False
        return self.max_labels is None or total_of(self.labels, rows) <= self.max_labels

    def fit(self, rows: Sequence[int], *, is_packed: bool = False) -> bool:
        """Returns whether rows may share a microbatch. A row that breaks a cap must be in one by itself."""
        return len(rows) == 1 or self.keep_caps(rows, is_packed=is_packed)

    def check_cut(self, microbatches: Sequence[Sequence[int]], *, is_packed: bool = False) -> None:
        """Checks that each sample is in one microbatch, and that no cap is broken."""
        rows_of_all: list[int] = []
        for rows in microbatches:
            rows_of_all += rows
            assert self.fit(rows, is_packed=is_packed), rows
        every_row = list(range(len(self.lengths)))
        assert sorted(rows_of_all) == every_row

    def check_plan(self, plan: MicrobatchPlan, num_ranks: int) -> None:
        """Checks a plan of either objective."""
        assert len(plan.ranks) == num_ranks
        assert all(plan.ranks), 'a rank without a microbatch'
        every_row = range(len(self.lengths))
        oversize = [row for row in every_row if not self.keep_caps([row])]
        assert sorted(plan.stats.oversize) == oversize

        microbatches_of_samples = []
        num_copies = 0  # of samples, for ranks that would have no microbatch
        for microbatch in itertools.chain(*plan.ranks):
            rows = microbatch.indices
            if microbatch.filled:
                assert len(rows) == 1
                num_copies += 1
            else:
                microbatches_of_samples.append(rows)
            assert microbatch.width >= self.width(rows)
            has_oversize = any(row in oversize for row in rows)
            if not has_oversize:
                assert microbatch.num_tokens <= self.max_tokens
        self.check_cut(microbatches_of_samples)

        assert plan.stats.filled == num_copies
        assert plan.stats.num_tokens == sum(self.lengths)
        assert 0.0 < plan.stats.share_of_bound <= 1.0 + 1e-9

    def check_slots(self, plan: MicrobatchPlan) -> None:
        """Checks a plan for 'fsdp': equal counts on all ranks, and step slots only with images or only without."""
        for slot in zip(*plan.ranks, strict=True):
            has_images = [self.has_images(microbatch.indices) for microbatch in slot]
            assert len(set(has_images)) == 1, slot

    def has_images(self, rows: Sequence[int]) -> bool:
        """Returns whether any of the rows has an image."""
        return total_of(self.images, rows) > 0

    def padded_cost(self, rows: Sequence[int]) -> float:
        """Returns the cost of a microbatch without vision and launch."""
        return len(rows) * row_cost(self.width(rows))

    def least_padded_costs(self, order: Sequence[int]) -> dict[int, float]:
        """Returns the least padded cost of contiguous cuts of `order`, for each possible number of microbatches."""

        @functools.cache
        def least_costs_from(start: int) -> dict[int, float]:
            """Returns the least costs of the cuts of the rows from `start` on."""
            if start == len(order):
                return {0: 0.0}
            least_costs: dict[int, float] = {}
            for end in range(start + 1, len(order) + 1):
                first_microbatch = order[start:end]
                if not self.fit(first_microbatch):
                    break
                cost_of_first = self.padded_cost(first_microbatch)
                for count_of_others, cost_of_others in least_costs_from(end).items():
                    count = 1 + count_of_others
                    cost = cost_of_first + cost_of_others
                    least_so_far = least_costs.get(count, math.inf)
                    least_costs[count] = min(least_so_far, cost)
            return least_costs

        return least_costs_from(0)


def row_cost(width: int, cost: CostModel | None = None) -> float:
    """Returns the cost of the text of one row, by the formula in words."""
    cost = cost or CostModel()
    return width + width**2 / cost.quadratic


def microbatch_cost(cost: CostModel, num_rows: int, width: int, image_tokens: int = 0) -> float:
    """Returns the cost of a microbatch, by the formula in words."""
    cost_of_text = num_rows * row_cost(width, cost)
    cost_of_vision = cost.vision_per_token * image_tokens
    return cost_of_text + cost_of_vision + cost.launch


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Yields all ways to divide rows into microbatches."""
    if not rows:
        yield []
        return
    first, *later_rows = rows
    for partition in partitions(later_rows):
        yield [[first], *partition]  # in a microbatch by itself
        for place, microbatch in enumerate(partition):
            before = partition[:place]
            after = partition[place + 1 :]
            yield [*before, [first, *microbatch], *after]


@st.composite
def samples_under_caps(draw: st.DrawFn, *, most: int = 14) -> Samples:
    """Draws samples with two capped sizes, each with a cap or without. About half of them have no image."""
    image_tokens = st.just(0) | st.integers(1, 9)
    sample = st.tuples(st.integers(1, 60), image_tokens, st.integers(0, 12))
    drawn = draw(st.lists(sample, min_size=1, max_size=most))
    max_tokens = draw(st.integers(1, 200))
    max_images = draw(st.none() | st.integers(1, 30))
    max_labels = draw(st.none() | st.integers(1, 40))
    lengths, images, labels = zip(*drawn, strict=True)
    return Samples(
        lengths=list(lengths),
        images=list(images),
        labels=list(labels),
        max_tokens=max_tokens,
        max_images=max_images,
        max_labels=max_labels,
    )
