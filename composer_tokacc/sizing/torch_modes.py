# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Modes of torch in which a model runs with fake tensors: they have a size but take no memory.

:class:`RealInputs` computes with the real batch, so that a model can branch on its values. :class:`OnesForValues` lets
an optimizer read values. :class:`CudaAutocast` gives tensors the types that they have on a GPU. :class:`MemoryTracker`
counts their bytes, part by part.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from composer_tokacc.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    tree_iter,
    tree_map_only,
)
from composer_tokacc.model_structure import media_modules

aten: Any = torch.ops.aten
device_of_tensor: Any = torch.ops.prim.device
INDEXING_OPERATIONS = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
"""Operations whose second argument is the list of indices."""
LARGEST_REAL = 1 << 22
"""Float tensors with more numbers are made fake. A mask in floats has rows x width^2 numbers, and SDPA makes one for
each layer, so large masks must not take memory. Tensors of Gemma 4 must stay real up to 705,600 numbers: they say where
the patches of an image are pooled."""
TRACKED_PARTS = ('text', 'logits', 'vision', 'weights')
"""Parts into which :class:`MemoryTracker` divides the bytes. ``weights`` are the copies of parameters that autocast
makes."""


class SharedFakeMode(FakeTensorMode):
    """A mode of fake tensors. Copies of a module use the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakeMode:
        # peft deep-copies modules, and with their tensors it would copy the mode. Then torch would free the same memory
        # twice.
        return self


class RealInputs(TorchDispatchMode):
    """Computes real results of real tensors, and fake results if any tensor is fake.

    Vision-language models read their inputs: how many image tokens there are, how large the grid of each image is,
    which images are padding, whether a row is padded. ``FakeTensorMode`` would stop there, because it has no values.
    The batch is small, so it stays real, and so do results that depend only on it. Large float tensors among them
    (masks, cast pixels) are made fake. All results that depend on weights are fake, because weights are.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        num_fake = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if num_fake == 0:
            # The result depends on the batch alone, or on no tensor.
            input_storages = {storage_key(tensor) for tensor in tensors}
            fake_if_large = partial(self._fake_if_large, input_storages=input_storages)
            result = func(*args, **kwargs)
            return tree_map_only(torch.Tensor, fake_if_large, result)
        # Indexing with a mask gives one element for each True, and the fake mode does not know how many there are. So
        # a real mask is replaced by the positions at which it is True.
        if func in INDEXING_OPERATIONS:
            args = (args[0], _without_masks(args[1]), *args[2:])
        with self.fake_mode:
            if num_fake < len(tensors):  # seldom true; to map all arguments each time slows a trace by a tenth
                args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor of the same size. Its shape has plain numbers, not symbols."""
        if isinstance(tensor, FakeTensor):
            return tensor
        return self.fake_mode.from_tensor(tensor, static_shapes=True)

    def _fake_if_large(self, tensor: torch.Tensor, input_storages: set[int]) -> torch.Tensor:
        """Makes a result fake if it is a large float tensor. A view of an input stays real: it takes no new memory."""
        is_large = tensor.is_floating_point() and tensor.numel() > LARGEST_REAL
        if is_large and storage_key(tensor) not in input_storages:
            return self._fake(tensor)
        return tensor


def _without_masks(indices: Sequence[object]) -> list[object]:
    """Returns the indices. Each real mask among them is replaced by the positions at which it is True."""
    positions: list[object] = []
    for index in indices:
        is_fake = isinstance(index, FakeTensor)
        if isinstance(index, torch.Tensor) and not is_fake and index.dtype == torch.bool:
            positions.extend(index.nonzero().unbind(dim=1))
        else:
            positions.append(index)
    return positions


class OnesForValues(TorchDispatchMode):
    """Returns 1 if code reads the value of a fake tensor, as ``item()`` does.

    It is for the steps of optimizers such as Adafactor, which scale by norms that they read. Their memory does not
    depend on these values. It is not for models, which might take a wrong branch.
    """

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1
        return func(*args, **(kwargs or {}))


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on the CPU compute the same operations in float32 as autocast on a GPU.

    Autocast on the CPU computes some of them in the lower precision, so their results would have fewer bytes.
    """

    # The functions that transformers calls, of the list "CUDA Ops that can autocast to float32" in the documentation of
    # torch.amp.
    FLOAT32 = (
        F.layer_norm,
        F.group_norm,
        F.softmax,
        F.log_softmax,
        F.cross_entropy,
        F.nll_loss,
        torch.softmax,
        torch.log_softmax,
        torch.layer_norm,
        torch.rsqrt,
        torch.exp,
        torch.log,
        torch.pow,
        torch.cumsum,
        torch.sum,
        torch.Tensor.pow,
        torch.Tensor.cumsum,
        torch.Tensor.sum,
    )

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FLOAT32 and torch.is_autocast_enabled('cpu'):
            args, kwargs = tree_map_only(torch.Tensor, _upcast, (args, kwargs))
            with torch.autocast('cpu', enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts tensors in half precision to float32. Leaves others as they are."""
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_half else tensor


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensors by part, from the first operation that returns a tensor until its memory is freed.

    torch's own ``MemTracker`` separates activations and gradients, but not text, logits and vision encoder. The tests
    compare the totals of both.

    Copies of parameters that autocast makes count as weights. Everything else that is made in the forward pass of an
    encoder counts as vision. A tensor of two or three dimensions whose last one is `vocab_size` counts as logits. All
    other tensors count as text, also gradients in an encoder. Parameters and buffers do not count.

    Attributes:
        current: Bytes by part now.
        peak: Bytes by part when their sum was highest, since the last :meth:`restart_peak`.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.current: dict[str, int] = dict.fromkeys(TRACKED_PARTS, 0)
        self.peak = dict(self.current)
        self._num_running_encoders = 0  # may be several, because vision modules are nested
        # By the key of each storage that counts. A finalizer is called when its storage is freed.
        self._finalizers: dict[int, weakref.finalize] = {}
        self.note_parameters(model)
        for module in media_modules(model):
            module.register_forward_pre_hook(self._enter_encoder)
            module.register_forward_hook(self._leave_encoder)

    def note_parameters(self, model: nn.Module) -> None:
        """Notes the memory of all parameters and buffers. Must be called again when the model has new ones."""
        parameters = [*model.parameters(), *model.buffers()]
        self._parameters = {storage_key(tensor) for tensor in parameters}

    def restart_peak(self) -> None:
        """Forgets the earlier peak: sets it to the present bytes."""
        self.peak = dict(self.current)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_of_tensor.default:
            # More than half of all calls ask for the device. It is answered here, to skip the other modes.
            return args[0].device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:  # others have no storage
                self._count(tensor, func, args)
        if sum(self.current.values()) > sum(self.peak.values()):
            self.peak = dict(self.current)
        return result

    def _count(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        """Counts the bytes of a new tensor until they are freed, unless it is a parameter or counts already."""
        key = storage_key(tensor)
        if key in self._finalizers or key in self._parameters:
            return
        part = self._part(tensor, func, args)
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self.current[part] += num_bytes
        self._finalizers[key] = weakref.finalize(storage, self._forget, key, part, num_bytes)

    def _forget(self, key: int, part: str, num_bytes: int) -> None:
        """Finalizer of a storage: its bytes do not count any more."""
        self._finalizers.pop(key, None)
        self.current[part] -= num_bytes

    def _part(self, tensor: torch.Tensor, func: Any, args: Any) -> str:
        """Returns the part of a tensor that an operation has made."""
        if func is aten._to_copy.default and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._num_running_encoders:
            return 'vision'
        # Attention may be `vocab_size` wide, but it has four dimensions.
        if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size:
            return 'logits'
        return 'text'

    def _enter_encoder(self, *_: object) -> None:
        self._num_running_encoders += 1

    def _leave_encoder(self, *_: object) -> None:
        self._num_running_encoders -= 1
