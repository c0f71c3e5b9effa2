# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Refusal of models and losses where the gradient depends on which rows share a microbatch.

BatchNorm in training mode normalises by statistics of the microbatch, which is exact in no cut. Terms that compare rows
(contrastive losses) or are such statistics (a router's balance) are declared in ``loss_units``, and keep the order of
rows with ``token_data_spec(..., regroup=False)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from composer_tokacc.compat import BatchNorm

__all__ = ['batch_norms', 'check_norms_are_frozen', 'check_rows_are_independent']


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
    check_norms_are_frozen(batch_norms(model), strict=strict)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that normalise by the statistics of their microbatch while they are in training mode."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def check_norms_are_frozen(norms: Mapping[str, nn.Module], *, strict: bool) -> None:
    """Raises RuntimeError if one is in training mode: evaluation puts the whole model back into it, frozen ones too."""
    training = [name for name, module in norms.items() if module.training]
    if training and strict:
        raise RuntimeError(
            f'Rows must be independent of the rows beside them, got: {len(training)} BatchNorm in training mode, such '
            f'as {training[0]!r}, which normalises by the statistics of its microbatch. Freeze it in eval mode (again '
            'after each evaluation, which undoes it); with `check_loss=False` and an explicit `loss_tokens` the run '
            'goes on, and depends on how batches are cut.'
        )
