# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: two epochs that no number of ranks divides; errors and counts.

Each step's gradient is held to one forward over the samples that a run on one rank trains in it.
"""

from __future__ import annotations

from typing import Any

from composer.core import Callback
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler

from composer_tokacc import token_data_spec
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import fit, reference_gradients, relative_error

SEED = 3
CASES = {'seven': (7, 4), 'one is left': (9, 4), 'many': (151, 16)}
"""Samples, and samples of a global batch. On two ranks the last step of the second leaves a rank without a sample."""


class CountSamples(Callback):
    """Samples that Composer has counted at the end of each epoch, and after each batch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.batches: list[int] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.batches.append(int(state.timestamp.sample))

    def epoch_end(self, state: Any, logger: Any) -> None:
        self.epochs.append(int(state.timestamp.sample))


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


def run(loader: DataLoader, dataset: LengthDataset, global_batch: int) -> dict[str, Any]:
    """Two epochs with the weights standing still."""
    counted, model = CountSamples(), text_model()
    recorder = fit(model, token_data_spec(loader, slot_tokens=LONGEST), callbacks=[counted], max_duration='2ep')
    expected: list[list[int]] = []
    for epoch in range(2):
        alone = DistributedSampler(dataset, 1, 0, seed=SEED)
        alone.set_epoch(epoch)
        order = list(alone)
        expected += [order[start : start + global_batch] for start in range(0, len(order), global_batch)]
    losses, errors, loss_errors = recorder.logged('loss/train/total'), [], []
    if dist.get_global_rank():
        return {}
    for samples, gradients, loss in zip(expected, recorder.steps, losses, strict=True):
        if len(samples) < global_batch:
            reference, true_loss = reference_gradients(model, collate_samples([dataset[index] for index in samples]))
            errors.append(relative_error(gradients, reference))
            loss_errors.append(abs(loss - true_loss) / true_loss)
    return {
        'errors': errors,
        'loss_errors': loss_errors,
        'epochs': counted.epochs,
        'batches': counted.batches,
    }


def main() -> dict[str, Any]:
    found = {}
    for name, (num_samples, global_batch) in CASES.items():
        dataset = LengthDataset(num_samples)
        for build in (regrouping, exchanging):
            for objective in ('ddp', 'fsdp'):
                loader = build(dataset, global_batch, objective)
                found[f'{name}, {build.__name__}, {objective}'] = run(loader, dataset, global_batch)
    return found
