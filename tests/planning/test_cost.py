# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math

import numpy as np
import pytest

from composer_tokacc.planning import CostModel


def test_formula_by_hand():
    cost = CostModel(quadratic=100.0, vision_per_token=0.5, launch=7.0)
    assert cost.microbatch(3, 50, image_tokens=20) == pytest.approx(3 * (50 + 25) + 10 + 7)
    np.testing.assert_allclose(cost.rows(np.array([10, 100])), [11.0, 200.0])


def test_no_quadratic_term():
    assert CostModel(quadratic=math.inf, launch=0.0).microbatch(2, 1000) == 2000.0


def _grid() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(1, 17, 40), rng.integers(16, 4096, 40), rng.integers(0, 3000, 40)


def test_fit_finds_the_terms_that_made_the_times():
    n, w, images = _grid()
    seconds = 2e-6 * n * w + 1e-10 * n * w * w + 3e-6 * images + 4e-4
    cost = CostModel.fit(n, w, seconds, images)
    assert cost.quadratic == pytest.approx(20_000, rel=1e-6)
    assert cost.vision_per_token == pytest.approx(1.5, rel=1e-6)
    assert cost.launch == pytest.approx(200, rel=1e-5)
    assert cost.seconds_per_token == pytest.approx(2e-6, rel=1e-6)


def test_fit_with_noise_predicts_the_times():
    n, w, _ = _grid()
    clean = 2e-6 * n * w + 1e-10 * n * w * w + 4e-4
    cost = CostModel.fit(n, w, clean * np.random.default_rng(1).normal(1.0, 0.03, 40))
    predicted = [cost.microbatch(int(a), int(b)) * cost.seconds_per_token for a, b in zip(n, w, strict=True)]
    np.testing.assert_allclose(predicted, clean, rtol=0.05)


def test_fit_leaves_out_a_term_that_would_be_negative():
    n, w, _ = _grid()
    cost = CostModel.fit(n, w, 2e-6 * n * w - 1e-11 * n * w * w)
    assert cost.quadratic == math.inf
    assert cost.launch >= 0.0


def test_fit_refuses_times_that_do_not_grow():
    with pytest.raises(ValueError, match='must grow with the number of tokens'):
        CostModel.fit([1, 2, 4, 8], [64, 64, 64, 64], [8.0, 4.0, 2.0, 0.01])


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [({'quadratic': 0.0}, 'quadratic'), ({'launch': -1.0}, 'launch'), ({'vision_per_token': math.nan}, 'vision')],
)
def test_bad_terms(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**arguments)
