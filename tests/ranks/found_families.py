# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: model types whose layout must be found out. Media are on one rank, or on none.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`). The gradients of every step are
compared with those of each rank's batch by itself, weighted by its loss-generating tokens.
"""

from __future__ import annotations

import copy
import json
from functools import cached_property, lru_cache
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.utils import dist

from tests.matrix.harness import plain_gradients, quiet
from tests.model_types.trial import maker_of
from tests.support.fsdp import FSDP, sharded
from tests.support.training import Gradients, each_run, fit, relative_error, saving, state_of, tensors_in


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
    """Trains with one Trainer. Rank 0 returns the round-off, the error of each step, and a hash of the parameters.

    Args:
        model_type: A type of ``tests.model_types``.
        modality: The modality of the media.
        steps: A letter for each step: ``'t'`` text only, ``'m'`` with media, which are on the first rank.
        fsdp: Whether the model is sharded.
        packing: Whether rows are packed.
        size: Microbatch size.
        settings: Settings of the config of the text model.
        runs: Into how many runs, with words between them, the placeholders of a medium are divided.
        lr: Learning rate. With 0 the expected gradients hold in every step.
        folder: Where checkpoints are saved, one for each step.
        load_path: Checkpoint to resume from.
    """
    case = _case(model_type, modality, json.dumps(settings or {}), runs)
    is_first = dist.get_global_rank() == 0
    batches = []
    for letter in steps:
        has_media = letter == 'm' and is_first
        batches.append(case.media if has_media else case.text)
    plain = copy.deepcopy(case.model)
    if lr:  # without a gradient the optimizer has no state, and torch fails to load the checkpoint
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name in case.gradients)
    trained = plain
    options: dict[str, Any] = {**saving(folder), 'load_path': load_path}
    if fsdp:
        trained = sharded(plain.model)
        options = {**options, **FSDP}
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.0)

    with quiet():
        recorder = fit(trained, *batches, packing=packing, microbatch_size=size, optimizer=optimizer, **options)
    dist.barrier()
    state = state_of(recorder.trainer.state.model)
    recorder.trainer.close()

    if not is_first:
        return {}
    errors = []
    first_step = len(steps) - len(recorder.steps)  # a resumed run makes only the last ones
    for gradients, letter in zip(recorder.steps, steps[first_step:], strict=True):
        errors.append(relative_error(gradients, case.expected[letter]))
    return {'round_off': case.round_off, 'errors': errors, 'parameters': state['parameters']}


class _Case:
    """A model in double precision, its batches, and the expected gradients. No run changes them."""

    def __init__(self, model_type: str, modality: str, settings: dict[str, Any], runs: int) -> None:
        maker = maker_of(model_type, **settings)
        self.media = maker.batch(modality, runs=runs)
        self.text = maker.batch(modality, has_media=False)
        self.model = HuggingFaceModel(maker.model, shift_labels=True)

    @cached_property
    def gradients(self) -> Gradients:
        """The gradients of the batch with media."""
        return plain_gradients(self.model, self.media)

    @cached_property
    def expected(self) -> dict[str, Gradients]:
        """The gradients of a step of two ranks, by its letter."""
        return {
            'm': _weighted(self.model, [self.media, self.text]),
            't': _weighted(self.model, [self.text, self.text]),
        }

    @cached_property
    def round_off(self) -> float:
        """The relative difference between the gradients in float32 and in double precision."""
        in_float = copy.deepcopy(self.model).float()
        media = tensors_in(self.media, torch.float32)
        gradients_in_float = plain_gradients(in_float, media)
        return relative_error(gradients_in_float, self.gradients)


@lru_cache(maxsize=1)
def _case(model_type: str, modality: str, settings: str, runs: int) -> _Case:
    """Runs of one model follow each other, so only the last one is kept. Settings are JSON, which can be a key."""
    return _Case(model_type, modality, json.loads(settings), runs)


def _weighted(model: HuggingFaceModel, batches: list[dict[str, Any]]) -> Gradients:
    """Returns the gradients of the mean over all tokens. Each batch has its own forward."""
    labels_of_batches = []
    for batch in batches:
        next_tokens = batch['labels'][:, 1:]
        labels_of_batches.append(int((next_tokens != -100).sum()))
    total_labels = sum(labels_of_batches)
    mean: Gradients = {}
    for batch, num_labels in zip(batches, labels_of_batches, strict=True):
        share = num_labels / total_labels
        for name, gradient in plain_gradients(model, batch).items():
            mean[name] = mean.get(name, 0) + share * gradient
    return mean


main = each_run(run)
