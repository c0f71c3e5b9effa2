# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of one global batch: which rank computes which samples in which microbatch.

Under ``'ddp'`` ranks wait for each other at the end of a step. Under ``'fsdp'`` they also wait in every microbatch: the
k-th microbatches of all ranks run at the same time. Together these are a *step slot*.

A *dummy* is a microbatch with a copy of one sample that does not count. It takes the place of a missing microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np

from composer_tokacc.arguments import check_count
from composer_tokacc.planning.assignment import assign_longest_first, assign_slots, best_slot_order, rebalance
from composer_tokacc.planning.cuts import equal_cost_cut, least_padded_cuts, microbatch_costs, split_largest
from composer_tokacc.planning.options import CostModel, CutOptions, Table
from composer_tokacc.planning.rows import OrderedRows, Rows

# These two constants were chosen on plans of 2 to 1,024 samples of lognormal and uniform length, with and without
# images, on 1 to 32 ranks, with budgets of 1 to 8 long rows. Each docstring says how much longer the modelled step is,
# in the mean, with other values.
GROWTH = 1.1
"""Factor from one tried number of microbatches to the next. With 1.25 a step takes 0.1 % longer (5 % at worst), with
1.05 it is as short."""
PROMISING = 8
"""Under ``'ddp'``: how many of the best cuts, once they are assigned longest first, are also rebalanced. With 1 a step
takes 0.3 % longer (4.7 % at worst). With 16 it is 0.02 % shorter, but planning takes longer."""


class Microbatch(NamedTuple):
    """Rows that go through the model together. A tuple, because that is fast to make: a plan has hundreds of them."""

    indices: tuple[int, ...]
    """Indices of its samples in ``lengths``, ascending."""
    width: int
    """Padded width in tokens."""
    cost: float
    """Modelled cost, ``CostModel.launch`` included."""
    filled: bool = False
    """True for a dummy, which is planned if a rank would have no microbatch, or none in a step slot. Our loaders leave
    dummies out of their batches, because the split adds its own, *dummy rows*. Only a rank that has nothing but dummies
    loads one of them."""

    @property
    def num_tokens(self) -> int:
        """Positions computed, padding included."""
        return len(self.indices) * self.width


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """How good a plan is. A padding ratio is the share of padding in all computed positions."""

    num_tokens: int
    """Real tokens of the global batch. (:attr:`Microbatch.num_tokens` also counts padding.)"""
    padding_before: float
    """Padding ratio if all samples were padded to the longest one."""
    padding_after: float
    """Padding ratio of the plan, dummies counted as padding."""
    rank_imbalance: float
    """Cost of the costliest rank divided by the mean cost of a rank, 1.0 at best."""
    cost: float
    """Modelled time of the step under the objective."""
    bound: float
    """Time that no plan can beat, see :func:`lower_bound`."""
    oversize: tuple[int, ...]
    """Samples that break a cap by themselves, and are therefore placed alone."""
    filled: int
    """Dummies that were added."""

    @property
    def share_of_bound(self) -> float:
        """The bound divided by the cost: 1.0 if no plan can be better."""
        return self.bound / self.cost


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """The microbatches of each rank in one global batch."""

    ranks: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of each rank, costliest first. Under ``'fsdp'`` the k-th of all ranks are a step slot. Then the
    slots are sorted by their costliest microbatches, so the microbatches of one rank may be out of order."""
    _rows: Rows = field(repr=False, compare=False)
    """The rows that were planned, for ``stats``."""
    _time: float = field(repr=False, compare=False)
    """Modelled time of the step, for ``stats``."""

    @cached_property
    def stats(self) -> PlanStats:
        """Tells how good the plan is. Computed on first use."""
        rows = self._rows
        microbatches = [microbatch for rank in self.ranks for microbatch in rank]
        costs_of_ranks = []
        for rank in self.ranks:
            costs_of_ranks.append(sum(microbatch.cost for microbatch in rank))
        cost_of_mean_rank = float(np.mean(costs_of_ranks))
        cost_of_slowest_rank = max(costs_of_ranks)
        num_tokens = int(rows.lengths.sum())
        tokens_padded_to_longest = len(rows.lengths) * int(rows.lengths.max())
        tokens_computed = sum(microbatch.num_tokens for microbatch in microbatches)
        return PlanStats(
            num_tokens=num_tokens,
            padding_before=1.0 - num_tokens / tokens_padded_to_longest,
            padding_after=1.0 - num_tokens / tokens_computed,
            rank_imbalance=cost_of_slowest_rank / cost_of_mean_rank,
            cost=self._time,
            bound=lower_bound(rows, len(self.ranks)),
            oversize=tuple(np.flatnonzero(rows.is_over).tolist()),
            filled=sum(microbatch.filled for microbatch in microbatches),
        )


def plan_microbatches(
    lengths: Table,
    *,
    num_ranks: int,
    max_tokens: int,
    image_tokens: Table | None = None,
    loss_tokens: Table | None = None,
    vision_cost: Table | None = None,
    max_image_tokens: int | None = None,
    max_loss_tokens: int | None = None,
    objective: Literal['ddp', 'fsdp'] = 'ddp',
    cost: CostModel | None = None,
    width_multiple: int = 1,
) -> MicrobatchPlan:
    """Cuts a global batch into microbatches and assigns them to ranks, for the shortest modelled step.

    Every sample is in exactly one microbatch. Rows times width of a microbatch never exceeds ``max_tokens``, its image
    tokens never exceed ``max_image_tokens``, and its loss tokens never exceed ``max_loss_tokens``. A sample that breaks
    a cap by itself is placed alone and listed in ``stats.oversize``. Every rank has at least one microbatch. If there
    are too few samples, some are dummies, marked ``filled``. The plan only depends on the arguments.

    Args:
        lengths: Real length of each sample in tokens, image placeholders included, (n,).
        num_ranks: Number of ranks.
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each sample, (n,). With ``'fsdp'`` samples with and without images then never run
            at the same time, because a rank that leaves the vision encoder unused hangs the others.
        loss_tokens: Loss tokens of each sample, (n,).
        vision_cost: Cost of each sample in the vision encoder, (n,), in the unit of :class:`.CostModel`. Needed if it
            depends on more than image tokens; see :meth:`.CostModel.vision`. Default: the cost of ``image_tokens``.
        max_image_tokens: Most image tokens of a microbatch.
        max_loss_tokens: Most loss tokens of a microbatch. It limits the memory of the logits if the model only computes
            them at labels.
        objective: ``'ddp'``: ranks wait for each other once a step, and may have unequal numbers of microbatches.
            ``'fsdp'``: they wait at every microbatch, after its vision encoder and at its end, and have equal numbers.
        cost: Cost model of a microbatch.
        width_multiple: Round widths up to a multiple of this.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> plan = plan_microbatches([7, 2, 8, 2, 2, 7], num_ranks=2, max_tokens=16, cost=CostModel(launch=1.0))
        >>> [[microbatch.indices for microbatch in rank] for rank in plan.ranks]
        [[(0, 5)], [(2,), (1, 3, 4)]]
    """
    options = CutOptions(
        max_tokens=max_tokens,
        max_image_tokens=max_image_tokens,
        max_loss_tokens=max_loss_tokens,
        width_multiple=width_multiple,
        objective=objective,
        cost=CostModel() if cost is None else cost,
    )
    return plan_rows(
        lengths,
        options,
        num_ranks=num_ranks,
        image_tokens=image_tokens,
        loss_tokens=loss_tokens,
        vision_cost=vision_cost,
    )


def plan_rows(
    lengths: Table,
    options: CutOptions,
    *,
    num_ranks: int,
    image_tokens: Table | None = None,
    loss_tokens: Table | None = None,
    vision_cost: Table | None = None,
) -> MicrobatchPlan:
    """Plans as :func:`.plan_microbatches`, for a caller that has checked options but not yet :class:`.Rows`."""
    check_count('num_ranks', num_ranks)
    rows = Rows(lengths, options, image_tokens=image_tokens, loss_tokens=loss_tokens, vision_cost=vision_cost)
    return plan_checked_rows(rows, num_ranks)


def plan_checked_rows(rows: Rows, num_ranks: int) -> MicrobatchPlan:
    """Plans as :func:`.plan_microbatches`, for a caller that has checked rows."""
    if rows.options.objective == 'fsdp':
        return _plan_in_slots(rows, num_ranks)
    search = _CutSearch(rows.by_length(), num_ranks, rows.options.cost, in_slots=False)
    best_cut = search.best()
    ranks = search.microbatches_of_ranks(best_cut)
    return MicrobatchPlan(ranks=tuple(map(tuple, ranks)), _rows=rows, _time=best_cut.time)


def _plan_in_slots(rows: Rows, num_ranks: int) -> MicrobatchPlan:
    """Plans for ``'fsdp'``.

    Samples with and without images are planned separately, because they must not share a step slot: a rank that leaves
    the vision encoder unused hangs the others.
    """
    has_images = rows.image_tokens > 0
    time = 0.0
    slots: list[tuple[Microbatch, ...]] = []
    for is_member in (has_images, ~has_images):
        if not is_member.any():
            continue
        members = np.flatnonzero(is_member)
        search = _CutSearch(rows.by_length(members), num_ranks, rows.options.cost, in_slots=True)
        best_cut = search.best()
        time += best_cut.time
        ranks_of_members = search.microbatches_of_ranks(best_cut)
        slots.extend(zip(*ranks_of_members, strict=True))  # the k-th microbatches of all ranks are a slot
    # The slots of both groups are sorted together, the costliest first.
    slots.sort(key=lambda slot: max(microbatch.cost for microbatch in slot), reverse=True)
    ranks = tuple(zip(*slots, strict=True))  # the r-th microbatches of all slots are those of rank r
    return MicrobatchPlan(ranks=ranks, _rows=rows, _time=time)


def lower_bound(rows: Rows, num_ranks: int) -> float:
    """Returns a time that no plan can beat.

    It is the cost of a rank without padding, with as few microbatches as possible, and with equal costs of all ranks.
    If the costliest row alone costs more, it is that cost.
    """
    cost = rows.options.cost
    row_costs = cost.rows(rows.lengths) + rows.vision_cost
    # Any plan needs a microbatch for each rank, and as many as the caps demand.
    fewest = num_ranks
    for sizes, cap in zip(rows.capped_sizes, rows.caps.tolist(), strict=True):
        # A row over the cap has a microbatch of its own, which counts as a full one. At best, all others are full, too.
        total_size = int(np.minimum(sizes, cap).sum())
        fewest = max(fewest, math.ceil(total_size / cap))
    total = float(row_costs.sum()) + fewest * cost.launch
    mean_of_ranks = total / num_ranks
    costliest_row = float(row_costs.max()) + cost.launch
    return max(mean_of_ranks, costliest_row)


class _Cut(NamedTuple):
    """A cut of sorted rows into K microbatches, and how these are assigned. The last of the K may be dummies."""

    time: float
    """Modelled time of the step under the objective."""
    num_dummies: int
    starts: np.ndarray
    """Place of the first row of each microbatch among the sorted rows, int64 (K,)."""
    ends: np.ndarray
    """Place after the last row of each microbatch, int64 (K,)."""
    costs: np.ndarray
    """Cost of each microbatch, float64 (K,)."""
    order_by: np.ndarray
    """The cost by which microbatches are sorted, the greatest first, float64 (K,). With step slots see
    :func:`.best_slot_order`."""
    rank_of_microbatch: np.ndarray | None
    """Int64 (K,). None in step slots, where only the best cut is assigned to ranks."""


class _CutSearch:
    """Searches for the cut of a set of rows that takes the least time.

    It tries several numbers of microbatches. For each number it tries two kinds of cuts, and both are needed:

    - The cut of least padded cost saves computation. With this one only, a step takes up to 1.7 times as long under
      ``'ddp'`` and 1.3 times under ``'fsdp'``. If ranks have few rows, or if images cost much, one microbatch of a few
      long rows keeps all other ranks waiting.
    - A cut of most equal cost saves waiting. With this one only, a step takes up to 1.1 times as long.

    In step slots ranks wait for each other twice in every microbatch: after the vision encoder, and at the end. So two
    cuts of the second kind are tried: of equal cost in the encoder, and of equal cost outside of it. With
    :func:`.best_slot_order` that makes a step up to 22 % shorter, most if images have few image tokens, or none.

    Tried and left out: other mixtures of the two costs (1 % shorter), swaps of microbatches between slots (0 to 2 %),
    and simulated annealing of all rows (0 to 1 %, for half a minute a plan).
    """

    def __init__(
        self,
        rows: OrderedRows,
        num_ranks: int,
        cost: CostModel,
        in_slots: bool,
    ) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        self._launch = cost.launch
        self._in_slots = in_slots
        self._costs_to_equalize = [(rows.row_costs, rows.vision_before)]
        """For each cut of equal cost, the costs that count: ``row_costs`` and ``vision_before`` of
        :func:`.equal_cost_cut`."""
        total_vision = rows.vision_before[-1]
        if in_slots and total_vision > 0.0:
            without_vision = (rows.row_costs, np.zeros_like(rows.vision_before))
            only_vision = (np.zeros_like(rows.row_costs), rows.vision_before)
            self._costs_to_equalize = [without_vision, only_vision]
        self._least_padded = least_padded_cuts(rows)  # from the most microbatches to the fewest
        self._cost_without_padding = float(rows.row_costs.sum() + total_vision)
        self._cheapest = int(np.argmin(rows.row_costs + np.diff(rows.vision_before)))
        """Place of the cheapest row among the sorted rows. Dummies copy it."""

    def microbatches_of_ranks(self, cut: _Cut) -> list[list[Microbatch]]:
        """Returns the microbatches of each rank under a cut, costliest first, or in the order of step slots."""
        rank_of_microbatch = cut.rank_of_microbatch
        if rank_of_microbatch is None:  # in step slots
            rank_of_microbatch = assign_slots(cut.order_by, self._num_ranks)
        # Lists, because reading single elements of arrays is slow.
        order = self._rows.order.tolist()
        widths = self._rows.widths[cut.starts].tolist()
        starts = cut.starts.tolist()
        ends = cut.ends.tolist()
        costs = cut.costs.tolist()
        num_real = len(costs) - cut.num_dummies
        ranks: list[list[Microbatch]] = [[] for _ in range(self._num_ranks)]
        # In this order assign_slots() has filled the slots, so the k-th microbatches of all ranks are a slot.
        for k in np.argsort(-cut.order_by, kind='stable').tolist():
            indices = tuple(sorted(order[starts[k] : ends[k]]))
            microbatch = Microbatch(indices, widths[k], costs[k], filled=k >= num_real)
            ranks[rank_of_microbatch[k]].append(microbatch)
        return ranks

    def best(self) -> _Cut:
        """Tries cuts, and returns the one of least modelled time. Without step slots it is rebalanced."""
        if self._in_slots:
            [best_cut] = self._promising_cuts(1)
            return best_cut
        # After rebalancing another cut may be the best. It is nearly always among the first ones, so only these are
        # rebalanced.
        rebalanced = [self._rebalanced(cut) for cut in self._promising_cuts(PROMISING)]
        return min(rebalanced, key=attrgetter('time'))

    def _promising_cuts(self, most: int) -> list[_Cut]:
        """Tries cuts into several numbers of microbatches. Returns those of least modelled time, best first."""
        cuts: list[_Cut] = []
        for count in self._counts_to_try():
            # The least possible time grows with the count. Once it reaches the time of the last promising cut, no
            # greater count can be promising.
            if len(cuts) == most and self._least_time(count) >= cuts[-1].time:
                break
            cuts.extend(self._cuts_into(count))
            cuts.sort(key=attrgetter('time'))
            cuts = cuts[:most]
        return cuts

    def _rebalanced(self, cut: _Cut) -> _Cut:
        """Returns the cut with exchanges of microbatches between ranks, and its new time."""
        assert cut.rank_of_microbatch is not None, 'only slots are assigned afterwards'
        rank_of_microbatch, time = rebalance(cut.costs, cut.rank_of_microbatch, self._num_ranks)
        return cut._replace(rank_of_microbatch=rank_of_microbatch, time=time)

    def _counts_to_try(self) -> Iterator[int]:
        """Yields numbers of microbatches, from the fewest to about one a row, each about ``GROWTH`` times the last.

        With few microbatches there is much padding, with many there are many fixed costs. The best number is between.
        In step slots all ranks have equally many microbatches, so only multiples of the number of ranks are tried. Then
        the last number may be above the number of rows.
        """
        multiple = self._num_ranks if self._in_slots else 1
        fewest_by_caps = len(self._least_padded[-1]) - 1
        # The numbers are `multiple * factor`.
        factor = math.ceil(max(fewest_by_caps, self._num_ranks) / multiple)
        largest_factor = max(factor, math.ceil(len(self._rows) / multiple))
        while factor <= largest_factor:
            yield multiple * factor
            factor = max(factor + 1, int(factor * GROWTH))

    def _least_time(self, count: int) -> float:
        """Returns a time that no cut into ``count`` or more microbatches beats: no padding, and ranks of equal cost."""
        time = (self._cost_without_padding + count * self._launch) / self._num_ranks
        return time * (1.0 - 1e-9)  # so that rounding does not make it too long

    def _cuts_into(self, count: int) -> list[_Cut]:
        """Returns cuts into ``count`` microbatches: of least padded cost, and of most equal cost.

        Cuts into fewer microbatches are split further. That makes no microbatch costlier. Dummies are added
        if there are fewer rows than ``count``.
        """
        rows = self._rows
        # `_least_padded` begins with the most microbatches. So this is the cut with the most of at most `count`.
        least_padded = next(bounds for bounds in self._least_padded if len(bounds) - 1 <= count)
        bounds_of_cuts = [least_padded]
        for row_costs, vision_before in self._costs_to_equalize:
            bounds_of_cuts.append(equal_cost_cut(row_costs, vision_before, rows.reach, count))
        cuts = []
        for bounds in bounds_of_cuts:
            split_bounds = split_largest(rows.row_costs, bounds, count)
            cuts.append(self._timed(split_bounds, count))
        return cuts

    def _timed(
        self,
        bounds: np.ndarray,
        count: int,
    ) -> _Cut:
        """Returns a cut with its modelled time. Without step slots it is also assigned to ranks.

        Adds dummies if it has fewer microbatches than ``count``.
        """
        rows = self._rows
        num_dummies = count - (len(bounds) - 1)
        place_of_dummies = np.full(num_dummies, self._cheapest)
        starts = np.append(bounds[:-1], place_of_dummies)
        ends = np.append(bounds[1:], place_of_dummies + 1)
        costs = microbatch_costs(rows.row_costs, rows.vision_before, starts, ends, self._launch)
        if self._in_slots:
            vision = rows.vision_before[ends] - rows.vision_before[starts]
            order_by, time = best_slot_order(costs - vision, vision, self._num_ranks)
            rank_of_microbatch = None
        else:
            order_by = costs
            rank_of_microbatch, time = assign_longest_first(costs, self._num_ranks)
        return _Cut(time, num_dummies, starts, ends, costs, order_by, rank_of_microbatch)
