# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a router's loss over the step on several ranks; rank 0 writes the relative errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ['FSDP_VERSION'] = '2'

import torch
import transformers
from composer.utils import dist, get_device

from composer_tokacc import BatchLayout
from tests.algorithm.test_router_balance import COEFFICIENT, mixture
from tests.model_types.rows import Maker
from tests.model_types.tiny import tiny_config, tiny_model
from tests.ranks.fsdp_matrix import sharded
from tests.support.fsdp import repair_average
from tests.support.text import collate, text_rows
from tests.support.training import fit, rank_share, reference_gradients, relative_error

SHAPE = [(4, 2), (14, 11), (9, 8), (3, 0), (6, 1), (7, 2)]
SHARES = {1: [6], 2: [5, 1]}
FSDP: dict[str, Any] = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}


def measure(model: Any, whole: Any, share: Any, size: int, *, fsdp: bool = False, **options: Any) -> dict[str, float]:
    expected, loss = reference_gradients(model, whole)
    recorder = fit(
        sharded(model) if fsdp else model,
        share,
        **options,
        router_balance='step',
        microbatch_size=size,
        **FSDP if fsdp else {},
    )
    found = recorder.logged('loss/train/total')[-1]
    return {'error': relative_error(recorder.gradients, expected), 'loss_error': abs(found / loss - 1)}


def with_images() -> tuple[Any, dict[str, torch.Tensor], BatchLayout]:
    """A mixture with a vision encoder, and rows of which the last rank's have no image."""
    config = tiny_config('qwen3_vl_moe')
    config.text_config.output_router_logits, config.text_config.router_aux_loss_coef = True, COEFFICIENT
    config.vision_config.deepstack_visual_indexes = [0]
    model: Any = tiny_model(config, transformers.Qwen3VLMoeForConditionalGeneration).train()
    return model, Maker('qwen3_vl_moe', model).batch('image'), BatchLayout.for_model(model)


def main() -> None:
    dist.initialize_dist(get_device('cpu'))
    repair_average()
    results, world, rank = {}, dist.get_world_size(), dist.get_global_rank()
    rows = text_rows(SHAPE)
    share = collate(rank_share(rows, SHARES[world]))
    for fsdp in (False, True) if world > 1 else (False,):
        for size, packing in ((1, False), (3, False), (2, True)):
            name = f'{"fsdp" if fsdp else "ddp"} microbatch {size}{" packed" if packing else ""}'
            results[name] = measure(mixture(), collate(rows), share, size, fsdp=fsdp, packing=packing)
    model, whole, layout = with_images()
    has_images = [count > 0 for count in layout.media_per_row(whole)]
    own = [row for row, has in enumerate(has_images) if world == 1 or has == (rank == 0)]
    for fsdp, packing in ((False, False), (False, True), (True, False)) if world > 1 else ((False, False),):
        name = f'images {"fsdp" if fsdp else "ddp"}{" packed" if packing else ""}'
        results[name] = measure(model, whole, layout.select(whole, own), 1, fsdp=fsdp, packing=packing)
    if rank == 0:
        Path(sys.argv[-1]).write_text(json.dumps(results))


if __name__ == '__main__':
    main()
