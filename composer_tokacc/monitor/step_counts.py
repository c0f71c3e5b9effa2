# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Counts of a rank in a step.

They are read from the batch if :class:`.TokenAccumulation` or the data spec has counted its tokens. If not, the tokens
are counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from composer_tokacc.batch import Batch, text_of
from composer_tokacc.counting import LossRule
from composer_tokacc.layout import microbatches_of
from composer_tokacc.row_counts import CountSums, RowCounts, count_rows, is_counted, row_counts_of


class StepCounts(NamedTuple):
    """Counts of one rank, or their sum over all ranks.

    Of ``loader_seconds`` and ``peak_memory`` the largest value of all ranks is logged. Their sum is not used.
    """

    samples: float
    real_tokens: float
    loss_tokens: float
    loss_weight: float  # sum of the weights of the loss tokens
    device_batch_positions: float  # positions before the batch was split
    positions: float  # computed positions, padding included
    dummy_positions: float  # computed positions of dummy rows and of repeated samples
    microbatches: float
    empty_microbatches: float  # without loss tokens
    flops: float  # floating-point operations of the model in this step
    device_flops_per_second: float  # operations that the device can do in a second; 0: not known
    loader_seconds: float  # time that the rank waited for the data of the step
    peak_memory: float  # most bytes of the device that were allocated so far; 0 without a GPU
    gradient_square: float  # the rank's share of the squared norm of the gradient; NaN or infinite after an overflow
    weighting_distance: float  # what `sample_weighting_error` sums over the ranks, of the previous step

    @classmethod
    def total(cls, counts_by_rank: Sequence[StepCounts]) -> StepCounts:
        """Returns the sum of each field over the ranks."""
        values_by_field = zip(*counts_by_rank, strict=True)
        return cls(*map(sum, values_by_field))


class MicrobatchCounts(NamedTuple):
    """Counts of a microbatch. The fields have the meaning of :class:`StepCounts`."""

    samples: int
    loss_tokens: int | torch.Tensor  # a tensor () if they were counted on the device
    positions: int
    dummy_positions: int


def count_device_batch(batch: Batch, rule: LossRule) -> CountSums:
    """Returns the sums of the counts of all rows of a device batch, which is still on the CPU.

    If nobody has counted its tokens, they are counted by ``rule``.
    """
    rows = row_counts_of(batch) if is_counted(batch) else count_rows(batch, rule)
    return CountSums.of(rows)


def count_microbatch(batch: Batch, rule: LossRule) -> MicrobatchCounts:
    """Counts a microbatch without waiting for the device.

    If nobody has counted its loss tokens, they are counted by ``rule``, on the device.
    """
    dummy_positions = 0
    for row, row_positions in rows_with_positions(batch):
        if row.samples == 0:  # a dummy row or a repeated sample
            dummy_positions += row_positions
    counts = CountSums.of(row_counts_of(batch))  # if nobody has counted, each row is one sample without tokens
    loss_tokens: int | torch.Tensor = counts.loss_tokens
    if not is_counted(batch):
        loss_tokens = rule.mask(batch).sum()
    return MicrobatchCounts(
        samples=counts.samples,
        loss_tokens=loss_tokens,
        positions=num_positions(batch),
        dummy_positions=dummy_positions,
    )


def num_positions(batch: Batch) -> int:
    """Returns the number of rows times the padded width.

    The microbatches of a pre-split batch count as if they were padded to one width, as a stock loader would pad them.
    """
    total_rows = 0
    largest_width = 0
    for microbatch in microbatches_of(batch):
        num_rows, width = text_of(microbatch).shape[:2]
        total_rows += num_rows
        largest_width = max(largest_width, width)
    return total_rows * largest_width


def rows_by_width(batch: Batch) -> Counter[int]:
    """Returns the number of rows of each width in a microbatch, because the cost of attention depends on the width.

    A packed row is replaced by its documents, because each document attends only to itself.
    """
    return Counter(width for _, width in rows_with_positions(batch))


def rows_with_positions(batch: Batch) -> list[tuple[RowCounts, int]]:
    """Returns the counts of each row of a microbatch with its number of positions, in order.

    A packed row is replaced by its documents.
    """
    width = text_of(batch).shape[1]
    rows = []
    for row in row_counts_of(batch):
        if not row.documents:
            rows.append((row, width))
            continue
        # A packed row has no padding, except that a document may end with one labelled pad. So a sample has about as
        # many positions as real tokens. Dummy rows and repeated samples count no real tokens, so their number of
        # positions is not known: they share the positions that remain equally.
        num_dummies = sum(document.samples == 0 for document in row.documents)
        positions_of_dummy = (width - row.real_tokens) // max(num_dummies, 1)
        for document in row.documents:
            num_positions_of_document = document.real_tokens
            if document.samples == 0:
                num_positions_of_document = positions_of_dummy
            rows.append((document, num_positions_of_document))
    return rows
