# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Refusal of batches that no model can compute, before a kernel says it without the sample, or a GPU stops."""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc.counting import IGNORE_INDEX, labels_of, sample_name

__all__ = ['check_batch']


def check_batch(batch: Any, vocabulary: int | None = None) -> None:
    """Raises ValueError, naming the sample, where torch would only say that an index is out of range.

    Args:
        batch: A batch or microbatch with ``labels``, on the CPU.
        vocabulary: Ids that a label may have; None: not known.
    """
    labels = labels_of(batch)
    if labels.dtype != torch.int64:
        raise ValueError(
            f'`labels` must be int64, as cross-entropy takes them, got: {labels.dtype}. Give it `.long()`.'
        )
    if not labels.numel():
        raise ValueError(
            f'A batch must hold at least one row of one token, got: labels of shape {tuple(labels.shape)}. Have the '
            'loader leave such batches out, on all ranks alike.'
        )
    mask = batch.get('attention_mask')
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4)):
        got = f'shape {tuple(mask.shape)}' if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f'`attention_mask` must be a tensor of shape (rows, width) or (rows, heads, width, width), got: {got}, '
            f'beginning with {sample_name(batch, 0)}. Give one mask for all heads as `mask[:, None]`.'
        )
    bad = (labels < 0) & (labels != IGNORE_INDEX)
    bad = bad if vocabulary is None else bad | (labels >= vocabulary)
    if bool(bad.any()):
        row = int(bad.any(dim=1).int().argmax())
        last = 'one of the vocabulary' if vocabulary is None else f'from 0 to {vocabulary - 1}'
        raise ValueError(
            f'A label must be {IGNORE_INDEX} or an id {last}, got: {int(labels[row][bad[row]][0])} in '
            f'{sample_name(batch, row)}. Take the tokenizer that belongs to the model, and mask placeholders of media.'
        )
