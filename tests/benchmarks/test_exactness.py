# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the adapters of trainers, and the page with their results."""

from __future__ import annotations

import json

import pytest

from benchmarks import exactness
from benchmarks.adapters import ADAPTERS, gradients_of
from benchmarks.record import filled
from composer_tokacc import verify_invariance
from tests.support.text import text_model, text_rows

ROWS = [(4, 2), (14, 11), (9, 9), (6, 1)]
"""Length and labelled tokens of each row."""


def test_page_shows_the_results():
    rows = json.loads(exactness.RESULTS_FILE.read_text())['rows']
    page = exactness.PAGE.read_text()
    assert filled(page, {'exactness': exactness.tables_of(rows)}) == page
    # The description of the machine names the versions of the packages.
    assert all('transformers' in row['measured_on']['machine'] for row in rows)


@pytest.mark.parametrize(
    ('name', 'is_exact'),
    [
        ('composer', False),
        ('composer_flag', False),
        ('ours', True),
        pytest.param('hf', True, marks=pytest.mark.slow),
    ],
)
def test_adapter_shows_its_trainer(name, is_exact, monkeypatch):
    for variable in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'):
        # Earlier tests in this process may have set these variables.
        monkeypatch.delenv(variable, raising=False)
    model = text_model()
    train_step = ADAPTERS[name](model)

    def step(microbatches):
        model.zero_grad(set_to_none=True)
        return train_step(microbatches)

    def one_forward(batch):
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        return gradients_of(model)

    report = verify_invariance(
        step,
        text_rows(ROWS),
        reference=one_forward,
        microbatch_sizes=[1, 4],
        padding_sides=['right'],
    )
    assert report.is_exact == is_exact, report
    uncut_cases = [case for case in report.cases if case.cut == 'in order' and case.microbatch_size == 4]
    assert len(uncut_cases) == 1
    assert uncut_cases[0].error == pytest.approx(0, abs=1e-6)
