# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Notices what changes parameters, gradients and buffers while a step accumulates its gradient.

Weights of tokens are measured at the logits. They do not show what happens to the gradient later. A loop that calls
``zero_grad`` after each microbatch has equal weights at the logits, and loses all microbatches except the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from composer_tokacc.checks.logits import logits_of
from composer_tokacc.compat import inner_model, when_backward_ends

MOST_DIFFERENCE = 1e-5
"""Largest relative difference of the logits of two equal forwards that is taken for round-off. The kinds of state that
were tried (spectral norm, running mean, counters) differ by 1e-3 and more."""

Versions = dict[str, tuple[int, int]]
Checksum = tuple[str, str]


class StepWatch:
    """Lists faults of the gradient of one optimizer step; a context around the step.

    Sharded parameters of FSDP are left out: their gradients are moved and reduced between two backwards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.faults: list[str] = []
        """Sentences, of this rank. Complete when the context ends."""
        self._model = inner_model(model)
        self._parameters = _whole_parameters(model)
        self._handles: list[RemovableHandle] = []
        self._gradient_nodes: list[torch.autograd.graph.Node] = []
        self._num_backwards = 0
        self._in_backward = False
        self._has_stepped = False
        self._weights_at_first: dict[str, Checksum] = {}
        self._gradients_at_last: dict[str, Checksum] = {}
        self._buffers_before: Versions = {}
        self._repeats_forward = False

    def __enter__(self) -> StepWatch:
        for parameter in self._parameters.values():
            # Not a hook of the tensor: `TokenAccumulation` refuses hooks that may change a gradient.
            node = get_gradient_edge(parameter).node
            self._gradient_nodes.append(node)  # kept alive: the graph holds it only while it is used
            self._handles.append(node.register_prehook(self._on_gradient))
        self._handles += [
            register_optimizer_step_pre_hook(self._on_optimizer_step),
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, gradients: Any) -> None:
        """Compares with the state after the last backward, when the first gradient of a backward arrives."""
        if self._in_backward:
            return
        self._in_backward = True
        self._num_backwards += 1
        when_backward_ends(self._on_backward_end)
        gradients_now = self._gradient_checksums()
        weights_now = _checksums(self._parameters)
        if self._num_backwards == 1:
            self._weights_at_first = weights_now
            self._gradients_at_last = dict.fromkeys(gradients_now, ZERO)
        changed_weights = _differences(self._weights_at_first, weights_now)
        changed_gradients = _differences(self._gradients_at_last, gradients_now)
        between = f'between backward {self._num_backwards - 1} and {self._num_backwards}'
        if self._num_backwards == 1:
            between = 'before the first backward'
        elif self._has_stepped:
            self.faults.append(f'An optimizer made a step {between}. Step behind the last microbatch.')
            changed_weights = changed_gradients = []
        if changed_weights:
            self.faults.append(f'Parameters changed {between}: {_listed(changed_weights)}.')
        if changed_gradients and self._num_backwards == 1:
            self.faults.append(f'Gradients were not 0 {between}: {_listed(changed_gradients)}. Call `zero_grad` first.')
        elif changed_gradients:
            self.faults.append(
                f'Gradients changed {between}: {_listed(changed_gradients)}. Call `zero_grad`, clip and unscale once a '
                'step, not in every microbatch.'
            )
        # Each change is listed once.
        self._weights_at_first = weights_now
        self._has_stepped = False

    def _on_backward_end(self) -> None:
        self._gradients_at_last = self._gradient_checksums()
        self._in_backward = False

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group['params']}
        names = [name for name, parameter in self._parameters.items() if id(parameter) in stepped]
        if not names:
            return
        self._has_stepped = True
        if self._num_backwards == 0 or self._in_backward:
            return
        gradients_now = self._gradient_checksums()
        has_gradient = any(self._gradients_at_last[name] != ZERO for name in names)
        if has_gradient and all(gradients_now[name] == ZERO for name in names):
            self.faults.append('Gradients were set to 0 between the last backward and the step of the optimizer.')

    def _gradient_checksums(self) -> dict[str, Checksum]:
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        return dict.fromkeys(gradients, ZERO) | _checksums(present)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not self._repeats_forward:
            self._buffers_before = _versions(module)

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """If the forward wrote into buffers, repeats it to see whether they change the logits."""
        if self._repeats_forward or not torch.is_grad_enabled():
            return
        written = _written(self._buffers_before, _versions(module))
        if not written or logits_of(outputs) is None:
            return
        self._repeats_forward = True  # once a step is enough
        with torch.no_grad(), copied_buffers(module):
            logits = []
            for _ in range(2):
                with same_random_numbers():
                    logits.append(logits_of(module(*args, **kwargs)))
        difference = relative_difference(*logits)
        if not difference <= MOST_DIFFERENCE:
            self.faults.append(
                f'A forward writes {_listed(written)}, and the next one depends on it: the logits of the same rows '
                f'differ by {difference:.1e}. Freeze this state, or update it once a step.'
            )


class BufferWatch:
    """Records which buffers forwards write, in all modules that run inside of this context."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        """Buffers by the class of their module: names in the model are not known here."""
        self._before: dict[int, Versions] = {}
        self._handles: Sequence[RemovableHandle] = ()

    def __enter__(self) -> BufferWatch:
        self._handles = (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # A compiled model would have the hooks in its graph.
        if module._buffers and not torch.compiler.is_compiling():
            self._before[id(module)] = _versions(module, recurse=False)

    def _after_forward(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if not module._buffers or torch.compiler.is_compiling():
            return
        before = self._before.pop(id(module), {})
        for name in _written(before, _versions(module, recurse=False)):
            self.written.add(f'{type(module).__name__}.{name}')


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Draws the same random numbers each time: two forwards then have the same dropout."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


def relative_difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Returns the norm of the difference over the norm of the first."""
    if first is None or second is None or first.shape != second.shape:
        return float('nan')
    first = first.detach().double()
    return float((second.detach().double() - first).norm() / first.norm().clamp(min=torch.finfo(torch.float32).tiny))


ZERO: Checksum = ((0.0).hex(), (0.0).hex())


def _whole_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the trained parameters whose gradient one rank holds, by name."""
    if any(type(module).__name__ == 'FullyShardedDataParallel' for module in model.modules()):
        return {}
    parameters = {}
    for name, parameter in inner_model(model).named_parameters():
        is_sharded = isinstance(parameter, torch.distributed.tensor.DTensor)
        if parameter.requires_grad and not is_sharded:
            parameters[name] = parameter
    return parameters


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, Checksum]:
    """Returns two sums of each tensor, because copies of all gradients would need too much memory."""
    checksums = {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        sums = (values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64))
        # As text, because NaN is not equal to itself. `+ 0.0` turns -0.0 into 0.0.
        checksums[name] = tuple((float(value) + 0.0).hex() for value in sums)
    return checksums


def _differences(before: Mapping[str, Checksum], now: Mapping[str, Checksum]) -> list[str]:
    return [name for name, checksum in now.items() if checksum != before[name]]


def _listed(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of the others."""
    others = f' and {len(names) - 3} others' if len(names) > 3 else ''
    return ', '.join(f'`{name}`' for name in names[:3]) + others


def _versions(module: torch.nn.Module, *, recurse: bool = True) -> Versions:
    """Returns a number for each buffer that a write changes, and the identity of the tensor."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers(recurse=recurse)}


def _written(before: Versions, now: Versions) -> list[str]:
    return [name for name, version in now.items() if before.get(name, version) != version]


@contextmanager
def copied_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Lets forwards write into copies of the buffers."""
    originals = [(module, dict(module._buffers)) for module in model.modules()]
    for module, buffers in originals:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)
