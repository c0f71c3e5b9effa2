# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Endless sequences merged evenly: after any number of items each has had its share, to within one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

__all__ = ['counts_of_first', 'interleave']


def counts_of_first(num_items: int, quotas: Sequence[Fraction]) -> list[int]:
    """How many of the first items of the merged sequence each sequence has given.

    Item ``j`` of a sequence with quota ``q`` stands at ``(j + 1/2) / q`` (Sainte-Laguë's divisor method), so counts
    never fall when `num_items` grows. ``sum(quotas)`` items hold exactly ``quotas``, where these are integers.

    Args:
        num_items: Length of the merged sequence.
        quotas: Positive relative rates.

    Returns:
        Counts that add up to `num_items`; ties go to the earlier sequence.
    """
    # All items up to this place, which are at most `num_items`; the few that are missing come one by one.
    place = Fraction(max(num_items - len(quotas), 0)) / sum(quotas)
    counts = [int(place * quota + Fraction(1, 2)) for quota in quotas]
    nearest = [
        ((count + Fraction(1, 2)) / quota, index)
        for index, (count, quota) in enumerate(zip(counts, quotas, strict=True))
    ]
    heapq.heapify(nearest)
    for _ in range(num_items - sum(counts)):
        _, index = nearest[0]
        counts[index] += 1
        heapq.heapreplace(nearest, ((counts[index] + Fraction(1, 2)) / quotas[index], index))
    return counts


def interleave(begins: Sequence[int], ends: Sequence[int], quotas: Sequence[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """A stretch of the merged sequence.

    Args:
        begins: First item of each sequence in it.
        ends: One past the last.
        quotas: As for :func:`counts_of_first`.

    Returns:
        For each place of the stretch: which sequence, and which of its items. Both int64.
    """
    places = [
        (np.arange(begin, end) + 0.5) / float(quota) for begin, end, quota in zip(begins, ends, quotas, strict=True)
    ]
    order = np.argsort(np.concatenate(places), kind='stable')
    sources = np.repeat(np.arange(len(quotas)), [len(part) for part in places])[order]
    items = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])[order]
    return sources, items
