# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The microbatch sizing helper: how large may a microbatch be, and what is gained?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np

from composer_tokacc.data.lengths import LengthTable
from composer_tokacc.memory import GIB, MemoryModel
from composer_tokacc.planning import CostModel, lower_bound
from composer_tokacc.sizing.capacity import Capacity
from composer_tokacc.sizing.profile import SampleSizes, profile_lengths
from composer_tokacc.sizing.report import SizeRow, SizingReport, WorldRow
from composer_tokacc.sizing.simulate import METHODS, StepFigures, draw_batches, simulate_steps

__all__ = ['WORLD_SIZES', 'suggest_microbatching']

WORLD_SIZES = (1, 2, 4, 8, 64)
"""World sizes that a report compares, besides the one asked for."""
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
    seconds_per_step: float = 0.0,
    safety: float = 0.92,
    slot_tokens: int | None = None,
    regroup: bool = True,
    width_multiple: int = 1,
    sample_ids: Sequence[str] | None = None,
    seed: int = 0,
) -> SizingReport:
    """Finds the largest safe microbatch of a run, and what it gains over stock Composer at the same memory.

    Args:
        lengths: Length table of the dataset, from :func:`composer_tokacc.data.lengths.length_table`, or plain lengths.
        num_ranks: Ranks of the run.
        global_batch_size: Samples of an optimizer step over all ranks.
        memory: Memory model of the run, which also says whether it shards with FSDP.
        device_memory_gib: Memory of one device, for one rank.
        cost: Cost of a microbatch; fitted to measured times where seconds are wanted.
        seconds_per_step: Seconds of a step outside its microbatches: optimizer, data, logging.
        safety: Share of the device memory that may be planned for. The rest is the driver's, the communication
            buffers' and lost to fragmentation.
        slot_tokens: Width of a slot; by default the longest sample.
        regroup: Whether microbatches may sort rows; see :func:`.token_data_spec`.
        width_multiple: Widths are rounded up to it.
        sample_ids: Names of the samples, for messages.
        seed: Of the order of the simulated batches.

    Returns:
        The report; ``print(report.yaml())`` gives the lines to paste.

    Raises:
        ValueError: An argument is out of range, or not even the shortest sample fits.
    """
    table = SampleSizes.of(lengths, sample_ids)
    _check(num_ranks, global_batch_size, device_memory_gib, safety, slot_tokens, width_multiple)
    cost = cost or CostModel()
    capacity = Capacity(memory=memory, table=table, num_ranks=num_ranks, limit=safety * device_memory_gib * GIB)
    if capacity.peak(int(table.tokens.min())) > capacity.limit:
        raise ValueError(capacity.why_nothing_fits())
    longest = int(table.tokens.max())
    slot = slot_tokens or -(-longest // width_multiple) * width_multiple
    batches = draw_batches(len(table), global_batch_size, num_batches=NUM_BATCHES, seed=seed)

    def at(ranks: int) -> _Choice:
        return _Choice(replace(capacity, num_ranks=ranks), global_batch_size // ranks, slot)

    def simulate(choice: _Choice, method: str) -> StepFigures:
        return simulate_steps(
            table,
            batches,
            method=method,
            num_ranks=choice.capacity.num_ranks,
            microbatch_rows=choice.stock_rows,
            max_tokens=choice.budget,
            cost=cost,
            strategy=cast(Literal['ddp', 'fsdp'], memory.strategy),
            regroup=regroup,
            width_multiple=width_multiple,
        )

    unit = cost.seconds_per_token
    outside = seconds_per_step / unit if unit else 0.0
    chosen = at(num_ranks)
    figures = {method: simulate(chosen, method) for method in METHODS}
    bound = float(np.mean([_bound(table, batch, num_ranks, cost, chosen.budget) for batch in batches]))
    worlds = []
    for ranks in sorted({*WORLD_SIZES, num_ranks}):
        if global_batch_size % ranks or ranks > global_batch_size:
            continue
        choice = at(ranks)
        if choice.fits:
            worlds.append(_world_row(choice, {method: simulate(choice, method) for method in METHODS}, outside))
    return SizingReport(
        profile=profile_lengths(table),
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        strategy=memory.strategy,
        device_memory_gib=device_memory_gib,
        safety=safety,
        device_train_microbatch_size=chosen.size,
        slot_tokens=chosen.slot,
        max_image_tokens=capacity.max_image_tokens(chosen.budget) if table.vision.any() else None,
        stock_microbatch_size=chosen.stock_rows,
        regroup=regroup,
        width_multiple=width_multiple,
        binds=chosen.binds(),
        terms={name: value / GIB for name, value in capacity.terms(chosen.budget).items()},
        peak_gib=capacity.peak(chosen.budget) / GIB,
        memory_residual=memory.residual,
        figures=figures,
        bound=bound,
        seconds_per_unit=unit,
        seconds_per_step=seconds_per_step,
        sizes=_size_rows(chosen, table, batches, simulate),
        worlds=worlds,
        oversize=_named(table, table.tokens > chosen.budget),
        too_large=_named(table, table.tokens > capacity.max_tokens()),
        lengths_histogram=_histogram(table.tokens),
    )


class _Choice:
    """The largest safe size for one number of ranks."""

    def __init__(self, capacity: Capacity, rows_per_rank: int, slot: int) -> None:
        self.capacity = capacity
        self.most_tokens = capacity.max_tokens()
        self.fits = self.most_tokens >= int(capacity.table.tokens.min())
        # A slot wider than memory would make every size too large.
        self.slot = max(min(slot, self.most_tokens), 1)
        self.rows_per_rank = rows_per_rank
        self.size = max(min(self.most_tokens // self.slot, rows_per_rank), 1)
        self.budget = self.size * self.slot
        longest = int(capacity.table.tokens.max())
        self.stock_rows = max(min(self.most_tokens // longest, rows_per_rank), 1)

    def binds(self) -> str:
        """What keeps a microbatch from being larger."""
        if self.size == self.rows_per_rank:
            return 'global batch'
        terms = self.capacity.terms(self.budget)
        kinds = {'text': 'text activations', 'logits': 'logits', 'vision': 'vision activations'}
        return max(kinds, key=lambda kind: terms[kinds[kind]])


def _size_rows(chosen: _Choice, table: SampleSizes, batches: list[np.ndarray], simulate) -> list[SizeRow]:  # noqa: ANN001
    """Padding and memory at every power of two up to twice the choice, and at the choice."""
    sizes = {1 << k for k in range(max(2 * chosen.size, 2).bit_length())} | {chosen.size}
    rows = []
    for size in sorted(size for size in sizes if size <= max(chosen.rows_per_rank, 1)):
        other = _Choice(chosen.capacity, chosen.rows_per_rank, chosen.slot)
        other.size, other.budget, other.stock_rows = size, size * chosen.slot, size
        peak = chosen.capacity.peak(other.budget)
        rows.append(
            SizeRow(
                size=size,
                stock_padding=simulate(other, 'stock').padding_ratio,
                split_padding=simulate(other, 'split').padding_ratio,
                planned_padding=simulate(other, 'planned').padding_ratio,
                peak_gib=peak / GIB,
                parts_gib=_parts(chosen.capacity.terms(other.budget), peak),
                fits=peak <= chosen.capacity.limit,
            )
        )
    return rows


def _parts(terms: dict[str, float], peak: float) -> dict[str, float]:
    """GiB by what depends on the microbatch, and the rest."""
    names = {'text activations': 'text', 'logits': 'logits', 'vision activations': 'vision', 'inputs': 'inputs'}
    parts = {short: terms[name] / GIB for name, short in names.items()}
    return {'model': peak / GIB - sum(parts.values()), **parts}


def _world_row(choice: _Choice, figures: dict[str, StepFigures], outside: float) -> WorldRow:
    times = {method: figure.cost + outside for method, figure in figures.items()}
    return WorldRow(
        num_ranks=choice.capacity.num_ranks,
        samples_per_rank=choice.rows_per_rank,
        device_train_microbatch_size=choice.size,
        stock_microbatches=figures['stock'].microbatches,
        split_microbatches=figures['split'].microbatches,
        split_imbalance=figures['split'].imbalance,
        planned_imbalance=figures['planned'].imbalance,
        split_speedup=times['stock'] / times['split'],
        planned_speedup=times['stock'] / times['planned'],
        peak_gib=choice.capacity.peak(choice.budget) / GIB,
    )


def _bound(table: SampleSizes, batch: np.ndarray, num_ranks: int, cost: CostModel, budget: int) -> float:
    return lower_bound(table.tokens[batch], table.vision[batch], num_ranks, cost, budget, None)


def _named(table: SampleSizes, chosen: np.ndarray) -> list[str]:
    """Ids of some samples, the longest first."""
    found = np.flatnonzero(chosen)
    order = found[np.argsort(-table.tokens[found], kind='stable')]
    return [f'{table.name_of(index)}: {table.tokens[index]} tokens' for index in order.tolist()]


def _histogram(tokens: np.ndarray) -> tuple[list[int], list[int]]:
    """Counts, and the edges between them."""
    bins = min(40, int(tokens.max()) - int(tokens.min()) + 1)
    counts, edges = np.histogram(tokens, bins=bins)
    return counts.tolist(), [round(edge) for edge in edges.tolist()]


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
