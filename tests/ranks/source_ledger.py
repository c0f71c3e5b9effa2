# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the ledger by source, with sources that only some ranks have.

Returns the logged figures, and losses of plain forwards.
"""

from __future__ import annotations

import math
from typing import Any

from composer_tokacc import TokenMonitor
from composer_tokacc.batch import BatchDict
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import each_run, fit, rank_share, reference_gradients

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5), (7, 3)]
STEPS = ('aaaaaaaa', 'abcaaaad', 'dddddddd', 'eabbabba')
"""The source of each row, for each step. The first ranks have the first rows."""


def run(**options: Any) -> dict[str, Any]:
    """Runs four steps. The first of two ranks has two rows, the second one has six."""
    rows_of_ranks = (2, 6)
    rows = text_rows(SHAPE)
    rank_batch = collate(rank_share(rows, rows_of_ranks))
    batches = []
    for sources in STEPS:
        sources_of_rank = rank_share(sources, rows_of_ranks)
        batches.append({**rank_batch, 'source': sources_of_rank})
    recorder = fit(
        text_model(),
        *batches,
        slot_tokens=14,
        microbatch_size=1,
        callbacks=[TokenMonitor()],
        **options,
    )

    expected_gradients, _ = reference_gradients(text_model(), collate(rows))
    squared_norm = 0.0
    for gradient in expected_gradients.values():
        squared_norm += float(gradient.double().square().sum())
    return {
        'logged': figures_by_step(recorder.memory.data),
        'losses': plain_losses(rows),
        'norms': recorder.logged('token_monitor/gradient_norm'),
        'first_norm': math.sqrt(squared_norm),
    }


def figures_by_step(data: dict[str, Any]) -> list[dict[str, float]]:
    """Returns the logged figures of the sources, by name, for each step."""
    steps = [{} for _ in STEPS]
    for name, logged in data.items():
        if '/source/' not in name:
            continue
        figure = name.removeprefix('token_monitor/source/')
        for time, value in logged:
            step = int(time.batch.value) - 1
            steps[step][figure] = float(value)
    return steps


def plain_losses(rows: list[BatchDict]) -> list[float]:
    """Returns the summed loss of each row. Each row has its own forward in float64."""
    model = text_model().double()
    losses = []
    for row in rows:
        logits = model(input_ids=row['input_ids']).logits
        loss = next_token_loss(logits, row['labels'], reduction='sum')
        losses.append(float(loss))
    return losses


main = each_run(run)
