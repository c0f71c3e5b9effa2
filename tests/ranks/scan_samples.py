# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: every rank opens the same file with on_error=skip. Returns what each rank kept."""

from __future__ import annotations

from typing import Any

from composer.utils import dist
from torch.utils.data import Dataset

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data.lengths import build_length_table
from tests.data.chat_processors import small


class CountingDataset(LlavaDataset):
    """Records which samples this rank has read."""

    read: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads a sample."""
        self.read = (*self.read, index)
        return super().__getitem__(index)


class OneBadSample(Dataset):
    """Four samples. The second one, which rank 1 reads, is bad."""

    def __init__(self, path: str, folder: str) -> None:
        self.good = LlavaDataset(path, small(), on_error='skip', lengths_folder=folder)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise BadSampleError('sample "1" is bad')
        return self.good[index]


def main(path: str, folder: str) -> list[dict[str, Any]]:
    """Returns for each rank which samples it kept, skipped and read, and its error if samples are not skipped."""
    dataset = CountingDataset(path, small(), on_error='skip', lengths_folder=folder)
    message = ''
    try:
        build_length_table(OneBadSample(path, folder), small())
    except BadSampleError as error:
        message = str(error)
    results = {
        'kept': [record.sample_id for record in dataset.records],
        'skipped': dataset.skipped,
        'read': dataset.read,
        'raised': message,
    }
    return dist.all_gather_object(results)
