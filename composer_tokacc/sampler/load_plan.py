# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which rank loads which samples of a global batch, and in which microbatches: for whoever plans before the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from composer_tokacc.planning import CostModel, Microbatch, MicrobatchPlan, plan_microbatches

__all__ = ['LoadPlanner', 'RankShare', 'only_copies']


class RankShare(NamedTuple):
    """What one rank loads; the split adds zero-weight copies where they are needed, but needs a row to begin with."""

    indices: list[int]
    """Samples, microbatch by microbatch; for a rank that has none, one that another rank computes."""
    microbatch_ids: list[int]
    """For each, its microbatch; from 0, never falling."""
    is_copy: bool
    """Whether it is such a copy, which must weigh nothing."""

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch]) -> RankShare:
        """That of a rank with these planned microbatches."""
        is_copy = only_copies(microbatches)
        computed = microbatches[:1] if is_copy else [one for one in microbatches if not one.filled]
        return cls(
            [index for microbatch in computed for index in microbatch.indices],
            [number for number, microbatch in enumerate(computed) for _ in microbatch.indices],
            is_copy,
        )


class LoadPlanner:
    """:func:`.plan_microbatches` with the options of a run, and with a sample for every rank where there are enough.

    Args:
        num_ranks: Ranks.
        max_tokens: As for :func:`.plan_microbatches`.
        max_image_tokens: Likewise.
        objective: Likewise.
        cost: Likewise.
        width_multiple: Likewise.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        max_tokens: int,
        max_image_tokens: int | None,
        objective: Literal['ddp', 'fsdp'],
        cost: CostModel | None,
        width_multiple: int,
    ) -> None:
        self._num_ranks = num_ranks
        self._objective: Literal['ddp', 'fsdp'] = objective
        self._plan: Callable[..., MicrobatchPlan] = partial(
            plan_microbatches,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            cost=cost,
            width_multiple=width_multiple,
        )

    def plan(self, lengths: Any, image_tokens: Any) -> MicrobatchPlan:
        """The plan of a global batch.

        Args:
            lengths: Of its samples, (n,) ints.
            image_tokens: Likewise, or None where no sample has any.

        Raises:
            ValueError: If an option is out of range.
        """
        plan = self._plan(lengths, image_tokens=image_tokens, objective=self._objective)
        has_enough = len(lengths) >= self._num_ranks
        if self._objective == 'fsdp' and has_enough and any(map(only_copies, plan.ranks)):
            # Columns by modality can leave a rank without samples, and an empty batch cannot be collated.
            plan = self._plan(lengths, image_tokens=image_tokens, objective='ddp')
        return plan


def only_copies(microbatches: Sequence[Microbatch]) -> bool:
    """Whether a rank has no sample, but zero-weight copies of others."""
    return all(microbatch.filled for microbatch in microbatches)
