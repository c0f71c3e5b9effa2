# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The load-balancing loss of a mixture of experts over a whole step, for any cut into microbatches.

In each layer with experts, a router chooses a few experts for each position. Before a step is trained, one forward of
each microbatch without gradients counts how often each expert is chosen. One all-reduce sums the counts. With these
sums the loss of the step is a sum over its microbatches, and each microbatch gets its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from composer.core import State
from torch import Tensor

from composer_tokacc.algorithm.loss_terms import LossTerms, SplitLoss
from composer_tokacc.batch import Batch, attended_positions, text_of, with_copied_tensors
from composer_tokacc.checks.logits import entry_of, router_loss_of
from composer_tokacc.checks.written_state import undisturbed
from composer_tokacc.collectives import add_over_ranks, get_world_size
from composer_tokacc.compat import inner_model
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.refusals import NotExactError
from composer_tokacc.row_counts import RowCounts, row_counts_of, without_row_counts
from composer_tokacc.weights import LOSS_WEIGHTS

ROUTER_BALANCES = ('microbatch', 'step')
LOSS_TOLERANCE = 1e-4
"""Largest relative difference between the model's own load-balancing loss of a microbatch and the one computed here,
if the logits are float32; see `_compare_losses` for other types. With another number of experts per position, the
relative difference would be more than 0.01."""
CHOICE_TOLERANCE = 1e-3
"""Largest share of the choices that may differ between the count and the forward in training. A few choices change if
two experts are equally probable and a kernel does not sum in a fixed order."""
FEW_CHOICES = 2
"""Number of choices that may always differ, even if there are few choices."""
OR_LEAVE_MICROBATCH = "Otherwise leave `router_balance='microbatch'` (docs/weights.md#mixtures-of-experts)."
"""The end of messages that refuse the option."""


class CountedMicrobatch(NamedTuple):
    """Counts of a microbatch that is not trained yet."""

    positions: Tensor
    """Which positions count for the step: see :func:`counted_positions`, ``(rows, width)`` bool."""
    num_positions: Tensor
    """The number of these positions, a scalar. A position counts once for each layer."""
    choices: Tensor
    """How often each expert was chosen at these positions, ``(experts,)`` int64."""


class StepBalance:
    r"""Gives every microbatch its part of the load-balancing loss that one forward over the global batch would have.

    This loss is (Switch Transformers, equations 4 to 6)

    .. math:: E \sum_e \frac{c_e}{n} \frac{\sum_t p_{te}}{n}

    Here :math:`E` is the number of experts, :math:`n` the number of positions, :math:`c_e` how many of them go to
    expert :math:`e`, and :math:`p_{te}` the router's probability of this expert at position :math:`t`. A position
    counts once for each layer.

    Choices have no gradient, so a forward of each microbatch without a graph gives :math:`c` and :math:`n` of the whole
    step. With these numbers the loss is a sum over positions, and so over microbatches.

    Args:
        state: The trainer's state.
        split: The split that cuts the batches of the run. None is refused, because then the microbatches of a step are
            not known before the first is trained.
        terms: The terms of the model's loss.
        to_device: Moves a microbatch to the device.
        precision: Makes the context of the run's precision.

    Raises:
        RuntimeError: If the run cannot have ``router_balance='step'``.
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
            # If one rank ran out of memory while it counts, the others would wait for it.
            raise _refusal("on several ranks needs a number for `device_train_microbatch_size`, got: 'auto'.")
        self._model = inner_model(state.model)
        self._device = state.device
        self._terms = terms
        self._to_device = to_device
        self._precision = precision
        # Number of experts chosen for a position. 0: not known yet. The first microbatch with tokens shows it.
        self._top_k = 0
        self._forget_step()

    def _forget_step(self) -> None:
        """Forgets an earlier step, or an earlier attempt to compute this step. :meth:`count` calls it first."""
        self._counted: deque[CountedMicrobatch] = deque()
        """The microbatches of this rank that are not trained yet."""
        # Sums over the step and all ranks. They stay on the device, because the host would have to wait to read them.
        self._num_positions = torch.tensor(0)
        """The number of positions. A position counts once for each layer."""
        self._choices_of_experts = torch.tensor([0])
        """How often each expert was chosen, ``(experts,)``."""
        self._loss_deviation = torch.zeros(())
        """The largest deviation of a loss so far, as a multiple of its tolerance, a scalar on the device."""
        self._choice_deviation = torch.zeros(())
        """The same for choices."""

    def count(self, microbatches: Sequence[Batch], *, is_weighted: bool) -> None:
        """Computes each microbatch without a graph, and counts how often each expert is chosen; a collective.

        Args:
            microbatches: The microbatches of this rank in the step.
            is_weighted: Whether tokens may have weights. If so, this package has written the weights into the
                microbatches, and the model does not get them.

        Raises:
            RuntimeError: If the model has no load-balancing loss, or another one at the first comparison.
        """
        self._forget_step()
        # undisturbed() puts random numbers and buffers back, so that the forwards in training find the same state.
        # Nothing here asks whether a forward has written parameters, so it need not watch them, which takes time.
        with torch.no_grad(), undisturbed(self._model, watches_parameters=False):
            for microbatch in microbatches:
                counted = self._count_microbatch(microbatch, is_weighted=is_weighted)
                self._counted.append(counted)
        num_positions = torch.stack([counted.num_positions for counted in self._counted]).sum()
        choices_of_experts = torch.stack([counted.choices for counted in self._counted]).sum(dim=0)
        on_rank = torch.stack([num_positions, *choices_of_experts])
        sums = self._device.tensor_to_device(on_rank)
        add_over_ranks(sums)
        self._num_positions = sums[0]
        self._choices_of_experts = sums[1:]

    def _count_microbatch(self, microbatch: Batch, *, is_weighted: bool) -> CountedMicrobatch:
        """Computes a microbatch, compares the model's own load-balancing loss, and counts the choices."""
        batch = without_row_counts(microbatch)
        if is_weighted:
            del batch[LOSS_WEIGHTS]
        batch = self._to_device(with_copied_tensors(batch))
        with self._precision():
            outputs = self._model(batch)
            attended = _attended(batch)
            models_loss, logits = _checked_router(outputs, num_positions=attended.numel())
            self._compare_losses(models_loss, logits, attended)
            positions = counted_positions(microbatch).to(logits[0].device)
            choices, _ = _sums_over_positions(logits, positions, self._top_k)
        num_layers = len(logits)
        return CountedMicrobatch(positions, positions.sum() * num_layers, choices.sum(dim=0))

    def _compare_losses(
        self,
        models_loss: Tensor,
        logits: Sequence[Tensor],
        attended: Tensor,
    ) -> None:
        """Notes how far the model's own load-balancing loss is from the one that is computed from the router's logits.

        The first comparison also finds the number of experts that are chosen for a position. It is checked at once, and
        raises RuntimeError if the losses differ. Later ones are checked together at the end of the step.
        """
        is_first = self._top_k == 0
        if is_first:
            if not bool(attended.any()):
                return  # both losses are NaN, so the next microbatch is the first comparison
            self._top_k = _find_top_k(models_loss, logits, attended)
        loss = _balance_losses(logits, attended, self._top_k)[-1]
        # The model computes its loss in the type of the logits, with a few rounded operations.
        tolerance = max(LOSS_TOLERANCE, 4 * torch.finfo(logits[0].dtype).eps)
        deviation = (loss / models_loss - 1).abs() / tolerance
        # NaN: the microbatch has no positions, or training has diverged. Neither is a deviation.
        deviation = deviation.detach().nan_to_num(nan=0.0)
        self._loss_deviation = torch.maximum(self._loss_deviation, deviation)
        if is_first:
            self.check()

    def with_part_of_step(
        self,
        loss: SplitLoss,
        outputs: Any,
        num_microbatches: int,
    ) -> SplitLoss:
        """Replaces the load-balancing loss of a microbatch by its part of the load-balancing loss of the step.

        Called once for each microbatch, in the order of :meth:`count`. Also notes how many choices differ from the
        counted ones.

        Args:
            loss: The loss of the microbatch, as its two terms.
            outputs: The outputs of the model.
            num_microbatches: The number of microbatches of this rank in the step that have samples, and not only dummy
                rows. At least 1. The algorithm will divide by it.
        """
        counted = self._counted.popleft()
        with self._precision():
            logits = _router_logits(outputs)
            choices, probabilities = _sums_over_positions(logits, counted.positions, self._top_k)
        self._note_changed_choices(counted.choices, choices.sum(dim=0))
        num_positions = self._num_positions.clamp(min=1).double()
        num_experts = len(self._choices_of_experts)
        # The formula of the class, with the probabilities of this microbatch only: E / n^2 * sum of c_e * p_e.
        weights_of_experts = num_experts * self._choices_of_experts / num_positions.square()
        part_of_step = (weights_of_experts.to(probabilities) * probabilities).sum()
        # The parts must be summed over microbatches and ranks. But the algorithm divides this term by the number of
        # microbatches, and DDP or FSDP divide its gradient by the number of ranks. The product undoes both divisions.
        later_divisor = num_microbatches * get_world_size()
        coefficient = self._terms.router_coefficient
        assert coefficient is not None  # otherwise the loss would not have been split
        router = coefficient * later_divisor * part_of_step
        return SplitLoss(tokens=loss['tokens'], router=router)

    def _note_changed_choices(self, counted: Tensor, trained: Tensor) -> None:
        """Notes how many choices of a microbatch in training differ from the counted ones, see :meth:`check`.

        Both are ``(experts,)``, how often each expert was chosen.
        """
        # A choice that differs moves the numbers of two experts by 1.
        num_changed = (trained - counted).abs().sum() / 2
        num_allowed = (CHOICE_TOLERANCE * trained.sum()).clamp(min=FEW_CHOICES)
        self._choice_deviation = torch.maximum(self._choice_deviation, num_changed / num_allowed)

    def check(self) -> None:
        """Raises RuntimeError if a deviation in the step was over its tolerance.

        Then either the model's own load-balancing loss differs from the one computed here, or the choices in training
        differ from the counted ones. Called at the first comparison of the run, and then only at the end of each step,
        because it waits for the device.
        """
        on_same_device = self._choice_deviation.to(self._loss_deviation)
        both_deviations = torch.stack([self._loss_deviation, on_same_device])
        loss_deviation, choice_deviation = both_deviations.tolist()  # one wait for the device
        if loss_deviation > 1:
            raise _refusal(
                "needs the load-balancing loss of Hugging Face's mixtures of experts, got: another `aux_loss`. It must "
                'be the number of experts times a sum over the experts: the share of the positions that choose the '
                'expert, times its mean probability, both by `router_logits`.'
            )
        if choice_deviation > 1:
            raise _refusal(
                'needs positions to choose the same experts with and without a graph, but more choices differ than '
                f'round-off explains ({choice_deviation:.1f} times as many). Perhaps the model draws random numbers in '
                'the forward, or an algorithm changes microbatches: leave that out.'
            )


def _refusal(condition: str) -> NotExactError:
    """Returns the error of a run that cannot have ``router_balance='step'``.

    ``condition`` is the predicate of a sentence about the option: 'must ...' or 'needs ...'.
    """
    return NotExactError(f"`router_balance='step'` {condition} {OR_LEAVE_MICROBATCH}")


# Which positions count.


def counted_positions(microbatch: Batch) -> Tensor:
    """Returns which positions are attended and belong to a sample, ``(rows, width)`` bool.

    The model's own loss also counts attended positions of dummy rows (copies of rows with media, in microbatches
    without media) and of repeated samples (which fill up ranks). The loss of the step must not count them, because one
    forward over the global batch has no such rows.
    """
    attended = _attended(microbatch)
    rows = row_counts_of(microbatch)
    if rows[0].documents:  # packed: the microbatch is this one row
        return _counted_in_packed_row(microbatch, rows[0].documents)[None]
    # The counts of dummy rows and repeated samples say that they have no real tokens.
    is_sample = torch.tensor([row.real_tokens > 0 for row in rows], device=attended.device)
    return attended & is_sample[:, None]


def _counted_in_packed_row(packed: Batch, rows: Sequence[RowCounts]) -> Tensor:
    """Returns which positions of a packed row are real tokens of a sample, ``(width,)`` bool.

    The mask does not show them. It is True at tokens of dummy rows and repeated samples, too, and at a padding position
    that packing has kept because it has a label. Such a position comes after the real tokens of its document.

    For example, three rows are packed: two tokens and a kept padding position, a repeated sample of two tokens, and one
    token. Their documents have 2, 0 and 1 real tokens that count::

        document of each position   0 0 0 1 1 2
        place in the document       0 1 2 0 1 0
        real tokens of the document 2 2 2 0 0 1
        result                      T T F F F T

    Args:
        packed: The packed row.
        rows: The ``documents`` in the counts of the packed row.
    """
    document_of_position = _documents_of(packed)
    device = document_of_position.device
    real_tokens_of_documents = []
    for row in rows:
        # A sample without tokens is not a document. A dummy row or a repeated sample (0 samples) is one, but its
        # `real_tokens` is 0, because its tokens do not count.
        if row.real_tokens > 0 or row.samples == 0:
            real_tokens_of_documents.append(row.real_tokens)
    # If all rows are empty, the packed row is one position of padding, with the document number 0. It needs an entry.
    # In any other packed row no position looks up this last entry.
    real_tokens_of_documents.append(0)
    num_real = torch.tensor(real_tokens_of_documents, device=device)[document_of_position]
    # The first position of the document that each position belongs to. Document numbers are in ascending order.
    starts = torch.searchsorted(document_of_position, document_of_position)
    positions = torch.arange(len(document_of_position), device=device)
    place_in_document = positions - starts
    return place_in_document < num_real


def _documents_of(packed: Batch) -> Tensor:
    """Returns the number of the document of each position of a packed row, from 0, ``(width,)``."""
    mask = packed.get('attention_mask')
    if mask is not None:
        # Packing has made it ``(documents, width)``. Each position is in one document, and argmax finds in which.
        return mask.int().argmax(dim=0)
    # ``(1, width)``, or with M-RoPE ``(sections, 1, width)``. The positions of text come first.
    positions = packed['position_ids'].flatten(0, -2)[0]
    # Positions restart at 0, or at padding_idx + 1 (RoBERTa).
    restarts = positions.diff() != 1
    documents = restarts.cumsum(dim=0)
    return torch.nn.functional.pad(documents, (1, 0))  # the first position is in document 0


def _attended(batch: Batch) -> Tensor:
    """Returns which positions are attended, ``(rows, width)`` bool."""
    attended = attended_positions(batch)
    if len(attended) == len(text_of(batch)):
        return attended
    # Several documents were packed into one row, and the mask has a row for each of them.
    return attended.any(dim=0, keepdim=True)


# The router's outputs, and the load-balancing loss that is computed from them.


def _checked_router(outputs: Any, num_positions: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the model's own load-balancing loss, and the router's logits of each layer, ``(positions, experts)``.

    Raises RuntimeError if the outputs lack one of them.
    """
    models_loss = router_loss_of(outputs)
    logits = _router_logits(outputs)
    positions_of_layers = [len(layer) for layer in logits]
    has_all_positions = set(positions_of_layers) == {num_positions}
    if models_loss is None or not has_all_positions:
        raise _refusal(
            'needs `router_logits` of each position and their `aux_loss` in the outputs of the model, got: '
            f'{"no" if models_loss is None else "an"} `aux_loss`, and logits of {positions_of_layers[:4]} for '
            f'{num_positions} positions. Set `output_router_logits=True` in the config of a mixture of experts.'
        )
    return models_loss, logits


def _router_logits(outputs: Any) -> Sequence[Tensor]:
    """Returns the router's logits of each layer with experts, ``(positions, experts)`` each.

    A model without experts has none. Some models stack the layers in one tensor.
    """
    logits = entry_of(outputs, 'router_logits')
    if logits is None:
        return []
    return [layer.reshape(-1, layer.shape[-1]) for layer in logits if isinstance(layer, Tensor)]


def _sums_over_positions(
    logits: Sequence[Tensor],
    is_counted: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Sums choices and probabilities over layers and counted positions.

    Softmax and ``topk`` are computed as in the models' own loss, so that the same experts are chosen even if some have
    equal probabilities.

    Returns:
        How often each expert was chosen first, second and so on, int64 ``(top_k, experts)``, and the sum of the
        probabilities of each expert, ``(experts,)``, at least in float32.
    """
    num_experts = logits[0].shape[-1]
    device = logits[0].device
    counted = is_counted.flatten().to(device)
    # How much a position adds to the expert that it chooses first, second and so on: 1 if it counts, else 0.
    added_by_position = counted.long().expand(top_k, -1)
    choices = torch.zeros(top_k, num_experts, dtype=torch.int64, device=device)
    sums_of_layers = []
    for layer in logits:
        probabilities = layer.to(device).softmax(dim=-1)
        experts = probabilities.topk(top_k, dim=-1).indices  # (positions, top_k)
        choices.scatter_add_(1, experts.T, added_by_position)
        at_least_float32 = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        counted_probabilities = at_least_float32 * counted[:, None]
        sums_of_layers.append(counted_probabilities.sum(dim=0))
    sum_of_probabilities = torch.stack(sums_of_layers).sum(dim=0)
    return choices, sum_of_probabilities


def _balance_losses(logits: Sequence[Tensor], attended: Tensor, top_k: int) -> Tensor:
    """Returns the load-balancing losses if 1, 2, ... ``top_k`` experts are chosen for a position, ``(top_k,)``."""
    choices, probabilities = _sums_over_positions(logits, attended, top_k)
    num_positions = len(logits) * attended.sum()  # a position counts once for each layer
    num_experts = choices.shape[1]
    # With k experts for a position, the first k choices count.
    shares = choices.cumsum(dim=0) / num_positions
    mean_probabilities = probabilities / num_positions
    products = shares * mean_probabilities
    return num_experts * products.sum(dim=1)


def _find_top_k(models_loss: Tensor, logits: Sequence[Tensor], attended: Tensor) -> int:
    """Returns how many experts are chosen for a position. It is not read from the config, which has many names for it.

    The loss is computed for every number up to all experts. It grows with the number, so only the right number gives
    the model's own loss.
    """
    num_experts = logits[0].shape[-1]
    losses = _balance_losses(logits, attended, num_experts)
    return int((losses - models_loss).abs().argmin()) + 1  # the first of the losses is that of one expert
