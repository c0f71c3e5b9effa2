# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""State that a forward writes into its model: buffers, parameters, and numbers and tensors in plain attributes.

If the result of a forward depends on such state, it depends on the number of forwards before it, so on the number of
microbatches. Examples are the vectors of a spectral norm, a running mean and the counter of a warm-up. A cache or a
statistic for logs is harmless. :meth:`.Probe.judge_written_state` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from composer_tokacc.compat import num_writes, own_tensors
from composer_tokacc.random_state import kept_random_state

PERTURBATION = 0.1
"""Relative size of the noise that is added to a state."""
Namespace: TypeAlias = MutableMapping[str, Any]
"""The buffers, parameters or attributes of a module."""

LARGEST_COPY = 2**22
"""Larger tensors in plain attributes are not copied. FSDP1 keeps whole weights there."""
SMALLEST_STATE = 1e-2
"""Entries of a state near 0 get noise as if they were of this size."""


@dataclass(frozen=True, eq=False)
class State:
    """A tensor or a number of a module, ``container[key]``, as it was at one moment."""

    name: str
    container: Namespace
    key: str
    value: Tensor | float
    content: Tensor | float | None  # a copy of the value; None: it was not copied
    version: int | None  # number of writes into a tensor
    is_parameter: bool = False  # FSDP1 replaces parameters during a forward

    @classmethod
    def now(
        cls,
        name: str,
        container: Namespace,
        key: str,
        *,
        copies: bool = True,
        is_parameter: bool = False,
    ) -> State:
        """Returns the state as it is now, with a copy of a tensor's content if ``copies``."""
        value = container[key]
        content = value
        version = None
        if isinstance(value, Tensor):
            content = value.detach().clone() if copies else None
            # Tensors made in inference mode do not count their writes.
            if not value.is_inference():
                version = num_writes(value)
        return cls(name, container, key, value, content, version, is_parameter)

    def is_written(self) -> bool:
        """Returns whether the state was written after this moment."""
        current = self.container.get(self.key)
        is_same_object = current is self.value
        if not isinstance(current, Tensor) or not isinstance(self.value, Tensor):
            is_equal = type(current) is type(self.value) and bool(current == self.value)
            return not is_same_object and not is_equal  # the same NaN is not equal to itself
        has_versions = is_same_object and not current.is_inference()
        if has_versions and num_writes(current) != self.version:
            return True
        if not isinstance(self.content, Tensor):
            return not is_same_object and not self.is_parameter
        # `buffer.data.copy_(...)` writes without a new version, and a new tensor may be equal to the old one.
        return not _are_equal(current, self.content)


class StateSnapshot:
    """Several states of a model at one moment."""

    def __init__(self, states: Iterable[State]) -> None:
        self.states = list(states)

    @classmethod
    def of_states(cls, states: Iterable[State]) -> StateSnapshot:
        """Takes a new snapshot of the same states, with copies. Leaves out states that the module has deleted."""
        snapshot = []
        for state in states:
            if isinstance(state.container.get(state.key), (Tensor, int, float)):
                snapshot.append(State.now(state.name, state.container, state.key))
        return cls(snapshot)

    @classmethod
    def of_model(cls, model: Module) -> StateSnapshot:
        """Takes a snapshot of everything that a forward may write, see :func:`_states_of`."""
        return cls(_states_of(model))

    def written(self) -> list[State]:
        """Returns the states that were written after the snapshot, with their present values."""
        return StateSnapshot.of_states(state for state in self.states if state.is_written()).states

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all states back, except the content of tensors that were not copied."""
        for state in self.states:
            if state.is_parameter:
                continue
            # The old object comes back, with its old content.
            state.container[state.key] = state.value
            if not isinstance(state.value, Tensor) or not isinstance(state.content, Tensor):
                continue
            # Some tensors cannot be written, such as an expanded one. They still have their content.
            if not _are_equal(state.value, state.content):
                # Only in this mode can tensors be written that a forward has made in it.
                with torch.inference_mode():
                    state.value.copy_(state.content)

    def lend_copies(self) -> None:
        """Puts the copies in the place of the tensors, until :meth:`restore`. Then forwards write into the copies.

        A graph that needs such a tensor for its backward stays valid. It would not if a forward wrote into the tensor,
        even if the old content came back.
        """
        copies: dict[int, Tensor] = {}  # by the identity of the tensor: modules may share it
        lent = []
        for state in self.states:
            if isinstance(state.content, Tensor):
                state.container[state.key] = copies.setdefault(id(state.value), state.content)
                # Without a copy of the content, only the tensor itself comes back.
                state = replace(state, content=None)
            lent.append(state)
        self.states = lent

    @torch.no_grad()
    def perturb(self, states: Iterable[State]) -> None:
        """Changes some states: adds noise to floating point tensors, and gives others the value of a later forward.

        Noise also shows a dependence on a state that no longer moves, such as the converged vectors of a spectral norm.
        Other states get no noise, because they may be indices, and noise could move them out of range.
        """
        # Not the global generator, so that the random numbers of the run stay the same.
        generator = torch.Generator().manual_seed(0)
        for state in states:
            current = state.container[state.key]
            if isinstance(current, Tensor) and current.is_floating_point() and current.numel():
                # The entries of an expanded tensor share memory, so it cannot be written.
                if 0 in current.stride():
                    current = current.clone()
                    state.container[state.key] = current
                # A vector of zeros must move too.
                sizes = current.abs() + current.abs().mean() + SMALLEST_STATE
                noise = torch.randn(current.shape, generator=generator).to(current)
                with torch.inference_mode():
                    current.add_(PERTURBATION * sizes * noise)
            else:
                # A copy, because the next forward may write into it.
                written = state.content
                state.container[state.key] = written.clone() if isinstance(written, Tensor) else written


@contextmanager
def undisturbed(model: Module, *, keeps_state: bool = False) -> Iterator[StateSnapshot]:
    """Restores random numbers and state, so that a run is the same with and without the forwards in between.

    Yields the state before. ``keeps_state``: the model keeps the state that the forwards have written.
    """
    snapshot = StateSnapshot.of_model(model)
    try:
        with kept_random_state():
            yield snapshot
    finally:
        if not keeps_state:
            snapshot.restore()
        for module in model.modules():
            # FSDP keeps the weights of the root gathered after a forward without gradients, until a backward.
            if isinstance(module, FSDPModule):
                module.reshard()


def _can_be_compared(tensor: Tensor) -> bool:
    """Returns whether torch can copy a tensor of this kind, and compare it with another one."""
    is_special = tensor.is_meta or tensor.is_nested or tensor.is_quantized
    return tensor.layout is torch.strided and not is_special


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors have the same entries. NaN counts as equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _states_of(model: Module) -> Iterator[State]:
    """Yields each tensor and number that a forward of the model may write. Parameters are not copied."""
    for module_name, module in model.named_modules():
        prefix = f'{module_name}.' if module_name else ''
        parameters, buffers = own_tensors(module)
        containers = [parameters, buffers, vars(module)]
        if isinstance(module, torch.jit.ScriptModule):
            # Its attributes cannot be read. Its buffers are written, but never replaced.
            containers = [dict(module.named_buffers(recurse=False))]
        for container in containers:
            for key, value in container.items():
                if isinstance(value, Tensor):
                    # Ranks hold parts of a DTensor, and FSDP replaces it during a forward.
                    if isinstance(value, DTensor) or not _can_be_compared(value):
                        continue
                    # The number of writes tells of tensors that are not copied.
                    is_parameter = container is parameters
                    copies = value.numel() <= LARGEST_COPY if container is vars(module) else not is_parameter
                    yield State.now(prefix + key, container, key, copies=copies, is_parameter=is_parameter)
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield State.now(prefix + key, container, key)
