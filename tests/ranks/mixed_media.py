# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: images on one rank, videos or sounds on another, several, or none; the errors.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). The rows are those that the
families' own processors make, with nothing in them that counts media.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from composer.utils import dist

from composer_tokacc import token_data_spec
from tests.matrix.collator import join
from tests.support.families import freeze_unreached
from tests.support.family_media import MEDIA, SLOT_MEDIA, MediaCase
from tests.support.fsdp import FSDP, repair_average, sharded
from tests.support.training import TOLERANCE, each_run, fit, loader, reference_gradients, relative_error


def run(
    *, family: str, steps: list[list[str]], size: int, side: str = 'right', fsdp: bool = False
) -> list[dict[str, float]]:
    """One Trainer, the weights standing still; on rank 0 what comes of every step.

    Args:
        family: Key of :data:`.MEDIA` or :data:`.SLOT_MEDIA`.
        steps: For each step, what the rows of each rank hold: ``'image+none'`` is one row with images alone and one
            without media; a row of ``'image&video'`` has both.
        size: Microbatch size.
        side: Of padding.
        fsdp: Whether the model is sharded.
    """
    case = {**MEDIA, **SLOT_MEDIA}[family]()
    slots = family in SLOT_MEDIA
    if fsdp:
        repair_average()
    freeze_unreached(case)
    shares = [[rows_of(case, kinds) for kinds in step] for step in steps]
    data = loader(*(join(step[dist.get_global_rank()], side=side, slots=slots) for step in shares))
    model = sharded(case.model) if fsdp else copy.deepcopy(case.model)
    options = {'microbatch_size': size, 'max_duration': f'{len(steps)}ba', **(FSDP if fsdp else {})}
    recorder = fit(model, token_data_spec(data), **options)
    found = []
    if dist.get_global_rank():
        return found
    losses = recorder.logged('loss/train/total')
    for step, gradients, loss in zip(shares, recorder.steps, losses, strict=True):
        # On the right, where eager attention has a reference in float64.
        whole = join([row for rows in step for row in rows], side='right', slots=slots)
        expected, own = reference_gradients(case.model, whole)
        error, round_off = relative_error(gradients, expected), 0.0
        if error > TOLERANCE:
            round_off = relative_error(reference_gradients(case.model, whole, torch.float32)[0], expected)
        found.append({'error': error, 'loss_error': abs(loss - own) / own, 'round_off': round_off})
    return found


def rows_of(case: MediaCase, kinds: str) -> list[dict[str, Any]]:
    """For each kind another one of the rows that hold just that."""
    rows = []
    for place, kind in enumerate(kinds.split('+')):
        pool = [row for row, held in zip(case.rows, case.kinds, strict=True) if held == kind]
        rows.append(pool[place % len(pool)])
    return rows


main = each_run(run)
