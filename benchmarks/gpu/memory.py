# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(e) Predicted against measured peak memory, for a text and a vision model of over 1 B parameters.

Models are built from configs, nothing is downloaded. Every shape below is unlike the probes. Then the largest
microbatch that the memory model allows on this GPU is run: it must fit, and 1.15 times as many rows must not.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.gpu.scale import GIB, Scale
from benchmarks.gpu.store import Store
from benchmarks.small_llava import made_up_sample
from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing import BatchShape, MemoryModel, calibrate_fake
from composer_tokacc.sizing.shapes import batch_of_width
from composer_tokacc.sizing.trace import AUTOCAST

SHAPES = ((1, 1536), (2, 900), (2, 1700), (3, 1100), (4, 1300), (5, 700), (6, 1000), (8, 800))
SAFETY = 0.92
LIMIT = 0.08


class GpuRun:
    """Steps of the run's model on one GPU, as the Trainer does them.

    Args:
        build: Makes the model on the CPU.
        first_batch: A small batch that reaches every parameter.
        make_optimizer: Makes the optimizer; AdamW by default.
        precision: As in ``Trainer(precision=...)``.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        first_batch: Mapping[str, Any],
        *,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        precision: str = 'amp_bf16',
    ) -> None:
        if not torch.cuda.is_available():
            raise ValueError('A GPU must be there to measure peaks, got: none. Use calibrate_fake().')
        self.device = torch.device('cuda', torch.cuda.current_device())
        model: Any = build()
        self.model: Any = (model.model if hasattr(model, 'shift_labels') else model).to(self.device)
        self._named = inspect.signature(self.model.forward).parameters
        self._dtype = AUTOCAST[precision]
        self._outputs: Any = None
        self._step(first_batch)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Kept, because its states go when it does.
        self._optimizer = (make_optimizer or torch.optim.AdamW)(parameters)
        self._optimizer.step()
        self._outputs = None
        torch.cuda.synchronize()
        self.static_bytes = torch.cuda.memory_allocated(self.device)

    def peak(self, batch: Mapping[str, Any]) -> int:
        """``torch.cuda.max_memory_allocated`` of a microbatch that follows one of the same shape."""
        self._step(batch)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._step(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device)

    def _step(self, batch: Mapping[str, Any]) -> None:
        moved = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        kept = copy.deepcopy(moved)  # as Trainer._train_microbatch
        inputs = {key: value for key, value in kept.items() if key in self._named}
        with torch.autocast('cuda', self._dtype) if self._dtype is not None else nullcontext():
            self._outputs = self.model(**inputs)
        self._outputs.loss.backward()
        del moved


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


def study(name: str, checkpointing: bool, *, dry: bool) -> dict[str, Any]:
    """One model, with or without checkpointing; `dry`: predictions alone, of a small one."""
    config = CONFIGS[name](dry)
    small_gpu = not dry and torch.cuda.get_device_properties(0).total_memory < 40 * GIB
    # Adam's states alone would fill a small one.
    optimizer = partial(torch.optim.SGD, lr=0.0) if small_gpu else torch.optim.AdamW
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
