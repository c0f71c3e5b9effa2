# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: optimizers that evaluate a step themselves. Returns the largest error on each rank."""

from __future__ import annotations

from composer.utils import dist

from tests.algorithm.test_closures import STEPS, errors_of_training, lbfgs, sgd
from tests.support.fsdp import FSDP, sharded
from tests.support.text import collate, text_rows
from tests.support.training import largest, rank_share

SHARES = (2, 2)
"""Rows of each rank."""


def main() -> dict[str, list[float]]:
    batches = []
    batches_of_rank = []
    for step in STEPS:
        rows = text_rows(step)
        batches.append(collate(rows))
        batches_of_rank.append(collate(rank_share(rows, SHARES)))
    data = (batches, batches_of_rank)
    errors = {
        'SAM under DDP': errors_of_training(*data, sgd, with_sam=True),
        'SAM under FSDP2': errors_of_training(*data, sgd, with_sam=True, wrap=sharded, **FSDP),
        'LBFGS under DDP': errors_of_training(*data, lbfgs, with_sam=False),
    }
    return {name: dist.all_gather_object(largest(errors_of_rank)) for name, errors_of_rank in errors.items()}
