# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What one rank loads of a global batch, microbatch by microbatch, and the planner that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.metadata import with_metadata
from composer_tokacc.planning import CutOptions, Microbatch, MicrobatchPlan, plan_rows
from composer_tokacc.weights import LOSS_WEIGHTS


@dataclass(frozen=True)
class RankAssignment:
    """What one rank loads. The split adds dummy rows where they are needed, but needs a row to begin with."""

    microbatches: list[list[int]]
    """Samples of each microbatch; for a rank that has none, one that another rank computes."""
    is_copy: bool = False
    """Whether it is such a copy, which must weigh nothing."""
    weights: list[list[float]] | None = None
    """What a token of each sample weighs in the step, where that is not the same."""

    def __iter__(self) -> Iterator[int]:
        """Yields all samples, microbatch by microbatch, as a plain DataLoader reads them."""
        return chain.from_iterable(self.microbatches)

    def __len__(self) -> int:
        return sum(map(len, self.microbatches))

    @classmethod
    def from_plan(
        cls, planned: Sequence[Microbatch], members: Sequence[int], weights: Sequence[float] | None = None
    ) -> RankAssignment:
        """Returns that of a rank with these planned microbatches, whose indices are places in `members`."""
        computed = [microbatch for microbatch in planned if not microbatch.filled]
        places = [microbatch.indices for microbatch in computed or planned[:1]]
        chosen, of_each = ([[values[i] for i in some] for some in places] for values in (members, weights or members))
        return cls(chosen, is_copy=not computed, weights=None if weights is None else of_each)


@dataclass(frozen=True)
class LoadPlanner:
    """Cuts, assigns and collates the global batches of a run."""

    num_ranks: int
    options: CutOptions

    def plan(self, lengths: Any, image_tokens: Any, vision_cost: Any = None) -> MicrobatchPlan:
        """Plans a global batch, with a sample for every rank where there are enough; see :func:`.plan_microbatches`."""
        given: dict[str, Any] = {'num_ranks': self.num_ranks, 'image_tokens': image_tokens, 'vision_cost': vision_cost}
        plan = plan_rows(lengths, self.options, **given)
        if len(lengths) >= self.num_ranks and any(all(one.filled for one in rank) for rank in plan.ranks):
            # Under 'fsdp' step slots by modality can leave a rank without samples: nothing to collate.
            plan = plan_rows(lengths, replace(self.options, objective='ddp'), **given)
        return plan

    def collate(
        self, collate_fn: Callable[[list[Any]], Any], samples: Sequence[Any], assignment: RankAssignment
    ) -> PreSplitBatch:
        """Collates each microbatch of an assignment by itself; `samples` are those of all, one after the other."""
        remaining = iter(samples)
        microbatches: list[Batch] = []
        for number, indices in enumerate(assignment.microbatches):
            batch = collate_fn([next(remaining) for _ in indices])
            # A tokenizer's BatchEncoding is no Mapping by type, but reads like one.
            if not hasattr(batch, 'keys'):
                raise ValueError(f'`collate_fn` must return a mapping, got: {type(batch).__name__}. Name its entries.')
            batch: dict[str, Any] = widened({key: batch[key] for key in batch.keys()}, self.options.width_multiple)  # noqa: SIM118
            if assignment.weights is not None:
                if LOSS_WEIGHTS in batch:
                    found = f'some beside shares of the loss, for {sample_name(batch, 0)}. Remove one'
                    raise ValueError(f'`{LOSS_WEIGHTS}` must be left out of the batch, got: {found}.')
                batch[LOSS_WEIGHTS] = assignment.weights[number]
            microbatches.append(with_metadata(batch, samples=[0]) if assignment.is_copy else batch)
        return PreSplitBatch(microbatches, max_tokens=self.options.max_tokens, indices=assignment.microbatches)
