# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which samples an epoch's global batches hold: those of torch's DistributedSampler, each once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

__all__ = ['EpochOrder', 'filler_rows', 'num_windows', 'repeated_rows']


def num_windows(num_samples: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Global batches of an epoch, as a DataLoader on a DistributedSampler counts them.

    Args:
        num_samples: Samples of the dataset.
        global_batch_size: Samples of a global batch.
        drop_last: Whether the last, smaller global batch is left out.
    """
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)


class EpochOrder:
    """The order of one epoch, cut into global batches.

    Rank ``r`` of ``W`` gets positions ``r, r + W, ...`` of torch's order, ``G / W`` of them in a batch; so the ranks
    together get positions ``b * G`` to ``(b + 1) * G``, whatever ``W`` is. Without `drop_last` torch moreover repeats
    the start of the order until every rank has equally many samples, which makes the last step of an epoch another one
    for each ``W``. That is left out here: the last global batch holds the samples that are left, and no other.

    Args:
        num_samples: Samples of the dataset.
        global_batch_size: Samples of a global batch, ``G``.
        seed: Seed of the order plus number of the epoch; None keeps the dataset's own order.
    """

    def __init__(self, num_samples: int, global_batch_size: int, *, seed: int | None) -> None:
        self.global_batch_size = global_batch_size
        if seed is None:
            self.order = np.arange(num_samples)
        else:
            self.order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).numpy()

    def window(self, batch: int) -> np.ndarray:
        """Indices of the samples of global batch `batch`, int64, in torch's order."""
        start = batch * self.global_batch_size
        return self.order[start : start + self.global_batch_size]


def filler_rows(dataloader: Any, batch_index: int) -> int:
    """How many rows at the end of this rank's batch only fill up the ranks: copies of samples that others have.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many, and a
    RegroupingBatchSampler gives a copy to a rank that is left without any. Computed as samples they would count twice,
    and make every number of ranks train another last step; they must weigh nothing.

    Args:
        dataloader: As given to the Trainer. Samplers of others, iterable datasets, and loaders that see to it
            themselves (``marks_added_rows``) have no such rows.
        batch_index: Number of the batch in its epoch, from 0, batches that were skipped on resuming included.

    Returns:
        Number of rows: 0 or 1, and 0 in every batch but the last of an epoch.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    has_only_copies = getattr(dataloader.batch_sampler, 'has_only_copies', None)
    if has_only_copies is not None:
        return int(has_only_copies(batch_index))
    if dataloader.batch_size is None:
        return 0
    return repeated_rows(dataloader.sampler, dataloader.batch_size, batch_index)


def repeated_rows(sampler: Any, batch_size: int, batch_index: int) -> int:
    """How many rows at the end of a batch of `batch_size` torch's DistributedSampler repeats; 0 for other samplers."""
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return 0
    # Fewer than one sample a rank is repeated in all, so a rank has one at most, and has it last.
    last = sampler.num_samples - 1
    position = last * sampler.num_replicas + sampler.rank
    num_samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    return int(batch_index == last // batch_size and position >= num_samples)
