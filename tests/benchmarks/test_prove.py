# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the programs of ``examples/prove``: they are short, they run, and they print the rows of the page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import prove
from benchmarks.record import ROOT, filled, read
from tests.support.loaded import run_loaded

LINES_OF_LICENSE = 3


@pytest.mark.parametrize('program', prove.programs())
def test_program_is_short(program):
    text = (prove.PROGRAMS / f'{program}.py').read_text()
    lines = text.splitlines()[LINES_OF_LICENSE:]
    lines_of_code = [line for line in lines if line]
    assert len(lines_of_code) <= 30


def test_page_shows_output_of_programs():
    rows = read(prove.RESULTS_FILE)['programs']
    page = prove.PAGE.read_text()
    assert sorted(rows) == prove.programs()
    assert filled(page, {'prove': prove.table_of(rows)}) == page


@pytest.mark.slow
@pytest.mark.parametrize('program', prove.programs())
def test_program_prints_its_row(program, monkeypatch):
    def run(command, *, env, **_):
        return run_loaded(command[1:], folder=ROOT, environment=env)

    monkeypatch.setattr(prove, 'subprocess', SimpleNamespace(run=run))
    output = prove.run_program(program)
    if output is None:
        pytest.skip('the trainer is not installed')
    trainer, _, weights, _, verdict = prove.row_of(output)
    saved_trainer, _, saved_weights, _, saved_verdict = read(prove.RESULTS_FILE)['programs'][program]
    assert trainer == saved_trainer
    assert weights == saved_weights
    assert verdict == saved_verdict
    assert (verdict == 'exact') == (weights == '1.00 to 1.00')
