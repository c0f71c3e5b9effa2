# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What one rank loads of a global batch, microbatch by microbatch, and the planner that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from composer_tokacc.batch import Batch
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.metadata import with_metadata
from composer_tokacc.planning import CutOptions, Microbatch, MicrobatchPlan, plan_rows


@dataclass(frozen=True)
class RankAssignment:
    """What one rank loads. The split adds dummy rows where they are needed, but needs a row to begin with."""

    microbatches: list[list[int]]
    """Samples of each microbatch; for a rank that has none, one that another rank computes."""
    is_copy: bool = False
    """Whether it is such a copy, which must weigh nothing."""

    def __iter__(self) -> Iterator[int]:
        """Yields all samples, microbatch by microbatch, as a plain DataLoader reads them."""
        return chain.from_iterable(self.microbatches)

    def __len__(self) -> int:
        return sum(map(len, self.microbatches))

    @classmethod
    def from_plan(cls, planned: Sequence[Microbatch], members: Sequence[int]) -> RankAssignment:
        """Returns that of a rank with these planned microbatches, whose indices are places in `members`."""
        computed = [microbatch for microbatch in planned if not microbatch.filled]
        microbatches = [[members[place] for place in microbatch.indices] for microbatch in computed or planned[:1]]
        return cls(microbatches, is_copy=not computed)


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
        for indices in assignment.microbatches:
            batch = collate_fn([next(remaining) for _ in indices])
            # A tokenizer's BatchEncoding is no Mapping by type, but reads like one.
            if not hasattr(batch, 'keys'):
                raise ValueError(f'`collate_fn` must return a mapping, got: {type(batch).__name__}. Name its entries.')
            batch = widened({key: batch[key] for key in batch.keys()}, self.options.width_multiple)  # noqa: SIM118
            microbatches.append(with_metadata(batch, samples=[0]) if assignment.is_copy else batch)
        return PreSplitBatch(microbatches, max_tokens=self.options.max_tokens, indices=assignment.microbatches)
