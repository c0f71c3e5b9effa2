# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Simulates how the steps of a run are cut, and computes their cost with a cost model.

Three methods are compared: stock Composer, our split by itself, and planned batches. The split and the plans are made
by the functions that the run uses. Composer's own split is imitated. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from composer_tokacc.arguments import check_choice
from composer_tokacc.planning import CostModel, CutOptions, cut_rows, padded_widths
from composer_tokacc.planning.plan import Microbatch, plan_checked_rows
from composer_tokacc.sampling.mixture import permutation
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.sizing.profile import SampleSizes

METHOD_NAMES = {'stock': 'stock Composer', 'split': 'split and trimmed', 'planned': 'planned over ranks'}
"""Name of each method in the report. ``stock``: Composer's own split of padded device batches. ``split``: the split of
:func:`.token_data_spec`. ``planned``: the same with a :class:`.RegroupingBatchSampler`, which also moves samples among
ranks."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Means over the simulated steps. Only ``padding_ratio`` is one ratio for all steps together."""

    cost: float
    """Time of the step in units of :class:`.CostModel`: the cost of the slowest rank. Under FSDP ranks wait for each
    other in every step slot (the k-th microbatch of each rank), so it is a sum over the slots, see
    ``_time_in_slots``."""
    padding_ratio: float
    """Share of the computed positions that hold no token of the batch: padding and dummy rows."""
    microbatches: float
    """Microbatches of the rank that has most."""
    imbalance: float
    """``cost`` divided by the mean cost of the ranks; 1 is even."""


class _ComputedMicrobatch(NamedTuple):
    """A simulated microbatch."""

    samples: np.ndarray
    """Index of each row's sample in the dataset, int64 (rows,)."""
    width: int | None
    """Positions of each row, padding included. None: the rows are packed, without padding."""


class _MicrobatchCost(NamedTuple):
    """Cost of a simulated microbatch in units of :class:`.CostModel`, and its size."""

    vision: float
    """Cost in the vision encoder."""
    text: float
    """All other cost, ``CostModel.launch`` included."""
    positions: int
    """Computed positions, padding included."""


def draw_batches(
    num_samples: int,
    global_batch_size: int,
    *,
    num_batches: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """Returns the sample indices of the first full global batches of a run, each int64 (samples,).

    There are at most as many as the first epoch has. If the dataset has fewer samples than a batch, there is one batch
    with all of them.
    """
    size = min(global_batch_size, num_samples)
    num_batches = min(num_batches, num_samples // size)
    order = permutation(num_samples, seed)  # as in the first epoch of a run
    return [order[first : first + size] for first in range(0, num_batches * size, size)]


def simulate_steps(
    table: SampleSizes,
    batches: Sequence[np.ndarray],
    *,
    method: str,
    num_ranks: int,
    microbatch_rows: int,
    options: CutOptions,
    price: CostModel,
) -> StepFigures:
    """Simulates the steps of some global batches.

    Args:
        table: Sizes of all samples of the dataset.
        batches: Sample indices of each global batch.
        method: ``'stock'``, ``'split'`` or ``'planned'``.
        num_ranks: Number of ranks. Rank r has samples r, r + num_ranks, ... of a batch, unless batches are planned.
        microbatch_rows: Rows of a microbatch of stock Composer. Only for ``'stock'``.
        options: How the run cuts, its ``max_tokens`` included. Its ``packing`` must be True or False, not ``'auto'``.
        price: Cost model that gives the cost of a microbatch in the result, perhaps a measured one. (The run cuts by
            ``options.cost``.)
    """
    check_choice('method', method, tuple(METHOD_NAMES))
    check_choice('packing', options.packing, (True, False))  # with 'auto' padded steps would be simulated
    vision_costs = price.vision(table.image_tokens, table.vision_patches)
    step_costs = []
    imbalances = []
    num_microbatches = []
    num_tokens = 0
    num_positions = 0
    for batch in batches:
        ranks = _microbatches_of_ranks(table, batch, method, num_ranks, microbatch_rows, options)
        costs_of_ranks = []
        loads = []
        for microbatches in ranks:
            costs = [_cost_of(microbatch, table, vision_costs, price) for microbatch in microbatches]
            costs_of_ranks.append(costs)
            loads.append(sum(cost.vision + cost.text for cost in costs))
            num_positions += sum(cost.positions for cost in costs)
        if options.objective == 'fsdp':
            step_cost = _time_in_slots(costs_of_ranks)
        else:
            step_cost = max(loads)
        step_costs.append(step_cost)
        # The mean is over all ranks. Those without a sample are not in `loads`.
        imbalances.append(step_cost * num_ranks / sum(loads))
        num_microbatches.append(max(map(len, ranks)))
        num_tokens += int(table.tokens[batch].sum())
    return StepFigures(
        cost=float(np.mean(step_costs)),
        padding_ratio=1 - num_tokens / num_positions,
        microbatches=float(np.mean(num_microbatches)),
        imbalance=float(np.mean(imbalances)),
    )


def _cost_of(
    microbatch: _ComputedMicrobatch,
    table: SampleSizes,
    vision_costs: np.ndarray,
    price: CostModel,
) -> _MicrobatchCost:
    """Returns the cost of a microbatch. `vision_costs` is the cost of each sample in the vision encoder, (samples,)."""
    samples, width = microbatch
    if width is None:
        widths = table.tokens[samples]
        text_cost = price.packed(widths.tolist())  # includes `launch`
    else:
        widths = np.full(len(samples), width)
        text_cost = float(price.rows(widths).sum()) + price.launch
    vision_cost = float(vision_costs[samples].sum())
    return _MicrobatchCost(vision_cost, text_cost, int(widths.sum()))


def _time_in_slots(costs_of_ranks: Sequence[Sequence[_MicrobatchCost]]) -> float:
    """Returns the time of a step in slots. In each slot ranks wait for the slowest vision encoder, then for the rest.

    Without a plan, ranks may have unequal numbers of microbatches. A rank that has none in a slot takes no time there.

    Args:
        costs_of_ranks: For each rank the costs of its microbatches.
    """
    no_microbatch = _MicrobatchCost(vision=0.0, text=0.0, positions=0)
    time = 0.0
    for slot in zip_longest(*costs_of_ranks, fillvalue=no_microbatch):
        slowest_vision = max(cost.vision for cost in slot)
        slowest_text = max(cost.text for cost in slot)
        time += slowest_vision + slowest_text
    return time


def _microbatches_of_ranks(
    table: SampleSizes,
    batch: np.ndarray,
    method: str,
    num_ranks: int,
    microbatch_rows: int,
    options: CutOptions,
) -> list[list[_ComputedMicrobatch]]:
    """Returns for each rank the microbatches of a global batch that it computes.

    Unless batches are planned, ranks without a sample are left out.
    """
    if method == 'planned':
        plan = plan_checked_rows(table.select(batch).rows(options), num_ranks)
        ranks = [_planned_microbatches(table, batch, planned, options) for planned in plan.ranks]
        _add_dummy_rows(table, batch, ranks, options)
        return ranks
    num_reading_ranks = min(num_ranks, len(batch))
    samples_of_ranks = [batch[rank::num_ranks] for rank in range(num_reading_ranks)]
    if method == 'stock':
        return [_cut_by_composer(table, samples, microbatch_rows) for samples in samples_of_ranks]
    ranks = [_cut_by_split(table, samples, options) for samples in samples_of_ranks]
    _add_dummy_rows(table, batch, ranks, options)
    return ranks


def _planned_microbatches(
    table: SampleSizes,
    batch: np.ndarray,
    planned: Sequence[Microbatch],
    options: CutOptions,
) -> list[_ComputedMicrobatch]:
    """Returns the microbatches of one rank by its part of a plan.

    The plan has a dummy in the place of a missing microbatch. With packing, only a rank without samples computes it.
    """
    if options.packing is True:
        # The plan only decides which samples the rank reads. Then the rank packs them itself.
        samples_read = list(RankAssignment.from_plan(planned, batch))
        return _cut_by_split(table, np.array(samples_read), options)
    microbatches = []
    for microbatch in planned:
        samples = batch[list(microbatch.indices)]
        microbatches.append(_ComputedMicrobatch(samples, microbatch.width))
    return microbatches


def _cut_by_composer(
    table: SampleSizes,
    samples: np.ndarray,
    num_rows: int,
) -> list[_ComputedMicrobatch]:
    """Returns the microbatches that stock Composer makes of the samples of one rank, `num_rows` rows each.

    It slices the padded device batch and trims nothing.
    """
    width = int(table.tokens[samples].max())
    starts = range(num_rows, len(samples), num_rows)
    return [_ComputedMicrobatch(rows, width) for rows in np.split(samples, starts)]


def _cut_by_split(
    table: SampleSizes,
    samples: np.ndarray,
    options: CutOptions,
) -> list[_ComputedMicrobatch]:
    """Returns the microbatches that the split makes of the samples of one rank."""
    sizes = table.select(samples)
    lengths = sizes.tokens
    widest = int(lengths.max())  # the width of the device batch
    groups = cut_rows(
        lengths,
        options,
        image_tokens=sizes.image_tokens,
        loss_tokens=sizes.loss_tokens,
        max_width=widest,
    )
    # As in cut_rows(), a width is rounded up neither beyond the device batch nor beyond the token budget.
    padded_lengths = padded_widths(lengths, options.width_multiple, min(widest, options.max_tokens))
    microbatches = []
    for rows in groups:
        width = None
        if options.packing is not True:
            width = int(padded_lengths[rows].max())
        microbatches.append(_ComputedMicrobatch(samples[rows], width))
    return microbatches


def _add_dummy_rows(
    table: SampleSizes,
    batch: np.ndarray,
    ranks: list[list[_ComputedMicrobatch]],
    options: CutOptions,
) -> None:
    """Adds microbatches of one dummy row to those of `ranks` that have fewer than others, if counts must be equal."""
    must_be_equal = options.equal_counts
    if options.equal_counts == 'auto':
        must_be_equal = options.objective == 'fsdp'
    if not must_be_equal:
        return
    # A dummy row is as long as the shortest sample with an image, so that every rank uses the vision encoder. If no
    # sample has one, it is as long as the shortest sample.
    has_no_image = table.image_tokens[batch] == 0
    images_first_then_shortest = np.lexsort((table.tokens[batch], has_no_image))
    shortest = batch[images_first_then_shortest[0]]
    dummy = _ComputedMicrobatch(np.array([shortest]), int(table.tokens[shortest]))
    most_microbatches = max(map(len, ranks))
    for rank in ranks:
        num_missing = most_microbatches - len(rank)
        rank.extend([dummy] * num_missing)
