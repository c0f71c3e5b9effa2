# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The load-balancing loss of a mixture of experts over a whole step, whatever its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from composer.core import State
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.loss_terms import LossTerms, SplitLoss
from composer_tokacc.batch import Batch, attended_positions, sample_name, text_of, with_own_tensors
from composer_tokacc.checks.comparison import documents_of
from composer_tokacc.checks.logits import entry_of, router_loss_of
from composer_tokacc.checks.probe import undisturbed
from composer_tokacc.collectives import RankSum, get_world_size
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.metadata import metadata_of, without_metadata
from composer_tokacc.weights import LOSS_WEIGHTS

ROUTER_BALANCES = ('microbatch', 'step')
VALUE_TOLERANCE = 1e-4
"""By which the model's own load-balancing loss of a microbatch may be off what it is computed to be here, relatively;
another number of experts a token changes it by more than a hundredth."""
CHOICE_TOLERANCE, FEW_CHOICES = 1e-3, 2
"""Part of the choices of experts, and their number in any case, that may be others in training than they were without
a graph: kernels that add up in no fixed order turn a few where two experts are equally good."""
OTHERWISE = "Otherwise leave `router_balance='microbatch'` (docs/weights.md#mixtures-of-experts)."


class StepBalance:
    r"""Gives every microbatch its part of the load-balancing loss that one forward over the global batch would have.

    With :math:`p_{te}` the router's probability of expert :math:`e` at position :math:`t`, :math:`n` positions and
    :math:`c_e` of them sent to the expert, each summed over the layers, it is (Switch Transformers, equations 4 to 6)

    .. math:: E \sum_e \frac{c_e}{n} \frac{\sum_t p_{te}}{n}

    Choices have no gradient. Once :math:`c` and :math:`n` of the whole step are known, by a forward of each microbatch
    without a graph, the rest is a sum over its positions, and so over its microbatches.
    """

    def __init__(
        self,
        state: State,
        split: MicrobatchSplit | None,
        terms: LossTerms,
        to_device: Callable[[Batch], Any],
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        if split is None:
            raise _refusal(
                'must know the microbatches of a step before the first is trained, got: a loader with another '
                '`split_batch`. Use token_data_spec().'
            )
        if terms.router_coefficient is None:
            raise _refusal(
                'must know what the load-balancing loss is multiplied by, got: a config without '
                '`router_aux_loss_coef`. Name it there, if the model has a router.'
            )
        if state.auto_microbatching and get_world_size() > 1:
            # The ranks would wait for one that runs out of memory while it counts.
            raise _refusal("on several ranks needs a number for `device_train_microbatch_size`, got: 'auto'.")
        self._model: Any = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
        self._split, self._device, self._coefficient = split, state.device, terms.router_coefficient
        self._to_device, self._precision = to_device, precision
        self._top_k: int | None = None
        self._masks: list[torch.Tensor] = []
        self._choices: list[torch.Tensor] = []
        """Of each microbatch: which positions count, and how often each expert was chosen there."""
        self._sums: Any = None
        """RankSum of the step: positions times layers, and choices of each expert."""
        self._deviations: dict[str, list[torch.Tensor]] = {}

    def count(self) -> None:
        """Counts where positions of this rank's microbatches are sent, as they will be in training; a collective."""
        self._masks, self._choices, self._deviations = [], [], {'values': [], 'choices': []}
        num_positions = 0
        with torch.no_grad(), undisturbed(self._model):
            for microbatch in self._split.made:
                batch = without_metadata(microbatch)
                batch.pop(LOSS_WEIGHTS, None)
                batch = self._to_device(with_own_tensors(batch))
                with self._precision():
                    outputs = self._model(batch)
                    logits = self._checked_logits(outputs, batch)
                    self._masks.append(counted_positions(microbatch).to(logits[0].device))
                    self._choices.append(_routed(logits, self._masks[-1], self._top_k or 1)[0].sum(dim=0))
                num_positions = num_positions + self._masks[-1].sum() * len(logits)
        sums = torch.stack([torch.as_tensor(num_positions), *torch.stack(self._choices).sum(dim=0)])
        self._sums = RankSum(self._device.tensor_to_device(sums))

    def _checked_logits(self, outputs: Any, batch: Batch) -> Sequence[torch.Tensor]:
        """Returns the router's logits of each layer, if the model's own loss is the statistic of them.

        How many experts a position is sent to configs call by many names; the loss grows with it, and tells.
        """
        found, attended = router_loss_of(outputs), _attended(batch)
        logits = _router_logits(outputs)
        if not logits or found is None or any(len(layer) != attended.numel() for layer in logits):
            raise _refusal(
                'needs `router_logits` of each position and their `aux_loss` in the outputs of the model, got: '
                f'{"an" if found is not None else "no"} `aux_loss`, and logits of {[len(one) for one in logits][:4]} '
                f'for {attended.numel()} positions. Set `output_router_logits=True` in the config of a mixture of '
                'experts.'
            )
        values = _balances(*_routed(logits, attended, self._top_k or logits[0].shape[-1]), len(logits) * attended.sum())
        tolerance = max(VALUE_TOLERANCE, 4 * torch.finfo(logits[0].dtype).eps)
        if is_first := self._top_k is None:
            self._top_k = int((values - found).abs().argmin()) + 1
        self._deviations['values'].append((values[self._top_k - 1] / found - 1).abs() / tolerance)
        if is_first:
            self.check()
        return logits

    def applied(self, loss: Any, outputs: Any, index: int, num_microbatches: int) -> Any:
        """Returns the loss of a microbatch with its part of the step's balance for its own; by number in the step."""
        with self._precision():
            choices, probabilities = _routed(_router_logits(outputs), self._masks[index], self._top_k or 1)
        turned = (choices.sum(dim=0) - self._choices[index]).abs().sum() / 2
        few = (CHOICE_TOLERANCE * choices.sum()).clamp(min=FEW_CHOICES)
        self._deviations['choices'].append(turned / few)
        num_positions, *of_experts = self._sums.read()
        weights = [len(of_experts) * count / max(num_positions, 1) ** 2 for count in of_experts]
        balance = (probabilities.new_tensor(weights) * probabilities).sum()
        # A sum, where terms of microbatches are averaged over those of all ranks.
        factor = self._coefficient * num_microbatches * get_world_size()
        return SplitLoss(tokens=loss['tokens'], router=factor * balance)

    def check(self) -> None:
        """Raises RuntimeError unless the model's own loss and its routing in training were as they were taken for."""
        groups = [torch.stack(of_kind) for of_kind in self._deviations.values() if of_kind]
        worst = torch.stack([group.nan_to_num(nan=0.0).amax() for group in groups]).tolist()
        if worst[0] > 1:
            raise _refusal(
                "needs the load-balancing loss of Hugging Face's mixtures of experts, got: an `aux_loss` that is not "
                'the number of experts times the sum over them of the part of the positions that choose one and its '
                'mean probability, by `router_logits`.'
            )
        if len(worst) > 1 and worst[1] > 1:
            raise _refusal(
                f'needs positions to choose the same experts with and without a graph, got: {worst[1]:.1f} times as '
                'many others as round-off explains. Random numbers are drawn between forward and forward, or an '
                'algorithm changes microbatches: leave that out.'
            )


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(f"`router_balance='step'` {what} {OTHERWISE}")


def counted_positions(microbatch: Batch) -> torch.Tensor:
    """Returns which positions of a microbatch are attended ones of samples, ``(rows, width)`` bool."""
    attended = _attended(microbatch)
    real = torch.tensor(metadata_of(microbatch)['real_tokens'], device=attended.device)[:, None]
    if len(real) > 1 or not bool(attended.all()):
        return attended & (real > 0)  # dummy rows have none
    # Of a packed row, dummy rows come last.
    counted = torch.arange(attended.shape[1], device=real.device) < real
    places = documents_of(microbatch)[0] if 'position_ids' in microbatch and len(counted) == 1 else None
    if places is not None and 0 < (end := int(real)) < len(places) and places[end] == places[end - 1]:
        raise _refusal(
            'needs packed rows of attended positions alone, got: a label on padding, which becomes a position, in '
            f'{sample_name(microbatch, 0)}. Mask it, or set `packing=False`.'
        )
    return counted


def _attended(batch: Batch) -> torch.Tensor:
    """Returns which positions are no padding, ``(rows, width)`` bool; the mask of a packed row has a row a document."""
    attended = attended_positions(batch)
    return attended if len(attended) == len(text_of(batch)) else attended.any(dim=0, keepdim=True)


def _router_logits(outputs: Any) -> Sequence[torch.Tensor]:
    """Returns those of each layer with experts, ``(positions, experts)`` each; of a model without any, none."""
    return [one.flatten(0, -2) for one in entry_of(outputs, 'router_logits') or () if isinstance(one, torch.Tensor)]


def _routed(logits: Sequence[torch.Tensor], counted: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over layers and counted positions, by the operations of the models' own loss.

    Returns:
        How often each expert was chosen first, second and so on, int64 of shape ``(top_k, experts)``, and its
        probability, ``(experts,)``.
    """
    num_experts, device = logits[0].shape[-1], logits[0].device
    counted = counted.flatten().to(device)
    choices = torch.zeros(top_k * num_experts, dtype=torch.int64, device=device)
    probabilities = []
    for layer in logits:
        routed = layer.to(device).softmax(dim=-1)
        places = routed.topk(top_k, dim=-1).indices + num_experts * torch.arange(top_k, device=device)
        choices.scatter_add_(0, places.flatten(), counted.long().repeat_interleave(top_k))
        exact = routed.to(torch.promote_types(routed.dtype, torch.float32))
        probabilities.append((exact * counted[:, None]).sum(dim=0))
    return choices.view(top_k, num_experts), torch.stack(probabilities).sum(dim=0)


def _balances(choices: torch.Tensor, probabilities: torch.Tensor, num_positions: torch.Tensor) -> torch.Tensor:
    """Returns the load-balancing loss of some positions, if each is sent to one expert, to two and so on."""
    parts = choices.cumsum(dim=0) / num_positions
    return choices.shape[1] * (parts * probabilities / num_positions).sum(dim=1)
