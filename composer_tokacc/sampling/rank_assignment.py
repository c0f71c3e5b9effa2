# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What one rank loads of a global batch, microbatch by microbatch; its planner, and rows that are only copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.metadata import with_metadata
from composer_tokacc.planning import CutOptions, Microbatch, MicrobatchPlan, check_count, plan_rows
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
        microbatches = [[members[place] for place in some] for some in places]
        of_each = None if weights is None else [[weights[place] for place in some] for some in places]
        return cls(microbatches, is_copy=not computed, weights=of_each)


def check_global_batch(global_batch_size: int, num_ranks: int) -> None:
    """Refuses a global batch that ranks cannot share."""
    check_count('global_batch_size', global_batch_size)
    if global_batch_size % num_ranks:
        above = -(-global_batch_size // num_ranks) * num_ranks
        raise ValueError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_ranks} ranks. Set it to {above}, or launch another number of ranks.'
        )


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
            batch = widened({key: batch[key] for key in batch.keys()}, self.options.width_multiple)  # noqa: SIM118
            text = batch.get('input_ids', batch.get('labels'))
            if text is not None and len(text) != len(indices):
                raise ValueError(
                    f'`collate_fn` must return a row for each sample, got: {len(text)} rows for {len(indices)} '
                    f'samples, from {sample_name(batch, 0)} on. Pack rows with `token_data_spec(..., packing=True)`.'
                )
            if assignment.weights is not None:
                if LOSS_WEIGHTS in batch:
                    found = f'some beside shares of the loss, for {sample_name(batch, 0)}. Remove one'
                    raise ValueError(f'`{LOSS_WEIGHTS}` must be left out of the batch, got: {found}.')
                batch = {**batch, LOSS_WEIGHTS: assignment.weights[number]}
            microbatches.append(with_metadata(batch, samples=[0]) if assignment.is_copy else batch)
        return PreSplitBatch(microbatches, max_tokens=self.options.max_tokens, indices=assignment.microbatches)


def num_repeated(dataloader: Any, batch_index: int) -> int:
    """Returns how many rows at the end of this rank's batch are copies of samples that others have: 0 or 1.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many, and a
    RegroupingBatchSampler gives a copy to a rank that is left without any. Computed as samples they would count twice,
    and make every number of ranks train another last step; they must weigh nothing. Samplers of others, iterable
    datasets, and loaders that see to it themselves (``marks_added_rows``) have no such rows. `batch_index` counts the
    epoch's batches from 0, those that were skipped on resuming included.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    has_only_copies = getattr(dataloader.batch_sampler, 'has_only_copies', None)
    if has_only_copies is not None:
        return int(has_only_copies(batch_index))
    if dataloader.batch_size is None:
        return 0
    return num_repeated_by(dataloader.sampler, dataloader.batch_size, batch_index)


def num_repeated_by(sampler: Any, batch_size: int, batch_index: int) -> int:
    """Returns how many rows at the end of a batch torch's DistributedSampler repeats; 0 for other samplers."""
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return 0
    # Fewer than one sample a rank is repeated in all, so a rank has one at most, and has it last.
    last = sampler.num_samples - 1
    position = last * sampler.num_replicas + sampler.rank
    num_samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    return int(batch_index == last // batch_size and position >= num_samples)
