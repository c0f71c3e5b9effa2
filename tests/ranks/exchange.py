# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: the exchanging loader. Returns the rows of each rank in each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import IterableDataset

from composer_tokacc import token_data_spec
from composer_tokacc.row_counts import num_samples
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import text_model
from tests.support.training import TOTAL, fit, reference_gradients, relative_error

BATCH = 3
EPOCH = 31
SAMPLES = LengthDataset(200)
# How many samples each rank reads. Some ranks have none left before others, and the last step has fewer samples than
# ranks.
READ = {2: (7, 4), 4: (10, 3, 7, 0)}


class SamplesOfRank(IterableDataset):
    """Each rank reads a part of the samples."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        counts = READ[dist.get_world_size()]
        rank = dist.get_global_rank()
        first = sum(counts[:rank])
        for index in range(first, first + counts[rank]):
            yield SAMPLES[index]


def rows_of_steps(loader: ExchangingDataLoader) -> list[list[dict[str, Any]]]:
    """Returns for each step, and each rank, the names of its rows and the number of its samples.

    ``'whole'`` tells whether the rows have the tokens of the samples with these names.
    """
    steps = []
    for batch in loader:
        names = [int(name) for name in batch['sample_ids']]
        has_tokens = True
        for row, name in enumerate(names):
            ids = SAMPLES[name]['input_ids'][0]
            has_tokens &= torch.equal(batch['input_ids'][row, : len(ids)], ids)
        rows = {'names': names, 'whole': has_tokens, 'num_samples': num_samples(batch)}
        steps.append(dist.all_gather_object(rows))
    return steps


def build(dataset: Any, **options: Any) -> ExchangingDataLoader:
    return ExchangingDataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=collate_samples,
        max_tokens=2 * LONGEST,
        **options,
    )


def epochs_of_sampler(**options: Any) -> list[dict[str, Any]]:
    """Returns the samples that ranks read and computed in two epochs, with a DistributedSampler."""
    dataset = LengthDataset(EPOCH)
    sampler = dist.get_sampler(dataset, shuffle=True, seed=3)
    loader = build(dataset, sampler=sampler, **options)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        batches = [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]
        batches_of_ranks = dist.all_gather_object(batches)
        # The samples that the sampler repeats for the last ranks are read, but neither exchanged nor computed.
        earlier_samples: set[int] = set()
        new_samples_of_steps = []
        for batches_of_step in zip(*batches_of_ranks, strict=True):
            samples_of_step = set(chain.from_iterable(batches_of_step))
            new_samples_of_steps.append(sorted(samples_of_step - earlier_samples))
            earlier_samples |= samples_of_step
        epochs.append({'read': new_samples_of_steps, 'steps': rows_of_steps(loader), 'length': len(loader)})
    return epochs


def first_names_amid_training() -> list[list[int]]:
    """Reads the first batch before a collective of the training on rank 0, and during it on the others.

    So it may be with a thread that reads ahead.
    """
    loader = build(SamplesOfRank())
    dist.barrier()
    value = torch.ones(1)
    if dist.get_global_rank() == 0:
        batch = next(iter(loader))
        work = torch.distributed.all_reduce(value, async_op=True)
    else:
        work = torch.distributed.all_reduce(value, async_op=True)
        batch = next(iter(loader))
    assert work is not None
    work.wait()
    assert int(value) == dist.get_world_size()
    names = [int(name) for name in batch['sample_ids']]
    return dist.all_gather_object(names)


def measure_steps(objective: str) -> list[dict[str, float]]:
    """Compares each step with one forward over the samples of all ranks. Returns the errors on rank 0."""
    steps = rows_of_steps(build(SamplesOfRank(), objective=objective))
    most_samples = max(READ[dist.get_world_size()])
    assert len(steps) == math.ceil(most_samples / BATCH)
    model = text_model()
    data = token_data_spec(build(SamplesOfRank(), objective=objective), slot_tokens=LONGEST)
    recorder = fit(model, data, max_duration=f'{len(steps)}ba', loss_tokens='causal', check_loss=False)
    if dist.get_global_rank() != 0:
        return []
    results = []
    for rows_of_ranks, gradients, loss in zip(steps, recorder.steps, recorder.logged(TOTAL), strict=True):
        names: list[int] = []
        for rows in rows_of_ranks:
            if rows['num_samples']:  # not a rank with only a copy
                names += rows['names']
        batch = collate_samples([SAMPLES[name] for name in sorted(names)])
        expected, expected_loss = reference_gradients(model, batch)
        error = relative_error(gradients, expected)
        loss_error = abs(loss / expected_loss - 1)
        results.append({'error': error, 'loss_error': loss_error, 'num_samples': len(names)})
    num_trained = int(recorder.trainer.state.timestamp.sample)
    assert num_trained == sum(result['num_samples'] for result in results)
    return results


def main() -> dict[str, Any]:
    results: dict[str, Any] = {
        'uneven': rows_of_steps(build(SamplesOfRank())),
        'sampler': epochs_of_sampler(),
        'ddp': measure_steps('ddp'),
        'fsdp': measure_steps('fsdp'),
    }
    if dist.get_world_size() == 2:
        # Not forked, because a child of a process with gloo's threads may wait forever for a lock of one of them.
        results['workers'] = epochs_of_sampler(num_workers=2, multiprocessing_context='forkserver')
        results['drop_last'] = epochs_of_sampler(drop_last=True)
        results['amid training'] = first_names_amid_training()
    return results
