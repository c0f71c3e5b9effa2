# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The cost model, with numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from composer_tokacc.planning import CostModel


def test_formula_by_hand():
    """A row costs its length plus the square of its length divided by ``quadratic``."""
    lengths = np.array([10, 100, 1000])
    cost = CostModel(quadratic=100.0)
    cost_without_attention = CostModel(quadratic=math.inf)

    costs = cost.rows(lengths)
    costs_without_attention = cost_without_attention.rows(lengths)

    np.testing.assert_allclose(costs, [10 + 1, 100 + 100, 1000 + 10000])
    assert costs_without_attention.tolist() == [10.0, 100.0, 1000.0]


def test_packed_row_costs_its_documents():
    """Attention is only over the tokens of the same document."""
    cost = CostModel(quadratic=100.0, document=3.0, launch=50.0)
    first_document = 10 + 10 * 10 / 100
    second_document = 20 + 20 * 20 / 100

    assert cost.packed([10, 20]) == first_document + second_document + 2 * 3 + 50


def test_vision_encoder_by_hand():
    """The first row has an image of 10 tokens and 100 patches. The last row has tokens, but no patches.

    The image costs 7, its tokens 10 * 0.5, its patches 100 * 0.1, and their square 100 * 100 * 0.001.
    """
    cost = CostModel(
        vision_per_token=0.5,
        vision_per_image=7.0,
        vision_per_patch=0.1,
        vision_per_square=0.001,
    )
    tokens = np.array([10, 0, 4])
    patches = np.array([100, 0, 0])

    with_patches = cost.vision(tokens, patches)
    without_patches = cost.vision(tokens)

    np.testing.assert_allclose(with_patches, [5 + 7 + 10 + 10, 0, 2])
    np.testing.assert_allclose(without_patches, [5, 0, 2])


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'quadratic': 0.0}, 'quadratic'),
        ({'launch': -1.0}, 'launch'),
        ({'vision_per_token': math.nan}, 'vision'),
        ({'vision_per_square': -1e-9}, '`vision_per_square` must be finite and not negative, got: -1e-09'),
    ],
)
def test_bad_terms(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**arguments)
