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
from composer.devices import DeviceGPU
from composer.utils import dist, get_device

from benchmarks.device import CPU, GPU
from benchmarks.gpu.exactness import GradientRecorder, one_forward, small_config
from benchmarks.gpu.scale import build_llava
from benchmarks.small_llava import make_rows
from benchmarks.timed_steps import data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.invariance import relative_error

LENGTHS = (40, 9, 64, 17, 120, 33, 28, 12)
FIRST_SHARE = 5
MODALITIES = ('DecoderLayer', 'EncoderLayer')


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
        model, recorder = build_llava(config, device), GradientRecorder()
        arguments: dict[str, Any] = {}
        if wrapper != 'ddp':
            model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(MODALITIES)
            arguments = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}}
        fit(
            model, data_of('ours', [layout.concat(share)], layout), size, num_steps=1, device=device,
            precision='fp32', allow_tf32=False, algorithms=[TokenAccumulation()], callbacks=[recorder], **arguments,
        )  # fmt: skip
        errors[f'microbatch {size}'] = relative_error(recorder.gradients, expected)[0]
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps({'errors': errors}))


if __name__ == '__main__':
    main()
