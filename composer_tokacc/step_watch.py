# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds changes of parameters, gradients and buffers while a step accumulates its gradient.

:func:`.measure_token_weights` measures the weight of each token at the logits. It does not see what happens to the
gradient afterwards. A loop that calls ``zero_grad`` after each microbatch has equal weights at the logits, and loses
all microbatches except the last one. :class:`StepWatch` sees that. The fixture ``token_exact`` uses both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_tokacc.checks.logits import TINY, logits_of, tolerance_of
from composer_tokacc.checks.written_state import StateSnapshot, undisturbed
from composer_tokacc.compat import inner_model, is_in_backward, when_backward_ends
from composer_tokacc.graph import edge_of
from composer_tokacc.random_state import same_random_numbers

SAME_GRADIENT = 1e-3
"""Largest relative difference between ranks of the size (:class:`Checksum`) of a gradient that was averaged. It is
round-off of float16 and bfloat16. Gradients of different rows differ by far more."""
MASKED_LOGIT = -1e4
"""Logits at or below this value count as masked, and as equal. Some models mask the logits of ids that no text
has, with -inf or with the smallest number of the type, which is -65504 in float16."""


class Checksum(NamedTuple):
    """Shows whether a tensor has changed. Both sums may be NaN."""

    total: float
    """The sum of the entries."""
    size: float
    """The sum of their absolute values."""


ZERO = Checksum(0.0, 0.0)
"""Checksum of a gradient that is 0, or absent."""


@dataclass
class SeenBackward:
    """What :class:`StepWatch` has seen of the last backward."""

    number: int
    """Its number in the step, from 1."""
    parameters_at_start: dict[str, tuple[Checksum, bool]] = field(default_factory=dict)
    """The checksum of each parameter, and whether the parameter requires a gradient."""
    gradients_at_end: Mapping[str, Checksum] | None = None
    """Checksums of the gradients. None: it has not ended. It runs now, or it has raised."""
    is_followed_by_step: bool = False
    """Whether an optimizer has made a step since it started."""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.gradients_at_end is None


class StepWatch:
    """Lists faults of the gradient of one optimizer step; a context around the step.

    Hooks in the graph of autograd show when a backward starts. Then the weights must be the same as at the start of the
    previous backward, and the gradients the same as at its end.

    The first forward is repeated twice, to see whether a forward writes state that changes the next one.

    With FSDP1 weights and gradients are not compared, because it moves them between two backwards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.faults: list[str] = []
        """A sentence for each fault that was found on this rank. The list is complete when the context ends."""
        self.gradients_at_step: dict[str, Checksum] = {}
        """Checksums of the gradients that an optimizer of the parameters used in its last step. Without such a step, of
        the gradients at the end of the context. Those that are NaN or infinite are left out, and sharded parameters.
        Empty with FSDP1, or if optimizers step within the backward."""
        self._model = inner_model(model)
        parameters = self._model.named_parameters()
        trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._trained_ids = {id(parameter) for parameter in trained.values()}
        """The ``id()`` of each trained parameter, with FSDP1, too. ``_parameters`` is empty with FSDP1."""
        # By the name of the class, because a newer torch may have no FSDP1.
        classes = {type(module).__name__ for module in self._model.modules()}
        self._parameters = {} if 'FullyShardedDataParallel' in classes else trained
        self._hooks = ExitStack()
        self._gradient_nodes: list[torch.autograd.graph.Node] = []
        self._backward: SeenBackward | None = None
        """The last backward. None: there was none yet, or it has raised, and the loop computes the step again."""
        self._has_ever_stepped = False
        """Whether an optimizer has made any step in the context."""
        self._inputs: list[tuple[Any, Any]] = []
        """Positional and named arguments of the forwards that run, before other hooks change them. There are several if
        a hook runs the model, such as that of ``LogitsAtLabels``."""
        self._has_repeated = False
        """Whether the first forward that returns logits with a graph was repeated. Later ones are not repeated."""

    def __deepcopy__(self, memo: object) -> StepWatch:
        # `copy.deepcopy(model)`, for an average of its weights, copies the model's hooks, which are methods of this
        # object. The copied hooks belong to this object too, and do nothing for the copy.
        return self

    def __enter__(self) -> StepWatch:
        for parameter in self._parameters.values():
            # The node that adds to the gradient. `TokenAccumulation` refuses hooks of the parameter itself, because
            # they may change its gradient.
            node = get_gradient_edge(parameter).node
            self._gradient_nodes.append(node)  # without a reference it is freed together with the graph
            self._hooks.enter_context(node.register_prehook(self._on_backward_start))
        handles = [
            register_optimizer_step_pre_hook(self._on_optimizer_step),
            # The first hook, because a later one may keep only some of the labels, for logits only at labels. The
            # repeated forwards need all: they select labels again, or compute all logits.
            self._model.register_forward_pre_hook(self._keep_inputs, prepend=True, with_kwargs=True),
            # Called even if the forward raises, to drop its inputs.
            self._model.register_forward_hook(self._after_forward, always_call=True),
        ]
        for handle in handles:
            self._hooks.enter_context(handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        if not self._has_ever_stepped:
            # No step was seen. Either the loop moves the weights itself, or its optimizer has copies of them, or a
            # GradScaler has left out the step, because a gradient is not finite.
            gradients = self._gradient_checksums()
            self._keep_gradients({name: sums for name, sums in gradients.items() if math.isfinite(sums.size)})

    def _on_backward_start(self, gradients: object) -> None:
        """Compares weights and gradients with those of the previous backward, before this one adds to a gradient."""
        previous = self._backward
        # A backward reaches several nodes with this hook. Only the first one counts.
        if previous is not None and previous.is_open:
            return
        number = 1 if previous is None else previous.number + 1
        backward = SeenBackward(number)
        # Kept before the checksums, because memory may run out there. Then the backward raises, and stays open.
        self._backward = backward
        when_backward_ends(self._on_backward_end)
        for name, checksum in _checksums(self._parameters).items():
            backward.parameters_at_start[name] = checksum, self._parameters[name].requires_grad
        gradients_at_start = self._gradient_checksums()
        if previous is not None:
            self._list_changes(previous, backward.parameters_at_start, gradients_at_start)
            return
        names = [name for name, checksum in gradients_at_start.items() if checksum != ZERO]
        if names:
            self.faults.append(
                f'Gradients were not 0 before the first backward, or after one that raised: {listed(names)}. Call '
                '`zero_grad` first.'
            )

    def _list_changes(
        self,
        previous: SeenBackward,
        parameters: Mapping[str, tuple[Checksum, bool]],
        gradients: Mapping[str, Checksum],
    ) -> None:
        """Adds the faults that happened between the previous backward and the one that starts now."""
        assert previous.gradients_at_end is not None
        between = f'between backward {previous.number} and {previous.number + 1}'
        if previous.is_followed_by_step:
            # The step explains all other changes.
            self.faults.append(f'An optimizer made a step {between}. Call its `step` after the last microbatch.')
            return
        names = _changed_names(previous.parameters_at_start, parameters)
        if names:
            self.faults.append(f'Parameters changed, or were frozen or unfrozen, {between}: {listed(names)}.')
        names = _changed_names(previous.gradients_at_end, gradients)
        if names:
            self.faults.append(
                f'Gradients changed {between}: {listed(names)}. Call `zero_grad`, clip and unscale once a step, not '
                'in every microbatch.'
            )

    def _on_backward_end(self) -> None:
        """Keeps the gradients, to compare them when the next backward starts."""
        assert self._backward is not None  # it has started
        self._backward.gradients_at_end = self._gradient_checksums()

    def _on_optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        args: object,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records a step of an optimizer of these parameters, and the gradients that it uses.

        It is a fault if gradients of its parameters were set to 0 before. It is also one if they are NaN or infinite,
        unless a GradScaler lets the optimizer leave out such a step.
        """
        stepped_ids: set[int] = set()
        for group in optimizer.param_groups:
            stepped_ids |= {id(parameter) for parameter in group['params']}
        if not stepped_ids & self._trained_ids:
            return
        self._has_ever_stepped = True
        if self._backward is None:
            return
        self._backward.is_followed_by_step = True
        gradients_at_end = self._backward.gradients_at_end
        # Within a backward, an optimizer may make its step as soon as one gradient is complete.
        if gradients_at_end is None:
            return
        stepped = {}
        for name, gradient in self._gradient_checksums().items():
            if id(self._parameters[name]) in stepped_ids:
                stepped[name] = gradient
        finite = {name: gradient for name, gradient in stepped.items() if math.isfinite(gradient.size)}
        self._keep_gradients(finite)
        lost_names = []
        for name, gradient in finite.items():
            if gradient == ZERO and gradients_at_end[name] != ZERO:
                lost_names.append(name)
        if lost_names:
            self.faults.append(
                'Gradients were set to 0 between the last backward and the step of the optimizer: '
                f'{listed(lost_names)}. Call `zero_grad` after the step, and freeze parameters by '
                '`requires_grad_(False)`.'
            )
        nonfinite_names = [name for name in stepped if name not in finite]
        # A GradScaler leaves out the step of most optimizers itself. It tells a fused one by this attribute whether to
        # leave it out, and an older kind, such as that of Transformer Engine, by this argument.
        may_leave_out = hasattr(optimizer, 'found_inf') or kwargs.get('grad_scaler') is not None
        if nonfinite_names and not may_leave_out:
            self.faults.append(
                f'Gradients were NaN or infinite at the step of the optimizer: {listed(nonfinite_names)}. Is a loss a '
                'mean over no labels, or does float16 overflow without a GradScaler?'
            )

    def _keep_gradients(self, gradients: Mapping[str, Checksum]) -> None:
        """Keeps checksums of gradients in :attr:`gradients_at_step`."""
        for name, gradient in gradients.items():
            if not isinstance(self._parameters[name], DTensor):
                self.gradients_at_step[name] = gradient

    def _gradient_checksums(self) -> dict[str, Checksum]:
        return _checksums({name: parameter.grad for name, parameter in self._parameters.items()})

    def _keep_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Keeps the arguments of a forward until it ends, to repeat it."""
        if module is self._model:  # copies of the model have its hooks
            self._inputs.append((args, kwargs))

    def _after_forward(self, module: torch.nn.Module, inputs: object, outputs: Any) -> None:
        """Adds a hook that sees the backward, and repeats the first forward, see :meth:`_list_written_state`."""
        if module is not self._model:
            return
        if self._backward is not None and self._backward.is_open and not is_in_backward():
            # The last backward raised, perhaps because memory ran out. The loop must compute the whole step again.
            self._backward = None
        args, kwargs = self._inputs.pop()
        logits = logits_of(outputs)
        if logits is None or logits.grad_fn is None:
            return
        # A backward reaches the logits before any parameter. With FSDP2 it never reaches the nodes that `__enter__`
        # hooks, because the forward uses gathered parameters.
        node, _ = edge_of(logits)
        assert node is not None  # the logits have a graph
        node.register_prehook(self._on_backward_start)
        if not self._has_repeated:
            self._has_repeated = True
            self._list_written_state(args, kwargs, logits.dtype)

    def _list_written_state(self, args: Any, kwargs: Any, dtype: torch.dtype) -> None:
        """Repeats a forward twice. It is a fault if the two have different logits, because the first changed a state.

        ``dtype`` is the type of the logits.
        """
        difference, written = _difference_of_forwards(self._model, args, kwargs)
        if math.isnan(difference):
            # This alone is no sign of state that forwards write. The weights may be NaN.
            names = f' A forward writes {listed(written)}.' if written else ''
            self.faults.append(
                'The logits of two forwards of the same rows cannot be compared: a logit is NaN or infinite, or their '
                f'shapes differ.{names}'
            )
        elif difference > tolerance_of(dtype):
            names = listed(written) if written else 'state that is no tensor or number of a module'
            self.faults.append(
                f'A forward writes {names}, and the next one depends on it: the logits of the same rows differ by '
                f'{difference:.1e}. Freeze this state, or update it once a step.'
            )


def _difference_of_forwards(
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[float, list[str]]:
    """Runs a forward twice. Returns the relative difference of the logits, and the names of the state that it writes.

    Both have the same random numbers, unlike the training forward. Leaves the module as it is. The hooks of StepWatch
    run again, and return early, because these logits have no graph.
    """
    logits = []
    with torch.no_grad(), undisturbed(module) as snapshot:
        # The module uses copies of its tensors here. If these forwards wrote into the tensors themselves, the backward
        # of the training forward, which is still to come, would raise.
        snapshot.lend_copies()
        state_of_copies = StateSnapshot.of_model(module)
        for _ in range(2):
            with same_random_numbers():
                logits.append(logits_of(module(*args, **kwargs)))
        written = [state.name for state in state_of_copies.written()]
    return relative_difference(*logits), written


def relative_difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Returns the norm of the difference of two tensors of logits over the norm of the first.

    NaN if a tensor is missing, if the shapes differ, or if a logit is NaN, or infinite in the first tensor. If one is
    infinite only in the second tensor, the result is infinite. Masked logits may be -inf.
    """
    if first is None or second is None or first.shape != second.shape:
        return float('nan')
    # A masked logit would make the difference NaN, or the norm so large that no difference shows. It is clamped, not
    # left out: if round-off moves a logit across the limit in one tensor, it must not differ by its whole size.
    is_masked = (first <= MASKED_LOGIT) & (second <= MASKED_LOGIT)
    first = first.detach().clamp(min=MASKED_LOGIT)
    second = second.detach().clamp(min=MASKED_LOGIT)
    # Only the sums are in float64. A copy of the logits in float64 would take too much memory.
    change = torch.linalg.vector_norm(second - first, dtype=torch.float64)
    size = torch.linalg.vector_norm(first.masked_fill_(is_masked, 0), dtype=torch.float64)
    return float(change / size.clamp(min=TINY))


def _checksums(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Checksum]:
    """Returns the checksum of each tensor by name. Copies of all gradients would need too much memory."""
    checksums = {}
    for name, tensor in tensors.items():
        if tensor is None:
            checksums[name] = ZERO
            continue
        values = tensor.detach()
        if isinstance(values, DTensor):
            values = values.to_local()
        if values.is_sparse:
            values = values.coalesce().values()
        checksums[name] = Checksum(
            total=float(values.sum(dtype=torch.float64)),
            size=float(values.abs().sum(dtype=torch.float64)),
        )
    return checksums


def _changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Returns the names whose value has changed. Both mappings have the same names."""
    # As text, because NaN is not equal to itself. A gradient that overflows, which a GradScaler allows, may sum to NaN.
    return [name for name, value in after.items() if str(value) != str(before[name])]


def unequal_on_ranks(gradients_by_rank: Sequence[Mapping[str, Checksum]]) -> list[str]:
    """Returns the names of the gradients if none of them was averaged over the ranks, so that all differ between ranks.

    If any gradient is the same on all ranks, returns no names. The other gradients may differ then, because ranks may
    have different experts.

    Args:
        gradients_by_rank: ``StepWatch.gradients_at_step`` of each rank.
    """
    names_of_ranks = [gradients.keys() for gradients in gradients_by_rank]
    unequal = []
    for name in sorted(set(names_of_ranks[0]).intersection(*names_of_ranks)):
        sizes = [gradients[name].size for gradients in gradients_by_rank]
        if max(sizes) == 0:  # shows nothing, because it is 0 without averaging, too
            continue
        # A loop may add up the gradients in another order on each rank.
        if math.isclose(min(sizes), max(sizes), rel_tol=SAME_GRADIENT):
            return []
        unequal.append(name)
    return unequal


def listed(names: Sequence[str]) -> str:
    """Returns the first three names as text, and the number of the others."""
    text = ', '.join(f'`{name}`' for name in names[:3])
    if len(names) > 3:
        text += f' and {len(names) - 3} others'
    return text
