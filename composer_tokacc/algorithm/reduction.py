# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Makes sure that DDP and FSDP2 reduce the gradients of a step correctly, and that FSDP shards all trained parameters.

To reduce gradients is to average them over the ranks. DDP waits until every rank has a gradient for every parameter. If
the microbatch of one rank does not use a part of the model (text without images), or if one rank has fewer
microbatches, the others would wait forever.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from composer.core import State
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.collectives import get_world_size, max_over_ranks
from composer_tokacc.compat import (
    has_finished_reduction,
    mixed_precision_of,
    num_reduced_parameters,
    reduced_parameters,
    reset_reduction,
    state_of_gradient,
)
from composer_tokacc.graph import empty_sum
from composer_tokacc.model_structure import fsdp_units
from composer_tokacc.refusals import NotExactError

NOT_REDUCED = (
    'DDP must have reduced every gradient at the end of a step, but it has not. Leave DDP as Composer makes it, '
    "without `static_graph` or `ddp_sync_strategy='forced_sync'`, and freeze parameters before the Trainer is made "
    '(docs/errors.md#ranks).'
)

GradientState: TypeAlias = tuple[torch.nn.Parameter, tuple[int, int]]
"""A parameter, and the state of its gradient, which changes if a backward writes it, see :func:`.state_of_gradient`."""


@dataclass
class _Attempt:
    """What has been noted in an attempt to compute a step."""

    reduces: list[bool] = field(default_factory=list)
    """Under DDP, for each microbatch so far: whether its backward reduces gradients."""
    states_before: list[GradientState] = field(default_factory=list)
    """The parameters to watch in the next backward, each with the state of its gradient before that backward."""
    reached_checksum: int = 0
    """A checksum that tells which parameters of FSDP2 each backward has reached. It is one number, so that ranks can
    compare it."""


class ReductionWatch:
    """Watches which gradients the backward of each microbatch writes. Under DDP it adds those that DDP waits for.

    Each attempt to compute a step begins with :meth:`start_attempt`. For each microbatch, :meth:`begin_microbatch` is
    called before its forward and :meth:`end_microbatch` after its backward. At the end comes :meth:`check_reduced`.
    What they do depends on the wrapper of the model:

    - DDP reduces in the backward of some microbatches, by Composer's default only of the last one. Parameters that such
      a backward does not reach get a gradient of zero.
    - FSDP2 reduces in every backward. The ranks compare at the end of the step which parameters were reached.
    - FSDP1, or no wrapper: nothing.

    Args:
        state: The trainer's state.
        may_gather: Whether ranks may also wait for each other in the forward or the loss, to gather rows or statistics.
    """

    def __init__(self, state: State, *, may_gather: bool) -> None:
        self._ddp = state.model if isinstance(state.model, DistributedDataParallel) else None
        # A model may tell DDP to ignore parameters (such as experts), because it reduces their gradients itself.
        self._parameters_of_ddp: list[torch.nn.Parameter] = []
        # The parameters that were trained when DDP was made, so that it reduces their gradients. None: not known. DDP
        # always tells how many they are, but not always which.
        self._reduced_parameters: set[torch.nn.Parameter] | None = None
        if self._ddp is not None:
            self._reduced_parameters = reduced_parameters(self._ddp)
            for name, parameter in self._ddp.module.named_parameters():
                if name not in self._ddp.parameters_to_ignore:
                    self._parameters_of_ddp.append(parameter)
            if self._reduced_parameters is None:
                trained = self._trained_parameters_of_ddp()
                # If there are as many as DDP reduces, they are very probably the same, and later changes will be seen.
                if len(trained) == num_reduced_parameters(self._ddp):
                    self._reduced_parameters = set(trained)
        # Only parameters of FSDP2 are DTensors.
        self._parameters_of_fsdp = [
            parameter for parameter in state.model.parameters() if isinstance(parameter, DTensor)
        ]
        self._attempt = _Attempt()
        self._is_unfinished = False  # whether an attempt has begun, and has not come to its end
        # With automatic microbatching ranks wait after every forward, because Composer asks all whether memory ran out.
        self.waits_only_in_reduction = self._ddp is not None and not state.auto_microbatching and not may_gather
        """Whether ranks wait for each other only in reductions of DDP, and nowhere else. If so, and if DDP reduces only
        in the last microbatch of a step, ranks may have unequal numbers of microbatches."""

    def start_attempt(self) -> None:
        """Forgets an earlier attempt of this step. Sets DDP back to its state before the step, if the attempt failed.

        If memory has run out on one rank only, other ranks may have done one more forward. It may have prepared a
        reduction, or a broadcast of buffers in the next forward. So ranks could disagree and wait forever.
        """
        if self._ddp is not None and self._is_unfinished:
            reset_reduction(self._ddp)
        self._is_unfinished = True
        self._attempt = _Attempt()

    def begin_microbatch(self, num_microbatches: int, *, must_reduce_once: bool) -> None:
        """Checks that DDP reduces in the right microbatch, and notes the gradients that the next backward should write.

        Args:
            num_microbatches: The number of microbatches of this rank in the step. 0: it is not known, and neither an
                early reduction nor a missing last one is refused here.
            must_reduce_once: Whether only the last microbatch may reduce, because ranks may have different numbers of
                microbatches.

        Raises:
            RuntimeError: If DDP reduces before the last microbatch although ``must_reduce_once`` is True, if it does
                not reduce in the last one, or if it leaves out the gradients of some trained parameters.
        """
        if self._ddp is None:
            self._note_states(self._parameters_of_fsdp)
            return
        reduces = self._ddp.require_backward_grad_sync
        self._attempt.reduces.append(reduces)
        self._check_reduces_in_time(self._ddp, num_microbatches, must_reduce_once=must_reduce_once)
        if not reduces:
            return
        trained = self._trained_parameters_of_ddp()
        self._check_reduces_all(self._ddp, trained)
        # With one of these options DDP itself finds the parameters that a backward does not reach.
        finds_unreached = self._ddp.find_unused_parameters or self._ddp.static_graph
        if not finds_unreached:
            self._note_states(trained)

    def _trained_parameters_of_ddp(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._parameters_of_ddp if parameter.requires_grad]

    def _check_reduces_in_time(
        self, ddp: DistributedDataParallel, num_microbatches: int, *, must_reduce_once: bool
    ) -> None:
        """Raises RuntimeError if this microbatch reduces too early, or is the last one and does not reduce.

        In the second case it also sets all gradients to None. With ``ddp_sync_strategy='forced_sync'`` Composer reduces
        all gradients that are not None, even after this error. Ranks with gradients of different parameters would wait
        forever.
        """
        reduces = self._attempt.reduces[-1]
        number = len(self._attempt.reduces)  # of this microbatch; the first has the number 1
        if not reduces and number == num_microbatches:
            ddp.zero_grad()
            raise NotExactError(NOT_REDUCED)
        if reduces and must_reduce_once and number < num_microbatches:
            raise NotExactError(
                'Gradients must be reduced only in the last microbatch of a step, because ranks may make different '
                f'numbers of microbatches, got: a reduction in microbatch {number} of {num_microbatches}. '
                "Leave `equal_counts` at 'auto', and `Trainer(ddp_sync_strategy=)` at its default, or as it was when "
                'the checkpoint was written.'
            )

    def _check_reduces_all(self, ddp: DistributedDataParallel, trained: Collection[torch.nn.Parameter]) -> None:
        """Raises RuntimeError if DDP does not reduce some parameters, because they were frozen when it was made.

        Each rank would train its own copy of them.
        """
        if self._reduced_parameters is None:
            # At least this many were unfrozen. There may be more, because DDP still counts parameters that were frozen
            # between the making of DDP and of this object.
            num_unfrozen = len(trained) - num_reduced_parameters(ddp)
        else:
            num_unfrozen = len(set(trained) - self._reduced_parameters)
        if num_unfrozen > 0:
            raise NotExactError(
                'DDP reduces only parameters that were trained when the Trainer was made, got: '
                f'{num_unfrozen} others that are trained now. Unfreeze parameters before that, or make a new '
                'Trainer (docs/errors.md#ranks).'
            )

    def _note_states(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Notes the states of the gradients, so that :meth:`end_microbatch` sees which the backward has written."""
        self._attempt.states_before = [(parameter, state_of_gradient(parameter)) for parameter in parameters]

    def end_microbatch(self) -> None:
        """Notes which parameters of FSDP2 the backward has reached. Under DDP it adds the gradients that DDP waits for.

        Does nothing if :meth:`begin_microbatch` has noted no states: the model has no such wrapper, DDP did not reduce
        in this backward, or DDP itself finds the parameters that are not reached.
        """
        states_before = self._attempt.states_before
        self._attempt.states_before = []
        if not states_before:
            return
        if self._ddp is None:
            self._add_to_checksum(states_before)
        else:
            self._add_missing_gradients(self._ddp, states_before)

    def _add_to_checksum(self, states_before: Sequence[GradientState]) -> None:
        """Adds to the checksum which parameters of FSDP2 the backward has reached."""
        # One byte for each parameter. The checksum goes on from the earlier microbatches.
        reached_flags = bytes(state_of_gradient(parameter) != before for parameter, before in states_before)
        self._attempt.reached_checksum = zlib.crc32(reached_flags, self._attempt.reached_checksum)

    def _add_missing_gradients(self, ddp: DistributedDataParallel, states_before: Sequence[GradientState]) -> None:
        """Adds a gradient of zero to parameters that the backward has not reached, because DDP waits for them."""
        unreached = [parameter for parameter, before in states_before if state_of_gradient(parameter) == before]
        if not unreached:
            return
        # DDP begins to reduce if a backward reaches any parameter. has_finished_reduction() is also True if DDP has not
        # begun.
        has_begun = len(unreached) < len(states_before)
        if has_begun and has_finished_reduction(ddp):
            # DDP has finished, so it has got all gradients. Another algorithm has set some of them to None since, so
            # that the optimizer leaves these parameters out.
            return
        # This backward adds zeros to the gradients, and calls the hooks of DDP.
        torch.autograd.backward([empty_sum(parameter) for parameter in unreached])

    def check_reduced(self) -> None:
        """Raises RuntimeError if gradients of the step are not reduced, or wrongly; a collective under FSDP2.

        DDP itself would raise only at the next forward, after the optimizer has moved.

        FSDP2 joins the gradients that a rank has in a unit to one tensor, and sums these tensors over the ranks. If two
        ranks have gradients of different parameters, and the tensors have the same size by chance, FSDP2 adds the
        gradients of different parameters without an error. In this case all ranks raise here.
        """
        self._is_unfinished = False  # all microbatches were computed. If a check fails here, no further attempt follows
        if self._ddp is not None and not (self._attempt.reduces[-1] and has_finished_reduction(self._ddp)):
            raise NotExactError(NOT_REDUCED)
        if not self._parameters_of_fsdp:
            return
        # A maximum over the ranks gives the smallest checksum, too, as the negative of the largest negative.
        checksum = self._attempt.reached_checksum
        largest, largest_negative = max_over_ranks([checksum, -checksum])
        smallest = -largest_negative
        if largest != smallest:
            raise NotExactError(
                'Under FSDP2 the backward must reach the same parameters on all ranks, got: a microbatch that uses '
                'other parameters on some ranks, such as experts or branches that only some rows need. FSDP2 would '
                'mix up their gradients. Have every forward use them (add 0 times their output for any row), freeze '
                'them, or train with DDP (docs/errors.md#ranks).'
            )

    def has_reduced_once(self) -> bool | None:
        """Returns whether DDP reduced in no microbatch of this step before the last one.

        None: the step does not show it, because it has only one microbatch, or it does not matter, because ranks wait
        for each other in every microbatch anyway.
        """
        reduces = self._attempt.reduces
        if len(reduces) < 2 or not self.waits_only_in_reduction:
            return None
        return not any(reduces[:-1])


def unsharded_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that FSDP leaves out although it shards a part of the model, by name.

    On a single rank, and without FSDP, there are none.
    """
    if get_world_size() == 1:
        return {}
    sharded: set[torch.nn.Parameter] = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    for unit in fsdp_units(model):
        if not isinstance(unit, FSDPModule):  # parameters of FSDP1 are not DTensors
            sharded.update(unit.parameters())
    if not sharded:
        return {}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in sharded}


def check_unsharded_are_frozen(unsharded: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises RuntimeError if a parameter that FSDP leaves out is trained. Each rank would train its own copy of it."""
    trained = [name for name, parameter in unsharded.items() if parameter.requires_grad]
    if trained:
        raise NotExactError(
            f'FSDP must shard every trained parameter, got: {len(trained)} that it leaves out, such as {trained[:3]}. '
            'Composer wraps the children of a ComposerModel. Move these parameters into a child without '
            '`_fsdp_wrap = False`, or freeze them.'
        )


def check_clipping(state: State) -> None:
    """Raises RuntimeError if adaptive gradient clipping (AGC) is on under FSDP2.

    AGC clips by the norms of rows and vectors, and Composer would take the norms of their shards. Under FSDP1 Composer
    refuses it itself.
    """
    clips_adaptively = any(getattr(algorithm, 'clipping_type', None) == 'adaptive' for algorithm in state.algorithms)
    if clips_adaptively and any(isinstance(unit, FSDPModule) for unit in fsdp_units(state.model)):
        raise NotExactError(
            "Composer's GradientClipping must clip by 'norm' or 'value' under FSDP2, got: 'adaptive', which takes the "
            'norms of shards.'
        )


def excess_of_reduction(model: torch.nn.Module) -> float:
    """Returns how many times too large gradients are after FSDP2 on CPUs has reduced them; otherwise 1. A collective.

    FSDP2 asks the backend for the mean over the ranks, but on CPUs gloo of torch 2.7 returns the sum. In float16 FSDP2
    asks for the sum, and divides by the number of ranks itself, which gives the mean. So the factor depends on the type
    in which gradients are reduced. It is measured for each type of the trained weights, because FSDP2 reduces in this
    type unless it has a `reduce_dtype`.

    Raises:
        RuntimeError: If the factors differ, because one factor of the loss cannot correct them.
    """
    units = [unit for unit in fsdp_units(model) if isinstance(unit, FSDPModule)]
    trained: list[DTensor] = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            trained.append(parameter)
    if not units or not trained or trained[0].device_mesh.device_type != 'cpu':
        return 1.0
    precision = mixed_precision_of(units[0])  # Composer gives all units the same precision
    excess_by_type: dict[torch.dtype, float] = {}
    for parameter in trained:  # a list, not a set of types, because all ranks must reduce in the same order
        if parameter.dtype not in excess_by_type:
            excess_by_type[parameter.dtype] = _measured_excess(parameter, precision)
    if len(set(excess_by_type.values())) > 1:
        raise NotExactError(
            'FSDP2 must reduce the gradients of all trained weights alike, got: gradients that are too large by these '
            f'factors, by the type of the weights: {excess_by_type}. Set a `reduce_dtype` in `mixed_precision` of the '
            'FSDP config, or give all trained weights one type (docs/errors.md#ranks).'
        )
    return excess_by_type[trained[0].dtype]


def _measured_excess(parameter: DTensor, precision: MixedPrecisionPolicy) -> float:
    """Lets FSDP2 reduce a gradient that is 1 on each rank, and returns the result. A collective.

    Args:
        parameter: A parameter of the model. The gradient has its type, and is reduced over the same ranks.
        precision: The mixed precision of the model.
    """
    # The weight of this embedding is not drawn, so the random numbers of the run stay the same.
    weight = torch.ones(1, 1, dtype=parameter.dtype)
    embedding = torch.nn.Embedding.from_pretrained(weight, freeze=False)
    fully_shard(embedding, mesh=parameter.device_mesh, mp_policy=precision)
    embedding(torch.tensor([0])).sum().backward()
    gradient: Any = embedding.weight.grad
    return float(gradient.full_tensor())
