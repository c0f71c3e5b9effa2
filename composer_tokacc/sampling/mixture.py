# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Global batches of runs with several datasets, or with one modality a step; and token weights for shares of a step.

A dataset is read as an endless sequence: pass after pass, each in another order. The sequences of all datasets are
merged evenly into one, and an epoch of the run is a stretch of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from composer_tokacc.planning import Table, checked_table
from composer_tokacc.refusals import InvalidInputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixture:
    """Shares of several datasets, which follow one another in a ``torch.utils.data.ConcatDataset``.

    Args:
        sizes: Samples of each dataset.
        epochs: How often each is read in one epoch of the run; 0.5 gives one half in one epoch and the other half in
            the next. Default: once each.
        weights: Instead, the relative share of each in every global batch; an epoch then has ``sum(sizes)`` samples.

    Raises:
        ValueError: If an argument is out of range.
    """

    sizes: Sequence[int]
    epochs: Sequence[float] | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        sizes = checked_table('sizes', self.sizes, least=1).tolist()
        object.__setattr__(self, 'sizes', sizes)
        if self.epochs is not None and self.weights is not None:
            raise InvalidInputError('Only one of `epochs` and `weights` must be given, got: both. Drop one.')
        # An upper limit, because the order of an epoch is held in memory.
        _check_rates('epochs', self.epochs, len(sizes), highest=1e4)
        _check_rates('weights', self.weights, len(sizes), highest=1e9)

    @classmethod
    def from_loss_shares(
        cls,
        sizes: Sequence[int],
        shares: Sequence[float],
        loss_tokens: Table,
    ) -> Mixture:
        """Returns a mixture by shares of the loss tokens, not of the samples.

        The weight of a dataset is its share divided by the mean number of loss tokens of its samples. So the share is
        exact over whole passes. In a single global batch the number of samples of each dataset is right to within one
        or two. The number of tokens is less exact, because samples differ in length.

        Args:
            sizes: Samples of each dataset.
            shares: Relative share of each dataset in the loss tokens.
            loss_tokens: Loss tokens of each sample of all datasets, (sum(sizes),).

        Raises:
            ValueError: If a dataset has no loss tokens, or an argument is out of range.
        """
        checked_shares = checked_table('shares', shares, len(sizes), dtype=np.float64)
        tokens = checked_table('loss_tokens', loss_tokens, int(np.sum(sizes)))
        tokens_of_datasets = np.split(tokens, np.cumsum(sizes)[:-1])
        means = [tokens_of_dataset.mean() for tokens_of_dataset in tokens_of_datasets]
        if min(means) == 0:
            raise InvalidInputError(
                f'Every dataset must have `loss_tokens`, got: means of {means}. Leave out the datasets without any.'
            )
        weights = checked_shares / np.array(means)
        return cls(sizes, weights=weights.tolist())

    @property
    def quotas(self) -> list[Fraction]:
        """Samples of each dataset in an epoch, on average over many."""
        if self.weights is not None:
            weights = [Fraction(float(weight)) for weight in self.weights]
            num_samples = Fraction(sum(self.sizes))
            samples_per_weight = num_samples / sum(weights, Fraction(0))
            return [samples_per_weight * weight for weight in weights]
        epochs = self.epochs
        if epochs is None:
            return [Fraction(size) for size in self.sizes]
        quotas = []
        for size, times in zip(self.sizes, epochs, strict=True):
            quotas.append(size * Fraction(float(times)))
        return quotas

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return max(round(sum(self.quotas)), 1)

    @property
    def has_whole_passes(self) -> bool:
        """Whether an epoch reads each dataset a whole number of times, so that all epochs have the same samples."""
        sizes_and_quotas = zip(self.sizes, self.quotas, strict=True)
        return all(quota % size == 0 for size, quota in sizes_and_quotas)


def _check_rates(
    name: str,
    values: Sequence[float] | None,
    num_datasets: int,
    *,
    highest: float,
) -> None:
    """Raises ValueError unless each dataset has a positive number up to the highest one."""
    if values is None:
        return
    rates = checked_table(name, values, num_datasets, dtype=np.float64)
    if not (rates.min() > 0 and rates.max() <= highest):
        raise InvalidInputError(f'`{name}` must be above 0 and at most {highest:g}, got: {rates.tolist()}.')


class LossShares:
    """Weights of tokens that give each dataset its share of the weight of every global batch.

    If a dataset has share ``s`` and ``t`` of the ``T`` loss tokens of the step, its tokens weigh ``s T / t``, so that a
    token weighs 1 on average. That is exact in each step. A dataset without loss tokens in a step leaves its share to
    the others, which is logged once.

    Args:
        sizes: Samples of each dataset, which follow one another.
        shares: Share of each dataset in the weight; they add up to 1.
        loss_tokens: Loss tokens of each sample of all datasets, (sum(sizes),).

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shares: Sequence[float],
        loss_tokens: Table,
    ) -> None:
        self.shares = checked_table('shares', shares, len(sizes), dtype=np.float64)
        sum_of_shares = self.shares.sum()
        if self.shares.min() == 0 or abs(sum_of_shares - 1) > 1e-6:
            raise InvalidInputError(
                f'`shares` must be positive, one for each dataset, and add up to 1, got: {list(shares)}.'
            )
        self.loss_tokens = checked_table('loss_tokens', loss_tokens, sum(sizes))
        self.sizes = list(sizes)
        self._dataset_of_sample = np.repeat(np.arange(len(sizes)), sizes)
        self._has_warned = False

    def weights(self, window: np.ndarray) -> np.ndarray:
        """Returns the weight of a token of each sample of a global batch, float64 (samples,)."""
        datasets = self._dataset_of_sample[window]
        # Loss tokens of each dataset in this batch.
        num_datasets = len(self.shares)
        tokens = np.bincount(datasets, self.loss_tokens[window], num_datasets)
        is_absent = tokens == 0
        if is_absent.any() and not self._has_warned:
            self._has_warned = True
            log.warning(
                'A global batch has no loss tokens of dataset %d: the others have its share of that step. A larger '
                '`global_batch_size`, or more `epochs` of it, keeps it in every step.',
                int(is_absent.argmax()),
            )
        shares = np.where(is_absent, 0, self.shares)
        # The lower limits only avoid a division by zero: then the weight is 0.
        total_share = max(shares.sum(), 1e-9)
        weight_of_dataset = shares * tokens.sum() / np.maximum(tokens, 1) / total_share
        return weight_of_dataset[datasets]


def permutation(size: int, seed: int) -> np.ndarray:
    """Returns a random order of the numbers below `size`, as torch's DistributedSampler draws it, int64 (size,)."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(size, generator=generator).numpy()


@dataclass(frozen=True)
class _Stream:
    """The endless sequence of the samples of a dataset, or of its samples of one modality. See the module."""

    samples: np.ndarray
    quota: Fraction

    def read(
        self,
        items: np.ndarray,
        entropy: Sequence[int] | None,
    ) -> np.ndarray:
        """Returns some items of the endless sequence.

        Args:
            items: Their numbers, from 0, ascending, int64.
            entropy: Seeds of the order. None: every pass keeps the order of the dataset.
        """
        size = len(self.samples)
        if entropy is None:
            return self.samples[items % size]
        passes, starts = np.unique(items // size, return_index=True)
        items_of_passes = np.split(items, starts[1:])
        pieces = []
        # Not strict: without items no pass is read, but `np.split` returns one empty part.
        for number, items_of_pass in zip(passes.tolist(), items_of_passes, strict=False):
            # Every pass has another seed.
            sequence = np.random.SeedSequence([*entropy, number])
            (seed,) = sequence.generate_state(1).tolist()
            order = permutation(size, seed)
            indices = order[items_of_pass % size]
            pieces.append(self.samples[indices])
        return np.concatenate([items[:0], *pieces])


def mixed_orders(
    mixture: Mixture,
    *,
    seed: int | None,
    epoch: int,
    media: np.ndarray | None = None,
    samples_to_fill: int | None = None,
) -> list[np.ndarray]:
    """Returns the samples of one epoch in their order, or with `media` one order for each modality.

    Each dataset is an endless sequence. They are merged evenly into one endless sequence, so that every stretch of it
    has each dataset's share to within one or two samples. The epochs of the run are stretches of it, one after the
    other. So a dataset that is smaller than a global batch keeps its share, too.

    Args:
        mixture: Shares of the datasets.
        seed: Seed of the orders. None: datasets keep their order.
        epoch: Number of the epoch.
        media: Modality of each sample, int (n,).
        samples_to_fill: Size of a global batch, if the epoch only has full ones. The next epoch begins with the samples
            that are left.
    """
    groups = _streams(mixture, media)
    # Exact fractions, so that no rounding moves a sample over thousands of epochs.
    quotas = []
    for group in groups:
        quotas_of_group = [stream.quota for stream in group]
        quotas.append(sum(quotas_of_group, Fraction(0)))
    # For each group: where the epoch begins and ends in the endless sequence, in single samples or in full batches. It
    # begins where the last epoch has ended.
    if samples_to_fill is None:
        size_of_piece = 1
        # Every epoch has the same number of samples of each group.
        counts = counts_of_first(mixture.num_samples, quotas)
        begins = [epoch * count for count in counts]
        ends = [(epoch + 1) * count for count in counts]
    else:
        # A rare modality may fill a batch only every few epochs.
        size_of_piece = samples_to_fill
        num_batches = mixture.num_samples // samples_to_fill
        begins = counts_of_first(epoch * num_batches, quotas)
        ends = counts_of_first((epoch + 1) * num_batches, quotas)
    orders = []
    for group, begin, end in zip(groups, begins, ends, strict=True):
        orders.append(_merged(group, begin * size_of_piece, end * size_of_piece, seed))
    return orders


def merged_evenly(batches_of_orders: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns the global batches of several orders (of several modalities) as one list, merged evenly."""
    counts = [len(batches) for batches in batches_of_orders]
    begins = [0] * len(counts)
    quotas = [Fraction(count) for count in counts]
    numbers, places = interleave(begins, counts, quotas)
    merged = []
    for number, place in zip(numbers, places, strict=True):
        batches = batches_of_orders[number]
        merged.append(batches[place])
    return merged


def _streams(mixture: Mixture, media: np.ndarray | None) -> list[list[_Stream]]:
    """Returns the sequences to merge: one group of them, or one group for each modality."""
    num_samples = sum(mixture.sizes)
    ends = np.cumsum(mixture.sizes)
    datasets = np.split(np.arange(num_samples), ends[:-1])
    if media is None:
        media = np.zeros(num_samples, dtype=np.int64)
    groups = []
    for modality in np.unique(media):
        group = []
        for samples, quota in zip(datasets, mixture.quotas, strict=True):
            samples_of_modality = samples[media[samples] == modality]
            if len(samples_of_modality):
                share = quota * len(samples_of_modality) / len(samples)
                group.append(_Stream(samples_of_modality, share))
        groups.append(group)
    return groups


def _merged(
    group: list[_Stream],
    begin: int,
    end: int,
    seed: int | None,
) -> np.ndarray:
    """Returns samples from place `begin` to `end` of the evenly merged sequences of a group."""
    quotas = [stream.quota for stream in group]
    begins = counts_of_first(begin, quotas)
    ends = counts_of_first(end, quotas)
    sources, items = interleave(begins, ends, quotas)
    samples = np.empty_like(items)
    for number, stream in enumerate(group):
        is_of_stream = sources == number
        entropy = None
        if seed is not None:
            # The first sample tells the stream from all others. SeedSequence takes no negative numbers.
            entropy = (seed % 2**32, int(stream.samples[0]))
        samples[is_of_stream] = stream.read(items[is_of_stream], entropy)
    return samples


# Endless sequences merged evenly: after any number of items each has had its share, to within one.


def counts_of_first(num_items: int, quotas: Sequence[Fraction]) -> list[int]:
    """Returns how many of the first items of the merged sequence each sequence has given.

    Item ``j`` of a sequence with quota ``q`` stands at ``(j + 1/2) / q`` (Sainte-Laguë's divisor method), so counts
    never fall when `num_items` grows, and add up to it. If quotas are integers, ``sum(quotas)`` items hold exactly
    ``quotas``. Ties go to the earlier sequence.
    """
    half = Fraction(1, 2)
    # First all items up to a place so early that they cannot be more than `num_items`.
    place = Fraction(max(num_items - len(quotas), 0)) / sum(quotas)
    counts = [int(place * quota + half) for quota in quotas]
    # Then the few that are missing, one by one: each time the item that stands first.
    for _ in range(num_items - sum(counts)):
        places = []
        for count, quota in zip(counts, quotas, strict=True):
            places.append((count + half) / quota)
        first = places.index(min(places))
        counts[first] += 1
    return counts


def interleave(
    begins: Sequence[int],
    ends: Sequence[int],
    quotas: Sequence[Fraction],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a stretch of the merged sequence: which sequence stands at each place, and which of its items.

    The stretch begins with item ``begins`` of each sequence and stops before item ``ends``.
    """
    counts = np.subtract(ends, begins)
    numbers = np.arange(len(quotas))
    sources = np.repeat(numbers, counts)
    stretches = zip(begins, ends, strict=True)
    items_of_sources = [np.arange(begin, end) for begin, end in stretches]
    items = np.concatenate(items_of_sources)
    quotas_as_floats = np.array(quotas, dtype=np.float64)
    places = (items + 0.5) / quotas_as_floats[sources]
    order = np.argsort(places, kind='stable')
    return sources[order], items[order]
