# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""State that a forward writes into its model: buffers, parameters, and plain attributes that are numbers or tensors.

If the result of a forward depends on such state, it depends on the number of forwards before it, so on the number of
microbatches. Examples are the vectors of a spectral norm, a running mean and the counter of a warm-up. A cache or a
statistic for logs is harmless. :meth:`.Probe.judge_written_state` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from composer_tokacc.compat import num_writes, own_tensors
from composer_tokacc.model_structure import shard_again
from composer_tokacc.random_state import kept_random_state

LARGEST_COPY = 2**22
"""Plain attributes and buffers of integers are not copied if they have more entries, because they may be weights. FSDP1
keeps whole weights in plain attributes, GPTQ and AWQ keep theirs in buffers of integers."""
MAX_SAMPLED_ENTRIES = 2**14
"""Most entries of a parameter that are copied. Copies of all weights would take too much memory."""
PERTURBATION = 0.1
"""Size of the noise that :func:`perturb` adds to an entry, relative to the size of the entry plus the mean size."""
ADDED_SIZE = 1e-2
"""Added to the size of each entry before the noise is computed, so that a state of zeros gets noise, too."""

Namespace: TypeAlias = MutableMapping[str, Any]
"""The buffers, parameters or attributes of a module, by name."""


@dataclass(frozen=True, eq=False)
class State:
    """A tensor or a number of a module, ``container[key]``, as it was at one moment."""

    name: str  # its name in the model
    container: Namespace
    key: str
    value: Tensor | float  # the object itself. If it is a tensor, a forward may write into it
    content: Tensor | float | None  # a copy of the value, or of a part of its entries; None: it was not copied
    version: int | None  # number of writes into the tensor; None: it is a number
    # Whether the content is only some of the entries, see _sample_of(), so that it cannot be put back.
    is_sampled: bool = False

    @classmethod
    def now(
        cls,
        name: str,
        container: Namespace,
        key: str,
        *,
        copies: bool = True,
        is_sampled: bool = False,
    ) -> State:
        """Returns the state as it is now.

        If ``is_sampled``, it copies some entries of a tensor; otherwise, if ``copies``, all of them. If it copies
        nothing, a write is noticed only if it replaces the tensor, or adds to the number of writes.
        """
        value = container[key]
        content = value
        version = None
        if isinstance(value, Tensor):
            content = None
            if is_sampled:
                content = _sample_of(value)
            elif copies:
                content = value.detach().clone()
            version = num_writes(value)
        return cls(name, container, key, value, content, version, is_sampled)

    def is_written(self) -> bool:
        """Returns whether the state was written after this moment."""
        current = self.container.get(self.key)
        is_replaced = current is not self.value
        if not isinstance(current, Tensor) or not isinstance(self.value, Tensor):
            # The state is or was a number, or it is gone.
            if not is_replaced:
                return False  # not compared, because NaN is not equal to itself
            return type(current) is not type(self.value) or bool(current != self.value)
        was_written_into = not is_replaced and num_writes(current) != self.version
        if not isinstance(self.content, Tensor):
            # The tensor was too large for a copy.
            return is_replaced or was_written_into
        if self.is_sampled:
            # A parameter that was replaced is not compared: FSDP1 replaces parameters during a forward. A write alone
            # is not enough: parametrizations of torch write a parameter into itself (PEFT adapts experts in this way).
            return was_written_into and not _are_equal(_sample_of(current), self.content)
        # Without a counted write the entries decide: torch does not count `buffer.data.copy_(...)`, and a tensor that
        # is replaced by an equal one has not changed.
        return was_written_into or not _are_equal(current, self.content)


@dataclass(frozen=True)
class StateSnapshot:
    """Several states of a model at one moment."""

    states: list[State]

    @classmethod
    def of_states(cls, states: Iterable[State]) -> StateSnapshot:
        """Takes a snapshot of the present values of some states.

        Leaves out states that are gone: deleted, or replaced by something that is no number or tensor, such as None.

        All entries of a state are copied, even of a parameter, so :meth:`restore` puts it back.
        """
        snapshot = []
        for state in states:
            if isinstance(state.container.get(state.key), (Tensor, int, float)):
                snapshot.append(State.now(state.name, state.container, state.key))
        return cls(snapshot)

    @classmethod
    def of_model(cls, model: Module, *, watches_parameters: bool = True) -> StateSnapshot:
        """Takes a snapshot of the state of a model. Of parameters only some entries are copied.

        Leaves out tensors that :func:`_can_be_compared` refuses. Without ``watches_parameters`` leaves out parameters.
        """
        return cls(list(_states_of(model, watches_parameters=watches_parameters)))

    def written(self) -> list[State]:
        """Returns the states that were written after the snapshot, with copies of their present values."""
        written = [state for state in self.states if state.is_written()]
        return StateSnapshot.of_states(written).states

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the old object of each state back, with its old content if that was copied.

        Leaves out states if only some of their entries were copied: the parameters in a snapshot :meth:`of_model`. If
        the content was not copied, because the tensor is too large, it stays as a forward has written it.
        """
        for state in self.states:
            if state.is_sampled:
                continue
            state.container[state.key] = state.value
            if not isinstance(state.value, Tensor) or not isinstance(state.content, Tensor):
                continue
            # An equal tensor is not written, because some cannot be, such as an expanded one.
            if not _are_equal(state.value, state.content):
                # A tensor that a forward has made in inference mode can be written only in this mode. Any other tensor
                # can be written in it, too.
                with torch.inference_mode():
                    state.value.copy_(state.content)

    def lend_copies(self) -> None:
        """Lets the model use copies in the place of all tensors that were copied in full, until :meth:`restore`.

        Extra forwards between a training forward and its backward, see :mod:`.step_watch`, then write into the copies.
        If they wrote into a tensor that the graph needs, the backward would raise, even if the old content came back.
        """
        copies: dict[int, Tensor] = {}  # by the identity of the tensor, because modules may share it
        for state in self.states:
            if isinstance(state.content, Tensor) and not state.is_sampled:
                state.container[state.key] = copies.setdefault(id(state.value), state.content.clone())


@torch.no_grad()
def perturb(states: Iterable[State]) -> None:
    """Changes the present values of some states, to see whether the result of a forward depends on them.

    Floating point tensors get noise, which also shows a dependence on a state that no longer moves, such as the
    converged vectors of a spectral norm. Other states may be indices, and noise could move them out of range. So they
    get the value that a forward has written.

    Args:
        states: The states, with the values that a forward has written, as :meth:`StateSnapshot.written` returns them.
            The model may have older values again.
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
            # With the mean and the constant, entries of 0 change, too.
            sizes = current.abs() + current.abs().mean() + ADDED_SIZE
            noise = torch.randn(current.shape, generator=generator).to(current)
            # Written, not replaced, because the forward may read the tensor from elsewhere. For the mode see restore().
            with torch.inference_mode():
                current.add_(PERTURBATION * sizes * noise)
        else:
            # `state` was recorded after the forward that wrote it, so this puts the written value back.
            StateSnapshot([state]).restore()


@contextmanager
def undisturbed(
    model: Module,
    *,
    keeps_state: bool = False,
    watches_parameters: bool = True,
) -> Iterator[StateSnapshot]:
    """Puts back random numbers at the end, and the state of the model as far as :meth:`StateSnapshot.restore` can.

    Args:
        model: The model that makes the forwards.
        keeps_state: Whether the model keeps the state that the forwards have written.
        watches_parameters: Whether the snapshot also tells if parameters were written, which takes 20 us for each.

    Yields:
        The state of the model at the beginning.
    """
    snapshot = StateSnapshot.of_model(model, watches_parameters=watches_parameters)
    try:
        with kept_random_state():
            yield snapshot
    finally:
        if not keeps_state:
            snapshot.restore()
        shard_again(model)  # without a backward, FSDP2 leaves weights gathered


def _can_be_compared(tensor: Tensor) -> bool:
    """Returns whether torch can copy a tensor of this kind, and compare it with another one.

    It cannot if the tensor is meta, nested, quantized or sparse, or if it wraps others: a DTensor, of which each rank
    holds a part, or one of torchao's quantized weights, which know few of torch's functions.
    """
    if hasattr(tensor, '__tensor_flatten__'):
        return False
    is_special = tensor.is_meta or tensor.is_nested or tensor.is_quantized
    return tensor.layout is torch.strided and not is_special


def _sample_of(parameter: Tensor) -> Tensor:
    """Returns a copy of some entries of a parameter, evenly spread."""
    entries = parameter.detach().flatten()
    stride = max(-(-len(entries) // MAX_SAMPLED_ENTRIES), 1)
    return entries[::stride].clone()


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors have the same entries. NaN counts as equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _states_of(model: Module, *, watches_parameters: bool) -> Iterator[State]:
    """Yields the states of a model, see :meth:`StateSnapshot.of_model`."""
    for module_name, module in model.named_modules():
        prefix = f'{module_name}.' if module_name else ''
        parameters, buffers = own_tensors(module)
        attributes = vars(module)
        containers = [parameters, buffers, attributes]
        if isinstance(module, torch.jit.ScriptModule):
            # Only its buffers are states, because its attributes cannot be read. They are never replaced, so a copy of
            # their dict is enough. Only lend_copies() has no effect on it.
            containers = [dict(module.named_buffers(recurse=False))]
        for container in containers:
            is_parameter = container is parameters
            if is_parameter and not watches_parameters:
                continue
            for key, value in container.items():
                is_too_large = False
                if isinstance(value, Tensor):
                    if not _can_be_compared(value):
                        continue
                    may_be_weight = container is attributes or not value.is_floating_point()
                    is_too_large = may_be_weight and value.numel() > LARGEST_COPY
                elif not isinstance(value, (int, float)):  # a bool is an int, so flags are states, too
                    continue
                yield State.now(prefix + key, container, key, copies=not is_too_large, is_sampled=is_parameter)
