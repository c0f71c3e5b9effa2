# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The largest safe microbatch of a run, and what it gains over stock Composer."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from composer_tokacc.planning import CostModel, CutOptions, Rows, check_count, check_kind, lower_bound, token_budget
from composer_tokacc.sampling.load_planner import check_global_batch
from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.report import SizeRow, SizingReport
from composer_tokacc.sizing.shapes import BatchShape
from composer_tokacc.sizing.simulate import METHOD_NAMES, StepFigures, draw_batches, simulate_steps

if TYPE_CHECKING:
    from composer_tokacc.data import LengthTable

NUM_BATCHES = 24
"""Global batches that are simulated for each figure."""
MOST_TOKENS = 1 << 30
"""Far beyond any device: where the search for the largest microbatch ends."""
# Terms of the memory model that a smaller microbatch would lower.
SHRINKING_TERMS = {'text': 'text activations', 'logits': 'logits', 'vision': 'vision activations'}


@dataclass(frozen=True)
class Capacity:
    """What fits on one rank."""

    memory: MemoryModel
    table: SampleSizes
    num_ranks: int
    limit: float
    """Bytes that may be used: device memory times the safety factor."""
    max_image_tokens: int | None = None

    def worst_shape(self, tokens: int, image_tokens: int | None = None) -> BatchShape:
        """Returns the costliest microbatch of this many positions: the widest rows, and as many image tokens."""
        images, most = self.table.image_tokens, float(image_tokens or 0)
        if image_tokens is None:  # as many as if all were the sample with the largest part of them, up to the cap
            most = min(tokens * (images / self.table.tokens).max(), self.max_image_tokens or math.inf)
        width = min(int(self.table.tokens.max()), tokens)
        labels = None
        if self.memory.logits == 'labels':  # as many as if all were the sample with the largest share of them
            labels = math.ceil(tokens * self.table.largest_share_of_labels)
        return BatchShape(
            rows=max(round(tokens / width), 1),
            width=width,
            image_tokens=int(most),
            image_area=float(most * images.max()),
            pixel_bytes=int(most * self.memory.pixel_bytes_per_image_token),
            labels=labels,
        )

    def peak(self, tokens: int, image_tokens: int | None = None) -> float:
        """Returns bytes at the peak of the costliest microbatch of this many positions."""
        return self.memory.peak(self.worst_shape(tokens, image_tokens), num_ranks=self.num_ranks)

    def terms(self, tokens: int) -> dict[str, float]:
        """Returns the same by term."""
        return self.memory.terms(self.worst_shape(tokens), num_ranks=self.num_ranks)

    def max_tokens(self) -> int:
        """Returns the most positions of a microbatch that fits; 0 where not even one does."""
        return _largest(lambda tokens: self.peak(tokens) <= self.limit)

    def fitting_image_tokens(self, tokens: int) -> int:
        """Returns the most image tokens that fit beside this many positions, at most all of them."""
        return min(_largest(lambda images: self.peak(tokens, images) <= self.limit), tokens)

    def why_nothing_fits(self) -> str:
        """Returns one line for a model that leaves no room: what is held, and what would help."""
        terms = self.terms(int(self.table.tokens.min()))
        largest = sorted(terms, key=lambda name: -terms[name])[:3]
        held = ', '.join(f'{name} {terms[name] / GIB:.2f}' for name in largest)
        remedies = ['sharding with FSDP over more ranks' if self.memory.strategy == 'fsdp' else 'sharding with FSDP']
        remedies += ['freezing parts', 'activation checkpointing', 'a shorter context']
        return (
            f'`device_memory_gib` must hold the model and its shortest sample, got: {self.limit / GIB:.2f} GiB usable '
            f'for {sum(terms.values()) / GIB:.2f} ({held}). What would help: {", ".join(remedies)}.'
        )


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
    max_image_tokens: int | None = None,
    regroup: bool = True,
    equal_counts: bool | str = 'auto',
    width_multiple: int = 1,
    packing: bool = False,
    sample_ids: Sequence[str] | None = None,
    seed: int = 0,
) -> SizingReport:
    """Finds the largest safe microbatch of a run, and what it gains over stock Composer at the same memory.

    Steps are simulated with the functions, the cost and the options by which the run will cut.

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
        slot_tokens: Width of a slot; by default the longest sample. This and the next as for :func:`.token_data_spec`.
        max_image_tokens: Image budget of a microbatch; by default whatever the rows in it have.
        regroup: Whether microbatches may sort rows.
        equal_counts: Whether all ranks make the same number of microbatches. ``'auto'``: with FSDP.
        width_multiple: Widths are rounded up to it.
        packing: Whether a microbatch's rows become one packed row.
        sample_ids: Names of the samples, for messages.
        seed: Of the order of the simulated batches.

    Returns:
        The report; ``print(report.text())`` shows it, ``print(report.yaml())`` the lines to paste.

    Raises:
        ValueError: An argument is out of range, or not even the shortest sample fits.
    """
    table = SampleSizes.from_lengths(lengths, sample_ids)
    check_kind('memory', memory, MemoryModel)
    _check(num_ranks, global_batch_size, device_memory_gib, safety)
    options = CutOptions(
        slot_tokens=slot_tokens, max_image_tokens=max_image_tokens, width_multiple=width_multiple, regroup=regroup,
        equal_counts=equal_counts, packing=packing, cost=cost or CostModel(),
        objective=cast(Literal['ddp', 'fsdp'], memory.strategy),
    )  # fmt: skip
    limit = safety * device_memory_gib * GIB
    capacity = Capacity(memory, table, num_ranks, limit, max_image_tokens)
    batches = draw_batches(len(table), global_batch_size, num_batches=NUM_BATCHES, seed=seed)
    price = measured_cost or options.cost
    return SizingReport(
        profile=table.profile(), num_ranks=num_ranks, global_batch_size=global_batch_size, strategy=memory.strategy,
        device_memory_gib=device_memory_gib, safety=safety, max_image_tokens=max_image_tokens, regroup=regroup,
        width_multiple=width_multiple, packing=packing, memory_residual=memory.residual, measured_cost=measured_cost,
        seconds_per_unit=price.seconds_per_token, seconds_per_step=seconds_per_step,
        **_report(capacity, options, price, batches, global_batch_size // num_ranks),
    )  # fmt: skip


def _choose(capacity: Capacity, options: CutOptions, rows_per_rank: int) -> tuple[int, int]:
    """Returns the largest safe microbatch size and the width of its slots."""
    fitting = capacity.max_tokens()
    if fitting < int(capacity.table.tokens.min()):
        raise ValueError(capacity.why_nothing_fits())
    longest = int(capacity.table.tokens.max())
    slot = options.slot_tokens or -(-longest // options.width_multiple) * options.width_multiple
    slot = min(slot, fitting)  # one wider than memory is narrowed to what fits
    return min(fitting // slot, rows_per_rank), slot


def _report(
    capacity: Capacity, options: CutOptions, price: CostModel, batches: Sequence[np.ndarray], rows_per_rank: int
) -> dict[str, Any]:
    """Returns the fields of the report that follow from a size, and from steps of it and of others."""
    table, num_ranks = capacity.table, capacity.num_ranks
    size, slot = _choose(capacity, options, rows_per_rank)
    max_tokens = token_budget(size, slot)
    terms = capacity.terms(max_tokens)
    # Stock Composer has no cap of images, and pads every row to the longest.
    stock_rows = replace(capacity, max_image_tokens=None).max_tokens() // int(table.tokens.max())
    stock_rows = max(min(stock_rows, rows_per_rank), 1)
    largest_term = max(SHRINKING_TERMS, key=lambda part: terms[SHRINKING_TERMS[part]])
    simulate = partial(simulate_steps, table, batches, num_ranks=num_ranks, price=price)

    def figures(size: int, stock_rows: int) -> dict[str, StepFigures]:
        sized = replace(options, max_tokens=token_budget(size, slot))
        return {method: simulate(method=method, microbatch_rows=stock_rows, options=sized) for method in METHOD_NAMES}

    compared = {size, *(1 << k for k in range(max(2 * size, 2).bit_length()))}  # powers of two up to twice as much
    is_over = (table.tokens > max_tokens) | (table.image_tokens > (options.max_image_tokens or max_tokens))
    return {
        'device_train_microbatch_size': size,
        'slot_tokens': slot,
        'fitting_image_tokens': capacity.fitting_image_tokens(max_tokens) if table.image_tokens.any() else None,
        'stock_microbatch_size': stock_rows,
        'binds': 'global batch' if size == rows_per_rank else largest_term,
        'terms': {name: value / GIB for name, value in terms.items()},
        'peak_gib': capacity.peak(max_tokens) / GIB,
        'figures': figures(size, stock_rows),
        'bound': _bound(table, batches, replace(options, max_tokens=max_tokens, cost=price), num_ranks),
        'sizes': [
            _size_row(capacity, one, slot, figures(one, one)) for one in sorted(compared) if one <= rows_per_rank
        ],
        'oversize': table.names(is_over),
        'too_large': table.names(table.tokens > capacity.max_tokens()),
    }


def _bound(table: SampleSizes, batches: Sequence[np.ndarray], options: CutOptions, num_ranks: int) -> float:
    """Returns the mean cost of a step that no plan beats."""
    vision = options.cost.vision(table.image_tokens, table.vision_patches)
    rows = (
        Rows(table.tokens[batch], options, image_tokens=table.image_tokens[batch], vision_cost=vision[batch])
        for batch in batches
    )
    return float(np.mean([lower_bound(one, num_ranks) for one in rows]))


def _size_row(capacity: Capacity, size: int, slot_tokens: int, figures: dict[str, StepFigures]) -> SizeRow:
    """Returns padding, time and memory of one size."""
    tokens = token_budget(size, slot_tokens)
    peak, terms = capacity.peak(tokens), capacity.terms(tokens)
    parts = {short: terms[name] / GIB for short, name in {**SHRINKING_TERMS, 'inputs': 'inputs'}.items()}
    return SizeRow(
        size=size,
        padding={method: of.padding_ratio for method, of in figures.items()},
        cost={method: of.cost for method, of in figures.items()},
        peak_gib=peak / GIB,
        parts_gib={'model': peak / GIB - sum(parts.values()), **parts},
        fits=peak <= capacity.limit,
    )


def _check(num_ranks: int, global_batch_size: int, device_memory_gib: float, safety: float) -> None:
    check_count('num_ranks', num_ranks)
    check_global_batch(global_batch_size, num_ranks)
    if not device_memory_gib > 0:
        raise ValueError(f'`device_memory_gib` must be positive, got: {device_memory_gib}.')
    if not 0 < safety <= 1:
        raise ValueError(f'`safety` must be over 0 and at most 1, got: {safety}.')


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number for which a predicate holds that is true up to some number; 0 where it never does."""
    return bisect(range(1, MOST_TOKENS), False, key=lambda number: not fits(number))
