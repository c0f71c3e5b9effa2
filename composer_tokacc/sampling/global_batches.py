# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which samples make each global batch: the order of an epoch, cut by samples, by a schedule, or by tokens.

Nothing here depends on the number of ranks, so a run makes the same steps on any number of them. The one exception is
:func:`check_global_batch`, which refuses a global batch that is not a multiple of this number.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from composer_tokacc.arguments import check_count
from composer_tokacc.plan_agreement import extended_checksum
from composer_tokacc.planning import mean_samples
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.mixture import Mixture, merged_evenly, mixed_orders, permutation

Stages = Sequence[tuple[int | str, int]]
"""Start and size of each stage of a schedule. A start is a step, or a text: ``'1000ba'`` or ``'5000000tok'``."""

_START = re.compile(r'(\d+(?:_\d+)*)(ba|tok)?')
"""A start as text: its number, such as ``5000`` or ``5_000``, and its unit. Without a unit it is a step."""


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the global batch in the course of a run. A size that never changes is a schedule of one stage.

    In the methods, ``trained`` is a number of steps or of tokens, in the unit of the schedule: how many the run has
    trained so far.
    """

    unit: str
    """The unit of `starts`: optimizer steps ('ba') or trained tokens ('tok'). All tokens count, also without loss."""
    starts: list[int]
    """Where each stage starts: 0 for the first one, and rising."""
    sizes: list[int]
    """Number of samples of a global batch in each stage."""

    @classmethod
    def from_stages(cls, stages: int | Stages) -> BatchSchedule:
        """Returns the schedule of a size, or of a list of (start, size). Raises ValueError if these are malformed."""
        if not isinstance(stages, Sequence):
            stages = [(0, stages)]
        starts: list[int] = []
        sizes: list[int] = []
        units: set[str] = set()
        for stage in stages:
            if not isinstance(stage, Sequence) or len(stage) != 2:
                raise _not_a_schedule(stages)
            match = _START.fullmatch(str(stage[0]))
            if match is None:
                raise _not_a_schedule(stages)
            start = int(match[1])
            if start > 0:  # 0 is the same in every unit
                units.add(match[2] or 'ba')
            size = stage[1]
            check_count('global_batch_size', size)
            starts.append(start)
            sizes.append(int(size))  # not an integer of numpy, because checkpoints hold the sizes
        begins_at_0 = len(starts) > 0 and starts[0] == 0
        is_rising = starts == sorted(set(starts))
        if not begins_at_0 or not is_rising or len(units) > 1:
            raise _not_a_schedule(stages)
        unit = 'tok' if 'tok' in units else 'ba'
        return cls(unit, starts, sizes)

    def stage_after(self, trained: int) -> int:
        """Returns the index of the stage that the next step belongs to, after ``trained`` steps or tokens."""
        return bisect_right(self.starts, trained) - 1

    def cut(
        self,
        order: np.ndarray,
        lengths: np.ndarray,
        trained: int,
        drop_last: bool,
    ) -> tuple[list[np.ndarray], int]:
        """Cuts an epoch into global batches. Returns them, and ``trained`` after the epoch.

        Args:
            order: Indices of the samples, in the order of the epoch.
            lengths: Tokens of each sample of the dataset.
            trained: Steps or tokens that the run has trained before the epoch.
            drop_last: Whether samples that do not fill the last global batch are left out.
        """
        batches = []
        num_cut = 0  # samples in the batches so far
        while num_cut < len(order):
            size = self.sizes[self.stage_after(trained)]
            batch = order[num_cut : num_cut + size]
            if drop_last and len(batch) < size:
                break
            batches.append(batch)
            num_cut += len(batch)
            if self.unit == 'ba':
                trained += 1
            else:
                trained += int(lengths[batch].sum())
        return batches, trained


def _not_a_schedule(stages: object) -> InvalidInputError:
    """Returns the error for a malformed schedule."""
    return InvalidInputError(
        '`global_batch_size` must be a number, or a list of (start, size) whose starts rise from 0 and are all steps '
        f"or all tokens, got: {stages!r:.200}. For example [(0, 768), ('5000000tok', 1536)]."
    )


class GlobalBatches:
    """The samples of each global batch of a run. They only depend on these arguments and the epoch.

    Without a mixture an epoch has the order of torch's DistributedSampler. There rank ``r`` of ``W`` reads positions
    ``r``, ``r + W``, ``r + 2 W`` and so on of the order. With global batches of ``G`` samples it reads ``G / W`` of
    them in a step. So in step ``b`` the ranks together read positions ``b * G`` to ``(b + 1) * G - 1``, for every
    ``W``. These are the global batches here, too.

    One thing differs. Without `drop_last` torch repeats the start of the order until every rank has equally many
    samples. Then the last step of an epoch depends on ``W``. Here the last global batch holds just the samples that are
    left.

    Args:
        lengths: Tokens of each sample, int64 (n,).
        samples: Number of samples of a global batch, or its schedule.
        tokens: Instead of `samples`, number of tokens of a global batch; see :func:`cut_by_tokens`.
        seed: Seed of the order. None: samples keep the order of the dataset.
        drop_last: Whether samples that do not fill the last global batch of an epoch are left out. With a mixture and
            one size of the global batch they begin the next epoch, which is as long as the others.
        mixture: Shares of several datasets, whose sizes add up to `n`. The sampler checks that.
        media: Number of the modality of each sample, int64 (n,), for global batches of one modality each. Only given
            with a mixture.

    Raises:
        ValueError: If `samples` is malformed, the first epoch cannot fill a global batch with `drop_last`, a sample has
            more than `tokens` tokens, or two arguments exclude each other.
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
        self._lengths = lengths
        self._seed = seed
        self._drop_last = drop_last
        self._mixture = mixture
        self.media = media  # the sampler reads it
        # Either `_schedule` or `_tokens` is set.
        self._schedule: BatchSchedule | None = None
        """Number of samples of a global batch, in each stage of the run. None: an epoch is cut by tokens."""
        self._tokens = 0
        """Number of tokens of a global batch. 0: an epoch is cut by samples."""
        if samples is not None:
            self._schedule = BatchSchedule.from_stages(samples)
        if tokens is not None:
            check_count('global_batch_tokens', tokens)
            self._tokens = int(tokens)
            # A longer sample could leave a global batch without samples, see `cut_by_tokens`.
            check_cap('global_batch_tokens', self._tokens, lengths)
        # The order of each modality is cut by itself, but the stages of a schedule count the steps of all modalities.
        if media is not None and len(self.sizes) > 1:
            raise InvalidInputError(
                "`global_batch_size` must be one number with modality='per_step', got: a schedule. Leave one of them "
                'out.'
            )
        self._kept_epoch: int | None = None
        """The epoch of the last call of :meth:`of_epoch`."""
        self._kept_batches: list[np.ndarray] = []
        """Global batches of that epoch. Each is a view of the order of the epoch."""
        self._trained_before_epochs = [0]
        """The steps or tokens trained before each epoch, see `_trained_before`. Epochs are added when needed."""
        if drop_last:
            self._check_epoch_fills_a_batch()

    @property
    def sizes(self) -> list[int]:
        """Number of samples of a global batch in each stage of the run; with `tokens` the mean, rounded up."""
        if self._schedule is not None:
            return self._schedule.sizes
        return [mean_samples(self._lengths, self._tokens)]

    @property
    def has_equal_epochs(self) -> bool:
        """Whether every epoch has equally many global batches. Their samples may differ."""
        if self._schedule is not None:
            return len(self.sizes) == 1
        # Cut by tokens, the number of global batches only depends on the sum of the tokens. It is the same in every
        # epoch if the samples are the same.
        return self._mixture is None or self._mixture.has_whole_passes

    def identity(self) -> dict[str, Any]:
        """Returns the arguments that decide which samples a global batch holds, as plain values by name.

        The sampler adds the arguments that it has in common with torch's sampler, such as the seed.
        """
        identity: dict[str, Any] = {}
        if self._mixture is not None:
            identity['quotas'] = [str(quota) for quota in self._mixture.quotas]
            identity['sizes'] = list(self._mixture.sizes)
            identity['modality'] = 'mixed'
            if self.media is not None:
                identity['modality'] = 'per_step'
                identity['checksum_of_media'] = extended_checksum(0, self.media.tobytes())
        identity['num_samples'] = len(self._lengths)
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
            # The lengths decide where a global batch, or a stage, ends. Unlike `checksum_of_media`, which came later,
            # this is the full CRC-32, because saved states hold it.
            identity['checksum_of_lengths'] = zlib.crc32(self._lengths.tobytes())
        return identity

    def of_epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the samples of each global batch of an epoch."""
        # Kept, because shuffling and cutting take time in proportion to the dataset.
        if epoch != self._kept_epoch:
            self._kept_batches = self._cut_epoch(epoch)
            self._kept_epoch = epoch
        return self._kept_batches

    def _cut_epoch(self, epoch: int) -> list[np.ndarray]:
        """Orders the samples of an epoch, and cuts them into global batches."""
        batches_of_orders = []
        for order in self._orders(epoch):
            if self._schedule is None:
                batches = cut_by_tokens(order, self._lengths, self._tokens, drop_last=self._drop_last)
            else:
                trained = self._trained_before(epoch, self._schedule)
                batches, _ = self._schedule.cut(order, self._lengths, trained, self._drop_last)
            batches_of_orders.append(batches)
        # The batches of each modality are spread evenly over the epoch. Those of a single order stay in their order.
        return merged_evenly(batches_of_orders)

    def _orders(self, epoch: int) -> list[np.ndarray]:
        """Returns one order of the samples of an epoch; with `media` one for each modality."""
        if self._mixture is not None:
            # With `drop_last` and one size, the samples that do not fill the last global batch begin the next epoch. So
            # the mixture must make orders of full global batches. With several sizes or by tokens the samples are
            # dropped, because their number is only known after the cut.
            full_batch_size = None
            if self._drop_last and self._schedule is not None and len(self.sizes) == 1:
                full_batch_size = self.sizes[0]
            return mixed_orders(
                self._mixture,
                seed=self._seed,
                epoch=epoch,
                media=self.media,
                full_batch_size=full_batch_size,
            )
        if self._seed is None:
            return [np.arange(len(self._lengths))]
        return [permutation(len(self._lengths), self._seed + epoch)]

    def _trained_before(self, epoch: int, schedule: BatchSchedule) -> int:
        """Returns the steps or tokens trained before an epoch, if all earlier epochs are read to their end.

        Epochs are counted only until one begins in the last stage. For later epochs the number before that one is
        returned. It is too low, but that makes no difference: the last stage has no end, so it decides all later sizes.
        """
        trained_before_epochs = self._trained_before_epochs
        last_stage = len(schedule.starts) - 1
        while len(trained_before_epochs) <= epoch:
            last_counted_epoch = len(trained_before_epochs) - 1
            trained = trained_before_epochs[last_counted_epoch]
            if schedule.stage_after(trained) == last_stage:
                return trained
            (order,) = self._orders(last_counted_epoch)  # only one, because a schedule of stages excludes modalities
            _, trained_before_next = schedule.cut(order, self._lengths, trained, self._drop_last)
            trained_before_epochs.append(trained_before_next)
        return trained_before_epochs[epoch]

    def _check_epoch_fills_a_batch(self) -> None:
        """Raises ValueError if the first epoch is smaller than the largest global batch, which it could never fill.

        With global batches by tokens, each modality of the epoch must fill one. Then a later epoch of a mixture may
        still be too small, if it has other samples than the first. Counted by samples, all epochs are equally large.
        """
        if self._schedule is None:
            option = 'global_batch_tokens'
            unit = 'tokens'
            size_of_batch = self._tokens
            # Each modality is cut by itself, and drops the samples that do not fill a global batch.
            tokens_of_orders = [self._lengths[order].sum() for order in self._orders(epoch=0)]
            size_of_epoch = int(min(tokens_of_orders))
        else:
            option = 'global_batch_size'
            unit = 'samples'
            size_of_batch = max(self.sizes)
            # Modalities are not checked one by one, because samples that do not fill a batch begin the next epoch.
            size_of_epoch = len(self._lengths)
            if self._mixture is not None:
                size_of_epoch = self._mixture.num_samples
        if size_of_epoch < size_of_batch:
            raise InvalidInputError(
                f'`{option}` must be at most the {unit} of an epoch with `drop_last` (of each modality with `per_step` '
                f'and tokens), got: {size_of_batch} > {size_of_epoch} {unit}. Lower it or set drop_last=False.'
            )


def check_global_batch(global_batch_size: int, num_ranks: int) -> None:
    """Raises ValueError unless the number of samples of a global batch is a multiple of the number of ranks."""
    check_count('global_batch_size', global_batch_size)
    if global_batch_size % num_ranks:
        next_multiple = -(-global_batch_size // num_ranks) * num_ranks
        raise InvalidInputError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_ranks} ranks. Set it to {next_multiple}, or launch another number of ranks.'
        )


def check_cap(option: str, cap: int, sizes: np.ndarray) -> None:
    """Raises ValueError if a single sample is over a cap that limits the sum of several samples.

    Args:
        option: The option that sets the cap.
        cap: The cap.
        sizes: Size of each sample, (n,).
    """
    largest = int(sizes.argmax())
    if sizes[largest] > cap:
        raise InvalidInputError(
            f'`{option}` must be at least the size of the largest sample, got: {cap} < {sizes[largest]} (sample '
            f'{largest}). Raise it, or leave the sample out.'
        )


def cut_by_tokens(
    order: np.ndarray,
    lengths: np.ndarray,
    tokens: int,
    *,
    drop_last: bool,
) -> list[np.ndarray]:
    """Returns global batches of about equally many tokens, as views of the order.

    The first ``b`` global batches together are the longest start of the order with at most ``b * tokens`` tokens. They
    fall short of ``b * tokens`` by less than one sample. So a step differs from `tokens` by less than the longest
    sample; only the last step of an epoch, with the samples that are left, may have far fewer. The number of global
    batches is ``ceil(sum / tokens)``, or ``floor(sum / tokens)`` with `drop_last`, for every order of the samples. So
    all epochs of the same samples have equally many steps, which trainers expect.

    For example, samples of 3, 3, 3 and 1 tokens are cut at multiples of `tokens` = 5. The samples end at 3, 6, 9 and 10
    tokens. Up to 5 tokens there is one sample, and up to 10 there are all four. So the batches have 3 and 7 tokens.

    The usual rule fills each global batch up to `tokens` by itself. Then the tokens by which each one falls short add
    up, and the number of global batches depends on the order.

    Args:
        order: Indices of the samples in the order of the epoch, each with at most `tokens` tokens.
        lengths: Tokens of each sample of the dataset.
        tokens: Number of tokens of a global batch.
        drop_last: Whether samples that do not fill the last global batch are left out.
    """
    tokens_so_far = np.cumsum(lengths[order])
    total = int(lengths[order].sum())
    num_batches = total // tokens
    if not drop_last and total % tokens > 0:
        num_batches += 1
    # No sample is longer than `tokens`, so between two multiples of it at least one sample ends: no batch is empty.
    multiples = tokens * np.arange(1, num_batches + 1)
    # For each global batch the number of samples that end at or before its multiple.
    ends = np.searchsorted(tokens_so_far, multiples, side='right')
    # The last part holds the samples after the last multiple. These are dropped; without `drop_last` there are none.
    *batches, _ = np.split(order, ends)
    return batches
