# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ranks that plan different batches. Returns the error of each rank, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from composer.optim import LinearScheduler
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from composer_tokacc import token_data_spec, weighted_microbatches
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, Reversed, collate_samples, regrouping_loader
from tests.support.text import text_model
from tests.support.training import (
    GradientRecorder,
    fit,
    hugging_face,
    reference_gradients,
    relative_error,
    state_of,
)

NUM_SAMPLES = 30
UNEVEN_SAMPLES = 9
"""Samples of a dataset that gives rank 0 one more than rank 1."""
GLOBAL_BATCH = 8


class UnseededDataset(LengthDataset):
    """Augments its texts with a generator that the seed of a run does not set."""

    generator = np.random.default_rng()

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        ids = self.generator.integers(3, 40, sample['input_ids'].shape)
        sample['input_ids'] = torch.from_numpy(ids)
        return sample


class DividedSamples(IterableDataset):
    """Gives each rank its part of the samples, and knows how many these are."""

    def __init__(self) -> None:
        self.samples = LengthDataset(UNEVEN_SAMPLES)
        self.indices = range(dist.get_global_rank(), UNEVEN_SAMPLES, dist.get_world_size())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self.indices:
            yield self.samples[index]

    def __len__(self) -> int:
        return len(self.indices)


def regrouping(dataset: Any = None, *, num_workers: int = 0, **options: Any) -> DataLoader:
    """Returns our loader with our sampler."""
    if dataset is None:
        dataset = LengthDataset(NUM_SAMPLES)
    options = {'global_batch_size': GLOBAL_BATCH, **options}
    if num_workers:
        options |= {'num_workers': num_workers, 'multiprocessing_context': 'forkserver'}
    return regrouping_loader(dataset, **options)


def plain(**options: Any) -> DataLoader:
    """Returns a stock DataLoader with our sampler."""
    sampler = regrouping(**options).batch_sampler
    return DataLoader(LengthDataset(NUM_SAMPLES), batch_sampler=sampler, collate_fn=collate_samples)


def stock(num_samples: int = NUM_SAMPLES, num_replicas: int | None = None, rank: int | None = None, **options: Any):
    """Returns a stock DataLoader with torch's sampler."""
    dataset = LengthDataset(num_samples)
    sampler = DistributedSampler(dataset, num_replicas, rank, **options)
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // 2, sampler=sampler, collate_fn=collate_samples)


def exchanging(seed: int = 0, max_tokens: int = 2 * LONGEST, **options: Any) -> DataLoader:
    """Returns our exchanging loader with torch's sampler."""
    dataset = LengthDataset(NUM_SAMPLES)
    return ExchangingDataLoader(
        dataset,
        batch_size=GLOBAL_BATCH // 2,
        collate_fn=collate_samples,
        max_tokens=max_tokens,
        sampler=DistributedSampler(dataset, seed=seed),
        **options,
    )


def exchanging_divided(batch_size: int, **options: Any) -> DataLoader:
    """Returns our exchanging loader. With batches of two samples, rank 0 has three batches, and rank 1 has two."""
    return ExchangingDataLoader(
        DividedSamples(), batch_size=batch_size, collate_fn=collate_samples, max_tokens=2 * LONGEST, **options
    )


def at_batch(batch: int) -> DataLoader:
    """Returns our loader, which begins with this batch."""
    loader: Any = regrouping()
    loader.batch_sampler.skip_to(batch)
    return loader


def reordered(rank: int, **options: Any) -> DataLoader:
    """Returns our loader. Only the first rank has the samples in their own order."""
    dataset = LengthDataset(NUM_SAMPLES)
    if rank:
        dataset = Reversed(dataset)
    return regrouping(dataset, **options)


UNLIKE: dict[str, Callable[[int], DataLoader]] = {
    'seed': lambda rank: regrouping(seed=rank),
    'seed, plain loader': lambda rank: plain(seed=rank),
    'seed, workers': lambda rank: regrouping(seed=rank, num_workers=2),
    'order': lambda rank: reordered(rank),
    'order of equal lengths': lambda rank: reordered(rank, lengths=[LONGEST] * NUM_SAMPLES),
    'order of equal lengths, workers': lambda rank: reordered(rank, lengths=[LONGEST] * NUM_SAMPLES, num_workers=2),
    'batch': lambda rank: at_batch(rank),
    'rank': lambda rank: regrouping(num_replicas=2, rank=0),
    'num_replicas': lambda rank: regrouping(num_replicas=1, rank=0),
    'seed of torch': lambda rank: stock(seed=rank),
    'samples of torch': lambda rank: stock(NUM_SAMPLES - 2 * rank),
    'rank of torch': lambda rank: stock(num_replicas=2, rank=0),
    'kind of loader': lambda rank: stock() if rank else regrouping(),
    'seed, exchanged': lambda rank: exchanging(seed=rank),
    'max_tokens, exchanged': lambda rank: exchanging(max_tokens=(1 + rank) * LONGEST),
}
ALIKE: dict[str, Callable[[int], DataLoader]] = {
    'regrouping': lambda rank: regrouping(),
    'workers': lambda rank: regrouping(num_workers=2),
    'plain loader': lambda rank: plain(),
    'order without a name': lambda rank: regrouping(lengths=[LONGEST] * NUM_SAMPLES),
    'random labels': lambda rank: regrouping(LengthDataset(NUM_SAMPLES, random_labels=True)),
    'numbers of its own': lambda rank: regrouping(UnseededDataset(NUM_SAMPLES)),
    'stock': lambda rank: stock(),
    'exchanging': lambda rank: exchanging(),
    'exchanging divided samples': lambda rank: exchanging_divided(3),
    # Rank 1 has only the two batches of the run, and rank 0 has three.
    'lengths, exchanged': lambda rank: exchanging_divided(2),
}


def run(build: Callable[[int], DataLoader], max_duration: str = '2ba', **options: Any) -> dict[str, Any]:
    """Trains the model. Returns the error of each rank, its number of steps, and whether its weights have moved."""
    recorder = GradientRecorder()
    model = hugging_face(text_model())
    before = parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = ''
    try:
        loader = build(dist.get_global_rank())
        data = token_data_spec(loader, slot_tokens=LONGEST)
        fit(model, data, recorder=recorder, optimizer=optimizer, max_duration=max_duration, **options)
    except RuntimeError as error:
        message = str(error)
    has_moved = not torch.equal(before, parameters(model))
    return {
        'message': dist.all_gather_object(message),
        'steps': dist.all_gather_object(len(recorder.losses)),
        'moved': dist.all_gather_object(has_moved),
    }


def errors_of_schedule() -> dict[str, Any]:
    """Trains an epoch in which the learning rate falls. Rank 0 has five batches, and rank 1 has four."""
    recorder = GradientRecorder()
    model = text_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DividedSamples(), batch_size=1, collate_fn=collate_samples)
    message = ''
    try:
        fit(
            model,
            token_data_spec(loader, slot_tokens=LONGEST),
            recorder=recorder,
            optimizer=optimizer,
            schedulers=LinearScheduler(alpha_f=0.0),
            max_duration='1ep',
        )
    except RuntimeError as error:
        message = str(error)
    digests = dist.all_gather_object(state_of(model)['parameters'])
    return {
        'message': dist.all_gather_object(message),
        'steps': dist.all_gather_object(len(recorder.losses)),
        'are_equal': digests[0] == digests[1],
    }


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """Returns a copy of all weights in one row."""
    flat_parameters = [parameter.detach().flatten() for parameter in model.parameters()]
    return torch.cat(flat_parameters)


def errors_of_plain_loop(seed: int) -> list[str]:
    """Returns the error of each rank in a loop without a Trainer."""
    message = ''
    try:
        for batch in regrouping(seed=seed):
            list(weighted_microbatches(batch))
    except RuntimeError as error:
        message = str(error)
    return dist.all_gather_object(message)


def errors_of_other_epoch() -> list[str]:
    """Returns for each rank the epoch of its error and the error, if only one rank skips an epoch."""
    loader: Any = regrouping()
    message = ''
    try:
        for epoch in range(3):
            skipped = dist.get_global_rank() if epoch == 1 else 0
            loader.set_epoch(epoch + skipped)
            for batch in loader:
                list(weighted_microbatches(batch))
    except RuntimeError as error:
        message = str(error)
    return dist.all_gather_object(f'{epoch}: {message}')


def errors_of_gradients() -> list[float]:
    """Compares each step of ranks with the same plan with one forward over its global batch."""
    loader: Any = regrouping()
    windows = [loader.batch_sampler.window(batch) for batch in range(len(loader))]
    model = text_model()
    recorder = fit(model, token_data_spec(loader, slot_tokens=LONGEST), max_duration='1ep')
    errors = []
    dataset = LengthDataset(NUM_SAMPLES)
    for window, gradients in zip(windows, recorder.steps, strict=True):
        samples = [dataset[index] for index in window]
        expected, _ = reference_gradients(model, collate_samples(samples))
        errors.append(relative_error(gradients, expected))
    return errors


def main() -> dict[str, Any]:
    return {
        'unlike': {name: run(build) for name, build in UNLIKE.items()},
        'alike': {name: run(build) for name, build in ALIKE.items()},
        'unequal ends': run(lambda rank: exchanging_divided(2), '1ep'),
        # Rank 0 has one batch of five samples, and rank 1 has none.
        'no batch': run(lambda rank: exchanging_divided(5, drop_last=True)),
        'equal ends': run(lambda rank: exchanging_divided(2), '2ep', train_subset_num_batches=1),
        'own loop, lengths': len(list(exchanging_divided(2))),
        'own loop': errors_of_plain_loop(seed=dist.get_global_rank()),
        'own loop, alike': errors_of_plain_loop(seed=0),
        'later': errors_of_other_epoch(),
        'exact': errors_of_gradients(),
        'schedule': errors_of_schedule(),
    }
