# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Plans global batches from tables of their samples, and collates the samples that a rank has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.planning import (
    CAPPED_SIZES,
    CutOptions,
    Microbatch,
    MicrobatchPlan,
    Table,
    check_count,
    checked_sizes,
    checked_table,
    plan_rows,
)
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


def check_cap(option: str, cap: int, sizes: np.ndarray) -> None:
    """Raises ValueError if one sample alone is larger than a cap on the sum of several."""
    highest = int(sizes.argmax())
    if sizes[highest] > cap:
        raise ValueError(
            f'`{option}` must be at least the longest sample, got: {cap} < {sizes[highest]} (sample {highest}). '
            'Raise it, or leave the sample out.'
        )


@dataclass(frozen=True, kw_only=True)
class SampleTables:
    """Sizes and costs of samples for the planner, with one row a sample; see :func:`.plan_microbatches`."""

    lengths: np.ndarray
    image_tokens: np.ndarray | None = None
    loss_tokens: np.ndarray | None = None
    vision_cost: np.ndarray | None = None

    @classmethod
    def checked(
        cls,
        num_samples: int,
        options: CutOptions,
        *,
        lengths: Table,
        image_tokens: Table | None,
        loss_tokens: Table | None,
        vision_cost: Table | None,
    ) -> SampleTables:
        """Returns the tables as arrays. Raises ValueError if one has no row for each sample, or breaks a cap."""
        checked_lengths = checked_table('lengths', lengths, num_samples, least=1)
        check_cap('max_tokens', options.max_tokens, checked_lengths)
        sizes = checked_sizes({'image_tokens': image_tokens, 'loss_tokens': loss_tokens}, options, num_samples)
        for size, cap in options.caps.items():
            check_cap(CAPPED_SIZES[size], cap, sizes[size])
        vision = None
        if vision_cost is not None:
            vision = checked_table('vision_cost', vision_cost, num_samples, dtype=np.float64)
        return cls(lengths=checked_lengths, vision_cost=vision, **sizes)

    def of(self, window: np.ndarray) -> SampleTables:
        """Returns the rows of these samples."""
        columns: dict[str, Any] = {}
        for name, column in vars(self).items():
            columns[name] = None if column is None else column[window]
        return SampleTables(**columns)


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
        loss_tokens: Table | None = None,
    ) -> MicrobatchPlan:
        """Plans a global batch, with a sample for every rank if there are enough; see :func:`.plan_microbatches`."""
        plan_with = partial(
            plan_rows,
            lengths,
            num_ranks=self.num_ranks,
            image_tokens=image_tokens,
            loss_tokens=loss_tokens,
            vision_cost=vision_cost,
        )
        plan = plan_with(options=self.options)
        # Under 'fsdp' a step slot holds samples with images, or samples without. So a rank may get only dummies, even
        # if there are enough samples. It would have nothing to collate, so the batch is planned as for 'ddp'.
        if len(lengths) >= self.num_ranks and _leaves_rank_without_sample(plan):
            plan = plan_with(options=replace(self.options, objective='ddp'))
        return plan

    def collate(
        self,
        collate_fn: Callable[[list[LoadedSample]], Any],
        samples: Sequence[LoadedSample],
        assignment: RankAssignment,
    ) -> PreSplitBatch:
        """Collates each microbatch of an assignment by itself; `samples` are those of all microbatches, in order."""
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
