# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Text rows of lognormal lengths, read by index; every read is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.support.text import collate, text_row

LONGEST = 48


class LengthDataset(Dataset):
    """Sample ``i`` has a length of its own; `random_labels` draws from torch's global generator on every read."""

    def __init__(self, num_samples: int, *, seed: int = 0, random_labels: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = np.clip(rng.lognormal(2.2, 0.7, num_samples).astype(int), 2, LONGEST)
        self.random_labels = random_labels
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(int(index))
        length = int(self.lengths[index])
        labelled = 1 + index % (length - 1)
        if self.random_labels:
            labelled = int(torch.randint(1, length, ()))
        return {**text_row(length, labelled, seed=index), 'sample_ids': [str(index)]}


def collate_samples(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**collate(samples), 'sample_ids': [sample['sample_ids'][0] for sample in samples]}
