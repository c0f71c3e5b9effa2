# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How microbatches are assigned to ranks: by load for 'ddp', in step slots for 'fsdp'."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.planning.assignment import assign_longest_first, assign_slots, best_slot_order, rebalance

COSTS_OF_MICROBATCHES = st.lists(st.floats(0.5, 50.0), min_size=1, max_size=30)


@settings(max_examples=80, deadline=None)
@given(COSTS_OF_MICROBATCHES, st.integers(1, 6))
def test_longest_goes_to_least_loaded_rank(costs, num_ranks):
    loads = [0.0] * num_ranks
    expected_ranks = [0] * len(costs)
    longest_first = sorted(range(len(costs)), key=lambda place: -costs[place])
    for place in longest_first:
        least_loaded = loads.index(min(loads))
        expected_ranks[place] = least_loaded
        loads[least_loaded] += costs[place]

    ranks, slowest = assign_longest_first(np.array(costs), num_ranks)

    assert ranks.tolist() == expected_ranks
    assert slowest == pytest.approx(max(loads))


@settings(max_examples=80, deadline=None)
@given(COSTS_OF_MICROBATCHES, st.integers(1, 6))
def test_rebalancing_slows_no_rank(costs, num_ranks):
    one_for_each_rank = [1.0] * num_ranks
    costs = np.array(costs + one_for_each_rank)
    ranks, slowest_before = assign_longest_first(costs, num_ranks)

    rebalanced_ranks, slowest = rebalance(costs, ranks, num_ranks)

    loads = np.bincount(rebalanced_ranks, weights=costs, minlength=num_ranks)
    assert slowest <= slowest_before * (1 + 1e-9)
    assert slowest == pytest.approx(loads.max())
    assert loads.min() > 0, 'a rank without a microbatch'


@pytest.mark.parametrize(
    ('costs', 'ranks', 'least'),
    [
        pytest.param(
            [2.0, 2.0, 2.0, 1.0],
            [0, 0, 0, 1],
            4.0,
            id='given away',
        ),
        pytest.param(
            [3.0, 3.0, 2.0, 2.0, 2.0],
            [0, 1, 0, 1, 0],
            6.0,
            id='swapped',
        ),
    ],
)
def test_rebalancing_by_hand(costs, ranks, least):
    _, slowest = rebalance(np.array(costs), np.array(ranks), 2)
    assert slowest == least


@pytest.mark.parametrize('seed', range(8))
def test_no_other_slots_are_faster(seed):
    """Six microbatches on two ranks make three slots. Every order of the microbatches is tried."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 9, 6).astype(float)
    times_of_orders = []
    for first, second, third, fourth, fifth, sixth in itertools.permutations(costs):
        time_of_order = max(first, second) + max(third, fourth) + max(fifth, sixth)
        times_of_orders.append(time_of_order)
    best_time = min(times_of_orders)
    no_vision = np.zeros(6)

    order_by, time = best_slot_order(costs, no_vision, 2)
    ranks = assign_slots(costs, 2)

    assert order_by.tolist() == costs.tolist()
    assert time == best_time
    first_rank = sorted(costs[ranks == 0])
    second_rank = sorted(costs[ranks == 1])
    times_of_slots = np.maximum(first_rank, second_rank)
    assert times_of_slots.sum() == best_time


TEXT = np.array([8.0, 1.0, 2.0, 7.0])


@pytest.mark.parametrize(
    ('vision', 'expected_order', 'expected_time'),
    [
        # The slots have the texts (8, 7) and (2, 1) in every order. Their slowest encoders take 3 and 7.
        pytest.param([1.0, 3.0, 7.0, 3.0], 'text', 8.0 + 3.0 + 2.0 + 7.0, id='by text'),
        # (8, 2) and (7, 1). In the order of the text, an encoder would take 9 in both slots.
        pytest.param([9.0, 3.0, 9.0, 3.0], 'both', 8.0 + 9.0 + 7.0 + 3.0, id='by both'),
        # (8, 1) and (7, 2).
        pytest.param([5.5, 5.5, 0.0, 0.0], 'vision', 8.0 + 5.5 + 7.0 + 0.0, id='by encoder'),
    ],
)
def test_slots_wait_for_the_slowest(vision, expected_order, expected_time):
    """The slots are made in the order of the costs of the text, of the encoder, or of both."""
    vision = np.array(vision)
    costs_of_order = {
        'text': TEXT,
        'vision': vision,
        'both': TEXT + vision,
    }
    expected_costs = costs_of_order[expected_order]

    order_by, time = best_slot_order(TEXT, vision, 2)

    assert time == expected_time
    assert order_by.tolist() == expected_costs.tolist()
