# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which of the planned microbatches of a whole run may be its heaviest."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from composer.core import State, TimeUnit
from composer.utils import dist

from composer_tokacc.planning import CutOptions, Microbatch, cut_rows
from composer_tokacc.sampling import RegroupingBatchSampler
from composer_tokacc.sizing import BatchShape, MemoryModel

MOST_BATCHES = 10_000
"""Global batches that are planned ahead: some ten seconds."""


class Candidate(NamedTuple):
    """A planned microbatch that may be the heaviest of the run."""

    step: int  # global batch, counted from where the run is
    samples: list[list[int]]  # indices: of this microbatch, or where rows are packed of all of its rank
    rows: int
    width: int
    image_tokens: int
    predicted: float  # bytes at the peak of a rank, 0 where there is no memory model


def heaviest(
    state: State, sampler: RegroupingBatchSampler, options: CutOptions, memory: MemoryModel | None, *, whole: bool
) -> tuple[list[Candidate], int]:
    """Returns the microbatches that may be the heaviest of what is left, lightest first, and the batches looked at.

    ``options`` say the token budget under which planned microbatches are cut again; ``whole``: rows will be packed.
    """
    front: list[tuple[tuple[float, ...], Candidate]] = []  # none of them is as large as another in every way
    num_batches = 0
    for step, ranks, window in _plans_left(state, sampler):
        num_batches += 1
        for rank in ranks:
            same_rank = [[window[place] for place in one.indices] for one in rank]
            for indices, width in _cut_again(same_rank, rank, sampler, options):
                images = 0 if sampler.image_tokens is None else int(sampler.image_tokens[indices].sum())
                sizes = (len(indices) * width, len(indices) * width**2, images)
                if not any(all(a >= b for a, b in zip(other, sizes, strict=True)) for other, _ in front):
                    front = [one for one in front if any(a > b for a, b in zip(one[0], sizes, strict=True))]
                    samples = same_rank if whole else [indices]
                    front.append((sizes, Candidate(step, samples, len(indices), width, images, 0.0)))
    found = [one._replace(predicted=_predicted(one, memory)) for _, one in front]
    table = np.array([[*sizes, one.predicted] for (sizes, _), one in zip(front, found, strict=True)], dtype=float)
    if memory is None:  # all together in the place of the peak
        table[:, 3] = (table[:, :3] / table[:, :3].max(axis=0).clip(min=1)).sum(axis=1)
    order = sorted({int(place) for place in table.argmax(axis=0)}, key=lambda place: (table[place, 3], place))
    return [found[place] for place in order], num_batches


def _cut_again(
    groups: list[list[int]], planned: Sequence[Microbatch], sampler: RegroupingBatchSampler, options: CutOptions
) -> Iterator[tuple[list[int], int]]:
    """Gives samples and width of each microbatch, of those over the budget as the split will cut them."""
    for indices, microbatch in zip(groups, planned, strict=True):
        if microbatch.num_tokens <= options.max_tokens:
            yield indices, microbatch.width
            continue
        lengths = sampler.lengths[indices]
        images = None if sampler.image_tokens is None else sampler.image_tokens[indices]
        for rows in cut_rows(lengths, options, image_tokens=images, max_width=microbatch.width):
            width = -(-int(lengths[list(rows)].max()) // options.width_multiple) * options.width_multiple
            yield [indices[row] for row in rows], width


def _predicted(one: Candidate, memory: MemoryModel | None) -> float:
    if memory is None:
        return 0.0
    pixels = int(one.image_tokens * memory.pixel_bytes_per_image_token)
    shape = BatchShape(rows=one.rows, width=one.width, image_tokens=one.image_tokens, pixel_bytes=pixels)
    return memory.peak(shape, num_ranks=dist.get_world_size())


def _plans_left(state: State, sampler: RegroupingBatchSampler) -> Iterator[tuple[int, Any, list[int]]]:
    """Gives step, microbatches of each rank, and samples of each global batch that is left of a run."""
    ahead = copy.copy(sampler)  # whose epoch may be set
    epoch, batch = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
    left = min(_batches_left(state, sampler), MOST_BATCHES)
    for step in range(left):
        if batch == len(sampler):
            epoch, batch = epoch + 1, 0
        ahead.set_epoch(epoch)
        yield step, ahead.plan(batch).ranks, ahead.window(batch)
        batch += 1


def _batches_left(state: State, sampler: RegroupingBatchSampler) -> int:
    end, now = state.max_duration, state.timestamp
    assert end is not None, 'a fit has an end'
    if end.unit == TimeUnit.BATCH:
        return end.value - now.batch.value
    if end.unit == TimeUnit.SAMPLE:
        return -(-(end.value - now.sample.value) // sampler.global_batch_size)
    if end.unit == TimeUnit.EPOCH:
        return (end.value - now.epoch.value) * len(sampler) - now.batch_in_epoch.value
    return len(sampler)  # in tokens or seconds: what an epoch holds
