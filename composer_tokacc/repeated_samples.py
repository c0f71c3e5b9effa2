# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How many rows of a batch are copies that only fill up the ranks, and must weigh nothing."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import DataLoader, DistributedSampler


@runtime_checkable
class KnowsCopies(Protocol):
    """A batch sampler that gives a copy to a rank that is left without a sample, such as RegroupingBatchSampler."""

    def has_only_copies(self, batch: int) -> bool:
        """Returns whether this rank only has a copy in a global batch of the epoch."""
        ...


def num_repeated(dataloader: Any, batch_index: int) -> int:
    """Returns how many rows at the end of this rank's batch are copies of samples that other ranks have: 0 or 1.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many, and a
    RegroupingBatchSampler gives a copy to a rank that is left without any. If they counted as samples, they would count
    twice, and the last step of an epoch would depend on the number of ranks. Other samplers, iterable datasets, and
    loaders that mark their copies themselves (``marks_added_rows``) have no such rows.

    Args:
        dataloader: The one that Composer iterates.
        batch_index: Counts the batches of the epoch from 0, skipped ones included.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    if isinstance(dataloader.batch_sampler, KnowsCopies):
        return int(dataloader.batch_sampler.has_only_copies(batch_index))
    if dataloader.batch_size is None:
        return 0
    return num_repeated_by(dataloader.sampler, dataloader.batch_size, batch_index)


def num_repeated_by(sampler: Any, batch_size: int, batch_index: int) -> int:
    """Returns how many rows at the end of a batch torch's DistributedSampler repeats; 0 for other samplers."""
    if not has_torchs_order(sampler):
        return 0
    # The sampler repeats fewer samples than there are ranks. So a rank has one at most, and has it last.
    last = sampler.num_samples - 1
    position = last * sampler.num_replicas + sampler.rank
    num_samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    return int(batch_index == last // batch_size and position >= num_samples)


def has_torchs_order(sampler: object) -> TypeGuard[DistributedSampler]:
    """Returns whether torch's DistributedSampler decides the order. A subclass may read another order on each rank."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
