# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the largest safe microbatch of a run, and the time that it saves.

A microbatch size counts slots: rows of ``slot_tokens`` tokens. It sets the token budget of a microbatch,
``size x slot_tokens``. For example size 4 with slots of 2,048 tokens gives a budget of 8,192 positions, for 4 rows of
2,048 or for 16 rows of 512. A microbatch may have further caps, of image tokens and of loss tokens. If a single sample
is over the budget or over a cap, it goes alone: it is the only row of its microbatch, and may need more memory than any
microbatch within the caps.

:class:`Capacity` finds the largest budget that fits in the worst case, by the memory model.
:func:`suggest_microbatching` turns it into a size, and fills the report. :class:`_RunBySize` has the figures of each
size in the report.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from composer_tokacc.arguments import check_choice, check_count, check_kind
from composer_tokacc.labelled import DENSE
from composer_tokacc.planning import CostModel, CutOptions, lower_bound, token_budget
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.global_batches import check_global_batch
from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.report import SizeRow, SizingReport
from composer_tokacc.sizing.shapes import BatchShape
from composer_tokacc.sizing.simulate import METHOD_NAMES, StepFigures, draw_batches, simulate_steps

if TYPE_CHECKING:
    from composer_tokacc.data import LengthTable

DEFAULT_SAFETY = 0.92
"""Share of the device memory that may be planned for, for runs and for the program ``size``. Measured peaks were up to
1.7 % above the predicted ones (docs/benchmarks.md, "On a GPU")."""
NUM_BATCHES = 24
"""Number of global batches that are simulated for each figure. More would take longer, and hardly change the means."""
MOST_TOKENS = 1 << 30
"""The search for the largest microbatch ends here, far beyond any device."""
SHRINKING_TERMS = {'text': 'text activations', 'logits': 'logits', 'vision': 'vision activations'}
"""Terms of memory that shrink with the microbatch, and so may limit its size. The keys are the short names in the
report, and the values the names in ``MemoryModel.terms``. The inputs shrink, too, but are too small to limit it."""


@dataclass(frozen=True)
class Capacity:
    """How many tokens fit into the memory of one rank, whichever samples share a microbatch.

    Microbatches of a sample that goes alone are left out: see ``_RunBySize.peaks_alone``.
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
        """Returns a shape that takes at least as much memory as any microbatch with this many positions.

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
        width = min(_widest_row(self), tokens)
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
        """Returns the largest number of logits that a microbatch with this many positions may compute.

        With logits at labels, a microbatch with L labels computes logits at L + 1 positions. If L is at least ``DENSE``
        times the number of positions, it computes them at all positions; see ``logit_positions``.
        """
        if self.memory.logits == 'all':
            return tokens
        most = tokens
        share = self.table.largest_share_of_labels  # counts one more label for each sample, so it covers L + 1
        if share < DENSE:
            most = math.ceil(tokens * share)
        if self.max_loss_tokens is not None:
            # L is at most `max_loss_tokens`. A microbatch that computes all logits has at most L / DENSE positions. Any
            # other one computes L + 1 logits. Neither number is above L / DENSE + 1.
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
        """Returns the largest number of positions that fit in the worst case; 0 if not even one position fits."""
        return _largest(lambda tokens: self.peak(tokens) <= self.limit)

    def fitting_image_tokens(self, tokens: int) -> int:
        """Returns the most image tokens that fit into a microbatch of this many positions. Ignores their cap."""
        largest = _largest(lambda image_tokens: self.peak(tokens, image_tokens) <= self.limit)
        return min(largest, tokens)

    def of_stock_composer(self) -> Capacity:
        """Returns the capacity of stock Composer. It has no caps, rounds no widths and computes all logits."""
        memory = replace(self.memory, logits='all')
        return replace(self, memory=memory, max_image_tokens=None, max_loss_tokens=None, width_multiple=1)

    def why_nothing_fits(self) -> str:
        """Returns the error message for a memory that does not even hold the shortest sample, with remedies."""
        shortest = int(self.table.tokens.min())
        return (
            f'`device_memory_gib` must hold the model and a microbatch as short as the shortest sample. They need '
            f'{self.peak(shortest) / GIB:.2f} GiB, and {self.limit / GIB:.2f} GiB may be used. What would help: '
            'sharding with FSDP or over more ranks, freezing parts, activation checkpointing, a shorter context.'
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
    safety: float = DEFAULT_SAFETY,
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
        slot_tokens: Width of a slot: the tokens of one row of the microbatch size. It is lowered if such a row does not
            fit. Default: the longest sample, rounded up to `width_multiple`. This and the next six arguments mean the
            same in :func:`.token_data_spec`.
        max_image_tokens: Most image tokens of a microbatch. Default: no cap.
        max_loss_tokens: Most loss-generating tokens of a microbatch. With logits at labels it bounds their memory.
            It needs a length table with loss tokens. Default: no cap.
        regroup: Whether the split may sort rows by length.
        equal_counts: Whether all ranks make the same number of microbatches. ``'auto'``: only with FSDP, where ranks
            wait for each other in every microbatch. DDP by default reduces gradients only in the last one.
        width_multiple: Widths are rounded up to a multiple of it.
        packing: Whether the rows of a microbatch become one packed row. If the run has ``'auto'``, make a report with
            each.
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
    check_choice('packing', packing, (True, False))  # with 'auto' the steps would be simulated without packing
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
    capacity = Capacity(
        memory=memory,
        table=table,
        num_ranks=num_ranks,
        limit=usable_bytes,
        max_image_tokens=max_image_tokens,
        max_loss_tokens=max_loss_tokens,
        width_multiple=width_multiple,
    )
    rows_per_rank = global_batch_size // num_ranks
    fitting_size, slot = _fitting_size(capacity, slot_tokens)
    largest_useful_size = _largest_useful_size(capacity, slot, rows_per_rank)
    size = min(fitting_size, largest_useful_size)
    stock_size = _largest_stock_size(capacity, rows_per_rank)
    # What a microbatch of this size holds in the worst case.
    max_tokens = token_budget(size, slot)
    worst_terms = capacity.terms(max_tokens)
    limited_by = 'global batch' if size == largest_useful_size else _largest_part(worst_terms)
    fitting_image_tokens = capacity.fitting_image_tokens(max_tokens) if table.image_tokens.any() else None
    # Memory and time with the suggested size, and with others.
    batches = draw_batches(len(table), global_batch_size, num_batches=NUM_BATCHES, seed=seed)
    price = measured_cost or options.cost
    run = _RunBySize(capacity, options, slot, batches, price)
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
        terms={name: num_bytes / GIB for name, num_bytes in worst_terms.items()},
        peak_gib=run.peak(size) / GIB,
        memory_residual=memory.residual,
        figures=run.figures(size, max(stock_size, 1)),  # if stock Composer has no safe size, its figures are of one row
        bound=run.mean_bound(size),
        measured_cost=measured_cost,
        cost=cost,
        equal_counts=equal_counts,
        seconds_per_unit=price.seconds_per_token,
        seconds_per_step=seconds_per_step,
        sizes=[run.size_row(compared_size) for compared_size in _compared_sizes(size, largest_useful_size)],
        oversize=table.names(run.goes_alone(size)),
        too_large=table.names(run.peaks_alone(size) > usable_bytes),
    )


def _fitting_size(capacity: Capacity, slot_tokens: int | None) -> tuple[int, int]:
    """Returns the largest microbatch size that fits into memory, and the width of a slot, which may be lowered.

    Raises ValueError if not even the shortest sample fits. Without ``slot_tokens`` a slot is as wide as the longest
    sample.
    """
    fitting_tokens = capacity.max_tokens()
    if fitting_tokens < int(capacity.table.tokens.min()):
        raise InvalidInputError(capacity.why_nothing_fits())
    slot = slot_tokens or _widest_row(capacity)
    slot = min(slot, fitting_tokens)  # so that size 1 fits
    return fitting_tokens // slot, slot


def _largest_useful_size(capacity: Capacity, slot: int, rows_per_rank: int) -> int:
    """Returns the size at which the token budget has room for all rows of a rank, however long they are.

    To the split a larger size makes no difference. (A plan may give more than ``rows_per_rank`` rows to a rank, if they
    cost less than those of the others. This is not counted here.) For example, 16 rows of up to 2,048 tokens need size
    16 if a slot has 2,048 tokens, and size 64 if it has 512. If slots are wider than all rows, it is still the number
    of rows.
    """
    width = max(_widest_row(capacity), slot)
    return math.ceil(rows_per_rank * width / slot)


def _widest_row(capacity: Capacity) -> int:
    """Returns the width of a microbatch with the longest sample."""
    return _rounded_up(int(capacity.table.tokens.max()), capacity.width_multiple)


def _largest_stock_size(capacity: Capacity, rows_per_rank: int) -> int:
    """Returns the largest safe microbatch size of stock Composer, in rows; 0 if not even one row is safe."""
    fitting_tokens = capacity.of_stock_composer().max_tokens()
    fitting_rows = fitting_tokens // int(capacity.table.tokens.max())  # every row may be padded to the longest
    return min(fitting_rows, rows_per_rank)


def _largest_part(terms: Mapping[str, float]) -> str:
    """Returns the part of the activations that takes most memory, by a key of ``SHRINKING_TERMS``."""
    return max(SHRINKING_TERMS, key=lambda part: terms[SHRINKING_TERMS[part]])


def _rounded_up(length: int, multiple: int) -> int:
    """Returns the width of a planned microbatch whose longest row has this length."""
    return math.ceil(length / multiple) * multiple


def _compared_sizes(size: int, largest_useful_size: int) -> list[int]:
    """Returns the sizes of the report: the suggested one, and powers of two up to twice this size.

    Sizes above :func:`_largest_useful_size` are left out.
    """
    largest = int(min(2 * size, largest_useful_size))  # an integer of numpy has no bit_length()
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({size, *powers})


@dataclass(frozen=True, eq=False)
class _RunBySize:
    """The run at any microbatch size: its memory, and its simulated steps."""

    capacity: Capacity
    options: CutOptions
    """How the run cuts. ``max_tokens`` is replaced by the budget of each size."""
    slot_tokens: int
    batches: Sequence[np.ndarray]
    """Sample indices of each simulated global batch."""
    price: CostModel
    """Gives the time of a step. The run cuts by ``options.cost``, which may be another cost model."""

    def options_of(self, size: int) -> CutOptions:
        """Returns how the run cuts with this size."""
        return replace(self.options, max_tokens=token_budget(size, self.slot_tokens))

    def goes_alone(self, size: int) -> np.ndarray:
        """Returns whether each sample goes alone, bool (samples,)."""
        return self.capacity.table.rows(self.options_of(size)).is_over

    @cached_property
    def _peaks_alone_at_size_1(self) -> np.ndarray:
        """Bytes at the peak of each sample that goes alone at size 1, and 0 for the others, float64 (samples,).

        Size 1 has the smallest budget, so these samples include those that go alone at any other size.
        """
        table = self.capacity.table
        peaks = np.zeros(len(table))
        for sample in np.flatnonzero(self.goes_alone(1)).tolist():
            # A table with only this sample, because `worst_shape` takes the largest shares in its table. No cap of loss
            # tokens, because this sample may be over it.
            sizes = table.select(np.array([sample]))
            capacity_of_sample = replace(self.capacity, table=sizes, max_loss_tokens=None)
            width = _rounded_up(int(sizes.tokens[0]), self.options.width_multiple)
            peaks[sample] = capacity_of_sample.peak(width, int(sizes.image_tokens[0]))
        return peaks

    def peaks_alone(self, size: int) -> np.ndarray:
        """Returns bytes at the peak of each sample that goes alone, and 0 for the others, float64 (samples,)."""
        return np.where(self.goes_alone(size), self._peaks_alone_at_size_1, 0.0)

    def peak(self, size: int) -> float:
        """Returns bytes at the highest peak: the worst within the caps, or of a sample that goes alone and fits.

        Samples that do not even fit alone are left out. The report names them in ``too_large``.
        """
        peak_within_caps = self.capacity.peak(self.options_of(size).max_tokens)
        peaks_alone = self.peaks_alone(size)
        fitting_peaks_alone = peaks_alone[peaks_alone <= self.capacity.limit]
        return max(peak_within_caps, fitting_peaks_alone.max(initial=0.0))

    def figures(self, size: int, stock_size: int) -> dict[str, StepFigures]:
        """Returns the figures of a step by method. `stock_size` is the microbatch size of stock Composer, in rows."""
        figures = {}
        for method in METHOD_NAMES:
            figures[method] = simulate_steps(
                self.capacity.table,
                self.batches,
                method=method,
                num_ranks=self.capacity.num_ranks,
                microbatch_rows=stock_size,
                options=self.options_of(size),
                price=self.price,
            )
        return figures

    def mean_bound(self, size: int) -> float:
        """Returns a lower bound of the cost of a step under any plan, as the mean over the batches."""
        options = replace(self.options_of(size), cost=self.price)
        bounds = []
        for batch in self.batches:
            rows = self.capacity.table.select(batch).rows(options)
            bounds.append(lower_bound(rows, self.capacity.num_ranks))
        return float(np.mean(bounds))

    def size_row(self, size: int) -> SizeRow:
        """Returns padding, time and memory of one size. Stock Composer is simulated with as many rows."""
        peak = self.peak(size)
        return SizeRow(
            size=size,
            figures=self.figures(size, stock_size=size),
            peak_gib=peak / GIB,
            fits=peak <= self.capacity.limit,
        )


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, 0 if none does. All numbers below one that fits must fit, too."""
    # For rising numbers the key is False, ..., False, True, ..., True. `bisect` returns how many are False. As the
    # numbers begin at 1, this is the largest that fits.
    return bisect(range(1, MOST_TOKENS), False, key=lambda number: not fits(number))
