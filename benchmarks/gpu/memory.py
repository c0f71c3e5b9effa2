# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(e) Predicted against measured peak memory, for a text and a vision model of over 1 B parameters.

Models are built from configs, nothing is downloaded. Every shape below is unlike the probes. Then the largest
microbatch that the memory model allows on this GPU is run: it must fit, and 1.15 times as many rows must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.gpu.peaks import GpuRun
from benchmarks.gpu.scale import GIB, Scale
from benchmarks.gpu.store import Store
from benchmarks.made_up import made_up_sample
from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing import BatchShape, MemoryModel, calibrate_fake
from composer_tokacc.sizing.shapes import batch_of_width

SHAPES = ((1, 1536), (2, 900), (2, 1700), (3, 1100), (4, 1300), (5, 700), (6, 1000), (8, 800))
SAFETY = 0.92
LIMIT = 0.08


def text_config(small: bool) -> LlamaConfig:
    """1.2 B parameters: the shape of a 1 B Llama 3.2 with Llama 2's vocabulary."""
    if small:
        sizes = {'hidden_size': 128, 'intermediate_size': 256, 'num_hidden_layers': 2, 'num_attention_heads': 4}
    else:
        sizes = {'hidden_size': 2048, 'intermediate_size': 8192, 'num_hidden_layers': 16, 'num_attention_heads': 32}
    return LlamaConfig(**sizes, vocab_size=32064, max_position_embeddings=4096, use_cache=False)


def vision_config(small: bool) -> LlavaConfig:
    """The same behind CLIP ViT-L/14 at 336 pixels."""
    sizes = {'hidden_size': 1024, 'intermediate_size': 4096, 'num_hidden_layers': 24, 'num_attention_heads': 16}
    if small:
        sizes = {'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 4}
    vision = CLIPVisionConfig(**sizes, image_size=336, patch_size=14)
    return LlavaConfig(vision_config=vision, text_config=text_config(small), image_token_index=32000)


def builder(config: Any, checkpointing: bool = False) -> Callable[[], Any]:
    """Makes the model on the CPU."""
    model_class = LlavaForConditionalGeneration if config.model_type == 'llava' else LlamaForCausalLM

    def build() -> Any:
        model = model_class(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
        return model

    return build


def shape_batch(config: Any, layout: BatchLayout, rows: int, width: int) -> dict[str, Any]:
    """Rows with an image each, where the model sees; every third row is text."""
    sees = config.model_type == 'llava'
    samples = [made_up_sample(config, 40, num_images=int(sees and row % 3 != 2)) for row in range(rows)]
    return batch_of_width(layout, samples, width)


def compare(config: Any, memory: MemoryModel, run: GpuRun | None) -> list[dict[str, Any]]:
    """Predicted and, on a GPU, measured peaks of all shapes."""
    layout, found = BatchLayout.for_model(config), []
    for rows, width in SHAPES:
        batch = shape_batch(config, layout, rows, width)
        row: dict[str, Any] = {'rows': rows, 'width': width}
        row['predicted_gib'] = memory.peak(BatchShape.from_batch(batch, layout)) / GIB
        if run is not None:
            row['measured_gib'] = run.peak(batch) / GIB
            row['error'] = row['predicted_gib'] / row['measured_gib'] - 1
        found.append(row)
    return found


def try_largest(config: Any, memory: MemoryModel, run: GpuRun, width: int = 1024) -> dict[str, Any]:
    """Runs the most rows that the model allows on this GPU, and then 1.15 times as many, which must not fit."""
    layout = BatchLayout.for_model(config)
    total = torch.cuda.get_device_properties(run.device).total_memory

    def predicted(rows: int) -> float:
        return memory.peak(BatchShape.from_batch(shape_batch(config, layout, rows, width), layout))

    rows = 1
    while predicted(rows + 1) <= SAFETY * total:
        rows += 1
    more = math.ceil(rows * 1.15)
    found: dict[str, Any] = {'rows': rows, 'width': width, 'predicted_gib': predicted(rows) / GIB}
    for suffix, count in (('', rows), ('_at_1.15', more)):
        try:
            found[f'measured_gib{suffix}'] = run.peak(shape_batch(config, layout, count, width)) / GIB
            found[f'fits{suffix}'] = True
        except torch.cuda.OutOfMemoryError:
            found[f'fits{suffix}'] = False
            break  # what is left of the failed step stays with the run
    return found


def on_gpu(build: Callable[[], Any]) -> Callable[[], Any]:
    """Draws the weights where they will be: a CPU takes half a minute for each model."""

    def built() -> Any:
        with torch.device('cuda'):
            return build()

    return built


def plain_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """For a GPU that Adam's states alone would fill."""
    return torch.optim.SGD(parameters, lr=0.0)


def study(name: str, checkpointing: bool, *, dry: bool) -> dict[str, Any]:
    """One model, with or without checkpointing; `dry`: predictions alone, of a small one."""
    config = CONFIGS[name](dry)
    small_gpu = not dry and torch.cuda.get_device_properties(0).total_memory < 40 * GIB
    optimizer = plain_sgd if small_gpu else torch.optim.AdamW
    build = builder(config, checkpointing)
    samples = [made_up_sample(config, 30)]
    if config.model_type == 'llava':
        samples.append(made_up_sample(config, 50, num_images=1))
    traced = calibrate_fake(build, config, samples, width=1800, precision='amp_bf16', make_optimizer=optimizer)
    result: dict[str, Any] = {
        'model': name, 'checkpointing': checkpointing, 'residual': traced.residual,
        'optimizer': 'SGD' if small_gpu else 'AdamW',
    }  # fmt: skip
    if dry:
        return {**result, 'traced': compare(config, traced, None)}
    first = shape_batch(config, BatchLayout.for_model(config), 2, 700)
    run = GpuRun(on_gpu(build), first, make_optimizer=optimizer)
    result['traced'], result['largest'] = compare(config, traced, run), try_largest(config, traced, run)
    errors = [row['error'] for row in result['traced']]
    fitting = result['largest']['fits'] and result['largest'].get('fits_at_1.15') is False
    # Never under: a prediction below the truth ends a run.
    result['holds'] = min(errors) >= 0 and max(errors) <= LIMIT and fitting
    result['worst_under'], result['worst_over'] = min(*errors, 0.0), max(*errors, 0.0)
    return result


CONFIGS = {'text': text_config, 'vision': vision_config}


def run(scale: Scale, store: Store) -> None:
    dry = not scale.device.is_gpu
    studies = [(name, checkpointing) for name in CONFIGS for checkpointing in (False, True)]
    # A rehearsal traces one: the others are the same lines, and tracing takes its time on a CPU.
    for name, checkpointing in studies[:1] if dry else studies:
        suffix = '_checkpointing' if checkpointing else ''
        store.measure(f'e_memory_{name}{suffix}', lambda n=name, c=checkpointing: study(n, c, dry=dry))
