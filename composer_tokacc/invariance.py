# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the gradient of the same rows in many cuts.

A cut is a way to divide the rows of a step into microbatches. ``compare_cuts`` is the common part.
``verify_invariance`` calls it with the user's own step, in any trainer. The program ``composer_tokacc.verify`` calls it
with runs of Composer's Trainer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from composer_tokacc.arguments import as_list, as_number, check_choice, check_count, check_kind
from composer_tokacc.batch import Batch, BatchDict, check_rows, labels_of, with_copied_tensors
from composer_tokacc.collectives import all_gather_object, get_global_rank, raise_on_all_ranks
from composer_tokacc.counting import LossRule
from composer_tokacc.isolation import IsolationReport, verify_isolation
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.layout import inferred_layout, layout_of_rows, split_trimmed
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import without_row_counts

# `IsolationReport` and `verify_isolation` are here because both checks are public names of this module.
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
"""The gradient of each parameter, by its name."""
SingleRows = list[BatchDict]
"""Batches of one row each."""

RULES_TO_COUNT = (LossRule.UNSHIFTED, LossRule.CAUSAL)
"""The loss rule of the user's model is not known, so labels are counted by both of these. They differ only if a row has
a label at its first token."""
DEFAULT_SIZES = (1, 2, 3, sys.maxsize)
"""Rows of a microbatch in the compared cuts. The last one means all rows."""


@dataclass(frozen=True, kw_only=True)
class InvarianceCase:
    """One way to cut and pad the rows, and how far the gradient is off."""

    cut: str
    """How the rows were cut. In :func:`.verify_invariance`:

    - ``'again'``: the rows of all ranks in one microbatch, as for the default reference;
    - ``'in order'``: microbatches of ``microbatch_size`` rows, in the order of the rows;
    - ``'by length'``: the same with the longest rows first, trimmed if the padding is on the right;
    - ``'uneven'``: two microbatches, all rows except the first, then the first row.

    In the program ``composer_tokacc.verify``: ``'stock Composer'``, ``'in order'`` or ``'regrouped'``."""
    padding: str
    """``'right'`` or ``'left'``."""
    microbatch_size: int
    """In the cuts ``'in order'`` and ``'by length'``, the rows of a microbatch on each rank. For
    ``'again'``, the number of rows of each rank. For ``'uneven'``, the rows of its larger microbatch: one less."""
    error: float
    """The norm of the difference from the reference, over the norm of the reference, over all parameters."""
    factor: float
    """The multiple of the reference that is nearest to the gradient: 2.0 if every gradient is twice the right one."""
    reason: str
    """A text that names the parameter that is furthest off."""
    is_held: bool = True
    """Whether the error must be within the tolerance. False for stock Composer, which is only shown."""

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
        """Compares this rank's gradients. Returns the case of the rank with the largest error; a collective."""
        error, reason = relative_error(found, expected)
        product = 0.0
        for name in found.keys() & expected.keys():
            product += _inner_product(found[name], expected[name])
        case = cls(
            cut=cut,
            padding=padding,
            microbatch_size=microbatch_size,
            error=error,
            factor=product / _squared_norm(expected),
            reason=reason,
            is_held=is_held,
        )
        return max(all_gather_object(case), key=lambda case: case.error)


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """The cases of a comparison, the same on all ranks; printed as a table."""

    cases: tuple[InvarianceCase, ...]
    tolerance: float
    """Largest relative error that is taken for round-off."""
    note: str = ''
    """Printed between the cases and the verdict."""

    @property
    def worst(self) -> InvarianceCase:
        """The case with the largest error, among those whose error must be within the tolerance."""
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
            f'{verdict}: largest relative gradient error {self.worst.error:.1e}, tolerance {self.tolerance:.1e}'
        )
        return '\n'.join(lines)


def compare_cuts(
    padding_sides: Sequence[str],
    reference: Callable[[str], Gradients],
    cases: Callable[[str, Gradients], Iterable[InvarianceCase]],
    *,
    tolerance: float,
) -> InvarianceReport:
    """Returns how far the gradient of each cut is from the gradient of one forward over all rows; a collective.

    The caller's functions compute the gradients. This function calls them for each padding side.

    Args:
        padding_sides: ``'right'``, ``'left'`` or a list of both.
        reference: Gets a padding side. Returns the gradient of one forward over the rows of all ranks, padded on it.
        cases: Gets a padding side and what ``reference`` returned for it. Computes the gradient of each cut, and
            returns how far it is off. All ranks have equally many cuts.
        tolerance: Largest relative error that is taken for round-off.

    Raises:
        ValueError: If there is no side, if a side has another name, or if ``tolerance`` is not a finite number of at
            least 0.
    """
    if isinstance(padding_sides, str):
        padding_sides = [padding_sides]
    sides = as_list('padding_sides', padding_sides, "'right' and 'left'")
    for padding in sides:
        check_choice('padding_sides', padding, ('right', 'left'))
    tolerance = as_number('tolerance', tolerance)
    cases_of_sides: list[InvarianceCase] = []
    for padding in sides:
        cases_of_sides += cases(padding, reference(padding))
    return InvarianceReport(cases=tuple(cases_of_sides), tolerance=tolerance)


def relative_error(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """Returns ``|found - expected| / |expected|`` over all parameters, and a text that names the worst parameter.

    An absent gradient counts as zero. The error is infinite if a gradient has a NaN. Raises ValueError if the reference
    is zero everywhere, or not finite. Also if the two have no parameter in common, or another shape for the same
    parameter.
    """
    _check_comparable(found, expected)
    zero = torch.zeros(())  # for an absent gradient
    squares = {}
    for name in sorted(found.keys() | expected.keys()):
        gradient = found.get(name, zero).cpu().double()
        reference = expected.get(name, zero).cpu().double()
        difference = gradient - reference
        square = float(difference.square().sum())
        squares[name] = math.inf if math.isnan(square) else square  # `max` cannot compare NaN
    squared_norm = _squared_norm(expected)
    if not 0.0 < squared_norm < math.inf:
        raise InvalidInputError(
            f'The reference gradient must be above zero and finite, got: squared norm {squared_norm} over '
            f'{len(expected)} parameters. Rows need labels that are not ignored, and parameters `requires_grad`.'
        )
    worst = max(squares, key=squares.__getitem__)
    error = math.sqrt(sum(squares.values()) / squared_norm)
    return error, f'most of all, {worst} is off'


def _check_comparable(found: Gradients, expected: Gradients) -> None:
    """Raises ValueError if no parameter has a gradient in both, or if its gradients have different shapes."""
    common_names = found.keys() & expected.keys()
    # If one side is empty, the names are not wrong: an absent gradient counts as zero.
    if found and expected and not common_names:
        raise InvalidInputError(
            'Gradients must have the same names if they are compared, got: '
            f'{min(found)!r} and so on, and {min(expected)!r} and so on. Use the names of `model.named_parameters()` '
            'of one model for all.'
        )
    for name in sorted(common_names):
        found_shape = tuple(found[name].shape)
        expected_shape = tuple(expected[name].shape)
        # torch would repeat the smaller one, if it can, and the error would mean nothing.
        if found_shape != expected_shape:
            raise InvalidInputError(
                f'Gradients of `{name}` must have the same shape if they are compared, got: {found_shape} and '
                f'{expected_shape}. Return each gradient in the shape of its parameter, not sharded and not flattened.'
            )


def _squared_norm(gradients: Gradients) -> float:
    return sum(_inner_product(gradient, gradient) for gradient in gradients.values())


def _inner_product(first: torch.Tensor, second: torch.Tensor) -> float:
    product = first.cpu().double() * second.cpu().double()
    return float(product.sum())


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
    """Has a trainer compute the gradient of the same rows in many cuts. All must equal the gradient of one forward.

    Dropout must be off, and the learning rate 0 or the weights restored. Use float32, on a GPU without TF32: the
    round-off of shorter types hides an error. On several ranks every rank calls it, with its own rows.

    Args:
        gradients: Computes one optimizer step. Gets this rank's microbatches in order. Returns the gradient of each
            parameter by name, as the optimizer would see it: reduced over the ranks, and not sharded.
        rows: This rank's rows, at least two, equally many on every rank: one-row batches, or a batch of all of them, as
            a processor or collator makes them, with ``input_ids`` and ``labels``.
        layout: How tensors belong to rows. By default it is inferred from the keys of the batch.
            ``BatchLayout.for_model(model)`` knows more.
        reference: Computes the gradients of one forward over the rows of all ranks. By default ``gradients`` computes
            them, as a step of one microbatch, the same on every rank. This shows whether the cut matters, but not
            whether the gradient of one microbatch is right.
        microbatch_sizes: Rows of a microbatch in the compared cuts; by default 1, 2, 3 and all.
        padding_sides: The sides on which rows are padded in turn. On several ranks leave out ``'left'`` for a model
            that counts positions from the first column. The reference is as wide as the longest row of all ranks, so
            its padding on the left moves tokens to other columns than the cuts of a rank do.
        tolerance: Largest relative error that is taken for round-off.

    Returns:
        The cases and a verdict: ``assert report.is_exact, report``.

    Raises:
        ValueError: If the rows prove nothing: fewer than two rows on a rank, different numbers of rows on the ranks, or
            the same number of labels in each row or on each rank. Also if the reference is zero or not finite, or if
            ``gradients`` does not depend on the rows that it gets. Also if rows cannot be read or joined, or if the
            gradients that are compared have different names or shapes.
        TypeError: If ``gradients`` or ``reference`` does not return a mapping of tensors by name.

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
    if not isinstance(rows, Iterable):
        raise InvalidInputError(f'`rows` must be one-row batches, or a batch of all of them, got: {rows!r:.80}.')
    batches = [rows] if isinstance(rows, Mapping) else list(rows)
    check_batches(batches, check_rows)
    batches_by_rank = _batches_of_all_ranks(batches)
    layout = _layout_of_selected_rows(layout, batches_by_rank)
    rows_by_rank = []
    for batches_of_rank in batches_by_rank:
        rows_by_rank.append(_single_rows(layout, batches_of_rank))
    _check_numbers_of_labels(rows_by_rank)
    step = _UserStep(
        gradients=gradients,
        reference=reference,
        layout=layout,
        rows_by_rank=rows_by_rank,
        microbatch_sizes=_checked_sizes(microbatch_sizes),
    )
    report = compare_cuts(padding_sides, step.reference_gradients, step.cases, tolerance=tolerance)
    if all(case.error == 0 for case in report.cases):
        # Not even round-off, so `gradients` may read other batches than those that it gets.
        step.check_reads_rows()
    return report


class _UserCut(NamedTuple):
    """A cut of the rows of this rank. :class:`InvarianceCase` explains the name and the size."""

    name: str
    microbatch_size: int
    microbatches: Sequence[Batch]


@dataclass(frozen=True, kw_only=True)
class _UserStep:
    """The user's functions and rows, in the form that :func:`compare_cuts` needs.

    Args:
        gradients: See :func:`verify_invariance`.
        reference: See :func:`verify_invariance`.
        layout: How tensors belong to rows.
        rows_by_rank: The single rows of each rank, without padding.
        microbatch_sizes: Rows of a microbatch in the compared cuts.
    """

    gradients: Callable[[list[dict[str, Any]]], Gradients]
    reference: Callable[[dict[str, Any]], Gradients] | None
    layout: BatchLayout
    rows_by_rank: list[SingleRows]
    microbatch_sizes: Sequence[int]

    def __post_init__(self) -> None:
        if not callable(self.gradients):
            raise InvalidInputError(f'`gradients` must be a function of microbatches, got: {self.gradients!r:.80}.')
        if self.reference is not None and not callable(self.reference):
            raise InvalidInputError(f'`reference` must be a function of a batch, got: {self.reference!r:.80}.')

    def reference_gradients(self, padding: str) -> Gradients:
        """Computes the gradients of one forward over the rows of all ranks, padded on this side."""
        all_rows = self._all_rows(padding)
        if self.reference is None:
            return self._gradients_of([all_rows])
        return _cloned(self.reference(self._prepared(all_rows)))

    def cases(self, padding: str, expected: Gradients) -> Iterator[InvarianceCase]:
        """Compares the user's step in each cut with the expected gradients."""
        for cut in self._cuts(padding):
            yield InvarianceCase.from_gradients(
                self._gradients_of(cut.microbatches),
                expected,
                cut=cut.name,
                padding=padding,
                microbatch_size=cut.microbatch_size,
            )

    def _cuts(self, padding: str) -> Iterator[_UserCut]:
        """Yields the cuts that :class:`InvarianceCase` names. Their last microbatch may be smaller."""
        rows = self.rows_by_rank[get_global_rank()]
        num_rows = len(rows)
        # The same on every rank. By default the reference is this step, too, so this shows whether a repeated step has
        # the same gradient.
        yield _UserCut('again', num_rows, [self._all_rows(padding)])
        batch = self.layout.concat(rows, padding_side=padding)
        widths = [labels_of(row).shape[1] for row in rows]
        in_order = list(range(num_rows))
        longest_first = sorted(in_order, key=lambda row: -widths[row])
        for size in sorted({min(size, num_rows) for size in self.microbatch_sizes}):
            yield _UserCut('in order', size, self.layout.split(batch, groups_of(in_order, size)))
            yield _UserCut('by length', size, self._split_by_length(batch, groups_of(longest_first, size), padding))
        # The microbatch of one row comes last, because some loops drop a smaller last one, as `drop_last` does.
        yield _UserCut('uneven', num_rows - 1, self.layout.split(batch, [in_order[1:], in_order[:1]]))

    def _split_by_length(
        self,
        batch: Batch,
        groups: Sequence[Sequence[int]],
        padding: str,
    ) -> Sequence[Batch]:
        """Returns microbatches of rows of similar length, trimmed if the padding is on the right."""
        if padding == 'right':
            return split_trimmed(self.layout, batch, groups)
        # Padding on the left stays. In a causal model the padding position before a row's first token may predict a
        # label at that token. And trimming would move tokens to earlier columns, which changes the result of some
        # models.
        return self.layout.split(batch, groups)

    def check_reads_rows(self) -> None:
        """Raises ValueError if a step of one row of each rank has the gradient of a step of all rows; a collective."""
        # By 'causal', because a label that it counts is counted by 'unshifted', too.
        num_labelled = 0
        for row in joined(self.rows_by_rank):
            if _num_labels(row, LossRule.CAUSAL) > 0:
                num_labelled += 1
        if num_labelled <= len(self.rows_by_rank):
            return  # each rank may have a single row with labels, and then both steps have the same gradient
        gradients_of_all = self._gradients_of([self._all_rows('right')])
        rows = self.rows_by_rank[get_global_rank()]
        row_with_most_labels = max(rows, key=lambda row: _num_labels(row, LossRule.CAUSAL))
        error, _ = relative_error(self._gradients_of([row_with_most_labels]), gradients_of_all)
        if max(all_gather_object(error)) == 0:
            raise InvalidInputError(
                '`gradients` must compute a step of the microbatches that it gets, got: the same gradient for one row '
                'as for all rows. Does it read other batches?'
            )

    def _gradients_of(self, microbatches: Sequence[Batch]) -> Gradients:
        """Computes a step of these microbatches of this rank."""
        prepared_microbatches = [self._prepared(microbatch) for microbatch in microbatches]
        return _cloned(self.gradients(prepared_microbatches))

    def _all_rows(self, padding: str) -> BatchDict:
        return self.layout.concat(joined(self.rows_by_rank), padding_side=padding)

    def _prepared(self, batch: Batch) -> BatchDict:
        """Returns a copy, with a dummy image if the model needs an image and the batch has none."""
        # A copy, because a trainer may write into its batches, and cuts share their tensors.
        return dict(self.layout.with_media(with_copied_tensors(batch)))


def _checked_sizes(microbatch_sizes: Sequence[int] | None) -> list[int]:
    """Returns the sizes in a list, because they may be a generator, which can be read only once."""
    if microbatch_sizes is None:
        return list(DEFAULT_SIZES)
    sizes = as_list('microbatch_sizes', microbatch_sizes, 'numbers of rows')
    for size in sizes:
        check_count('microbatch_sizes', size)
    return sizes


def _cloned(gradients: Gradients) -> Gradients:
    """Returns copies, because the next step may write into the same tensors. Raises TypeError for anything else."""
    if not isinstance(gradients, Mapping):
        raise TypeError(f'`gradients` and `reference` must return tensors by name, got: {type(gradients).__name__}.')
    for name, gradient in gradients.items():
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                f'`gradients` and `reference` must return tensors, got: {gradient!r:.60} for `{name}`. Leave out '
                'parameters without a gradient.'
            )
    return {name: gradient.detach().clone() for name, gradient in gradients.items()}


def check_batches(batches: Iterable[Batch], check: Callable[[Batch], None]) -> None:
    """Calls ``check``, which may raise ValueError, with each batch of this rank; a collective.

    If it raises on any rank, all ranks raise, because the others would wait for the one that refuses its batch.
    """
    refusal = None
    try:
        for batch in batches:
            check(batch)
    except InvalidInputError as error:
        refusal = error
    raise_on_all_ranks(refusal)


def _batches_of_all_ranks(batches: Sequence[Batch]) -> list[list[BatchDict]]:
    """Returns copies of the batches of each rank; a collective.

    Raises ValueError if ranks have different numbers of rows, or only one row each.
    """
    num_rows = sum(len(labels_of(batch)) for batch in batches)
    num_rows_by_rank = all_gather_object(num_rows)
    if len(set(num_rows_by_rank)) > 1 or num_rows_by_rank[0] < 2:
        raise InvalidInputError(
            f'`rows` must hold as many rows on every rank, and at least 2, got: {num_rows_by_rank}.'
        )
    # Without the counts of this package, because they belong to another cut. Copies, because a row may be a view, and
    # pickle would send the whole tensor behind each view.
    plain_batches = [with_copied_tensors(without_row_counts(batch)) for batch in batches]
    return all_gather_object(plain_batches)


def _layout_of_selected_rows(layout: BatchLayout | None, batches_by_rank: Sequence[Sequence[Batch]]) -> BatchLayout:
    """Returns a layout for rows that are selected from these batches; the same on all ranks.

    It remembers what the whole batches tell, because a few rows tell less surely how a tensor belongs to them.
    ``layout`` is the layout of the batches; None: it is inferred.
    """
    if layout is None:
        # From the batches of all ranks: perhaps only one rank has media, but all ranks need the same layout.
        layout = inferred_layout(chain.from_iterable(batches_by_rank))
    check_kind('layout', layout, BatchLayout)
    return layout_of_rows(layout, chain.from_iterable(batches_by_rank))


def _single_rows(layout: BatchLayout, batches: Sequence[Batch]) -> SingleRows:
    """Returns the rows of some batches, each without its padding."""
    rows = []
    for batch in batches:
        groups = [[row] for row in range(layout.num_rows(batch))]
        rows += split_trimmed(layout, batch, groups)
    return rows


def _check_numbers_of_labels(rows_by_rank: list[SingleRows]) -> None:
    """Raises ValueError if all rows have the same number of labels, or all ranks have.

    A mean over microbatches is wrong only if rows have different numbers of labels, and a mean over ranks only if ranks
    have. So with equal numbers, a wrong trainer would pass.
    """
    for rule in RULES_TO_COUNT:
        labels_of_rows: list[int] = []
        labels_of_ranks: list[int] = []
        for rows in rows_by_rank:
            labels_of_rows_of_rank = [_num_labels(row, rule) for row in rows]
            labels_of_rows += labels_of_rows_of_rank
            labels_of_ranks.append(sum(labels_of_rows_of_rank))
        _check_not_all_equal(labels_of_rows, 'rows', rule)
        _check_not_all_equal(labels_of_ranks, 'ranks', rule)


def _check_not_all_equal(numbers_of_labels: Sequence[int], holders: str, rule: LossRule) -> None:
    """Raises ValueError if several holders, ``'rows'`` or ``'ranks'``, all have the same number of labels."""
    if len(numbers_of_labels) > 1 and len(set(numbers_of_labels)) == 1:
        raise InvalidInputError(
            f'`rows` must differ in their numbers of labels, got: {numbers_of_labels[0]} in each of '
            f'{len(numbers_of_labels)} {holders}, counted {rule}. Among these a mean of means is the mean over all '
            'tokens, and nothing is proven.'
        )


def _num_labels(row: Batch, rule: LossRule) -> int:
    """Returns the number of labels of one row that count by this loss rule."""
    return int(rule.mask(row).sum())


def joined(rows_by_rank: Sequence[SingleRows]) -> SingleRows:
    """Returns the rows of all ranks in one list."""
    return list(chain.from_iterable(rows_by_rank))


def groups_of(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns the rows in groups of ``size``. The last group may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
