# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ranks make one length table from image headers. Returns the table of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from composer.utils import dist

from composer_tokacc.data import lengths
from tests.data.test_headers import PROCESSORS, open_dataset


def main(path: str, num_checked: str) -> list[dict[str, Any]]:
    """Returns for each rank the table, and which samples it has read."""
    processor = PROCESSORS['llava_next']()
    dataset = open_dataset(Path(path), processor)
    with mock.patch.multiple(lengths, MAX_SAMPLES_TO_READ=0, NUM_CHECKED_ROWS=int(num_checked)):
        table = lengths.build_length_table(dataset, dataset.encoder.processor, num_workers=0)
    columns = {}
    for name in lengths.TABLE_COLUMNS:
        column = getattr(table, name)
        columns[name] = column.tolist()
    return dist.all_gather_object({'columns': columns, 'reads': dataset.reads})
