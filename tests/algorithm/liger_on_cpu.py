# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the fused loss of liger-kernel on the CPU, in triton's interpreter.

It is a separate process, because liger-kernel replaces functions of transformers and cannot undo that.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.text import ONE_UNLABELLED, one_layer_model, ragged_batch
from tests.support.training import loader, reference_gradients, relative_error, train


def without_gpu() -> None:
    """Lets liger-kernel be imported without a GPU. It asks triton's driver for a benchmarker, but does not use it."""
    if not torch.cuda.is_available():
        driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))


def liger_model() -> Any:
    """Returns a Llama with the fused loss, and without the other kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = one_layer_model().train()
    other_kernels = dict.fromkeys(('rope', 'rms_norm', 'swiglu', 'cross_entropy'), False)
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, model=model, **other_kernels)
    return model


def main() -> None:
    without_gpu()
    batch = ragged_batch(ONE_UNLABELLED)
    expected, _ = reference_gradients(one_layer_model(), batch)
    errors = {}
    rules = []
    for packing, size in ((False, 1), (True, 2)):
        algorithm = TokenAccumulation()
        data = token_data_spec(loader(batch), packing=packing)
        recorder, _, _ = train(liger_model(), data, algorithms=[algorithm], microbatch_size=size)
        errors[f'size {size}, packing {packing}'] = relative_error(recorder.gradients, expected)
        rules.append(algorithm.rule)
    refusal = ''
    try:
        weighted = TokenAccumulation(token_weights='sqrt')
        train(liger_model(), token_data_spec(loader(batch)), algorithms=[weighted], microbatch_size=2)
    except RuntimeError as error:
        refusal = str(error)
    has_logits = liger_model()(**batch).logits is not None
    print(json.dumps({'has_logits': has_logits, 'errors': errors, 'rules': rules, 'refusal': refusal}))


if __name__ == '__main__':
    main()
