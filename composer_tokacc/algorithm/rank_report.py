# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the ranks tell each other about their batches before these are cut: numbers, added up in one all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import NamedTuple

import torch

from composer_tokacc.collectives import get_world_size, sum_over_ranks
from composer_tokacc.data_spec.rank_widths import WidthSums
from composer_tokacc.plan_agreement import PlanSums
from composer_tokacc.row_counts import CountSums


class RankFlags(NamedTuple):
    """Facts about a rank, each 0 or 1. The sum of a flag over the ranks is the number of ranks that have set it."""

    has_new_rows: int = 0  # it has rows that the first-batch check must see before they are cut
    reduces_once: int = 0  # its DDP has reduced gradients only in the last microbatch of earlier steps
    refuses_batch: int = 0  # it refuses its batch, so all its other numbers are 0


class RankReport(NamedTuple):
    """Numbers about the batch of one rank, or their sums over all ranks. Only ``counts.loss_weight`` is a float."""

    counts: CountSums = CountSums()
    widths: WidthSums = WidthSums()
    plan: PlanSums = PlanSums()
    flags: RankFlags = RankFlags()


def summed_over_ranks(
    report: RankReport,
    to_device: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_weighted: bool,
) -> RankReport:
    """Adds up the reports of all ranks, number by number; one all-reduce. With one rank, returns its report.

    Args:
        report: The report of this rank.
        to_device: Moves a tensor to the device on which the process group reduces.
        is_weighted: Whether tokens may have weights, the same on all ranks. If not, ``loss_weight`` is a whole number.
    """
    if get_world_size() == 1:
        return report
    numbers = list(chain.from_iterable(report))  # of all parts. Below they are divided into the parts again
    # float64 holds the sums of the integers exactly, because they are below 2**53, see CHECKSUM_BITS in
    # plan_agreement.py. Some devices lack float64, so it is only used for weights.
    dtype = torch.float64 if is_weighted else torch.int64
    sums_over_ranks = sum_over_ranks(to_device(torch.tensor(numbers, dtype=dtype)))
    sums: list[float] = []
    for number, total in zip(numbers, sums_over_ranks, strict=True):
        is_weight = isinstance(number, float)  # `loss_weight`, even if it is a whole number. The others stay integers
        sums.append(float(total) if is_weight else int(total))
    remaining = iter(sums)
    parts = [part._make(islice(remaining, len(part))) for part in report]
    return RankReport._make(parts)
