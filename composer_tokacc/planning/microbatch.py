# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a plan consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ['Microbatch', 'MicrobatchPlan', 'PlanStats']


class Microbatch(NamedTuple):
    """Rows that go through the model together (a tuple, because a plan makes hundreds of them a step)."""

    indices: tuple[int, ...]
    """Which samples of `lengths`, ascending."""
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
    """How good a plan is. Ratios of padding are shares of all computed positions; imbalances are 1.0 at best."""

    padding_before: float
    """Padding ratio with all samples padded to the longest."""
    padding_after: float
    """Padding ratio of the plan, zero-weight copies counted as padding."""
    rank_imbalance: float
    """Cost of the slowest rank over the mean."""
    column_imbalance: float
    """Sum of the slowest microbatch of each column over the sum of the columns' means; ranks that are done count 0."""
    cost: float
    """Modelled time of the step under the objective."""
    bound: float
    """Time that no plan can beat: no padding, perfect balance, the fewest launches."""
    microbatches_per_rank: tuple[int, ...]
    oversize: tuple[int, ...]
    """Samples that break a cap by themselves, and therefore go alone."""
    split: int
    """Microbatches that were added by splitting the dearest."""
    filled: int
    """Zero-weight copies that were added."""
    mixed_columns: int
    """Columns ('fsdp') in which some ranks have images and others have none."""
    method: str
    """The cut that won: 'area' or 'min-max'; with columns by modality one for each, joined by '+'."""

    @property
    def share_of_bound(self) -> float:
        """Reached share of the bound: 1.0 is as good as can be."""
        return self.bound / self.cost


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """Who computes what in one global batch."""

    ranks: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of each rank, dearest first; for 'fsdp' the k-th of all ranks run side by side."""
    stats: PlanStats

    def samples(self, rank: int) -> list[int]:
        """Samples of one rank in the order of its microbatches, zero-weight copies left out."""
        return [index for microbatch in self.ranks[rank] if not microbatch.filled for index in microbatch.indices]
