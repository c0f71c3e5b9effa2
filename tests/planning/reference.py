# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples under caps, slow and obvious versions of the planner's functions, and checks of its results."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, MicrobatchPlan, Rows, plan_microbatches
from composer_tokacc.planning.rows import OrderedRows


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
        self.images = self.images or [0] * len(self.lengths)
        self.labels = self.labels or [0] * len(self.lengths)

    @property
    def tables(self) -> dict[str, list[int]]:
        return {'image_tokens': self.images, 'loss_tokens': self.labels}

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
        return plan_microbatches(self.lengths, num_ranks=num_ranks, **self.caps, **self.tables, **options)

    def keep_caps(self, rows: Sequence[int], *, is_packed: bool = False) -> bool:
        """Returns whether a microbatch of these rows breaks no cap."""
        lengths = [self.lengths[row] for row in rows]
        if is_packed:
            num_tokens = sum(lengths)
        else:
            num_tokens = len(rows) * max(lengths)
        num_images = sum(self.images[row] for row in rows)
        num_labels = sum(self.labels[row] for row in rows)
        has_too_many_images = self.max_images is not None and num_images > self.max_images
        has_too_many_labels = self.max_labels is not None and num_labels > self.max_labels
        return num_tokens <= self.max_tokens and not has_too_many_images and not has_too_many_labels

    def fit(self, rows: Sequence[int], *, is_packed: bool = False) -> bool:
        """Returns whether rows may share a microbatch. A row that breaks a cap must be in one by itself."""
        return len(rows) == 1 or self.keep_caps(rows, is_packed=is_packed)

    def check_cut(self, microbatches: Sequence[Sequence[int]], *, is_packed: bool = False) -> None:
        """Checks that each sample is in one microbatch, and that no cap is broken."""
        counts: Counter[int] = Counter()
        for rows in microbatches:
            counts.update(rows)
            assert self.fit(rows, is_packed=is_packed), rows
        assert counts == Counter(range(len(self.lengths)))

    def check_plan(self, plan: MicrobatchPlan, num_ranks: int) -> None:
        """Checks a plan of either objective."""
        assert len(plan.ranks) == num_ranks
        assert all(plan.ranks), 'a rank without a microbatch'
        oversize = {row for row in range(len(self.lengths)) if not self.keep_caps([row])}
        assert set(plan.stats.oversize) == oversize

        microbatches_of_samples = []
        num_copies = 0  # of samples, for ranks that would have no microbatch
        for microbatch in itertools.chain(*plan.ranks):
            rows = microbatch.indices
            if microbatch.filled:
                assert len(rows) == 1
                num_copies += 1
            else:
                microbatches_of_samples.append(rows)
            longest_row = max(self.lengths[row] for row in rows)
            assert microbatch.width >= longest_row
            if not oversize.intersection(rows):
                assert microbatch.num_tokens <= self.max_tokens
        self.check_cut(microbatches_of_samples)

        assert plan.stats.filled == num_copies
        assert plan.stats.num_tokens == sum(self.lengths)
        assert 0.0 < plan.stats.share_of_bound <= 1.0 + 1e-9

    def check_slots(self, plan: MicrobatchPlan) -> None:
        """Checks a plan for 'fsdp': equal counts on all ranks, and step slots only with images or only without."""
        for slot in zip(*plan.ranks, strict=True):
            has_images = {self.has_images(microbatch.indices) for microbatch in slot}
            assert len(has_images) == 1, slot

    def has_images(self, rows: Sequence[int]) -> bool:
        """Returns whether any of the rows has an image."""
        return any(self.images[row] > 0 for row in rows)

    def padded_cost(self, rows: Sequence[int]) -> float:
        """Returns the cost of a microbatch without vision and launch."""
        width = max(self.lengths[row] for row in rows)
        return len(rows) * row_cost(width)

    def least_padded_costs(self, order: Sequence[int]) -> dict[int, float]:
        """Returns the least padded cost of contiguous cuts of `order`, for each possible number of microbatches."""

        @functools.cache
        def least_costs_from(start: int) -> dict[int, float]:
            """Returns the least costs of the cuts of the rows from `start` on."""
            if start == len(order):
                return {0: 0.0}
            costs_by_count: dict[int, list[float]] = defaultdict(list)
            for end in range(start + 1, len(order) + 1):
                first_microbatch = order[start:end]
                if not self.fit(first_microbatch):
                    break
                for count_of_others, cost_of_others in least_costs_from(end).items():
                    total = self.padded_cost(first_microbatch) + cost_of_others
                    costs_by_count[1 + count_of_others].append(total)
            return {count: min(costs) for count, costs in costs_by_count.items()}

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
    lengths, images, labels = zip(*drawn, strict=True)
    return Samples(
        lengths=list(lengths),
        images=list(images),
        labels=list(labels),
        max_tokens=draw(st.integers(1, 200)),
        max_images=draw(st.none() | st.integers(1, 30)),
        max_labels=draw(st.none() | st.integers(1, 40)),
    )
