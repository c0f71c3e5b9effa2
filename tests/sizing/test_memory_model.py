# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fit that predicts the memory of a microbatch, the shapes that it is made from, and the file that keeps it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing import BatchShape, MemoryModel, StaticBytes, load_or_calibrate
from composer_tokacc.sizing.memory_model import (
    ActivationFit,
    activation_bytes,
    fit_activations,
    non_negative_fit,
)
from composer_tokacc.sizing.shapes import batch_of_width
from tests.support.families import FAMILIES
from tests.support.text import text_row

SHAPES = [
    BatchShape(rows=2, width=100, image_tokens=50, pixel_bytes=500),
    BatchShape(rows=4, width=100, image_tokens=120, pixel_bytes=1200),
    BatchShape(rows=2, width=250, image_tokens=50, pixel_bytes=500),
    BatchShape(rows=3, width=180, image_tokens=0),
    BatchShape(rows=2, width=300, image_tokens=400, pixel_bytes=4000),
]


def fit_phase(measured: list[dict[str, float]], area: str) -> ActivationFit:
    """Returns the fit of the only phase of a step."""
    return fit_activations(SHAPES, measured, area=area, peaks=activation_bytes(measured))


def test_columns_of_very_different_size():
    rng = np.random.default_rng(0)
    columns = rng.random((7, 4)) * [1e-6, 1.0, 1e6, 1e12]
    expected = np.array([3e6, 0.0, 2e-6, 1e-12])

    fitted = non_negative_fit(columns, columns @ expected)

    np.testing.assert_allclose(fitted, expected, rtol=1e-6)


def test_no_coefficient_is_negative():
    """The exact solution is (1, -1). The best one without a negative coefficient is (1/2, 0)."""
    columns = np.array([[1.0, 0.0], [1.0, 1.0]])
    target = np.array([1.0, 0.0])
    fitted = non_negative_fit(columns, target)
    np.testing.assert_allclose(fitted, [0.5, 0.0])


def test_exact_measurements_are_fitted_exactly():
    def bytes_of(shape):
        num_tokens = shape.rows * shape.width
        return {
            'text': 1000 + 40 * num_tokens + 3 * num_tokens * shape.width,
            'logits': 16 * num_tokens,
            'vision': 70 * shape.image_tokens,
            'weights': 5000,
        }

    measured = [bytes_of(shape) for shape in SHAPES]
    unseen = BatchShape(rows=7, width=64, image_tokens=10, pixel_bytes=100)

    fit = fit_phase(measured, area='padded')

    assert fit.residual < 1e-9
    assert fit.predict(unseen) == pytest.approx(bytes_of(unseen))


def test_residual_tells_a_bad_fit():
    measured = [{'text': shape.tokens**3} for shape in SHAPES]  # no term grows like this
    fit = fit_phase(measured, area='never')
    assert fit.residual > 0.05


def test_area_counts_if_attention_holds_it():
    """Two rows of 50 tokens have 2 x 50 x 50 = 5000 entries of attention."""
    measured = [{'text': shape.area} for shape in SHAPES]
    padded = BatchShape(rows=2, width=50)
    unpadded = BatchShape(rows=2, width=50, is_padded=False)

    fit = fit_phase(measured, area='padded')

    bytes_if_padded = fit.predict(padded)['text']
    bytes_if_unpadded = fit.predict(unpadded)['text']
    assert bytes_if_padded == pytest.approx(5000)
    assert bytes_if_unpadded == pytest.approx(0, abs=1e-6)


def test_widened_batch_keeps_its_images():
    case = FAMILIES['qwen2_5_vl']()
    layout = BatchLayout.for_model(case.model)
    rows = [case.rows[3], case.rows[5]]
    grids = torch.cat([row['image_grid_thw'] for row in rows])
    tokens_of_images = grids.prod(dim=1) // 4
    assert len(tokens_of_images.unique()) > 1

    batch = batch_of_width(layout, rows, 150)
    shape = BatchShape.from_batch(batch, layout)

    assert shape.image_tokens == tokens_of_images.sum()
    assert shape.image_area == tokens_of_images.square().sum()
    assert shape.is_padded
    for key in ('input_ids', 'labels', 'attention_mask'):
        assert batch[key].shape == (2, 150)
    (ids_of_first_row,) = rows[0]['input_ids']
    first_row = batch['input_ids'][0]
    assert torch.equal(first_row[: len(ids_of_first_row)], ids_of_first_row)


def test_rows_of_equal_length_are_padded():
    row = text_row(5, 2)
    layout = BatchLayout.infer(row)
    batch = batch_of_width(layout, [row, row], 5)
    shape = BatchShape.from_batch(batch, layout)
    assert shape.is_padded


MEMORY = MemoryModel(
    static=StaticBytes(
        parameters=10,
        buffers=0,
        gradients=10,
        optimizer=20,
        optimizer_step=0,
        block=1,
        outside=2,
        trained_block=1,
        trained_outside=2,
        compute_bytes=4,
    ),
    phases={'head': fit_phase([{'text': shape.tokens} for shape in SHAPES], area='never')},
)


def test_calibration_is_kept_for_its_key(tmp_path):
    keys_of_calls = []

    def calibrate(key):
        keys_of_calls.append(key)
        return MEMORY

    assert load_or_calibrate(tmp_path, {'model': 'a'}, calibrate) == MEMORY
    assert load_or_calibrate(tmp_path, {'model': 'a'}, calibrate) == MEMORY
    assert len(keys_of_calls) == 1

    load_or_calibrate(tmp_path, {'model': 'b'}, calibrate)
    assert len(keys_of_calls) == 2


def test_damaged_calibration_is_made_again(tmp_path, caplog):
    load_or_calibrate(tmp_path, {'model': 'a'}, lambda key: MEMORY)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_text(text[:40])

    with caplog.at_level(logging.WARNING):
        memory = load_or_calibrate(tmp_path, {'model': 'a'}, lambda key: MEMORY)

    assert memory == MEMORY
    assert 'is damaged' in caplog.text


def test_calibration_works_without_a_folder(tmp_path, caplog):
    file = tmp_path / 'file'
    file.touch()  # no folder can be made in its place
    memory = load_or_calibrate(file, {'model': 'a'}, lambda key: MEMORY)
    assert memory == MEMORY
    assert 'cannot be kept' in caplog.text
