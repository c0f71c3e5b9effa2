# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: FSDP2 that reduces gradients in half precision. Returns the error of each case."""

from __future__ import annotations

import torch

from tests.support.fsdp import sharded
from tests.support.text import collate, one_layer_model, text_rows
from tests.support.training import fit, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (5, 1)]
SHARES = (3, 1)
"""Rows of each rank."""


def error(model: torch.nn.Module, mixed_precision: object) -> float:
    rows = text_rows(ROWS)
    expected, _ = reference_gradients(model, collate(rows))
    options = {'state_dict_type': 'full', 'mixed_precision': mixed_precision}
    recorder = fit(sharded(model), collate(rank_share(rows, SHARES)), parallelism_config={'fsdp': options})
    return relative_error(recorder.gradients, expected)


def main() -> dict[str, float]:
    errors = {}
    for reduce_type in ('fp32', 'bf16', 'fp16'):
        errors[f'reduced in {reduce_type}'] = error(one_layer_model(), {'reduce_dtype': reduce_type})
    for dtype in (torch.bfloat16, torch.float16):
        errors[f'weights in {dtype}'] = error(one_layer_model().to(dtype), 'FULL')  # no type is set
    return errors
