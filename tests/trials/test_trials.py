# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs as users give them: each works, or one line names the mistake.

A new input is an entry in ``configs``, ``records``, ``texts``, ``media``, ``programs`` or ``python``.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.trials.configs import CONFIGS
from tests.trials.media import MEDIA
from tests.trials.outcomes import WORKS, Trial
from tests.trials.programs import ENVIRONMENTS, PROGRAMS
from tests.trials.python import CALLS
from tests.trials.records import RECORDS
from tests.trials.texts import TEXTS

TABLES: list[Mapping[str, Trial]] = [CONFIGS, RECORDS, TEXTS, MEDIA, PROGRAMS, ENVIRONMENTS, CALLS]
TRIALS = [pytest.param(trial, id=name) for table in TABLES for name, trial in table.items()]


@pytest.mark.parametrize('trial', TRIALS)
def test_input_works_or_is_refused(trial, tmp_path):
    line = trial.run(tmp_path)
    if trial.expected == WORKS:
        assert line == WORKS
    else:
        assert trial.expected in line
        assert '\n' not in line.strip()
