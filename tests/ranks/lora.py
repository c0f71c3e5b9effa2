# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: adapters under DDP and FSDP2; the relative errors of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import BatchLayout
from composer_tokacc.programs.models import build_model
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.fsdp import FSDP, repair_average
from tests.support.training import fit, rank_share, reference_gradients, relative_error

LORA = {
    'language model': {'r': 4},
    'and projector': {'r': 4, 'modules_to_save': ['multi_modal_projector']},
    'all towers': {'r': 4, 'target_modules': 'all-linear'},
    'whole tower': {'r': 4, 'modules_to_save': ['vision_tower', 'multi_modal_projector', 'lm_head']},
}
NUM_ROWS, SHARES = 10, (7, 3)
"""Uneven, so that the ranks make different numbers of microbatches."""


def built(processor: Any, lora: dict[str, Any]) -> Any:
    """With B stirred: at B = 0 A would have no gradient at all."""
    config = {**LLAVA, 'vision_feature_layer': -2, 'vision_feature_select_strategy': 'default'}
    model = build_model(config=config, processor=processor, lora=lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


def main() -> dict[str, float]:
    repair_average()
    processor = build_digits_processor()
    dataset = DigitsDataset(processor, num_samples=NUM_ROWS, max_images=3)
    # Rows of text alone first: the first rank has some, whatever it has besides.
    rows = sorted((dataset[index] for index in range(NUM_ROWS)), key=lambda row: row['num_images'][0])
    results = {}
    for name, lora in LORA.items():
        layout = BatchLayout.for_model(built(processor, lora))
        expected = {}
        if not dist.get_global_rank():
            expected, _ = reference_gradients(built(processor, lora).model, layout.concat(rows))
        for parallel in ('ddp', 'fsdp'):
            for size in (1, 3):
                options = FSDP if parallel == 'fsdp' else {}
                own = layout.concat(rank_share(rows, SHARES))
                recorder = fit(built(processor, lora), own, layout=layout, microbatch_size=size, **options)
                assert recorder.trainer.state.fsdp_enabled == (parallel == 'fsdp')
                if not expected:
                    continue
                assert recorder.gradients.keys() == expected.keys()
                results[f'{parallel} {name} microbatch {size}'] = relative_error(recorder.gradients, expected)
    return results
