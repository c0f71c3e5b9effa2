# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One global batch: which rank computes which samples in which microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.cut import check_count
from composer_tokacc.planning.microbatch import Microbatch, MicrobatchPlan
from composer_tokacc.planning.rows import SortedRows, check_rows, sort_rows
from composer_tokacc.planning.search import Cut, CutSearch
from composer_tokacc.planning.share import share_columns
from composer_tokacc.planning.stats import measure

__all__ = ['plan_microbatches']

Table = list[list[Microbatch]]


def plan_microbatches(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    max_tokens: int,
    image_tokens: Sequence[int] | np.ndarray | None = None,
    max_image_tokens: int | None = None,
    objective: Literal['ddp', 'fsdp'] = 'ddp',
    cost: CostModel | None = None,
    num_microbatches: int | None = None,
    width_multiple: int = 1,
) -> MicrobatchPlan:
    """Cut a global batch into microbatches and share them among ranks, for the shortest modelled step.

    Every sample is in exactly one microbatch. Rows times width of a microbatch never exceeds `max_tokens`, nor do its
    image tokens exceed `max_image_tokens`; a sample that breaks a cap by itself goes alone and is listed in
    `stats.oversize`. Every rank has at least one microbatch: where samples run out, it is a zero-weight copy marked
    `filled`. The plan depends on nothing but the arguments.

    Args:
        lengths: Real length of each sample in tokens, image placeholders included, (n,).
        num_ranks: Number of ranks.
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each sample, (n,). With 'fsdp' samples with and without images then never run
            side by side, because a rank that leaves the vision tower unused hangs the others.
        max_image_tokens: Image budget of a microbatch.
        objective: 'ddp': ranks wait for each other once a step, and may have unequal numbers of microbatches.
            'fsdp': they wait at every microbatch, and have equal numbers.
        cost: Cost model of a microbatch.
        num_microbatches: Number of microbatches on every rank; by default what costs least.
        width_multiple: Round widths up to a multiple of this.

    Returns:
        The plan.

    Raises:
        ValueError: An argument is out of range, or the caps do not allow `num_microbatches`.

    Example:
        >>> plan = plan_microbatches([7, 2, 8, 2, 2, 7], num_ranks=2, max_tokens=16, cost=CostModel(launch=1.0))
        >>> [[microbatch.indices for microbatch in rank] for rank in plan.ranks]
        [[(0, 5)], [(2,), (1, 3, 4)]]
    """
    sizes, images = check_rows(lengths, max_tokens, image_tokens, max_image_tokens, width_multiple, None)
    if num_ranks < 1:
        raise ValueError(f'`num_ranks` must be at least 1, got: {num_ranks}.')
    if objective not in ('ddp', 'fsdp'):
        raise ValueError(f"`objective` must be 'ddp' or 'fsdp', got: {objective!r}.")
    cost = CostModel() if cost is None else cost

    def search(members: np.ndarray | None) -> tuple[SortedRows, CutSearch]:
        rows = sort_rows(sizes, images, cost, max_tokens, max_image_tokens, width_multiple, None, members)
        return rows, CutSearch(rows, num_ranks, cost, columns=objective == 'fsdp')

    groups = [search(None)]
    if num_microbatches is not None:
        check_count(num_microbatches, groups[0][1].min_per_rank)
    with_images = images > 0
    if objective == 'fsdp' and with_images.any() and not with_images.all():
        apart = [search(np.flatnonzero(mask)) for mask in (with_images, ~with_images)]
        # Where the number of microbatches is given and too small for columns of both kinds, they stay mixed.
        if num_microbatches is None or sum(group.min_per_rank for _, group in apart) <= num_microbatches:
            groups = apart
    cuts = _best_cuts([group for _, group in groups], num_microbatches)
    pieces = [_microbatches(rows, group, cut) for (rows, group), cut in zip(groups, cuts, strict=True)]
    table = _in_columns(pieces, cuts, num_ranks) if objective == 'fsdp' else _in_ranks(pieces[0], cuts[0], num_ranks)
    stats = measure(table, cuts, objective, sizes, images, cost, max_tokens, max_image_tokens)
    return MicrobatchPlan(ranks=tuple(tuple(rank) for rank in table), stats=stats)


def _best_cuts(groups: list[CutSearch], num_microbatches: int | None) -> list[Cut]:
    """The best cut of each group, whose numbers of microbatches add up to the one asked for, if any."""
    if len(groups) == 1 or num_microbatches is None:
        return [group.best(num_microbatches) for group in groups]
    first, second = groups
    lowest, highest = first.min_per_rank, num_microbatches - second.min_per_rank
    # Sixteen ways to divide the columns are plenty: the optimum is flat.
    ways = sorted({lowest + (highest - lowest) * k // 15 for k in range(16)})
    pairs = [[first.best(count), second.best(num_microbatches - count)] for count in ways]
    return min(pairs, key=lambda pair: pair[0].time + pair[1].time)


def _microbatches(rows: SortedRows, group: CutSearch, cut: Cut) -> list[Microbatch]:
    """The microbatches of a cut, then its zero-weight copies."""
    order, edges, costs = rows.order.tolist(), cut.bounds.tolist(), cut.costs.tolist()
    widths = rows.widths[cut.bounds[:-1]].tolist()
    made = [
        Microbatch(tuple(sorted(order[start:end])), width, price)
        for (start, end), width, price in zip(pairwise(edges), widths, costs[: len(widths)], strict=True)
    ]
    if cut.num_filled:
        copied = group.filler
        copy = Microbatch((order[copied],), int(rows.widths[copied]), costs[-1], True)
        made.extend([copy] * cut.num_filled)
    return made


def _in_ranks(made: list[Microbatch], cut: Cut, num_ranks: int) -> Table:
    """Microbatches of each rank, dearest first."""
    assert cut.ranks is not None, 'cuts for ddp are shared when they are judged'
    ranks = cut.ranks.tolist()
    table: Table = [[] for _ in range(num_ranks)]
    for k in np.argsort(-cut.costs, kind='stable').tolist():
        table[ranks[k]].append(made[k])
    return table


def _in_columns(pieces: list[list[Microbatch]], cuts: list[Cut], num_ranks: int) -> Table:
    """Microbatches of each rank, column by column, dearest column first."""
    columns: Table = []
    for made, cut in zip(pieces, cuts, strict=True):
        columns.extend([made[k] for k in column] for column in share_columns(cut.costs, num_ranks).tolist())
    columns.sort(key=lambda column: -max(microbatch.cost for microbatch in column))
    return [list(rank) for rank in zip(*columns, strict=True)]
