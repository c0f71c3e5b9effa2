# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""State that a forward writes into its model: buffers, parameters, and plain attributes that are numbers or tensors.

If the result of a forward depends on such state, it depends on the number of forwards before it, so on the number of
microbatches. Examples are the vectors of a spectral norm, a running mean and the counter of a warm-up. A cache or a
statistic for logs is harmless. :meth:`.Probe.judge_written_state` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
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


class Copied(Enum):
    """How much of a tensor is copied, to see later whether it was written."""

    ALL = 'all'
    """All entries. Only then the tensor can be put back."""
    SAMPLE = 'sample'
    """Some entries, see :func:`_sample_of`."""
    NOTHING = 'nothing'
    """A write is noticed only if it replaces the tensor, or adds to the number of writes that torch counts."""


@dataclass(frozen=True, eq=False)
class State:
    """A tensor or a number of a module, ``container[key]``, as it was at one moment."""

    name: str  # its name in the model
    container: Namespace
    key: str
    value: Tensor | float  # the object itself. If it is a tensor, a forward may write into it
    copied: Copied  # ALL for a number
    content: Tensor | None  # the copied entries; None: nothing was copied, or it is a number
    version: int | None  # number of writes into the tensor; None: it is a number

    @classmethod
    def now(
        cls,
        name: str,
        container: Namespace,
        key: str,
        copied: Copied = Copied.ALL,
    ) -> State:
        """Returns the state as it is now. ``copied`` is ignored for a number."""
        value = container[key]
        if not isinstance(value, Tensor):
            return cls(name, container, key, value, Copied.ALL, content=None, version=None)
        content = None
        if copied is Copied.ALL:
            content = value.detach().clone()
        elif copied is Copied.SAMPLE:
            content = _sample_of(value)
        return cls(name, container, key, value, copied, content, version=num_writes(value))

    def is_written(self) -> bool:
        """Returns whether the state was written after this moment."""
        current = self.container.get(self.key)
        if isinstance(current, Tensor) and isinstance(self.value, Tensor):
            return self._is_tensor_written(current)
        # The state is or was a number, or it is gone.
        if current is self.value:
            return False  # not compared, because NaN is not equal to itself
        return type(current) is not type(self.value) or bool(current != self.value)

    def _is_tensor_written(self, current: Tensor) -> bool:
        """Returns whether a tensor was written. ``current`` is the tensor that is in its place now."""
        is_replaced = current is not self.value
        was_written_into = not is_replaced and num_writes(current) != self.version
        if self.content is None:
            return is_replaced or was_written_into
        if self.copied is Copied.SAMPLE:
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
        """Returns the states that were written after the snapshot, as they are now, with copies of all entries."""
        old_states = [state for state in self.states if state.is_written()]
        return StateSnapshot.of_states(old_states).states

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the old object of each state back, with its old content if that was copied.

        Leaves out states if only some of their entries were copied: the parameters in a snapshot :meth:`of_model`. If
        the content was not copied, because the tensor is too large, it stays as a forward has written it.
        """
        for state in self.states:
            if state.copied is Copied.SAMPLE:
                continue
            state.container[state.key] = state.value
            if not isinstance(state.value, Tensor) or state.content is None:
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
            if state.content is not None and state.copied is Copied.ALL:
                state.container[state.key] = copies.setdefault(id(state.value), state.content.clone())


@torch.no_grad()
def perturb(states: Iterable[State]) -> None:
    """Changes the present values of some states, to see whether the result of a forward depends on them.

    Floating point tensors get noise, which also shows a dependence on a state that no longer moves, such as the
    converged vectors of a spectral norm. Other states may be indices, and noise could move them out of range. So they
    get the value that a forward has written. So does float8 (one byte), because torch cannot add it.

    Args:
        states: The states, with the values that a forward has written, as :meth:`StateSnapshot.written` returns them.
            The model may have older values again.
    """
    # Not the global generator, so that the random numbers of the run stay the same.
    generator = torch.Generator().manual_seed(0)
    for state in states:
        current = state.container[state.key]
        if isinstance(current, Tensor) and _can_get_noise(current):
            _add_noise(state, current, generator)
        else:
            # `state` was recorded after the forward that wrote it, so this puts the written value back.
            StateSnapshot([state]).restore()


def _can_get_noise(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0


def _add_noise(state: State, tensor: Tensor, generator: torch.Generator) -> None:
    """Adds noise to the present tensor of a state."""
    # The entries of an expanded tensor share memory, so it cannot be written.
    if 0 in tensor.stride():
        tensor = tensor.clone()
        state.container[state.key] = tensor
    # With the mean and the constant, entries of 0 change, too.
    sizes = tensor.abs() + tensor.abs().mean() + ADDED_SIZE
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    # Written, not replaced, because the forward may read the tensor from elsewhere. For the mode see restore().
    with torch.inference_mode():
        tensor.add_(PERTURBATION * sizes * noise)


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
        if isinstance(module, torch.jit.ScriptModule):
            # Only its buffers are states, because its attributes cannot be read. They are never replaced, so a copy of
            # their dict is enough. Only lend_copies() has no effect on it.
            buffers = dict(module.named_buffers(recurse=False))
            yield from _states_in(buffers, prefix, _copied_of_buffer)
            continue
        parameters, buffers = own_tensors(module)
        if watches_parameters:
            yield from _states_in(parameters, prefix, _copied_of_parameter)
        yield from _states_in(buffers, prefix, _copied_of_buffer)
        yield from _states_in(vars(module), prefix, _copied_of_attribute)


def _states_in(
    container: Namespace,
    prefix: str,
    copied_of: Callable[[Tensor], Copied],
) -> Iterator[State]:
    """Yields the tensors and numbers of a container as states.

    Args:
        container: The parameters, buffers or attributes of a module.
        prefix: The name of the module in the model, and a dot.
        copied_of: Returns how much of a tensor is copied.
    """
    for key, value in container.items():
        if isinstance(value, Tensor):
            if _can_be_compared(value):
                yield State.now(prefix + key, container, key, copied_of(value))
        elif isinstance(value, (int, float)):  # a bool is an int, so flags are states, too
            yield State.now(prefix + key, container, key)


def _copied_of_parameter(parameter: Tensor) -> Copied:
    return Copied.SAMPLE


def _copied_of_buffer(buffer: Tensor) -> Copied:
    if buffer.is_floating_point():
        return Copied.ALL
    return _copied_of_attribute(buffer)


def _copied_of_attribute(tensor: Tensor) -> Copied:
    """Returns how much is copied of an attribute or a buffer of integers, see :data:`LARGEST_COPY`."""
    if tensor.numel() > LARGEST_COPY:
        return Copied.NOTHING
    return Copied.ALL
