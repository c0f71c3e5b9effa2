# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs as users give them: each works, or is refused in one line that names what is wrong.

A new input is a line in ``configs``, ``records``, ``programs`` or ``python``. Who fixes one of :data:`OPEN` takes it
out of there, or its test fails.
"""

from __future__ import annotations

import pytest

from tests.trials.configs import CONFIG_TRIALS
from tests.trials.media import MEDIA_TRIALS
from tests.trials.outcomes import WORKS, Trial
from tests.trials.programs import PROGRAM_TRIALS
from tests.trials.python import PYTHON_TRIALS
from tests.trials.records import RECORD_TRIALS
from tests.trials.texts import TEXT_TRIALS

TRIALS = [*CONFIG_TRIALS, *RECORD_TRIALS, *TEXT_TRIALS, *MEDIA_TRIALS, *PROGRAM_TRIALS, *PYTHON_TRIALS]
NOT_RUN: dict[str, str] = {}
"""Open, too, and never tried until they are fixed."""
OPEN: set[str] = set()
"""What is still wrong: accepted in silence, a traceback, or a line that names something else."""
SLOW = ('size of', 'size into', 'verify with')
"""Those that go through to the end as long as they are open."""


def _param(trial: Trial) -> object:
    marks = []
    if trial.name in NOT_RUN:
        marks.append(pytest.mark.xfail(run=False, reason=NOT_RUN[trial.name]))
    elif trial.name in OPEN:
        marks.append(pytest.mark.xfail(strict=True, reason='open'))
        marks += [pytest.mark.slow] * trial.name.startswith(SLOW)
    return pytest.param(trial, marks=marks, id=trial.name)


@pytest.mark.parametrize('trial', map(_param, TRIALS))
def test_an_input_works_or_is_refused_in_one_line(trial, tmp_path):
    line = trial.run(trial.given, tmp_path)
    if trial.expected == WORKS:
        assert line == WORKS
    else:
        assert trial.expected in line
        assert '\n' not in line.strip()


def test_names_are_no_name_twice_and_what_is_open_is_there():
    names = [trial.name for trial in TRIALS]
    assert len(names) == len(set(names))
    assert OPEN | NOT_RUN.keys() <= set(names)
