# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Gives optimizers that evaluate a step themselves (LBFGS, Composer's SAM) the loss of the step over all ranks.

Such an optimizer calls a closure, which computes loss and gradient of the step, and decides by the loss: LBFGS how far
to go, SAM whether to go at all. Composer's closure is replaced for three reasons:

- It returns only the loss of this rank. The loss of the step is the mean over the ranks. So ranks would decide
  differently, and their weights would differ.
- If it is called several times in a step, Composer logs the sum of the losses.
- SAM asks it for a first gradient that is not reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer.core import State
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from composer_tokacc.collectives import get_world_size, sum_over_ranks
from composer_tokacc.compat import uses_closure
from composer_tokacc.model_structure import fsdp_units
from composer_tokacc.refusals import NotExactError


class ClosureHooks:
    """The hooks on the optimizers of a run, see :func:`give_loss_of_step`."""

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._handles: list[RemovableHandle] = []

    def update(self, state: State) -> None:
        """Adds the hooks, if a callback has replaced the optimizers since the last call, or if there was no call yet.

        Raises RuntimeError if one of the optimizers would not see all gradients.
        """
        optimizers = list(state.optimizers)
        if optimizers == self._optimizers:
            return
        self.remove()
        check_sees_gradients(state)
        self._handles = give_loss_of_step(state)
        self._optimizers = optimizers

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizers = []


def give_loss_of_step(state: State) -> list[RemovableHandle]:
    """Adds a hook to each optimizer that evaluates a step itself, and returns the handles that remove the hooks.

    The hook replaces Composer's closure. On several ranks each call of the new one is a collective.

    Args:
        state: The trainer's state.
    """
    to_device = state.device.tensor_to_device

    def replace_closure(
        optimizer: torch.optim.Optimizer,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if callable(options.get('closure')):  # as Composer passes it
            return arguments, {**options, 'closure': _over_all_ranks(options['closure'], to_device)}
        # A subclass may pass the closure on to its base class by position, behind the optimizer itself. torch runs this
        # hook for the `step` of both classes, so it wraps the closure twice. That does no harm, because the mean over
        # the ranks of equal losses is the same loss.
        if len(arguments) > 1 and callable(arguments[1]):
            same_optimizer, closure, *further_arguments = arguments
            return (same_optimizer, _over_all_ranks(closure, to_device), *further_arguments), options
        # No closure: a subclass has called it itself, or torch calls `step()` to create the state for a checkpoint.
        return None

    return [optimizer.register_step_pre_hook(replace_closure) for optimizer in _optimizers_with_closure(state)]


def _optimizers_with_closure(state: State) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that evaluate a step themselves."""
    return [optimizer for optimizer in state.optimizers if uses_closure(optimizer)]


def check_sees_gradients(state: State) -> None:
    """Raises RuntimeError if an optimizer that evaluates a step itself would not see the gradients of all weights.

    Under FSDP1 the parameters are the shards of this rank. Under FSDP2 they are DTensors, whose norm covers all ranks.
    But LBFGS keeps the list of parameters from before FSDP2 replaced them, and would not move the new ones.
    """
    units = fsdp_units(state.model)
    is_fsdp1 = any(not isinstance(unit, FSDPModule) for unit in units)
    for optimizer in _optimizers_with_closure(state):
        if is_fsdp1 or (units and isinstance(optimizer, torch.optim.LBFGS)):
            raise NotExactError(
                f'{type(optimizer).__name__} must see the gradients of all weights, but FSDP shards them. Train with '
                "DDP. Composer's SAM is exact with FSDP2, too (docs/errors.md#ranks)."
            )


def _over_all_ranks(
    closure: Callable[..., Any],
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., float | None]:
    """Returns a closure that has Composer's closure compute the gradient, and returns the loss over all ranks."""
    num_calls = 0

    def evaluate(*, ddp_sync: bool = True, **options: Any) -> float | None:
        """Returns the loss of the step, None if mixed precision has overflowed. Ignores ``ddp_sync``.

        Composer's SAM passes False for its first gradient, which would then differ between the ranks.
        """
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            # Composer adds the loss to the values of a dict that it logs later. Further calls get a dict that nobody
            # reads, so that only the loss of the first call is logged.
            options['loss_dict'] = {}
        loss = closure(**options)
        if loss is None:  # on all ranks, because Composer's scaler asks all of them whether a gradient has overflowed
            return None
        if get_world_size() == 1:
            return float(loss)
        loss_of_rank = torch.tensor([float(loss)], dtype=torch.float64)
        (sum_of_losses,) = sum_over_ranks(to_device(loss_of_rank))
        return sum_of_losses / get_world_size()  # because gradients are averaged over the ranks, too

    return evaluate
