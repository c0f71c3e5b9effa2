# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: types whose layout is found, with steps of text alone and media on one rank only.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`), result file. Gradients of every step are held to
each rank's batch by itself, weighed by its loss-generating tokens.
"""

from __future__ import annotations

import copy
import os

os.environ['FSDP_VERSION'] = '2'

from composer.models import HuggingFaceModel
from composer.utils import dist

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.matrix.harness import plain_gradients, quiet
from tests.model_types.trial import maker_of
from tests.ranks.fsdp_matrix import sharded
from tests.support.fsdp import repair_average
from tests.support.training import loader, relative_error, train, write_runs


def run(*, model_type: str, modality: str, steps: str, fsdp: bool = False, size: int = 2) -> list[float]:
    """One Trainer.

    Args:
        model_type: Of ``tests.model_types``.
        modality: Of the media.
        steps: A letter a step: ``'t'`` text only, ``'m'`` with media on the first rank alone.
        fsdp: Whether the model is sharded.
        size: Microbatch size.
    """
    maker = maker_of(model_type)
    media, text = maker.batch(modality), maker.batch(modality, has_media=False)
    model = HuggingFaceModel(maker.model, shift_labels=True)
    expected = {kind: _weighted(model, [media if kind == 'm' else text, text]) for kind in set(steps)}
    own = [media if kind == 'm' and not dist.get_global_rank() else text for kind in steps]
    if fsdp:
        repair_average()
    options = {'parallelism_config': {'fsdp': {'state_dict_type': 'full'}}} if fsdp else {}
    with quiet():
        recorder, _, trainer = train(
            sharded(maker.model) if fsdp else copy.deepcopy(model), token_data_spec(loader(*own)),
            algorithms=[TokenAccumulation()], microbatch_size=size, max_duration=f'{len(steps)}ba', **options,
        )  # fmt: skip
    trainer.close()
    return [relative_error(found, expected[kind]) for found, kind in zip(recorder.steps, steps, strict=True)]


def _weighted(model, batches):
    """The gradients of the mean over all tokens, of batches whose rows know nothing of each other."""
    counts = [int((batch['labels'][:, 1:] != -100).sum()) for batch in batches]
    total: dict = {}
    for batch, count in zip(batches, counts, strict=True):
        for name, gradient in plain_gradients(model, batch).items():
            total[name] = total.get(name, 0) + gradient * (count / sum(counts))
    return total


if __name__ == '__main__':
    write_runs(run)
