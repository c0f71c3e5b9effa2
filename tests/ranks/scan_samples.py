# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: every rank opens the same file with on_error=skip; rank 0 writes what each one kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from composer.utils import dist

from composer_tokacc.data import LlavaDataset
from tests.data.chat_processors import small


class CountingDataset(LlavaDataset):
    """Remembers which samples this rank has read."""

    read: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads a sample."""
        self.read = (*self.read, index)
        return super().__getitem__(index)


def main(path: str, result: str) -> None:
    """Gathers what each rank kept, skipped and read."""
    dist.initialize_dist('cpu')
    dataset = CountingDataset(path, small(), on_error='skip', progress=False)
    found = {
        'kept': [record.sample_id for record in dataset.records],
        'skipped': dataset.skipped,
        'read': dataset.read,
    }
    gathered = dist.all_gather_object(found)
    if dist.get_global_rank() == 0:
        Path(result).write_text(json.dumps(gathered))


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2])
