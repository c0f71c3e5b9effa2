# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""docs/phases.md says what benchmarks/results/phases.json says, and that what the planner does."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from benchmarks.length_sets import LengthSet
from benchmarks.phases import LIMIT, MODELS, RESULTS, least_text, measure, tables
from composer_tokacc.planning import CostModel
from tests.support.launch import ROOT

DOCS = (ROOT / 'docs' / 'phases.md').read_text()
FOUND = json.loads((RESULTS / 'phases.json').read_text())


def test_tables_are_those_of_the_results():
    for table in tables(FOUND):
        assert table in DOCS
    assert FOUND['source'].startswith('real tables')
    assert {row['model'] for row in FOUND['fsdp']} == set(MODELS)


def test_what_is_said_of_the_limit_holds():
    least = {name: round(value, 2) for name, value in FOUND['least_text'].items()}
    assert least == {'8 x 16': 1.08, '64 x 32': 1.04}
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


def test_no_columns_of_text_beat_the_least():
    """Six rows, two ranks: every way to put them into one, two or three columns."""
    lengths = np.array([9, 8, 5, 4, 2, 2])
    cost = CostModel(quadratic=np.inf, launch=1.0)

    def time(labels, num_columns):
        total = 0.0
        for column in range(num_columns):
            texts = []
            for rank in range(2):
                chosen = lengths[np.array(labels) == 2 * column + rank]
                if not len(chosen):
                    return np.inf
                texts.append(len(chosen) * chosen.max() + cost.launch)
            total += max(texts)
        return total

    truth = min(time(labels, k) for k in (1, 2, 3) for labels in itertools.product(range(2 * k), repeat=6))
    shuffled = LengthSet('text', lengths, np.zeros(6, dtype=np.int64))
    found = least_text(shuffled, 2, 3, 1, cost) * (lengths.sum() / 2 + cost.launch)
    one_or_two = min(time(labels, k) for k in (1, 2) for labels in itertools.product(range(2 * k), repeat=6))
    assert found <= truth
    assert found == pytest.approx(min(one_or_two, lengths.sum() / 2 + 3 * cost.launch), rel=0.005)
