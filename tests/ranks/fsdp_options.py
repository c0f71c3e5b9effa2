# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: FSDP2 in half precision and with replicas. Returns the error of each case."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.fsdp import sharded
from tests.support.text import collate, one_layer_model, text_rows
from tests.support.training import fit, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (5, 1), (6, 0)]
SHARES = {2: (4, 1), 4: (2, 1, 1, 1)}
"""Rows of each rank, by the number of ranks."""


def error(model: torch.nn.Module, **options: Any) -> float:
    rows = text_rows(ROWS)
    expected, _ = reference_gradients(model, collate(rows))
    rank_batch = collate(rank_share(rows, SHARES[dist.get_world_size()]))
    fsdp_config = {'state_dict_type': 'full', **options}
    recorder = fit(sharded(model), rank_batch, microbatch_size=1, parallelism_config={'fsdp': fsdp_config})
    return relative_error(recorder.gradients, expected)


def half_precision() -> dict[str, float]:
    errors = {}
    for reduce_type in ('fp32', 'bf16', 'fp16'):
        errors[f'reduced in {reduce_type}'] = error(one_layer_model(), mixed_precision={'reduce_dtype': reduce_type})
    for dtype in (torch.bfloat16, torch.float16):
        # It is reduced in the type of the weights.
        errors[f'weights in {dtype}'] = error(one_layer_model().to(dtype), mixed_precision='FULL')
    return errors


def replicas() -> dict[str, float]:
    """Of four ranks, two share one copy of the weights, and two the other one."""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))
    return {'replicas': error(one_layer_model(), device_mesh=mesh)}


def main() -> dict[str, float]:
    return half_precision() if dist.get_world_size() == 2 else replicas()
