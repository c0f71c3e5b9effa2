# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One of two ranks: its share of a global batch, text-only microbatches among them; rank 0 writes the errors.

Started by `benchmarks.gpu.ranks`, which sets the environment of a launcher.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.devices import DeviceGPU
from composer.loggers import Logger
from composer.utils import dist, get_device
from torch.distributed.fsdp import FullyShardedDataParallel

from benchmarks.device import CPU, GPU
from benchmarks.gpu.exactness import Gradients, one_forward, relative_error, small_config
from benchmarks.gpu.scale import build_llava
from benchmarks.small_llava import make_rows
from benchmarks.timed_steps import data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation

LENGTHS = (40, 9, 64, 17, 120, 33, 28, 12)
FIRST_SHARE = 5
MODALITIES = ('DecoderLayer', 'EncoderLayer')


class WholeGradients(Callback):
    """Gathers the gradients of all shards before the optimizer has them."""

    gradients: Gradients

    def after_train_batch(self, state: State, logger: Logger) -> None:
        sharded = any(isinstance(module, FullyShardedDataParallel) for module in state.model.modules())
        if not sharded:
            self.gradients = _named(state.model)
            return
        with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
            self.gradients = _named(state.model)


def _named(model: torch.nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, 'full_tensor') else gradient
            found[_plain(name)] = whole.clone()
    return found


def _plain(name: str) -> str:
    """The name in the Transformers model: FSDP's wrappers go wherever they are, DDP's and Composer's at the front."""
    name = name.replace('_fsdp_wrapped_module.', '').removeprefix('module.')
    return name.removeprefix('model.')


def main() -> None:
    warnings.simplefilter('ignore')
    wrapper, backend, device_name, path = sys.argv[1:]
    device = GPU if device_name == 'cuda' else CPU
    if device.is_gpu:
        DeviceGPU.dist_backend = backend
    dist.initialize_dist(get_device('gpu' if device.is_gpu else 'cpu'))
    config = small_config(device)
    rows = make_rows(LENGTHS, 0, config)
    layout = BatchLayout.for_model(config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    expected = one_forward(config, layout.concat(rows), device, torch.float32)
    share = rows[:FIRST_SHARE] if dist.get_global_rank() == 0 else rows[FIRST_SHARE:]
    errors = {}
    for size in (1, 2):
        model, recorder = build_llava(config, device), WholeGradients()
        arguments: dict[str, Any] = {}
        if wrapper != 'ddp':
            model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(MODALITIES)
            arguments = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}
        fit(
            model, data_of('ours', [layout.concat(share)], layout), size, num_steps=1, device=device,
            precision='fp32', allow_tf32=False, algorithms=[TokenAccumulation()], callbacks=[recorder], **arguments,
        )  # fmt: skip
        errors[f'microbatch {size}'] = relative_error(recorder.gradients, expected)
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps({'errors': errors}))


if __name__ == '__main__':
    main()
