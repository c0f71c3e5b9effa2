# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs as users give them: each works, or is refused in one line that names what is wrong.

A new input is a line in ``configs``, ``records``, ``texts``, ``media``, ``programs`` or ``python``.
"""

from __future__ import annotations

import pytest

from tests.trials.configs import CONFIGS, check_overrides
from tests.trials.media import MEDIA
from tests.trials.outcomes import WORKS
from tests.trials.programs import ENVIRONMENTS, PROGRAMS, call_in_environment, call_program
from tests.trials.python import CALLS, call
from tests.trials.records import RECORDS, read_records
from tests.trials.texts import TEXTS

TABLES = [
    (check_overrides, CONFIGS),
    (read_records, RECORDS),
    (read_records, TEXTS),
    (read_records, MEDIA),
    (call_program, PROGRAMS),
    (call_in_environment, ENVIRONMENTS),
    (call, CALLS),
]
TRIALS = [(name, run, *entry) for run, table in TABLES for name, entry in table.items()]


@pytest.mark.parametrize('trial', [pytest.param(trial, id=trial[0]) for trial in TRIALS])
def test_input_works_or_is_refused(trial, tmp_path):
    _, run, *given, expected = trial
    line = run(tmp_path, *given)
    if expected == WORKS:
        assert line == WORKS
    else:
        assert expected in line
        assert '\n' not in line.strip()


def test_no_name_stands_twice():
    names = [name for name, *_ in TRIALS]
    assert len(names) == len(set(names))
