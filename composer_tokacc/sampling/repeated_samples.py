# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a rank's last batch that are no samples: copies that fill up the ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler


def num_repeated(dataloader: Any, batch_index: int) -> int:
    """Returns how many rows at the end of this rank's batch are copies of samples that others have: 0 or 1.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many, and a
    RegroupingBatchSampler gives a copy to a rank that is left without any. Computed as samples they would count twice,
    and make every number of ranks train another last step; they must weigh nothing.

    Args:
        dataloader: As given to the Trainer. Samplers of others, iterable datasets, and loaders that see to it
            themselves (``marks_added_rows``) have no such rows.
        batch_index: Number of the batch in its epoch, from 0, batches that were skipped on resuming included.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    has_only_copies = getattr(dataloader.batch_sampler, 'has_only_copies', None)
    if has_only_copies is not None:
        return int(has_only_copies(batch_index))
    if dataloader.batch_size is None:
        return 0
    return num_repeated_by(dataloader.sampler, dataloader.batch_size, batch_index)


def num_repeated_by(sampler: Any, batch_size: int, batch_index: int) -> int:
    """Returns how many rows at the end of a batch torch's DistributedSampler repeats; 0 for other samplers."""
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return 0
    # Fewer than one sample a rank is repeated in all, so a rank has one at most, and has it last.
    last = sampler.num_samples - 1
    position = last * sampler.num_replicas + sampler.rank
    num_samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    return int(batch_index == last // batch_size and position >= num_samples)
