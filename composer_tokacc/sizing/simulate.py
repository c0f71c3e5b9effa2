# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps that a run would make, in the units of a cost model: stock Composer, the split alone, and planned batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from composer_tokacc.planning import CostModel, CutOptions, cut_rows, padded_widths, plan_rows
from composer_tokacc.sizing.profile import SampleSizes

__all__ = ['METHODS', 'StepFigures', 'draw_batches', 'simulate_steps']

METHODS = ('stock', 'split', 'planned')
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


class _Piece(NamedTuple):
    """A microbatch, as far as its cost goes: sizes of the rows that are computed, and whose they are."""

    widths: list[int]
    samples: np.ndarray
    is_packed: bool = False


def draw_batches(num_samples: int, global_batch_size: int, *, num_batches: int, seed: int = 0) -> list[np.ndarray]:
    """Global batches of an epoch in random order, at most `num_batches`; the last, smaller one is left out.

    Returns:
        Indices of the samples of each, ``(global_batch_size,)``; of all samples, where they are fewer than one batch.
    """
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
    options: CutOptions,
    price: CostModel,
) -> StepFigures:
    """Simulates the steps of some global batches.

    Args:
        table: Length table.
        batches: Sample indices of each global batch.
        method: One of ``METHODS``.
        num_ranks: Ranks; rank r has the samples r, r + num_ranks, ... of a batch, except where batches are planned.
        microbatch_rows: Rows of a stock microbatch.
        options: How the run cuts, its ``max_tokens`` included.
        price: What a microbatch costs on the machine; the run cuts by ``options.cost``, whatever it costs.
    """
    costs, imbalances, counts, computed, real = [], [], [], 0, 0
    towers = price.tower(table.image_tokens, table.vision_patches)
    for batch in batches:
        shares = [batch[rank::num_ranks] for rank in range(num_ranks)]
        shares = [share for share in shares if len(share)]
        if method == 'stock':
            ranks = [_stock(table, share, microbatch_rows) for share in shares]
        elif method == 'split':
            ranks = _in_step(table, shares, [_split(table, share, options) for share in shares], options)
        else:
            ranks = _planned(table, batch, num_ranks, options)
        priced = [[_price(piece, price, towers) for piece in pieces] for pieces in ranks]
        loads = [sum(map(sum, prices)) for prices in priced]
        longest = max(len(prices) for prices in priced)
        if options.objective == 'fsdp':
            # Ranks wait for each other after the vision tower and at the end of every microbatch.
            columns = list(zip_longest(*priced, fillvalue=(0.0, 0.0)))
            costs.append(sum(max(tower for tower, _ in column) + max(rest for _, rest in column) for column in columns))
        else:
            costs.append(max(loads))
        imbalances.append(costs[-1] * num_ranks / sum(loads))
        counts.append(longest)
        computed += sum(sum(piece.widths) for pieces in ranks for piece in pieces)
        real += int(table.tokens[batch].sum())
    return StepFigures(
        cost=float(np.mean(costs)),
        padding_ratio=1 - real / computed,
        microbatches=float(np.mean(counts)),
        imbalance=float(np.mean(imbalances)),
    )


def _price(piece: _Piece, price: CostModel, towers: np.ndarray) -> tuple[float, float]:
    """Of a microbatch: in the vision tower, and all the rest."""
    rows = float(price.rows(np.array(piece.widths)).sum()) + price.launch
    return float(towers[piece.samples].sum()), price.packed(piece.widths) if piece.is_packed else rows


def _stock(table: SampleSizes, share: np.ndarray, rows: int) -> list[_Piece]:
    """Every microbatch is as wide as the device batch: Composer's split slices rows and trims nothing."""
    width = int(table.tokens[share].max())
    chunks = [share[start : start + rows] for start in range(0, len(share), rows)]
    return [_Piece([width] * len(chunk), chunk) for chunk in chunks]


def _split(table: SampleSizes, share: np.ndarray, options: CutOptions) -> list[_Piece]:
    """As :class:`composer_tokacc.data_spec.split.MicrobatchSplit` cuts a device batch."""
    lengths, widest = table.tokens[share], int(table.tokens[share].max())
    groups = cut_rows(lengths, options, image_tokens=table.image_tokens[share], max_width=widest)
    if options.packing is True:
        return [_Piece(lengths[rows].tolist(), share[rows], is_packed=True) for rows in groups]
    widths = padded_widths(np.array([lengths[rows].max() for rows in groups]), options.width_multiple, widest)
    return [_Piece([width] * len(rows), share[rows]) for width, rows in zip(widths.tolist(), groups, strict=True)]


def _planned(table: SampleSizes, batch: np.ndarray, num_ranks: int, options: CutOptions) -> list[list[_Piece]]:
    """As :class:`.RegroupingBatchSampler` plans a global batch."""
    patches = None if table.vision_patches is None else table.vision_patches[batch]
    plan = plan_rows(
        table.tokens[batch],
        options,
        num_ranks=num_ranks,
        image_tokens=table.image_tokens[batch],
        vision_cost=options.cost.tower(table.image_tokens[batch], patches),
    )
    shares = [batch[[index for one in rank for index in one.indices]] for rank in plan.ranks]
    if options.packing:
        # The plan says which rank reads which samples, and the split packs those anew.
        return _in_step(table, shares, [_split(table, share, options) for share in shares], options)
    ranks = [[_Piece([one.width] * len(one.indices), batch[list(one.indices)]) for one in rank] for rank in plan.ranks]
    return _in_step(table, shares, ranks, options)


def _in_step(
    table: SampleSizes, shares: list[np.ndarray], ranks: list[list[_Piece]], options: CutOptions
) -> list[list[_Piece]]:
    """Ranks with fewer microbatches repeat their smallest row without weight, where counts must be equal.

    Where the step has images the row has one, or a rank would leave the vision tower unused.
    """
    most = max(len(pieces) for pieces in ranks)
    is_equal = options.objective == 'fsdp' if options.equal_counts == 'auto' else options.equal_counts
    if not is_equal or all(len(pieces) == most for pieces in ranks):
        return ranks
    samples = np.concatenate(shares)
    seeing = samples[table.image_tokens[samples] > 0]
    candidates = seeing if len(seeing) else samples
    smallest = candidates[np.argmin(table.tokens[candidates])]
    filler = _Piece([int(table.tokens[smallest])], np.array([smallest]))
    return [pieces + [filler] * (most - len(pieces)) for pieces in ranks]
