# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows padded on the left, where each rank pads to its own longest row."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from composer_tokacc.algorithm import rank_widths
from composer_tokacc.algorithm.rank_widths import RankWidth, check_widths
from composer_tokacc.data_spec.pieces import CutRules
from composer_tokacc.layout import BatchLayout, describe, describe_all
from tests.support.launch import launch_json
from tests.support.text import column_counter, gpt2, one_layer_model, ragged_batch
from tests.support.training import fit

EXACT = [
    'masked',
    'labelled, equally wide',
    'labelled, on the right',
    'positions, equally wide',
    'positions, on the right',
    'no position_ids, equally wide',
]


@pytest.mark.slow
def test_widths_of_ranks_matter_only_on_the_left():
    outcomes = launch_json('tests/ranks/left_padding.py', ranks=2)
    for case in EXACT:
        assert outcomes[case] < 1e-6, case
    assert 'got: 9 on rank 0' in outcomes['labelled']
    assert 'a label, which the pad before it would predict' in outcomes['labelled']
    for case in ('positions', 'positions, padded later', 'no position_ids'):
        assert 'count positions' in outcomes[case]


@pytest.mark.parametrize(
    ('rules', 'matters'),
    [
        pytest.param(CutRules(left='trim', left_width=14), False, id='trimmed'),
        pytest.param(CutRules(left='shift', left_width=14), True, id='positions written'),
        pytest.param(CutRules(left='keep', left_width=14), True, id='trimming failed'),
        pytest.param(CutRules(), False, id='nothing known'),
    ],
)
def test_width_matters_if_trimming_failed(rules, matters):
    batch = ragged_batch(side='left')
    facts = describe(BatchLayout.infer(batch), batch)
    width = RankWidth.of([facts], rules, 'causal')
    assert bool(width.reason) is matters


@pytest.mark.parametrize(
    ('rules', 'has_positions', 'matters'),
    [
        pytest.param(CutRules(left='trim', left_width=14), False, False, id='trimmed'),
        pytest.param(CutRules(), False, True, id='nothing known'),
        pytest.param(CutRules(), True, False, id='positions given'),
    ],
)
def test_labels_behind_padding_prove_nothing(rules, has_positions, matters):
    """Rows with a label behind their padding are never trimmed, so the check may not know how positions count."""
    batch = ragged_batch([(4, 4), (9, 9), (14, 14)], side='left')
    if has_positions:
        batch['position_ids'] = (batch['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)
    facts = describe(BatchLayout.infer(batch), batch)
    # Unshifted, so that the labels are no reason by themselves.
    width = RankWidth.of([facts], rules, 'unshifted')
    assert bool(width.reason) is matters


@pytest.mark.parametrize(
    ('make', 'has_positions', 'depends'),
    [
        (one_layer_model, False, False),
        (gpt2, False, True),
        (gpt2, True, False),
        (column_counter, False, True),
        (column_counter, True, True),
    ],
)
def test_padding_matters_if_it_cannot_be_trimmed(make, has_positions, depends):
    """GPT-2 counts positions from the first column, unless it gets them. Without the argument it cannot get them."""
    batch = ragged_batch(side='left')
    if has_positions:
        batch['position_ids'] = (batch['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)
    run = fit(make(), batch).trainer.state.algorithms[0]._run
    facts = describe_all(run.check.layout, batch)
    width = RankWidth.of(facts, run.split.rules, run.check.rule)
    assert width.is_left
    assert bool(width.reason) == depends


@pytest.mark.parametrize('was_checked', [True, False])
def test_check_of_this_step_counts(was_checked, monkeypatch):
    """The sums are made before the check, so they do not show that the check has found a reason."""
    before_check = [RankWidth(9, is_left=True, reason=''), RankWidth(14, is_left=True, reason='')]
    after_check = [RankWidth(width.width, is_left=True, reason='positions') for width in before_check]
    sums = [sum(numbers) for numbers in zip(*[width.numbers() for width in before_check], strict=True)]
    monkeypatch.setattr(rank_widths, 'get_world_size', lambda: 2)
    monkeypatch.setattr(rank_widths, 'all_gather_object', lambda _: after_check)
    refusal = pytest.raises(RuntimeError, match='9 on rank 0') if was_checked else nullcontext()
    with refusal:
        check_widths(sums, lambda: after_check[0], was_checked=was_checked, is_trimmed=True)


@pytest.mark.parametrize('is_trimmed', [True, False])
def test_unknown_padding_is_warned_of(is_trimmed, monkeypatch, caplog):
    """Without `token_data_spec` rows are not trimmed, so no check shows how the model counts positions."""
    rank_widths._warn_of_unknown_positions.cache_clear()
    monkeypatch.setattr(rank_widths, 'get_world_size', lambda: 2)
    numbers_of_ranks = [RankWidth(width, is_left=True, reason='').numbers() for width in (9, 14)]
    sums = [sum(numbers) for numbers in zip(*numbers_of_ranks, strict=True)]
    check_widths(sums, lambda: RankWidth(9, True, ''), was_checked=False, is_trimmed=is_trimmed)
    assert ('padded on the left' in caplog.text) != is_trimmed
