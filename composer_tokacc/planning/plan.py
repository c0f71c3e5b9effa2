# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of one global batch: which rank computes which samples in which microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.rows import SortedRows, check_rows, sort_rows
from composer_tokacc.planning.search import Cut, CutSearch
from composer_tokacc.planning.share import share_columns

__all__ = ['Microbatch', 'MicrobatchPlan', 'PlanStats', 'lower_bound', 'plan_microbatches']


class Microbatch(NamedTuple):
    """Rows that go through the model together (a tuple, because a plan makes hundreds of them a step)."""

    indices: tuple[int, ...]
    """Which samples of ``lengths``, ascending."""
    width: int
    """Padded width in tokens."""
    cost: float
    """Modelled cost, launch included."""
    filled: bool = False
    """True for a zero-weight copy of a sample, added where a rank would have too few microbatches."""

    @property
    def num_tokens(self) -> int:
        """Positions computed, padding included."""
        return len(self.indices) * self.width


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """How good a plan is. Ratios of padding are shares of all computed positions."""

    padding_before: float
    """Padding ratio with all samples padded to the longest."""
    padding_after: float
    """Padding ratio of the plan, zero-weight copies counted as padding."""
    rank_imbalance: float
    """Cost of the slowest rank over the mean, 1.0 at best."""
    cost: float
    """Modelled time of the step under the objective."""
    bound: float
    """Time that no plan can beat: no padding, perfect balance, the fewest launches."""
    oversize: tuple[int, ...]
    """Samples that break a cap by themselves, and are therefore placed alone."""
    filled: int
    """Zero-weight copies that were added."""

    @property
    def share_of_bound(self) -> float:
        """Reached share of the bound: 1.0 is as good as can be."""
        return self.bound / self.cost


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What was planned: the checked arguments of :func:`plan_microbatches`."""

    lengths: np.ndarray
    images: np.ndarray
    max_tokens: int
    max_image_tokens: int | None
    objective: str
    cost: CostModel


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """Who computes what in one global batch."""

    ranks: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of each rank, costliest first; for ``'fsdp'`` the k-th of all ranks run side by side."""
    _task: _Task = field(repr=False, compare=False)

    @cached_property
    def stats(self) -> PlanStats:
        """How good the plan is; computed when it is first asked for."""
        task = self._task
        loads = np.array([sum(microbatch.cost for microbatch in rank) for rank in self.ranks])
        slowest = float(loads.max())
        if task.objective == 'fsdp':  # as many microbatches on every rank
            slowest = sum(max(microbatch.cost for microbatch in column) for column in zip(*self.ranks, strict=True))
        num_tokens = int(task.lengths.sum())
        computed = sum(microbatch.num_tokens for rank in self.ranks for microbatch in rank)
        over = task.lengths > task.max_tokens
        if task.max_image_tokens is not None:
            over |= task.images > task.max_image_tokens
        return PlanStats(
            padding_before=1.0 - num_tokens / (len(task.lengths) * int(task.lengths.max())),
            padding_after=1.0 - num_tokens / computed,
            rank_imbalance=float(loads.max() / loads.mean()),
            cost=slowest,
            bound=lower_bound(
                task.lengths, task.images, len(self.ranks), task.cost, task.max_tokens, task.max_image_tokens
            ),
            oversize=tuple(np.flatnonzero(over).tolist()),
            filled=sum(microbatch.filled for rank in self.ranks for microbatch in rank),
        )


def plan_microbatches(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    max_tokens: int,
    image_tokens: Sequence[int] | np.ndarray | None = None,
    max_image_tokens: int | None = None,
    objective: Literal['ddp', 'fsdp'] = 'ddp',
    cost: CostModel | None = None,
    width_multiple: int = 1,
) -> MicrobatchPlan:
    """Cut a global batch into microbatches and share them among ranks, for the shortest modelled step.

    Every sample is in exactly one microbatch. Rows times width of a microbatch never exceeds ``max_tokens``, nor do its
    image tokens exceed ``max_image_tokens``; a sample that breaks a cap by itself is placed alone and listed in
    ``stats.oversize``. Every rank has at least one microbatch: where samples run out, it is a zero-weight copy marked
    ``filled``. The plan depends on nothing but the arguments.

    Args:
        lengths: Real length of each sample in tokens, image placeholders included, (n,).
        num_ranks: Number of ranks.
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each sample, (n,). With ``'fsdp'`` samples with and without images then never run
            side by side, because a rank that leaves the vision tower unused hangs the others.
        max_image_tokens: Image budget of a microbatch.
        objective: ``'ddp'``: ranks wait for each other once a step, and may have unequal numbers of microbatches.
            ``'fsdp'``: they wait at every microbatch, and have equal numbers.
        cost: Cost model of a microbatch.
        width_multiple: Round widths up to a multiple of this.

    Returns:
        The plan.

    Raises:
        ValueError: An argument is out of range.

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
    # Samples that may run side by side: all of them, or under 'fsdp' those with images and those without.
    groups: list[np.ndarray | None] = [None]
    with_images = images > 0
    if objective == 'fsdp' and with_images.any() and not with_images.all():
        groups = [np.flatnonzero(with_images), np.flatnonzero(~with_images)]
    ranks: list[list[Microbatch]] = [[] for _ in range(num_ranks)]
    columns: list[list[Microbatch]] = []
    for members in groups:
        rows = sort_rows(sizes, images, cost, max_tokens, max_image_tokens, width_multiple, None, members)
        search = CutSearch(rows, num_ranks, cost, columns=objective == 'fsdp')
        best = search.best()
        microbatches = _microbatches(rows, best, search.filler)
        if best.ranks is None:
            columns.extend(
                [microbatches[k] for k in column] for column in share_columns(best.costs, num_ranks).tolist()
            )
            continue
        for k in np.argsort(-best.costs, kind='stable').tolist():
            ranks[best.ranks[k]].append(microbatches[k])
    # Columns of both groups in one order, costliest first; none under 'ddp'.
    columns.sort(key=lambda column: -max(microbatch.cost for microbatch in column))
    for column in columns:
        for rank, microbatch in zip(ranks, column, strict=True):
            rank.append(microbatch)
    task = _Task(
        lengths=sizes,
        images=images,
        max_tokens=max_tokens,
        max_image_tokens=max_image_tokens,
        objective=objective,
        cost=cost,
    )
    return MicrobatchPlan(ranks=tuple(tuple(rank) for rank in ranks), _task=task)


def lower_bound(
    lengths: np.ndarray,
    images: np.ndarray,
    num_ranks: int,
    cost: CostModel,
    max_tokens: int,
    max_image_tokens: int | None,
) -> float:
    """Time that no plan can beat: ``max(sum cost / num_ranks, max cost)`` with zero padding.

    Launches are counted as often as any plan needs them: once a rank, and as often as the budgets must be filled.

    Args:
        lengths: Real lengths in tokens, (n,).
        images: Image tokens, (n,).
        num_ranks: Number of ranks.
        cost: The cost model.
        max_tokens: Token budget of a microbatch.
        max_image_tokens: Image budget of a microbatch, if any.

    Returns:
        The bound, in units of the cost model.
    """
    rows = cost.rows(lengths) + cost.vision_per_token * images
    launches = max(num_ranks, _fewest(lengths, max_tokens))
    if max_image_tokens is not None:
        launches = max(launches, _fewest(images, max_image_tokens))
    return max((float(rows.sum()) + launches * cost.launch) / num_ranks, float(rows.max()) + cost.launch)


def _fewest(sizes: np.ndarray, cap: int) -> int:
    """Fewest microbatches that hold all sizes: those over the cap alone, the others filled without a gap."""
    over = sizes > cap
    return int(over.sum()) + -(-int(sizes[~over].sum()) // cap)


def _microbatches(rows: SortedRows, best: Cut, filler: int) -> list[Microbatch]:
    """The microbatches of a cut, then its zero-weight copies of the row at sorted position ``filler``."""
    order, costs = rows.order.tolist(), best.costs.tolist()
    widths = rows.widths[best.bounds[:-1]].tolist()
    microbatches = [
        Microbatch(tuple(sorted(order[start:end])), width, price)
        for (start, end), width, price in zip(pairwise(best.bounds.tolist()), widths, costs[: len(widths)], strict=True)
    ]
    copies = len(costs) - len(widths)
    if copies:
        copy = Microbatch((order[filler],), int(rows.widths[filler]), costs[-1], True)
        microbatches.extend([copy] * copies)
    return microbatches
