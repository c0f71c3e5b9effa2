# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Private names of the hosts: a release that changes one breaks this module, and no other.

Each is read in torch 2.7, transformers 5.23 and mosaicml 0.32; numba's is in ``planning/compiled.py``, without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

# Memory of a model whose weights are nowhere: torch.compile's tensors without data.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

# The common bases of layers of one, two and three dimensions, and of those that synchronise over ranks.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.torch_version import TorchVersion

# What sees every operation; public extensions of torch subclass it all the same.
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors inside of nested arguments; `torch.utils.pytree` came after 2.7.
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader

__all__ = ['BatchNorm', 'DataDependentOutputException', 'Dropout', 'FakeTensor', 'FakeTensorMode', 'TorchDispatchMode',
           'detect_fake_mode', 'tree_flatten', 'tree_iter', 'tree_map_only', 'tree_unflatten']  # fmt: skip

_NEEDED_BY_COMPOSER = {
    # What mosaicml 0.32 takes from torch when it is imported, and the public module that has it, if any.
    'torch._dynamo OptimizedModule': '',
    'torch.amp.grad_scaler _refresh_per_optimizer_state': '',
    'torch.distributed._shard.sharded_tensor ShardedTensor': '',
    'torch.distributed._tensor DTensor DeviceMesh': 'torch.distributed.tensor',
    'torch.distributed._tensor.device_mesh DeviceMesh init_device_mesh': 'torch.distributed.device_mesh',
    'torch.distributed.algorithms._checkpoint.checkpoint_wrapper CheckpointImpl apply_activation_checkpointing '
    'checkpoint_wrapper offload_wrapper': '',
    'torch.distributed.fsdp._common_utils clean_tensor_name': '',
    'torch.distributed.fsdp._runtime_utils _post_backward_final_callback': '',
    'torch.nn.common_types _size_2_t': '',
    'torch.nn.modules.loss _Loss': '',
    'torch.nn.modules.utils _pair': '',
    'torch.profiler._memory_profiler _CATEGORY_TO_COLORS _CATEGORY_TO_INDEX MemoryProfileTimeline': '',
}


def put_back_torch_names() -> None:
    """Lets Composer be imported with a torch that has dropped private names which it takes then; call it before.

    A name that has no public place is put in as a class that raises when it is used: FSDP1's, a profiler's.
    """
    for needed, public in _NEEDED_BY_COMPOSER.items():
        module, *names = needed.split()
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            found = sys.modules[module] = ModuleType(module)
        for name in names:
            if not hasattr(found, name):
                there = getattr(importlib.import_module(public), name) if public else _gone(f'{module}.{name}')
                setattr(found, name, there)


def _gone(name: str) -> type:
    def use(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f'This torch has no {name}, which Composer needs here: install an older torch.')

    return type(name.rpartition('.')[-1], (), {'__new__': use})


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside of DDP and of torch.compile, which keeps it as ``_orig_mod``."""
    while [name for name, _ in model.named_children()] in (['module'], ['_orig_mod']):
        [model] = model.children()
    return model


def is_compiled(model: torch.nn.Module) -> bool:
    """Returns whether torch.compile has compiled a model or a part of it: as a wrapper, in place, or its forward."""
    for module in model.modules():
        forward = vars(module).get('forward')  # what the Trainer's `compile_config` replaces
        is_wrapped = hasattr(module, '_orig_mod') or getattr(module, '_compiled_call_impl', None) is not None
        if is_wrapped or hasattr(forward, '_torchdynamo_orig_callable'):
            return True
    return False


def is_reduced(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Returns whether DDP has reduced every gradient; it asks itself only at the start of its next forward."""
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(function: Callable[[], None]) -> None:
    """Calls a function at the end of the backward that runs now, after what others have queued: DDP's reduction.

    Callbacks run in the order in which they were queued. DDP queues its own before the first one runs.
    """
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    queue_callback(lambda: queue_callback(function))


def num_writes(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was written in place, which autograd counts."""
    return tensor._version


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the mappings in which a module keeps its own parameters and its own buffers, to write into them."""
    attributes = vars(module)  # some wrappers have neither
    return attributes.get('_parameters', {}), attributes.get('_buffers', {})


def buffer_versions(module: torch.nn.Module, *, recurse: bool = True) -> dict[str, tuple[int, int]]:
    """Returns for each buffer its identity, and a number that changes with every write."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers(recurse=recurse)}


def state_of_gradient(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns what changes when a backward reaches a parameter: it makes a gradient, or writes into the one there."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """Returns the hooks that change a parameter's gradient; there is no public list of them. Those of FSDP left out."""
    return [hook for hook in (parameter._backward_hooks or {}).values() if not _is_of_torch(hook)]


def steps_after_gradients(parameter: torch.Tensor) -> list[Any]:
    """Returns what runs as soon as a parameter has its gradient, such as optimizers within the backward."""
    hooks = getattr(parameter, '_post_accumulate_grad_hooks', None) or {}
    return [hook for hook in hooks.values() if not _is_of_torch(hook)]


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, '__module__', '') or getattr(hook, 'func', hook).__module__).startswith('torch.')


def new_shared_storage(num_bytes: int) -> torch.UntypedStorage:
    """Returns memory that other processes see, as ``default_collate`` takes it in a worker: it is sent uncopied."""
    return torch.UntypedStorage._new_shared(num_bytes)


@contextmanager
def separate_iterator(loader: DataLoader) -> Iterator[None]:
    """Lets ``iter(loader)`` start workers of its own; a DataLoader with persistent workers keeps its one iterator."""
    kept = loader._iterator
    loader._iterator = None
    try:
        yield
    finally:
        loader._iterator = kept


def storage_key(tensor: torch.Tensor) -> int:
    """Returns the identity of the memory behind a tensor, while one of its views lives; fake ones have no address."""
    return tensor.untyped_storage()._cdata


def let_fake_weights_be_swapped() -> AbstractContextManager[Any]:
    """Hides weak references: the newest ``Module.to`` swaps fake weights, and refuses those in the mode's own cache."""
    return patch('weakref.getweakrefs', lambda _: [])


def attention_of(config: Any) -> str:
    """Returns the attention implementation that Transformers chose; the public name only sets it."""
    return str(config._attn_implementation)


def composer_state_types() -> list[Any]:
    """Returns the types in Composer's checkpoints that torch's safe loading does not know: random states, times."""
    rebuild = np.zeros(1).__reduce__()[0]  # a private name, in numpy 2.x another one than in 1.x
    return [rebuild, np.ndarray, np.dtype, type(np.dtype('uint32')), TorchVersion, timedelta]


def skip_embedding_resize(model_class: type) -> type:
    """Switches off Composer's check of embeddings, which fails for configs with ``vocab_size`` in their text part."""
    model_class._check_tokenizer_and_maybe_resize_embeddings = lambda self, allow_embedding_resizing: None
    return model_class
