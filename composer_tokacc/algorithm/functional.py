# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The algorithm as plain functions, for a training loop without a Trainer; the class is built on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer_tokacc.checks.logits import at_predictions, weigh_tokens
from composer_tokacc.collectives import RankSum, get_world_size
from composer_tokacc.counting import with_one_label
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.metadata import annotate, loss_weight, num_loss_tokens, without_metadata
from composer_tokacc.plan_agreement import PlanRecord, check_plans, numbers_to_sum
from composer_tokacc.planning import check_count
from composer_tokacc.weights import token_weights_of


def token_weight(num_tokens: float, step_tokens: float, *, world_size: int = 1) -> float:
    """Returns what a microbatch's mean loss must weigh so that the step's gradient is that of one mean over its tokens.

    .. math:: w_{rm} = W t_{rm} / T

    A mean over ``t`` tokens is a sum divided by ``t``, and the step's mean is that sum divided by ``T``. DDP and FSDP
    average gradients over the ``W`` ranks, which the factor ``W`` takes back.

    Tokens that do not all weigh the same are counted by their weights: a weighted mean is a sum divided by theirs.

    Args:
        num_tokens: Loss-generating tokens of the microbatch, or the sum of their weights.
        step_tokens: Those of the step, over all ranks and microbatches.
        world_size: Ranks that average their gradients.

    Raises:
        ValueError: If the microbatch has more tokens than the step, or a number is NaN or negative.
    """
    check_count('world_size', world_size)
    if not 0 <= num_tokens <= step_tokens * (1 + 1e-6) < math.inf:  # sums of weights are rounded
        raise ValueError(f'`num_tokens` must be a part of the step, from 0 to {step_tokens}, got: {num_tokens}.')
    return num_tokens * world_size / step_tokens if step_tokens else 0.0


def sample_weight(num_samples: int, step_samples: int, *, world_size: int = 1) -> float:
    """Returns what a microbatch's mean loss weighs in Composer, ``W n / N``: samples for tokens."""
    return token_weight(num_samples, step_samples, world_size=world_size)


def step_loss_weights(
    microbatches: Sequence[Mapping[str, Any]] | PreSplitBatch,
    *,
    loss_tokens: str = 'causal',
    token_weights: str = 'token',
    device: torch.device | str = 'cpu',
) -> list[float]:
    """Returns the factor of each microbatch's mean loss in one optimizer step; a collective over the ranks.

    A microbatch without loss-generating tokens has factor 0, and in most models a loss of NaN: it must not be computed,
    or where DDP waits for it, be given a label, as :func:`weighted_microbatches` does.

    Args:
        microbatches: This rank's part of the step; each has ``labels`` of shape ``(rows, width)``. Also what a
            :class:`.RegroupingDataLoader` yields.
        loss_tokens: By which rule the model averages, see :func:`.counting.loss_mask`.
        token_weights: What tokens weigh, see :class:`.TokenAccumulation`. Within a microbatch
            ``apply_token_weights`` sees to it.
        device: Where the process group reduces.

    Example:
        .. code-block:: python

            for microbatch, weight in zip(microbatches, step_loss_weights(microbatches)):
                (model(**microbatch).loss * weight).backward()
    """
    plan = getattr(microbatches, 'plan', None)
    return _weights_of(_annotated(microbatches, loss_tokens, token_weights), device, plan)


def weighted_microbatches(
    microbatches: Sequence[Mapping[str, Any]] | PreSplitBatch,
    *,
    loss_tokens: str = 'causal',
    device: torch.device | str = 'cpu',
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yields each microbatch as a model takes it, and the factor of its mean loss; a collective over the ranks.

    One without loss-generating tokens, or of rows that only fill up a rank, comes with a label, so that its loss is a
    number, and with factor 0: DDP may wait for it on the other ranks. Further documents of packed rows come with
    their first label masked, as they are counted. Arguments are those of :func:`step_loss_weights`,
    and every token weighs the same.

    Example:
        .. code-block:: python

            for microbatch, weight in weighted_microbatches(batch):
                (model(**microbatch).loss * weight).backward()
    """
    counted = _annotated(microbatches, loss_tokens, 'token')
    weights = _weights_of(counted, device, getattr(microbatches, 'plan', None))
    for microbatch, weight in zip(counted, weights, strict=True):
        plain = without_metadata(microbatch)
        yield (plain if num_loss_tokens(microbatch) else with_one_label(plain)), weight


def _annotated(
    microbatches: Sequence[Mapping[str, Any]] | PreSplitBatch, loss_tokens: str, token_weights: str
) -> list[Mapping[str, Any]]:
    if isinstance(microbatches, PreSplitBatch):
        microbatches = microbatches.microbatches
    if isinstance(microbatches, Mapping) or not isinstance(microbatches, Iterable):
        raise TypeError(
            f'`microbatches` must be a list of batches, got: one {type(microbatches).__name__}. Cut it, or give '
            '`[batch]` as one microbatch.'
        )
    return [annotate(microbatch, loss_tokens, token_weights) for microbatch in microbatches]


def _weights_of(
    counted: Sequence[Mapping[str, Any]], device: torch.device | str, plan: PlanRecord | None
) -> list[float]:
    sums = [float(loss_weight(microbatch)) for microbatch in counted]
    numbers = torch.tensor([sum(sums), *numbers_to_sum(plan)], dtype=torch.float64, device=device)
    step_tokens, *checks = RankSum(numbers).read()
    check_plans(checks, plan)
    return [token_weight(weight, step_tokens, world_size=get_world_size()) for weight in sums]


def apply_token_weights(
    logits: torch.Tensor, batch: Mapping[str, Any], token_weights: str, *, loss_tokens: str = 'causal'
) -> None:
    """Makes the gradient of a mean over tokens that of their weighted mean; for a loop without a Trainer.

    Args:
        logits: Of a microbatch, ``(rows, width, vocabulary)``, as the model returned them, before backward. The value
            of the loss stays the plain mean.
        batch: The microbatch with ``labels``, and ``loss_weights`` for ``'column'``.
        token_weights: ``'token'``, ``'sqrt'``, ``'sample'`` or ``'column'``, see :class:`.TokenAccumulation`.
        loss_tokens: By which rule the model averages, see :func:`.counting.loss_mask`.
    """
    weights, counted = token_weights_of(batch, token_weights, loss_tokens)
    if logits.shape[:-1] != weights.shape:
        raise ValueError(
            f'`logits` must be of shape {(*weights.shape, "vocabulary")}, as `labels`, got: {tuple(logits.shape)}.'
        )
    total = weights.sum(dtype=torch.float64)
    weigh_tokens(logits, at_predictions(weights * (counted.sum() / total.clamp(min=1e-30)).float(), loss_tokens))
