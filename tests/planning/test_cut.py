# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning import CostModel, cut, cut_in_order
from tests.planning.reference import check_cut, least_padded

SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=14)
COST = CostModel(launch=5.0)


def _price(width: int) -> float:
    return float(COST.rows(np.array([width]))[0])


def _padded(microbatches, lengths) -> float:
    return sum(len(rows) * _price(max(lengths[row] for row in rows)) for rows in microbatches)


@pytest.mark.parametrize('function', [cut, cut_in_order])
def test_cap_is_hard(function):
    """8 samples of 7 under a cap of 8: no microbatch of 14 (verl issue 3035)."""
    assert sorted(function([7] * 8, 8)) == [[row] for row in range(8)]


@pytest.mark.parametrize('function', [cut, cut_in_order])
@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.integers(1, 120), st.integers(1, 20))
def test_caps_hold_and_every_row_is_there_once(function, samples, max_tokens, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    microbatches = function(lengths, max_tokens, image_tokens=images, max_image_tokens=max_images, cost=COST)
    check_cut(microbatches, lengths, max_tokens, images, max_images)
    if function is cut_in_order:
        assert [row for rows in microbatches for row in rows] == list(range(len(lengths)))
    else:
        areas = [len(rows) * _price(max(lengths[row] for row in rows)) for rows in microbatches]
        assert areas == sorted(areas, reverse=True), 'largest microbatch first'


@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.integers(1, 120), st.integers(1, 20))
def test_in_order_costs_what_exhaustive_search_finds(samples, max_tokens, max_images):
    lengths, images = map(list, zip(*samples, strict=True))
    truth = least_padded(lengths, max_tokens, _price, images=images, max_images=max_images)
    caps = {'image_tokens': images, 'max_image_tokens': max_images}
    free = cut_in_order(lengths, max_tokens, **caps, cost=COST)
    found = _padded(free, lengths) + 5.0 * len(free)
    assert found == pytest.approx(min(cost + 5.0 * count for count, cost in truth.items()))
    for count, cost in truth.items():
        exact = cut_in_order(lengths, max_tokens, **caps, num_microbatches=count, cost=COST)
        assert len(exact) == count
        assert _padded(exact, lengths) == pytest.approx(cost)
    if min(truth) > 1:
        with pytest.raises(ValueError, match='num_microbatches'):
            cut_in_order(lengths, max_tokens, **caps, num_microbatches=min(truth) - 1, cost=COST)


@pytest.mark.parametrize('count', [3, 5, 9, 12])
def test_exact_number_of_microbatches(count):
    lengths = [40, 10, 30, 12, 20, 25, 11, 13, 39]
    microbatches = cut(lengths, 90, num_microbatches=count)
    assert len(microbatches) == min(count, len(lengths))
    check_cut(microbatches, lengths, 90)


def test_width_multiple_counts_against_the_cap():
    assert sorted(cut([9, 9], 20)) == [[0, 1]]
    assert sorted(cut([9, 9], 20, width_multiple=8)) == [[0], [1]]


def test_rounding_stops_at_the_collated_width():
    assert sorted(cut([9, 9], 20, width_multiple=8, max_width=10)) == [[0, 1]]


def test_rounding_alone_does_not_make_a_row_oversize():
    assert cut([9], 10, width_multiple=8) == [[0]]


@pytest.mark.parametrize('function', [cut, cut_in_order])
def test_row_over_a_cap_goes_alone(function):
    assert [1] in function([3, 50, 3], 20)
    assert [1] in function([3, 3, 3], 20, image_tokens=[1, 9, 1], max_image_tokens=4)


@pytest.mark.parametrize('function', [cut, cut_in_order])
@pytest.mark.parametrize(
    ('lengths', 'max_tokens', 'options', 'message'),
    [
        ([], 8, {}, '`lengths` must hold at least one'),
        ([3, 0], 8, {}, 'must be positive, got: 0 at sample 1'),
        ([3, -2], 8, {}, 'must be positive, got: -2 at sample 1'),
        ([3.5], 8, {}, 'must be integers'),
        ([3], 0, {}, '`max_tokens` must be at least 1, got: 0'),
        ([3], 8, {'width_multiple': 0}, '`width_multiple` must be at least 1'),
        ([3], 8, {'max_width': 2}, '`max_width` must be at least the longest'),
        ([3, 4], 8, {'image_tokens': [1]}, 'one entry per sample, got: 1 for 2'),
        ([3], 8, {'image_tokens': [-1]}, 'must not be negative'),
        ([3], 8, {'max_image_tokens': 4}, '`image_tokens` must be given'),
        ([3], 8, {'image_tokens': [1], 'max_image_tokens': 0}, '`max_image_tokens` must be at least 1'),
        ([8, 8], 8, {'num_microbatches': 1}, 'got: 1 < 2'),
        ([8], 8, {'num_microbatches': 0}, 'got: 0 < 1'),
    ],
)
def test_bad_input_is_one_clear_line(function, lengths, max_tokens, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        function(lengths, max_tokens, **options)
    assert '\n' not in str(caught.value)
