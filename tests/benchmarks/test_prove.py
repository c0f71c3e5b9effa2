# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The programs of ``examples/prove``: short, run by the packages that are here, and what the page says of them."""

from __future__ import annotations

import pytest

from benchmarks import prove
from benchmarks.record import filled

LICENCE = 3
"""Lines."""


@pytest.mark.parametrize('program', prove.programs())
def test_a_program_is_short_enough_to_copy(program):
    lines = (prove.PROGRAMS / f'{program}.py').read_text().splitlines()[LICENCE:]
    assert len([line for line in lines if line]) <= 25


def test_the_page_is_made_of_what_the_programs_printed():
    rows, page = prove.rows_there(), prove.PAGE.read_text()
    assert sorted(rows) == prove.programs()
    assert filled(page, {'prove': lambda: prove.table_of(rows)}) == page


@pytest.mark.slow
@pytest.mark.parametrize('program', prove.programs())
def test_a_program_prints_what_the_page_says(program):
    output = prove.printed(program)
    if output is None:
        pytest.skip('the trainer is not installed')
    trainer, _, weights, _, verdict = prove.row_of(output)
    expected = prove.rows_there()[program]
    assert [trainer, weights, verdict] == [expected[0], expected[2], expected[4]]
    assert (verdict == 'exact') == (weights == '1.00 to 1.00')
