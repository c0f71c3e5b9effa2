# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Plain training loops for the check of any trainer; under the composer launcher: on ranks that average gradients."""

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


def _count(batch: dict[str, Any]) -> int:
    return int((batch['labels'][:, 1:] != -100).sum())


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    named = inspect.signature(model.forward).parameters
    return model(**{key: value for key, value in batch.items() if key in named}).loss


def _averaged(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            found[name] = gradient / dist.get_world_size()
    return found


def step_mean(model: Any, *, keep: bool = False, over_ranks: bool = True) -> Loop:
    """Every token of the step weighs the same; with ``keep`` the last step's gradient stays in."""

    def gradients(microbatches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not keep:
            model.zero_grad()
        total = torch.tensor(float(sum(map(_count, microbatches))))
        if over_ranks:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        for microbatch in microbatches:
            if _count(microbatch):
                (_loss(model, microbatch) * _count(microbatch) / total).backward()
        return _averaged(model)

    return gradients


def mean_of_means(model: Any) -> Loop:
    """What most trainers did until 2024."""

    def gradients(microbatches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for microbatch in microbatches:
            (_loss(model, microbatch) / len(microbatches)).backward()
        return _averaged(model)

    return gradients


def main() -> dict[str, Any]:
    model = text_model()
    rows = rank_share(text_rows([(4, 2), (14, 11), (9, 9), (6, 1), (5, 3), (3, 2)]), [3, 3])
    found: dict[str, Any] = {
        'step mean': verify_invariance(step_mean(model), rows).worst.error,
        'mean of each rank': verify_invariance(step_mean(model, over_ranks=False), rows).worst.error,
    }
    same = text_rows([(4, 2), (14, 11), (10, 9)])
    found['step mean of the same rows'] = verify_invariance(step_mean(model), same).worst.error
    found['mean of each rank, of the same rows'] = verify_invariance(
        step_mean(model, over_ranks=False), same
    ).worst.error
    try:
        verify_invariance(step_mean(model), rows[: 3 - dist.get_global_rank()])
    except ValueError as error:
        found['refused'] = str(error)
    return found
