# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Refusal of models and losses where the gradient depends on which rows share a microbatch.

Rows are independent in a language model's cross-entropy. They are not where

- BatchNorm in training mode normalises by the statistics of the microbatch: found in the model;
- a loss term compares rows with each other (in-batch contrastive losses, preference pairs): declared by
  ``loss_units={'name': 'coupled_samples'}``;
- a loss term is a statistic of the microbatch (the balance of a mixture's router): declared by
  ``loss_units={'name': 'microbatches'}``.

The last two keep their order with ``token_data_spec(..., regroup=False)``. The first is exact in no cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ['check_rows_are_independent']


def check_rows_are_independent(model: nn.Module, coupled_terms: Sequence[str], *, strict: bool) -> None:
    """Raises RuntimeError, with the reason, if cutting or regrouping a batch would change the gradient.

    Args:
        model: The model as it is trained.
        coupled_terms: Terms of the loss that depend on which rows share a microbatch, where rows are regrouped.
        strict: Whether statistics of the microbatch are refused.
    """
    if coupled_terms:
        raise RuntimeError(
            f'Rows must be independent to be regrouped, got: the terms {list(coupled_terms)} of `loss_units`, whose '
            'value depends on which rows share a microbatch. Set `token_data_spec(..., regroup=False)`, which keeps '
            'the order of rows.'
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if norms and strict:
        raise RuntimeError(
            f'Rows must be independent of the rows beside them, got: {len(norms)} BatchNorm in training mode, such as '
            f'{norms[0]!r}, which normalises by the statistics of its microbatch. Freeze it in eval mode; with '
            '`check_loss=False` and an explicit `loss_tokens` the run goes on, and depends on how batches are cut.'
        )
