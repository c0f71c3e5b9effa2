# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader for RegroupingBatchSampler: it yields pre-split batches, and reads no batch that a resumed run skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from composer_tokacc.arguments import check_kind
from composer_tokacc.compat import keep_from_accelerate, separate_iterator
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.plan_agreement import PlanRecord
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.repeated_samples import check_order
from composer_tokacc.sampling.rank_assignment import ENDED_BY_AN_ERROR, RankAssignment, collate
from composer_tokacc.sampling.sampler import RegroupingBatchSampler, length_of, noting_progress
from composer_tokacc.sampling.witness import witness_of


class SkippedBatch:
    """Yielded instead of a batch that the run trained on before it was interrupted. Composer discards it."""


class RegroupingDataLoader(DataLoader):
    """A DataLoader over a :class:`RegroupingBatchSampler`.

    - Batches are pre-split (:class:`.PreSplitBatch`): each planned microbatch is collated by itself, in the worker that
      read it, at its own width. With ``pin_memory=True`` it is page-locked. ``token_data_spec`` keeps the
      microbatches as they are, unless it packs rows or one is over a cap.
    - ``batch_size`` is the number of samples of a rank in a step: in the largest step if the sampler has a schedule of
      sizes, and on average with ``global_batch_tokens``. It does not change in a run. If the Trainer has no number for
      the microbatch size, Composer begins with this one.
    - If a global batch has fewer samples than ranks, a rank without a sample gets a copy of one, which does not count.
    - The seeds of workers only depend on the seed of the sampler, the epoch, the rank and the first batch that is read,
      unless you give a ``generator``. Persistent workers are seeded only when they start. Iterating draws no random
      numbers of the run.
    - Batches that a resumed run discards are not read, see :meth:`skip_to`.
    - On several ranks, every rank reads the first and the last sample three times, together with its first batch. If
      they differ between ranks, because the datasets list them in different orders, the first step is refused.

    Args:
        dataset: The sampler's map-style dataset.
        batch_sampler: The sampler.
        collate_fn: As for any DataLoader, called once a microbatch; must return a mapping.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        ValueError: If `collate_fn` is not a function, or if the sampler was made for a dataset of another size. Torch
            raises one for arguments that the sampler decides, such as ``shuffle``.
    """

    marks_added_rows = True
    """Tells ``repeated_samples.num_repeated`` that copies for ranks without a sample have weight 0 here."""

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
        kwargs.setdefault('generator', self._generator)  # a generator of the user is used as it is, and never seeded
        planned_dataset = _PlannedDataset(dataset, batch_sampler, collate_fn or default_collate)
        # The dataset returns collated batches, so torch's `collate_fn` has nothing to collate. Only if torch pins the
        # batches, it wraps them, and `_batches` unwraps them. They are not wrapped without need, because accelerate may
        # copy the attributes of this loader to a plain DataLoader, to skip batches. That one does not unwrap them.
        wrap: Any = _unchanged
        if kwargs.get('pin_memory'):
            wrap = _BatchToPin
        super().__init__(planned_dataset, batch_sampler=batch_sampler, collate_fn=wrap, **kwargs)
        check_order(self)
        keep_from_accelerate(self)  # accelerate would divide the batches of a rank again
        self._resume_at = (0, 0)
        """Epoch and batch at which a resumed run goes on. All earlier batches are skipped. (0, 0): none are skipped."""
        self._witness = ''
        """Digest of the two samples that all ranks read. It comes with the first batch that is read, and is kept for
        all later batches and epochs. Empty before."""

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Mean number of samples of a rank in a step, rounded up; with a schedule, in a step of the largest size."""
        return -(-self._sampler.global_batch_size // self._sampler.num_replicas)

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Does nothing. DataLoader sets None if it has a batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Some trainers call this method of a loader."""
        self._sampler.set_epoch(epoch)

    def skip_to(
        self,
        epoch: int,
        batch: int,
    ) -> None:
        """Resumes at batch `batch` of epoch `epoch`. Until then iterations yield a ``SkippedBatch`` for every batch.

        Earlier epochs are skipped as well, because Composer takes one batch of each when it resumes. Epoch `epoch` is
        skipped only once. If it is iterated again, all its batches are read.
        """
        self._resume_at = (epoch, batch)

    def __iter__(self) -> Iterator[PreSplitBatch | SkippedBatch]:
        """Yields the batches of the sampler's epoch, with a ``SkippedBatch`` for each batch that is skipped."""
        sampler = self._sampler
        epoch = sampler.epoch
        num_skipped = self._take_num_to_skip(epoch)
        if num_skipped > 0:
            # The run was resumed by `skip_to` of this loader: each earlier batch of the epoch is a SkippedBatch.
            first_yielded = 0
            first_read = num_skipped
        else:
            # It may have been resumed by the state of the sampler: earlier batches of the epoch are not yielded at all.
            first_yielded = sampler.first_batch
            first_read = sampler.first_batch
        batches = self._batches(epoch, num_skipped, first_read)
        yield from noting_progress(sampler, batches, epoch, first_yielded)

    def _batches(
        self,
        epoch: int,
        num_skipped: int,
        first_read: int,
    ) -> Iterator[PreSplitBatch | SkippedBatch]:
        """Yields `num_skipped` times a ``SkippedBatch``, then the batches of the epoch from `first_read` on."""
        sampler = self._sampler
        # Read before the first `yield`, after which the trainer may set another epoch, with another number.
        num_batches = sampler.num_batches
        for _ in range(num_skipped):
            yield SkippedBatch()
        if first_read == num_batches:
            return  # no workers are needed
        for index, batch in enumerate(self._read_from(epoch, first_read), start=first_read):
            if isinstance(batch, _BatchToPin):
                batch = batch.batch
            plan = batch.plan
            assert plan is not None, 'each batch is read with its plan'
            # The worker gives a witness only to the first batch that is read. Later ones get it here, because a run
            # that resumes without `skip_to` discards earlier batches, perhaps the one with the witness.
            if plan.witness:
                self._witness = plan.witness
            # The facts are added here, so that workers need not send them.
            batch.plan = replace(plan, facts=sampler.plan_facts(epoch, index), witness=self._witness)
            yield batch

    def _take_num_to_skip(self, epoch: int) -> int:
        """Returns how many batches of an epoch to skip. Forgets it if this is the epoch of :meth:`skip_to`."""
        resume_epoch, resume_batch = self._resume_at
        num_batches = self._sampler.num_batches
        if epoch < resume_epoch:
            return num_batches
        if epoch > resume_epoch:
            return 0
        self._resume_at = (0, 0)  # if this epoch is iterated again, nothing is skipped
        return min(resume_batch, num_batches)

    def _read_from(
        self,
        epoch: int,
        first: int,
    ) -> Iterator[PreSplitBatch | _BatchToPin]:
        """Seeds the workers. Returns torch's iterator over the batches of the epoch from `first` on."""
        sampler = self._sampler
        # The seed of the workers differs between ranks, between epochs, and if a run is resumed at another batch.
        entropy = [sampler.seed % 2**32, epoch, sampler.rank, first]
        seeds = np.random.SeedSequence(entropy).generate_state(1)
        self._generator.manual_seed(int(seeds[0]))
        # Persistent workers serve one iterator at a time, and a new iterator would take them from the old one. If an
        # iterator is made while another one reads, as in `next(iter(loader))`, it gets its own workers.
        needs_own_workers = self.persistent_workers and sampler.progress.num_reading > 1
        # Torch calls `iter(sampler)` while it makes its iterator. This attribute tells the sampler where to begin. It
        # holds the epoch, too, because the trainer may have set the next one while batches were skipped.
        sampler.start_of_loader = (epoch, first)
        try:
            with separate_iterator(self) if needs_own_workers else nullcontext():
                return super().__iter__()
        finally:
            sampler.start_of_loader = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler after the furthest batch that was yielded. Workers may have read further.

        A look at one batch by ``next(iter(loader))`` counts as a yielded batch, unless another iterator has already
        yielded a batch of the epoch.
        """
        return self._sampler.state_dict()

    def load_state_dict(
        self,
        state: dict[str, Any],
    ) -> None:
        """Lets iterations start at the place of the state. For Composer use `SkipReadBatches` instead."""
        self._sampler.load_state_dict(state)


class _PlannedDataset(Dataset):
    """Reads the samples of an assignment and collates them at once, in the worker.

    Torch passes each item of the batch sampler, here an assignment, to ``__getitems__``. Other code may look at
    ``loader.dataset``. It finds the length and the single items of the wrapped dataset.

    It has no ``state_dict``, even if the wrapped dataset has one. A resumed Composer run discards the batches that it
    has trained on, and restores the random numbers at the last of them. If the dataset had a state, Composer would
    discard no batches, and so not restore the random numbers.
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
        """Returns the batch of an assignment, with the record of its plan."""
        witness = ''
        try:
            if assignment.samples_to_compare:
                witness = witness_of(self._read, assignment.samples_to_compare)
            # Not `list(assignment)`, which refuses plain DataLoaders. This batch keeps what the assignment says, also
            # if accelerate reads this dataset through a plain DataLoader, to skip batches.
            indices = list(chain.from_iterable(assignment.microbatches))
            samples = self._read(indices)
            batch = collate(self._collate, samples, assignment, self._options)
        except StopIteration as error:
            raise RuntimeError(ENDED_BY_AN_ERROR) from error
        batch.plan = PlanRecord(assignment.plan_checksum, self._rank, self._num_ranks, witness)
        return batch

    def _read(self, indices: list[int]) -> Sequence[object]:
        """Returns samples of the wrapped dataset, all at once if it can do that."""
        read_many = getattr(self.dataset, '__getitems__', None)
        if read_many is None:
            return [self.dataset[index] for index in indices]
        samples = read_many(indices)
        if len(samples) != len(indices):
            raise InvalidInputError(
                f'`dataset.__getitems__` must return a sample for each index, got: {len(samples)} samples for the '
                f'indices {indices!r:.100}.'
            )
        return samples


def _unchanged(batch: PreSplitBatch) -> PreSplitBatch:
    """Returns the batch itself."""
    return batch


class _BatchToPin:
    """Wraps a batch until torch has pinned it.

    A PreSplitBatch is a mapping. Torch would pin its entries instead of calling its ``pin_memory``.
    """

    def __init__(self, batch: PreSplitBatch) -> None:
        self.batch = batch

    def pin_memory(self) -> _BatchToPin:
        return _BatchToPin(self.batch.pin_memory())
