# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads every sample of a dataset once, in parallel, and says how long it is or what is wrong with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from composer_tokacc.data.formats import BadSampleError

__all__ = ['ScannedSample', 'scan_samples']


@dataclass(frozen=True)
class ScannedSample:
    """What one sample turned out to be.

    Args:
        index: Of the dataset.
        length: Tokens, image tokens included; 0 for a bad sample.
        num_loss_tokens: Positions that carry loss under the causal shift.
        num_images: Images.
        error: Why it cannot be used, or ``None``.
    """

    index: int
    length: int = 0
    num_loss_tokens: int = 0
    num_images: int = 0
    error: str | None = None


class _Attempts(Dataset):
    def __init__(self, dataset: Any, indices: range) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> ScannedSample:
        index = self.indices[position]
        try:
            sample = self.dataset[index]
        except BadSampleError as error:
            return ScannedSample(index, error=str(error))
        num_loss_tokens = int((sample['labels'][:, 1:] != -100).sum())
        return ScannedSample(index, sample['input_ids'].shape[1], num_loss_tokens, sample['num_images'][0])


def scan_samples(dataset: Any, *, num_workers: int | None = None, progress: bool = True) -> list[ScannedSample]:
    """Reads every sample of a map-style dataset once.

    Under ``torch.distributed`` the ranks share the work, so every rank must call it; all get the same list.

    Args:
        dataset: Raises :class:`BadSampleError` for a sample that it cannot read.
        num_workers: Processes on each rank. ``None``: one for each CPU core that the ranks of this node leave it.
        progress: Show a bar on rank 0.

    Returns:
        One entry per sample, by index.
    """
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_distributed else 0
    num_ranks = torch.distributed.get_world_size() if is_distributed else 1
    if num_workers is None:
        num_workers = (os.cpu_count() or 1) // int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
    attempts = _Attempts(dataset, range(rank, len(dataset), num_ranks))
    # Starting processes takes longer than reading a few samples.
    num_workers = num_workers if len(attempts) > 512 else 0
    loader = DataLoader(attempts, batch_size=None, num_workers=num_workers)
    scanned = list(tqdm(loader, desc='checking samples', disable=not progress or rank != 0, leave=False))
    if num_ranks > 1:
        parts: list[Any] = [None] * num_ranks
        torch.distributed.all_gather_object(parts, scanned)
        scanned = sorted((sample for part in parts for sample in part), key=lambda sample: sample.index)
    return scanned
