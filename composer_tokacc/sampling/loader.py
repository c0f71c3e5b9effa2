# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader for RegroupingBatchSampler: pre-split batches, and no reading of what was seen before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.planning import check_kind
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.sampling.sampler import RegroupingBatchSampler, length_of


class SkippedBatch:
    """Stands for a batch that was trained on before the run was interrupted; nothing was read for it."""


class RegroupingDataLoader(DataLoader):
    """A DataLoader over a :class:`RegroupingBatchSampler` that Composer takes for one of fixed batch size.

    - ``batch_size`` is ``global_batch_size / num_replicas``, so that Composer finds its initial microbatch size.
    - Batches are pre-split (:class:`.PreSplitBatch`): each planned microbatch is collated by itself, in the worker that
      read it, at its own width, and page-locked where ``pin_memory=True`` asks. ``token_data_spec`` hands them on.
    - Where a global batch has fewer samples than ranks, ranks without one get a dummy row, which is no sample.
    - Seeds of workers depend on seed and epoch alone, and iterating consumes no global random numbers.
    - Batches that will be thrown away are not read, see :meth:`skip_to`.

    Args:
        dataset: The sampler's map-style dataset.
        batch_sampler: The sampler.
        collate_fn: As for any DataLoader, called once a microbatch; must return a mapping.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        ValueError: If an argument is given that the sampler decides.
    """

    marks_added_rows = True
    """Copies that fill up the ranks weigh nothing here: ``num_repeated`` finds none."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_sampler: RegroupingBatchSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_kind('batch_sampler', batch_sampler, RegroupingBatchSampler)
        if collate_fn is not None and not callable(collate_fn):
            raise ValueError(f'`collate_fn` must be a function of a list of samples, got: {collate_fn!r:.80}.')
        found, own = length_of(dataset), length_of(batch_sampler.dataset)
        if found != own:
            raise ValueError(f'`dataset` must be that of `batch_sampler`, of {own} samples, got: one of {found}.')
        for name in ('batch_size', 'shuffle', 'sampler', 'drop_last'):
            if name in kwargs:
                raise ValueError(f'`{name}` must be left to the batch sampler, got: {kwargs[name]}. Drop it.')
        self._sampler, self._generator = batch_sampler, torch.Generator()
        kwargs.setdefault('generator', self._generator)
        collate = partial(batch_sampler.planner.collate, collate_fn or default_collate)
        # Who makes a loader of this one's parts (accelerate, to skip batches) must get batches, not parcels.
        pack: Any = _Parcel if kwargs.get('pin_memory') else _as_it_is
        super().__init__(_PlannedDataset(dataset, collate), batch_sampler=batch_sampler, collate_fn=pack, **kwargs)
        self._resume_at = self._yielded = (0, 0)

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of a rank and step, on average."""
        return self._sampler.global_batch_size // self._sampler.num_replicas

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """DataLoader itself sets None, as it does with any batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, as trainers ask a loader that shuffles by it."""
        self._sampler.set_epoch(epoch)

    def skip_to(self, epoch: int, batch: int) -> None:
        """Yields what comes before batch `batch` of epoch `epoch` as ``SkippedBatch``, once."""
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
        # Of worker processes: another one for each rank, epoch, and place of resumption.
        entropy = [sampler.seed % 2**32, epoch, sampler.rank, first]
        self._generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        for number, batch in enumerate(super().__iter__(), start=first + 1):
            self._yielded = (epoch, number)
            yield batch.batch if isinstance(batch, _Parcel) else batch

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler after the batch that was yielded last, whatever workers have fetched ahead."""
        epoch, batch = self._yielded
        state = self._sampler.state_dict()
        return {**state, 'batch': batch if epoch == state['epoch'] else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration starts where :meth:`state_dict` was taken. Composer needs `SkipReadBatches` instead."""
        self._sampler.load_state_dict(state)
        self._yielded = (state['epoch'], state['batch'])


class _PlannedDataset(Dataset):
    """Reads the samples of an assignment, and makes a batch of them at once: collating sees nothing but samples.

    It offers no ``state_dict``: Composer would stop discarding batches on resume, and not restore random numbers.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any], RankAssignment], PreSplitBatch]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, assignment: RankAssignment) -> PreSplitBatch:
        indices, read = list(assignment), getattr(self.dataset, '__getitems__', None)
        samples = read(indices) if read is not None else [self.dataset[index] for index in indices]
        return self._collate(samples, assignment)


def _as_it_is(batch: PreSplitBatch) -> PreSplitBatch:
    return batch


class _Parcel:
    """A batch on its way to the trainer: what is no mapping by type torch lets page-lock itself."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> _Parcel:
        return _Parcel(self.batch.pin_memory())
