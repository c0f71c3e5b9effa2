# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: sources that only some ranks have; what was logged, and plain losses."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import each_run, fit, rank_share, reference_gradients

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5), (7, 3)]
STEPS = ('aaaaaaaa', 'abcaaaad', 'dddddddd', 'eabbabba')
"""Sources of the rows of each step: the first ranks have the first rows."""


def run(**options: Any) -> dict[str, Any]:
    """Four steps; the first rank takes two rows, the others share the rest."""
    world, rows = dist.get_world_size(), text_rows(SHAPE)
    sizes = [2, *[6 // (world - 1)] * (world - 1)]
    own = [{**collate(rank_share(rows, sizes)), 'source': rank_share(step, sizes)} for step in STEPS]
    callbacks = [TokenMonitor()]
    recorder = fit(text_model(), *own, slot_tokens=14, microbatch_size=1, callbacks=callbacks, **options)
    names = {name for name in recorder.memory.data if '/source/' in name}
    logged = [{} for _ in STEPS]
    for name in names:
        for time, value in recorder.memory.data[name]:
            logged[int(time.batch.value) - 1][name.removeprefix('token_monitor/source/')] = float(value)
    model = text_model().double()
    losses = []
    for row in rows:
        predicted = model(input_ids=row['input_ids']).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(predicted, row['labels'][0, 1:], reduction='sum')))
    expected, _ = reference_gradients(text_model(), collate(rows))
    norms = [float(value) for _, value in recorder.memory.data['token_monitor/gradient_norm']]
    norm = float(sum(value.double().square().sum() for value in expected.values()).sqrt())
    return {'logged': logged, 'losses': losses, 'norms': norms, 'first_norm': norm}


main = each_run(run)
