# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows padded on the left, where each of two ranks pads to its own longest row."""

from __future__ import annotations

import pytest

from tests.support.launch import launch_json

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
