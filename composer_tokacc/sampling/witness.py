# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A digest of samples that every rank reads. It differs if the datasets of two ranks list files in different orders."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from composer_tokacc.plan_agreement import RANDOM
from composer_tokacc.random_state import same_random_numbers


def witness_of(
    read: Callable[[list[int]], Sequence[object]],
    indices: Sequence[int],
) -> str:
    """Returns a digest of the samples at `indices`, to compare the datasets of the ranks.

    The digest is computed from integers such as token ids, or from texts if the samples have no integers. Pixels are
    left out because they may be augmented, and paths because they may differ between nodes. So processes that read the
    same dataset get the same digest.

    The samples are read three times with the same random numbers. If the digests differ, the dataset has another source
    of randomness. Then RANDOM is returned, and the ranks are not compared. If the samples cannot be read, the digest is
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
    if len(digests) > 1:
        return RANDOM
    return digests.pop()


def _digest(samples: Sequence[object]) -> str:
    """Returns a checksum of the integers in samples, else of their texts, as 8 hex digits; '' if they have neither."""
    integers: list[bytes] = []
    texts: list[bytes] = []
    for leaf in _leaves(tuple(samples)):  # a dataset may return any sequence, but only lists and tuples are searched
        if isinstance(leaf, np.ndarray):
            integers.append(leaf.astype(np.int64).tobytes())
        else:
            texts.append(leaf.encode())
    compared = integers or texts
    data = b''.join(compared)
    if not data:
        return ''
    return f'{zlib.crc32(data):08x}'


def _leaves(value: object) -> Iterator[np.ndarray | str]:
    """Yields the integers in a sample, as arrays, and its texts.

    Integers of one byte are left out, because they are pixels. Texts with a slash are left out, because they are paths.
    """
    if isinstance(value, str):
        is_path = '/' in value or '\\' in value
        if not is_path:
            yield value
        return
    array = _as_array(value)
    if array is not None:
        is_integer = array.dtype.kind in 'iu'  # signed or unsigned
        if is_integer and array.dtype.itemsize > 1:
            yield array
        return
    entries: Iterable[object] = ()
    if isinstance(value, Mapping):
        entries = value.values()
    elif isinstance(value, (list, tuple)):
        entries = value
    for entry in entries:
        yield from _leaves(entry)


def _as_array(value: object) -> np.ndarray | None:
    """Returns an array, a tensor that is not of floats, or a list of integers as an array; None for all else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.numpy(force=True)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return np.array(value)
    return None
