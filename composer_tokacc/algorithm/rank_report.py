# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The one all-reduce of a step: what the ranks must know of each other's batches before these are cut."""

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
    """Facts about one rank, each 0 or 1. Their sum over the ranks is the number of ranks for which the fact is true."""

    has_new_rows: int = 0  # it has rows that the first-batch check must see before they are cut
    reduces_once: int = 0  # its DDP has reduced gradients only in the last microbatch of earlier steps
    refuses_batch: int = 0  # it refuses its batch, so all its other numbers are 0


class RankReport(NamedTuple):
    """Numbers about the batch of one rank, or their sums over all ranks."""

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
    """Adds up the reports of all ranks, number by number; one all-reduce.

    Args:
        report: The report of this rank.
        to_device: Moves a tensor to the device on which the process group reduces.
        is_weighted: Whether tokens have weights. All other numbers are integers.
    """
    if get_world_size() == 1:
        return report
    numbers = list(chain.from_iterable(report))
    # float64 holds the sums of the integers exactly, too, see CHECKSUM_BITS. But some devices do not have it.
    dtype = torch.float64 if is_weighted else torch.int64
    sums: list[float] = []
    for total in sum_over_ranks(to_device(torch.tensor(numbers, dtype=dtype))):
        is_integer = float(total).is_integer()  # only a sum of weights may have a fraction
        sums.append(int(total) if is_integer else total)
    sums_in_order = iter(sums)
    return RankReport._make(part._make(islice(sums_in_order, len(part))) for part in report)
