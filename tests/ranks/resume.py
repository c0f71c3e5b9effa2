# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: runs one after the other with the regrouping loader; what each of them saw.

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

NUM_SAMPLES, GLOBAL_BATCH, SEED = 44, 8, 3
"""Six steps an epoch, the last one of four samples."""


class SeeSteps(Callback):
    """The samples of every step over all ranks, and a hash of the parameters after it."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self.mine: list[int] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.mine = [int(name) for name in state.batch['sample_ids']]

    def batch_end(self, state: Any, logger: Any) -> None:
        shares = dist.all_gather_object(self.mine)
        samples = sorted(index for share in shares for index in share)
        self.steps[str(int(state.timestamp.batch) - 1)] = {'samples': samples, **state_of(state.model)}


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
    """One Trainer; `durations` after the first are those of further calls of ``fit``."""
    dataset = LengthDataset(NUM_SAMPLES, random_labels=random)
    if stock:
        loader = stock_loader(dataset, num_workers)
    else:
        loader = regrouping_loader(dataset, num_workers=num_workers, global_batch_size=GLOBAL_BATCH, seed=SEED)
    # Dropout makes the parameters depend on the state of the random number generators.
    model = hugging_face(text_model(attention_dropout=0.2 if random else 0.0))
    steps = SeeSteps()
    callbacks: list[Any] = [steps]
    if skip:
        callbacks.append(SkipReadBatches())
    options = {'callbacks': callbacks, 'load_path': load_path, 'seed': 5, 'max_duration': durations[0]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = token_data_spec(loader, slot_tokens=LONGEST)
    trainer = fit(model, data, optimizer=optimizer, **options, **saving(folder)).trainer
    for duration in durations[1:]:
        trainer.fit(duration=duration)
    dist.barrier()
    trainer.close()
    return {'steps': steps.steps, 'reads': sum(len(read) for read in dist.all_gather_object(dataset.read))}


def stock_loader(dataset: LengthDataset, num_workers: int) -> DataLoader:
    sampler = dist.get_sampler(dataset, shuffle=True, seed=SEED)
    size = GLOBAL_BATCH // dist.get_world_size()
    return DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=collate_samples, num_workers=num_workers)


main = each_run(run)
