# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token weights: what each loss-generating token of a batch counts, where they do not all count the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer_tokacc.batch import sample_name
from composer_tokacc.counting import counted_tokens

LOSS_WEIGHTS = 'loss_weights'
"""Key of the tokens' weights: what a collator gives, a float per row or per position; from BATCH_START on, where tokens
do not all weigh the same, float32 of the labels' shape, 0 where no loss is generated."""
TOKEN_WEIGHTS: dict[str, float | None] = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0, 'column': None}
"""How tokens may be weighed: by the loss tokens of their sample to the power -p, or as the batch says."""


def check_token_weights(token_weights: str) -> None:
    """Raises ValueError for a scheme of another name."""
    if token_weights not in tuple(TOKEN_WEIGHTS):
        raise ValueError(f'`token_weights` must be one of {tuple(TOKEN_WEIGHTS)}, got: {token_weights!r}.')


def token_weights_of(
    batch: Mapping[str, Any], token_weights: str, loss_tokens: str = 'causal'
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what tokens weigh, float32 ``(rows, width)``, 0 where no loss is generated; and where it is, bool.

    Args:
        batch: A batch with ``labels``; with ``loss_weights`` for ``'column'``.
        token_weights: ``'token'``, ``'sqrt'`` or ``'sample'``: the loss-generating tokens of its sample to the power 0,
            -1/2 or -1, where a document of a packed row is a sample; or ``'column'``.
        loss_tokens: The rule, see :func:`.loss_mask`.

    Raises:
        ValueError: If a weight is missing, negative, not finite or of another shape; with the sample.
    """
    check_token_weights(token_weights)
    counted = counted_tokens(batch, loss_tokens)
    power = TOKEN_WEIGHTS[token_weights]
    if power is not None:
        documents = _documents(batch, counted)
        counts = torch.bincount(documents[counted], minlength=documents.numel()).clamp(min=1)
        return counts.double().pow(-power)[documents].masked_fill(~counted, 0).float(), counted
    return _given_weights(batch, counted).masked_fill(~counted, 0), counted


def _documents(batch: Mapping[str, Any], counted: torch.Tensor) -> torch.Tensor:
    """``(rows, width)`` int, another number for each document of each row."""
    positions, sequences = batch.get('position_ids'), batch.get('sequence_id')
    begins = torch.zeros_like(counted)
    if isinstance(positions, torch.Tensor) and positions.shape == counted.shape:
        begins |= positions == 0  # of padding as well: a document without labels weighs nothing
    if isinstance(sequences, torch.Tensor) and sequences.shape == counted.shape:  # llm-foundry's packed rows
        begins[:, 1:] |= sequences[:, 1:] != sequences[:, :-1]
    begins[:, :1] = True
    return begins.flatten().cumsum(dim=0).view_as(counted) - 1


def _given_weights(batch: Mapping[str, Any], counted: torch.Tensor) -> torch.Tensor:
    """Returns the weights of the batch itself, float32 ``(rows, width)``."""
    given: Any = batch.get(LOSS_WEIGHTS)
    if given is None:
        raise ValueError(
            f"`token_weights='column'` needs `{LOSS_WEIGHTS}` in every batch, a float per row or per position of the "
            f'labels, got: {sorted(map(str, batch))}, beginning with {sample_name(batch, 0)}. Give the data '
            'such a column, or take other weights.'
        )
    if isinstance(given, (list, tuple)):
        for row, value in enumerate(given):
            if not isinstance(value, (int, float)):
                name = sample_name(batch, row)
                raise ValueError(f'`{LOSS_WEIGHTS}` must be a number for every sample, got: {value!r} for {name}.')
        given = torch.tensor(given)
    rows, width = counted.shape
    if not isinstance(given, torch.Tensor) or given.is_complex():
        raise ValueError(f'`{LOSS_WEIGHTS}` must be a real tensor, or a list of a float per row, got: {given!r}.')
    if tuple(given.shape) not in ((rows,), (rows, 1), (rows, width)):
        raise ValueError(
            f'`{LOSS_WEIGHTS}` must be of shape ({rows},) or {rows, width}, as the labels, got: {tuple(given.shape)}, '
            f'beginning with {sample_name(batch, 0)}.'
        )
    weights = given.float().view(rows, -1).expand(rows, width)
    bad = counted & ~(weights.isfinite() & (weights >= 0))
    if bool(bad.any()):
        row = int(bad.any(dim=1).int().argmax())
        raise ValueError(
            f'`{LOSS_WEIGHTS}` must be finite and not negative, got: {weights[row][bad[row]][0].item()} for '
            f'{sample_name(batch, row)} (nan: it has none). Mend it, or leave the sample out.'
        )
    return weights
