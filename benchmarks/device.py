# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Where a benchmark computes: the same lines on a GPU and, for a rehearsal, on the CPU."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any, Literal

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU

from benchmarks.machine import machine

# Dense bf16 by the vendor's datasheets, operations a second, by what the name of the device contains.
BF16_FLOPS = {
    'B200': 2250e12, 'H200': 989e12, 'H100': 989e12, 'GH200': 989e12, 'A100': 312e12, 'L40S': 362e12, 'A10': 125e12,
    '4090': 165e12,
}  # fmt: skip


@dataclass(frozen=True)
class ComputeDevice:
    """``cuda`` or ``cpu``, and what differs between the two for a benchmark."""

    name: Literal['cpu', 'cuda']

    @property
    def is_gpu(self) -> bool:
        return self.name == 'cuda'

    @property
    def precision(self) -> str:
        """What is trained in; Composer's CPU knows fp32 alone."""
        return 'amp_bf16' if self.is_gpu else 'fp32'

    def composer(self, *, allow_tf32: bool = True) -> Device:
        """For ``Trainer(device=...)``."""
        return DeviceGPU(allow_tf32=allow_tf32) if self.is_gpu else DeviceCPU()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """From here on :meth:`peak_bytes` counts, with nothing left over in the cache."""
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most bytes allocated since :meth:`reset_peak`; 0 on the CPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory if self.is_gpu else 0

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = machine()
        if self.is_gpu:
            found['gpu'] = torch.cuda.get_device_name()
            found['gpu_gib'] = round(self.total_bytes() / 2**30, 1)
            found['cuda'], found['driver'] = torch.version.cuda, _driver()
        return found


CPU, GPU = ComputeDevice('cpu'), ComputeDevice('cuda')


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations a second of a device, or None where this table does not know it."""
    return next((flops for part, flops in BF16_FLOPS.items() if part in device_name), None)


def _driver() -> str:
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return 'unknown'
