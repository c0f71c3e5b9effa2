# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs in half precision are neither refused nor less exact than one forward in half precision."""

from __future__ import annotations

import pytest
import transformers

from tests.support.families import FAMILIES
from tests.support.half_precision import SCALE, set_precision, train_in_two_cuts


@pytest.mark.parametrize('precision', ['amp_bf16', 'amp_fp16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_families(family, precision, monkeypatch):
    if family == 'smolvlm' and transformers.__version__.startswith('4.'):
        pytest.skip('Transformers 4 puts half-precision images into float32 embeddings')
    callbacks = set_precision(precision, monkeypatch)
    results = train_in_two_cuts(FAMILIES[family](), callbacks=callbacks)
    for recorder, _ in results:
        assert recorder.trainer.state.scaler.get_scale() == SCALE
    (_, error_in_microbatches), (_, error_in_one_forward) = results
    assert 0 < error_in_microbatches < 2 * error_in_one_forward
