# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: steps without any image, video or sound, before the process has seen one.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). Each has a loader of its own: none
has seen the media of those before. Gradients of every step are held to one forward over the global batch; the
results have the errors and a hash of the last parameters.
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
from tests.matrix.subjects import SUBJECTS, Subject
from tests.support.training import each_run, fit, rank_share, relative_error, saving, state_of

MEDIA = ('pixel_values', 'pixel_values_videos', 'input_features')


class AddedRows(Callback):
    """Rows that are no samples in each microbatch of each step."""

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
    """One Trainer.

    Args:
        family: Name of a subject.
        steps: A letter a step: ``'t'`` text only, ``'m'`` some rows with media, on the first rank alone.
        rows: Of a step, over all ranks.
        lr: Learning rate; with 0 the gradients of all steps are known.
        folder: Where checkpoints go, one a step.
        load_path: Checkpoint to resume from.
        equal_counts: Of the data spec.
        options: Of the Trainer.
    """
    subject = SUBJECTS[family]
    batches = [rows_of(subject, kind, seed, rows) for seed, kind in enumerate(steps)]
    model = subject.model('large')
    # Models with query tokens take no batch without media.
    whole = [join(batch, side='right', slots=subject.slots) for batch in batches]
    is_first, layout = not dist.get_global_rank(), BatchLayout.for_model(model)
    expected = [plain_gradients(model, layout.with_media(batch)) for batch in whole if is_first]
    size = rows // dist.get_world_size()
    shares = [rank_share(batch, [size] * dist.get_world_size()) for batch in batches]
    own = [join(share, side='right', slots=subject.slots) for share in shares]
    added = AddedRows()
    options |= {'load_path': load_path, 'callbacks': [added], **saving(folder)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    recorder = fit(model, *own, equal_counts=equal_counts, optimizer=optimizer, **options)
    dist.barrier()
    state = state_of(recorder.trainer.state.model)
    recorder.trainer.close()
    pairs = zip(recorder.steps, expected[-len(recorder.steps) :], strict=is_first)
    return {
        'errors': [relative_error(found, expected) for found, expected in pairs],
        'parameters': state['parameters'],
        'added': dist.all_gather_object(added.steps),
    }


def rows_of(subject: Subject, kind: str, seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f'{subject.name} {kind} {seed}')
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = subject.row(rng)
        has_media = any(key in row for key in MEDIA)
        if has_media == (kind == 'm' and len(rows) < 2) and (row['labels'][:, 1:] != -100).any():
            rows.append(row)
    return rows


def run_or_refused(**arguments: Any) -> dict[str, Any]:
    """What ``run`` gives, or why it was refused, which it is on all ranks."""
    try:
        return run(**arguments)
    except (RuntimeError, ValueError) as error:
        return {'refused': str(error)}


main = each_run(run_or_refused)
