# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weighted means by plain autograd: one float64 forward for the logits, the loss written out position by position."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.support.training import Gradients, in_double

POWERS = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0}


def column(batch: dict[str, Any], *, seed: int = 0, zeros: bool = True) -> torch.Tensor:
    """Random weights, another for every position, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.1 + 3 * torch.rand(batch['labels'].shape, generator=generator)
    return weights * (torch.rand(weights.shape, generator=generator) > 0.2 if zeros else 1)


def weighted_losses(
    logits: torch.Tensor,
    batch: dict[str, Any],
    token_weights: str,
    *,
    shift: int = 1,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and plain mean of the tokens' losses, row by row; column 0 counts without shift."""
    labels = batch['labels']
    losses, weights = [], []
    for row in range(len(labels)):
        places = [place for place in range(shift, labels.shape[1]) if int(labels[row, place]) != -100]
        predicted = logits[row, [place - shift for place in places]]
        of_row = F.cross_entropy(predicted, labels[row, places], reduction='none', label_smoothing=label_smoothing)
        losses.append(of_row + z_weight * predicted.logsumexp(dim=-1).square())
        if token_weights == 'column':
            given = batch['loss_weights'][row]
            weights.append(given[places] if given.dim() else given.expand(len(places)))
        else:
            weight_of_row = max(len(places), 1) ** -POWERS[token_weights]
            weights.append(torch.full((len(places),), weight_of_row, dtype=logits.dtype))
    loss, weight = torch.cat(losses), torch.cat(weights).to(logits.dtype)
    return (loss * weight).sum() / weight.sum(), loss.mean()


def weighted_reference(
    model: torch.nn.Module, batch: dict[str, Any], token_weights: str
) -> tuple[Gradients, float, float]:
    """Gradient, weighted mean loss and token mean loss of one whole forward in double precision."""
    model = in_double(model)
    model.zero_grad(set_to_none=True)
    inputs = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    logits = model(**{key: inputs[key] for key in inputs.keys() - {'labels', 'loss_weights'}}, use_cache=False).logits
    loss, token_mean = weighted_losses(logits, batch, token_weights)
    loss.backward()
    gradients = {f'model.{name}': p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, loss.item(), token_mean.item()


def weighted_gradients(model: Any, batch: dict[str, Any], token_weights: str, **options: Any) -> Gradients:
    """Of one plain forward of a Composer model over the whole batch; options of :func:`weighted_losses`."""
    model.zero_grad(set_to_none=True)
    outputs = model({key: value for key, value in batch.items() if key != 'loss_weights'})
    weighted_losses(outputs['logits'], batch, token_weights, **options)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
