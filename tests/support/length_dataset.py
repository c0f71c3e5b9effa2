# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A dataset of text rows of lognormal lengths, which records its reads, and a loader that regroups them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.batch import BatchDict
from tests.support.text import collate, text_row

LONGEST = 48


class LengthDataset(Dataset):
    """Sample ``i`` always has the same ids.

    With `random_labels` its number of labels is drawn from torch's global generator on every read.
    """

    def __init__(self, num_samples: int, *, seed: int = 0, random_labels: bool = False) -> None:
        rng = np.random.default_rng(seed)
        drawn = rng.lognormal(2.2, 0.7, num_samples)
        self.lengths = np.clip(drawn.astype(int), 2, LONGEST)
        self.random_labels = random_labels
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> BatchDict:
        self.read.append(int(index))
        length = int(self.lengths[index])
        labelled = 1 + index % (length - 1)
        if self.random_labels:
            labelled = int(torch.randint(1, length, ()))
        row = text_row(length, labelled, seed=index)
        row['sample_ids'] = [str(index)]
        return row


class Reversed(Dataset):
    """The samples of a dataset in another order, as an unsorted glob may list them."""

    def __init__(self, dataset: LengthDataset) -> None:
        self.dataset = dataset
        self.lengths = dataset.lengths[::-1]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> BatchDict:
        last = len(self.dataset) - 1
        return self.dataset[last - index]


def collate_samples(samples: Sequence[BatchDict]) -> BatchDict:
    """Returns the padded batch of these samples, with their names."""
    batch = collate(samples)
    batch['sample_ids'] = [sample['sample_ids'][0] for sample in samples]
    return batch


def regrouping_loader(
    dataset: Any,
    *,
    num_workers: int = 0,
    persistent_workers: bool = True,
    multiprocessing_context: str | None = None,
    **options: Any,
) -> RegroupingDataLoader:
    """Returns a loader over a sampler with these options."""
    options = {'lengths': dataset.lengths, 'max_tokens': 2 * LONGEST, **options}
    return RegroupingDataLoader(
        dataset,
        batch_sampler=RegroupingBatchSampler(dataset, **options),
        collate_fn=collate_samples,
        num_workers=num_workers,
        persistent_workers=persistent_workers and num_workers > 0,
        multiprocessing_context=multiprocessing_context,
    )
