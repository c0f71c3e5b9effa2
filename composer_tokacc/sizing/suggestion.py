# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the largest safe microbatch of a run, and the time that it saves.

:class:`Capacity` finds how many tokens fit in the worst case, by the memory model. :func:`suggest_microbatching` turns
that into a microbatch size, simulates steps with this size and with others, and fills the report.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from composer_tokacc.labelled import DENSE
from composer_tokacc.planning import CostModel, CutOptions, check_count, check_kind, lower_bound, token_budget
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.global_batches import check_global_batch
from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.report import SizeRow, SizingReport
from composer_tokacc.sizing.shapes import BatchShape, logit_positions
from composer_tokacc.sizing.simulate import METHOD_NAMES, StepFigures, draw_batches, planned_rows, simulate_steps

if TYPE_CHECKING:
    from composer_tokacc.data import LengthTable

NUM_BATCHES = 24
"""Number of global batches that are simulated for each figure. More would take longer, and hardly change the means."""
MOST_TOKENS = 1 << 30
"""The search for the largest microbatch ends here, far beyond any device."""
SHRINKING_TERMS = {'text': 'text activations', 'logits': 'logits', 'vision': 'vision activations'}
"""Terms of memory that shrink with the microbatch, and so may limit its size: from the short name in the report to the
name in ``MemoryModel.terms``. The term of the inputs shrinks, too, but never limits the size."""


@dataclass(frozen=True)
class Capacity:
    """How many tokens fit into the memory of one rank, whichever samples share a microbatch.

    A sample that is over a cap of a microbatch by itself is computed alone, and may need more memory than the worst
    shape here: see ``_heaviest_shape``. The longest length and the largest shares include such samples.
    """

    memory: MemoryModel
    table: SampleSizes
    num_ranks: int
    limit: float
    """Bytes that may be used: device memory times the safety factor."""
    max_image_tokens: int | None = None
    """Most image tokens of a microbatch. None: no cap."""
    max_loss_tokens: int | None = None
    """Most loss tokens of a microbatch. None: no cap."""
    width_multiple: int = 1
    """Widths are rounded up to a multiple of this."""

    def worst_shape(self, tokens: int, image_tokens: int | None = None) -> BatchShape:
        """Returns the shape that takes most memory among all microbatches with this many positions.

        All rows are as wide as the longest sample, rounded up, because attention holds ``rows x width^2`` entries. The
        shares of image tokens and of labels are the largest that any sample has.

        Args:
            tokens: Positions of the microbatch, padding included.
            image_tokens: Image tokens of the microbatch. Default: by the largest share, up to ``max_image_tokens``.
        """
        table = self.table
        if image_tokens is None:
            largest_share = (table.image_tokens / table.tokens).max()
            image_tokens = int(min(tokens * largest_share, self.max_image_tokens or math.inf))
        labels = None
        if self.memory.logits == 'labels':
            labels = self.most_logits(tokens)
        widest = _rounded_up(table.tokens.max(), self.width_multiple)
        width = min(widest, tokens)
        return BatchShape(
            rows=tokens / width,  # an upper bound, so not always an integer
            width=width,
            image_tokens=image_tokens,
            # The sum of squares is at most the sum times the largest value. No image has more tokens than the sample
            # with most image tokens.
            image_area=float(image_tokens * table.image_tokens.max()),
            pixel_bytes=int(image_tokens * self.memory.pixel_bytes_per_image_token),
            labels=labels,
        )

    def most_logits(self, tokens: int) -> int:
        """Returns at how many positions a microbatch with this many positions computes logits, at most."""
        if self.memory.logits == 'all':
            return tokens
        most = tokens
        share = self.table.largest_share_of_labels
        # From the share DENSE on, the run computes the logits of all positions. Below, only those of labels.
        if share < DENSE:
            most = math.ceil(tokens * share)
        if self.max_loss_tokens is not None:
            # With L labels, there are two cases, see `logit_positions`. If L >= DENSE * positions, all positions have
            # logits, which are at most L / DENSE. Otherwise L + 1 have logits. As DENSE is at most 1, neither is more
            # than L / DENSE + 1.
            most = min(most, math.ceil(self.max_loss_tokens / DENSE) + 1)
        return most

    def peak(self, tokens: int, image_tokens: int | None = None) -> float:
        """Returns bytes at the peak of the worst microbatch with this many positions."""
        shape = self.worst_shape(tokens, image_tokens)
        return self.memory.peak(shape, num_ranks=self.num_ranks)

    def terms(self, tokens: int) -> dict[str, float]:
        """Returns bytes by term at the peak of the worst microbatch with this many positions."""
        return self.memory.terms(self.worst_shape(tokens), num_ranks=self.num_ranks)

    def max_tokens(self) -> int:
        """Returns the most positions at which the worst microbatch still fits; 0 if not even one fits."""
        return _largest(lambda tokens: self.peak(tokens) <= self.limit)

    def fitting_image_tokens(self, tokens: int) -> int:
        """Returns the most image tokens at which a microbatch with this many positions still fits."""
        largest = _largest(lambda image_tokens: self.peak(tokens, image_tokens) <= self.limit)
        return min(largest, tokens)

    def of_stock_composer(self) -> Capacity:
        """Returns the capacity of stock Composer, which has neither cap, rounds no width and computes all logits."""
        memory = replace(self.memory, logits='all')
        return replace(self, memory=memory, max_image_tokens=None, max_loss_tokens=None, width_multiple=1)

    def why_nothing_fits(self) -> str:
        """Returns the error message for a memory that does not even hold the shortest sample, with remedies."""
        shortest = int(self.table.tokens.min())
        terms = self.terms(shortest)
        parts = ', '.join(f'{name} {num_bytes / GIB:.2f}' for name, num_bytes in terms.items())
        return (
            f'`device_memory_gib` must hold the model and a microbatch as short as the shortest sample. They need '
            f'{self.peak(shortest) / GIB:.2f} GiB (for the microbatch: {parts}), and {self.limit / GIB:.2f} GiB may be '
            'used. What would help: sharding with FSDP or over more ranks, freezing parts, activation checkpointing, a '
            'shorter context.'
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
    max_loss_tokens: int | None = None,
    regroup: bool = True,
    equal_counts: bool | str = 'auto',
    width_multiple: int = 1,
    packing: bool = False,
    sample_ids: Sequence[str] | None = None,
    seed: int = 0,
) -> SizingReport:
    """Finds the largest safe microbatch of a run, and what it gains over stock Composer at the same memory.

    Steps are simulated with the run's own functions, cost model and options.

    Args:
        lengths: Length table of the dataset, from :func:`.length_table`, or plain lengths.
        num_ranks: Ranks of the run.
        global_batch_size: Samples of an optimizer step over all ranks.
        memory: Memory model of the run. It also says whether the run uses FSDP, and at which positions it computes
            logits.
        device_memory_gib: Memory of one device, for one rank.
        cost: The cost model with which the run cuts. Default: the planner's own.
        measured_cost: A cost model that was fitted to times on the machine. With it the report is in seconds. Default:
            `cost`. If neither was measured, the report is in multiples of a step of stock Composer.
        seconds_per_step: Seconds of a step outside of its microbatches: optimizer, data, logging. For the report in
            seconds.
        safety: Share of the device memory that may be planned for. The rest is for the driver, the buffers of the
            communication, and fragmentation.
        slot_tokens: Width of a slot. A slot that would not fit gets narrower. Default: the longest sample, rounded up
            to `width_multiple`. This and the next six arguments mean the same in :func:`.token_data_spec`.
        max_image_tokens: Most image tokens of a microbatch. Default: no cap.
        max_loss_tokens: Most loss-generating tokens of a microbatch. With logits at labels it bounds their memory.
            It needs a length table with loss tokens. Default: no cap.
        regroup: Whether the split may sort rows by length.
        equal_counts: Whether all ranks make the same number of microbatches. ``'auto'``: only with FSDP, because DDP by
            default reduces gradients only in the last microbatch.
        width_multiple: Widths are rounded up to a multiple of it.
        packing: Whether the rows of a microbatch become one packed row.
        sample_ids: Names of the samples, for messages.
        seed: Seed of the order of the simulated batches.

    Returns:
        The report. ``print(report.text())`` shows it, ``print(report.yaml())`` the lines to paste.

    Raises:
        ValueError: An argument is out of range, or not even the shortest sample fits.
    """
    table = SampleSizes.from_lengths(lengths, sample_ids)
    check_kind('memory', memory, MemoryModel)
    check_count('num_ranks', num_ranks)
    check_global_batch(global_batch_size, num_ranks)
    if not 0 < safety <= 1:
        raise InvalidInputError(f'`safety` must be over 0 and at most 1, got: {safety}.')
    options = CutOptions(
        slot_tokens=slot_tokens,
        max_image_tokens=max_image_tokens,
        max_loss_tokens=max_loss_tokens,
        width_multiple=width_multiple,
        regroup=regroup,
        equal_counts=equal_counts,
        packing=packing,
        cost=cost or CostModel(),
        objective=cast(Literal['ddp', 'fsdp'], memory.strategy),
    )
    # The largest microbatch sizes that fit: of this run, and of stock Composer at the same memory.
    usable_bytes = safety * device_memory_gib * GIB
    capacity = Capacity(memory, table, num_ranks, usable_bytes, max_image_tokens, max_loss_tokens, width_multiple)
    rows_per_rank = global_batch_size // num_ranks
    size, slot = _largest_size(capacity, options, rows_per_rank)
    max_tokens = token_budget(size, slot)
    stock_tokens = capacity.of_stock_composer().max_tokens()
    stock_size = stock_tokens // int(table.tokens.max())  # it pads every row to the longest
    stock_size = min(stock_size, rows_per_rank)
    options = replace(options, max_tokens=max_tokens)

    @cache  # because the samples that go alone are the same for most of the sizes
    def peak_alone(sample: int) -> float:
        return memory.peak(_shape_alone(capacity, sample), num_ranks=num_ranks)

    is_oversize = _is_over_a_cap(table, options)
    is_too_large = np.zeros_like(is_oversize)
    for sample in np.flatnonzero(is_oversize).tolist():
        is_too_large[sample] = peak_alone(sample) > capacity.limit
    # Steps with the suggested size and with others. The run cuts by `options.cost`, but its time follows `price`.
    batches = draw_batches(len(table), global_batch_size, num_batches=NUM_BATCHES, seed=seed)
    price = measured_cost or options.cost
    simulate = partial(simulate_steps, table, batches, num_ranks=num_ranks, price=price)
    size_rows = []
    for compared_size in _compared_sizes(size, rows_per_rank):
        compared_tokens = token_budget(compared_size, slot)
        compared_options = replace(options, max_tokens=compared_tokens)
        figures = _figures(simulate, compared_options, stock_size=compared_size)
        compared_heaviest = _heaviest_shape(capacity, compared_options, peak_alone)
        size_rows.append(_size_row(capacity, compared_size, compared_heaviest, figures))
    # What limits the suggested size.
    fitting_image_tokens = capacity.fitting_image_tokens(max_tokens) if table.image_tokens.any() else None
    worst_terms = capacity.terms(max_tokens)
    limited_by = max(SHRINKING_TERMS, key=lambda part: worst_terms[SHRINKING_TERMS[part]])
    if size == rows_per_rank:
        limited_by = 'global batch'
    # Memory at the suggested size.
    heaviest = _heaviest_shape(capacity, options, peak_alone)
    terms = memory.terms(heaviest, num_ranks=num_ranks)
    return SizingReport(
        profile=table.profile(),
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        strategy=memory.strategy,
        device_memory_gib=device_memory_gib,
        safety=safety,
        device_train_microbatch_size=size,
        slot_tokens=slot,
        max_image_tokens=max_image_tokens,
        max_loss_tokens=max_loss_tokens,
        fitting_image_tokens=fitting_image_tokens,
        logits=memory.logits,
        most_logits=capacity.most_logits(max_tokens),
        stock_microbatch_size=stock_size,
        regroup=regroup,
        width_multiple=width_multiple,
        packing=packing,
        binds=limited_by,
        terms={name: num_bytes / GIB for name, num_bytes in terms.items()},
        peak_gib=memory.peak(heaviest, num_ranks=num_ranks) / GIB,
        memory_residual=memory.residual,
        figures=_figures(simulate, options, max(stock_size, 1)),
        bound=_mean_bound(table, batches, replace(options, cost=price), num_ranks),
        measured_cost=measured_cost,
        cost=cost,
        equal_counts=equal_counts,
        seconds_per_unit=price.seconds_per_token,
        seconds_per_step=seconds_per_step,
        sizes=size_rows,
        oversize=table.names(is_oversize),
        too_large=table.names(is_too_large),
    )


def _largest_size(
    capacity: Capacity,
    options: CutOptions,
    rows_per_rank: int,
) -> tuple[int, int]:
    """Returns the largest safe microbatch size, in slots, and the width of a slot in tokens."""
    fitting_tokens = capacity.max_tokens()
    if fitting_tokens < int(capacity.table.tokens.min()):
        raise InvalidInputError(capacity.why_nothing_fits())
    slot = options.slot_tokens or _rounded_up(capacity.table.tokens.max(), capacity.width_multiple)
    slot = min(slot, fitting_tokens)  # so that a microbatch of one slot fits
    return min(fitting_tokens // slot, rows_per_rank), slot


def _rounded_up(length: np.int64, multiple: int) -> int:
    """Returns the width of a planned microbatch whose longest row has this length."""
    return math.ceil(length / multiple) * multiple


def _is_over_a_cap(table: SampleSizes, options: CutOptions) -> np.ndarray:
    """Returns whether each sample is over a cap of a microbatch by itself, bool (samples,)."""
    all_samples = np.arange(len(table))
    return planned_rows(table, all_samples, options).is_over


def _shape_alone(capacity: Capacity, sample: int) -> BatchShape:
    """Returns the shape of the microbatch that holds only this sample.

    Its width is rounded up, although a run does not round up beyond the token budget.
    """
    table = capacity.table
    width = _rounded_up(table.tokens[sample], capacity.width_multiple)
    image_tokens = int(table.image_tokens[sample])
    labels = None
    if capacity.memory.logits == 'labels' and table.loss_tokens is not None:
        # A model that does not shift labels also counts the first label, which the table leaves out.
        labels = logit_positions(int(table.loss_tokens[sample]) + 1, width)
    return BatchShape(
        rows=1,
        width=width,
        image_tokens=image_tokens,
        image_area=float(image_tokens**2),  # an upper bound, reached by a single image
        pixel_bytes=int(image_tokens * capacity.memory.pixel_bytes_per_image_token),
        labels=labels,
    )


def _heaviest_shape(
    capacity: Capacity,
    options: CutOptions,
    peak_alone: Callable[[int], float],
) -> BatchShape:
    """Returns the shape with the highest peak: a microbatch within the caps, or a sample that goes alone and fits.

    A sample over a cap of a microbatch goes alone, so the caps do not bound its memory.

    Args:
        capacity: Memory of the microbatches within the caps.
        options: How the run cuts.
        peak_alone: Returns bytes at the peak of a sample that goes alone.
    """
    heaviest = capacity.worst_shape(options.max_tokens)
    highest_peak = capacity.peak(options.max_tokens)
    for sample in np.flatnonzero(_is_over_a_cap(capacity.table, options)).tolist():
        if highest_peak < peak_alone(sample) <= capacity.limit:
            heaviest = _shape_alone(capacity, sample)
            highest_peak = peak_alone(sample)
    return heaviest


def _figures(
    simulate: Callable[..., StepFigures],
    options: CutOptions,
    stock_size: int,
) -> dict[str, StepFigures]:
    """Returns the figures of a step by method. `stock_size` is the microbatch size of stock Composer, in rows."""
    return {method: simulate(method=method, microbatch_rows=stock_size, options=options) for method in METHOD_NAMES}


def _mean_bound(
    table: SampleSizes,
    batches: Sequence[np.ndarray],
    options: CutOptions,
    num_ranks: int,
) -> float:
    """Returns a lower bound of the cost of a step under any plan, as the mean over the batches."""
    bounds = [lower_bound(planned_rows(table, batch, options), num_ranks) for batch in batches]
    return float(np.mean(bounds))


def _compared_sizes(size: int, rows_per_rank: int) -> list[int]:
    """Returns the sizes of the report: the suggested one, and powers of two up to twice this size.

    A larger size than the rows of a rank makes no difference, so it is left out.
    """
    largest = min(2 * size, rows_per_rank)
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({size, *powers})


def _size_row(
    capacity: Capacity,
    size: int,
    heaviest: BatchShape,
    figures: dict[str, StepFigures],
) -> SizeRow:
    """Returns padding, time and memory of one size. `heaviest` is the shape of its heaviest microbatch."""
    peak = capacity.memory.peak(heaviest, num_ranks=capacity.num_ranks)
    terms = capacity.memory.terms(heaviest, num_ranks=capacity.num_ranks)
    parts = {short_name: terms[name] / GIB for short_name, name in SHRINKING_TERMS.items()}
    parts['inputs'] = terms['inputs'] / GIB
    return SizeRow(
        size=size,
        padding={method: step.padding_ratio for method, step in figures.items()},
        cost={method: step.cost for method, step in figures.items()},
        peak_gib=peak / GIB,
        # 'model' is the rest of the peak, so it has also what the optimizer's step takes beyond the microbatch.
        parts_gib={'model': peak / GIB - sum(parts.values()), **parts},
        fits=peak <= capacity.limit,
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, 0 if none does. All numbers below one that fits must fit, too."""
    # By this key the numbers that fit (False) come before the others (True). `bisect` returns how many fit. As the
    # numbers begin at 1, this is also the largest of them.
    return bisect(range(1, MOST_TOKENS), False, key=lambda number: not fits(number))
