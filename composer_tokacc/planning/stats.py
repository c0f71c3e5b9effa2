# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How good a plan is, against the bound for any plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from composer_tokacc.planning.cost import CostModel
from composer_tokacc.planning.microbatch import Microbatch, PlanStats
from composer_tokacc.planning.search import Cut

__all__ = ['lower_bound', 'measure']


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


def measure(
    table: Sequence[Sequence[Microbatch]],
    cuts: Sequence[Cut],
    objective: str,
    lengths: np.ndarray,
    images: np.ndarray,
    cost: CostModel,
    max_tokens: int,
    max_image_tokens: int | None,
) -> PlanStats:
    """Measure a plan.

    Args:
        table: Microbatches of each rank.
        cuts: The cuts they come from.
        objective: 'ddp' or 'fsdp'.
        lengths: Real lengths in tokens, (n,).
        images: Image tokens, (n,).
        cost: The cost model.
        max_tokens: Token budget of a microbatch.
        max_image_tokens: Image budget of a microbatch, if any.
    """
    num_ranks = len(table)
    costs = np.zeros((num_ranks, max(len(rank) for rank in table)))
    for rank, microbatches in enumerate(table):
        costs[rank, : len(microbatches)] = [microbatch.cost for microbatch in microbatches]
    loads, slowest = costs.sum(axis=1), float(costs.max(axis=0).sum())
    computed = sum(microbatch.num_tokens for rank in table for microbatch in rank)
    real = int(lengths.sum())
    over = lengths > max_tokens
    if max_image_tokens is not None:
        over |= images > max_image_tokens
    mixed = 0
    if objective == 'fsdp' and images.any():
        seen = [[bool(images[list(microbatch.indices)].any()) for microbatch in rank] for rank in table]
        mixed = sum(any(column) and not all(column) for column in zip(*seen, strict=True))
    return PlanStats(
        padding_before=1.0 - real / (len(lengths) * int(lengths.max())),
        padding_after=1.0 - real / computed,
        rank_imbalance=float(loads.max() / loads.mean()),
        column_imbalance=slowest * num_ranks / float(loads.sum()),
        cost=slowest if objective == 'fsdp' else float(loads.max()),
        bound=lower_bound(lengths, images, num_ranks, cost, max_tokens, max_image_tokens),
        microbatches_per_rank=tuple(len(rank) for rank in table),
        oversize=tuple(np.flatnonzero(over).tolist()),
        split=sum(cut.num_split for cut in cuts),
        filled=sum(cut.num_filled for cut in cuts),
        mixed_columns=mixed,
        method='+'.join(cut.method for cut in cuts),
    )
