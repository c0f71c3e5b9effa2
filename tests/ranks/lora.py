# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: adapters with DDP and FSDP2. Returns the relative errors of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import BatchLayout
from composer_tokacc.programs.models import build_model
from examples.digits import DigitsDataset, build_digits_processor
from tests.programs.test_models import LLAVA
from tests.support.fsdp import FSDP
from tests.support.training import fit, rank_share, reference_gradients, relative_error

LORA = {
    'language model': {'r': 4},
    'and projector': {'r': 4, 'modules_to_save': ['multi_modal_projector']},
    'all linear layers': {'r': 4, 'target_modules': 'all-linear'},
    'whole vision encoder': {'r': 4, 'modules_to_save': ['vision_tower', 'multi_modal_projector', 'lm_head']},
}
NUM_ROWS = 10
SHARES = (7, 3)
"""Rows of each rank. They are uneven, so that the ranks make different numbers of microbatches."""


def model_with_adapter(processor: Any, lora: dict[str, Any]) -> Any:
    """Returns a model whose adapter has random values for B. With B = 0, where peft starts, A has no gradient."""
    config = {**LLAVA, 'vision_feature_layer': -2, 'vision_feature_select_strategy': 'default'}
    model = build_model(config=config, processor=processor, lora=lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


def main() -> dict[str, float]:
    processor = build_digits_processor()
    dataset = DigitsDataset(processor, num_samples=NUM_ROWS, max_images=3)
    # Rows without images come first, so that the first rank has some.
    samples = [dataset[index] for index in range(NUM_ROWS)]
    rows = sorted(samples, key=lambda row: row['num_images'][0])
    results = {}
    for name, lora in LORA.items():
        model = model_with_adapter(processor, lora)
        layout = BatchLayout.for_model(model)
        expected = {}
        if dist.get_global_rank() == 0:
            expected, _ = reference_gradients(model.model, layout.concat(rows))
        for parallelism, size, options in (('ddp', 3, {}), ('fsdp', 1, FSDP)):
            rank_batch = layout.concat(rank_share(rows, SHARES))
            model = model_with_adapter(processor, lora)
            recorder = fit(model, rank_batch, layout=layout, microbatch_size=size, **options)
            assert recorder.trainer.state.fsdp_enabled == (parallelism == 'fsdp')
            if expected:
                assert recorder.gradients.keys() == expected.keys()
                results[f'{parallelism} {name}'] = relative_error(recorder.gradients, expected)
    return results
