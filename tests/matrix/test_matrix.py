# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Families x padding side x packed or padded x regrouped or in order: exact to 1e-6, or refused before the first step.

The quick slice takes one batch a cell; ``python -m tests.matrix.table`` prints all of it.
"""

from __future__ import annotations

import pytest
import transformers

from tests.matrix.harness import Cell, Outcome, cells, run_cell, seeds_of
from tests.matrix.subjects import SUBJECTS

QUICK = [
    *(name for name, subject in SUBJECTS.items() if subject.group == 'text' and name != 'qwen3_moe'),
    *('llava', 'qwen2_vl', 'idefics3', 'mllama_mixed'),
]


def check(cell: Cell, outcomes: list[Outcome]) -> None:
    wrong = [str(outcome) for outcome in outcomes if outcome.kind not in ('exact', 'refused')]
    assert not wrong, f'{cell}: {wrong}'
    if must_train(cell):
        refused = [str(outcome) for outcome in outcomes if outcome.kind == 'refused']
        assert not refused, f'{cell}: {refused}'


def must_train(cell: Cell) -> bool:
    """Cells of healthy runs, which a check that refuses too much would spoil."""
    if not cell.packing:
        return True
    return SUBJECTS[cell.family].packs and cell.side == 'right' and not transformers.__version__.startswith('4.')


@pytest.mark.parametrize('cell', cells(QUICK), ids=str)
def test_cell_is_exact_or_refused_on_one_batch(cell):
    check(cell, run_cell(cell, seeds_of(cell)[:1]))


@pytest.mark.slow
@pytest.mark.parametrize('cell', cells(SUBJECTS), ids=str)
def test_cell_is_exact_or_refused_on_several_batches(cell):
    """Two of each cell, others in order than regrouped: with both, every kind of labels and of first weights."""
    seeds = [seed for seed in seeds_of(cell) if (seed % 4 < 2) is cell.regroup]
    check(cell, run_cell(cell, seeds[:2]))
