# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What one sample is in a shard: its record as JSON, and its image files byte for byte, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from composer_tokacc.data.formats import Record

__all__ = ['COLUMNS', 'from_row', 'to_row']

COLUMNS = {'images': 'bytes', 'record': 'json'}
"""Columns of a shard and their MDS encodings."""


def to_row(record: Record, files: Sequence[bytes]) -> dict[str, Any]:
    """The row of a record.

    Args:
        record: The conversation.
        files: Content of each of its image files, in the order of ``record.images``.

    Returns:
        ``record``: ``{'id', 'source', 'conversations': [{'from', 'value'}], 'image': [file names], 'image_bytes':
        [sizes]}``, and ``images``.
    """
    return {
        'record': {
            'id': record.sample_id,
            'source': record.source,
            'conversations': [{'from': role, 'value': text} for role, text in record.turns],
            'image': list(record.images),
            'image_bytes': [len(file) for file in files],
        },
        'images': b''.join(files),
    }


def from_row(row: dict[str, Any]) -> tuple[Record, list[bytes]]:
    """The record and its image files, as :func:`to_row` got them.

    Raises:
        ValueError: If the row is of other columns, so not written by ``composer_tokacc.data.to_mds``.
    """
    if row.keys() != COLUMNS.keys():
        raise ValueError(
            f'shards must have the columns {sorted(COLUMNS)}, got: {sorted(row)}. Write them with '
            '`python -m composer_tokacc.data.to_mds`.'
        )
    raw = row['record']
    record = Record(
        sample_id=raw['id'],
        source=raw['source'],
        turns=tuple((turn['from'], turn['value']) for turn in raw['conversations']),
        images=tuple(raw['image']),
    )
    ends = accumulate(raw['image_bytes'], initial=0)
    return record, [row['images'][start:end] for start, end in pairwise(ends)]
