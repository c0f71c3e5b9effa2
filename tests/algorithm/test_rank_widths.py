# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows padded on the left, where each of two ranks pads to its own longest row."""

from __future__ import annotations

import pytest

from composer_tokacc.algorithm.rank_widths import RankWidth
from composer_tokacc.data_spec.pieces import CutRules
from composer_tokacc.layout import BatchLayout, describe
from tests.support.launch import launch_json
from tests.support.text import ragged_batch

EXACT = [
    'masked',
    'labelled, equally wide',
    'labelled, on the right',
    'positions, equally wide',
    'positions, on the right',
]


@pytest.mark.slow
def test_widths_of_ranks_matter_only_on_the_left():
    outcomes = launch_json('tests/ranks/left_padding.py', ranks=2)
    for case in EXACT:
        assert outcomes[case] < 1e-6, case
    assert 'got: 9 on rank 0' in outcomes['labelled']
    assert 'a label, which the pad before it would predict' in outcomes['labelled']
    assert 'count positions' in outcomes['positions']


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
