# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""All caps of a microbatch at once, compared with a search through all contiguous cuts. Plans: see test_plan.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, CutOptions, cut_rows, pack_lengths, plan_microbatches
from tests.planning.reference import samples_under_caps


@pytest.mark.parametrize('regroup', [True, False])
@settings(max_examples=100, deadline=None)
@given(samples_under_caps(), st.floats(0.0, 50.0))
def test_cut_under_caps_costs_least(regroup, samples, launch):
    cost = CostModel(launch=launch)
    options = CutOptions(regroup=regroup, cost=cost, **samples.caps)
    order = list(range(len(samples.lengths)))
    if regroup:
        order.sort(key=lambda row: -samples.lengths[row])
    least_costs = []
    for count, padded_cost in samples.least_padded_costs(order).items():
        least_costs.append(padded_cost + count * launch)

    microbatches = cut_rows(samples.lengths, options, **samples.tables)

    samples.check_cut(microbatches)
    costs = [samples.padded_cost(rows) + launch for rows in microbatches]
    assert sum(costs) == pytest.approx(min(least_costs))
    if regroup:
        assert costs == sorted(costs, reverse=True), 'costliest microbatch first'
    else:
        rows_in_order = list(itertools.chain(*microbatches))
        assert rows_in_order == order


@settings(max_examples=100, deadline=None)
@given(samples_under_caps())
def test_packed_rows_keep_all_caps(samples):
    options = CutOptions(packing=True, **samples.caps)

    microbatches = cut_rows(samples.lengths, options, **samples.tables)
    packed = pack_lengths(samples.lengths, **samples.caps, **samples.tables)

    samples.check_cut(microbatches, is_packed=True)
    assert microbatches == packed


@pytest.mark.parametrize('size', ['image_tokens', 'loss_tokens'])
@pytest.mark.parametrize(
    ('cap', 'sizes', 'message'),
    [
        pytest.param(4, None, '`{size}` must be given with `max_{size}`', id='cap without sizes'),
        pytest.param(0, [1, 1], '`max_{size}` must be a positive integer, got: 0', id='cap of 0'),
        pytest.param(4, [1, -1], '`{size}` must be finite and at least 0, got: -1', id='negative size'),
    ],
)
def test_bad_caps_are_refused(size, cap, sizes, message):
    options = {size: sizes, f'max_{size}': cap}
    message_of_size = message.format(size=size)

    with pytest.raises(ValueError, match=message_of_size):
        plan_microbatches([3, 4], num_ranks=1, max_tokens=8, **options)
