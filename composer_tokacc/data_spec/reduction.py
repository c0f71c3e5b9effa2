# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""When ranks reduce their gradients: DDP does it in the last microbatch of a step alone, if left to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.compat import is_reduced, state_of_gradient

if TYPE_CHECKING:
    from composer.core import State


class ReductionWatch:
    """Sees in which microbatches of a step gradients are reduced, and refuses what would wait without end.

    Args:
        state: The trainer's.
        is_coupled: Whether the loss may gather rows of other ranks.
    """

    def __init__(self, state: State, *, is_coupled: bool) -> None:
        self._ddp = state.model if isinstance(state.model, DistributedDataParallel) else None
        self._parameters = list(state.model.parameters())
        self.start_attempt()
        # In automatic microbatching ranks ask each other after every forward whether memory ran out, synchronized batch
        # norms meet within it, and losses of coupled rows may gather those of other ranks.
        self.may_meet_once = (
            self._ddp is not None
            and not (state.auto_microbatching or is_coupled)
            and not any(isinstance(module, torch.nn.SyncBatchNorm) for module in state.model.modules())
        )

    def start_attempt(self) -> None:
        """Forgets an attempt that failed half-way."""
        self._reduces: list[bool] = []
        self._before: list[tuple[torch.nn.Parameter, tuple[int, int]]] = []
        """What each parameter's gradient was before a backward that reduces."""

    def see(self, num_microbatches: int, *, has_unequal_counts: bool, reduced_once: bool) -> None:
        """Notes whether gradients are reduced in the backward of the microbatch that comes now, of so many here.

        ``has_unequal_counts``: by the user's word ranks may make unequally many; ``reduced_once``: in the last one
        alone gradients were reduced in the steps before.
        """
        if self._ddp is None:
            return
        self._reduces.append(self._ddp.require_backward_grad_sync)
        if self._reduces[-1] and not (self._ddp.find_unused_parameters or self._ddp.static_graph):
            self._before = [(parameter, state_of_gradient(parameter)) for parameter in self._parameters]
        if not self._reduces[-1] or len(self._reduces) >= num_microbatches:
            return
        got = f'got: a reduction in microbatch {len(self._reduces)} of {num_microbatches}'
        if has_unequal_counts:
            raise RuntimeError(
                'Ranks must make equally many microbatches where gradients are reduced in each, or they wait for each '
                f"other without end, {got} with `equal_counts=False`. Leave it at 'auto', or "
                '`Trainer(ddp_sync_strategy=)` as it is by default.'
            )
        if reduced_once:
            raise RuntimeError(
                'Gradients must be reduced in the last microbatch of a step alone, as they were in the steps before, '
                f'{got}. Leave `Trainer(ddp_sync_strategy=)` as it was when the checkpoint was written.'
            )

    def reach_all(self) -> None:
        """Gives parameters that the backward left out a gradient of zero: DDP waits for one of each, on every rank."""
        before, self._before = self._before, []
        if self._ddp is None or not before:
            return
        # A backward that reaches none leaves DDP as it was before it.
        if is_reduced(self._ddp) and any(state_of_gradient(one) != state for one, state in before):
            return
        left_out = [one for one, state in before if state_of_gradient(one) == state]
        torch.autograd.backward([parameter.flatten()[:0].sum() for parameter in left_out if parameter.requires_grad])

    def reach_all_by_hand(self) -> None:
        """Gives all parameters a gradient, where DDP leaves the last microbatch of a step to the trainer.

        Composer's ``forced_sync`` reduces what is not None, one after the other: ranks must have the same ones.
        """
        if self._ddp is not None and not self._reduces[-1]:
            for parameter in self._parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def reduced_once(self) -> bool | None:
        """Returns whether this step reduced in its last microbatch alone; None: nothing tells, or ranks meet in all."""
        return not any(self._reduces[:-1]) if len(self._reduces) > 1 and self.may_meet_once else None


def check_sharding(model: torch.nn.Module) -> None:
    """Raises RuntimeError if FSDP2 leaves out parameters: nobody reduces them, and every rank trains its own copy."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if 0 < len(whole) < len(trained):
        raise RuntimeError(
            f'FSDP must shard every trained parameter, got: {len(whole)} whole ones, such as {whole[:3]}, which no '
            'rank shares. Let Composer wrap the model itself (no `_fsdp_wrap = False` on it), or freeze them.'
        )


def check_reduced(model: torch.nn.Module) -> None:
    """Raises RuntimeError if DDP left gradients unreduced, which it says itself only at the next forward."""
    if isinstance(model, DistributedDataParallel) and not is_reduced(model):
        raise RuntimeError(
            'DDP must have reduced every gradient at the end of a step, got: some that it still waits for. Leave DDP '
            'as Composer makes it, without `static_graph` (docs/errors.md#ranks).'
        )
