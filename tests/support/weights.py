# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weighted means by plain autograd. The loss is written out row by row, from the logits of one float64 forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from composer_tokacc.batch import BatchDict
from tests.support.training import Gradients, composer_gradients, in_double, take_gradients, tensors_in

# A token of a row with n labels weighs n ** -power.
POWERS = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0}


def column(batch: BatchDict, *, seed: int = 0, zeros: bool = True) -> torch.Tensor:
    """Returns random weights of all positions. With ``zeros`` some of them are 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.1 + 3 * torch.rand(batch['labels'].shape, generator=generator)
    if zeros:
        is_kept = torch.rand(weights.shape, generator=generator) > 0.2
        weights = weights * is_kept
    return weights


def weights_of_row(batch: BatchDict, row: int, places: list[int], token_weights: str) -> torch.Tensor:
    """Returns the weights of the labels of a row. ``places`` are the positions of these labels."""
    if token_weights != 'column':
        num_labels = max(len(places), 1)  # a row without labels has no token to weigh
        weight = num_labels ** -POWERS[token_weights]
        return torch.full((len(places),), weight, dtype=torch.float64)
    weights = batch['loss_weights'][row]
    if weights.dim() == 0:  # one weight for all positions of the row
        return weights.expand(len(places))
    return weights[places]


def weighted_losses(
    logits: torch.Tensor,
    batch: BatchDict,
    token_weights: str,
    *,
    shift: int = 1,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted mean and the plain mean of the losses of tokens.

    Args:
        logits: Of the whole batch, (rows, width, vocabulary).
        batch: The batch, with its labels, and for ``'column'`` with its weights.
        token_weights: Argument of TokenAccumulation.
        shift: By how many positions a label is predicted ahead. With 0 also the first label counts.
        label_smoothing: Argument of torch's cross-entropy.
        z_weight: The weight of the z-loss.
    """
    labels = batch['labels']
    losses = []
    weights = []
    for row in range(len(labels)):
        places = [place for place in range(shift, labels.shape[1]) if int(labels[row, place]) != -100]
        predicting_places = [place - shift for place in places]
        predictions = logits[row, predicting_places]
        targets = labels[row, places]
        losses_of_row = F.cross_entropy(predictions, targets, reduction='none', label_smoothing=label_smoothing)
        z_losses = predictions.logsumexp(dim=-1).square()
        losses.append(losses_of_row + z_weight * z_losses)
        weights.append(weights_of_row(batch, row, places, token_weights))
    all_losses = torch.cat(losses)
    all_weights = torch.cat(weights).to(logits.dtype)
    weighted_sum = (all_losses * all_weights).sum()
    return weighted_sum / all_weights.sum(), all_losses.mean()


def weighted_reference(model: torch.nn.Module, batch: BatchDict, token_weights: str) -> tuple[Gradients, float, float]:
    """Returns the gradient, the weighted mean loss and the plain mean loss of one float64 forward over the batch."""
    model = in_double(model)
    model.zero_grad(set_to_none=True)
    inputs = tensors_in(batch, torch.float64)
    del inputs['labels']
    inputs.pop('loss_weights', None)
    logits = model(**inputs, use_cache=False).logits
    weighted_mean, plain_mean = weighted_losses(logits, batch, token_weights)
    weighted_mean.backward()
    return composer_gradients(model), weighted_mean.item(), plain_mean.item()


def weighted_gradients(model: Any, batch: BatchDict, token_weights: str, **options: Any) -> Gradients:
    """Returns the gradients of one plain forward of a Composer model, in the type of its weights.

    Takes the options of :func:`weighted_losses`.
    """
    inputs = {key: value for key, value in batch.items() if key != 'loss_weights'}
    model.zero_grad(set_to_none=True)
    outputs = model(inputs)
    weighted_mean, _ = weighted_losses(outputs['logits'], batch, token_weights, **options)
    weighted_mean.backward()
    return take_gradients(model)
