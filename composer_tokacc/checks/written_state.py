# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""State that a forward writes into its model: buffers, parameters, and numbers and tensors in plain attributes.

If the result of a forward depends on such state, it depends on the number of forwards before it, so on the number of
microbatches. Examples are the vectors of a spectral norm, a running mean and the counter of a warm-up. A cache or a
statistic for logs is harmless. :meth:`.Probe.judge_written_state` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from composer_tokacc.compat import num_writes, own_tensors

PERTURBATION = 0.1
"""Relative size of the noise that is added to a state."""
Namespace: TypeAlias = MutableMapping[str, Any]
"""The buffers, parameters or attributes of a module."""

LARGEST_COPY = 2**22
"""Larger tensors are not copied, such as the weights of a quantised model, which may be buffers."""
SMALLEST_STATE = 1e-2
"""Entries of a state near 0 get noise as if they were of this size."""


class WrittenState(NamedTuple):
    """A state that was written, with its new value: ``container[key]`` of a module."""

    name: str
    container: Namespace
    key: str
    value: Tensor | float


@dataclass
class _StateEntry:
    """A state at the moment of a snapshot."""

    name: str
    container: Namespace
    key: str
    value: Tensor | float
    version: int | None = None  # number of writes into a tensor up to the snapshot
    copy: Tensor | None = None  # content of a tensor; None: it was not copied

    def is_written(self) -> bool:
        # The module may have replaced or deleted the object.
        current = self.container.get(self.key)
        if not isinstance(self.value, Tensor):
            return current != self.value
        if not isinstance(current, Tensor):
            return current is not None
        if current is self.value:
            return _version_of(current) != self.version or not self._equals_copy(current)
        # A new tensor in the same place, which may be equal to the old one.
        return not self._equals_copy(current)

    def _equals_copy(self, current: Tensor) -> bool:
        # `buffer.data.copy_(...)` writes without a new version, so values are compared too.
        if self.copy is None:
            return True
        return current.shape == self.copy.shape and torch.equal(current, self.copy)


class StateSnapshot:
    """The state of a model at one moment."""

    def __init__(self, states: Iterable[WrittenState]) -> None:
        """Takes a snapshot of some states, with copies of their tensors."""
        self._entries = []
        for state in states:
            current = state.container.get(state.key)
            if isinstance(current, Tensor):
                self._entries.append(
                    _tensor_entry(
                        state.name,
                        state.container,
                        state.key,
                        current,
                        copies=True,
                    )
                )
            elif isinstance(current, (int, float)):
                self._entries.append(
                    _StateEntry(
                        state.name,
                        state.container,
                        state.key,
                        current,
                    )
                )

    @classmethod
    def of_model(cls, model: Module) -> StateSnapshot:
        """Takes a snapshot of everything that a forward may write. Parameters are not copied."""
        snapshot = cls(())
        snapshot._entries = list(_entries_of(model))
        return snapshot

    def written(self) -> list[WrittenState]:
        """Returns the states that were written after the snapshot, with copies of their new values."""
        states = []
        for entry in self._entries:
            value = entry.container.get(entry.key)
            if isinstance(value, (Tensor, int, float)) and entry.is_written():
                # A copy, because the next forward writes into the same tensor.
                copied = value.detach().clone() if isinstance(value, Tensor) else value
                states.append(
                    WrittenState(
                        entry.name,
                        entry.container,
                        entry.key,
                        copied,
                    )
                )
        return states

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all states back."""
        for entry in self._entries:
            # The old object comes back, with its old content.
            entry.container[entry.key] = entry.value
            if isinstance(entry.value, Tensor) and entry.copy is not None:
                entry.value.copy_(entry.copy)

    @torch.no_grad()
    def perturb(self, states: Iterable[WrittenState]) -> None:
        """Changes some states: floating point tensors by noise, others to the value that a forward has written.

        Noise also shows a dependence on a state that no longer moves, such as the vectors of a spectral norm that have
        converged. Other states may be indices, and noise could move them out of range.
        """
        # A generator of its own, so that the random numbers of the run stay the same.
        generator = torch.Generator().manual_seed(0)
        for state in states:
            current = state.container[state.key]
            if not isinstance(current, Tensor) or not isinstance(state.value, Tensor):
                state.container[state.key] = state.value
            elif current.is_floating_point() and current.numel():
                # A vector of zeros must move too.
                sizes = current.abs() + current.abs().mean() + SMALLEST_STATE
                noise = torch.randn(current.shape, generator=generator).to(current)
                current.add_(PERTURBATION * sizes * noise)
            elif current.shape == state.value.shape:
                current.copy_(state.value)
            else:
                state.container[state.key] = state.value.clone()


def _entries_of(model: Module) -> Iterator[_StateEntry]:
    """Yields an entry for each tensor and number that a forward of the model may write."""
    for module_name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes cannot be read
        prefix = f'{module_name}.' if module_name else ''
        attributes = vars(module)
        parameters, buffers = own_tensors(module)
        # Parameters may be large, so they are not copied. Their number of writes tells.
        for key, value in parameters.items():
            if _is_plain(value):
                yield _tensor_entry(prefix + key, parameters, key, value, copies=False)
        for key, value in buffers.items():
            if _is_plain(value):
                yield _tensor_entry(prefix + key, buffers, key, value, copies=True)
        for key, value in attributes.items():
            if _is_plain(value):
                yield _tensor_entry(prefix + key, attributes, key, value, copies=True)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                yield _StateEntry(prefix + key, attributes, key, value)


def _tensor_entry(
    name: str,
    container: Namespace,
    key: str,
    value: Tensor,
    *,
    copies: bool,
) -> _StateEntry:
    copied = value.detach().clone() if copies and value.numel() <= LARGEST_COPY else None
    return _StateEntry(name, container, key, value, _version_of(value), copied)


def _version_of(tensor: Tensor) -> int | None:
    # Tensors made in inference mode do not count their writes.
    return None if tensor.is_inference() else num_writes(tensor)


def _is_plain(value: object) -> TypeGuard[Tensor]:
    # Ranks hold parts of a DTensor, and FSDP replaces it during a forward.
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
