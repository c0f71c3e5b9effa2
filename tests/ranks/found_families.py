# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: types whose layout is found, with steps of text alone and media on one rank only.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). Gradients of every step are held to
each rank's batch by itself, weighed by its loss-generating tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.utils import dist

from tests.matrix.harness import plain_gradients, quiet
from tests.model_types.trial import maker_of
from tests.support.fsdp import FSDP, repair_average, sharded
from tests.support.training import each_run, fit, relative_error, saving, state_of


def run(
    *,
    model_type: str,
    modality: str,
    steps: str,
    fsdp: bool = False,
    packing: bool = False,
    size: int = 2,
    settings: dict[str, Any] | None = None,
    runs: int = 1,
    lr: float = 0.0,
    folder: str | None = None,
    load_path: str | None = None,
) -> dict[str, Any]:
    """One Trainer.

    Args:
        model_type: Of ``tests.model_types``.
        modality: Of the media.
        steps: A letter a step: ``'t'`` text only, ``'m'`` with media on the first rank alone.
        fsdp: Whether the model is sharded.
        packing: Whether rows are packed.
        size: Microbatch size.
        settings: Of the text part's config.
        runs: Runs of placeholders of each item: frames with words between them.
        lr: Learning rate; with 0 the gradients of all steps are known.
        folder: Where checkpoints go, one a step.
        load_path: Checkpoint to resume from.
    """
    maker = maker_of(model_type, **settings or {})
    media, text = maker.batch(modality, runs=runs), maker.batch(modality, has_media=False)
    model = HuggingFaceModel(maker.model, shift_labels=True)
    is_first = not dist.get_global_rank()
    expected = {kind: _weighted(model, [media if kind == 'm' else text, text]) for kind in set(steps) if is_first}
    doubles = plain_gradients(model, media)
    if lr:  # what has no gradient has no optimizer state, which torch misses on loading
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in doubles)
    own = [media if kind == 'm' and not dist.get_global_rank() else text for kind in steps]
    if fsdp:
        repair_average()
    options: dict[str, Any] = {**(FSDP if fsdp else {}), **saving(folder), 'load_path': load_path}
    trained = sharded(maker.model) if fsdp else copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.0)
    with quiet():
        recorder = fit(trained, *own, packing=packing, microbatch_size=size, optimizer=optimizer, **options)
    dist.barrier()
    state = state_of(recorder.trainer.state.model)
    recorder.trainer.close()
    if not is_first:
        return {}
    pairs = zip(recorder.steps, steps[len(steps) - len(recorder.steps) :], strict=True)
    model.float()
    given = {key: value.float() if value.is_floating_point() else value for key, value in media.items()}
    return {
        'round_off': relative_error(plain_gradients(model, given), doubles),
        'errors': [relative_error(found, expected[kind]) for found, kind in pairs],
        'parameters': state['parameters'],
    }


def _weighted(model, batches):
    """The gradients of the mean over all tokens, of batches whose rows know nothing of each other."""
    counts = [int((batch['labels'][:, 1:] != -100).sum()) for batch in batches]
    total: dict = {}
    for batch, count in zip(batches, counts, strict=True):
        for name, gradient in plain_gradients(model, batch).items():
            total[name] = total.get(name, 0) + gradient * (count / sum(counts))
    return total


main = each_run(run)
