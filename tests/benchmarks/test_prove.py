# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The programs of ``examples/prove`` are short."""

from __future__ import annotations

import pytest

from benchmarks import prove

LICENCE = 3
"""Lines."""


@pytest.mark.parametrize('program', prove.programs())
def test_a_program_is_short_enough_to_copy(program):
    lines = (prove.PROGRAMS / f'{program}.py').read_text().splitlines()[LICENCE:]
    assert len([line for line in lines if line]) <= 25
