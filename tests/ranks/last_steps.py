# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: two epochs that no number of ranks divides. Returns errors and counts.

The gradient of the last step is compared with one forward over the samples that a run on one rank trains in it.
"""

from __future__ import annotations

from typing import Any

from composer.core import DataSpec, Event, State
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler

from composer_tokacc import token_data_spec
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import TOTAL, On, fit, reference_gradients, relative_error

SEED = 3
CASES = {'seven': (7, 4), 'one is left': (9, 4), 'many': (35, 16)}
"""Number of samples, and of those in a global batch. With one left, one of two ranks has no sample in the last step."""


def counted_samples(state: State) -> int:
    return int(state.timestamp.sample)


def regrouping(dataset: LengthDataset, global_batch: int, objective: Any) -> DataLoader:
    return regrouping_loader(dataset, global_batch_size=global_batch, seed=SEED, objective=objective)


def exchanging(dataset: LengthDataset, global_batch: int, objective: Any) -> DataLoader:
    return ExchangingDataLoader(
        dataset,
        batch_size=global_batch // dist.get_world_size(),
        collate_fn=collate_samples,
        max_tokens=2 * LONGEST,
        sampler=dist.get_sampler(dataset, shuffle=True, seed=SEED),
        objective=objective,
    )


def plain(dataset: LengthDataset, global_batch: int) -> DataLoader:
    """Returns a loader that repeats samples of other ranks in the last step."""
    return DataLoader(
        dataset,
        batch_size=global_batch // dist.get_world_size(),
        collate_fn=collate_samples,
        sampler=dist.get_sampler(dataset, shuffle=True, seed=SEED),
    )


def global_batches(dataset: LengthDataset, global_batch: int) -> list[list[int]]:
    """Returns the samples of each step of two epochs, in the order in which a run on one rank reads them."""
    batches = []
    sampler = DistributedSampler(dataset, 1, 0, seed=SEED)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, len(order), global_batch):
            batches.append(order[start : start + global_batch])
    return batches


def run(data: DataLoader | DataSpec, dataset: LengthDataset, global_batch: int) -> dict[str, Any]:
    """Trains two epochs. Returns the errors of the steps with fewer samples, and Composer's counts of samples."""
    after_batches = On(Event.BATCH_END, counted_samples)
    after_epochs = On(Event.EPOCH_END, counted_samples)
    options = {'callbacks': [after_batches, after_epochs], 'loss_tokens': 'causal', 'check_loss': False}
    model = text_model()
    recorder = fit(model, data, max_duration='2ep', **options)
    if dist.get_global_rank() != 0:
        return {}
    errors = []
    loss_errors = []
    samples_of_steps = global_batches(dataset, global_batch)
    for samples, gradients, loss in zip(samples_of_steps, recorder.steps, recorder.logged(TOTAL), strict=True):
        if len(samples) < global_batch:
            batch = collate_samples([dataset[index] for index in samples])
            reference, true_loss = reference_gradients(model, batch)
            errors.append(relative_error(gradients, reference))
            loss_errors.append(abs(loss - true_loss) / true_loss)
    return {
        'errors': errors,
        'loss_errors': loss_errors,
        'epochs': after_epochs.values,
        'batches': after_batches.values,
    }


def main() -> dict[str, Any]:
    results = {}
    for name, (num_samples, global_batch) in CASES.items():
        dataset = LengthDataset(num_samples)
        for build in (regrouping, exchanging):
            for objective in ('ddp', 'fsdp'):
                loader = build(dataset, global_batch, objective)
                data = token_data_spec(loader, slot_tokens=LONGEST)
                results[f'{name}, {build.__name__}, {objective}'] = run(data, dataset, global_batch)
        # Without token_data_spec Composer splits the batches, and counts their samples.
        results[f'{name}, plain'] = run(plain(dataset, global_batch), dataset, global_batch)
    return results
