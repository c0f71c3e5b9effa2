# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The samples of a global batch that one rank loads: its part of the plan of all ranks, and how they are collated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, BatchDict, common_padding_side, sample_name
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.layout.joining import with_masks
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.planning import CutOptions, Microbatch
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from composer_tokacc.sampling.mixture import LossShares
from composer_tokacc.weights import LOSS_WEIGHTS, WeightsOfShares

LoadedSample = TypeVar('LoadedSample')

ENDED_BY_AN_ERROR = (
    'The dataset or `collate_fn` has raised StopIteration, which a loader takes for the end of the epoch. Look for a '
    '`next()` without a default, such as that of a processor for a text with more image tokens than images.'
)
"""Error message of a loader. Without this error the epoch would end early, and its last samples would be lost."""


@dataclass(frozen=True)
class RankAssignment:
    """The samples of a global batch that one rank loads, at least one.

    In the plan, a rank may have dummy microbatches in the place of missing ones. They are left out here, because the
    split makes dummy rows from any loaded row. But a rank that has only dummies must load one row. So it gets a copy of
    a sample that another rank computes.
    """

    microbatches: list[list[int]]
    """Samples of each microbatch, by index in the dataset; for ExchangingDataLoader by their number in the step."""
    is_copy: bool = False
    """Whether its only sample is such a copy, which must have no weight in the loss."""
    weights: list[list[float]] | None = None
    """For each sample of each microbatch the weight of its tokens; None if all tokens of the step weigh the same."""
    loss_tokens: list[list[int]] | None = None
    """For each sample of each microbatch the loss tokens from which its weight was computed; None: no weights. A step
    is refused if its labels have other numbers of loss tokens."""
    plan_checksum: int = 0
    """Checksum of the plan of all ranks. If it differs between ranks, the step is refused."""
    samples_to_compare: tuple[int, ...] = field(default=(), compare=False)  # not a part of the plan
    """Samples that every rank reads in addition, to compare the datasets of the ranks, see :func:`.witness_of`."""
    refusal: str = field(default='', compare=False)
    """Error message for a plain DataLoader, which takes only the samples of an assignment, and so would train a copy
    with its full weight, or without the weights of `loss_shares`. Empty: a plain DataLoader may read the samples."""

    def __iter__(self) -> Iterator[int]:
        """Yields all samples, microbatch by microbatch. A plain DataLoader reads them in this order.

        Raises ValueError if a plain DataLoader must not read them.
        """
        if self.refusal:
            raise InvalidInputError(self.refusal)
        for indices in self.microbatches:
            yield from indices

    def __len__(self) -> int:
        """Returns the number of samples."""
        return sum(len(indices) for indices in self.microbatches)

    @classmethod
    def from_plan(
        cls,
        planned: Sequence[Microbatch],
        global_batch: np.ndarray,
        loss_shares: LossShares | None = None,
        plan_checksum: int = 0,
    ) -> RankAssignment:
        """Returns the assignment of a rank.

        Args:
            planned: Microbatches of the rank. Their indices are positions in `global_batch`.
            global_batch: Samples of the global batch, int64 (n,).
            loss_shares: Gives the tokens of each sample their weight. None: all tokens of the step weigh the same.
            plan_checksum: Checksum of the plan of all ranks.
        """
        # A dummy of the plan is marked `filled`. It has one index, that of a sample that another microbatch computes.
        loaded = [microbatch for microbatch in planned if not microbatch.filled]
        has_only_dummies = not loaded
        if has_only_dummies:
            loaded = planned[:1]
        positions_of_microbatches = [list(microbatch.indices) for microbatch in loaded]
        samples = [global_batch[positions].tolist() for positions in positions_of_microbatches]
        assignment = cls(samples, is_copy=has_only_dummies, plan_checksum=plan_checksum)
        if loss_shares is None:
            return assignment
        weights_of_batch = loss_shares.weights(global_batch)
        weights = [weights_of_batch[positions].tolist() for positions in positions_of_microbatches]
        loss_tokens = [loss_shares.loss_tokens[indices].tolist() for indices in samples]
        return replace(assignment, weights=weights, loss_tokens=loss_tokens)


def collate(
    collate_fn: Callable[[list[LoadedSample]], Any],
    samples: Sequence[LoadedSample],
    assignment: RankAssignment,
    options: CutOptions,
) -> PreSplitBatch:
    """Returns the batch of an assignment: each microbatch is collated by itself, and widened to ``width_multiple``.

    It has the weights of the assignment, and a copy is marked as 0 samples. The samples must be in the order of the
    assignment. Raises ValueError if `collate_fn` returns no mapping, another number of rows, or weights although the
    assignment has some.
    """
    collated: list[Batch] = []
    remaining = iter(samples)
    for indices in assignment.microbatches:
        samples_of_microbatch = list(islice(remaining, len(indices)))
        batch = _as_mapping(collate_fn(samples_of_microbatch))
        _check_rows(batch, len(indices))
        collated.append(batch)
    if options.width_multiple > 1:
        collated = _widened_as_planned(collated, options)
    microbatches: list[Batch] = []
    for number, batch in enumerate(collated):
        if assignment.weights is not None and assignment.loss_tokens is not None:
            batch = _with_weights(batch, assignment.weights[number], assignment.loss_tokens[number])
        if assignment.is_copy:
            batch = _without_weight(batch)
        microbatches.append(batch)
    return PreSplitBatch(microbatches, max_tokens=options.max_tokens, indices=assignment.microbatches)


def _as_mapping(batch: Any) -> dict[str, Any]:
    """Returns a batch as a dict. Raises ValueError if it has no keys."""
    if not hasattr(batch, 'keys'):
        raise InvalidInputError(f'`collate_fn` must return a mapping, got: {type(batch).__name__}. Name its entries.')
    return dict(batch)


def _check_rows(batch: Batch, num_samples: int) -> None:
    """Raises ValueError if the batch has text, but not one row for each sample."""
    text = batch.get('input_ids', batch.get('labels'))
    if text is not None and len(text) != num_samples:
        raise InvalidInputError(
            f'`collate_fn` must return a row for each sample, got: {len(text)} rows for {num_samples} samples, from '
            f'{sample_name(batch, 0)} on. Pack rows with `token_data_spec(..., packing=True)`.'
        )


def _widened_as_planned(microbatches: list[Batch], options: CutOptions) -> list[Batch]:
    """Returns the microbatches padded to their widths in the plan: multiples of ``width_multiple`` within the budget.

    New padding needs a mask. All microbatches get one, because they may be joined later. If all have their planned
    widths already, they are returned as they are, with or without masks.
    """
    side = common_padding_side(microbatches)
    masked = with_masks(microbatches)
    padded = [widened(batch, options.width_multiple, options.max_tokens, side=side) for batch in masked]
    # `widened` returns the batch itself if it needs no padding.
    has_new_padding = any(after is not before for after, before in zip(padded, masked, strict=True))
    if has_new_padding:
        return padded
    return microbatches


def _without_weight(batch: Batch) -> BatchDict:
    """Returns the batch with its only row marked as 0 samples, and its labels masked, because metrics read them."""
    labels = batch.get('labels')
    if isinstance(labels, torch.Tensor):
        batch = {**batch, 'labels': torch.full_like(labels, IGNORE_INDEX)}
    return attach_row_counts(batch, [RowCounts(samples=0)])


def _with_weights(batch: Batch, weights: list[float], loss_tokens: list[int]) -> dict[str, Any]:
    """Returns the batch with the weight of the tokens of each row, and with their number by the table.

    Raises ValueError if it has weights already.
    """
    if LOSS_WEIGHTS in batch:
        raise InvalidInputError(
            f'`{LOSS_WEIGHTS}` must be left out of the batch if the sampler has `loss_shares`, got: both for '
            f'{sample_name(batch, 0)}. Remove one of them.'
        )
    weights_of_rows = WeightsOfShares(weights)
    weights_of_rows.loss_tokens = loss_tokens
    return {**batch, LOSS_WEIGHTS: weights_of_rows}
