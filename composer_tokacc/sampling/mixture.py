# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which samples the global batches of an epoch hold when a run has several datasets, or one modality a step; and what
tokens weigh where each dataset has its share of every step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from composer_tokacc.planning import Table, checked_table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixture:
    """Shares of several datasets, which follow one another in a ``torch.utils.data.ConcatDataset``.

    Args:
        sizes: Samples of each dataset.
        epochs: How often each is passed in one epoch of the run; 0.5 gives one half in one epoch and the other half in
            the next. Default: once each.
        weights: Instead, the relative share of each in every global batch; an epoch then has ``sum(sizes)`` samples.

    Raises:
        ValueError: If an argument is out of range.
    """

    sizes: Sequence[int]
    epochs: Sequence[float] | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        sizes = checked_table('sizes', self.sizes, np.size(self.sizes) or 1, least=1).tolist()
        object.__setattr__(self, 'sizes', sizes)
        if self.epochs is not None and self.weights is not None:
            raise ValueError('Only one of `epochs` and `weights` must be given, got: both. Drop one.')
        for name, most in (('epochs', 1e4), ('weights', 1e9)):  # the order of an epoch is held in memory
            if (values := getattr(self, name)) is not None:
                values = checked_table(name, values, len(sizes), dtype=np.float64)
                if not (values.min() > 0 and values.max() <= most):
                    raise ValueError(f'`{name}` must be above 0 and at most {most:g}, got: {values.tolist()}.')

    @classmethod
    def from_loss_shares(cls, sizes: Sequence[int], shares: Sequence[float], loss_tokens: Table) -> Mixture:
        """Returns the mixture in which each dataset has its share of the loss tokens.

        A dataset's weight is its share over the mean loss tokens of its samples, so the share is exact over whole
        passes. Every global batch has the samples that go with it, to within one or two; how far its tokens are off
        depends on how unlike a dataset's samples are.

        Args:
            sizes: Samples of each dataset.
            shares: Of the loss tokens, relative.
            loss_tokens: Of each sample of all datasets, (sum(sizes),).

        Raises:
            ValueError: If a dataset has no loss tokens, or an argument is out of range.
        """
        ends, shares = np.cumsum(sizes), checked_table('shares', shares, len(sizes), dtype=np.float64).tolist()
        tokens = checked_table('loss_tokens', loss_tokens, int(ends[-1]), least=0)
        means = [tokens[end - size : end].mean() for size, end in zip(sizes, ends, strict=True)]
        if min(means) == 0:
            raise ValueError(f'`loss_tokens` must be some in every dataset, got: means of {means}. Leave it out.')
        return cls(sizes, weights=[float(share / mean) for share, mean in zip(shares, means, strict=True)])

    @property
    def quotas(self) -> list[Fraction]:
        """Samples of each dataset in an epoch, on average over many."""
        if self.weights is not None:
            weights = [Fraction(weight) for weight in self.weights]
            return [sum(self.sizes) * weight / sum(weights) for weight in weights]
        passes = self.epochs if self.epochs is not None else [1] * len(self.sizes)
        return [size * Fraction(number) for size, number in zip(self.sizes, passes, strict=True)]

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return max(round(sum(self.quotas)), 1)


class LossShares:
    """Weights of samples by which the tokens of each dataset together have its share of the weight of a global batch.

    The token of a dataset with share ``s`` and ``t`` of the ``T`` loss tokens of the step weighs ``s T / t``, so a
    token weighs 1 on average. Exact in each step; a dataset without loss tokens in a step leaves its share to the
    others, which is said once.

    Args:
        sizes: Samples of each dataset, which follow one another.
        shares: Of the weight, of each; they add up to 1.
        loss_tokens: Of each sample of all datasets, (sum(sizes),).

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], loss_tokens: Table) -> None:
        self.shares = checked_table('shares', shares, len(sizes) or 1, dtype=np.float64)
        if self.shares.min() == 0 or abs(self.shares.sum() - 1) > 1e-6:
            raise ValueError(f'`shares` must be positive, one for each dataset, and add up to 1, got: {list(shares)}.')
        self.loss_tokens = checked_table('loss_tokens', loss_tokens, sum(sizes), least=0)
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._has_said = False

    def weights(self, window: np.ndarray) -> np.ndarray:
        """Returns what a token of each sample of a global batch weighs, float64 (samples,)."""
        owners = self._owners[window]
        tokens = np.bincount(owners, self.loss_tokens[window], len(self.shares))
        absent = tokens == 0
        if absent.any() and not self._has_said:
            self._has_said = True
            log.warning(
                'A global batch has no loss tokens of dataset %d: the others have its share of that step. A larger '
                '`global_batch_size`, or more `epochs` of it, keeps it in every step.', int(absent.argmax())
            )  # fmt: skip
        shares = np.where(absent, 0, self.shares)
        return (shares * tokens.sum() / np.maximum(tokens, 1) / max(shares.sum(), 1e-9))[owners]


@dataclass(frozen=True)
class _Stream:
    """The samples of one dataset (and one modality), pass after pass without end, each in another order."""

    samples: np.ndarray
    quota: Fraction

    def read(self, items: np.ndarray, entropy: Sequence[int] | None) -> np.ndarray:
        """Returns samples at these places of the endless sequence; None keeps them in order."""
        if entropy is None:
            return self.samples[items % len(self.samples)]
        found = np.empty_like(items)
        passes, starts = np.unique(items // len(self.samples), return_index=True)  # items ascend
        for number, here in zip(passes.tolist(), np.split(np.arange(len(items)), starts[1:]), strict=False):
            seed = int(np.random.SeedSequence([*entropy, number]).generate_state(1)[0])
            order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(seed)).numpy()
            found[here] = self.samples[order[items[here] % len(self.samples)]]
        return found


def mixed_batches(
    mixture: Mixture,
    global_batch_size: int,
    *,
    drop_last: bool,
    seed: int | None,
    epoch: int,
    media: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Returns the samples of each global batch of one epoch, int64; every epoch has equally many.

    Each dataset is a sequence without end, and so is the run: the datasets' sequences, merged evenly, so that every
    global batch has each dataset's share to within one sample or two. Epochs are stretches of it. Nothing is lost at
    their borders: with `drop_last` the next epoch begins with what did not fill a global batch of the last, so even a
    dataset smaller than that is passed as often as any other; without it the last global batch holds the samples that
    are left. Without a seed datasets keep their own order.

    With `media`, the modality of each sample, int (n,), every global batch holds samples of one modality only; their
    batches are merged evenly.
    """
    groups, size = _streams(mixture, media), global_batch_size
    quotas = [sum((stream.quota for stream in group), Fraction(0)) for group in groups]
    # Where the epoch begins and ends in the endless sequence of each modality.
    if drop_last:
        # Full batches alone are counted, so the end of an epoch is the beginning of the next, samples left included.
        num_batches = mixture.num_samples // size
        begins = [count * size for count in counts_of_first(epoch * num_batches, quotas)]
        ends = [count * size for count in counts_of_first((epoch + 1) * num_batches, quotas)]
    else:
        counts = counts_of_first(mixture.num_samples, quotas)
        begins = [epoch * count for count in counts]
        ends = [(epoch + 1) * count for count in counts]
    orders = [_merged(group, begin, end, seed) for group, begin, end in zip(groups, begins, ends, strict=True)]
    batches = [[order[start : start + size] for start in range(0, len(order), size)] for order in orders if len(order)]
    counts = [len(of_modality) for of_modality in batches]
    modalities, places = interleave([0] * len(counts), counts, [Fraction(count) for count in counts])
    return [batches[modality][place] for modality, place in zip(modalities, places, strict=True)]


def _streams(mixture: Mixture, media: np.ndarray | None) -> list[list[_Stream]]:
    """Returns the sequences to merge into each kind of global batch: one kind, or one for each modality."""
    ends = np.cumsum(mixture.sizes)
    datasets = [np.arange(end - size, end) for size, end in zip(mixture.sizes, ends, strict=True)]
    media = np.zeros(ends[-1], dtype=np.int64) if media is None else media
    groups = []
    for modality in np.unique(media):
        chosen = [samples[media[samples] == modality] for samples in datasets]
        parts = zip(chosen, datasets, mixture.quotas, strict=True)
        groups.append([_Stream(some, quota * len(some) / len(of_all)) for some, of_all, quota in parts if len(some)])
    return groups


def _merged(group: list[_Stream], begin: int, end: int, seed: int | None) -> np.ndarray:
    """Returns samples from place `begin` to `end` of the evenly merged sequences of a group."""
    quotas = [stream.quota for stream in group]
    sources, items = interleave(counts_of_first(begin, quotas), counts_of_first(end, quotas), quotas)
    samples = np.empty_like(items)
    for number, stream in enumerate(group):
        here = sources == number
        entropy = None if seed is None else (seed % 2**32, int(stream.samples[0]))
        samples[here] = stream.read(items[here], entropy)
    return samples


# Endless sequences merged evenly: after any number of items each has had its share, to within one.


def counts_of_first(num_items: int, quotas: Sequence[Fraction]) -> list[int]:
    """Returns how many of the first items of the merged sequence each sequence has given.

    Item ``j`` of a sequence with quota ``q`` stands at ``(j + 1/2) / q`` (Sainte-Laguë's divisor method), so counts
    never fall when `num_items` grows, and add up to it. ``sum(quotas)`` items hold exactly ``quotas``, where these are
    integers; ties go to the earlier sequence.
    """
    # All items up to this place, which are at most `num_items`; the few that are missing come one by one.
    place = Fraction(max(num_items - len(quotas), 0)) / sum(quotas)
    counts = [int(place * quota + Fraction(1, 2)) for quota in quotas]
    for _ in range(num_items - sum(counts)):
        counts[min(range(len(counts)), key=lambda index: (counts[index] + Fraction(1, 2)) / quotas[index])] += 1
    return counts


def interleave(begins: Sequence[int], ends: Sequence[int], quotas: Sequence[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a stretch of the merged sequence: which sequence stands at each place, and which of its items.

    The stretch begins with item ``begins`` of each sequence and stops before item ``ends``.
    """
    items = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    places = [(of_one + 0.5) / float(quota) for of_one, quota in zip(items, quotas, strict=True)]
    order = np.argsort(np.concatenate(places), kind='stable')
    sources = np.repeat(np.arange(len(quotas)), [len(of_one) for of_one in items])
    return sources[order], np.concatenate(items)[order]
