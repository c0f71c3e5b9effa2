# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which samples make each global batch: the order of an epoch, cut by samples, by a schedule, or by tokens.

Nothing here knows how many ranks there are. So every number of ranks makes the same steps.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from composer_tokacc.planning import check_count, mean_samples
from composer_tokacc.sampling.mixture import (
    Mixture,
    cut_into_batches,
    merged_evenly,
    mixed_batches,
    mixed_orders,
    permutation,
)

Stages = Sequence[tuple[int | str, int]]
"""Start and size of each stage of a schedule. A start is a step, or a text: ``'1000ba'`` or ``'5000000tok'``."""

_START = re.compile(r'(\d[\d_]*)(ba|tok)')


class RunPlace(NamedTuple):
    """How far a run is: its optimizer steps so far, and the tokens that they trained."""

    steps: int
    tokens: int


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the global batch in the course of a run."""

    unit: Literal['ba', 'tok']
    """Whether `starts` are optimizer steps or trained tokens."""
    starts: tuple[int, ...]
    """Where each stage starts: 0 for the first one, and rising."""
    sizes: tuple[int, ...]
    """Samples of a global batch in each stage."""

    @classmethod
    def from_stages(cls, stages: Stages) -> BatchSchedule:
        """Returns the schedule that a list of (start, size) describes. Raises ValueError if the list is malformed."""
        starts: list[int] = []
        sizes: list[int] = []
        units: set[str] = set()
        for stage in stages:
            if not isinstance(stage, (list, tuple)) or len(stage) != 2:
                raise _not_a_schedule(stages)
            start, unit = _parsed_start(stage[0], stages)
            if start > 0:  # 0 is the same in every unit
                units.add(unit)
            starts.append(start)
            sizes.append(stage[1])
        is_rising = all(start < next_start for start, next_start in pairwise(starts))
        if starts[:1] != [0] or not is_rising or len(units) > 1:
            raise _not_a_schedule(stages)
        for size in sizes:
            check_count('global_batch_size', size)
        unit = 'tok' if 'tok' in units else 'ba'
        return cls(unit, tuple(starts), tuple(int(size) for size in sizes))

    def stage_at(self, place: RunPlace) -> int:
        """Returns the number of the stage of the step that starts at a place."""
        reached = place.steps if self.unit == 'ba' else place.tokens
        return bisect_right(self.starts, reached) - 1

    def is_last_stage(self, place: RunPlace) -> bool:
        """Whether the size does not change any more."""
        return self.stage_at(place) == len(self.starts) - 1

    def plain(self) -> list[list[Any]]:
        """Returns the stages as plain values, for a checkpoint."""
        stages: list[list[Any]] = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            stages.append([f'{start}{self.unit}', size])
        return stages

    def cut(
        self,
        order: np.ndarray,
        lengths: np.ndarray,
        place: RunPlace,
        drop_last: bool,
    ) -> tuple[list[np.ndarray], RunPlace]:
        """Returns the global batches of an epoch that starts at a place of the run, and the place after them.

        Args:
            order: Samples of the epoch.
            lengths: Tokens of each sample of the dataset.
            place: How far the run is when the epoch starts.
            drop_last: Whether samples that do not fill the last global batch are left out.
        """
        tokens_before = np.concatenate([[0], np.cumsum(lengths[order])])
        batches = []
        start = 0
        steps, tokens = place
        while start < len(order):
            size = self.sizes[self.stage_at(RunPlace(steps, tokens))]
            end = min(start + size, len(order))
            if drop_last and end - start < size:
                break
            batches.append(order[start:end])
            steps += 1
            tokens += int(tokens_before[end] - tokens_before[start])
            start = end
        return batches, RunPlace(steps, tokens)


def _parsed_start(start: object, stages: Stages) -> tuple[int, str]:
    """Returns the number and the unit of a start."""
    if isinstance(start, (int, np.integer)) and not isinstance(start, bool) and start >= 0:
        return int(start), 'ba'
    match = _START.fullmatch(start) if isinstance(start, str) else None
    if match is None:
        raise _not_a_schedule(stages)
    return int(match[1].replace('_', '')), match[2]


def _not_a_schedule(stages: Stages) -> ValueError:
    return ValueError(
        '`global_batch_size` must be a number, or a list of (start, size) whose starts rise from 0 and are all steps '
        f"or all tokens, got: {stages!r:.200}. For example [(0, 768), ('5000000tok', 1536)]."
    )


class GlobalBatches:
    """The samples of each global batch of a run: a pure function of these arguments and the epoch.

    Args:
        lengths: Tokens of each sample, int64 (n,).
        samples: Samples of a global batch, or their schedule. None: `tokens` decides.
        tokens: Tokens of a global batch, at least as many as the longest sample has; see :func:`cut_by_tokens`.
        seed: Seed of the order. None: samples keep the order of the dataset.
        drop_last: Whether samples that do not fill the last global batch of an epoch are left out.
        mixture: Shares of several datasets.
        media: Modality of each sample, int64 (n,), for global batches of one modality each.

    Raises:
        ValueError: If an epoch cannot fill a global batch, or two arguments exclude each other.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        samples: int | BatchSchedule | None = None,
        tokens: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        mixture: Mixture | None = None,
        media: np.ndarray | None = None,
    ) -> None:
        self._lengths = lengths
        self._samples = samples
        self._tokens = tokens
        self._seed = seed
        self._drop_last = drop_last
        self._mixture = mixture
        self._media = media
        if isinstance(samples, BatchSchedule) and media is not None:
            raise ValueError(
                "`global_batch_size` must be one number with modality='per_step', got: a schedule. Leave one of them "
                'out.'
            )
        self._kept_epoch: int | None = None
        self._kept_batches: list[np.ndarray] = []
        """Global batches of the epoch that was asked for last. Each is a view of the order of the epoch."""
        self._places = [RunPlace(0, 0)]
        """With a schedule: how far the run is at the start of each epoch, for as many epochs as were needed."""
        if drop_last:
            self._check_fills_one()

    @property
    def samples_per_batch(self) -> int:
        """Samples of a global batch. With a schedule of the largest one; with `tokens` on average, rounded up."""
        if isinstance(self._samples, BatchSchedule):
            return max(self._samples.sizes)
        if self._samples is not None:
            return self._samples
        assert self._tokens is not None
        return mean_samples(self._lengths, self._tokens)

    @property
    def is_same_every_epoch(self) -> bool:
        """Whether every epoch has equally many global batches."""
        if isinstance(self._samples, BatchSchedule):
            return False
        # Cut by tokens, epochs have equally many global batches if they have the same samples.
        return self._tokens is None or self._mixture is None or self._mixture.has_whole_passes

    def identity(self) -> dict[str, Any]:
        """Returns the arguments that decide which samples a global batch holds, as plain values."""
        identity: dict[str, Any] = {}
        depends_on_lengths = True
        if isinstance(self._samples, BatchSchedule):
            identity['global_batch_size'] = self._samples.plain()
            depends_on_lengths = self._samples.unit == 'tok'
        elif self._samples is not None:
            identity['global_batch_size'] = self._samples
            depends_on_lengths = False
        else:
            identity['global_batch_tokens'] = self._tokens
        if depends_on_lengths:
            identity['checksum_of_lengths'] = zlib.crc32(np.ascontiguousarray(self._lengths).tobytes())
        return identity

    def of_epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the samples of each global batch of an epoch."""
        # Kept, because they take time in proportion to the dataset.
        if epoch != self._kept_epoch:
            self._kept_batches = self._cut(epoch)
            self._kept_epoch = epoch
        return self._kept_batches

    def _cut(self, epoch: int) -> list[np.ndarray]:
        if isinstance(self._samples, BatchSchedule):
            (order,) = self._orders(epoch)
            place = self._place_of(epoch)
            batches, _ = self._samples.cut(order, self._lengths, place, self._drop_last)
            return batches
        if self._samples is None:
            assert self._tokens is not None
            batches_of_orders = []
            for order in self._orders(epoch):
                batches_of_orders.append(cut_by_tokens(order, self._lengths, self._tokens, drop_last=self._drop_last))
            return merged_evenly(batches_of_orders)
        if self._mixture is None:
            return torchs_batches(
                len(self._lengths), self._samples, drop_last=self._drop_last, seed=self._seed, epoch=epoch
            )
        return mixed_batches(
            self._mixture, self._samples, drop_last=self._drop_last, seed=self._seed, epoch=epoch, media=self._media
        )

    def _orders(self, epoch: int) -> list[np.ndarray]:
        """Returns the samples of an epoch in their order: all of them, or those of each modality."""
        if self._mixture is None:
            return [torchs_order(len(self._lengths), self._seed, epoch)]
        return mixed_orders(self._mixture, seed=self._seed, epoch=epoch, media=self._media)

    def _place_of(self, epoch: int) -> RunPlace:
        """Returns how far the run is when an epoch starts, if all epochs before it are read to their end."""
        assert isinstance(self._samples, BatchSchedule)
        while len(self._places) <= epoch:
            place = self._places[-1]
            if self._samples.is_last_stage(place):
                return place  # later places give the same size
            (order,) = self._orders(len(self._places) - 1)
            _, next_place = self._samples.cut(order, self._lengths, place, self._drop_last)
            self._places.append(next_place)
        return self._places[epoch]

    def _check_fills_one(self) -> None:
        """Raises ValueError if an epoch does not fill a global batch, because `drop_last` would leave nothing of it."""
        if self._tokens is not None:
            for order in self._orders(epoch=0):
                tokens = int(self._lengths[order].sum())
                if tokens < self._tokens:
                    raise ValueError(
                        '`global_batch_tokens` must be at most the tokens of an epoch with `drop_last` (of each '
                        f'modality with `per_step`), got: {self._tokens} > {tokens}. Lower it or set drop_last=False.'
                    )
            return
        samples = len(self._lengths) if self._mixture is None else self._mixture.num_samples
        if samples < self.samples_per_batch:
            raise ValueError(
                f'`global_batch_size` must be at most the dataset with `drop_last`, got: {self.samples_per_batch} > '
                f'{samples} samples. Lower it or set drop_last=False.'
            )


def cut_by_tokens(
    order: np.ndarray,
    lengths: np.ndarray,
    tokens: int,
    *,
    drop_last: bool,
) -> list[np.ndarray]:
    """Returns global batches of about equally many tokens, as views of the order.

    Global batch ``b`` takes samples until the next one would lift the tokens of the epoch above ``(b + 1) * tokens``.
    So a step differs from `tokens` by less than the longest sample, and the steps together stay within one sample of
    ``(b + 1) * tokens``: tokens that one step lacks go to the next. The number of global batches is
    ``ceil(sum / tokens)``, or ``floor(sum / tokens)`` with `drop_last`, for every order of the samples. So all epochs
    have equally many steps, which trainers expect. The usual rule counts each global batch from zero. It keeps no such
    bound, and the number of its global batches depends on the order.

    Args:
        order: Samples of the epoch, each with at most `tokens` tokens.
        lengths: Tokens of each sample of the dataset.
        tokens: Tokens of a global batch.
        drop_last: Whether samples that do not fill the last global batch are left out.
    """
    tokens_so_far = np.cumsum(lengths[order])
    total = int(lengths[order].sum())
    num_batches = total // tokens if drop_last else -(-total // tokens)
    # No sample is longer than `tokens`, so between two multiples of it at least one sample ends: no batch is empty.
    multiples = tokens * np.arange(1, num_batches + 1)
    ends = np.searchsorted(tokens_so_far, multiples, side='right').tolist()
    starts = [0, *ends][:-1]
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def torchs_order(num_samples: int, seed: int | None, epoch: int) -> np.ndarray:
    """Returns the samples as torch's DistributedSampler orders them. Without a seed they keep the dataset's order."""
    if seed is None:
        return np.arange(num_samples)
    return permutation(num_samples, seed + epoch)


def torchs_batches(
    num_samples: int,
    global_batch_size: int,
    *,
    drop_last: bool,
    seed: int | None,
    epoch: int,
) -> list[np.ndarray]:
    """Returns the samples of each global batch of one epoch, as torch's DistributedSampler orders them, each once.

    Rank ``r`` of ``W`` gets positions ``r, r + W, ...`` of torch's order, ``G / W`` of them in a batch. So the ranks
    together get positions ``b * G`` to ``(b + 1) * G``, for every ``W``. Without `drop_last` torch also repeats the
    start of the order until every rank has equally many samples, so that the last step of an epoch depends on ``W``.
    That is left out here: the last global batch only holds the samples that are left. Without a seed samples keep the
    order of the dataset.
    """
    order = torchs_order(num_samples, seed, epoch)
    end = num_samples
    if drop_last:
        end -= num_samples % global_batch_size
    return cut_into_batches(order[:end], global_batch_size)
