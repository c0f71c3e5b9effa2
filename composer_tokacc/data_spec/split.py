# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Splits a device batch into trimmed microbatches under a token budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from composer.utils import dist

from composer_tokacc.counting import NUM_MICROBATCHES, PACKED, PACKED_CHECKED
from composer_tokacc.data_spec.added_rows import SpareImageRow, add_row, zero_weight
from composer_tokacc.data_spec.packing import pack_lengths, pack_rows
from composer_tokacc.data_spec.replay import MICROBATCH_IDS, replay_cut
from composer_tokacc.layout import Batch, BatchLayout
from composer_tokacc.planning import CostModel, cut, cut_in_order, raise_count

__all__ = ['MicrobatchSplit']

log = logging.getLogger(__name__)


class MicrobatchSplit:
    """Composer's ``split_batch``: a microbatch size of ``k`` is a memory of ``k`` rows of ``slot_tokens``.

    Args:
        layout: How tensors belong to rows. None: inferred from each batch.
        slot_tokens: Width of a slot. None: the width of the device batch.
        regroup: Whether rows may be sorted by length; otherwise microbatches are contiguous.
        equal_counts: Whether all ranks make the same number of microbatches.
        width_multiple: Round widths up to a multiple, never beyond the device batch's own.
        packing: Whether a microbatch's rows become one packed row.
        cost: What microbatches cost, for a cut of least cost.
    """

    def __init__(
        self,
        *,
        layout: BatchLayout | None,
        slot_tokens: int | None,
        regroup: bool,
        equal_counts: bool,
        width_multiple: int,
        packing: bool,
        cost: CostModel | None,
    ) -> None:
        self.layout = layout
        self.slot_tokens = slot_tokens
        self.regroup = regroup
        self.equal_counts = equal_counts
        self.width_multiple = width_multiple
        self.packing = packing
        self.cost = cost
        self._spare = SpareImageRow()
        self._warned = False

    def __call__(self, batch: Batch, microbatch_size: int | float) -> list[dict[str, Any]]:
        """Splits in training; in evaluation (no gradients) rows keep order and ``microbatch_size`` counts rows.

        Raises:
            ValueError: If ``microbatch_size`` is not positive, or the layout does not know an entry.
        """
        if microbatch_size <= 0:
            raise ValueError(f'`device_train_microbatch_size` must be positive, got: {microbatch_size}.')
        layout = self.layout or BatchLayout.infer(batch)
        if not torch.is_grad_enabled():
            # The trainer drops a sampler's padding with split_batch(batch, n - 1)[0]: exactly n - 1 rows, in order.
            return self._chunks(layout, batch, max(int(microbatch_size), 1))
        if self.packing and batch.get(PACKED) != PACKED_CHECKED:
            raise RuntimeError(
                '`packing=True` needs TokenAccumulation, which checks that the model tells packed documents apart, '
                'got: no such check. Add it to `algorithms`, or set `packing=False`.'
            )
        reason = layout.coupling(batch)
        if reason and self.regroup:
            raise RuntimeError(
                f'Rows must be independent to be regrouped, got: {reason}. Set `token_data_spec(..., regroup=False)`, '
                'or keep rows with and without images in batches of their own.'
            )
        lengths = layout.lengths(batch)
        budget = int(microbatch_size * (self.slot_tokens or batch['input_ids'].shape[1]))
        groups = self._planned(batch, lengths, budget) or self._cut(lengths, budget, batch['input_ids'].shape[1])
        batch = {key: value for key, value in batch.items() if key != MICROBATCH_IDS}
        if dist.get_world_size() > 1:
            microbatches = self._in_step(layout, batch, lengths, groups, budget)
        else:
            microbatches = self._build(layout, batch, groups)
        return [pack_rows(layout, microbatch) for microbatch in microbatches] if self.packing else microbatches

    def _chunks(self, layout: BatchLayout, batch: Batch, size: int) -> list[dict[str, Any]]:
        num_rows = layout.num_rows(batch)
        chunks = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        return [layout.trim(layout.select(batch, rows), width_multiple=self.width_multiple) for rows in chunks]

    def _cut(self, lengths: list[int], budget: int, width: int) -> list[list[int]]:
        if max(lengths) > budget and not self._warned:
            self._warned = True
            log.warning(
                'A row of %d tokens is wider than the budget of a microbatch, %d tokens, and goes alone over it. '
                'Raise `device_train_microbatch_size` or `slot_tokens`, or shorten the sample. This warning is given '
                'once.',
                max(lengths),
                budget,
            )
        if self.packing:
            return pack_lengths(lengths, budget)
        cutter = cut if self.regroup else cut_in_order
        return cutter(lengths, budget, width_multiple=self.width_multiple, max_width=width, cost=self.cost)

    def _planned(self, batch: Batch, lengths: list[int], budget: int) -> list[list[int]] | None:
        """The cut that a RegroupingBatchSampler planned for all ranks, if there is one and it keeps the budget."""
        if not self.regroup or self.packing:
            return None
        width = batch['input_ids'].shape[1]
        return replay_cut(batch, lengths, budget, width_multiple=self.width_multiple, max_width=width)

    def _build(self, layout: BatchLayout, batch: Batch, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        microbatches = []
        for rows in groups:
            microbatch = layout.trim(layout.select(batch, rows), width_multiple=self.width_multiple)
            microbatches.append({**microbatch, NUM_MICROBATCHES: len(groups)})
        return microbatches

    def _in_step(
        self, layout: BatchLayout, batch: Batch, lengths: list[int], groups: list[list[int]], budget: int
    ) -> list[dict[str, Any]]:
        """Several ranks: every microbatch uses the vision tower if any does, and counts are equal where they must be.

        A tower that one rank leaves unused makes DDP raise or skip its reduction, and FSDP hang.
        """
        self._spare.update(layout, batch)
        images = layout.media_per_row(batch)
        if self._spare.row is not None:
            groups = self._make_room(groups, lengths, images, budget)
        count = len(groups)
        if self.equal_counts:
            count = _max_over_ranks(count)
            groups = raise_count(groups, count, lengths)
        microbatches = self._build(layout, batch, groups)
        if self._spare.row is not None:
            microbatches = [
                microbatch if any(images[row] for row in rows) else add_row(layout, microbatch, self._spare.row)
                for rows, microbatch in zip(groups, microbatches, strict=True)
            ]
        if len(microbatches) < count:
            shortest = min(range(len(lengths)), key=lengths.__getitem__)
            filler = self._spare.row or zero_weight(layout.trim(layout.select(batch, [shortest])))
            microbatches += [{**filler, NUM_MICROBATCHES: len(groups)}] * (count - len(microbatches))
        return microbatches

    def _make_room(
        self, groups: list[list[int]], lengths: list[int], images: list[int], budget: int
    ) -> list[list[int]]:
        """Halves microbatches without images until the row with an image fits under the cap as well."""
        assert self._spare.row is not None
        spare_width = self._spare.row['input_ids'].shape[1]
        fitting: list[list[int]] = []
        pending = list(reversed(groups))
        while pending:
            rows = pending.pop()
            width = max(spare_width, *(lengths[row] for row in rows))
            if any(images[row] for row in rows) or len(rows) == 1 or (len(rows) + 1) * width <= budget:
                fitting.append(rows)
            else:
                pending += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
        return fitting


def _max_over_ranks(value: int) -> int:
    """One integer all-reduce; on the GPU only where the backend knows no other."""
    on_gpu = torch.distributed.get_backend() == 'nccl'
    tensor = torch.tensor([value], device=torch.cuda.current_device() if on_gpu else 'cpu')
    dist.all_reduce(tensor, reduce_operation='MAX')
    return int(tensor.item())
