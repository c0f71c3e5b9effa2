# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: what each rank gets from the exchanging loader, step by step; it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import IterableDataset

from composer_tokacc import token_data_spec
from composer_tokacc.data import BadSampleError
from composer_tokacc.row_counts import num_samples
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import text_model
from tests.support.training import TOTAL, fit, reference_gradients, relative_error

BATCH, EPOCH = 3, 31
SAMPLES = LengthDataset(200)
# How many samples each rank reads: some run out before others, and the last step has fewer samples than ranks.
READ = {2: (7, 4), 4: (10, 3, 7, 0)}


class Shares(IterableDataset):
    """Rank ``r`` reads its own stretch of the samples, and breaks at one of them if told to."""

    def __init__(self, breaks_at: int | None = None, error: type[Exception] = BadSampleError) -> None:
        self.breaks_at = breaks_at
        self.error = error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        counts = READ[dist.get_world_size()]
        first = sum(counts[: dist.get_global_rank()])
        for index in range(first, first + counts[dist.get_global_rank()]):
            if index == self.breaks_at:
                raise self.error(f'sample "{index}" is broken')
            yield SAMPLES[index]


def steps(loader: ExchangingDataLoader) -> list[list[dict[str, Any]]]:
    """For each step, for each rank: names of the rows, whether they hold the samples of these names, how many count."""
    found = []
    for batch in loader:
        whole = True
        for row, name in enumerate(batch['sample_ids']):
            ids = SAMPLES[int(name)]['input_ids'][0]
            whole &= torch.equal(batch['input_ids'][row, : len(ids)], ids)
        names = list(map(int, batch['sample_ids']))
        found.append(dist.all_gather_object({'names': names, 'whole': whole, 'num_samples': num_samples(batch)}))
    return found


def build(dataset: Any, **kwargs: Any) -> ExchangingDataLoader:
    return ExchangingDataLoader(
        dataset, **{'batch_size': BATCH, 'collate_fn': collate_samples, 'max_tokens': 2 * LONGEST, **kwargs}
    )


def by_sampler(**kwargs: Any) -> list[Any]:
    """A map-style dataset, whose sampler says who reads what; two epochs."""
    dataset = LengthDataset(EPOCH)
    sampler = dist.get_sampler(dataset, shuffle=True, seed=3)
    loader = build(dataset, sampler=sampler, **kwargs)
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine = list(iter(sampler))
        chunks = dist.all_gather_object([mine[k : k + BATCH] for k in range(0, len(mine), BATCH)])
        # What torch repeats at the end to fill up the ranks is read, but neither exchanged nor computed.
        seen: set[int] = set()
        read = []
        for step in zip(*chunks, strict=True):
            read.append(sorted(set(chain.from_iterable(step)) - seen))
            seen.update(read[-1])
        found.append({'read': read, 'steps': steps(loader), 'length': len(loader)})
    return found


def broken(error: type[Exception]) -> list[str]:
    """What each rank raises when the first sample of the second step of rank 0 is broken."""
    try:
        steps(build(Shares(BATCH, error)))
    except Exception as raised:
        return dist.all_gather_object(f'{type(raised).__name__}: {raised}')
    raise AssertionError('nothing was raised')


def gradients(objective: str) -> list[dict[str, float]]:
    """Every step of the uneven shares against one forward over the samples of all ranks, the weights standing still."""
    expected = steps(build(Shares(), objective=objective))
    assert len(expected) == -(-max(READ[dist.get_world_size()]) // BATCH)
    model = text_model()
    data = token_data_spec(build(Shares(), objective=objective), slot_tokens=LONGEST)
    recorder = fit(model, data, max_duration=f'{len(expected)}ba')
    found = []
    if dist.get_global_rank():
        return found
    for step, gradients_of_step, loss in zip(expected, recorder.steps, recorder.logged(TOTAL), strict=True):
        names = [name for rank in step if rank['num_samples'] for name in rank['names']]
        reference, true_loss = reference_gradients(model, collate_samples([SAMPLES[name] for name in sorted(names)]))
        found.append(
            {
                'error': relative_error(gradients_of_step, reference),
                'loss_error': abs(loss - true_loss) / true_loss,
                'num_samples': len(names),
            }
        )
    assert int(recorder.trainer.state.timestamp.sample) == sum(one['num_samples'] for one in found)
    return found


def main() -> dict[str, Any]:
    return {
        'uneven': steps(build(Shares())),
        'sampler': by_sampler(),
        # Not forked: a child of a process with gloo's threads may wait forever for a lock that one of them held.
        'workers': by_sampler(num_workers=2, multiprocessing_context='forkserver'),
        'drop_last': by_sampler(drop_last=True),
        'bad sample': broken(BadSampleError),
        'other error': broken(OSError),
        'ddp': gradients('ddp'),
        'fsdp': gradients('fsdp'),
    }
