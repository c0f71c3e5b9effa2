# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of one global batch: which rank computes which samples in which microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np

from composer_tokacc.planning.assignment import assign_longest_first, assign_slots, best_slot_order, rebalance
from composer_tokacc.planning.cuts import LeastPaddedCuts, equal_cost_cut, microbatch_costs, split_largest
from composer_tokacc.planning.options import CostModel, CutOptions, Table, check_count
from composer_tokacc.planning.rows import OrderedRows, Rows

# Chosen on 460 plans for each objective: 16 to 2,048 samples of AI2D, ChartQA, DocVQA and of lognormal length, 2 to 64
# ranks, memory of 1 to 8 rows. What is said of other values is the modelled time of a step against the chosen one.
STEPS = 8
"""Numbers of microbatches tried between the fewest and one a sample. 4: 0.05 % slower in the mean, 3.6 % at worst; 12:
as fast to 0.1 %."""
NEAR = 4
"""Numbers tried on each side of the best of those, in slots. 2: 0.6 % slower at worst; none: 1.7 %."""
TOLERANCE = 0.001
"""Relative excess of padded cost that is accepted of a cut. 0.01: 0.1 % slower under ``'ddp'``; 0: as fast to 0.02 %,
for more trials."""
PROMISING = 8
"""Cuts that are rebalanced, of those that were assigned longest first. 4: 0.08 % slower; 1: 0.3 %, 4.7 % at worst;
16: 0.02 % faster, and the time of the plan grows."""

_TIME = attrgetter('time')


class Microbatch(NamedTuple):
    """Rows that go through the model together (a tuple, because a plan makes hundreds of them a step)."""

    indices: tuple[int, ...]
    """Which samples of ``lengths``, ascending."""
    width: int
    """Padded width in tokens."""
    cost: float
    """Modelled cost, the fixed cost included."""
    filled: bool = False
    """True for a dummy: a copy of a sample that weighs nothing, added where a rank would have too few microbatches."""

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
    """Padding ratio of the plan, dummies counted as padding."""
    rank_imbalance: float
    """Cost of the slowest rank over the mean, 1.0 at best."""
    cost: float
    """Modelled time of the step under the objective."""
    bound: float
    """Time that no plan can beat: no padding, perfect balance, the fewest microbatches."""
    oversize: tuple[int, ...]
    """Samples that break a cap by themselves, and are therefore placed alone."""
    filled: int
    """Dummies that were added."""

    @property
    def share_of_bound(self) -> float:
        """Reached share of the bound: 1.0 is as good as can be."""
        return self.bound / self.cost


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """Who computes what in one global batch."""

    ranks: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of each rank, costliest first; for ``'fsdp'`` the k-th of all ranks run side by side."""
    _rows: Rows = field(repr=False, compare=False)

    @cached_property
    def stats(self) -> PlanStats:
        """Tells how good the plan is; computed when it is first asked for."""
        rows, computed = self._rows, [microbatch for rank in self.ranks for microbatch in rank]
        loads = np.array([sum(microbatch.cost for microbatch in rank) for rank in self.ranks])
        slowest = float(loads.max())
        if rows.options.objective == 'fsdp':
            vision = {one: float(rows.vision_cost[list(one.indices)].sum()) for one in computed}
            slowest = time_in_slots([[(vision[one], one.cost - vision[one]) for one in rank] for rank in self.ranks])
        num_tokens = int(rows.lengths.sum())
        return PlanStats(
            padding_before=1.0 - num_tokens / (len(rows.lengths) * int(rows.lengths.max())),
            padding_after=1.0 - num_tokens / sum(microbatch.num_tokens for microbatch in computed),
            rank_imbalance=float(loads.max() / loads.mean()),
            cost=slowest,
            bound=lower_bound(rows, len(self.ranks)),
            oversize=tuple(np.flatnonzero(rows.is_over).tolist()),
            filled=sum(microbatch.filled for microbatch in computed),
        )


def time_in_slots(costs: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Returns the time of ranks that wait for the slowest encoder and the slowest rest of a slot: `costs` of both."""
    slots = zip_longest(*costs, fillvalue=(0.0, 0.0))
    return sum(max(vision for vision, _ in slot) + max(rest for _, rest in slot) for slot in slots)


def plan_microbatches(
    lengths: Table,
    *,
    num_ranks: int,
    max_tokens: int,
    image_tokens: Table | None = None,
    vision_cost: Table | None = None,
    max_image_tokens: int | None = None,
    objective: Literal['ddp', 'fsdp'] = 'ddp',
    cost: CostModel | None = None,
    width_multiple: int = 1,
) -> MicrobatchPlan:
    """Cuts a global batch into microbatches and assigns them to ranks, for the shortest modelled step.

    Every sample is in exactly one microbatch. Rows times width of a microbatch never exceeds ``max_tokens``, nor do its
    image tokens exceed ``max_image_tokens``; a sample that breaks a cap by itself is placed alone and listed in
    ``stats.oversize``. Every rank has at least one microbatch: where samples run out, it is a dummy, marked
    ``filled``. The plan depends on nothing but the arguments.

    Args:
        lengths: Real length of each sample in tokens, image placeholders included, (n,).
        num_ranks: Number of ranks.
        max_tokens: Token budget of a microbatch, padding included.
        image_tokens: Image tokens of each sample, (n,). With ``'fsdp'`` samples with and without images then never run
            side by side, because a rank that leaves the vision encoder unused hangs the others.
        vision_cost: Cost of each sample in the vision encoder, (n,), in the unit of :class:`.CostModel`, where image
            tokens do not tell it, as :meth:`.CostModel.vision` has it; by default that of ``image_tokens`` alone.
        max_image_tokens: Image budget of a microbatch.
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
        max_tokens=max_tokens, max_image_tokens=max_image_tokens, width_multiple=width_multiple,
        objective=objective, cost=CostModel() if cost is None else cost,
    )  # fmt: skip
    return plan_rows(lengths, options, num_ranks=num_ranks, image_tokens=image_tokens, vision_cost=vision_cost)


def plan_rows(
    lengths: Table,
    options: CutOptions,
    *,
    num_ranks: int,
    image_tokens: Table | None = None,
    vision_cost: Table | None = None,
) -> MicrobatchPlan:
    """Plans as :func:`.plan_microbatches`, with options that are checked already."""
    check_count('num_ranks', num_ranks)
    checked = Rows(lengths, options, image_tokens=image_tokens, vision_cost=vision_cost)
    # Under 'fsdp' the k-th microbatches of all ranks run side by side: a step slot, for which all wait.
    in_slots = options.objective == 'fsdp'
    # Samples that may run side by side: all of them, or under 'fsdp' those with images and those without.
    groups: list[np.ndarray | None] = [None]
    with_images = checked.image_tokens > 0
    if in_slots and with_images.any() and not with_images.all():
        groups = [np.flatnonzero(with_images), np.flatnonzero(~with_images)]
    planned = [_CutSearch(checked.by_length(one), num_ranks, options.cost, in_slots).ranks() for one in groups]
    ranks = planned[0]
    if in_slots:
        # The slots of all groups in one order, costliest first.
        slots = [slot for of_group in planned for slot in zip(*of_group, strict=True)]
        ranks = zip(*sorted(slots, key=lambda slot: -max(microbatch.cost for microbatch in slot)), strict=True)
    return MicrobatchPlan(ranks=tuple(map(tuple, ranks)), _rows=checked)


def lower_bound(rows: Rows, num_ranks: int) -> float:
    """Returns the time that no plan can beat: ``max(sum cost / num_ranks, max cost)`` with zero padding."""
    # Fixed costs count as often as any plan needs a microbatch: one a rank, and as many as fill the budgets.
    options, cost = rows.options, rows.options.cost
    prices = cost.rows(rows.lengths) + rows.vision_cost
    fewest = max(num_ranks, _fewest(rows.lengths, options.max_tokens))
    if options.max_image_tokens is not None:
        fewest = max(fewest, _fewest(rows.image_tokens, options.max_image_tokens))
    return max((float(prices.sum()) + fewest * cost.launch) / num_ranks, float(prices.max()) + cost.launch)


def _fewest(sizes: np.ndarray, cap: int) -> int:
    """Returns the fewest microbatches that hold all sizes: those over the cap alone, the others without a gap."""
    over = sizes > cap
    return int(over.sum()) + -(-int(sizes[~over].sum()) // cap)


class _Cut(NamedTuple):
    """A cut of sorted rows, as judged by the objective."""

    time: float
    """Modelled time of the step."""
    bounds: np.ndarray
    """Bounds of the microbatches in the sorted rows, int64 (K + 1,)."""
    costs: np.ndarray
    """Cost of each microbatch, and after them of the dummies, float64 (K + dummies,)."""
    order_by: np.ndarray
    """The cost by which they are assigned, the greatest first, float64 likewise."""
    ranks: np.ndarray | None
    """Rank of each of them, int64 (K + dummies,); None for step slots, which are assigned at the end."""


class _CutSearch:
    """Search for the best cut of one set of rows: over the number of microbatches, two cuts for each.

    Both are needed. The cut of least padded cost alone is up to 1.7 times slower under ``'ddp'``, where a rank has few
    rows or images cost much (a microbatch of four long rows, for which all other ranks wait), and 1.3 times under
    ``'fsdp'``. The cut of most equal cost alone is up to 1.1 times slower, and 1.07 times.

    Ranks run in step slots where they wait for each other after every microbatch (``'fsdp'``), not after the last.
    There they wait after the vision encoder, too, so equal may be either phase: two cuts of equal cost are tried, one
    of the encoder and one of all the rest. With :func:`.best_slot_order` that makes the step 1 to 5 % shorter where 64
    tokens stand for a tile, 10 to 22 % where the text attends to images from outside, and up to 1 % where lengths tell
    the encoder's cost. Left out: costs mixed otherwise (1 % more), swaps of microbatches between slots (0 to 2 %), and,
    for half a minute a plan, annealing of all rows (0 to 1 %).
    """

    def __init__(self, rows: OrderedRows, num_ranks: int, cost: CostModel, in_slots: bool) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        self._fixed_cost = cost.launch
        self._in_slots = in_slots
        nothing = np.zeros_like(rows.vision)
        self._equals = [(rows.row_costs, rows.vision)]
        """What is made equal: cost of the rows, and in the vision encoder."""
        if in_slots and rows.vision[-1] > 0.0:
            self._equals = [(rows.row_costs, nothing), (nothing[1:], rows.vision)]
        self._padded = LeastPaddedCuts(rows, TOLERANCE)
        self._alone = rows.row_costs + np.diff(rows.vision) + cost.launch
        self._cheapest = int(np.argmin(self._alone))

    def ranks(self) -> list[list[Microbatch]]:
        """Returns the microbatches of each rank under the best cut, costliest first."""
        best, rows = self._best(), self._rows
        order, costs = rows.order.tolist(), best.costs.tolist()
        pieces, widths = list(pairwise(best.bounds.tolist())), rows.widths[best.bounds[:-1]].tolist()
        rank_of = assign_slots(best.order_by, self._num_ranks) if best.ranks is None else best.ranks
        ranks: list[list[Microbatch]] = [[] for _ in range(self._num_ranks)]
        for k in np.argsort(-best.order_by, kind='stable').tolist():
            if k < len(pieces):
                indices = tuple(sorted(order[slice(*pieces[k])]))
                microbatch = Microbatch(indices, widths[k], costs[k])
            else:
                microbatch = Microbatch((order[self._cheapest],), int(rows.widths[self._cheapest]), costs[k], True)
            ranks[rank_of[k]].append(microbatch)
        return ranks

    def _best(self) -> _Cut:
        """Finds the cut of least modelled time."""
        cuts: list[_Cut] = []
        # Few microbatches pay few fixed costs and pad much, many the other way round: in between is the best count.
        for count in self._counts():
            cuts.extend(self._at(count))
            # So far: all cuts of the counts tried. Fixed costs grow with the count, so the bound does, too: once it
            # reaches the best time, no greater count can win.
            if self._least_time(count) >= min(cut.time for cut in cuts):
                break
        if self._in_slots:
            # The time jumps from slot to slot, so the counts that were passed over near the best one matter.
            for count in self._near(cuts):
                cuts.extend(self._at(count))
        cuts.sort(key=_TIME)
        if not self._in_slots:
            # The best cut assigned longest first is not always the best one rebalanced, but it is among the first.
            for k, cut in enumerate(cuts[:PROMISING]):
                assert cut.ranks is not None, 'slots alone are assigned afterwards'
                ranks, time = rebalance(cut.costs, cut.ranks, self._num_ranks)
                cuts[k] = cut._replace(ranks=ranks, time=time)
        return min(cuts[:PROMISING], key=_TIME)

    def _counts(self) -> Iterator[int]:
        """Yields numbers of microbatches to try, rising: the fewest and the next two, then by steps that grow.

        Close together at first, where one microbatch more or less changes the load of a rank most. Slots are full:
        there the numbers are multiples of the number of ranks.
        """
        step = self._num_ranks if self._in_slots else 1
        fewest = -(-max(self._padded.fewest, self._num_ranks) // step)
        most = max(fewest, -(-len(self._rows) // step))
        growth = max(1.06, (most / fewest) ** (1 / STEPS))
        count = float(fewest)
        tried = 0
        while int(count) <= most:
            yield int(count) * step
            tried += 1
            count = int(count) + 1 if tried < 3 else max(int(count) + 1, count * growth)

    def _near(self, cuts: list[_Cut]) -> list[int]:
        """Returns untried numbers of microbatches between that of the best cut and its neighbours."""
        tried = sorted({len(cut.costs) for cut in cuts})
        place = tried.index(len(min(cuts, key=_TIME).costs))
        below, best, above = tried[max(place - 1, 0)], tried[place], tried[min(place + 1, len(tried) - 1)]
        step = self._num_ranks
        return list(range(best - step, below, -step))[:NEAR] + list(range(best + step, above, step))[:NEAR]

    def _least_time(self, count: int) -> float:
        """Returns the time which no plan of ``count`` or more microbatches beats: no padding, perfect balance."""
        no_padding = float(self._alone.sum()) - len(self._rows) * self._fixed_cost
        return (no_padding + count * self._fixed_cost) / self._num_ranks

    def _at(self, count: int) -> list[_Cut]:
        """Returns cuts into ``count`` microbatches: of least padded cost, and of most equal cost."""
        rows = self._rows
        if count > len(rows):  # a row each, and dummies
            return [self._judge(np.arange(len(rows) + 1, dtype=np.int64), count)]
        cuts = [self._padded.exactly(count)]
        # Filled up to a limit a cut may come out with fewer microbatches than asked for: the largest are split then.
        for row_costs, vision in self._equals:
            equal = equal_cost_cut(row_costs, vision, rows.reach, count)
            cuts.append(equal if len(equal) - 1 == count else split_largest(rows.row_costs, equal, count))
        return [self._judge(bounds, count) for bounds in cuts]

    def _judge(self, bounds: np.ndarray, count: int) -> _Cut:
        """Returns the cut with its modelled time; dummies of the cheapest row make up for what `count` lacks."""
        rows, dummies = self._rows, count + 1 - len(bounds)
        costs = microbatch_costs(rows.row_costs, rows.vision, bounds, self._fixed_cost)
        # A count above the number of rows, or no multiple of the ranks: the cheapest row again, without weight.
        costs = np.concatenate([costs, np.full(dummies, self._alone[self._cheapest])])
        if self._in_slots:
            vision = np.diff(rows.vision)[self._cheapest]
            text = costs - np.concatenate([np.diff(rows.vision[bounds]), np.full(dummies, vision)])
            order_by, time = best_slot_order(text, costs - text, self._num_ranks)
            return _Cut(time, bounds, costs, order_by, None)
        ranks, time = assign_longest_first(costs, self._num_ranks)
        return _Cut(time, bounds, costs, costs, ranks)
