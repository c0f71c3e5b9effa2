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
from typing import Any, NamedTuple

import numpy as np

from composer_tokacc.planning import check_count, check_kind, mean_samples
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.mixture import Mixture, merged_evenly, mixed_orders, permutation

Stages = Sequence[tuple[int | str, int]]
"""Start and size of each stage of a schedule. A start is a step, or a text: ``'1000ba'`` or ``'5000000tok'``."""

_START = re.compile(r'(\d[\d_]*)(ba|tok)?')


class RunPlace(NamedTuple):
    """How far a run is: its optimizer steps so far, and the tokens that they trained."""

    steps: int
    tokens: int


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the global batch in the course of a run. A size that never changes is a schedule of one stage."""

    unit: str
    """Whether `starts` are optimizer steps ('ba') or trained tokens ('tok')."""
    starts: list[int]
    """Where each stage starts: 0 for the first one, and rising."""
    sizes: list[int]
    """Samples of a global batch in each stage."""

    @classmethod
    def from_stages(cls, stages: int | Stages) -> BatchSchedule:
        """Returns the schedule of a size, or of a list of (start, size). Raises ValueError if the list is malformed."""
        if not isinstance(stages, Sequence):
            stages = [(0, stages)]
        starts: list[int] = []
        sizes: list[int] = []
        units: set[str] = set()
        for stage in stages:
            match = None
            is_pair = isinstance(stage, Sequence) and len(stage) == 2
            if is_pair and not isinstance(stage, str):
                match = _START.fullmatch(str(stage[0]))
            if match is None:
                raise _not_a_schedule(stages)
            start = int(match[1])
            if start > 0:  # 0 is the same in every unit
                units.add(match[2] or 'ba')
            size = stage[1]
            check_count('global_batch_size', size)
            starts.append(start)
            sizes.append(int(size))  # a number of numpy would stand in checkpoints
        is_rising = all(start < next_start for start, next_start in pairwise(starts))
        if starts[:1] != [0] or not is_rising or len(units) > 1:
            raise _not_a_schedule(stages)
        unit = 'tok' if 'tok' in units else 'ba'
        return cls(unit, starts, sizes)

    def stage_at(self, place: RunPlace) -> int:
        """Returns the number of the stage of the step that starts at a place."""
        reached = place.steps if self.unit == 'ba' else place.tokens
        return bisect_right(self.starts, reached) - 1

    def is_last_stage(self, place: RunPlace) -> bool:
        """Whether the size does not change any more."""
        return self.stage_at(place) == len(self.starts) - 1

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
        batches = []
        start = 0
        while start < len(order):
            size = self.sizes[self.stage_at(place)]
            batch = order[start : start + size]
            if drop_last and len(batch) < size:
                break
            batches.append(batch)
            num_tokens = int(lengths[batch].sum())
            place = RunPlace(place.steps + 1, place.tokens + num_tokens)
            start += size
        return batches, place


def _not_a_schedule(stages: object) -> InvalidInputError:
    return InvalidInputError(
        '`global_batch_size` must be a number, or a list of (start, size) whose starts rise from 0 and are all steps '
        f"or all tokens, got: {stages!r:.200}. For example [(0, 768), ('5000000tok', 1536)]."
    )


class GlobalBatches:
    """The samples of each global batch of a run: a pure function of these arguments and the epoch.

    Without a mixture an epoch has the order of torch's DistributedSampler. There rank ``r`` of ``W`` gets positions
    ``r, r + W, ...``, ``G / W`` of them in a batch. So the ranks together get positions ``b * G`` to ``(b + 1) * G``,
    for every ``W``. Without `drop_last` torch also repeats the start of the order until every rank has equally many
    samples, so that the last step of an epoch depends on ``W``. That is left out here: the last global batch only holds
    the samples that are left.

    Args:
        lengths: Tokens of each sample, int64 (n,).
        samples: Samples of a global batch, or their schedule.
        tokens: Tokens of a global batch instead; see :func:`cut_by_tokens`.
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
        samples: int | Stages | None = None,
        tokens: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        mixture: Mixture | None = None,
        media: np.ndarray | None = None,
    ) -> None:
        if (samples is None) == (tokens is None):
            raise InvalidInputError(
                'Exactly one of `global_batch_size` and `global_batch_tokens` must be given, got: '
                f'{samples!r:.80} and {tokens!r}.'
            )
        if mixture is not None:
            check_kind('mixture', mixture, Mixture)
            if sum(mixture.sizes) != len(lengths):
                raise InvalidInputError(
                    f'`mixture` must have the sizes of the datasets in `dataset`, got: {list(mixture.sizes)} for '
                    f'{len(lengths)} samples. Use torch.utils.data.ConcatDataset.'
                )
        self._lengths = lengths
        self._seed = seed
        self._drop_last = drop_last
        self._mixture = mixture
        self._media = media
        self._tokens = 0
        self._schedule: BatchSchedule | None = None
        """None: `_tokens` decides."""
        if samples is not None:
            self._schedule = BatchSchedule.from_stages(samples)
        else:
            check_count('global_batch_tokens', tokens)
            self._tokens = int(tokens or 0)
            check_cap('global_batch_tokens', self._tokens, lengths)
        if media is not None and len(self.sizes) > 1:
            raise InvalidInputError(
                "`global_batch_size` must be one number with modality='per_step', got: a schedule. Leave one of them "
                'out.'
            )
        self._kept_epoch: int | None = None
        """The epoch that :meth:`of_epoch` has returned last."""
        self._kept_batches: list[np.ndarray] = []
        """Global batches of that epoch. Each is a view of the order of the epoch."""
        self._places = [RunPlace(0, 0)]
        """With a schedule: how far the run is at the start of each epoch, as far as that was computed."""
        if drop_last:
            self._check_epoch_fills_a_batch()

    @property
    def sizes(self) -> list[int]:
        """Samples of a global batch in each stage of the run; with `tokens` on average, rounded up."""
        if self._schedule is not None:
            return self._schedule.sizes
        return [mean_samples(self._lengths, self._tokens)]

    @property
    def is_same_every_epoch(self) -> bool:
        """Whether every epoch has equally many global batches."""
        if self._schedule is not None:
            return len(self.sizes) == 1
        # Cut by tokens, epochs have equally many global batches if they have the same samples.
        return self._mixture is None or self._mixture.has_whole_passes

    def identity(self) -> dict[str, Any]:
        """Returns the arguments that decide which samples a global batch holds, as plain values."""
        identity: dict[str, Any] = {}
        schedule = self._schedule
        if schedule is None:
            identity['global_batch_tokens'] = self._tokens
        elif len(schedule.sizes) == 1:
            identity['global_batch_size'] = schedule.sizes[0]
        else:
            stages = []
            for start, size in zip(schedule.starts, schedule.sizes, strict=True):
                stages.append([f'{start}{schedule.unit}', size])
            identity['global_batch_size'] = stages
        if schedule is None or schedule.unit == 'tok':
            lengths = np.ascontiguousarray(self._lengths)
            identity['checksum_of_lengths'] = zlib.crc32(lengths.tobytes())
        return identity

    def of_epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the samples of each global batch of an epoch."""
        # Kept, because they take time in proportion to the dataset.
        if epoch != self._kept_epoch:
            batches_of_orders = []
            for order in self._orders(epoch):
                if self._schedule is None:
                    batches = cut_by_tokens(order, self._lengths, self._tokens, drop_last=self._drop_last)
                else:
                    place = self._place_of(epoch, self._schedule)
                    batches, _ = self._schedule.cut(order, self._lengths, place, self._drop_last)
                batches_of_orders.append(batches)
            self._kept_batches = merged_evenly(batches_of_orders)
            self._kept_epoch = epoch
        return self._kept_batches

    def _orders(self, epoch: int) -> list[np.ndarray]:
        """Returns the order of the samples of an epoch, or one order for each modality."""
        if self._mixture is not None:
            # With `drop_last` the samples that are left at the end of an epoch begin the next one. With sizes that
            # change, the number of these samples is not known, so they are left out.
            full_batch_size = None
            if self._drop_last and self._schedule is not None and len(self.sizes) == 1:
                full_batch_size = self.sizes[0]
            return mixed_orders(
                self._mixture,
                seed=self._seed,
                epoch=epoch,
                media=self._media,
                full_batch_size=full_batch_size,
            )
        if self._seed is None:
            return [np.arange(len(self._lengths))]
        return [permutation(len(self._lengths), self._seed + epoch)]

    def _place_of(self, epoch: int, schedule: BatchSchedule) -> RunPlace:
        """Returns how far the run is when an epoch starts, if all epochs before it are read to their end."""
        while len(self._places) <= epoch:
            place = self._places[-1]
            if schedule.is_last_stage(place):
                return place  # every later place has the same size
            (order,) = self._orders(len(self._places) - 1)  # there is one, because a schedule has no modalities
            _, next_place = schedule.cut(order, self._lengths, place, self._drop_last)
            self._places.append(next_place)
        return self._places[epoch]

    def _check_epoch_fills_a_batch(self) -> None:
        """Raises ValueError if an epoch has too few samples for one global batch. `drop_last` would leave it empty."""
        if self._schedule is None:
            option = 'global_batch_tokens'
            unit = 'tokens'
            size = self._tokens
            orders = self._orders(epoch=0)
            tokens_of_orders = [self._lengths[order].sum() for order in orders]
            available = int(min(tokens_of_orders))
        else:
            option = 'global_batch_size'
            unit = 'samples'
            size = max(self.sizes)
            available = len(self._lengths)
            if self._mixture is not None:
                available = self._mixture.num_samples
        if available < size:
            raise InvalidInputError(
                f'`{option}` must be at most the {unit} of an epoch with `drop_last` (of each modality with `per_step` '
                f'and tokens), got: {size} > {available} {unit}. Lower it or set drop_last=False.'
            )


def check_global_batch(global_batch_size: int, num_ranks: int) -> None:
    """Raises ValueError unless the global batch is a multiple of the number of ranks."""
    check_count('global_batch_size', global_batch_size)
    if global_batch_size % num_ranks:
        next_multiple = -(-global_batch_size // num_ranks) * num_ranks
        raise InvalidInputError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_ranks} ranks. Set it to {next_multiple}, or launch another number of ranks.'
        )


def check_cap(
    option: str,
    cap: int,
    sizes: np.ndarray,
) -> None:
    """Raises ValueError if a sample by itself is larger than a cap on the sum of several samples."""
    highest = int(sizes.argmax())
    if sizes[highest] > cap:
        raise InvalidInputError(
            f'`{option}` must be at least the longest sample, got: {cap} < {sizes[highest]} (sample {highest}). '
            'Raise it, or leave the sample out.'
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
    So a step differs from `tokens` by less than the longest sample. The next step gets the missing tokens, so all steps
    up to ``b`` together stay within one sample of ``(b + 1) * tokens``. The number of global batches is
    ``ceil(sum / tokens)``, or ``floor(sum / tokens)`` with `drop_last`, for every order of the samples. So all epochs
    have equally many steps, which trainers expect. The usual rule counts the tokens of each global batch from zero.
    Then the missing tokens add up, and the number of global batches depends on the order.

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
    batches = []
    for start, end in zip(starts, ends, strict=True):
        batches.append(order[start:end])
    return batches
