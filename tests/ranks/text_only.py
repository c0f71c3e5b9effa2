# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: steps without media, before the process has seen any. Returns the errors of the steps.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). Each has its own loader, which has not seen the
media of earlier runs. The gradient of each step is compared with one forward over the global batch.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc import BatchLayout
from composer_tokacc.row_counts import num_rows, num_samples
from tests.matrix.collator import join
from tests.matrix.harness import plain_gradients
from tests.matrix.subjects import SUBJECTS, Subject, has_labels, has_media
from tests.support.training import each_run, fit, rank_share, relative_error, saving, state_of


class AddedRows(Callback):
    """Records how many rows were added to each microbatch of each step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.steps.append([])

    def after_loss(self, state: State, logger: Logger) -> None:
        self.steps[-1].append(num_rows(state.batch) - num_samples(state.batch))


def run(
    *,
    family: str,
    steps: str,
    rows: int = 6,
    lr: float = 0.0,
    folder: str | None = None,
    load_path: str | None = None,
    equal_counts: bool | str = 'auto',
    **options: Any,
) -> dict[str, Any]:
    """Runs a Trainer. Returns errors, a hash of the last parameters, and the numbers of added rows.

    Args:
        family: Name of a subject.
        steps: A letter for each step: ``'t'`` text only, ``'m'`` some rows with media, which are on the first rank.
        rows: Rows of a step, over all ranks.
        lr: Learning rate. The gradients of later steps are compared with the first weights, so it must be 0 for that.
        folder: Where checkpoints are saved, one for each step.
        load_path: Checkpoint to resume from.
        equal_counts: Option of the data spec.
        options: Options of the Trainer.
    """
    subject = SUBJECTS[family]
    model = subject.model('large')
    layout = BatchLayout.for_model(model)
    is_first = dist.get_global_rank() == 0
    num_ranks = dist.get_world_size()
    rank_batches = []
    expected = []
    for seed, letter in enumerate(steps):
        rows_of_step = rows_of(subject, letter, seed, rows)
        rank_rows = rank_share(rows_of_step, [rows // num_ranks] * num_ranks)
        rank_batches.append(join(rank_rows, side='right', slots=subject.slots))
        if is_first:
            batch = join(rows_of_step, side='right', slots=subject.slots)
            # Models with query tokens need a medium in every batch.
            expected.append(plain_gradients(model, layout.with_media(batch)))
    added_rows = AddedRows()
    options |= {'load_path': load_path, 'callbacks': [added_rows], **saving(folder)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    recorder = fit(model, *rank_batches, equal_counts=equal_counts, optimizer=optimizer, **options)
    dist.barrier()
    state = state_of(recorder.trainer.state.model)
    recorder.trainer.close()
    errors = []
    if is_first:
        # A resumed run has only trained the last steps.
        expected_of_run = expected[-len(recorder.steps) :]
        for gradients, expected_gradients in zip(recorder.steps, expected_of_run, strict=True):
            errors.append(relative_error(gradients, expected_gradients))
    return {
        'errors': errors,
        'parameters': state['parameters'],
        'added': dist.all_gather_object(added_rows.steps),
    }


def rows_of(subject: Subject, letter: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Draws rows with labels. With ``'m'`` the first two have media, the others none."""
    rng = random.Random(f'{subject.name} {letter} {seed}')
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = subject.row(rng)
        needs_media = letter == 'm' and len(rows) < 2
        if has_labels(row) and has_media(row) == needs_media:
            rows.append(row)
    return rows


def run_or_refused(**arguments: Any) -> dict[str, Any]:
    """Returns the results of :func:`run`, or the message if it was refused. It is refused on all ranks."""
    try:
        return run(**arguments)
    except (RuntimeError, ValueError) as error:
        return {'refused': str(error)}


main = each_run(run_or_refused)
