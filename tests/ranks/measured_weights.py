# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: what tokens weigh on ranks of unlike numbers of them; what each saw."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import measure_token_weights
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit

LENGTHS = [[5, 9], [3, 3]]
"""Rows of each rank; the second row of rank 1 carries no loss."""


def seen(report: Any) -> dict[str, Any]:
    weights = torch.cat(report.weights)
    own = float(weights.max() / weights.min()) if len(weights) else 1.0
    of_ranks = dist.all_gather_object({'own': own, 'spread': report.spread, 'printed': str(report)})
    return {key: [one[key] for one in of_ranks] for key in of_ranks[0]}


def main() -> dict[str, Any]:
    rank = dist.get_global_rank()
    rows = text_rows([(length, length) for length in LENGTHS[rank]])
    if rank == 1:
        rows[1]['labels'][:] = -100
    batch, found = collate(rows), {}
    model = torch.nn.parallel.DistributedDataParallel(text_model())
    with measure_token_weights(model) as report:
        model(**batch).loss.backward()
    found['plain'] = seen(report)
    with measure_token_weights(model) as report:
        (model(**batch).loss * (rank == 0)).backward()
    found['nothing on rank 1'] = seen(report)
    llama = text_model()
    with measure_token_weights(llama) as report:
        fit(llama, batch, microbatch_size=1)
    found['ours'] = seen(report)
    return found
