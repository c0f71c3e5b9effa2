# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: global batches by tokens, or with a schedule. Returns the samples of each step.

The gradient of each step is compared with one forward over its samples. Arguments: a JSON list of runs (the keyword
arguments of :func:`run`).
"""

from __future__ import annotations

import functools
from typing import Any

from composer.core import Callback, Event
from composer.utils import dist

from composer_tokacc import RegroupingBatchSampler, token_data_spec
from composer_tokacc.sampling import SkipReadBatches
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import Gradients, On, each_run, fit, reference_gradients, relative_error, saving

NUM_SAMPLES = 44
SEED = 3


class WindowRecorder(Callback):
    """Records the samples of every step over all ranks."""

    def __init__(self, sampler: RegroupingBatchSampler) -> None:
        self.sampler = sampler
        self.samples_of_rank: list[int] = []
        self.windows: dict[int, list[int]] = {}

    def batch_start(self, state: Any, logger: Any) -> None:
        self.samples_of_rank = []
        if not self.sampler.has_only_copies(int(state.timestamp.batch_in_epoch)):
            self.samples_of_rank = [int(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        samples: list[int] = []
        for samples_of_rank in dist.all_gather_object(self.samples_of_rank):
            samples += samples_of_rank
        self.windows[int(state.timestamp.batch) - 1] = sorted(samples)


@functools.cache
def expected_gradients(samples: tuple[int, ...]) -> Gradients:
    """Returns the gradients of one forward. The weights never move, so they are the same in every run."""
    dataset = LengthDataset(NUM_SAMPLES)
    batch = collate_samples([dataset[index] for index in samples])
    gradients, _ = reference_gradients(text_model(), batch)
    return gradients


def run(
    *,
    windows: dict[str, Any],
    duration: str,
    folder: str | None = None,
    load_path: str | None = None,
) -> dict[str, Any]:
    """Runs a Trainer at learning rate 0. `windows` are arguments of the sampler."""
    dataset = LengthDataset(NUM_SAMPLES)
    loader = regrouping_loader(dataset, seed=SEED, **windows)
    recorder_of_windows = WindowRecorder(loader.batch_sampler)
    ends_of_epochs = On(Event.EPOCH_END, lambda state: int(state.timestamp.batch))
    recorder = fit(
        text_model(),
        token_data_spec(loader, slot_tokens=LONGEST),
        callbacks=[recorder_of_windows, ends_of_epochs, SkipReadBatches()],
        max_duration=duration,
        loss_tokens='causal',
        check_loss=False,
        load_path=load_path,
        **saving(folder),
    )
    errors = []
    if dist.get_global_rank() == 0:
        for samples, gradients in zip(recorder_of_windows.windows.values(), recorder.steps, strict=True):
            errors.append(relative_error(gradients, expected_gradients(tuple(samples))))
    return {
        'windows': {str(step): samples for step, samples in recorder_of_windows.windows.items()},
        'errors': errors,
        'ends_of_epochs': ends_of_epochs.values,
        'tokens': int(recorder.trainer.state.timestamp.token),
    }


main = each_run(run)
