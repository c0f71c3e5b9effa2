# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Uses of private names, and of a few details, of the hosts: torch, Transformers, accelerate and Composer.

If a release of a host changes a private name, this is the only module that breaks. The names all exist in the
releases that the tests run with (docs/hosts.md). The only private name of numba is in ``planning/compiled.py``, which
must not load torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

# Tensors of torch.compile that have a shape but no data: they trace a model that does not fit into memory.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

# The common base classes of the layers for one, two and three dimensions. SyncBatchNorm has the same base.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.torch_version import TorchVersion

# A mode that is called for every operation. Private, although torch documents it for extensions.
from torch.utils._python_dispatch import TorchDispatchMode

# Nested lists and dicts of tensors. The public `torch.utils.pytree` is newer than torch 2.7.
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.data import DataLoader

if TYPE_CHECKING:  # code that only reads data imports this module, and FSDP would make its import slower
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

__all__ = [
    'BatchNorm',
    'DataDependentOutputException',
    'Dropout',
    'FakeTensor',
    'FakeTensorMode',
    'TorchDispatchMode',
    'tree_iter',
    'tree_map_only',
]


def is_encoder_decoder(config: Any) -> bool:
    """Returns whether a model has a decoder behind an encoder, so that labels are not at positions of ``input_ids``.

    A model with images may say this only in the config of its text (InstructBLIP with T5).
    """
    configs = (config, getattr(config, 'text_config', None))
    return any(getattr(each_config, 'is_encoder_decoder', False) for each_config in configs)


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model without the wrappers of DataParallel, DDP and torch.compile."""
    while True:
        # Found by class, not by its child `module`: a user's model may have a child with this name.
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        # The wrapper of torch.compile, by its child. Not `hasattr`, which is true for a PEFT model around a wrapper.
        elif '_orig_mod' in dict(model.named_children()):
            model = model.get_submodule('_orig_mod')
        else:
            return model


def name_in_state_dict(parameter_name: str) -> str:
    """Returns the name of a parameter in a state dict: without the parts that FSDP1 and checkpoint wrappers add."""
    return parameter_name.replace('_fsdp_wrapped_module.', '').replace('_checkpoint_wrapped_module.', '')


def is_compiled(model: torch.nn.Module) -> bool:
    """Returns whether torch.compile has compiled a model or a part of it."""
    for module in model.modules():
        is_wrapper = hasattr(module, '_orig_mod')  # also a PEFT model around a wrapper
        is_compiled_in_place = getattr(module, '_compiled_call_impl', None) is not None
        forward = vars(module).get('forward')  # replaced by the Trainer's `compile_config`
        has_compiled_forward = hasattr(forward, '_torchdynamo_orig_callable')
        if is_wrapper or is_compiled_in_place or has_compiled_forward:
            return True
    return False


def has_finished_reduction(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Returns whether DDP has no unfinished reduction of gradients: it has finished the last one, or begun none.

    A reduction begins when a backward reaches the first parameter. DDP itself checks only at the start of its next
    forward that it has ended.
    """
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def num_reduced_parameters(model: torch.nn.parallel.DistributedDataParallel) -> int:
    """Returns the number of parameters whose gradients DDP reduces."""
    return model._get_ddp_logging_data()['num_parameter_tensors']


def reduced_parameters(model: torch.nn.parallel.DistributedDataParallel) -> set[torch.nn.Parameter] | None:
    """Returns the parameters whose gradients DDP reduces: those that required a gradient when DDP was made.

    Returns None if DDP does not tell. Lets DDP make buckets of zeros, as for
    :class:`torch.distributed.algorithms.Join`, because only such buckets list their parameters. For a moment they take
    as much memory as the gradients.
    """
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # memory is short, or a gradient is sparse
        return None
    parameters = set()
    for bucket in buckets:
        parameters.update(bucket.parameters())
    return parameters


def reset_reduction(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Makes DDP ready for the next step, if the last one has ended with an error. Call it on all ranks."""
    model.reducer._reset_state()
    model.require_forward_param_sync = True  # the next forward broadcasts buffers; after an error ranks may disagree


def mixed_precision_of(unit: FSDPModule) -> MixedPrecisionPolicy:
    """Returns the types in which a unit of FSDP2 computes, and reduces gradients."""
    return unit._get_fsdp_state()._mp_policy


DDP_SINK = '_DDPSinkBackward'
"""Name of the node of autograd through which DDP passes the outputs of the model unchanged: its sink.

DDP has one if it is made with ``find_unused_parameters`` or ``static_graph``.
"""


def edge_before_sink(sink: Any, index: int) -> tuple[Any, int]:
    """Returns where an output of DDP's sink comes from: a node of the graph, and the number of the node's output.

    Args:
        sink: The sink of DDP.
        index: The number of the sink's output. The output must have a gradient.
    """
    # `index` counts all outputs of the model, also those that are not tensors. Only an output with a gradient has an
    # edge to a node. For example, if output 0 has a gradient and output 1 has none, output 2 has edge 1.
    # The sink passes on its inputs as its outputs. Input 0 is DDP itself, so input 1 is output 0.
    has_gradient = sink.needs_input_grad[1:]  # by output
    num_earlier_edges = sum(has_gradient[:index])
    edges = [(node, number) for node, number in sink.next_functions if node is not None]
    return edges[num_earlier_edges]


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(function: Callable[[], None]) -> None:
    """Calls a function at the end of the backward that runs now, after DDP has reduced the gradients.

    Autograd runs callbacks in the order in which they were queued. DDP queues its own during the backward, perhaps
    later than this call. So the function is queued again by a callback, behind everything else.
    """
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    queue_callback(lambda: queue_callback(function))


def num_writes(tensor: torch.Tensor) -> int:
    """Returns the number of writes into a tensor, which autograd counts; 0 if it was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def uses_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer uses the loss of a closure, or calls it several times.

    Most optimizers take a closure only for the interface, and it is optional. It is taken as used if it is required
    (LBFGS), or if the optimizer has the mark by which Composer knows it (SAM).
    """
    closure = inspect.signature(optimizer.step).parameters.get('closure')
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    return is_required or getattr(optimizer, '_step_supports_amp_closure', False)


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the dicts in which a module itself keeps its parameters and its buffers, so that they can be replaced."""
    attributes = vars(module)  # not `module._buffers`, because some wrappers have no such attribute
    return attributes.get('_parameters', {}), attributes.get('_buffers', {})


def state_of_gradient(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns a pair of numbers that changes if the gradient of a parameter is replaced or written, even by adding 0.

    Very rarely, a new gradient has the pair of one that was freed.
    """
    gradient = parameter.grad
    if gradient is None:
        return 0, 0
    if isinstance(gradient, DTensor):
        gradient = gradient._local_tensor  # FSDP2 writes into this tensor, and the version of the DTensor stays
    return id(gradient), gradient._version


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """Returns the hooks that get the gradient of a parameter before it is stored, and may return another one.

    Hooks of torch itself, such as FSDP's, are left out.
    """
    return _hooks_not_of_torch(parameter._backward_hooks)


def hooks_after_gradients(parameter: torch.Tensor) -> list[Any]:
    """Returns the hooks that run as soon as the gradient of a parameter is stored, except those of torch itself.

    An example is an optimizer that makes its step within the backward.
    """
    return _hooks_not_of_torch(getattr(parameter, '_post_accumulate_grad_hooks', None))


def hook_numbers(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Returns the numbers of all hooks on the gradients of parameters. They change if a hook is added or removed.

    torch gives each new hook a new number, which is its key in these dicts.
    """
    numbers: list[int] = []
    for parameter in parameters:
        hooks = parameter._backward_hooks or {}
        hooks_afterwards = getattr(parameter, '_post_accumulate_grad_hooks', None) or {}
        numbers.extend(hooks.keys())
        numbers.extend(hooks_afterwards.keys())
    return numbers


def _hooks_not_of_torch(hooks: dict[int, Any] | None) -> list[Any]:
    """Returns the hooks that torch has not registered itself."""
    other_hooks = []
    for hook in (hooks or {}).values():
        module_name = getattr(hook, '__module__', None) or ''  # None for functions in C
        if not module_name.startswith('torch.'):
            other_hooks.append(hook)
    return other_hooks


def new_shared_storage(num_bytes: int) -> torch.UntypedStorage:
    """Returns memory that can be sent to other processes without a copy, as ``default_collate`` uses it in workers."""
    return torch.UntypedStorage._new_shared(num_bytes)


@contextmanager
def separate_iterator(loader: DataLoader) -> Iterator[None]:
    """Lets ``iter(loader)`` make a second iterator, with its own workers, inside of the context.

    A DataLoader with persistent workers would restart the iterator that it has.
    """
    kept_iterator = loader._iterator
    loader._iterator = None
    try:
        yield
    finally:
        loader._iterator = kept_iterator


def keep_from_accelerate(loader: DataLoader) -> None:
    """Makes ``prepare`` of accelerate return the loader as it is. Otherwise it divides the batches of a rank again."""
    loader._is_accelerate_prepared = True  # pyright: ignore[reportAttributeAccessIssue]
    # `join_uneven_inputs` of accelerate reads and overrides this attribute, so it must exist. Its value has no effect.
    loader.batch_sampler.even_batches = True  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number for the memory of a tensor, the same for all its views. Unique while the memory exists.

    The address could be used instead, but fake tensors have none.
    """
    return tensor.untyped_storage()._cdata


def let_fake_weights_be_swapped() -> AbstractContextManager[Any]:
    """Hides weak references to fake weights inside of the context.

    ``Module.to`` of releases after torch 2.7 swaps the data of fake weights. It refuses that if a weak reference to a
    weight exists, and the cache of the fake mode holds such references.
    """
    return patch('weakref.getweakrefs', lambda _: [])


def attention_of(config: Any) -> str:
    """Returns the attention implementation that Transformers chose. No public attribute tells it."""
    return str(config._attn_implementation)


def composer_state_types() -> list[Any]:
    """Returns the types that ``torch.load(weights_only=True)`` must be allowed to build for checkpoints of Composer.

    These checkpoints hold random states of numpy, times, and the version of torch.
    """
    rebuild_array = np.zeros(1).__reduce__()[0]  # private, with different names in numpy 1 and 2
    return [rebuild_array, np.ndarray, np.dtype, type(np.dtype('uint32')), TorchVersion, timedelta]


def read_sharded(path: Path, state: dict[str, Any]) -> None:
    """Reads a sharded checkpoint into ``state``: replaces the values of the keys that both have.

    Does not wait for other ranks, because rank 0 looks for a checkpoint alone. The public ``load`` waits for them in
    torch 2.6, where it has no argument ``no_dist``.
    """
    # Imported here, because code that only reads data imports this module.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    planner = DefaultLoadPlanner(allow_partial_load=True)
    _load_state_dict(state, FileSystemReader(path), no_dist=True, planner=planner)


def skip_embedding_resize(model_class: type) -> type:
    """Switches off the method by which Composer checks and resizes the embedding. Changes the class and returns it.

    The check fails if only the text part of a config has ``vocab_size``.
    """
    model_class._check_tokenizer_and_maybe_resize_embeddings = lambda self, allow_embedding_resizing: None
    return model_class
