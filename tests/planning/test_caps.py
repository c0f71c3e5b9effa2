# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""All caps of a microbatch at once, in every cutter, compared with a search through all contiguous cuts."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, cut_rows, pack_lengths, plan_microbatches

COST = CostModel(launch=5.0)


@dataclass
class Samples:
    """Samples with two capped sizes, each with a cap or without."""

    lengths: list[int]
    images: list[int]
    labels: list[int]
    max_tokens: int
    max_images: int | None
    max_labels: int | None

    @property
    def tables(self):
        return {'image_tokens': self.images, 'loss_tokens': self.labels}

    @property
    def caps(self):
        return {
            'max_tokens': self.max_tokens,
            'max_image_tokens': self.max_images,
            'max_loss_tokens': self.max_labels,
        }

    def fit(self, rows, *, is_packed=False):
        """Whether rows may share a microbatch: every cap holds, or a row is alone."""
        if len(rows) == 1:
            return True
        lengths = [self.lengths[row] for row in rows]
        size = sum(lengths) if is_packed else len(rows) * max(lengths)
        sums = [(size, self.max_tokens)]
        sums.append((sum(self.images[row] for row in rows), self.max_images))
        sums.append((sum(self.labels[row] for row in rows), self.max_labels))
        return all(cap is None or total <= cap for total, cap in sums)

    def check(self, microbatches, *, is_packed=False):
        """Checks that each sample is in one microbatch, and that no cap is broken."""
        assert Counter(row for rows in microbatches for row in rows) == Counter(range(len(self.lengths)))
        for rows in microbatches:
            assert self.fit(rows, is_packed=is_packed), rows

    def cost(self, rows):
        """Cost of a microbatch of these rows."""
        width = max(self.lengths[row] for row in rows)
        return len(rows) * float(COST.rows(np.array([width]))[0]) + COST.launch

    def least_cost(self, order):
        """Least padded cost of all contiguous cuts of rows in this order, fixed costs included."""

        @functools.cache
        def best(start):
            if start == len(order):
                return 0.0
            costs = []
            for end in range(start + 1, len(order) + 1):
                rows = order[start:end]
                if not self.fit(rows):
                    break
                costs.append(self.cost(rows) + best(end))
            return min(costs)

        return best(0)


@st.composite
def drawn(draw, most=14):
    row = st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(0, 12))
    rows = draw(st.lists(row, min_size=1, max_size=most))
    lengths, images, labels = map(list, zip(*rows, strict=True))
    return Samples(
        lengths,
        images,
        labels,
        max_tokens=draw(st.integers(1, 120)),
        max_images=draw(st.none() | st.integers(1, 20)),
        max_labels=draw(st.none() | st.integers(1, 25)),
    )


@pytest.mark.parametrize('regroup', [True, False])
@settings(max_examples=100, deadline=None)
@given(drawn())
def test_cut_under_caps_costs_least(regroup, samples):
    options = CutOptions(regroup=regroup, cost=COST, **samples.caps)
    microbatches = cut_rows(samples.lengths, options, **samples.tables)
    samples.check(microbatches)
    order = list(range(len(samples.lengths)))
    costs = [samples.cost(rows) for rows in microbatches]
    if regroup:
        order.sort(key=lambda row: -samples.lengths[row])
        assert costs == sorted(costs, reverse=True), 'costliest microbatch first'
    else:
        assert [row for rows in microbatches for row in rows] == order
    assert sum(costs) == pytest.approx(samples.least_cost(order))


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_packed_rows_keep_all_caps(samples):
    microbatches = cut_rows(samples.lengths, CutOptions(packing=True, **samples.caps), **samples.tables)
    samples.check(microbatches, is_packed=True)
    assert microbatches == pack_lengths(samples.lengths, **samples.caps, **samples.tables)


@pytest.mark.parametrize('objective', ['ddp', 'fsdp'])
@settings(max_examples=100, deadline=None)
@given(drawn(most=40), st.integers(1, 9))
def test_plans_keep_all_caps(objective, samples, num_ranks):
    plan = plan_microbatches(
        samples.lengths, num_ranks=num_ranks, objective=objective, **samples.caps, **samples.tables
    )
    real = [microbatch.indices for rank in plan.ranks for microbatch in rank if not microbatch.filled]
    samples.check(real)
    over = set()
    for table, cap in (
        (samples.lengths, samples.max_tokens),
        (samples.images, samples.max_images),
        (samples.labels, samples.max_labels),
    ):
        over |= {row for row, size in enumerate(table) if cap is not None and size > cap}
    assert set(plan.stats.oversize) == over
    assert plan.stats.bound <= plan.stats.cost * (1 + 1e-9)
    assert plan.stats.num_tokens == sum(samples.lengths)


@pytest.mark.parametrize('size', ['image_tokens', 'loss_tokens'])
def test_bad_caps_are_refused(size):
    cap = f'max_{size}'
    with pytest.raises(ValueError, match=f'`{size}` must be given with `{cap}`'):
        plan_microbatches([3, 4], num_ranks=1, max_tokens=8, **{cap: 4})
    with pytest.raises(ValueError, match=f'`{cap}` must be a positive integer, got: 0'):
        plan_microbatches([3, 4], num_ranks=1, max_tokens=8, **{cap: 0, size: [1, 1]})
    with pytest.raises(ValueError, match=f'`{size}` must be finite and at least 0, got: -1'):
        plan_microbatches([3, 4], num_ranks=1, max_tokens=8, **{cap: 4, size: [1, -1]})
