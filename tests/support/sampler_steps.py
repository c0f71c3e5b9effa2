# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samplers of random lengths, and the samples of their steps over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from composer_tokacc.sampling import RegroupingBatchSampler

LONGEST_SAMPLE = 64


def joined(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns the items of all lists in one list."""
    return list(chain.from_iterable(lists))


def lognormal_lengths(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Returns lengths of 1 to LONGEST_SAMPLE."""
    drawn = rng.lognormal(2.5, 0.8, num_samples)
    lengths = drawn.astype(int) + 1
    return np.minimum(lengths, LONGEST_SAMPLE)


def build_sampler(
    lengths: Sequence[int], *, num_samples: int | None = None, ranks: int = 1, rank: int = 0, **options: Any
) -> RegroupingBatchSampler:
    """Returns the sampler of one rank. `num_samples` is for tests of a table that does not fit its dataset."""
    if num_samples is None:
        num_samples = len(lengths)
    options = {'lengths': lengths, 'max_tokens': 3 * LONGEST_SAMPLE, **options}
    return RegroupingBatchSampler(range(num_samples), num_replicas=ranks, rank=rank, **options)


def samplers_of_ranks(
    lengths: Sequence[int], ranks: int, *, epoch: int | None = None, **options: Any
) -> list[RegroupingBatchSampler]:
    """Returns the samplers of all ranks. None: `set_epoch` is not called."""
    samplers = []
    for rank in range(ranks):
        sampler = build_sampler(lengths, ranks=ranks, rank=rank, **options)
        if epoch is not None:
            sampler.set_epoch(epoch)
        samplers.append(sampler)
    return samplers


def samples_of_steps(batches_of_ranks: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Returns the samples of each step over all ranks, sorted. Marked copies do not count."""
    steps = []
    for batches in zip(*batches_of_ranks, strict=True):
        samples = []
        for batch in batches:
            is_copy = getattr(batch, 'is_copy', False)  # a DataLoader yields plain lists
            if not is_copy:
                samples += batch
        steps.append(sorted(samples))
    return steps


def sample_numbers(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Returns the numbers of the samples of each batch. The batches are of a LengthDataset."""
    numbers_of_batches = []
    for batch in batches:
        numbers = [int(name) for name in batch['sample_ids']]
        numbers_of_batches.append(numbers)
    return numbers_of_batches
