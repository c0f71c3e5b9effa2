# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of the planner: its processes, its table, and the pages with its results."""

from __future__ import annotations

import pytest

from benchmarks import planning
from benchmarks.record import ROOT, read

TRAINER_PAGE = ROOT / 'docs' / 'trainer.md'
DOCSTRING_FILE = ROOT / 'composer_tokacc' / 'planning' / 'compiled.py'


def text_of(path):
    """Returns a file without its line breaks."""
    return ' '.join(path.read_text().split())


@pytest.mark.skipif(not planning.RESULTS_FILE.exists(), reason='python -m benchmarks.planning was not run yet')
def test_pages_show_the_results():
    small, large = read(planning.RESULTS_FILE)['cases']
    small_text = f'{1000 * small["without_numba_seconds"]:.0f} ms'
    large_text = f'{large["without_numba_seconds"]:.1f} s'
    assert f'{small_text} a step for 64 samples on 2 ranks, {large_text} for 512 on 8' in text_of(TRAINER_PAGE)
    docstring = text_of(DOCSTRING_FILE)
    assert f'{small_text} for 64 samples on 2 ranks and {large_text} for 512 on 8' in docstring
    small_with_numba = 1000 * small['with_numba_seconds']
    large_with_numba = 1000 * large['with_numba_seconds']
    assert f'instead of {small_with_numba:.1f} and {large_with_numba:.0f} ms' in docstring


@pytest.mark.slow
def test_processes_have_their_settings():
    """The first process compiles, the second one loads machine code, and the third one has no machine code."""
    results = planning.measure(rounds=1, num_batches=1)
    assert results['compile_seconds'] > results['load_seconds']
    assert [(case['samples'], case['ranks']) for case in results['cases']] == list(planning.CASES)
    for case in results['cases']:
        assert case['times_as_long'] > 1


def test_first_plan_is_left_out(monkeypatch):
    seconds = iter([9.0, 1.0, 2.0, 6.0] * len(planning.CASES))
    monkeypatch.setattr(planning, 'time_plan', lambda lengths, num_ranks: next(seconds))
    for row in planning.time_cases(num_batches=3):
        assert row == {'first_seconds': 9.0, 'seconds': 2.0}


def test_table_has_a_row_for_each_case():
    case = {'samples': 64, 'ranks': 2, 'with_numba_seconds': 0.0005, 'without_numba_seconds': 0.01, 'times_as_long': 20}
    lines = planning.table_of({'cases': [case]}).splitlines()
    assert lines[-1] == '| 64 | 2 | 0.5 ms | 10.0 ms | 20 |'
