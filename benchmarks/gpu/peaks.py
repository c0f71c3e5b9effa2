# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measured peaks of memory: steps of a model on a real GPU."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from composer_tokacc.sizing.trace import AUTOCAST


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
