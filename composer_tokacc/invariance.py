# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the gradient of the same rows in many cuts, for any trainer, in any test.

:func:`compare_cuts` is the common part. :func:`verify_invariance` gives it the microbatches of a user's own step, and
the program ``composer_tokacc.verify`` gives it runs of Composer's Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from composer_tokacc.batch import Batch, labels_of, with_own_tensors
from composer_tokacc.collectives import all_gather_object, get_global_rank
from composer_tokacc.counting import loss_mask
from composer_tokacc.isolation import IsolationReport, verify_isolation
from composer_tokacc.layout import BatchLayout
from composer_tokacc.metadata import without_metadata
from composer_tokacc.planning import check_count, check_kind
from composer_tokacc.step_watch import BufferWatch

__all__ = [
    'Gradients',
    'InvarianceCase',
    'InvarianceReport',
    'IsolationReport',
    'relative_error',
    'verify_invariance',
    'verify_isolation',
]

Gradients = Mapping[str, torch.Tensor]
Row = dict[str, Any]
"""A batch of one row."""

RULES_TO_COUNT = ('unshifted', 'causal')
"""The model's rule is not known here, so rows must prove something by either."""
STATE_NOTE = 'Forwards write {}, and the gradient of a later forward may depend on it. Freeze this state.'


@dataclass(frozen=True, kw_only=True)
class InvarianceCase:
    """One way to cut and pad the rows, and how far the gradient is off."""

    cut: str
    """``'again'`` (all rows in one microbatch a second time), ``'in order'``, ``'by length'`` (trimmed if padded on the
    right), ``'uneven'`` (one row, then all others). In the program: ``'stock Composer'``, ``'in order'`` or
    ``'regrouped'``."""
    padding: str
    """``'right'`` or ``'left'``."""
    microbatch_size: int
    """Rows of a microbatch on each rank."""
    error: float
    """Norm of the difference over norm of the reference, over all parameters."""
    factor: float
    """Length of the gradient along the reference: 2.0 if it is right except for a factor of 2."""
    reason: str
    """The parameter that is furthest off, and how."""
    is_held: bool = True
    """Whether the error must be within the tolerance. Other cases are only shown."""

    @classmethod
    def from_gradients(
        cls,
        found: Gradients,
        expected: Gradients,
        *,
        cut: str,
        padding: str,
        microbatch_size: int,
        is_held: bool = True,
    ) -> InvarianceCase:
        """Compares gradients on every rank, and returns the worst case of all ranks, the same on each; a collective."""
        error, reason = relative_error(found, expected)
        along_reference = sum(_product(found[name], expected[name]) for name in found.keys() & expected.keys())
        case = cls(
            cut=cut,
            padding=padding,
            microbatch_size=microbatch_size,
            error=error,
            factor=along_reference / _squared_norm(expected),
            reason=reason,
            is_held=is_held,
        )
        return max(all_gather_object(case), key=lambda case: case.error)


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """The cases of :func:`.verify_invariance`, the same on all ranks; printed as a table."""

    cases: tuple[InvarianceCase, ...]
    tolerance: float
    note: str = ''
    """Printed between the cases and the verdict."""

    @property
    def worst(self) -> InvarianceCase:
        """The case with the largest error."""
        held_cases = [case for case in self.cases if case.is_held]
        return max(held_cases, key=lambda case: case.error)

    @property
    def is_exact(self) -> bool:
        """Whether no error is over the tolerance."""
        return self.worst.error <= self.tolerance

    def __str__(self) -> str:
        width = 2 + max(10, *(len(case.cut) for case in self.cases))
        lines = [f'{"cut":<{width}}{"padding":<10}{"microbatch":>10}{"gradient error":>16}{"factor":>9}']
        for case in self.cases:
            line = f'{case.cut:<{width}}{case.padding:<10}{case.microbatch_size:>10}'
            line += f'{case.error:>16.1e}{case.factor:>9.4f}'
            if case.is_held and case.error > self.tolerance:
                line += f'  over tolerance; {case.reason}'
            lines.append(line)
        if self.note:
            lines.append(self.note)
        verdict = 'exact' if self.is_exact else 'NOT exact'
        lines.append(
            f'{verdict}: largest relative gradient error {self.worst.error:.1e}, tolerance {self.tolerance:.0e}'
        )
        return '\n'.join(lines)


@dataclass(frozen=True, kw_only=True)
class StepCut:
    """A way to cut and pad the rows of a step. The first fields are those of :class:`InvarianceCase`."""

    name: str
    padding: str
    microbatch_size: int
    gradients: Callable[[], Gradients]
    """Computes the step in this cut."""
    is_held: bool = True


def compare_cuts(
    padding_sides: Iterable[str],
    reference: Callable[[str], Gradients],
    cuts: Callable[[str], Iterable[StepCut]],
    *,
    tolerance: float,
) -> InvarianceReport:
    """Compares the gradient of each cut with that of all rows in one forward; a collective over the ranks.

    Args:
        padding_sides: ``'right'``, ``'left'`` or both.
        reference: Computes the gradient of one forward over the rows of all ranks, padded on this side.
        cuts: Returns the cuts of the rows padded on this side, as many on every rank.
        tolerance: Largest relative error that is taken for round-off.
    """
    cases = []
    state = BufferWatch()
    for padding in padding_sides:
        with state:
            expected = reference(padding)
        for cut in cuts(padding):
            case = InvarianceCase.from_gradients(
                cut.gradients(),
                expected,
                cut=cut.name,
                padding=padding,
                microbatch_size=cut.microbatch_size,
                is_held=cut.is_held,
            )
            cases.append(case)
    written = sorted(set().union(*all_gather_object(state.written)))
    report = InvarianceReport(cases=tuple(cases), tolerance=tolerance)
    if written and not report.is_exact:
        names = ', '.join(f'`{name}`' for name in written)
        report = InvarianceReport(cases=report.cases, tolerance=tolerance, note=STATE_NOTE.format(names))
    return report


def relative_error(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """Returns ``|found - expected| / |expected|`` over all parameters, and a line that names the worst parameter.

    An absent gradient counts as zero. Raises ValueError if the reference is zero everywhere.
    """
    zero = torch.zeros(())
    squares = {}
    for name in sorted(found.keys() | expected.keys()):
        difference = found.get(name, zero).cpu().double() - expected.get(name, zero).cpu().double()
        square = float(difference.square().sum())
        is_nan = square != square
        squares[name] = float('inf') if is_nan else square  # NaN cannot be compared
    squared_norm = _squared_norm(expected)
    if not squared_norm > 0.0:
        raise ValueError(
            f'The reference gradient must be above zero, got: norm {squared_norm} over {len(expected)} parameters. '
            'Rows need labels that are not ignored, and parameters `requires_grad`.'
        )
    worst = max(squares, key=squares.__getitem__)
    reason = 'is off'
    if worst not in found:
        reason = 'has no gradient'
    elif worst not in expected:
        reason = 'has none expected'
    return (sum(squares.values()) / squared_norm) ** 0.5, f'most of all, {worst} {reason}'


def _squared_norm(gradients: Gradients) -> float:
    return sum(_product(gradient, gradient) for gradient in gradients.values())


def _product(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.cpu().double() * second.cpu().double()).sum())


def verify_invariance(
    gradients: Callable[[list[dict[str, Any]]], Gradients],
    rows: Sequence[Batch] | Batch,
    *,
    layout: BatchLayout | None = None,
    reference: Callable[[dict[str, Any]], Gradients] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    padding_sides: Sequence[str] = ('right', 'left'),
    tolerance: float = 1e-6,
) -> InvarianceReport:
    """Has a trainer compute the gradient of the same rows in many cuts, and compares.

    Dropout must be off, and the learning rate 0 or the weights restored. Use float32: the round-off of shorter types
    hides an error. On several ranks every rank calls it, with its own rows.

    Args:
        gradients: Computes one optimizer step. Gets this rank's microbatches in order, and returns the gradient of each
            parameter by name, as the optimizer would see it, and not sharded.
        rows: This rank's rows, at least two, equally many on every rank: one-row batches, or a batch of all of them, as
            a processor or collator makes them, with ``input_ids`` and ``labels``.
        layout: How tensors belong to rows. By default the keys of the batch tell. ``BatchLayout.for_model(model)``
            knows more.
        reference: Computes the gradients of one forward over the rows of all ranks. By default ``gradients`` computes
            them, as a step of one microbatch, the same on every rank. This shows whether the cut matters, but not
            whether the gradient of one microbatch is right.
        microbatch_sizes: Rows of a microbatch; by default 1, 2, 3 and all.
        padding_sides: The sides on which rows are padded. A model that counts positions from the first column computes
            something else if rows are padded on the left.
        tolerance: Largest relative error that is taken for round-off.

    Returns:
        The cases and a verdict: ``assert report.is_exact, report``. If it is not exact and a forward writes into
        buffers of the model, a note names them.

    Raises:
        ValueError: If the rows prove nothing: fewer than two, equally many labels in all, or different numbers of rows
            on the ranks.

    Example:
        >>> import torch
        >>> from composer_tokacc import verify_invariance
        >>> model = torch.nn.Embedding(9, 9)
        >>> tokens = [torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7]])]
        >>> rows = [{'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids} for ids in tokens]
        >>> def mean_of_means(microbatches):
        ...     model.zero_grad()
        ...     for microbatch in microbatches:
        ...         logits, labels = model(microbatch['input_ids'])[:, :-1], microbatch['labels'][:, 1:]
        ...         loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        ...         (loss / len(microbatches)).backward()
        ...     return {name: p.grad.clone() for name, p in model.named_parameters()}
        >>> verify_invariance(mean_of_means, rows).is_exact
        False
    """
    batches = [rows] if isinstance(rows, Mapping) else list(rows)
    layout, rows_by_rank = _rows_of_all_ranks(layout, batches)
    if not callable(gradients):
        raise ValueError(f'`gradients` must be a function of microbatches, got: {gradients!r:.80}.')
    for size in microbatch_sizes or ():
        check_count('microbatch_sizes', size)
    if not padding_sides:
        raise ValueError(f"`padding_sides` must be 'right', 'left' or both, got: {padding_sides!r}.")
    if not tolerance >= 0:
        raise ValueError(f'`tolerance` must be at least 0, got: {tolerance}.')
    if isinstance(padding_sides, str):
        padding_sides = [padding_sides]
    step = _StepInCuts(gradients, reference, layout, rows_by_rank, microbatch_sizes)
    return compare_cuts(padding_sides, step.reference_gradients, step.cuts, tolerance=tolerance)


def _rows_of_all_ranks(layout: BatchLayout | None, batches: Sequence[Batch]) -> tuple[BatchLayout, list[list[Row]]]:
    """Returns the layout, and the single rows of each rank; refuses rows that prove nothing. A collective."""
    num_rows_by_rank = all_gather_object(sum(len(labels_of(batch)) for batch in batches))
    if len(set(num_rows_by_rank)) > 1 or num_rows_by_rank[0] < 2:
        raise ValueError(f'`rows` must hold as many rows on every rank, and at least 2, got: {num_rows_by_rank}.')
    if layout is None:
        # Batches with media have the most keys, and tell the layout.
        layout = BatchLayout.infer(max(batches, key=len))
    check_kind('layout', layout, BatchLayout)
    rows: list[Row] = []
    for batch in batches:
        batch = without_metadata(batch)
        rows += [layout.trim(layout.select(batch, [row])) for row in range(layout.num_rows(batch))]
    rows_by_rank = all_gather_object(rows)
    return layout, _with_unequal_ranks(rows_by_rank)


def _with_unequal_ranks(rows_by_rank: list[list[Row]]) -> list[list[Row]]:
    """Returns the rows such that ranks have different numbers of labels, because equal ones hide a mean over ranks.

    Raises ValueError if all rows have equally many labels: a mean of means is then the mean over all tokens.
    """
    rows = [row for rows_of_rank in rows_by_rank for row in rows_of_rank]
    rows_per_rank = len(rows_by_rank[0])
    labels_by_row = [[int(loss_mask(row, rule).sum()) for rule in RULES_TO_COUNT] for row in rows]
    some_rule_is_equal = False
    for index, rule in enumerate(RULES_TO_COUNT):
        num_labels = [labels[index] for labels in labels_by_row]
        if len(set(num_labels)) == 1:
            raise ValueError(
                f'`rows` must differ in their numbers of labels, got: {num_labels[0]} in each of {len(rows)} rows, '
                f'counted {rule}. Among such rows a mean of means is the mean over all tokens, and nothing is proven.'
            )
        starts = range(0, len(rows), rows_per_rank)
        totals = {sum(num_labels[start : start + rows_per_rank]) for start in starts}
        some_rule_is_equal |= len(totals) == 1
    if len(rows_by_rank) == 1 or not some_rule_is_equal:
        return rows_by_rank
    # Rows with few labels go to the first ranks.
    order = sorted(range(len(rows)), key=lambda row: labels_by_row[row])
    rows = [rows[row] for row in order]
    return [rows[start : start + rows_per_rank] for start in range(0, len(rows), rows_per_rank)]


@dataclass(frozen=True)
class _StepInCuts:
    """A user's step, and the rows to put through it."""

    gradients: Callable[[list[dict[str, Any]]], Gradients]
    reference: Callable[[dict[str, Any]], Gradients] | None
    layout: BatchLayout
    rows_by_rank: list[list[Row]]
    microbatch_sizes: Sequence[int] | None

    def reference_gradients(self, padding: str) -> Gradients:
        """Returns the gradients of one forward over the rows of all ranks."""
        batch = self._microbatch(self._rows_of_all_ranks(padding))
        gradients = self.gradients([batch]) if self.reference is None else self.reference(batch)
        is_mapping = isinstance(gradients, Mapping)
        if not is_mapping or not all(isinstance(gradient, torch.Tensor) for gradient in gradients.values()):
            raise TypeError(f'`gradients` must give a tensor for each parameter, by name, got: {str(gradients)[:60]}.')
        # Copies, because the next step may write into the same tensors.
        return {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def cuts(self, padding: str) -> Iterator[StepCut]:
        """Yields the cuts of this rank's rows, as many on every rank."""
        rows = self.rows_by_rank[get_global_rank()]
        num_rows = len(rows)
        batch = self.layout.concat(rows, padding_side=padding)

        def cut(name: str, size: int, microbatches: Sequence[Batch]) -> StepCut:
            gradients = partial(self._gradients_of, microbatches)
            return StepCut(name=name, padding=padding, microbatch_size=size, gradients=gradients)

        yield cut('again', num_rows, [self._rows_of_all_ranks(padding)])
        by_length = sorted(range(num_rows), key=lambda row: -labels_of(rows[row]).shape[1])
        sizes = {min(size, num_rows) for size in self.microbatch_sizes or (1, 2, 3, num_rows)}
        for size in sorted(sizes):
            in_order, sorted_microbatches = [], []
            for start in range(0, num_rows, size):
                stop = min(start + size, num_rows)
                in_order.append(self.layout.select(batch, list(range(start, stop))))
                microbatch = self.layout.select(batch, by_length[start:stop])
                # Padding on the left may predict a first label, and trimming it would move positions.
                sorted_microbatches.append(self.layout.trim(microbatch) if padding == 'right' else microbatch)
            yield cut('in order', size, in_order)
            yield cut('by length', size, sorted_microbatches)
        uneven = [self.layout.select(batch, [0]), self.layout.select(batch, list(range(1, num_rows)))]
        yield cut('uneven', 1, uneven)

    def _rows_of_all_ranks(self, padding: str) -> Batch:
        rows = [row for rows_of_rank in self.rows_by_rank for row in rows_of_rank]
        return self.layout.with_media(self.layout.concat(rows, padding_side=padding))

    def _gradients_of(self, microbatches: Sequence[Batch]) -> Gradients:
        return self.gradients([self._microbatch(microbatch) for microbatch in microbatches])

    def _microbatch(self, batch: Batch) -> dict[str, Any]:
        """Returns a copy, because a trainer may write into its batches, and cuts share their tensors."""
        return dict(self.layout.with_media(with_own_tensors(batch)))
