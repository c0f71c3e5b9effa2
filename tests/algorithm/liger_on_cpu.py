# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""In a process of its own, which liger-kernel changes for good: its fused loss in triton's interpreter, on the CPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, reference_gradients, relative_error, train

SHAPE = [(4, 2), (9, 0), (5, 3), (14, 11), (6, 1), (3, 2)]


def without_gpu() -> None:
    """Triton's interpreter needs no GPU, but liger-kernel asks one how it would be timed while it is imported."""
    if not torch.cuda.is_available():
        driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))


def patched() -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = text_model().train()
    others = dict.fromkeys(('rope', 'rms_norm', 'swiglu', 'cross_entropy'), False)
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, model=model, **others)
    return model


def main() -> None:
    without_gpu()
    batch = collate(text_rows(SHAPE))
    expected, _ = reference_gradients(text_model(), batch)
    found: dict[str, Any] = {'logits': patched()(**batch).logits is not None, 'errors': {}, 'rules': []}
    for packing in (False, True):
        for size in (1, 2, 6):
            algorithm = TokenAccumulation()
            data = token_data_spec(loader(batch), packing=packing)
            recorder, _, _ = train(patched(), data, algorithms=[algorithm], microbatch_size=size)
            found['errors'][f'{size}{" packed" * packing}'] = relative_error(recorder.gradients, expected)
            found['rules'].append(algorithm.rule)
    try:
        weighted = TokenAccumulation(token_weights='sqrt')
        train(patched(), token_data_spec(loader(batch)), algorithms=[weighted], microbatch_size=2)
    except RuntimeError as error:
        found['refusal'] = str(error)
    print(json.dumps(found))


if __name__ == '__main__':
    main()
