# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The fit that predicts the memory of a microbatch, the shapes that it is made from, and the file that keeps it."""

from __future__ import annotations

import logging
from pathlib import Path

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


def test_columns_of_very_different_size() -> None:
    drawn = np.random.default_rng(0).random((7, 4))
    columns = drawn * [1e-6, 1.0, 1e6, 1e12]
    expected = np.array([3e6, 0.0, 2e-6, 1e-12])
    fitted = non_negative_fit(columns, columns @ expected)
    np.testing.assert_allclose(fitted, expected, rtol=1e-6)


def test_no_coefficient_is_negative() -> None:
    """The exact solution is (1, -1). The best one without a negative coefficient is (1/2, 0)."""
    columns = np.array([[1.0, 0.0], [1.0, 1.0]])
    target = np.array([1.0, 0.0])
    np.testing.assert_allclose(non_negative_fit(columns, target), [0.5, 0.0])


def test_exact_measurements_are_fitted_exactly() -> None:
    def bytes_of(shape: BatchShape) -> dict[str, float]:
        num_tokens = shape.rows * shape.width
        return {
            'text': 1000 + 40 * num_tokens + 3 * num_tokens * shape.width,
            'logits': 16 * num_tokens,
            'vision': 70 * shape.image_tokens,
            'weights': 5000,
        }

    fit = fit_phase([bytes_of(shape) for shape in SHAPES], area='padded')
    assert fit.residual < 1e-9
    unseen = BatchShape(rows=7, width=64, image_tokens=10, pixel_bytes=100)
    assert fit.predict(unseen) == pytest.approx(bytes_of(unseen))


def test_residual_tells_a_bad_fit() -> None:
    measured = [{'text': shape.tokens**3} for shape in SHAPES]  # no term grows like this
    assert fit_phase(measured, area='never').residual > 0.05


def test_area_counts_if_attention_holds_it() -> None:
    measured = [{'text': shape.area} for shape in SHAPES]
    fit = fit_phase(measured, area='padded')
    for_padded = fit.predict(BatchShape(rows=2, width=50))
    for_unpadded = fit.predict(BatchShape(rows=2, width=50, is_padded=False))
    assert for_padded['text'] == pytest.approx(5000)
    assert for_unpadded['text'] == pytest.approx(0, abs=1e-6)


def test_widened_batch_keeps_its_images() -> None:
    case = FAMILIES['qwen2_5_vl']()
    layout = BatchLayout.for_model(case.model)
    rows = [case.rows[3], case.rows[5]]
    batch = batch_of_width(layout, rows, 150)
    shape = BatchShape.from_batch(batch, layout)
    tokens_of_images = torch.cat([row['image_grid_thw'] for row in rows]).prod(dim=1) // 4
    assert len(tokens_of_images.unique()) > 1
    assert shape.image_tokens == tokens_of_images.sum()
    assert shape.image_area == tokens_of_images.square().sum()
    assert shape.is_padded
    for key in ('input_ids', 'labels', 'attention_mask'):
        assert batch[key].shape == (2, 150)
    (ids_of_first_row,) = rows[0]['input_ids']
    assert torch.equal(batch['input_ids'][0, : len(ids_of_first_row)], ids_of_first_row)


def test_rows_of_equal_length_are_padded() -> None:
    layout = BatchLayout.infer(text_row(5, 2))
    batch = batch_of_width(layout, [text_row(5, 2)] * 2, 5)
    assert BatchShape.from_batch(batch, layout).is_padded


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


def test_calibration_is_kept_for_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibrated = []

    def calibrate(key: dict[str, object]) -> MemoryModel:
        calibrated.append(key)
        return MEMORY

    assert load_or_calibrate(tmp_path, {'model': 'a'}, calibrate) == MEMORY
    assert load_or_calibrate(tmp_path, {'model': 'a'}, calibrate) == MEMORY
    assert len(calibrated) == 1
    load_or_calibrate(tmp_path, {'model': 'b'}, calibrate)
    assert len(calibrated) == 2


def test_damaged_calibration_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_or_calibrate(tmp_path, {'model': 'a'}, lambda key: MEMORY)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:40])
    with caplog.at_level(logging.WARNING):
        assert load_or_calibrate(tmp_path, {'model': 'a'}, lambda key: MEMORY) == MEMORY
    assert 'is damaged' in caplog.text


def test_calibration_works_without_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / 'file'
    file.touch()  # no folder can be made in its place
    assert load_or_calibrate(file, {'model': 'a'}, lambda key: MEMORY) == MEMORY
    assert 'cannot be kept' in caplog.text
