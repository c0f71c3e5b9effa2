# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Who holds how many bytes during a step, by part of the model; and what autograd saves for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ['PARTS', 'Ledger', 'SavedBytes', 'storage_key']

PARTS = ('text', 'logits', 'vision', 'weights')
"""``weights`` are copies that autocast makes of parameters."""
# Transformers' names of what turns pixels into embeddings of the language model.
_VISION_MODULES = frozenset(
    ('vision_tower', 'visual', 'vision_model', 'image_tower', 'audio_tower', 'multi_modal_projector', 'connector')
)
_TO_COPY: Any = torch.ops.aten._to_copy.default  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor, the same for all its views; valid while one of them lives."""
    return tensor.untyped_storage()._cdata


class Ledger(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is active, by part, until the tensor dies.

    torch's own ``MemTracker`` tells activations from gradients, but not the text from the logits and the vision tower;
    the tests hold the two against each other.

    Args:
        model: The model that runs.
        vocab_size: Tensors whose last dimension has this size are logits.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.current: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.peak = dict(self.current)
        self.part_of: dict[int, str] = {}
        self._total = self._peak_total = 0
        self._depth = 0
        self._finalizers: dict[int, weakref.finalize] = {}
        self._parameters = {storage_key(parameter) for parameter in model.parameters()}
        self._parameters |= {storage_key(buffer) for buffer in model.buffers()}
        self._handles = [
            handle
            for name, module in model.named_modules()
            if name.rpartition('.')[2] in _VISION_MODULES
            for handle in self._watch(module)
        ]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def restart_peak(self) -> None:
        """Forgets the peak: it is what is held now."""
        self.peak, self._peak_total = dict(self.current), self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if is_dense and storage_key(tensor) not in self.part_of:
                self.enter(tensor, self._part(tensor, func, args))
        if self._total > self._peak_total:
            self.peak, self._peak_total = dict(self.current), self._total
        return result

    def enter(self, tensor: torch.Tensor, part: str) -> None:
        """Counts a tensor under a part, unless its memory is counted already or a parameter's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.part_of or key in self._parameters:
            return
        num_bytes = storage.nbytes()
        self.part_of[key] = part
        self.current[part] += num_bytes
        self._total += num_bytes
        self._finalizers[key] = weakref.finalize(storage, self._leave, key, part, num_bytes)

    def _leave(self, key: int, part: str, num_bytes: int) -> None:
        self.part_of.pop(key, None)
        self._finalizers.pop(key, None)
        self.current[part] -= num_bytes
        self._total -= num_bytes

    def _part(self, tensor: torch.Tensor, func: Any, args: Any) -> str:
        if func is _TO_COPY and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._depth:
            return 'vision'
        # Attention over as many positions has four dimensions.
        return 'logits' if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size else 'text'

    def _watch(self, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


class SavedBytes:
    """What autograd keeps of a forward pass: unique storages, parameters excluded. Works on real and fake tensors.

    Args:
        model: Whose parameters do not count.
        ledger: Tells the parts; without one everything is counted as ``'text'``.
    """

    def __init__(self, model: nn.Module, ledger: Ledger | None = None) -> None:
        self.by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._ledger = ledger
        self._seen: dict[int, Any] = {}
        self._parameters = {storage_key(parameter) for parameter in model.parameters()}
        self._parameters |= {storage_key(buffer) for buffer in model.buffers()}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.by_part.values())

    @contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Counts what is saved inside; wrap it around the forward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield self
        self._seen.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen and key not in self._parameters:
            self._seen[key] = storage  # keeps the number from being given to another storage
            part = self._ledger.part_of.get(key, 'text') if self._ledger is not None else 'text'
            self.by_part[part] += storage.nbytes()
        return tensor
