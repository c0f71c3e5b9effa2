# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights of loss-generating tokens: a power of the number of loss tokens in their sample, or a column of the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.counting import LossRule, document_starts
from composer_tokacc.layout import PreSplitBatch, microbatches_of
from composer_tokacc.refusals import InvalidInputError

log = logging.getLogger(__name__)

LOSS_WEIGHTS = 'loss_weights'
"""Key of the tokens' weights in a batch. A collator may write a float per row or per position. At BATCH_START, unless
``token_weights`` is ``'token'``, :func:`.with_counts` writes float32 weights of the labels' shape instead. They are 0
at labels without loss."""
TOKEN_WEIGHTS: dict[str, float | None] = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0, 'column': None}
"""The power p of each scheme: a token weighs n ** -p, where n is the number of loss tokens of its sample. None: the
batch holds the weights."""
MIN_LOSS_WEIGHT, MAX_LOSS_WEIGHT = 1e-30, 1e30
"""Range of a loss weight other than 0. Weights are multiplied and added in float32, which holds about 1e-38 to 3e38."""


class WeightsOfShares(list[float]):
    """``loss_weights`` that a sampler has computed from ``loss_shares``: a weight for each row of a microbatch.

    The weights know the numbers of loss tokens that they were computed from, so that a wrong table is noticed, and so
    that code which does not use the weights is refused. A loop may pass on a batch, or a list of its microbatches.
    """

    loss_tokens: Sequence[int] = ()
    """Number of loss tokens of each row, by the table of the sampler."""


def with_weights_of_positions(batch: Batch) -> Batch:
    """Returns the batch with a weight for each position of its labels. The loader may have given one weight per row.

    The first-batch check needs this. Its first use is before the loss rule is known, so every label other than -100
    keeps its weight, as under :attr:`.LossRule.UNSHIFTED`. Bad weights are refused, see :func:`token_weights_of`.
    """
    if isinstance(batch, PreSplitBatch):
        return batch.map(with_weights_of_positions)
    return {**batch, LOSS_WEIGHTS: token_weights_of(batch, 'column', LossRule.UNSHIFTED)}


def token_weights_of(batch: Batch, token_weights: str, rule: LossRule = LossRule.CAUSAL) -> Tensor:
    """Returns the weights of the tokens, float32 ``(rows, width)``.

    They are 0 at labels that do not count. If the rule shifts labels, the first label of each further document of a
    packed row does not count either, see :meth:`.LossRule.counted`.

    Args:
        batch: A batch with ``labels``, and with ``loss_weights`` for ``'column'``.
        token_weights: The scheme, see :func:`weights_at`.
        rule: The loss rule.

    Raises:
        ValueError: If a weight is missing, negative, too large, too small or of another shape. Names the sample.
    """
    return weights_at(batch, token_weights, rule.counted(batch))


def weights_at(batch: Batch, token_weights: str, counted: Tensor) -> Tensor:
    """Returns the weights of the counted tokens, float32 ``(rows, width)``, 0 elsewhere.

    ``'token'``, ``'sqrt'`` and ``'sample'`` are the number of counted tokens of the sample to the power 0, -1/2 and -1.
    For example, each token of a sample with 4 counted tokens weighs 1, 1/2 or 1/4. A document of a packed row is a
    sample. ``'column'`` reads ``batch['loss_weights']``.

    Args:
        batch: A batch with ``labels``.
        token_weights: The scheme, a key of :data:`TOKEN_WEIGHTS`.
        counted: Which labels carry loss, bool ``(rows, width)``.

    Raises:
        ValueError: If the scheme is unknown, or a weight is bad, see :func:`token_weights_of`.
    """
    check_choice('token_weights', token_weights, tuple(TOKEN_WEIGHTS))
    power = TOKEN_WEIGHTS[token_weights]
    if power is None:
        weights = _weights_in_batch(batch, counted)
    else:
        weights = _weights_by_sample(batch, counted, power)
    return weights.masked_fill(~counted, 0)


def _weights_by_sample(batch: Batch, counted: Tensor, power: float) -> Tensor:
    """Returns the number of counted tokens of the sample to the power ``-power`` at each position, float32."""
    documents = _documents(batch, counted)
    # There are at most as many documents as positions. Without `minlength`, `bincount` would leave out the last
    # documents if they have no counted token.
    tokens_per_document = torch.bincount(documents[counted], minlength=documents.numel())
    # No token reads the weight of a document without counted tokens, but 0 to a negative power would be infinite.
    weight_per_document = tokens_per_document.clamp(min=1).double().pow(-power)
    return weight_per_document[documents].float()


def _documents(batch: Batch, counted: Tensor) -> Tensor:
    """Numbers the documents of all rows, and returns the number at each position, int ``(rows, width)``."""
    is_start = torch.zeros_like(counted)
    # Limit: document_starts() does not read `position_ids` of shape (3, rows, width), which Qwen-VL has. Without
    # `sequence_id` such a row counts as one document, even if it is packed.
    further_starts = document_starts(batch)
    if further_starts is not None:
        is_start |= further_starts
    sequences = batch.get('sequence_id')  # llm-foundry's number of the document at each position of packed rows
    if isinstance(sequences, Tensor) and sequences.shape == counted.shape:
        is_another_sequence = sequences[:, 1:] != sequences[:, :-1]
        is_start[:, 1:] |= is_another_sequence
    is_start[:, :1] = True
    num_started = is_start.flatten().cumsum(dim=0)
    return num_started.view_as(counted) - 1


def _weights_in_batch(batch: Batch, counted: Tensor) -> Tensor:
    """Returns the weights that the batch holds, float32 ``(rows, width)``. Refuses bad weights of counted tokens."""
    column = batch.get(LOSS_WEIGHTS)
    if column is None:
        raise InvalidInputError(
            f"`token_weights='column'` needs `{LOSS_WEIGHTS}` in every batch, a float per row or per position of the "
            f'labels, got: {sorted(map(str, batch))}, beginning with {sample_name(batch, 0)}. Give the data '
            'such a column, or take other weights.'
        )
    if isinstance(column, (list, tuple)):
        column = _tensor_of(column, batch).to(counted.device)
    rows, width = counted.shape
    shape = tuple(getattr(column, 'shape', ()))
    if not isinstance(column, Tensor) or column.is_complex() or shape not in ((rows,), (rows, 1), (rows, width)):
        raise InvalidInputError(
            f'`{LOSS_WEIGHTS}` must be a real tensor of shape ({rows},) or {rows, width}, as the labels, or a list of '
            f'floats, got: {type(column).__name__} of shape {shape}, beginning with {sample_name(batch, 0)}.'
        )
    unrounded = column.view(rows, -1).expand(rows, width)
    weights = unrounded.float()
    is_in_range = (weights >= MIN_LOSS_WEIGHT) & (weights <= MAX_LOSS_WEIGHT)
    # Rounding makes a tiny weight 0 and a huge one inf. So `unrounded` is compared with 0, and shown in the error.
    is_bad = counted & ~((unrounded == 0) | is_in_range)
    if bool(is_bad.any()):
        row, place = is_bad.nonzero()[0].tolist()
        first_bad = unrounded[row, place].item()
        raise InvalidInputError(
            f'`{LOSS_WEIGHTS}` must be 0, or from {MIN_LOSS_WEIGHT} to {MAX_LOSS_WEIGHT}, got: {first_bad} for '
            f'{sample_name(batch, row)} (nan: the sample has no weight). Correct it (0 instead of a smaller weight), '
            'or leave the sample out.'
        )
    return weights


def _tensor_of(weights_of_rows: Sequence[Any], batch: Batch) -> Tensor:
    """Returns a weight for each row of a batch, float64 ``(rows,)``. A weight that is None becomes NaN.

    A NaN is refused later if the row has a counted token.
    """
    numbers = []
    for row, weight in enumerate(weights_of_rows):
        if getattr(weight, 'ndim', None) == 0:  # a number of numpy, or a tensor with one value
            weight = weight.item()
        if weight is None:
            weight = math.nan
        if not isinstance(weight, (int, float)):
            raise InvalidInputError(
                f'`{LOSS_WEIGHTS}` must be a number for every sample, or a tensor with one for every position, got: '
                f'{weight!r} for {sample_name(batch, row)}.'
            )
        numbers.append(weight)
    return torch.tensor(numbers, dtype=torch.float64)


def are_weights_unused(microbatches: Iterable[Batch], token_weights: str) -> bool:
    """Returns whether a microbatch has weights that the scheme ``token_weights`` does not use."""
    return token_weights != 'column' and any(LOSS_WEIGHTS in microbatch for microbatch in microbatches)


def _warn_of_unused_weights() -> None:
    """Warns that weights in the data have no effect."""
    log.warning('The data have `%s`, which is not used without `token_weights=column`.', LOSS_WEIGHTS)


@cache
def warn_of_unused_weights_once() -> None:
    """Warns of unused weights at the first call only, because a loop calls this function in every step."""
    _warn_of_unused_weights()


def check_weights_are_used(dataloader: Any, batch: Batch, token_weights: str) -> None:
    """Warns if weights of the batch are not used. Raises ValueError if ``loss_shares`` of the sampler are not used.

    With ``loss_shares`` a sampler gives each dataset its share of the loss. For this its loader writes
    ``loss_weights`` into each batch.

    Args:
        dataloader: The loader of the batch.
        batch: A batch of the loader.
        token_weights: The scheme of the run.
    """
    batch_sampler = getattr(dataloader, 'batch_sampler', None)
    has_loss_shares = getattr(batch_sampler, 'loss_shares', None) is not None
    # Batches of a plain DataLoader may have weights of the data, but never those of the sampler.
    are_shares_used = token_weights == 'column' and isinstance(batch, PreSplitBatch)
    if has_loss_shares and not are_shares_used:
        raise InvalidInputError(
            "`loss_shares` of the sampler need `token_weights='column'` and a RegroupingDataLoader, which writes them "
            f'into its batches, got: {token_weights!r} and a {type(dataloader).__name__}. Set '
            "`TokenAccumulation(token_weights='column')`, and take such a loader."
        )
    if are_weights_unused(microbatches_of(batch), token_weights):
        _warn_of_unused_weights()
