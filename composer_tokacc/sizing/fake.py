# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs a model of any size without its memory: weights and activations are fake, what comes from the data is real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

__all__ = ['CudaAutocast', 'RealInputs', 'build_fake', 'cast_model', 'storage_key']

aten: Any = torch.ops.aten
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
# A mask in floats is rows x width^2 values, and SDPA makes one a layer.
_LARGEST_REAL = 1 << 16


class RealInputs(TorchDispatchMode):
    """Computes for real what no weight enters; everything else is a fake tensor.

    Vision-language models look at their inputs: how many image tokens there are, how large each image's grid is, which
    images are padding, whether any row is padded. ``FakeTensorMode`` alone stops there. A batch is small, so it stays
    real, and so does what follows from it alone; only large floats that do (masks, cast pixels) are made fake.

    Args:
        fake_mode: The mode that made the weights.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if not any(isinstance(value, FakeTensor) for value in tensors):
            own = {storage_key(tensor) for tensor in tensors}
            return tree_map_only(torch.Tensor, lambda made: self._thin(made, own), func(*args, **(kwargs or {})))
        if func in _INDEXING:
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
        is_new = storage_key(tensor) not in inputs
        large = tensor.is_floating_point() and tensor.numel() > _LARGEST_REAL
        return self._fake(tensor) if large and is_new else tensor


def _by_position(indices: Any) -> list[Any]:
    """Real boolean indices as positions: the size of the result is then known."""
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            positions.extend(index.nonzero().unbind(dim=1))
        else:
            positions.append(index)
    return positions


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on the CPU compute in float32 what autocast on a GPU does, since its outputs are larger then.

    The list is that of ``torch/amp`` ("CUDA ops that autocast to float32"), as far as transformers use it.
    """

    FLOAT32 = (
        nn.functional.layer_norm,
        nn.functional.group_norm,
        nn.functional.softmax,
        nn.functional.log_softmax,
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
        torch.softmax,
        torch.log_softmax,
        torch.layer_norm,
        torch.pow,
        torch.Tensor.pow,
        torch.rsqrt,
        torch.exp,
        torch.log,
        torch.cumsum,
        torch.Tensor.cumsum,
        torch.sum,
        torch.Tensor.sum,
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


def build_fake(build: Callable[[], nn.Module]) -> tuple[nn.Module, FakeTensorMode]:
    """Builds a model whose weights take no memory.

    Args:
        build: Makes the model on the CPU, as for training: ``lambda: LlamaForCausalLM(config)``.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return build(), mode


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts a model as ``model.to(dtype)`` does, real or fake.

    Newer versions of torch swap the tensors of fake parameters in ``nn.Module.to``, and fail where anything else refers
    to them. Here the module gets new parameters, so call it before an optimizer holds the old ones.
    """
    cast_of: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if id(tensor) not in cast_of:
                converted = tensor.detach().to(dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                cast_of[id(tensor)] = nn.Parameter(converted, tensor.requires_grad) if is_weight else converted
            setattr(module, name, cast_of[id(tensor)])


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor, the same for all its views; valid while one of them lives."""
    return tensor.untyped_storage()._cdata
