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
from composer_tokacc.batch import BatchDict
from tests.support.text import text_model, text_rows
from tests.support.training import rank_share

Loop = Callable[[list[BatchDict]], dict[str, torch.Tensor]]


def _num_labels(batch: BatchDict) -> int:
    next_tokens = batch['labels'][:, 1:]
    return int((next_tokens != -100).sum())


def _loss(model: Any, batch: BatchDict) -> torch.Tensor:
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

    def gradients_of(microbatches: list[BatchDict]) -> dict[str, torch.Tensor]:
        if not keep:
            model.zero_grad()
        total = torch.zeros(())
        for microbatch in microbatches:
            total += _num_labels(microbatch)
        if over_ranks:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        for microbatch in microbatches:
            num_labels = _num_labels(microbatch)
            if num_labels:  # the model's mean over no labels is NaN
                loss = _loss(model, microbatch)
                (loss * num_labels / total).backward()
        return _averaged_gradients(model)

    return gradients_of


def mean_of_means(model: Any) -> Loop:
    """Returns a loop in which every microbatch weighs the same, as in most trainers until 2024."""

    def gradients_of(microbatches: list[BatchDict]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for microbatch in microbatches:
            loss = _loss(model, microbatch)
            (loss / len(microbatches)).backward()
        return _averaged_gradients(model)

    return gradients_of


def _worst_error(loop: Loop, rows: list[BatchDict]) -> float:
    return verify_invariance(loop, rows).worst.error


def _refusal(loop: Loop, rows: list[BatchDict]) -> str | None:
    """Returns the message of the refusal, or None if the rows are not refused."""
    try:
        verify_invariance(loop, rows)
    except ValueError as error:
        return str(error)
    return None


def main() -> dict[str, Any]:
    """Returns the largest error of each loop, the error with images on one rank only, and two refusals."""
    model = text_model()
    exact_loop = step_mean(model)
    all_rows = text_rows([(4, 2), (14, 11), (9, 9), (6, 1), (5, 3), (3, 2)])
    rows = rank_share(all_rows, [3, 3])

    media: dict[str, Any] = {'num_images': [0]}
    if dist.get_global_rank() == 1:
        # The keys of text do not tell that an image has several patches.
        media = {'num_images': [1], 'pixel_values': torch.ones(4, 6), 'image_grid_thw': torch.tensor([[1, 2, 2]])}
    rows_with_media = [{**row, **media} for row in rows]
    one_row_less_on_rank_1 = rows[: 3 - dist.get_global_rank()]
    rows_of_all_ranks = text_rows([(4, 2), (14, 11), (10, 9)])

    return {
        'step mean': _worst_error(exact_loop, rows),
        'mean of each rank': _worst_error(step_mean(model, over_ranks=False), rows),
        'images on one rank': _worst_error(exact_loop, rows_with_media),
        'a row less on rank 1': _refusal(exact_loop, one_row_less_on_rank_1),
        'same rows': _refusal(exact_loop, rows_of_all_ranks),
    }
