# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which positions carry loss, and which are real; per row, as plain ints that travel with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ['ADDED_ROWS', 'LOSS_RULES', 'LOSS_TOKENS', 'REAL_TOKENS', 'TokenCounts', 'annotate', 'count_tokens']

LOSS_RULES = ('causal', 'causal_attended', 'unshifted')
"""Which labels a model's own loss averages over: see :func:`loss_mask`."""

# Per-row python lists in the batch. Composer splits and moves lists of ints unharmed, HuggingFaceModel.forward drops
# keys that the model does not know, and reading them costs no device sync.
LOSS_TOKENS = 'loss_generating_tokens'
REAL_TOKENS = 'real_tokens'
COUNTED_BY = 'counted_by'
"""The rule by which the lists were counted, so that nobody counts twice. Only token_data_spec writes it: Composer's own
sample counter takes nothing but tensors and lists."""
ADDED_ROWS = 'added_rows'
"""True for zero-weight rows that a split added; they are not samples."""

NUM_MICROBATCHES = 'num_microbatches'
"""How many microbatches with samples this rank makes of the step."""

SAMPLES_PER_ROW = 'samples_per_row'
"""Samples packed into each row."""
REGROUPED = 'regrouped'
PACKED = 'packed'
PACKED_CHECKED = 'checked'
"""Set on a device batch whose split will sort rows by length, or pack them: what that needs must be checked first."""

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Positions of each row of a batch.

    Args:
        loss_generating: Positions that carry loss, by row.
        real: Attended positions, by row.
        padded: Padding positions, by row; ``real + padded`` is the width of the batch.
    """

    loss_generating: tuple[int, ...]
    real: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def num_loss_generating(self) -> int:
        """Loss-generating positions of all rows."""
        return sum(self.loss_generating)

    @property
    def num_real(self) -> int:
        """Attended positions of all rows."""
        return sum(self.real)

    @property
    def num_padded(self) -> int:
        """Padding positions of all rows."""
        return sum(self.padded)


def check_rule(loss_tokens: str, *, allow_auto: bool = False) -> str:
    """Returns the rule, or raises ValueError naming the valid ones."""
    allowed = ('auto', *LOSS_RULES) if allow_auto else LOSS_RULES
    if loss_tokens not in allowed:
        raise ValueError(f'`loss_tokens` must be one of {allowed}, got: {loss_tokens!r}.')
    return loss_tokens


def labels_of(batch: Any) -> torch.Tensor:
    """The labels of a batch, ``(rows, width)``."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get('labels'), torch.Tensor):
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f'`batch` must be a mapping with a `labels` tensor of shape (rows, width), got: {got}. Token accumulation '
            'counts loss-generating labels; write them in the collator.'
        )
    return batch['labels']


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """``(rows, width)`` bool, where a further document starts in a packed row; None if the rows are not packed.

    A packed row has ``position_ids`` that restart at 0 and no padding; with padding, a 0 after column 0 is merely the
    first real token of a left-padded row.
    """
    positions, mask = batch.get('position_ids'), batch.get('attention_mask')
    if positions is None or positions.dim() != 2 or positions.shape != labels_of(batch).shape:
        return None
    if mask is not None and (mask.dim() != 2 or not bool((mask != 0).all())):
        return None
    starts = positions == 0
    starts[:, 0] = False
    return starts if bool(starts.any()) else None


def mask_document_starts(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Masks the label of the first token of each document in packed rows.

    The last token of one document would be trained to predict the first of the next, and models count that label
    unless it is masked: masked, the model's denominator and ours agree.
    """
    starts = document_starts(batch)
    if starts is None or not bool((batch['labels'][starts] != IGNORE_INDEX).any()):
        return batch
    return {**batch, 'labels': batch['labels'].masked_fill(starts, IGNORE_INDEX)}


def loss_mask(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> torch.Tensor:
    """Which labels carry loss, ``(rows, width)`` bool on the labels' device; no host sync.

    Args:
        batch: A batch with ``labels``, and for ``'causal_attended'`` a 2-D ``attention_mask``.
        loss_tokens: ``'causal'``: the label is predicted by the position before it, so column 0 never counts (most
            decoders); ``'causal_attended'``: moreover its own position is attended (LLaVA up to transformers 4.51,
            Gemma3 up to 4.57); ``'unshifted'``: every label counts (encoder-decoder, pre-shifted labels).
    """
    labels = labels_of(batch)
    counted = labels != IGNORE_INDEX
    if loss_tokens == 'unshifted':
        return counted
    counted[:, :1] = False
    mask = batch.get('attention_mask')
    if loss_tokens == 'causal_attended' and mask is not None and mask.shape == labels.shape:
        counted &= mask != 0
    return counted


def count_tokens(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> TokenCounts:
    """Counts the positions of every row of a batch.

    Args:
        batch: A batch with ``labels`` of shape ``(rows, width)``; ``attention_mask`` (absent: all positions are real)
            and ``position_ids`` are used where present.
        loss_tokens: The rule, see :func:`loss_mask`. The first token of each document of a packed row never counts.

    Returns:
        TokenCounts: Tuples of ints, one entry per row.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [-100, 8, -100]])
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> count_tokens({'labels': labels, 'attention_mask': mask})
        TokenCounts(loss_generating=(2, 1), real=(3, 2), padded=(0, 1))
    """
    counted = loss_mask(batch, check_rule(loss_tokens))
    starts = document_starts(batch) if loss_tokens != 'unshifted' else None
    if starts is not None:
        counted &= ~starts
    mask, ids = batch.get('attention_mask'), batch.get('input_ids', batch['labels'])
    width = ids.shape[1]
    real = (mask != 0).sum(dim=1).tolist() if mask is not None and mask.dim() == 2 else [width] * len(ids)
    return TokenCounts(
        loss_generating=tuple(counted.sum(dim=1).tolist()),
        real=tuple(real),
        padded=tuple(width - row for row in real),
    )


def annotate(batch: Mapping[str, Any], loss_tokens: str = 'causal') -> dict[str, Any]:
    """The batch with its per-row counts as python lists, and packed rows masked as they are counted."""
    if batch.get(COUNTED_BY) == loss_tokens:
        return dict(batch)
    batch = mask_document_starts(batch)
    counts = count_tokens(batch, loss_tokens)
    counted = {**batch, LOSS_TOKENS: list(counts.loss_generating), REAL_TOKENS: list(counts.real)}
    if COUNTED_BY in batch:
        counted[COUNTED_BY] = loss_tokens
    return counted


def num_samples(batch: Mapping[str, Any]) -> int:
    """Samples of the dataset in the batch: its rows, but for added ones, and several in a packed row."""
    if SAMPLES_PER_ROW in batch:
        return sum(batch[SAMPLES_PER_ROW])
    return len(batch['input_ids'] if 'input_ids' in batch else batch['labels']) - sum(batch.get(ADDED_ROWS, ()))
