# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: `measure_token_weights` on ranks with different numbers of tokens.

Returns what each rank measured.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from composer.utils import dist

from composer_tokacc import measure_token_weights, pytest_plugin, weighted_microbatches
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit

LENGTHS = [[5, 9], [3, 3]]
"""Lengths of the rows of each rank. The second row of rank 1 has no label."""


def figures_of_ranks(report: Any) -> dict[str, list[Any]]:
    """Returns for each rank the spread of its own weights, the spread over all ranks, and the printed report."""
    weights = torch.cat(report.weights)
    spread_of_rank = float(weights.max() / weights.min()) if len(weights) else 1.0
    return {
        'own': dist.all_gather_object(spread_of_rank),
        'spread': dist.all_gather_object(report.spread),
        'printed': dist.all_gather_object(str(report)),
    }


def fault_of_step(model: Any, batch: dict[str, Any], context: Any, *, makes_step: bool = True) -> str:
    """Returns the message with which the fixture `token_exact` fails a step of one microbatch; empty if it passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    try:
        with pytest_plugin._exact_step(model):
            for microbatch, weight in weighted_microbatches([batch]):
                with context:
                    (model(**microbatch).loss * weight).backward()
            if makes_step:
                optimizer.step()
    except pytest.fail.Exception as failure:
        return str(failure)
    return ''


def main() -> dict[str, Any]:
    rank = dist.get_global_rank()
    rows = text_rows([(length, length) for length in LENGTHS[rank]])
    if rank == 1:
        rows[1]['labels'][:] = -100
    batch = collate(rows)
    figures = {}
    model = torch.nn.parallel.DistributedDataParallel(text_model())
    with measure_token_weights(model) as report:
        model(**batch).loss.backward()
    figures['plain'] = figures_of_ranks(report)
    with measure_token_weights(model) as report:
        (model(**batch).loss * (rank == 0)).backward()
    figures['nothing on rank 1'] = figures_of_ranks(report)
    figures['faults without averages'] = fault_of_step(model, batch, model.no_sync())
    figures['faults without a step'] = fault_of_step(model, batch, model.no_sync(), makes_step=False)
    figures['faults'] = fault_of_step(model, batch, contextlib.nullcontext())
    llama = text_model()
    with measure_token_weights(llama) as report:
        fit(llama, batch, microbatch_size=1)
    figures['ours'] = figures_of_ranks(report)
    return figures
