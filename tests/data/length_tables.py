# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Helpers for tests of lengths: comparing tables, and counting the samples that are read for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from composer_tokacc.data import LengthTable, LlavaDataset, lengths


class CountingDataset(LlavaDataset):
    """Remembers the indices that were read. The constructor reads too, if it looks for bad samples."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.reads: list[int] = []
        super().__init__(*args, **options)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return super().__getitem__(index)


def lengths_of(samples: Iterable[dict[str, Any]]) -> list[int]:
    """Returns the number of tokens of each sample."""
    return [sample['input_ids'].shape[1] for sample in samples]


def use_headers(monkeypatch: pytest.MonkeyPatch, *, num_checked: int = 0) -> None:
    """Measures even few samples by the headers of their images. ``num_checked`` of them are read to compare."""
    monkeypatch.setattr(lengths, 'MAX_SAMPLES_TO_READ', 0)
    monkeypatch.setattr(lengths, 'NUM_CHECKED_ROWS', num_checked)


def assert_same_table(table: LengthTable, expected: LengthTable) -> None:
    """Compares two tables, column by column."""
    for name in lengths.TABLE_COLUMNS:
        column = getattr(table, name)
        expected_column = getattr(expected, name)
        assert column.dtype == np.int32
        np.testing.assert_array_equal(column, expected_column, err_msg=name)
