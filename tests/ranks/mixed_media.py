# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ranks with different modalities in one step. Returns the errors.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). The rows come from the processors of the
families. They have no entry that counts media.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import token_data_spec
from tests.matrix.collator import join
from tests.support.families import MEDIA, SLOT_MEDIA, Case, freeze_unreached
from tests.support.fsdp import FSDP, sharded
from tests.support.training import TOLERANCE, each_run, fit, loader, reference_gradients, relative_error


def run(
    *,
    family: str,
    steps: list[list[str]],
    size: int,
    side: str = 'right',
    fsdp: bool = False,
    equal_counts: bool | str = 'auto',
) -> list[dict[str, float]]:
    """Runs a Trainer at learning rate 0. On rank 0 it returns the errors of every step.

    Args:
        family: Key of :data:`.MEDIA` or :data:`.SLOT_MEDIA`.
        steps: For each step, the media of the rows of each rank. ``'image+none'`` means two rows, one with images and
            one without media. ``'image&video'`` means one row with both.
        size: Microbatch size.
        side: The side of the padding.
        fsdp: Whether the model is sharded.
        equal_counts: Option of the data spec.
    """
    case = {**MEDIA, **SLOT_MEDIA}[family]()
    slots = family in SLOT_MEDIA
    freeze_unreached(case)
    batches = []
    reference_batches = []
    for media_of_ranks in steps:
        rows_of_ranks = [rows_of(case, media_of_rows) for media_of_rows in media_of_ranks]
        batches.append(join(rows_of_ranks[dist.get_global_rank()], side=side, slots=slots))
        rows_of_step = list(chain.from_iterable(rows_of_ranks))
        # The reference is padded on the right, because with padding on the left eager attention is NaN in float64.
        reference_batches.append(join(rows_of_step, side='right', slots=slots))
    model = sharded(case.model) if fsdp else copy.deepcopy(case.model)
    options: dict[str, Any] = dict(FSDP) if fsdp else {}
    data = token_data_spec(loader(*batches), equal_counts=equal_counts)
    recorder = fit(model, data, microbatch_size=size, max_duration=f'{len(steps)}ba', **options)
    if dist.get_global_rank() != 0:
        return []
    losses = recorder.logged('loss/train/total')
    results = []
    for batch, gradients, loss in zip(reference_batches, recorder.steps, losses, strict=True):
        expected, expected_loss = reference_gradients(case.model, batch)
        error = relative_error(gradients, expected)
        round_off = 0.0
        if error > TOLERANCE:
            in_float32, _ = reference_gradients(case.model, batch, torch.float32)
            round_off = relative_error(in_float32, expected)
        loss_error = abs(loss / expected_loss - 1)
        results.append({'error': error, 'loss_error': loss_error, 'round_off': round_off})
    return results


def rows_of(case: Case, media_of_rows: str) -> list[dict[str, Any]]:
    """Returns a row for each part of ``'image+none'``, another one each time."""
    rows = []
    for place, media in enumerate(media_of_rows.split('+')):
        candidates = []
        for row, media_of_row in zip(case.rows, case.kinds, strict=True):
            if media_of_row == media:
                candidates.append(row)
        rows.append(candidates[place % len(candidates)])
    return rows


main = each_run(run)
