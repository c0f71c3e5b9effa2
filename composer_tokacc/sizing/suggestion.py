# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The microbatch sizing helper: how large may a microbatch be, and what is gained?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from composer_tokacc.planning import CostModel, Rows, lower_bound
from composer_tokacc.sizing.capacity import Capacity, LargestMicrobatch, largest_microbatch
from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes, profile_lengths
from composer_tokacc.sizing.report import SizeRow, SizingReport
from composer_tokacc.sizing.simulate import METHODS, CutOptions, StepFigures, draw_batches, simulate_steps

if TYPE_CHECKING:
    from composer_tokacc.data.lengths import LengthTable

__all__ = ['suggest_microbatching']

NUM_BATCHES = 24
"""Global batches that are simulated for each figure."""


def suggest_microbatching(
    lengths: LengthTable | Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    global_batch_size: int,
    memory: MemoryModel,
    device_memory_gib: float,
    cost: CostModel | None = None,
    measured_cost: CostModel | None = None,
    seconds_per_step: float = 0.0,
    safety: float = 0.92,
    slot_tokens: int | None = None,
    regroup: bool = True,
    equal_counts: bool | str = 'auto',
    width_multiple: int = 1,
    packing: bool = False,
    sample_ids: Sequence[str] | None = None,
    seed: int = 0,
) -> SizingReport:
    """Finds the largest safe microbatch of a run, and what it gains over stock Composer at the same memory.

    Steps are simulated with the functions, the cost and the options by which the run will cut: `cost`, `regroup`,
    `equal_counts`, `width_multiple` and `packing` are those of :func:`.token_data_spec`.

    Args:
        lengths: Length table of the dataset, from :func:`.length_table`, or plain lengths.
        num_ranks: Ranks of the run.
        global_batch_size: Samples of an optimizer step over all ranks.
        memory: Memory model of the run, which also says whether it shards with FSDP.
        device_memory_gib: Memory of one device, for one rank.
        cost: What the run takes a microbatch to cost. Default: the planner's own.
        measured_cost: What one costs on the machine, fitted to measured times, where seconds are wanted.
            Default: `cost`.
        seconds_per_step: Seconds of a step outside its microbatches: optimizer, data, logging.
        safety: Share of the device memory that may be planned for. The rest is the driver's, the communication
            buffers' and lost to fragmentation.
        slot_tokens: Width of a slot; by default the longest sample.
        regroup: Whether microbatches may sort rows.
        equal_counts: Whether all ranks make the same number of microbatches.
        width_multiple: Widths are rounded up to it.
        packing: Whether a microbatch's rows become one packed row.
        sample_ids: Names of the samples, for messages.
        seed: Of the order of the simulated batches.

    Returns:
        The report; ``print(report.text())`` shows it, ``print(report.yaml())`` the lines to paste.

    Raises:
        ValueError: An argument is out of range, or not even the shortest sample fits.
    """
    table = SampleSizes.of(lengths, sample_ids)
    _check(num_ranks, global_batch_size, device_memory_gib, safety, slot_tokens, width_multiple)
    limit = safety * device_memory_gib * GIB
    capacity = Capacity(memory=memory, table=table, num_ranks=num_ranks, limit=limit, packing=packing)
    slot = slot_tokens or -(-int(table.tokens.max()) // width_multiple) * width_multiple
    rows_per_rank = global_batch_size // num_ranks
    chosen = largest_microbatch(capacity, rows_per_rank=rows_per_rank, slot_tokens=slot)
    price = measured_cost or cost or CostModel()
    batches = draw_batches(len(table), global_batch_size, num_batches=NUM_BATCHES, seed=seed)
    simulate = partial(
        simulate_steps,
        table,
        batches,
        num_ranks=num_ranks,
        options=CutOptions(
            regroup=regroup,
            equal_counts=num_ranks > 1 if equal_counts == 'auto' else bool(equal_counts),
            width_multiple=width_multiple,
            packing=packing,
            cost=cost,
            objective=cast(Literal['ddp', 'fsdp'], memory.strategy),
            across_documents=memory.holds_mask,
        ),
        price=price,
    )
    bounds = [
        lower_bound(
            Rows(table.tokens[batch], chosen.max_tokens, image_tokens=table.vision[batch], cost=price), num_ranks
        )
        for batch in batches
    ]

    def figures(size: int, stock_rows: int) -> dict[str, StepFigures]:
        budget = size * chosen.slot_tokens
        return {method: simulate(method=method, microbatch_rows=stock_rows, max_tokens=budget) for method in METHODS}

    return SizingReport(
        profile=profile_lengths(table),
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        strategy=memory.strategy,
        device_memory_gib=device_memory_gib,
        safety=safety,
        device_train_microbatch_size=chosen.size,
        slot_tokens=chosen.slot_tokens,
        max_image_tokens=capacity.max_image_tokens(chosen.max_tokens) if table.vision.any() else None,
        stock_microbatch_size=chosen.stock_rows,
        regroup=regroup,
        width_multiple=width_multiple,
        packing=packing,
        binds=chosen.binds,
        terms={name: value / GIB for name, value in capacity.terms(chosen.max_tokens).items()},
        peak_gib=capacity.peak(chosen.max_tokens) / GIB,
        memory_residual=memory.residual,
        figures=figures(chosen.size, chosen.stock_rows),
        bound=float(np.mean(bounds)),
        seconds_per_unit=price.seconds_per_token,
        seconds_per_step=seconds_per_step,
        sizes=[
            _size_row(capacity, chosen, size, {method: of.padding_ratio for method, of in figures(size, size).items()})
            for size in _compared_sizes(chosen.size, rows_per_rank)
        ],
        oversize=table.names(table.tokens > chosen.max_tokens),
        too_large=table.names(table.tokens > chosen.fitting_tokens),
    )


def _compared_sizes(chosen: int, most: int) -> list[int]:
    """Every power of two up to twice the choice, and the choice."""
    sizes = {1 << k for k in range(max(2 * chosen, 2).bit_length())} | {chosen}
    return sorted(size for size in sizes if size <= most)


def _size_row(capacity: Capacity, chosen: LargestMicrobatch, size: int, padding: dict[str, float]) -> SizeRow:
    """Padding and memory of one size."""
    tokens = size * chosen.slot_tokens
    peak, terms = capacity.peak(tokens), capacity.terms(tokens)
    names = {'text activations': 'text', 'logits': 'logits', 'vision activations': 'vision', 'inputs': 'inputs'}
    parts = {short: terms[name] / GIB for name, short in names.items()}
    return SizeRow(
        size=size,
        padding=padding,
        peak_gib=peak / GIB,
        parts_gib={'model': peak / GIB - sum(parts.values()), **parts},
        fits=peak <= capacity.limit,
    )


def _check(
    num_ranks: int,
    global_batch_size: int,
    device_memory_gib: float,
    safety: float,
    slot_tokens: int | None,
    width_multiple: int,
) -> None:
    if num_ranks < 1:
        raise ValueError(f'`num_ranks` must be at least 1, got: {num_ranks}.')
    if global_batch_size < 1 or global_batch_size % num_ranks:
        raise ValueError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_ranks} ranks. Set it to {max(-(-global_batch_size // num_ranks), 1) * num_ranks}.'
        )
    if not device_memory_gib > 0:
        raise ValueError(f'`device_memory_gib` must be positive, got: {device_memory_gib}.')
    if not 0 < safety <= 1:
        raise ValueError(f'`safety` must be over 0 and at most 1, got: {safety}.')
    for name, value in (('slot_tokens', slot_tokens), ('width_multiple', width_multiple)):
        if value is not None and value < 1:
            raise ValueError(f'`{name}` must be at least 1, got: {value}.')
