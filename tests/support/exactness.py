# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Splits batches without a Trainer, and counts what is in them."""

from __future__ import annotations

import copy
from typing import Any

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.batch import BatchDict
from tests.support.training import loader


def split(batch: BatchDict, size: float, **options: Any) -> list[BatchDict]:
    """Returns the microbatches of a copy of the batch. The options are those of ``token_data_spec``."""
    spec = token_data_spec(loader(batch), **options)
    copied = copy.deepcopy(batch)
    transformed = spec.batch_transforms(copied)
    return list(spec.split_batch(transformed, size))


def loss_tokens(batch: BatchDict) -> int:
    """Returns the number of positions that carry the loss of a causal model."""
    next_tokens = batch['labels'][:, 1:]
    return int((next_tokens != -100).sum())


def rows_of(microbatches: list[BatchDict]) -> list[list[int]]:
    """Returns the ids of each row without its padding, sorted, so that the order of rows does not matter."""
    rows = []
    for microbatch in microbatches:
        for ids, mask in zip(microbatch['input_ids'], microbatch['attention_mask'], strict=True):
            real_ids = ids[mask.bool()]
            rows.append(real_ids.tolist())
    return sorted(rows)


def family_batch(case: Any, *, side: str = 'right') -> BatchDict:
    """Returns the rows of a family's case as one batch."""
    layout = BatchLayout.for_model(case.model)
    return layout.concat(case.rows, pad_token_id=case.pad_token_id, padding_side=side)
