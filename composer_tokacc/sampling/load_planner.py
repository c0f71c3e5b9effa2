# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Planning of global batches, and collating of the samples that a rank has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.planning import CutOptions, Microbatch, MicrobatchPlan, Table, check_count, plan_rows
from composer_tokacc.row_counts import RowCounts, with_rows
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.weights import LOSS_WEIGHTS

LoadedSample = TypeVar('LoadedSample')


def check_global_batch(global_batch_size: int, num_ranks: int) -> None:
    """Raises ValueError unless the global batch is a multiple of the number of ranks."""
    check_count('global_batch_size', global_batch_size)
    if global_batch_size % num_ranks:
        next_multiple = -(-global_batch_size // num_ranks) * num_ranks
        raise ValueError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_ranks} ranks. Set it to {next_multiple}, or launch another number of ranks.'
        )


@dataclass(frozen=True)
class LoadPlanner:
    """Plans the global batches of a run, and collates this rank's part of each."""

    num_ranks: int
    options: CutOptions

    def plan(
        self,
        lengths: Table,
        image_tokens: Table | None,
        vision_cost: Table | None = None,
    ) -> MicrobatchPlan:
        """Plans a global batch, with a sample for every rank if there are enough; see :func:`.plan_microbatches`."""
        plan = self._plan_with(self.options, lengths, image_tokens, vision_cost)
        # Under 'fsdp' the step slots of one modality can leave a rank without a sample. It could collate nothing then.
        if len(lengths) >= self.num_ranks and _leaves_rank_without_sample(plan):
            options = replace(self.options, objective='ddp')
            plan = self._plan_with(options, lengths, image_tokens, vision_cost)
        return plan

    def _plan_with(
        self,
        options: CutOptions,
        lengths: Table,
        image_tokens: Table | None,
        vision_cost: Table | None,
    ) -> MicrobatchPlan:
        return plan_rows(lengths, options, num_ranks=self.num_ranks, image_tokens=image_tokens, vision_cost=vision_cost)

    def collate(
        self,
        collate_fn: Callable[[list[LoadedSample]], Any],
        samples: Sequence[LoadedSample],
        assignment: RankAssignment,
    ) -> PreSplitBatch:
        """Collates each microbatch of an assignment by itself; `samples` belong to all microbatches, in order."""
        microbatches: list[Batch] = []
        start = 0
        for number, indices in enumerate(assignment.microbatches):
            end = start + len(indices)
            batch = _as_mapping(collate_fn(list(samples[start:end])))
            start = end
            batch = widened(batch, self.options.width_multiple)
            _check_rows(batch, len(indices))
            if assignment.weights is not None:
                batch = _with_weights(batch, assignment.weights[number])
            if assignment.is_copy:
                batch = with_rows(batch, [RowCounts(samples=0)])
            microbatches.append(batch)
        return PreSplitBatch(microbatches, max_tokens=self.options.max_tokens, indices=assignment.microbatches)


def _leaves_rank_without_sample(plan: MicrobatchPlan) -> bool:
    return any(_has_only_dummies(rank) for rank in plan.ranks)


def _has_only_dummies(rank: Sequence[Microbatch]) -> bool:
    return all(microbatch.filled for microbatch in rank)


def _as_mapping(batch: Any) -> dict[str, Any]:
    # A tokenizer's BatchEncoding has keys, but its type is not Mapping.
    if not hasattr(batch, 'keys'):
        raise ValueError(f'`collate_fn` must return a mapping, got: {type(batch).__name__}. Name its entries.')
    return {key: batch[key] for key in batch.keys()}  # noqa: SIM118


def _check_rows(batch: Batch, num_samples: int) -> None:
    """Raises ValueError unless the batch has a row for each sample."""
    text = batch.get('input_ids', batch.get('labels'))
    if text is not None and len(text) != num_samples:
        raise ValueError(
            f'`collate_fn` must return a row for each sample, got: {len(text)} rows for {num_samples} samples, from '
            f'{sample_name(batch, 0)} on. Pack rows with `token_data_spec(..., packing=True)`.'
        )


def _with_weights(
    batch: Batch,
    weights: list[float],
) -> dict[str, Any]:
    if LOSS_WEIGHTS in batch:
        raise ValueError(
            f'`{LOSS_WEIGHTS}` must be left out of the batch if the sampler has `loss_shares`, got: both for '
            f'{sample_name(batch, 0)}. Remove one of them.'
        )
    return {**batch, LOSS_WEIGHTS: weights}
