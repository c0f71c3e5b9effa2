# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps that a run would make, in the units of a cost model: stock Composer, the split alone, and planned batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from composer_tokacc.planning import CostModel, CutOptions, cut_rows, padded_widths
from composer_tokacc.planning.plan import time_in_slots
from composer_tokacc.sampling.global_batches import torchs_batches
from composer_tokacc.sampling.load_planner import LoadPlanner
from composer_tokacc.sizing.profile import SampleSizes

METHOD_NAMES = {'stock': 'stock Composer', 'split': 'split and trimmed', 'planned': 'planned over ranks'}
"""Composer's own split of padded device batches; :func:`.token_data_spec`; :class:`.RegroupingBatchSampler` as well."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Means over the simulated steps."""

    cost: float
    """Cost of the slowest rank, in units of the cost model."""
    padding_ratio: float
    """Share of the computed positions that is padding."""
    microbatches: float
    """Microbatches of the rank that has most."""
    imbalance: float
    """Cost of the slowest rank over the mean of the ranks."""


class _Computed(NamedTuple):
    """A microbatch, as far as its cost goes: widths of the rows that are computed, and the samples they are."""

    widths: list[int]
    samples: np.ndarray
    is_packed: bool = False


Ranks = list[list[_Computed]]


def draw_batches(num_samples: int, global_batch_size: int, *, num_batches: int, seed: int = 0) -> list[np.ndarray]:
    """Returns the samples of the first global batches of a run, int64; of all samples, where they fill none."""
    size = min(global_batch_size, num_samples)
    return torchs_batches(num_samples, size, drop_last=True, seed=seed, epoch=0)[:num_batches]


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
        table: Length table.
        batches: Sample indices of each global batch.
        method: ``'stock'``, ``'split'`` or ``'planned'``.
        num_ranks: Ranks; rank r has the samples r, r + num_ranks, ... of a batch, except where batches are planned.
        microbatch_rows: Rows of a stock microbatch.
        options: How the run cuts, its ``max_tokens`` included.
        price: What a microbatch costs on the machine; the run cuts by ``options.cost``, whatever it costs.
    """
    vision = price.vision(table.image_tokens, table.vision_patches)
    costs, imbalances, counts, computed = [], [], [], 0
    for batch in batches:
        ranks = _ranks(table, batch, method, num_ranks, microbatch_rows, options)
        priced = [[_price(one, price, vision) for one in microbatches] for microbatches in ranks]
        loads = [sum(map(sum, prices)) for prices in priced]
        costs.append(time_in_slots(priced) if options.objective == 'fsdp' else max(loads))
        imbalances.append(costs[-1] * num_ranks / sum(loads))
        counts.append(max(map(len, ranks)))
        computed += sum(sum(one.widths) for microbatches in ranks for one in microbatches)
    return StepFigures(
        cost=float(np.mean(costs)),
        padding_ratio=1 - sum(int(table.tokens[batch].sum()) for batch in batches) / computed,
        microbatches=float(np.mean(counts)),
        imbalance=float(np.mean(imbalances)),
    )


def _ranks(
    table: SampleSizes, batch: np.ndarray, method: str, num_ranks: int, microbatch_rows: int, options: CutOptions
) -> Ranks:
    dealt = [batch[rank::num_ranks] for rank in range(min(num_ranks, len(batch)))]
    if method == 'stock':
        return [_stock(table, samples, microbatch_rows) for samples in dealt]
    if method == 'planned':
        patches = None if table.vision_patches is None else table.vision_patches[batch]
        vision = options.cost.vision(table.image_tokens[batch], patches)
        plan = LoadPlanner(num_ranks, options).plan(table.tokens[batch], table.image_tokens[batch], vision)
        if options.packing is not True:
            ranks = [[_Computed([m.width] * len(m.indices), batch[list(m.indices)]) for m in r] for r in plan.ranks]
            return _in_step(table, batch, ranks, options)
        # The plan says which rank reads which samples, and the split packs those again.
        dealt = [batch[[index for microbatch in rank for index in microbatch.indices]] for rank in plan.ranks]
    return _in_step(table, batch, [_split(table, samples, options) for samples in dealt], options)


def _stock(table: SampleSizes, samples: np.ndarray, rows: int) -> list[_Computed]:
    # Every microbatch is as wide as the device batch: Composer's split slices rows and trims nothing.
    width = int(table.tokens[samples].max())
    chunks = [samples[start : start + rows] for start in range(0, len(samples), rows)]
    return [_Computed([width] * len(chunk), chunk) for chunk in chunks]


def _split(table: SampleSizes, samples: np.ndarray, options: CutOptions) -> list[_Computed]:
    lengths, widest = table.tokens[samples], int(table.tokens[samples].max())
    groups = cut_rows(lengths, options, image_tokens=table.image_tokens[samples], max_width=widest)
    if options.packing is True:
        return [_Computed(lengths[rows].tolist(), samples[rows], is_packed=True) for rows in groups]
    widths = padded_widths(np.array([lengths[rows].max() for rows in groups]), options.width_multiple, widest)
    return [_Computed([width] * len(rows), samples[rows]) for width, rows in zip(widths.tolist(), groups, strict=True)]


def _in_step(table: SampleSizes, batch: np.ndarray, ranks: Ranks, options: CutOptions) -> Ranks:
    """Adds a dummy row for every microbatch that a rank lacks, where counts must be equal."""
    most = max(map(len, ranks))
    if options.equal_counts is False or (options.equal_counts == 'auto' and options.objective == 'ddp'):
        return ranks
    # The smallest row; where the step has images one with an image, or a rank would leave the vision encoder unused.
    with_images = batch[table.image_tokens[batch] > 0]
    candidates = with_images if len(with_images) else batch
    smallest = candidates[np.argmin(table.tokens[candidates])]
    dummy = _Computed([int(table.tokens[smallest])], np.array([smallest]))
    return [microbatches + [dummy] * (most - len(microbatches)) for microbatches in ranks]


def _price(microbatch: _Computed, price: CostModel, vision: np.ndarray) -> tuple[float, float]:
    """Returns the cost in the vision encoder, and of all the rest."""
    rows = float(price.rows(np.array(microbatch.widths)).sum()) + price.launch
    text = price.packed(microbatch.widths) if microbatch.is_packed else rows
    return float(vision[microbatch.samples].sum()), text
