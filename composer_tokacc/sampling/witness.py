# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A digest of samples that every rank reads. It differs if the datasets of two ranks list files in different orders."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from composer_tokacc.plan_agreement import RANDOM
from composer_tokacc.random_state import same_random_numbers


def witness_of(
    read: Callable[[list[int]], Sequence[object]],
    indices: Sequence[int],
) -> str:
    """Returns a digest of the samples at `indices`, which is equal in all processes with the same dataset.

    It is computed from token ids, or from texts if there are no ids. Pixels are left out because they may be augmented,
    and paths because they may differ between nodes.

    The samples are read three times with the same random numbers. If the digests differ, the dataset has another source
    of randomness, and RANDOM is returned, so that no rank is compared. If the samples cannot be read, the digest is
    empty, and only this rank is not compared.

    Args:
        read: Function that returns the samples at some indices.
        indices: Samples to read.
    """
    digests = set()
    try:
        for _ in range(3):  # if a dataset chooses among a few texts, two reads are often equal by chance
            with same_random_numbers():
                digests.add(_digest(read(list(indices))))
    except Exception:  # the rank that trains on the sample will raise the error
        return ''
    return digests.pop() if len(digests) == 1 else RANDOM


def _digest(samples: Sequence[object]) -> str:
    """Returns a checksum of the integers in samples, else of their texts, as 8 hex digits; '' if they have neither."""
    arrays: list[bytes] = []
    texts: list[bytes] = []
    for leaf in _leaves(tuple(samples)):  # a dataset may return any sequence, but only lists and tuples are searched
        if isinstance(leaf, np.ndarray):
            arrays.append(leaf.astype(np.int64).tobytes())
        else:
            texts.append(leaf.encode())
    data = b''.join(arrays or texts)
    return f'{zlib.crc32(data):08x}' if data else ''


def _leaves(value: object) -> Iterator[np.ndarray | str]:
    """Yields the arrays and lists of integers in a sample, and its texts.

    Arrays with one byte for each number are left out, because they are pixels. Texts with a slash are left out, because
    they are paths.
    """
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        value = value.numpy(force=True)
    if isinstance(value, list):
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
