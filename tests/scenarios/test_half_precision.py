# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs in half precision are neither refused nor less exact than one forward in half precision."""

from __future__ import annotations

import pytest
import transformers

from composer_tokacc import BatchLayout
from tests.support.families import FAMILIES
from tests.support.half_precision import SCALE, set_precision
from tests.support.training import fit, reference_gradients, relative_error


@pytest.mark.parametrize('precision', ['amp_bf16', 'amp_fp16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_families(family, precision, monkeypatch):
    if family == 'smolvlm' and transformers.__version__.startswith('4.'):
        pytest.skip('Transformers 4 puts half-precision images into float32 embeddings')
    case = FAMILIES[family]()
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    expected, _ = reference_gradients(case.model, batch)
    errors = []
    for microbatch_size in (2, len(case.rows)):
        recorder = fit(
            case.model,
            batch,
            layout=layout,
            microbatch_size=microbatch_size,
            callbacks=set_precision(precision, monkeypatch),
        )
        assert recorder.trainer.state.scaler.get_scale() == SCALE
        errors.append(relative_error(recorder.gradients, expected))
    accumulated, whole = errors
    assert 0 < accumulated < 2 * whole
