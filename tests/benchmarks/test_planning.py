# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of the planner: its processes and its medians."""

from __future__ import annotations

import pytest

from benchmarks import planning

SMALL = '64 samples, 2 ranks'
LARGE = '512 samples, 8 ranks'


@pytest.mark.slow
def test_processes_have_their_settings():
    seconds = planning.measure(num_rounds=1, num_plans=1)
    assert seconds['compiling']['first_plan'] > seconds['from_cache']['first_plan']
    for case in (SMALL, LARGE):
        assert seconds['without_numba'][case] > seconds['from_cache'][case]


def test_first_plan_is_left_out(monkeypatch):
    seconds_of_small = [9.0, 1.0, 2.0, 6.0]
    seconds_of_large = [8.0, 3.0, 4.0, 7.0]
    seconds = iter(seconds_of_small + seconds_of_large)
    monkeypatch.setattr(planning, 'time_plan', lambda lengths, num_ranks: next(seconds))
    assert planning.time_cases(num_plans=3) == {'first_plan': 9.0, SMALL: 2.0, LARGE: 4.0}


def test_medians_over_the_rounds(monkeypatch):
    seconds = iter(range(9))
    monkeypatch.setattr(planning, 'in_new_process', lambda *args, **kwargs: {SMALL: next(seconds)})
    medians = planning.measure(num_rounds=3)
    # The processes take turns.
    assert medians == {'compiling': {SMALL: 3}, 'from_cache': {SMALL: 4}, 'without_numba': {SMALL: 5}}
