# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A digest of a few samples that every rank reads, to notice datasets that list the same files in another order."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def witness_of(
    read: Callable[[list[int]], Sequence[object]],
    indices: Sequence[int],
) -> str:
    """Returns a digest of samples that is equal in all processes with the same dataset; empty if there is none.

    Only token ids count, or texts if a sample has none: pixels may be augmented, and paths may differ between nodes.
    The samples are read twice with the same random numbers. If the two digests differ, the dataset has another source
    of randomness, and other processes cannot be compared.
    """
    try:
        with _fixed_random_numbers():
            first = _digest(read(list(indices)))
        with _fixed_random_numbers():
            second = _digest(read(list(indices)))
    except Exception:  # the rank that trains the sample reports it
        return ''
    if first != second:
        return ''
    return first


@contextmanager
def _fixed_random_numbers() -> Iterator[None]:
    """Seeds the global generators, and restores them at the end, so that the run draws the same numbers as before."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _digest(samples: Sequence[object]) -> str:
    checksum = 0
    has_content = False
    for sample in samples:
        pieces = list(_token_ids(sample)) or list(_texts(sample))
        has_content |= bool(pieces)
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
    return f'{checksum:08x}' if has_content else ''


def _token_ids(value: object) -> Iterator[bytes]:
    """Yields the integers of a sample, one piece for each entry. Bytes (uint8) are pixels."""
    if isinstance(value, torch.Tensor):
        if value.device.type != 'cpu' or value.dtype == torch.bfloat16:
            return  # numpy cannot read it
        value = value.numpy()
    elif isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in 'iu' and value.dtype.itemsize > 1:
            yield value.astype(np.int64).tobytes()
        return
    for entry in _entries(value):
        yield from _token_ids(entry)


def _texts(value: object) -> Iterator[bytes]:
    """Yields the texts of a sample, without paths."""
    if isinstance(value, str) and '/' not in value and '\\' not in value:
        yield value.encode()
    for entry in _entries(value):
        yield from _texts(entry)


def _entries(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()
