# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: several runs with the regrouping loader, one after the other. Returns what each saw.

Arguments: a JSON list of runs (the keyword arguments of :func:`run`).
"""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Callback
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_tokacc import token_data_spec
from composer_tokacc.sampling import SkipReadBatches
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import each_run, fit, hugging_face, saving, state_of

SEED = 3
NUM_SAMPLES = 44
GLOBAL_BATCH = 8
"""Six steps an epoch, the last one of four samples."""


class SeeSteps(Callback):
    """Records the samples of every step over all ranks, and a hash of the parameters after it."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self.samples_of_rank: list[int] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.samples_of_rank = [int(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        samples = []
        for samples_of_rank in dist.all_gather_object(self.samples_of_rank):
            samples += samples_of_rank
        step = int(state.timestamp.batch) - 1
        self.steps[str(step)] = {'samples': sorted(samples), **state_of(state.model)}


def run(
    *,
    folder: str | None = None,
    load_path: str | None = None,
    durations: list[str],
    num_workers: int = 0,
    stock: bool = False,
    skip: bool = True,
    random: bool = True,
) -> dict[str, Any]:
    """Runs one Trainer. Returns its steps, and how many samples all ranks have read.

    Args:
        folder: Where checkpoints are saved.
        load_path: Checkpoint to resume from.
        durations: The duration of the run, then those of further calls of ``fit``.
        num_workers: Workers of the loader.
        stock: Whether the loader is a stock one, not the regrouping loader.
        skip: Whether a resumed run skips the batches before its checkpoint. If not, it reads them again.
        random: Whether the number of labels is random, and the model has dropout.
    """
    first_duration, *further_durations = durations
    dataset = LengthDataset(NUM_SAMPLES, random_labels=random)
    if stock:
        loader = stock_loader(dataset, num_workers)
    else:
        loader = regrouping_loader(dataset, num_workers=num_workers, global_batch_size=GLOBAL_BATCH, seed=SEED)
    # Dropout makes the parameters depend on the state of the random number generators.
    dropout = 0.2 if random else 0.0
    model = hugging_face(text_model(attention_dropout=dropout))
    see_steps = SeeSteps()
    callbacks: list[Any] = [see_steps]
    if skip:
        callbacks.append(SkipReadBatches())

    recorder = fit(
        model,
        token_data_spec(loader, slot_tokens=LONGEST),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        callbacks=callbacks,
        load_path=load_path,
        seed=5,
        max_duration=first_duration,
        **saving(folder),
    )
    for duration in further_durations:
        recorder.trainer.fit(duration=duration)
    dist.barrier()
    recorder.trainer.close()

    num_read = 0
    for samples_of_rank in dist.all_gather_object(dataset.read):
        num_read += len(samples_of_rank)
    return {'steps': see_steps.steps, 'reads': num_read}


def stock_loader(dataset: LengthDataset, num_workers: int) -> DataLoader:
    sampler = dist.get_sampler(dataset, shuffle=True, seed=SEED)
    size = GLOBAL_BATCH // dist.get_world_size()
    return DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=collate_samples, num_workers=num_workers)


main = each_run(run)
