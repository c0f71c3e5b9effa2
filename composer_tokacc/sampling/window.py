# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which samples an epoch's global batches hold: those of torch's DistributedSampler, each once."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ['EpochOrder', 'num_windows']


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
