# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Predicted peaks against ``torch.cuda.max_memory_allocated``, for a text and a vision model of over 1 B parameters.

    python -m benchmarks.memory_gpu                 # on a GPU of 80 GB; fits traced probes, and measured ones
    python -m benchmarks.memory_gpu --dry --small   # no GPU: builds and plans small models, prints predictions only

Models are built from configs, nothing is downloaded. Every shape below is unlike the probes. Then the largest
microbatch that the model allows on this GPU is run: it must fit, and 1.15 times as many rows must not. Writes
`results/memory_gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.gpu_peaks import GpuRun, calibrate_gpu
from benchmarks.machine import machine
from benchmarks.made_up import made_up_sample
from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing import GIB, BatchShape, MemoryModel, calibrate_fake
from composer_tokacc.sizing.shapes import batch_of_width

RESULTS = Path(__file__).resolve().parent / 'results'
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


def builder(config: Any, checkpointing: bool) -> Callable[[], Any]:
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
        row['predicted_gib'] = memory.peak(BatchShape.of(batch, layout)) / GIB
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
        return memory.peak(BatchShape.of(shape_batch(config, layout, rows, width), layout))

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


def study(name: str, config: Any, checkpointing: bool, dry: bool, *, calibrate: bool = False) -> dict[str, Any]:
    """One model, with or without checkpointing; `calibrate` measures the probes as well and compares again."""
    small_gpu = not dry and torch.cuda.get_device_properties(0).total_memory < 40 * GIB
    optimizer = plain_sgd if small_gpu else torch.optim.AdamW
    build = builder(config, checkpointing)
    samples = [made_up_sample(config, 30)]
    if config.model_type == 'llava':
        samples.append(made_up_sample(config, 50, num_images=1))
    first = shape_batch(config, BatchLayout.for_model(config), 2, 700)
    traced = calibrate_fake(build, config, samples, width=1800, precision='amp_bf16', make_optimizer=optimizer)
    result: dict[str, Any] = {'model': name, 'checkpointing': checkpointing, 'residual': traced.residual}
    result['optimizer'] = 'SGD' if small_gpu else 'AdamW'
    run = None if dry else GpuRun(on_gpu(build), first, make_optimizer=optimizer)
    result['traced'] = compare(config, traced, run)
    if run is not None:
        result['largest'] = try_largest(config, traced, run)
        del run
        torch.cuda.empty_cache()
    if calibrate and not dry:
        measured = calibrate_gpu(traced, on_gpu(build), samples, width=1800, make_optimizer=optimizer)
        again = GpuRun(on_gpu(build), first, make_optimizer=optimizer)
        result['calibrated'] = compare(config, measured, again)
    return result


def main() -> None:
    """Runs all studies, prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dry', action='store_true', help='predictions only, no GPU')
    parser.add_argument('--small', action='store_true', help='models of a few million parameters')
    given = parser.parse_args()
    device = 'none' if given.dry else torch.cuda.get_device_name()
    studies = []
    for name, config in (('text', text_config(given.small)), ('vision', vision_config(given.small))):
        for checkpointing in (False, True):
            result = study(name, config, checkpointing, given.dry, calibrate=True)
            studies.append(result)
            print(f'{name}, checkpointing {checkpointing}, residual {result["residual"]:.1%}')
            for method in ('traced', 'calibrated'):
                for row in result.get(method, []):
                    tail = f', measured {row["measured_gib"]:.2f}, off by {row["error"]:+.1%}' if 'error' in row else ''
                    print(f'  {method}: {row["rows"]} x {row["width"]}: {row["predicted_gib"]:.2f} GiB{tail}')
            errors = [abs(row['error']) for row in result['traced'] if 'error' in row]
            if errors:
                verdict = 'within' if max(errors) <= LIMIT else 'NOT within'
                print(f'  worst {max(errors):.1%}, {verdict} {LIMIT:.0%}')
    if not given.dry:
        RESULTS.mkdir(exist_ok=True)
        report = {'machine': {**machine(), 'device': device}, 'studies': studies}
        (RESULTS / 'memory_gpu.json').write_text(json.dumps(report, indent=2) + '\n')


if __name__ == '__main__':
    main()
