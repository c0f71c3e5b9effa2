# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Bytes that a model's tensors hold while it runs, by part of the model."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from composer_tokacc.compat import TorchDispatchMode, storage_key, tree_iter
from composer_tokacc.model_structure import vision_modules

to_copy: Any = torch.ops.aten._to_copy
ask_device: Any = torch.ops.prim.device
TRACKED_PARTS = ('text', 'logits', 'vision', 'weights')
"""``weights`` are copies that autocast makes of parameters."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is active, by part, until the tensor dies.

    torch's own ``MemTracker`` tells activations from gradients, but not text from logits and vision encoder; the tests
    hold the two against each other.

    Args:
        model: The model that runs.
        vocab_size: Tensors whose last dimension has this size are logits.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.current: dict[str, int] = dict.fromkeys(TRACKED_PARTS, 0)
        self.peak = dict(self.current)
        self._total = self._peak_total = 0
        self._depth = 0  # of encoders that are running, one inside the other
        # Finalizers by storage, for as long as it lives.
        self._counted: dict[int, weakref.finalize] = {}
        self._parameters = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._handles = [handle for module in vision_modules(model) for handle in self._watch(module)]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def restart_peak(self) -> None:
        """Forgets the peak: it is what is held now."""
        self.peak, self._peak_total = dict(self.current), self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ask_device.default:  # more than half of all calls; each further mode would take its turn
            return args[0].device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if is_dense and storage_key(tensor) not in self._counted:
                self.enter(tensor, self._part(tensor, func, args))
        if self._total > self._peak_total:
            self.restart_peak()
        return result

    def enter(self, tensor: torch.Tensor, part: str) -> None:
        """Counts a tensor under a part, unless its memory is counted already or a parameter's."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._counted or key in self._parameters:
            return
        num_bytes = storage.nbytes()
        self._add(part, num_bytes)
        self._counted[key] = weakref.finalize(storage, self._leave, key, part, num_bytes)

    def _leave(self, key: int, part: str, num_bytes: int) -> None:
        self._counted.pop(key, None)
        self._add(part, -num_bytes)

    def _add(self, part: str, num_bytes: int) -> None:
        self.current[part] += num_bytes
        self._total += num_bytes

    def _part(self, tensor: torch.Tensor, func: Any, args: Any) -> str:
        if func is to_copy.default and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._depth:
            return 'vision'
        # Attention over as many positions has four dimensions.
        return 'logits' if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size else 'text'

    def _watch(self, module: nn.Module) -> list[Any]:
        def move(by: int) -> None:
            self._depth += by

        return [
            module.register_forward_pre_hook(lambda *_: move(1)),
            module.register_forward_hook(lambda *_: move(-1)),
        ]
