# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs whose global batches are cut by tokens or by a schedule; what each trained.

Each step's gradient is held to one forward over its samples. Arguments: a JSON list of runs (the keyword arguments of
:func:`run`).
"""

from __future__ import annotations

from typing import Any

from composer.core import Callback
from composer.utils import dist

from composer_tokacc import RegroupingBatchSampler, token_data_spec
from composer_tokacc.sampling import SkipReadBatches
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import each_run, fit, reference_gradients, relative_error, saving

NUM_SAMPLES, SEED = 44, 3


class SeeWindows(Callback):
    """The samples of every step over all ranks, and how many batches were trained when each epoch ended."""

    def __init__(self, sampler: RegroupingBatchSampler) -> None:
        self.sampler = sampler
        self.mine: list[int] = []
        self.windows: dict[int, list[int]] = {}
        self.ends_of_epochs: list[int] = []
        self.tokens = 0

    def batch_start(self, state: Any, logger: Any) -> None:
        self.mine = []
        if not self.sampler.has_only_copies(int(state.timestamp.batch_in_epoch)):
            self.mine = [int(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        samples: list[int] = []
        for samples_of_rank in dist.all_gather_object(self.mine):
            samples += samples_of_rank
        self.windows[int(state.timestamp.batch) - 1] = sorted(samples)
        self.tokens = int(state.timestamp.token)

    def epoch_end(self, state: Any, logger: Any) -> None:
        self.ends_of_epochs.append(int(state.timestamp.batch))


def run(
    *,
    windows: dict[str, Any],
    duration: str,
    folder: str | None = None,
    load_path: str | None = None,
) -> dict[str, Any]:
    """One Trainer, with the weights standing still; `windows` are arguments of the sampler."""
    dataset, model = LengthDataset(NUM_SAMPLES), text_model()
    loader = regrouping_loader(dataset, seed=SEED, **windows)
    seen = SeeWindows(loader.batch_sampler)
    recorder = fit(
        model,
        token_data_spec(loader, slot_tokens=LONGEST),
        callbacks=[seen, SkipReadBatches()],
        max_duration=duration,
        load_path=load_path,
        **saving(folder),
    )
    errors = []
    if dist.get_global_rank() == 0:
        for samples, gradients in zip(seen.windows.values(), recorder.steps, strict=True):
            reference, _ = reference_gradients(model, collate_samples([dataset[index] for index in samples]))
            errors.append(relative_error(gradients, reference))
    return {
        'windows': {str(step): samples for step, samples in seen.windows.items()},
        'errors': errors,
        'ends_of_epochs': seen.ends_of_epochs,
        'tokens': seen.tokens,
    }


main = each_run(run)
