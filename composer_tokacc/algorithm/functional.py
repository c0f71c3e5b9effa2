# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The algorithm as plain functions, for a training loop without a Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer_tokacc.arguments import check_count
from composer_tokacc.batch import Batch, BatchDict, check_vocabulary, common_padding_side, labels_of
from composer_tokacc.checks.logits import weigh_tokens
from composer_tokacc.collectives import get_world_size, sum_over_ranks
from composer_tokacc.counting import LossRule, with_one_label
from composer_tokacc.graph import raise_if_bypassed
from composer_tokacc.layout import BatchLayout, PreSplitBatch, describe
from composer_tokacc.layout.facts import COLLATED_BY_LOADER, RowFacts, check_first_labels
from composer_tokacc.plan_agreement import PlanRecord, PlanSums, check_plans
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.row_counts import check_loss_shares, row_counts_of, with_counts, without_row_counts
from composer_tokacc.weights import MIN_LOSS_WEIGHT, are_weights_unused, warn_of_unused_weights_once, weights_at


def token_weight(num_tokens: float, step_tokens: float, *, world_size: int = 1) -> float:
    """Returns the factor of a microbatch's mean loss. With it the step has the gradient of one mean over its tokens.

    .. math:: w = W t / T

    The mean over the ``t`` tokens of a microbatch is a sum divided by ``t``. In the mean over the step, the same sum is
    divided by ``T``. DDP and FSDP average gradients over the ``W`` ranks, and the factor ``W`` undoes this.

    If tokens have weights, ``t`` and ``T`` are sums of weights, because a weighted mean is divided by the sum of the
    weights.

    Args:
        num_tokens: ``t``, the loss-generating tokens of the microbatch, or the sum of their weights.
        step_tokens: ``T``, the same number over all ranks and microbatches of the step.
        world_size: ``W``, the number of ranks whose gradients are averaged.

    Raises:
        ValueError: If the microbatch has more tokens than the step, or a number is NaN or negative.
    """
    check_count('world_size', world_size)
    # Sums of weights are rounded, so the sum of the only microbatch may be a little above the sum of the step.
    is_part = 0 <= num_tokens <= step_tokens * (1 + 1e-6) < math.inf
    if not is_part:
        raise InvalidInputError(
            f'`num_tokens` must be from 0 to the number of the step, {step_tokens}, got: {num_tokens}.'
        )
    if step_tokens == 0:
        return 0.0
    return num_tokens * world_size / step_tokens


def sample_weight(num_samples: int, step_samples: int, *, world_size: int = 1) -> float:
    """Returns the factor that Composer itself gives to a microbatch, ``W n / N``. It counts samples, not tokens."""
    return token_weight(num_samples, step_samples, world_size=world_size)


def step_loss_weights(
    microbatches: Sequence[Mapping[str, Any]] | PreSplitBatch,
    *,
    loss_tokens: str = 'causal',
    token_weights: str = 'token',
    device: torch.device | str = 'cpu',
) -> list[float]:
    """Returns the factor of each microbatch's mean loss in one optimizer step; a collective over the ranks.

    The labels that ``loss_tokens`` names count, as in the model's own loss. In packed rows they include the label of
    the first token of each further document. Mask these labels in the collator, or use :func:`weighted_microbatches`,
    which masks them in the batches that it yields.

    A microbatch without loss-generating tokens has factor 0. Do not compute such a microbatch, because most models
    return NaN for it. If DDP waits for its backward, give it a label, as :func:`weighted_microbatches` does.

    Args:
        microbatches: This rank's part of the step: batches with ``labels`` of shape ``(rows, width)``. Or one batch of
            a :class:`.RegroupingDataLoader`. Then your loop must be over its ``microbatches``.
        loss_tokens: Which labels the model's loss averages over, see :func:`.counting.loss_mask`.
        token_weights: Weights of the tokens, see :class:`.TokenAccumulation`. Within a microbatch they are applied by
            :func:`.apply_token_weights`.
        device: The device on which the process group reduces.

    Raises:
        TypeError: If ``microbatches`` is not a list.
        ValueError: If labels or ``loss_weights`` are missing or bad, or if a batch has ``num_items_in_batch``.
        RuntimeError: If all weights of the step are 0, or if the ranks have planned different batches.

    Example:
        .. code-block:: python

            for microbatch, weight in zip(microbatches, step_loss_weights(microbatches)):
                (model(**microbatch).loss * weight).backward()
    """
    rule = LossRule(loss_tokens)
    weight_sums = []
    num_tokens = 0
    for microbatch in _checked_list(microbatches, rule, token_weights):
        has_loss = rule.mask(microbatch)
        # A row of 0 samples repeats a sample, so that this rank has as many rows as the others. It must not count.
        are_samples = [row.samples > 0 for row in row_counts_of(microbatch)]
        # An empty list would become floats without `dtype`.
        is_sample = torch.tensor(are_samples, dtype=torch.bool, device=has_loss.device)
        counted = has_loss & is_sample[:, None]
        weights = weights_at(microbatch, token_weights, counted)
        weight_sums.append(float(weights.sum(dtype=torch.float64)))
        tokens_of_rows = counted.sum(dim=1).tolist()
        num_tokens += sum(tokens_of_rows)
        # Refuses `loss_shares` of a sampler if they are not applied, or were planned with other numbers of tokens.
        check_loss_shares(microbatch, token_weights, rule, tokens_of_rows)
    return _factors(microbatches, weight_sums, num_tokens, device)


def weighted_microbatches(
    microbatches: Sequence[Mapping[str, Any]] | PreSplitBatch,
    *,
    loss_tokens: str = 'causal',
    device: torch.device | str = 'cpu',
) -> Iterator[tuple[BatchDict, float]]:
    """Yields each microbatch in the form that a model accepts, and the factor of its mean loss; a collective.

    Ranks communicate when the first microbatch is requested. For arguments and errors see :func:`.step_loss_weights`.
    Every token has the same weight. In packed rows the label of the first token of each further document is masked.

    A microbatch without loss-generating tokens is yielded with factor 0, because DDP on other ranks may wait for its
    backward. It gets one label, because the mean over no labels is NaN. A microbatch of repeated samples, which only
    give this rank as many microbatches as the others have, is treated in the same way.

    Example:
        .. code-block:: python

            for microbatch, weight in weighted_microbatches(batch):
                (model(**microbatch).loss * weight).backward()
    """
    rule = LossRule(loss_tokens)
    counted_microbatches = []
    for microbatch in _checked_list(microbatches, rule, token_weights='token'):
        check_loss_shares(microbatch, 'token', rule)  # all tokens weigh the same, so it refuses any shares
        counted_microbatches.append(with_counts(microbatch, rule))
    token_counts = []
    for microbatch in counted_microbatches:
        if labels_of(microbatch).numel() == 0:
            raise InvalidInputError(
                '`microbatches` must hold at least one row of one token each, got: labels of shape '
                f'{tuple(labels_of(microbatch).shape)}. Leave such a batch out. If the rank has no other, give it a '
                'row without labels, because other ranks may wait for its backward.'
            )
        token_counts.append(sum(row.loss_tokens for row in row_counts_of(microbatch)))
    factors = _factors(microbatches, token_counts, sum(token_counts), device)
    for microbatch, num_tokens, factor in zip(counted_microbatches, token_counts, factors, strict=True):
        model_batch = without_row_counts(microbatch)
        if num_tokens == 0:
            model_batch = with_one_label(model_batch)
        yield model_batch, factor


def _checked_list(
    microbatches: Sequence[Batch] | PreSplitBatch,
    rule: LossRule,
    token_weights: str,
) -> list[Batch]:
    """Returns the microbatches as a list. Refuses microbatches that would get wrong factors.

    Warns once of weights in the batches that ``token_weights`` does not use.

    Raises:
        TypeError: If they are not a list.
        ValueError: If a batch has ``num_items_in_batch`` or a negative label other than -100, or if padding of the
            microbatch predicts the label of a row's first token, or would predict it in another cut.
    """
    is_pre_split = isinstance(microbatches, PreSplitBatch)
    if is_pre_split:
        microbatches = microbatches.microbatches
    # An iterator would be used up here. A loader would give the caller's loop other batches than the counted ones.
    if not isinstance(microbatches, Sequence):
        raise TypeError(
            f'`microbatches` must be a list of batches, got: one {type(microbatches).__name__}. Pass one batch as '
            '`[batch]`. Read a loader into a list, and loop over this list.'
        )
    microbatches = list(microbatches)
    for microbatch in microbatches:
        labels_of(microbatch)  # refuses a batch without labels
        # The model may ignore such a label, but here it would count.
        check_vocabulary(microbatch, 'labels', size=None)
        divisor = microbatch.get('num_items_in_batch')
        if divisor is not None:
            raise InvalidInputError(
                f'`microbatches` must not hold `num_items_in_batch`, got: {divisor}. With it the model returns a sum '
                'divided by this number instead of a mean, and the factor would weight the sum twice. Remove the key, '
                'or use it without these factors.'
            )
    if rule.shifts_labels:
        _check_first_labels(microbatches, rule, is_pre_split)
    if are_weights_unused(microbatches, token_weights):
        warn_of_unused_weights_once()
    return microbatches


def _check_first_labels(microbatches: Sequence[Batch], rule: LossRule, is_pre_split: bool) -> None:
    """Raises ValueError if the cut decides whether a pad on the left predicts the first label of a row.

    Our loader pads each microbatch by itself. A user's collator may do so, too. Then microbatches have several widths.
    If they have one width, they may be parts of one padded batch, whose padding depends on no cut.

    Args:
        microbatches: The microbatches of this rank.
        rule: The loss rule, which shifts labels.
        is_pre_split: Whether they are those of a pre-split batch. Rows without padding are then checked, too, because
            they would have padding in another plan. In a user's list they may be exact.
    """
    if is_pre_split:
        check_first_labels(_facts_of(microbatches), rule, COLLATED_BY_LOADER)
        return
    widths = {labels_of(microbatch).shape[1] for microbatch in microbatches}
    if len(widths) > 1 and common_padding_side(microbatches) == 'left':
        for facts in _facts_of(microbatches):
            check_first_labels([facts], rule, 'microbatches of unequal widths')


def _facts_of(microbatches: Iterable[Batch]) -> list[RowFacts]:
    """Returns the facts about the rows of each microbatch."""
    return [describe(BatchLayout.infer(microbatch), microbatch) for microbatch in microbatches]


def _factors(
    microbatches: Sequence[Batch] | PreSplitBatch,
    weight_sums: Sequence[float],
    num_tokens: int,
    device: torch.device | str,
) -> list[float]:
    """Returns the factor of each microbatch's mean loss; a collective.

    Args:
        microbatches: The microbatches as the caller has them. A pre-split batch may have a plan.
        weight_sums: The sum of the weights of the tokens of each microbatch.
        num_tokens: The number of the tokens of all microbatches. Tokens whose weights are all 0 are refused.
        device: The device on which the process group reduces.

    Raises:
        RuntimeError: On all ranks, if they have planned different batches, or if the step has tokens, but all of them
            have weight 0.
    """
    plan = getattr(microbatches, 'plan', None) or PlanRecord()
    numbers = [sum(weight_sums), num_tokens, *PlanSums.of(plan)]
    on_device = torch.tensor(numbers, dtype=torch.float64, device=device)
    step_sum, step_tokens, *plan_sums = sum_over_ranks(on_device)
    check_plans(PlanSums._make(plan_sums), plan)
    if step_sum == 0 and step_tokens > 0:
        raise NotExactError(
            f'The weights of a step must not all be 0, got: 0 for each of its {step_tokens:.0f} loss-generating '
            'tokens. Fix `loss_weights`, or leave the step out (docs/errors.md#counts).'
        )
    world_size = get_world_size()
    return [token_weight(weight_sum, step_sum, world_size=world_size) for weight_sum in weight_sums]


def apply_token_weights(
    logits: torch.Tensor,
    batch: Mapping[str, Any],
    token_weights: str,
    *,
    loss_tokens: str = 'causal',
) -> None:
    """Turns the gradient of a mean over tokens into the gradient of their weighted mean, in a loop without a Trainer.

    A hook on the logits multiplies their gradient in the backward. The value of the loss stays the plain mean. With
    ``'token'`` nothing changes. Any other term that is made of these logits (a z-loss, a distillation) is weighted as
    well, and has no gradient at positions without a label.

    Args:
        logits: Logits of a microbatch, ``(rows, width, vocabulary)``, as the model returned them, before the backward.
        batch: The microbatch with ``labels``, and with ``loss_weights`` for ``'column'``. The labels that
            ``loss_tokens`` names count, as in :func:`.step_loss_weights`.
        token_weights: ``'token'``, ``'sqrt'``, ``'sample'`` or ``'column'``, see :class:`.TokenAccumulation`.
        loss_tokens: Which labels the model's loss averages over, see :func:`.counting.loss_mask`.

    Raises:
        ValueError: If the logits have another shape than the labels, or no gradient.
        RuntimeError: In the backward, if the loss is not made of these logits, so that the weights would not apply.
    """
    rule = LossRule(loss_tokens)
    has_loss = rule.mask(batch)
    weights = weights_at(batch, token_weights, has_loss)  # refuses an unknown scheme
    if token_weights == 'token':
        return  # nothing has to change, so the loss need not be made of these logits
    shape = tuple(getattr(logits, 'shape', ()))
    if shape[:-1] != weights.shape or not logits.requires_grad:
        raise InvalidInputError(
            f'`logits` must be a tensor of shape {(*weights.shape, "vocabulary")}, as `labels`, with a gradient, got: '
            f'{type(logits).__name__} of shape {shape}. Give the logits that the loss is made of, not detached, and '
            'compute them at all positions.'
        )
    # Without labels, or with weights of 0 only, the sum is 0. The minimum prevents 0 / 0.
    sum_of_weights = weights.sum(dtype=torch.float64).clamp(min=MIN_LOSS_WEIGHT)
    # The loss divides by the number of tokens. The weighted mean divides by the sum of the weights.
    factor = (has_loss.sum() / sum_of_weights).float()
    weigh_tokens(logits, rule.at_predictions(weights * factor))
    refusal = NotExactError(
        'The loss must be made of the logits that `apply_token_weights` got, but its gradient does not pass through '
        'them, so the tokens would have no weights: the loss is compiled or fused with the model, or made of other '
        'logits. Compute it from these logits outside of the compiled model, and call one backward for the whole loss.'
    )
    raise_if_bypassed(logits, refusal)
