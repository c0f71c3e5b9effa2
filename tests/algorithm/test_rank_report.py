# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The report that each rank adds to the one all-reduce of a step."""

import pytest

from composer_tokacc.algorithm import rank_report
from composer_tokacc.algorithm.rank_report import RankFlags, RankReport, summed_over_ranks
from composer_tokacc.data_spec.rank_widths import WidthSums
from composer_tokacc.plan_agreement import CHECKSUM_BITS, PlanSums
from composer_tokacc.row_counts import CountSums

LARGEST_SQUARE = 2 ** (2 * CHECKSUM_BITS) - 1


@pytest.fixture
def two_equal_ranks(monkeypatch):
    """Lets a second rank seem to have the same numbers."""

    def doubled(numbers):
        doubled_numbers = 2 * numbers
        return tuple(doubled_numbers.tolist())

    monkeypatch.setattr(rank_report, 'get_world_size', lambda: 2)
    monkeypatch.setattr(rank_report, 'sum_over_ranks', doubled)


@pytest.mark.usefixtures('two_equal_ranks')
@pytest.mark.parametrize(
    ('is_weighted', 'weight'),
    [
        (True, 0.5),
        (False, 4.0),
    ],
)
def test_each_number_stays_in_its_place(is_weighted, weight):
    """Each sum is twice the number. Only the weight is a float."""
    report = RankReport(
        counts=CountSums(
            num_rows=1,
            samples=2,
            real_tokens=3,
            loss_tokens=4,
            loss_weight=weight,
        ),
        widths=WidthSums(5, 6, 7, 8, 9, 10),
        plan=PlanSums(11, LARGEST_SQUARE, 13),
        flags=RankFlags(has_new_rows=True, reduces_once=False),
    )

    sums = summed_over_ranks(report, lambda tensor: tensor, is_weighted=is_weighted)

    assert sums == RankReport(
        counts=CountSums(
            num_rows=2,
            samples=4,
            real_tokens=6,
            loss_tokens=8,
            loss_weight=2 * weight,
        ),
        widths=WidthSums(10, 12, 14, 16, 18, 20),
        plan=PlanSums(22, 2 * LARGEST_SQUARE, 26),
        flags=RankFlags(has_new_rows=2, reduces_once=0),
    )
    types = [type(number) for number in sums.counts]
    assert types == [int, int, int, int, float]
