# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""docs/phases.md says what benchmarks/results/phases.json says, and that what the planner does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.length_sets import LengthSet
from benchmarks.phases import LIMIT, MODELS, measure, tables
from benchmarks.record import RESULTS
from tests.support.launch import ROOT

DOCS = (ROOT / 'docs' / 'phases.md').read_text()
FOUND = json.loads((RESULTS / 'phases.json').read_text())


def test_tables_are_those_of_the_results():
    for one in tables(FOUND):
        assert one in DOCS
    assert FOUND['source'].startswith('real tables')
    assert {row['model'] for row in FOUND['fsdp']} == set(MODELS)


def test_what_is_said_of_the_limit_holds():
    for row in FOUND['rows']:
        is_within = round(max(row['patches']['tower'], row['patches']['text']), 2) <= LIMIT
        enough = row['rows'] >= {8: 64, 64: 128}[row['ranks']]
        assert is_within == (enough and row['model'].endswith('0.5B'))


def test_knowing_the_tower_earns_what_was_asked():
    gains = {
        objective: [row['none']['step'] / row['patches']['step'] for row in FOUND[objective]]
        for objective in ('fsdp', 'ddp')
    }
    assert max(gains['fsdp']) > 1.1
    assert max(gains['ddp']) > 1.1
    assert min(gains['fsdp'] + gains['ddp']) > 0.995


def small_set() -> LengthSet:
    rng = np.random.default_rng(0)
    images = 256 * rng.choice([0, 1, 3, 5], 256)
    return LengthSet('small', images + rng.integers(30, 600, 256), images)


@pytest.mark.slow
@pytest.mark.parametrize('model', MODELS)
def test_knowing_the_tower_makes_no_step_longer_than_a_fiftieth_where_samples_are_few(model):
    for objective in ('fsdp', 'ddp'):
        figures = measure(small_set(), MODELS[model], 4, 16, 2, objective)
        assert 1.0 <= figures['patches']['step'] <= 1.02 * figures['none']['step']
