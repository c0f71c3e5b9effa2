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

from composer_tokacc import TokenAccumulation
from tests.support.text import ONE_UNLABELLED, one_layer_model, ragged_batch
from tests.support.training import fit, reference_gradients, relative_error


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


def refusal_of_weights(batch: dict[str, Any]) -> str:
    """Returns the error of a run with token weights, or an empty text."""
    try:
        fit(liger_model(), batch, token_weights='sqrt')
    except RuntimeError as error:
        return str(error)
    return ''


def main() -> None:
    """Prints JSON: errors of the gradient in two cuts, the rules, a refusal, and whether there are logits."""
    without_gpu()
    batch = ragged_batch(ONE_UNLABELLED)
    expected, _ = reference_gradients(one_layer_model(), batch)
    errors = {}
    rules = []
    for packing, size in ((False, 1), (True, 2)):
        algorithm = TokenAccumulation()
        recorder = fit(liger_model(), batch, packing=packing, algorithms=[algorithm], microbatch_size=size)
        errors[f'size {size}, packing {packing}'] = relative_error(recorder.gradients, expected)
        rules.append(algorithm.rule)
    model = liger_model()
    outputs = model(**batch)
    results = {
        'errors': errors,
        'rules': rules,
        'refusal': refusal_of_weights(batch),
        'has_logits': outputs.logits is not None,
    }
    print(json.dumps(results))


if __name__ == '__main__':
    main()
