# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The cost model by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from composer_tokacc.planning import CostModel


def test_formula_by_hand():
    cost = CostModel(quadratic=100.0)
    np.testing.assert_allclose(cost.rows(np.array([10, 100])), [11.0, 200.0])
    assert CostModel(quadratic=math.inf).rows(np.array([1000])) == 1000.0


def test_vision_encoder_by_hand():
    cost = CostModel(vision_per_token=0.5, vision_per_image=7.0, vision_per_patch=0.1, vision_per_square=0.001)
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
