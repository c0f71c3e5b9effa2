# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(a) Is the gradient that of one forward over the whole batch? In fp32 to rounding, in bf16 to bf16's own noise."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from transformers import LlavaConfig

from benchmarks.device import ComputeDevice
from benchmarks.gpu.scale import REHEARSAL, Scale, build_llava
from benchmarks.gpu.store import Store
from benchmarks.small_llava import build_model, make_rows
from benchmarks.timed_steps import Row, data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.invariance import relative_error

LENGTHS = (40, 9, 300, 17, 120, 64, 33, 511, 12, 75, 260, 28)
SIZES = (1, 2, 4)
# Twice the noise that one forward in bf16 has itself: summed in another order, it falls elsewhere.
NOISE_FACTOR = 2.0
FP32_LIMIT = 1e-5
Gradients = dict[str, torch.Tensor]


class GradientRecorder(Callback):
    """Copies the gradients before the optimizer has them, whole where ranks hold parts."""

    gradients: Gradients

    def after_train_batch(self, state: State, logger: Logger) -> None:
        is_sharded = any(isinstance(module, FullyShardedDataParallel) for module in state.model.modules())
        summoned = FullyShardedDataParallel.summon_full_params(state.model, with_grads=True)
        with summoned if is_sharded else nullcontext():
            named = [(name, p.grad) for name, p in state.model.named_parameters() if p.grad is not None]
            self.gradients = {_plain(name): getattr(grad, 'full_tensor', grad.clone)().clone() for name, grad in named}


def _plain(name: str) -> str:
    """The name in the Transformers model: FSDP's wrappers go wherever they are, DDP's and Composer's at the front."""
    return name.replace('_fsdp_wrapped_module.', '').removeprefix('module.').removeprefix('model.')


def one_forward(config: LlavaConfig, batch: Row, device: ComputeDevice, dtype: torch.dtype) -> Gradients:
    model = build_llava(config, device)
    inputs = {key: value.to(device.name) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    with torch.autocast(device.name, dtype, enabled=dtype != torch.float32):
        loss = model(**inputs).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulated_gradients(
    config: LlavaConfig,
    rows: list[Row],
    method: str,
    microbatch: int | str,
    device: ComputeDevice,
    precision: str,
    callbacks: tuple[Callback, ...] = (),
) -> Gradients:
    """By a step of the Trainer over all rows, TF32 off."""
    model, recorder = build_llava(config, device), GradientRecorder()
    layout = BatchLayout.for_model(config)
    # 'auto' begins with the loader's own batch size.
    loader = DataLoader(rows, batch_size=len(rows), collate_fn=layout.concat)  # pyright: ignore[reportArgumentType]
    fit(
        model, data_of(method, loader, layout), microbatch, num_steps=1, device=device,
        precision=precision, allow_tf32=False, algorithms=[TokenAccumulation()] if method != 'stock' else [],
        callbacks=[*callbacks, recorder],
    )  # fmt: skip
    return recorder.gradients


def small_config(device: ComputeDevice) -> LlavaConfig:
    """30 M parameters on a GPU; the rehearsal's own on a CPU."""
    return build_model().config if device.is_gpu else REHEARSAL.config()


def measure(device: ComputeDevice) -> dict[str, Any]:
    """Errors of all cuts in both precisions, relative to one forward in fp32."""
    if device.is_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = small_config(device)
    rows = make_rows(LENGTHS, seed=0, config=config)
    batch = BatchLayout.for_model(config).concat(rows)
    expected = one_forward(config, batch, device, torch.float32)
    noise = relative_error(one_forward(config, batch, device, torch.bfloat16), expected)[0]
    precisions = ('fp32', 'amp_bf16') if device.is_gpu else ('fp32',)
    errors: dict[str, dict[str, float | str]] = {}
    for precision, method, size in itertools.product(precisions, ('stock', 'ours', 'packing'), SIZES):
        try:
            accumulated = accumulated_gradients(config, rows, method, size, device, precision)
            found: float | str = relative_error(accumulated, expected)[0]
        except RuntimeError as error:  # packing may be refused on the first batch, rightly
            if method != 'packing':
                raise
            found = f'refused: {error}'[:300]
        errors.setdefault(precision, {})[f'{method} {size}'] = found

    def worst(precision: str) -> float:
        found = errors[precision].items()
        return max(error for name, error in found if isinstance(error, float) and not name.startswith('stock'))

    result = {'errors': errors, 'bf16_noise_of_one_forward': noise, 'worst_fp32': worst('fp32')}
    result['holds'] = worst('fp32') <= FP32_LIMIT
    if device.is_gpu:
        result['worst_bf16_over_noise'] = worst('amp_bf16') / noise
        result['holds'] = result['holds'] and worst('amp_bf16') <= NOISE_FACTOR * noise
    return result


def run(scale: Scale, store: Store) -> None:
    store.measure('a_exactness', lambda: measure(scale.device))
