# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Plain training loops for `verify_invariance`. Under the composer launcher they average gradients over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import verify_invariance
from tests.support.text import text_model, text_rows
from tests.support.training import rank_share

Loop = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


def _num_labels(batch: dict[str, Any]) -> int:
    return int((batch['labels'][:, 1:] != -100).sum())


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    arguments = inspect.signature(model.forward).parameters
    inputs = {key: value for key, value in batch.items() if key in arguments}
    return model(**inputs).loss


def _averaged_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradients[name] = gradient / dist.get_world_size()
    return gradients


def step_mean(model: Any, *, keep: bool = False, over_ranks: bool = True) -> Loop:
    """Returns a loop in which every token of the step weighs the same.

    Args:
        model: The model.
        keep: Whether the gradient of the last step stays in the model, which is a mistake.
        over_ranks: Whether tokens are counted over all ranks. If not, which is a mistake, the gradient is a mean of the
            means of the ranks.
    """

    def gradients_of(microbatches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not keep:
            model.zero_grad()
        total = torch.tensor(float(sum(map(_num_labels, microbatches))))
        if over_ranks:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        for microbatch in microbatches:
            num_labels = _num_labels(microbatch)
            if num_labels:
                (_loss(model, microbatch) * num_labels / total).backward()
        return _averaged_gradients(model)

    return gradients_of


def mean_of_means(model: Any) -> Loop:
    """Returns a loop in which every microbatch weighs the same, as in most trainers until 2024."""

    def gradients_of(microbatches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for microbatch in microbatches:
            (_loss(model, microbatch) / len(microbatches)).backward()
        return _averaged_gradients(model)

    return gradients_of


def main() -> dict[str, Any]:
    """Returns the largest error of each loop, that of rows with images on one rank only, and two refusals."""
    model = text_model()
    loops = {'step mean': step_mean(model), 'mean of each rank': step_mean(model, over_ranks=False)}
    rows = rank_share(text_rows([(4, 2), (14, 11), (9, 9), (6, 1), (5, 3), (3, 2)]), [3, 3])
    results: dict[str, Any] = {}
    for name, loop in loops.items():
        results[name] = verify_invariance(loop, rows).worst.error
    media: dict[str, Any] = {'num_images': [0]}
    if dist.get_global_rank() == 1:
        # The keys of text do not tell that an image has several patches.
        media = {'num_images': [1], 'pixel_values': torch.ones(4, 6), 'image_grid_thw': torch.tensor([[1, 2, 2]])}
    rows_with_media = [{**row, **media} for row in rows]
    results['images on one rank'] = verify_invariance(step_mean(model), rows_with_media).worst.error
    refused_rows = {
        'a row less on rank 1': rows[: 3 - dist.get_global_rank()],
        'same rows': text_rows([(4, 2), (14, 11), (10, 9)]),
    }
    for name, rows_of_rank in refused_rows.items():
        try:
            verify_invariance(step_mean(model), rows_of_rank)
        except ValueError as error:
            results[name] = str(error)
    return results
