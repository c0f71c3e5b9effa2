# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of the planner: its processes, its medians, and the pages with its results."""

from __future__ import annotations

import pytest

from benchmarks import planning
from benchmarks.record import ROOT, read

TRAINER_PAGE = ROOT / 'docs' / 'trainer.md'
DOCSTRING_FILE = ROOT / 'composer_tokacc' / 'planning' / 'compiled.py'
SMALL = '64 samples, 2 ranks'
LARGE = '512 samples, 8 ranks'


def text_of(path):
    """Returns a file without its line breaks."""
    return ' '.join(path.read_text().split())


def test_pages_show_the_results():
    results = read(planning.RESULTS_FILE)
    with_numba = results['from_cache']
    without_numba = results['without_numba']
    small = f'{1000 * without_numba[SMALL]:.0f} ms'
    large = f'{without_numba[LARGE]:.1f} s'
    assert f'{small} a step for 64 samples on 2 ranks, {large} for 512 on 8' in text_of(TRAINER_PAGE)
    small_with_numba = f'{1000 * with_numba[SMALL]:.1f}'
    large_with_numba = f'{1000 * with_numba[LARGE]:.0f} ms'
    docstring = text_of(DOCSTRING_FILE)
    assert f'{small} for 64 samples on 2 ranks and {large} for 512 on 8' in docstring
    assert f'instead of {small_with_numba} and {large_with_numba}' in docstring


@pytest.mark.slow
def test_processes_have_their_settings():
    seconds = planning.measure(num_rounds=1, num_plans=1)
    assert seconds['compiling']['first_plan'] > seconds['from_cache']['first_plan']
    for case in (SMALL, LARGE):
        assert seconds['without_numba'][case] > seconds['from_cache'][case]


def test_first_plan_is_left_out(monkeypatch):
    seconds = iter([9.0, 1.0, 2.0, 6.0, 8.0, 3.0, 4.0, 7.0])
    monkeypatch.setattr(planning, 'time_plan', lambda lengths, num_ranks: next(seconds))
    assert planning.time_cases(num_plans=3) == {'first_plan': 9.0, SMALL: 2.0, LARGE: 4.0}


def test_medians_over_the_rounds(monkeypatch):
    seconds = iter(range(9))
    monkeypatch.setattr(planning, 'in_new_process', lambda *args, **kwargs: {SMALL: next(seconds)})
    medians = planning.measure(num_rounds=3)
    # The processes take turns.
    assert medians == {'compiling': {SMALL: 3}, 'from_cache': {SMALL: 4}, 'without_numba': {SMALL: 5}}
