# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs in half precision are neither refused nor less exact than one forward in half precision."""

from __future__ import annotations

import pytest
import transformers

from tests.support.exactness import family_batch
from tests.support.families import FAMILIES
from tests.support.half_precision import SCALE, gradients_of_one_forward, set_precision
from tests.support.training import fit, reference_gradients, relative_error

PRECISIONS = ('amp_bf16', 'amp_fp16')
SLOW_FAMILIES = ('llava_next', 'llava_onevision', 'qwen2_vl', 'idefics3')
"""The quick tests have families that are built alike: LLaVA, Qwen2.5-VL and SmolVLM."""


def families_and_precisions():
    """Yields all families with both precisions. One precision of most families is quick, in turn; the other is slow."""
    for number, family in enumerate(FAMILIES):
        quick_precision = PRECISIONS[number % 2]
        for precision in PRECISIONS:
            is_quick = precision == quick_precision and family not in SLOW_FAMILIES
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(family, precision, marks=marks)


@pytest.mark.parametrize(('family', 'precision'), families_and_precisions())
def test_families(family, precision, monkeypatch):
    if family == 'smolvlm' and transformers.__version__.startswith('4.'):
        pytest.skip('Transformers 4 puts half-precision images into float32 embeddings')
    case = FAMILIES[family]()
    batch = family_batch(case)
    expected, _ = reference_gradients(case.model, batch)
    one_forward = gradients_of_one_forward(case, batch, precision)
    round_off = relative_error(one_forward, expected)

    recorder = fit(case.model, batch, callbacks=set_precision(precision, monkeypatch))

    assert recorder.trainer.state.scaler.get_scale() == SCALE
    error = relative_error(recorder.gradients, expected)
    assert 0 < error < 2 * round_off
