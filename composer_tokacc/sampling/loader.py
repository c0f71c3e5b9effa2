# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader for RegroupingBatchSampler: it yields pre-split batches, and reads no batch that a resumed run skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from composer_tokacc.compat import separate_iterator
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.plan_agreement import PlanRecord
from composer_tokacc.planning import check_kind
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.rank_assignment import RankAssignment, collate
from composer_tokacc.sampling.sampler import RegroupingBatchSampler, length_of, noting_progress
from composer_tokacc.sampling.witness import witness_of


class SkippedBatch:
    """Stands for a batch that was trained on before the run was interrupted; nothing was read for it."""


class RegroupingDataLoader(DataLoader):
    """A DataLoader over a :class:`RegroupingBatchSampler`. Composer sees a fixed batch size.

    - ``batch_size`` is ``global_batch_size / num_replicas``, so that Composer finds its initial microbatch size. A
      schedule counts with its largest size, ``global_batch_tokens`` with the mean number of samples.
    - Batches are pre-split (:class:`.PreSplitBatch`): each planned microbatch is collated by itself, in the worker that
      read it, at its own width. With ``pin_memory=True`` it is page-locked. ``token_data_spec`` passes them on.
    - If a global batch has fewer samples than ranks, the ranks without a sample get a dummy row, which does not count.
    - Seeds of workers depend only on seed and epoch, and iterating consumes no global random numbers.
    - Batches that will be thrown away are not read, see :meth:`skip_to`.
    - On several ranks, the first batch is read together with two samples that all ranks read. If their datasets list
      the samples in another order, the first step is refused.

    Args:
        dataset: The sampler's map-style dataset.
        batch_sampler: The sampler.
        collate_fn: As for any DataLoader, called once a microbatch; must return a mapping.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        ValueError: If the sampler decides about an argument, or if it was made for a dataset of another size.
    """

    marks_added_rows = True
    """Tells ``num_repeated`` that this loader itself gives weight 0 to copies that fill up the ranks."""

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
            raise InvalidInputError(f'`collate_fn` must be a function of a list of samples, got: {collate_fn!r:.80}.')
        num_samples = length_of(dataset)
        num_planned = length_of(batch_sampler.dataset)
        if num_samples != num_planned:
            raise InvalidInputError(
                f'`dataset` must be that of `batch_sampler`, of {num_planned} samples, got: one of {num_samples}.'
            )
        self._sampler = batch_sampler
        self._generator = torch.Generator()
        kwargs.setdefault('generator', self._generator)
        planned_dataset = _PlannedDataset(dataset, batch_sampler, collate_fn or default_collate)
        # Batches are packed only if they must be pinned. When accelerate skips batches, it makes a plain DataLoader
        # from the attributes of this one, and that DataLoader does not unpack them.
        pack: Any = _Parcel if kwargs.get('pin_memory') else _unchanged
        super().__init__(planned_dataset, batch_sampler=batch_sampler, collate_fn=pack, **kwargs)
        self._resume_at = (0, 0)
        """Epoch and batch before which batches are skipped."""
        self._witness = ''
        """See :class:`.PlanRecord`."""

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of a rank and step, on average and rounded up; with a schedule in its largest global batches."""
        return -(-self._sampler.global_batch_size // self._sampler.num_replicas)

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Ignores None, which DataLoader sets with any batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, as trainers ask a loader that shuffles by it."""
        self._sampler.set_epoch(epoch)

    def skip_to(
        self,
        epoch: int,
        batch: int,
    ) -> None:
        """Yields the batches before batch `batch` of epoch `epoch` as ``SkippedBatch``, once."""
        self._resume_at = (epoch, batch)

    def __iter__(self) -> Iterator[PreSplitBatch | SkippedBatch]:
        """Yields the batches of the sampler's epoch."""
        sampler = self._sampler
        epoch = sampler.epoch
        num_skipped = self._take_batches_to_skip(epoch)
        for _ in range(num_skipped):
            yield SkippedBatch()
        if num_skipped == sampler.num_batches:
            return
        first = num_skipped or sampler.first_batch  # from `skip_to` of this loader, or from the state of the sampler
        batches = noting_progress(sampler, self._read_from(epoch, first), epoch, first)
        for index, batch in enumerate(batches, start=first):
            if isinstance(batch, _Parcel):
                batch = batch.batch
            # The facts are added here, so that workers need not send them. They are computed only if plans differ.
            plan = batch.plan
            if plan is not None:
                facts = partial(sampler.plan_facts, epoch, index)
                # All later batches have the witness, too, because Composer discards the first ones of a resumed run.
                if plan.witness:
                    self._witness = plan.witness
                batch.plan = replace(plan, facts=facts, witness=self._witness)
            yield batch

    def _take_batches_to_skip(self, epoch: int) -> int:
        """Returns how many batches of an epoch to skip. They are skipped once. See :meth:`skip_to`."""
        resume_epoch, resume_batch = self._resume_at
        num_batches = self._sampler.num_batches
        if epoch < resume_epoch:
            return num_batches
        if epoch > resume_epoch:
            return 0
        self._resume_at = (0, 0)
        return min(resume_batch, num_batches)

    def _read_from(
        self,
        epoch: int,
        first: int,
    ) -> Iterator[PreSplitBatch | _Parcel]:
        """Returns an iterator over the batches of the epoch from `first` on."""
        sampler = self._sampler
        # Workers are seeded with a number that differs between ranks, epochs, and places of resumption.
        entropy = [sampler.seed % 2**32, epoch, sampler.rank, first]
        seeds = np.random.SeedSequence(entropy).generate_state(1)
        self._generator.manual_seed(int(seeds[0]))
        # Persistent workers serve one iterator at a time. A look (`next(iter(loader))`) must not take them from the
        # iterator of the run, nor the run from a look.
        needs_own_workers = self.persistent_workers and sampler.progress.has_reading_iterator
        sampler.start_of_loader = first
        try:
            with separate_iterator(self) if needs_own_workers else nullcontext():
                return super().__iter__()
        finally:
            sampler.start_of_loader = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler after the furthest batch that was yielded. Workers have read further.

        A look (``next(iter(loader))``) changes it only if no other iterator has read a batch of the epoch.
        """
        return self._sampler.state_dict()

    def load_state_dict(
        self,
        state: dict[str, Any],
    ) -> None:
        """Lets iterations of this epoch start at the place of the state. Composer needs `SkipReadBatches` instead."""
        self._sampler.load_state_dict(state)


class _PlannedDataset(Dataset):
    """Reads the samples of an assignment and collates them at once, in the worker.

    It must have no ``state_dict``. With one, Composer would discard no batches when it resumes a run, and it restores
    random numbers only at the last batch that it discards.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: RegroupingBatchSampler,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset = dataset
        self._options = sampler.rows.options
        self._rank = sampler.rank
        self._num_ranks = sampler.num_replicas
        self._collate = collate_fn

    def __len__(self) -> int:
        return length_of(self.dataset)

    def __getitem__(self, index: int) -> object:
        return self.dataset[index]

    def __getitems__(self, assignment: RankAssignment) -> PreSplitBatch:
        witness = ''
        if assignment.witnesses:
            witness = witness_of(self._read, assignment.witnesses)
        samples = self._read(list(assignment))
        batch = collate(self._collate, samples, assignment, self._options)
        batch.plan = PlanRecord(assignment.plan_checksum, self._rank, self._num_ranks, witness)
        return batch

    def _read(self, indices: list[int]) -> Sequence[object]:
        read_many = getattr(self.dataset, '__getitems__', None)
        if read_many is not None:
            return read_many(indices)
        return [self.dataset[index] for index in indices]


def _unchanged(batch: PreSplitBatch) -> PreSplitBatch:
    return batch


class _Parcel:
    """A batch on its way from torch to this loader.

    A PreSplitBatch is a mapping. Torch would pin its entries, and not call its `pin_memory`.
    """

    def __init__(self, batch: PreSplitBatch) -> None:
        self.batch = batch

    def pin_memory(self) -> _Parcel:
        return _Parcel(self.batch.pin_memory())
