# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The order of samples if a run mixes several datasets, or if each of its steps has samples of one modality only.

A dataset is read as an endless *sequence*: all its samples, then all of them again in another order, and so on. One
such reading is a *pass*. The sequences of all datasets are merged evenly into one, and an epoch of the run is a stretch
of it. For example, dataset A has two samples, B has four, and an epoch reads each once. Then its order is BABBAB.

If each step has one modality, the samples of a dataset that have the same modality are a sequence. All sequences of one
modality are a *group*. Each group is merged and cut into global batches by itself, then these are merged evenly.

A dataset can have a share of the loss tokens, not of the samples, in two ways. :meth:`Mixture.from_loss_shares` draws
its samples more or less often. :class:`LossShares` leaves the order of a mixture as it is, and weights the tokens of
each dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch.utils.data import ConcatDataset

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
        weights: Instead of `epochs`, the relative share of each dataset in the ``sum(sizes)`` samples of an epoch.
            Every global batch has it to within a few samples, except with ``modality='per_step'``.

    Raises:
        ValueError: If an argument is out of range, or both `epochs` and `weights` are given.
    """

    sizes: Sequence[int]
    epochs: Sequence[float] | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        sizes = checked_table('sizes', self.sizes, least=1).tolist()
        object.__setattr__(self, 'sizes', sizes)
        if self.epochs is not None and self.weights is not None:
            raise InvalidInputError('Only one of `epochs` and `weights` must be given, got: both. Drop one.')
        if self.epochs is not None:
            # The order of an epoch is held in memory, so `epochs` must not be huge.
            _checked_rates('epochs', self.epochs, len(sizes), highest=1e4)
        if self.weights is not None:
            _checked_rates('weights', self.weights, len(sizes))

    @classmethod
    def from_loss_shares(
        cls,
        sizes: Sequence[int],
        shares: Sequence[float],
        loss_tokens: Table,
    ) -> Mixture:
        """Returns a mixture by shares of the loss tokens, not of the samples.

        The weight of a dataset is its share divided by the mean number of loss tokens of its samples. So the shares are
        exact over epochs that together read every dataset a whole number of times. In a single global batch the number
        of samples of each dataset is right to within a few, see ``mixed_orders``. The number of tokens is less exact,
        because samples differ in length.

        Args:
            sizes: Samples of each dataset.
            shares: Relative share of each dataset in the loss tokens.
            loss_tokens: Loss tokens of each sample of all datasets, (sum(sizes),).

        Raises:
            ValueError: If a dataset has no loss tokens, or an argument is out of range.
        """
        checked_shares = _checked_rates('shares', shares, len(sizes))
        sizes = checked_table('sizes', sizes, least=1).tolist()
        tokens = checked_table('loss_tokens', loss_tokens, sum(sizes))
        ends_of_datasets = np.cumsum(sizes)
        tokens_by_dataset = np.split(tokens, ends_of_datasets[:-1])
        means = np.array([tokens_of_samples.mean() for tokens_of_samples in tokens_by_dataset])
        if means.min() == 0:
            raise InvalidInputError(
                f'Every dataset must have `loss_tokens`, got: means of {means.tolist()}. Leave out those without any.'
            )
        weights = checked_shares / means
        return cls(sizes, weights=weights.tolist())

    @property
    def quotas(self) -> list[Fraction]:
        """Mean number of samples of each dataset in an epoch, as exact fractions.

        For example, of two datasets of 3 and 5 samples with the weights 1 and 2, they are 8/3 and 16/3.
        """
        if self.weights is not None:
            weights = [Fraction(float(weight)) for weight in self.weights]
            num_samples = Fraction(sum(self.sizes))
            samples_per_weight = num_samples / sum(weights, Fraction(0))
            return [samples_per_weight * weight for weight in weights]
        if self.epochs is None:
            return [Fraction(size) for size in self.sizes]
        sizes_and_epochs = zip(self.sizes, self.epochs, strict=True)
        return [size * Fraction(float(epochs)) for size, epochs in sizes_and_epochs]

    @property
    def num_samples(self) -> int:
        """Samples of an epoch. If it has only full batches, ``mixed_orders`` rounds this number down."""
        return max(round(sum(self.quotas)), 1)

    @property
    def has_whole_passes(self) -> bool:
        """Whether the quota of each dataset is a whole number of passes.

        Then all epochs have the same samples, unless an epoch only has full batches (see ``mixed_orders``).
        """
        sizes_and_quotas = zip(self.sizes, self.quotas, strict=True)
        return all(quota % size == 0 for size, quota in sizes_and_quotas)


def _checked_rates(
    name: str,
    values: Sequence[float],
    num_datasets: int,
    *,
    highest: float = 1e300,
) -> np.ndarray:
    """Returns a number for each dataset, float64 (num_datasets,).

    Raises ValueError unless all are above 0 and at most `highest`. The default refuses hardly any number, because only
    the ratio of weights or shares counts. A weight may be a number of tokens, for example.
    """
    rates = checked_table(name, values, num_datasets, dtype=np.float64)
    if not (rates.min() > 0 and rates.max() <= highest):
        raise InvalidInputError(
            f'`{name}` must be above 0 and at most {highest:g}, got: {rates.tolist()}. Leave out a dataset with '
            '0, and lower numbers that are too large.'
        )
    return rates


class LossShares:
    """Gives every token a loss weight, so that each dataset has a fixed share of the summed weights of every step.

    If a dataset has share ``s``, and ``t`` of the ``T`` loss tokens of the step, each of its tokens weighs ``s T / t``.
    So a token weighs 1 on average, and the shares are exact in each step. If a dataset has no loss tokens in a step,
    the others divide its share among them. The log says so once.

    Args:
        sizes: Samples of each dataset, which follow one another in a ``ConcatDataset``.
        shares: Share of each dataset in the summed weights; they add up to 1.
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
        if self.shares.min() <= 0 or abs(self.shares.sum() - 1) > 1e-6:
            raise InvalidInputError(
                f'`shares` must be positive, one for each dataset, and add up to 1, got: {self.shares.tolist()}.'
            )
        self.sizes = checked_table('sizes', sizes).tolist()
        self.loss_tokens = checked_table('loss_tokens', loss_tokens, sum(self.sizes))
        self._dataset_of_sample = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self._has_warned = False

    def weights(self, window: np.ndarray) -> np.ndarray:
        """Returns for each sample of a global batch the weight of each of its tokens, float64 (samples,).

        Args:
            window: Index in the ``ConcatDataset`` of each sample of the global batch.
        """
        datasets = self._dataset_of_sample[window]
        # Loss tokens of each dataset in this batch.
        tokens = np.bincount(datasets, weights=self.loss_tokens[window], minlength=self.shares.size)
        is_absent = tokens == 0
        if is_absent.any() and not self._has_warned:
            self._has_warned = True
            log.warning(
                'A global batch has no loss tokens of dataset %d: the others have its share of that step. A larger '
                '`global_batch_size`, or more `epochs` of this dataset, keeps it in every step.',
                int(is_absent.argmax()),
            )
        shares = np.where(is_absent, 0, self.shares)
        # Each token weighs s T / t, where the shares s of the datasets that are present must add up to 1. Both maxima
        # only avoid a division by zero. The weight of a dataset without tokens is 0 in any case.
        total_share = max(shares.sum(), 1e-9)
        weight_of_dataset = shares * tokens.sum() / np.maximum(tokens, 1) / total_share
        return weight_of_dataset[datasets]


def check_sizes_of_datasets(name: str, sizes: Sequence[int], dataset: object, num_samples: int) -> None:
    """Raises ValueError unless the sizes of a mixture, or of loss shares, can be those of the datasets in `dataset`.

    They must add up to its length. They must not be the sizes of the parts of a ConcatDataset in another order,
    because then each share would apply to the samples of another dataset. For a ConcatDataset of 10 and 20 samples,
    [20, 10] is refused. All other sizes are accepted, such as [5, 25]: a dataset of the mixture may be several parts,
    or a piece of a part, if the class of this part joins datasets in its own way.

    Args:
        name: Name of the argument with the sizes.
        sizes: Samples of each dataset of the mixture.
        dataset: The dataset of the run.
        num_samples: Its length.
    """
    if sum(sizes) != num_samples:
        raise InvalidInputError(
            f'`{name}` must have the sizes of the datasets in `dataset`, got: {list(sizes)} for {num_samples} samples. '
            'Use torch.utils.data.ConcatDataset.'
        )
    if not isinstance(dataset, ConcatDataset):
        return
    sizes_of_nested_parts = _sizes_of_nested_parts(dataset)
    ends_of_parts = np.cumsum(sizes_of_nested_parts)
    ends_of_datasets = np.cumsum(sizes)
    if np.isin(ends_of_datasets, ends_of_parts).all():
        return  # each dataset of the mixture is one or several parts
    # The sizes may be those of the parts in another order. The parts of `a + b + c` are `a + b` and `c`, or all three.
    sizes_of_parts = [len(part) for part in dataset.datasets]  # pyright: ignore[reportArgumentType]
    for sizes_in_order in (sizes_of_parts, sizes_of_nested_parts):
        if sorted(sizes) == sorted(sizes_in_order):
            raise InvalidInputError(
                f'`{name}` must have the sizes of the datasets in the order of `dataset`, got: {list(sizes)} for parts '
                f'of {sizes_in_order} samples.'
            )


def _sizes_of_nested_parts(dataset: ConcatDataset) -> list[int]:
    """Returns the number of samples of a, b and c in ``a + b + c``, which is a ConcatDataset within a ConcatDataset."""
    sizes: list[int] = []
    for part in dataset.datasets:
        if isinstance(part, ConcatDataset):
            sizes += _sizes_of_nested_parts(part)
        else:
            sizes.append(len(part))  # pyright: ignore[reportArgumentType]
    return sizes


def permutation(size: int, seed: int) -> np.ndarray:
    """Returns a random order of the numbers below `size`, as torch's DistributedSampler draws it, int64 (size,)."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(size, generator=generator).numpy()


@dataclass(frozen=True)
class _Sequence:
    """The endless sequence of a dataset, or of its samples of one modality: pass after pass, as the module says."""

    samples: np.ndarray
    """The samples of a pass, in the order of the dataset, int64 (n,)."""
    quota: Fraction
    """Mean number of samples of this sequence in an epoch."""

    def read(
        self,
        positions: np.ndarray,
        seed: int | None,
    ) -> np.ndarray:
        """Returns the samples at some positions of the endless sequence.

        Args:
            positions: Consecutive numbers, int64 (m,). Position 0 is the first sample of the first pass.
            seed: Seed of the run. None: every pass keeps the order of the dataset.
        """
        size = len(self.samples)
        if seed is None or len(positions) == 0:
            return self.samples[positions % size]
        # For example, with 4 samples positions 6 to 9 are the last two places of pass 1, and the first two of pass 2.
        first_pass = int(positions[0]) // size
        last_pass = int(positions[-1]) // size
        orders = []
        for number_of_pass in range(first_pass, last_pass + 1):
            # Every pass of every sequence has another seed. A sample is in one sequence only, so the first sample
            # identifies a sequence. The remainder of the seed is taken because SeedSequence refuses negative numbers.
            entropy = [seed % 2**32, int(self.samples[0]), number_of_pass]
            (seed_of_pass,) = np.random.SeedSequence(entropy).generate_state(1).tolist()
            orders.append(permutation(size, seed_of_pass))
        order_of_passes = np.concatenate(orders)
        begin_of_passes = first_pass * size
        places_in_dataset = order_of_passes[positions - begin_of_passes]
        return self.samples[places_in_dataset]


def mixed_orders(
    mixture: Mixture,
    *,
    seed: int | None,
    epoch: int,
    media: np.ndarray | None = None,
    full_batch_size: int | None = None,
) -> list[np.ndarray]:
    """Returns the samples of one epoch in their order, or with `media` one order for each modality.

    In the merged sequence of each group, every epoch begins where the one before has ended. In any part of it, even a
    single global batch, each of n sequences has its share to within ``1 + share * (n - 2)`` samples. That is less than
    two if the shares are equal, but more if one sequence of many has a large share.

    Args:
        mixture: Shares of the datasets.
        seed: Seed of the orders. None: datasets keep their order.
        epoch: Number of the epoch.
        media: Number of the modality of each sample, int (n,). Each modality is then a group.
        full_batch_size: Size of a global batch, if an epoch must have only full ones. Samples that do not fill the
            last one begin the next epoch. None: any number of samples is in order.

    Raises:
        ValueError: Without `full_batch_size`, if an epoch would have no sample of some modality. All epochs have equal
            numbers of each modality, so these samples would never be trained.
    """
    groups = _groups_of_sequences(mixture, media)
    # Exact fractions, because rounding errors would add up over the epochs and move samples.
    quotas_of_groups = []
    for group in groups:
        quotas = [sequence.quota for sequence in group]
        quotas_of_groups.append(sum(quotas, Fraction(0)))
    begins = _begins_of_epoch(epoch, mixture.num_samples, quotas_of_groups, full_batch_size)
    ends = _begins_of_epoch(epoch + 1, mixture.num_samples, quotas_of_groups, full_batch_size)
    counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
    # A rare modality may fill a full batch only every few epochs. Otherwise all epochs have equal counts.
    if full_batch_size is None and min(counts) == 0:
        raise InvalidInputError(
            "With modality='per_step' an epoch of `mixture` must have a sample of each modality, got: "
            f'{counts} samples. Raise `epochs`, or leave out the samples of the rare modality.'
        )
    orders = []
    for group, begin, end in zip(groups, begins, ends, strict=True):
        orders.append(_merged(group, begin, end, seed))
    return orders


def _begins_of_epoch(
    epoch: int,
    num_samples: int,
    quotas: Sequence[Fraction],
    full_batch_size: int | None,
) -> list[int]:
    """Returns for each group the position in its merged sequence at which an epoch begins.

    Args:
        epoch: Number of the epoch.
        num_samples: Samples of an epoch, at most if it has only full batches.
        quotas: Mean number of samples of each group in an epoch.
        full_batch_size: As for :func:`mixed_orders`.
    """
    if full_batch_size is None:
        # Every epoch has the same number of samples of each group.
        counts = counts_of_first(num_samples, quotas)
        return [epoch * count for count in counts]
    # Every epoch has the same number of full batches, so full batches are divided among the groups, not samples.
    num_batches = num_samples // full_batch_size
    batches_before = counts_of_first(epoch * num_batches, quotas)
    return [count * full_batch_size for count in batches_before]


def merged_evenly(batches_of_modalities: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Merges the global batches of all modalities evenly into one list. The argument has one list for each modality."""
    counts = [len(batches) for batches in batches_of_modalities]
    begins = [0] * len(counts)
    quotas = [Fraction(count) for count in counts]
    # `interleave` divides by quotas. The quota 0 of an empty list does no harm, because the list has no items.
    modalities, numbers = interleave(begins, counts, quotas)
    merged = []
    for modality, number in zip(modalities, numbers, strict=True):
        batches = batches_of_modalities[modality]
        merged.append(batches[number])
    return merged


def _groups_of_sequences(mixture: Mixture, media: np.ndarray | None) -> list[list[_Sequence]]:
    """Returns the groups, one for each modality, or a single one without `media`."""
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
            num_of_modality = len(samples_of_modality)
            if num_of_modality > 0:
                quota_of_modality = quota * num_of_modality / len(samples)
                group.append(_Sequence(samples_of_modality, quota_of_modality))
        groups.append(group)
    return groups


def _merged(
    group: list[_Sequence],
    begin: int,
    end: int,
    seed: int | None,
) -> np.ndarray:
    """Returns the samples of the merged sequence of a group, from position `begin` to before `end`."""
    quotas = [sequence.quota for sequence in group]
    begins = counts_of_first(begin, quotas)
    ends = counts_of_first(end, quotas)
    sequence_numbers, positions = interleave(begins, ends, quotas)
    samples = np.empty_like(positions)
    for number, sequence in enumerate(group):
        is_of_sequence = sequence_numbers == number
        samples[is_of_sequence] = sequence.read(positions[is_of_sequence], seed)
    return samples


# The even merge of endless sequences (Sainte-Laguë's divisor method). Item j of a sequence with quota q has the mark
# (j + 1/2) / q. The items of all sequences are sorted by mark. If marks are equal, the earlier sequence comes first.
#
# The share of a sequence is its quota divided by the sum of all quotas. Up to mark t, sequence i of n has had
# q_i * t + e_i items, where |e_i| <= 1/2. All together have had t * sum(q) + sum(e). So sequence i is off its share of
# them by e_i - share * sum(e), which is at most (1 - share) / 2 + (n - 1) * share / 2 = (1 + share * (n - 2)) / 2. A
# stretch has two ends, so it is off by at most twice as many.


def counts_of_first(num_items: int, quotas: Sequence[Fraction]) -> list[int]:
    """Returns how many of the first `num_items` items of the merged sequence come from each sequence.

    The counts add up to `num_items`, and none of them falls when `num_items` grows. If quotas are integers,
    ``sum(quotas)`` items hold exactly ``quotas``.
    """
    half = Fraction(1, 2)
    # First count all items up to a mark. Rounding adds at most 1/2 for each sequence, and the mark is so low that the
    # counts still add up to at most `num_items`.
    mark = Fraction(max(num_items - len(quotas), 0)) / sum(quotas)
    counts = [int(mark * quota + half) for quota in quotas]
    # Then add the few that are missing, one by one: each time the item with the lowest mark.
    for _ in range(num_items - sum(counts)):
        next_marks = []
        for count, quota in zip(counts, quotas, strict=True):
            next_marks.append((count + half) / quota)
        lowest = next_marks.index(min(next_marks))
        counts[lowest] += 1
    return counts


def interleave(
    begins: Sequence[int],
    ends: Sequence[int],
    quotas: Sequence[Fraction],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a stretch of the merged sequence: the sequence number of each item, and its position in this sequence.

    The stretch holds items ``begins[s]`` to ``ends[s] - 1`` of each sequence ``s``. Here marks may be floats, because a
    rounding error only exchanges neighbours inside the stretch.
    """
    counts = np.subtract(ends, begins)
    sequence_numbers = np.repeat(np.arange(len(quotas)), counts)
    items_of_sequences = []
    for begin, end in zip(begins, ends, strict=True):
        items_of_sequences.append(np.arange(begin, end))
    items = np.concatenate(items_of_sequences)
    quotas_as_floats = np.array(quotas, dtype=np.float64)
    marks = (items + 0.5) / quotas_as_floats[sequence_numbers]
    order = np.argsort(marks, kind='stable')
    return sequence_numbers[order], items[order]
