# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest
import torch
from composer_tokacc.memory import BatchShape
from composer_tokacc.memory.fit import fit_activations, non_negative_least_squares
from composer_tokacc.memory.shapes import batch_of_width
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from composer_tokacc.layout import BatchLayout
from tests.support.families import FAMILIES
from tests.support.text import text_row

SHAPES = [
    BatchShape(rows=2, width=100, image_tokens=50, pixel_bytes=500),
    BatchShape(rows=4, width=100, image_tokens=120, pixel_bytes=1200),
    BatchShape(rows=2, width=250, image_tokens=50, pixel_bytes=500),
    BatchShape(rows=3, width=180, image_tokens=0),
    BatchShape(rows=2, width=300, image_tokens=400, pixel_bytes=4000),
]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31))
def test_no_solution_is_better_but_by_rounding(seed: int) -> None:
    """Not scipy's solution itself: a column that betters the squared error by less than a millionth is left out."""
    rng = np.random.default_rng(seed)
    columns, target = rng.normal(size=(7, 4)), rng.normal(size=7)
    ours, theirs = non_negative_least_squares(columns, target), nnls(columns, target)[0]
    errors = [float(((columns @ solution - target) ** 2).sum()) for solution in (ours, theirs)]
    assert errors[1] * (1 - 1e-12) <= errors[0] <= errors[1] * (1 + 4e-6)
    assert (ours >= 0).all()


def test_coefficients_come_back_from_exact_measurements() -> None:
    measured = [
        {
            'text': 1000 + 40 * shape.tokens + 3 * shape.area,
            'logits': 16 * shape.tokens,
            'vision': 70 * shape.image_tokens,
            'weights': 5000,
        }
        for shape in SHAPES
    ]
    fit = fit_activations(SHAPES, measured, area='padded')
    assert fit.residual < 1e-9
    assert fit.coefficients['text'] == pytest.approx({'constant': 1000, 'tokens': 40, 'area': 3})
    unseen = BatchShape(rows=7, width=64, image_tokens=10, pixel_bytes=100)
    expected = {'text': 1000 + 40 * 448 + 3 * 7 * 64 * 64, 'logits': 16 * 448, 'vision': 700, 'weights': 5000}
    assert fit.predict(unseen) == pytest.approx(expected)


def test_residual_tells_that_no_sum_of_terms_fits() -> None:
    measured = [
        {'text': shape.tokens**3, 'logits': 0, 'vision': 0, 'weights': 0} for shape in SHAPES
    ]  # no term grows like this
    assert fit_activations(SHAPES, measured, area='never').residual > 0.05


def test_area_counts_only_where_attention_holds_one() -> None:
    measured = [{'text': shape.area, 'logits': 0, 'vision': 0, 'weights': 0} for shape in SHAPES]
    fit = fit_activations(SHAPES, measured, area='padded')
    padded = BatchShape(rows=2, width=50)
    assert fit.predict(padded)['text'] == pytest.approx(5000)
    assert fit.predict(BatchShape(rows=2, width=50, is_padded=False))['text'] == pytest.approx(0)


def test_widened_batch_keeps_its_images_and_is_padded() -> None:
    case = FAMILIES['qwen2_5_vl']()
    layout = BatchLayout.for_model(case.model)
    batch = batch_of_width(layout, [case.rows[3], case.rows[5]], 150)
    shape = BatchShape.of(batch, layout)
    tokens = [int(row['image_grid_thw'].prod(dim=1).sum()) // 4 for row in (case.rows[3], case.rows[5])]
    assert (shape.rows, shape.width, shape.image_tokens) == (2, 150, sum(tokens))
    assert shape.is_padded
    torch.testing.assert_close(
        batch['input_ids'][0, : case.rows[3]['input_ids'].shape[1]], case.rows[3]['input_ids'][0]
    )
    assert all(value.shape[1] == 150 for key, value in batch.items() if key in ('labels', 'attention_mask'))


def test_batch_without_padding_and_rows_that_do_not_fit() -> None:
    layout = BatchLayout.infer(text_row(5, 2))
    assert not BatchShape.of(batch_of_width(layout, [text_row(5, 2)], 9, is_padded=False), layout).is_padded
    assert BatchShape.of(batch_of_width(layout, [text_row(5, 2)] * 2, 5), layout).is_padded
    with pytest.raises(ValueError, match='`width` must be at least the longest sample, got: 4 < 5'):
        batch_of_width(layout, [text_row(5, 2)], 4)
