# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The device of a benchmark: the same code runs on a GPU and, as a rehearsal, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU

from benchmarks.machine import machine
from benchmarks.record import Row

GIB = 2**30


@dataclass(frozen=True)
class ComputeDevice:
    """``cuda`` or ``cpu``. The methods hide what differs between them."""

    name: Literal['cpu', 'cuda']

    @property
    def is_gpu(self) -> bool:
        return self.name == 'cuda'

    @property
    def precision(self) -> str:
        """Returns the precision of a run. Composer trains only in fp32 on a CPU."""
        return 'amp_bf16' if self.is_gpu else 'fp32'

    def composer(self, *, allow_tf32: bool = True) -> Device:
        """Returns the device for ``Trainer(device=...)``."""
        return DeviceGPU(allow_tf32=allow_tf32) if self.is_gpu else DeviceCPU()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Gives unused memory of torch's allocator back to the GPU."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forgets the peak so far."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Returns the most bytes that were allocated since :meth:`reset_peak`, or 0 on the CPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory if self.is_gpu else 0

    def report(self) -> Row:
        """Returns the machine and the GPU for a results file."""
        report = machine()
        if self.is_gpu:
            report['gpu'] = torch.cuda.get_device_name()
            report['gpu_gib'] = round(self.total_bytes() / GIB, 1)
            report['cuda'] = torch.version.cuda
        return report


CPU = ComputeDevice('cpu')
GPU = ComputeDevice('cuda')
