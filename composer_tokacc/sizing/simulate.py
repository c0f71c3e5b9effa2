# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps that a run would make, in the units of a cost model: stock Composer, the split alone, and planned batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from composer_tokacc.planning import CostModel, cut, cut_in_order, plan_microbatches, raise_count
from composer_tokacc.sizing.profile import SampleSizes

__all__ = ['METHODS', 'StepFigures', 'draw_batches', 'simulate_steps']

METHODS = ('stock', 'split', 'planned')
"""Composer's own split of padded device batches; :func:`.token_data_spec`; :class:`.RegroupingBatchSampler` as well."""


class _Piece(NamedTuple):
    """A microbatch, as far as its cost goes."""

    rows: int
    width: int
    image_tokens: int


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


def draw_batches(num_samples: int, global_batch_size: int, *, num_batches: int, seed: int = 0) -> list[np.ndarray]:
    """Global batches of an epoch in random order, at most `num_batches`; the last, smaller one is left out."""
    order = np.random.default_rng(seed).permutation(num_samples)
    if num_samples < global_batch_size:
        return [order]
    starts = range(0, num_samples - global_batch_size + 1, global_batch_size)
    return [order[start : start + global_batch_size] for start in starts[:num_batches]]


def simulate_steps(
    table: SampleSizes,
    batches: Sequence[np.ndarray],
    *,
    method: str,
    num_ranks: int,
    microbatch_rows: int,
    max_tokens: int,
    cost: CostModel,
    strategy: Literal['ddp', 'fsdp'] = 'ddp',
    regroup: bool = True,
    width_multiple: int = 1,
) -> StepFigures:
    """Simulates the steps of some global batches.

    Args:
        table: Length table.
        batches: Sample indices of each global batch.
        method: One of :data:`METHODS`.
        num_ranks: Ranks; rank r has the samples r, r + num_ranks, ... of a batch, except where batches are planned.
        microbatch_rows: Rows of a stock microbatch.
        max_tokens: Token budget of ours.
        cost: Cost model.
        strategy: ``'ddp'``: ranks wait for each other once a step; ``'fsdp'``: at every microbatch.
        regroup: Whether the split may sort rows.
        width_multiple: Widths are rounded up to it.
    """
    costs, loads, computed, real, counts = [], [], 0, 0, []
    for batch in batches:
        if method == 'planned':
            ranks = _planned(table, batch, num_ranks, max_tokens, strategy, width_multiple)
        else:
            shares = [batch[rank::num_ranks] for rank in range(num_ranks)]
            shares = [share for share in shares if len(share)]
            ranks = [
                _stock(table, share, microbatch_rows)
                if method == 'stock'
                else _split(table, share, max_tokens, regroup, width_multiple)
                for share in shares
            ]
            if method == 'split' and strategy == 'fsdp':
                most = max(len(pieces) for pieces in ranks)
                ranks = [_split(table, share, max_tokens, regroup, width_multiple, most) for share in shares]
        priced = [[cost.microbatch(*piece) for piece in pieces] for pieces in ranks]
        load = [sum(prices) for prices in priced]
        if strategy == 'fsdp':
            columns = max(len(prices) for prices in priced)
            costs.append(sum(max(p[k] for p in priced if k < len(p)) for k in range(columns)))
        else:
            costs.append(max(load))
        loads.append(costs[-1] * num_ranks / sum(load))
        computed += sum(piece.rows * piece.width for pieces in ranks for piece in pieces)
        real += int(table.tokens[batch].sum())
        counts.append(max(len(pieces) for pieces in ranks))
    return StepFigures(
        cost=float(np.mean(costs)),
        padding_ratio=1 - real / computed,
        microbatches=float(np.mean(counts)),
        imbalance=float(np.mean(loads)),
    )


def _stock(table: SampleSizes, share: np.ndarray, rows: int) -> list[_Piece]:
    """Every microbatch is as wide as the device batch: Composer's split slices rows and trims nothing."""
    width = int(table.tokens[share].max())
    chunks = [share[start : start + rows] for start in range(0, len(share), rows)]
    return [_Piece(len(chunk), width, int(table.vision[chunk].sum())) for chunk in chunks]


def _split(
    table: SampleSizes, share: np.ndarray, max_tokens: int, regroup: bool, width_multiple: int, count: int = 0
) -> list[_Piece]:
    """As :class:`composer_tokacc.data_spec.split.MicrobatchSplit` cuts a device batch."""
    lengths = table.tokens[share]
    widest = int(lengths.max())
    groups = (cut if regroup else cut_in_order)(lengths, max_tokens, width_multiple=width_multiple, max_width=widest)
    if count:
        groups = raise_count(groups, count, lengths.tolist())
    pieces = []
    for rows in groups:
        width = min(-(-int(lengths[rows].max()) // width_multiple) * width_multiple, widest)
        pieces.append(_Piece(len(rows), width, int(table.vision[share[rows]].sum())))
    return pieces


def _planned(
    table: SampleSizes,
    batch: np.ndarray,
    num_ranks: int,
    max_tokens: int,
    strategy: Literal['ddp', 'fsdp'],
    width_multiple: int,
) -> list[list[_Piece]]:
    """As the training program plans: with the default cost model, whatever the steps are priced with."""
    plan = plan_microbatches(
        table.tokens[batch],
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        image_tokens=table.vision[batch],
        objective=strategy,
        width_multiple=width_multiple,
    )
    vision = table.vision[batch]
    return [
        [_Piece(len(m.indices), m.width, int(vision[list(m.indices)].sum())) for m in microbatches]
        for microbatches in plan.ranks
    ]
