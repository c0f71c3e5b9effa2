# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Modes of torch under which a model runs without memory, its control flow as on real data, its types as on a GPU."""

from __future__ import annotations

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
    tree_map_only,
    tree_unflatten,
)

aten: Any = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
LARGEST_REAL = 1 << 22
"""Numbers of a float tensor that stays real: a mask in floats is rows x width^2 of them, and SDPA makes one a layer.
Gemma 4 looks at 705,600 an image, which say where its patches are pooled."""


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
