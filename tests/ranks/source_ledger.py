# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the ledger by source, with sources that only some ranks have.

Returns the logged figures, and losses of plain forwards.
"""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc import TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import each_run, fit, rank_share, reference_gradients

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5), (7, 3)]
STEPS = ('aaaaaaaa', 'abcaaaad', 'dddddddd', 'eabbabba')
"""The source of each row, for each step. The first ranks have the first rows."""


def run(**options: Any) -> dict[str, Any]:
    """Runs four steps. The first of two ranks has two rows, the second one has six."""
    rows_of_ranks = (2, 6)
    rows = text_rows(SHAPE)
    batches = []
    for sources in STEPS:
        batch: dict[str, Any] = collate(rank_share(rows, rows_of_ranks))
        batch['source'] = rank_share(sources, rows_of_ranks)
        batches.append(batch)
    callbacks = [TokenMonitor()]
    recorder = fit(text_model(), *batches, slot_tokens=14, microbatch_size=1, callbacks=callbacks, **options)
    expected_gradients, _ = reference_gradients(text_model(), collate(rows))
    squares = [gradient.double().square().sum() for gradient in expected_gradients.values()]
    return {
        'logged': figures_by_step(recorder.memory.data),
        'losses': plain_losses(rows),
        'norms': recorder.logged('token_monitor/gradient_norm'),
        'first_norm': float(sum(squares).sqrt()),
    }


def figures_by_step(data: dict[str, Any]) -> list[dict[str, float]]:
    """Returns the logged figures of the sources, by name, for each step."""
    steps = [{} for _ in STEPS]
    for name, logged in data.items():
        if '/source/' not in name:
            continue
        for time, value in logged:
            step = int(time.batch.value) - 1
            steps[step][name.removeprefix('token_monitor/source/')] = float(value)
    return steps


def plain_losses(rows: list[dict[str, Any]]) -> list[float]:
    """Returns the summed loss of each row. Each row has its own forward in float64."""
    model = text_model().double()
    losses = []
    for row in rows:
        logits = model(input_ids=row['input_ids']).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row['labels'][0, 1:], reduction='sum')
        losses.append(float(loss))
    return losses


main = each_run(run)
