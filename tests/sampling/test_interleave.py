# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Merged sequences against plain one-by-one merging by divisors."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_tokacc.sampling.mixture import counts_of_first, interleave

quotas_lists = st.lists(st.fractions(Fraction(1, 50), 50, max_denominator=50), min_size=1, max_size=6)


def merge_one_by_one(num_items, quotas):
    """Sainte-Laguë as textbooks have it: the next item goes to the largest quotient q / (2 c + 1)."""
    counts, given_to = [0] * len(quotas), []
    for _ in range(num_items):
        chosen = max(range(len(quotas)), key=lambda index: (quotas[index] / (2 * counts[index] + 1), -index))
        given_to.append(chosen)
        counts[chosen] += 1
    return given_to


@settings(deadline=None, max_examples=100)
@given(quotas=quotas_lists, num_items=st.integers(0, 120))
def test_counts_are_those_of_the_divisor_method(quotas, num_items):
    merged = merge_one_by_one(num_items, quotas)
    assert counts_of_first(num_items, quotas) == [merged.count(index) for index in range(len(quotas))]


@settings(deadline=None, max_examples=100)
@given(quotas=quotas_lists, begin=st.integers(0, 60), length=st.integers(0, 60))
def test_a_stretch_holds_the_items_of_the_merged_sequence(quotas, begin, length):
    begins, ends = counts_of_first(begin, quotas), counts_of_first(begin + length, quotas)
    sources, items = interleave(begins, ends, quotas)
    merged = merge_one_by_one(begin + length, quotas)
    expected = [(source, merged[:place].count(source)) for place, source in enumerate(merged)][begin:]
    assert sorted(zip(sources.tolist(), items.tolist(), strict=True)) == sorted(expected)


def test_integer_quotas_are_met_exactly():
    assert counts_of_first(1010, [Fraction(1000), Fraction(3), Fraction(7)]) == [1000, 3, 7]
