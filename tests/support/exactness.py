# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a split does to a gradient, without a Trainer: microbatches weighted by their tokens, summed."""

from __future__ import annotations

import copy
from typing import Any

import torch

from composer_tokacc import BatchLayout, token_data_spec
from tests.support.training import Gradients, loader

Batch = dict[str, Any]


def split(batch: Batch, size: float, **options: Any) -> list[Batch]:
    """Microbatches of a batch, which is left as it is."""
    spec = token_data_spec(loader(batch), **options)
    return list(spec.split_batch(spec.batch_transforms(copy.deepcopy(batch)), size))


def loss_tokens(batch: Batch) -> int:
    """Positions that carry the loss of a causal model."""
    return int((batch['labels'][:, 1:] != -100).sum())


def gradients_of(model: torch.nn.Module, microbatches: list[Batch]) -> Gradients:
    """Of the mean over all tokens, in float64: each microbatch's mean weighs what its tokens are of the whole."""
    model = copy.deepcopy(model).double()
    model.zero_grad(set_to_none=True)
    total = sum(map(loss_tokens, microbatches))
    for microbatch in microbatches:
        inputs = {key: value for key, value in microbatch.items() if isinstance(value, torch.Tensor)}
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        # A mean over no tokens is not a number.
        if tokens := loss_tokens(microbatch):
            (model(**inputs).loss * tokens / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rows_of(microbatches: list[Batch]) -> list[tuple[int, ...]]:
    """Every row as the tuple of its real ids, in an order of their own."""
    return sorted(
        tuple(ids[mask.bool()].tolist())
        for microbatch in microbatches
        for ids, mask in zip(microbatch['input_ids'], microbatch['attention_mask'], strict=True)
    )


def family_batch(case: Any, *, side: str = 'right') -> Batch:
    """The rows of a family's case as one batch."""
    layout = BatchLayout.for_model(case.model)
    return layout.concat(case.rows, pad_token_id=case.pad_token_id, padding_side=side)
