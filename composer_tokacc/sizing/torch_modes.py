# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Modes of torch under which a model runs without memory: control flow of real data, types of a GPU, bytes by part."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composer_tokacc.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    tree_flatten,
    tree_iter,
    tree_map_only,
    tree_unflatten,
)
from composer_tokacc.model_structure import vision_modules

aten: Any = torch.ops.aten
ask_device: Any = torch.ops.prim.device
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
LARGEST_REAL = 1 << 22
"""Numbers of a float tensor that stays real: a mask in floats is rows x width^2 of them, and SDPA makes one a layer.
Gemma 4 looks at 705,600 an image, which say where its patches are pooled."""
TRACKED_PARTS = ('text', 'logits', 'vision', 'weights')
"""``weights`` are copies that autocast makes of parameters."""


class SharedFakeMode(FakeTensorMode):
    """A mode of fake tensors that copies of a module share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakeMode:
        # peft copies modules, with their tensors and the mode of these, whose memory would be freed twice.
        return self


class RealInputs(TorchDispatchMode):
    """Computes for real what no weight enters; everything else is a fake tensor.

    Vision-language models look at their inputs: how many image tokens there are, how large each image's grid is, which
    images are padding, whether any row is padded. ``FakeTensorMode`` alone stops there. A batch is small, so it stays
    real, and so does what follows from it alone; only large floats that do (masks, cast pixels) are made fake.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if not any(isinstance(value, FakeTensor) for value in tensors):
            # No weight has entered yet: the operation runs for real.
            own = {storage_key(tensor) for tensor in tensors}
            return tree_map_only(torch.Tensor, lambda made: self._thin(made, own), func(*args, **(kwargs or {})))
        # A fake index of unknown values gives a result of unknown size; these indices are real, and say where.
        if func in INDEXING:
            args = (args[0], _by_position(args[1]), *args[2:])
            flat, spec = tree_flatten((args, kwargs or {}))
        elif func is aten.masked_select.default and not isinstance(args[1], FakeTensor):
            mask = args[1].expand(args[0].shape)
            return self.__torch_dispatch__(aten.index.Tensor, types, (args[0], [mask]))
        with self.fake_mode:
            flat = [self._fake(value) if isinstance(value, torch.Tensor) else value for value in flat]
            args, kwargs = tree_unflatten(flat, spec)
            return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake_mode.from_tensor(tensor, static_shapes=True)

    def _thin(self, tensor: torch.Tensor, inputs: set[int]) -> torch.Tensor:
        """Makes a large new tensor of floats fake; a view of an input stays what it is."""
        large = tensor.is_floating_point() and tensor.numel() > LARGEST_REAL
        return self._fake(tensor) if large and storage_key(tensor) not in inputs else tensor


def _by_position(indices: Any) -> list[Any]:
    """Returns real boolean indices as positions: the size of the result is then known."""
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            positions.extend(index.nonzero().unbind(dim=1))
        else:
            positions.append(index)
    return positions


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on the CPU compute in float32 what autocast on a GPU does, since its outputs are larger then."""

    # torch/amp, "CUDA ops that autocast to float32", as far as transformers use them.
    FLOAT32 = (
        *(getattr(nn.functional, name) for name in ('layer_norm', 'group_norm', 'softmax', 'log_softmax')),
        *(getattr(nn.functional, name) for name in ('cross_entropy', 'nll_loss')),
        *(getattr(torch, name) for name in ('softmax', 'log_softmax', 'layer_norm', 'rsqrt', 'exp', 'log')),
        *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in ('pow', 'cumsum', 'sum')),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FLOAT32 and torch.is_autocast_enabled('cpu'):
            args, kwargs = tree_map_only(torch.Tensor, _upcast, (args, kwargs))
            with torch.autocast('cpu', enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is active, by part, until the tensor dies.

    torch's own ``MemTracker`` tells activations from gradients, but not text from logits and vision encoder; the tests
    hold the two against each other. Logits are told by their last dimension, `vocab_size`.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.current: dict[str, int] = dict.fromkeys(TRACKED_PARTS, 0)
        self.peak = dict(self.current)
        self._depth = 0  # of encoders that are running, one inside the other
        # Finalizers by storage, for as long as it lives.
        self._counted: dict[int, weakref.finalize] = {}
        self._parameters = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._handles: list[Any] = []
        for module in vision_modules(model):
            self._handles.append(module.register_forward_pre_hook(partial(self._nest, 1)))
            self._handles.append(module.register_forward_hook(partial(self._nest, -1)))

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def restart_peak(self) -> None:
        """Forgets the peak: it is what is held now."""
        self.peak = dict(self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ask_device.default:  # more than half of all calls; each further mode would take its turn
            return args[0].device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if is_dense and storage_key(tensor) not in self._counted:
                self.enter(tensor, self._part(tensor, func, args))
        if sum(self.current.values()) > sum(self.peak.values()):
            self.restart_peak()
        return result

    def enter(self, tensor: torch.Tensor, part: str) -> None:
        """Counts a tensor under a part, unless its memory is counted already or a parameter's."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._counted or key in self._parameters:
            return
        self.current[part] += storage.nbytes()
        self._counted[key] = weakref.finalize(storage, self._leave, key, part, storage.nbytes())

    def _leave(self, key: int, part: str, num_bytes: int) -> None:
        self._counted.pop(key, None)
        self.current[part] -= num_bytes

    def _part(self, tensor: torch.Tensor, func: Any, args: Any) -> str:
        if func is aten._to_copy.default and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._depth:
            return 'vision'
        # Attention over as many positions has four dimensions.
        return 'logits' if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size else 'text'

    def _nest(self, by: int, *_: Any) -> None:
        self._depth += by
