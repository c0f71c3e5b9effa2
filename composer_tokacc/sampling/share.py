# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What one rank loads of a global batch, microbatch by microbatch, and the planner that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from composer_tokacc.counting import with_carried
from composer_tokacc.layout import Batch, ReadyBatch
from composer_tokacc.layout.ready import widened
from composer_tokacc.planning import CostModel, Microbatch, MicrobatchPlan, plan_microbatches

__all__ = ['LoadPlanner', 'RankShare', 'collate_share']


@dataclass(frozen=True)
class RankShare:
    """What one rank loads. The split adds zero-weight copies where they are needed, but needs a row to begin with."""

    microbatches: list[list[int]]
    """Samples of each microbatch; for a rank that has none, one that another rank computes."""
    is_copy: bool = False
    """Whether it is such a copy, which must weigh nothing."""

    def __iter__(self) -> Iterator[int]:
        """All samples, microbatch by microbatch, as a plain DataLoader reads them."""
        return chain.from_iterable(self.microbatches)

    def __len__(self) -> int:
        """Number of samples."""
        return sum(map(len, self.microbatches))

    @classmethod
    def from_plan(cls, planned: Sequence[Microbatch], members: Sequence[int] | None = None) -> RankShare:
        """That of a rank with these planned microbatches, whose indices are places in `members`."""
        is_copy = all(microbatch.filled for microbatch in planned)
        computed = planned[:1] if is_copy else [microbatch for microbatch in planned if not microbatch.filled]
        places = [list(microbatch.indices) for microbatch in computed]
        if members is not None:
            places = [[members[place] for place in microbatch] for microbatch in places]
        return cls(places, is_copy)


def collate_share(
    collate_fn: Callable[[list[Any]], Any],
    samples: Sequence[Any],
    share: RankShare,
    *,
    max_tokens: int,
    width_multiple: int,
) -> ReadyBatch:
    """Collates each microbatch of a share by itself.

    Args:
        collate_fn: Makes a mapping of the samples of a microbatch.
        samples: Those of the share, microbatch by microbatch.
        share: The share.
        max_tokens: Token budget that it was planned for.
        width_multiple: What widths are rounded up to.

    Raises:
        ValueError: If `collate_fn` makes something else.
    """
    left = iter(samples)
    microbatches: list[Batch] = []
    for indices in share.microbatches:
        batch = collate_fn([next(left) for _ in indices])
        # A tokenizer's BatchEncoding is no Mapping by type, but reads like one.
        if not hasattr(batch, 'keys'):
            raise ValueError(f'`collate_fn` must return a mapping, got: {type(batch).__name__}. Name its entries.')
        microbatches.append(widened({key: batch[key] for key in batch.keys()}, width_multiple))  # noqa: SIM118
    if share.is_copy:
        microbatches = [with_carried(batch, samples=[0]) for batch in microbatches]
    return ReadyBatch(microbatches, max_tokens=max_tokens, indices=share.microbatches)


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
        self.max_tokens, self.width_multiple = max_tokens, width_multiple
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
        if self._objective == 'fsdp' and has_enough and any(RankShare.from_plan(rank).is_copy for rank in plan.ranks):
            # Columns by modality can leave a rank without samples, and an empty batch cannot be collated.
            plan = self._plan(lengths, image_tokens=image_tokens, objective='ddp')
        return plan
