# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds changes of parameters, gradients and buffers while a step accumulates its gradient.

Weights of tokens are measured at the logits. They do not show a later change of the gradient. A loop that calls
``zero_grad`` after each microbatch has equal weights at the logits, and loses all microbatches except the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_tokacc.checks.logits import TINY, logits_of, node_of, tolerance_of
from composer_tokacc.checks.written_state import undisturbed
from composer_tokacc.compat import buffer_versions, inner_model, state_of_gradient, when_backward_ends
from composer_tokacc.random_state import same_random_numbers

Versions = dict[str, tuple[int, int]]
"""By the name of a buffer: numbers that change if it is replaced or written."""
Checksum = tuple[str, str]
"""Sum and absolute sum of a tensor, as text."""
ZERO: Checksum = ((0.0).hex(), (0.0).hex())
"""Checksum of a gradient that is 0, or absent."""


class StepWatch:
    """Lists faults of the gradient of one optimizer step; a context around the step.

    Parameters and gradients of FSDP1 are not followed, because it moves them between two backwards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.faults: list[str] = []
        """Sentences, of this rank. Complete when the context ends."""
        self._model = inner_model(model)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._trained_ids = {id(parameter) for parameter in trained}
        """Identities of all trained parameters, also if FSDP1 moves them."""
        self._parameters = _followed_parameters(self._model)
        self._hooks = ExitStack()
        self._gradient_nodes: list[torch.autograd.graph.Node] = []
        self._num_backwards = 0
        self._in_backward = False
        self._has_accumulated = False
        """Whether the last backward added to the gradients, if only 0. ``torch.autograd.grad`` does not."""
        self._states_before: list[tuple[int, int]] = []
        """States of the gradients before the last backward, see :func:`.state_of_gradient`."""
        self._has_stepped = False
        """Whether an optimizer has made a step since the last backward."""
        self._last_weights: dict[str, Checksum] = {}
        """Weights at the start of the last backward."""
        self._last_gradients: dict[str, Checksum] = {}
        """Gradients at the last start or end of a backward."""
        self._buffers_before: Versions = {}
        """Buffers before the forward."""
        self._has_repeated = False
        """Whether the first forward was repeated. The later ones are not."""

    def __deepcopy__(self, memo: object) -> StepWatch:
        return self  # a copy of the model, such as an average of weights, has the same hooks

    def __enter__(self) -> StepWatch:
        for parameter in self._parameters.values():
            # Not a hook of the tensor: `TokenAccumulation` refuses hooks that may change a gradient.
            node = get_gradient_edge(parameter).node
            self._gradient_nodes.append(node)  # kept alive: the graph holds it only while it is used
            self._hooks.enter_context(node.register_prehook(self._on_backward))
        handles = [
            register_optimizer_step_pre_hook(self._on_optimizer_step),
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        for handle in handles:
            self._hooks.enter_context(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _on_backward(self, gradients: object) -> None:
        """Compares weights and gradients with those of the last backward, before this one adds to a gradient."""
        if self._in_backward:
            return
        self._in_backward = True
        self._num_backwards += 1
        when_backward_ends(self._on_backward_end)
        weights_now = _checksums(self._parameters)
        gradients_now = self._gradient_checksums()
        if self._num_backwards == 1:
            names = [name for name, checksum in gradients_now.items() if checksum != ZERO]
            if names:
                self.faults.append(
                    f'Gradients were not 0 before the first backward: {_listed(names)}. Call `zero_grad` first.'
                )
        else:
            self._compare(weights_now, gradients_now)
        # Each change is listed once.
        self._last_weights = weights_now
        self._last_gradients = gradients_now
        self._states_before = self._gradient_states()
        self._has_stepped = False

    def _compare(self, weights_now: Mapping[str, Checksum], gradients_now: Mapping[str, Checksum]) -> None:
        between = f'between backward {self._num_backwards - 1} and {self._num_backwards}'
        if self._has_stepped:
            # It explains all other changes.
            self.faults.append(f'An optimizer made a step {between}. Step behind the last microbatch.')
            return
        names = _changed_names(self._last_weights, weights_now)
        if names:
            self.faults.append(f'Parameters changed {between}: {_listed(names)}.')
        names = [name for name, parameter in self._parameters.items() if not parameter.requires_grad]
        if names:
            self.faults.append(f'Parameters were frozen {between}: {_listed(names)}.')
        names = _changed_names(self._last_gradients, gradients_now)
        # If the last backward accumulated nothing, the loop does it itself, around `torch.autograd.grad`.
        if names and self._has_accumulated:
            self.faults.append(
                f'Gradients changed {between}: {_listed(names)}. Call `zero_grad`, clip and unscale once a step, not '
                'in every microbatch.'
            )

    def _on_backward_end(self) -> None:
        gradients_now = self._gradient_checksums()
        # A backward that adds 0 changes only the states. FSDP2 may change only the sums.
        was_written = self._gradient_states() != self._states_before
        self._has_accumulated = was_written or gradients_now != self._last_gradients
        self._last_gradients = gradients_now
        self._in_backward = False

    def _on_optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        args: object,
        kwargs: object,
    ) -> None:
        """Notes a step of an optimizer of the model. It is a fault if all its gradients were set to 0 before."""
        stepped: set[int] = set()
        for group in optimizer.param_groups:
            stepped |= {id(parameter) for parameter in group['params']}
        if not stepped & self._trained_ids:
            return
        self._has_stepped = True
        # An optimizer may also make its step inside of the backward, as soon as a gradient is complete.
        if self._in_backward or not self._has_accumulated:
            return
        gradients_now = self._gradient_checksums()
        names = [name for name, parameter in self._parameters.items() if id(parameter) in stepped]
        has_gradient = any(self._last_gradients[name] != ZERO for name in names)
        if has_gradient and all(gradients_now[name] == ZERO for name in names):
            self.faults.append('Gradients were set to 0 between the last backward and the step of the optimizer.')

    def _gradient_states(self) -> list[tuple[int, int]]:
        return [state_of_gradient(parameter) for parameter in self._parameters.values()]

    def _gradient_checksums(self) -> dict[str, Checksum]:
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        return dict.fromkeys(gradients, ZERO) | _checksums(present)

    def _before_forward(self, module: torch.nn.Module, args: object) -> None:
        if module is self._model and not self._has_repeated:
            self._buffers_before = buffer_versions(module)

    def _after_forward(
        self,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        outputs: Any,
    ) -> None:
        """Watches for the backward. Repeats the first forward, to see whether one depends on those before it."""
        logits = logits_of(outputs)
        is_copy = module is not self._model  # copies of the model have its hooks
        if is_copy or logits is None or logits.grad_fn is None:
            return
        # Backward reaches the logits first. With FSDP2 it does not reach the nodes of the optimizer's parameters.
        node, _ = node_of(logits)
        assert node is not None  # the logits have a graph
        node.register_prehook(self._on_backward)
        if self._has_repeated:
            return
        self._has_repeated = True
        written = _written_names(self._buffers_before, buffer_versions(module))
        difference = _difference_of_forwards(module, args, kwargs)
        if not difference <= tolerance_of(logits.dtype):
            names = _listed(written) if written else 'something outside of its buffers'
            self.faults.append(
                f'A forward writes {names}, and the next one depends on it: the logits of the same rows differ by '
                f'{difference:.1e}. Freeze this state, or update it once a step.'
            )


def _difference_of_forwards(
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
) -> float:
    """Returns the relative difference of the logits of two equal forwards; leaves the module as it is."""
    logits = []
    with torch.no_grad(), undisturbed(module) as snapshot:
        # The backward of the forward before is still to come.
        snapshot.lend_copies()
        for _ in range(2):
            with same_random_numbers():
                logits.append(logits_of(module(*args, **kwargs)))
    return relative_difference(*logits)


@contextmanager
def written_buffers() -> Iterator[set[str]]:
    """Collects which buffers forwards write, in all modules that run inside of this context.

    They are named by the class of their module, because names in the model are not known here.
    """
    written: set[str] = set()
    before: dict[int, Versions] = {}

    def before_forward(module: torch.nn.Module, args: object) -> None:
        # A compiled model would have the hooks in its graph.
        if not torch.compiler.is_compiling():
            before[id(module)] = buffer_versions(module, recurse=False)

    def after_forward(
        module: torch.nn.Module,
        args: object,
        outputs: object,
    ) -> None:
        if torch.compiler.is_compiling():
            return
        versions = before.pop(id(module), {})
        for name in _written_names(versions, buffer_versions(module, recurse=False)):
            written.add(f'{type(module).__name__}.{name}')

    with register_module_forward_pre_hook(before_forward), register_module_forward_hook(after_forward):
        yield written


def relative_difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Returns the norm of the difference over the norm of the first."""
    if first is None or second is None or first.shape != second.shape:
        return float('nan')
    # Only the sums are in float64. A copy of the logits in float64 would take too much memory.
    difference = second.detach() - first.detach()
    change = torch.linalg.vector_norm(difference, dtype=torch.float64)
    size = torch.linalg.vector_norm(first.detach(), dtype=torch.float64)
    return float(change / size.clamp(min=TINY))


def _followed_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the trained parameters by name, none if FSDP1 moves them between two backwards."""
    if any(type(module).__name__ == 'FullyShardedDataParallel' for module in model.modules()):
        return {}
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, Checksum]:
    """Returns two sums of each tensor, because copies of all gradients would need too much memory."""
    checksums = {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        if isinstance(values, DTensor):
            values = values.to_local()
        if values.is_sparse:
            values = values.coalesce().values()
        total = float(values.sum(dtype=torch.float64))
        size = float(values.abs().sum(dtype=torch.float64))
        # As text, because NaN is not equal to itself. `+ 0.0` turns -0.0 into 0.0.
        checksums[name] = ((total + 0.0).hex(), size.hex())
    return checksums


def _changed_names(before: Mapping[str, Checksum], after: Mapping[str, Checksum]) -> list[str]:
    return [name for name, checksum in after.items() if checksum != before[name]]


def _written_names(before: Versions, after: Versions) -> list[str]:
    return [name for name, version in after.items() if before.get(name, version) != version]


def _listed(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of the others."""
    listed = ', '.join(f'`{name}`' for name in names[:3])
    if len(names) > 3:
        listed += f' and {len(names) - 3} others'
    return listed
