# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader for RegroupingBatchSampler: carries the planned cut, and resumes without reading what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch.utils.data import DataLoader, Dataset, default_collate

from composer_tokacc.data_spec.added_rows import zero_weight
from composer_tokacc.data_spec.replay import MICROBATCH_IDS
from composer_tokacc.sampler import PlannedBatch, RegroupingBatchSampler

__all__ = ['RegroupingDataLoader', 'SkipReadBatches', 'SkippedBatch']


class SkippedBatch:
    """Stands for a batch that was trained on before the run was interrupted; nothing was read for it."""


class RegroupingDataLoader(DataLoader):
    """A DataLoader over a :class:`RegroupingBatchSampler` that Composer takes for one of fixed batch size.

    - ``batch_size`` is ``global_batch_size / num_replicas``, so that Composer finds its initial microbatch size.
    - Batches carry the plan (``microbatch_ids``), which the split of ``token_data_spec`` replays.
    - Where a global batch has fewer samples than ranks, ranks without one get a zero-weight row, which is no sample.
    - Seeds of workers depend on seed and epoch alone, and iterating consumes no global random numbers.
    - Batches that will be thrown away are not read, see :meth:`skip_to`.

    Args:
        dataset: The sampler's map-style dataset.
        batch_sampler: The sampler.
        collate_fn: As for any DataLoader; should return a mapping.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        ValueError: If an argument is given that the sampler decides.
    """

    marks_added_rows = True
    """Rows that only fill up the ranks weigh nothing here: :func:`.filler_rows` finds none."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_sampler: RegroupingBatchSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(batch_sampler, RegroupingBatchSampler):
            raise ValueError(
                f'`batch_sampler` must be a RegroupingBatchSampler, got: {type(batch_sampler).__name__}. Use a plain '
                'DataLoader for others.'
            )
        for name in ('batch_size', 'shuffle', 'sampler', 'drop_last'):
            if name in kwargs:
                raise ValueError(f'`{name}` must be left to the batch sampler, got: {kwargs[name]}. Drop it.')
        self._generator = torch.Generator()
        kwargs.setdefault('generator', self._generator)
        super().__init__(
            _PlannedDataset(dataset),
            batch_sampler=batch_sampler,
            collate_fn=_PlannedCollate(collate_fn or default_collate),
            **kwargs,
        )
        self._resume_at = (0, 0)
        self._yielded = (0, 0)

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of a rank and step, on average."""
        return self._sampler.global_batch_size // self._sampler.num_replicas

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """DataLoader itself sets None, as it does with any batch sampler."""

    @property
    def _sampler(self) -> RegroupingBatchSampler:
        assert isinstance(self.batch_sampler, RegroupingBatchSampler), 'checked in __init__; torch forbids a change'
        return self.batch_sampler

    def skip_to(self, epoch: int, batch: int) -> None:
        """Yields what comes before batch `batch` of epoch `epoch` as :class:`SkippedBatch`, once."""
        self._resume_at = (epoch, batch)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the sampler's epoch."""
        sampler, (resume_epoch, resume_batch) = self._sampler, self._resume_at
        epoch, num_skipped = sampler.epoch, 0
        if epoch < resume_epoch:
            num_skipped = len(self)
        elif epoch == resume_epoch:
            num_skipped = min(resume_batch, len(self))
            self._resume_at = (0, 0)
        if num_skipped:
            sampler.skip_to(num_skipped)
        for _ in range(num_skipped):
            yield SkippedBatch()
        if num_skipped == len(self):
            return
        first = sampler.first_batch
        self._generator.manual_seed(_seed_of(sampler, first))
        for batch in super().__iter__():
            first += 1
            self._yielded = (epoch, first)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler after the batch that was yielded last, whatever workers have fetched ahead."""
        epoch, batch = self._yielded
        state = self._sampler.state_dict()
        return {**state, 'batch': batch if epoch == state['epoch'] else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration starts where :meth:`state_dict` was taken. Composer needs `SkipReadBatches` instead."""
        self._sampler.load_state_dict(state)
        self._yielded = (state['epoch'], state['batch'])


class SkipReadBatches(Callback):
    """Resumes mid-epoch without reading what was trained on before.

    Composer resumes by iterating the loader from the start of the epoch, discarding batches, and restoring the random
    number generators at the last of them. That stays as it is, and so does everything in the checkpoint; only
    the discarded batches are not read. Without this callback, or with another loader, all of them are, with the same
    result. Not with ``Trainer(spin_dataloaders=False)``, where Composer discards none.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Tells the loader what will be discarded."""
        loader = state.train_dataloader
        if isinstance(loader, RegroupingDataLoader):
            loader.skip_to(int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch))


class _PlannedSamples(list[Any]):
    """Samples read for a :class:`PlannedBatch`, with what it says of them."""

    planned: PlannedBatch | None = None


class _PlannedDataset(Dataset):
    """Hands the plan of a batch on from its indices to its samples, which is all that collating sees.

    It offers no ``state_dict``: Composer would stop discarding batches on resume, and not restore random numbers.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> _PlannedSamples:
        read = getattr(self.dataset, '__getitems__', None)
        samples = _PlannedSamples(read(indices) if read is not None else [self.dataset[index] for index in indices])
        if isinstance(indices, PlannedBatch):
            samples.planned = indices
        return samples


class _PlannedCollate:
    """Writes the plan into what the user's `collate_fn` makes of the samples."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate_fn(list(samples))
        planned = getattr(samples, 'planned', None)
        if planned is None or not isinstance(batch, Mapping):
            return batch
        return zero_weight(batch) if planned.is_copy else {**batch, MICROBATCH_IDS: planned.microbatch_ids}


def _seed_of(sampler: RegroupingBatchSampler, first_batch: int) -> int:
    """Seed of worker processes: another one for each rank, epoch, and place of resumption."""
    entropy = [sampler.seed % 2**32, sampler.epoch, sampler.rank, first_batch]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
