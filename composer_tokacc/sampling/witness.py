# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A digest of a few samples that every rank reads, to notice datasets that list the same files in another order."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from composer_tokacc.random_state import same_random_numbers


def witness_of(
    read: Callable[[list[int]], Sequence[object]],
    indices: Sequence[int],
) -> str:
    """Returns a digest of samples, which is equal in all processes with the same dataset.

    It is made of token ids, or of texts if there are no ids, because pixels may be augmented and paths may differ
    between nodes. The samples are read twice with the same random numbers. If the two digests differ, the dataset has
    another source of randomness. Then, or if the samples cannot be read, the digest is empty and nothing is compared.
    """
    digests = set()
    try:
        for _ in range(2):
            with same_random_numbers():
                digests.add(_digest(read(list(indices))))
    except Exception:  # a rank that trains on the sample will report it
        return ''
    return digests.pop() if len(digests) == 1 else ''


def _digest(samples: Sequence[object]) -> str:
    """Returns a checksum of the integers in samples, or of the texts if there are no integers; '' without both."""
    arrays: list[bytes] = []
    texts: list[bytes] = []
    for leaf in _leaves(tuple(samples)):
        if isinstance(leaf, np.ndarray):
            arrays.append(leaf.astype(np.int64).tobytes())
        else:
            texts.append(leaf.encode())
    checksum = 0
    for piece in arrays or texts:
        checksum = zlib.crc32(piece, checksum)
    return f'{checksum:08x}' if arrays or texts else ''


def _leaves(value: object) -> Iterator[np.ndarray | str]:
    """Yields the integers of a sample, one array for each entry, and its texts without paths. Bytes are pixels."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, torch.Tensor):
        is_readable = value.device.type == 'cpu' and value.dtype != torch.bfloat16
        if is_readable:
            value = value.numpy()
    if isinstance(value, list) and value:
        has_only_integers = all(isinstance(item, int) for item in value)
        if has_only_integers:
            value = np.array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in 'iu' and value.dtype.itemsize > 1:
            yield value
    elif isinstance(value, str):
        if '/' not in value and '\\' not in value:
            yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry)
