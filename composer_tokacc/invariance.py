# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Whether a gradient depends on how its rows are cut into microbatches and padded: for any trainer, in any test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_tokacc.batch import Batch, labels_of, text_of, with_own_tensors
from composer_tokacc.checks.logits import logits_of
from composer_tokacc.collectives import all_gather_object, get_global_rank
from composer_tokacc.counting import loss_mask
from composer_tokacc.layout import BatchLayout
from composer_tokacc.metadata import without_metadata
from composer_tokacc.planning import check_count, check_kind

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class InvarianceCase:
    """One way to cut and pad the rows, and what became of the gradient."""

    cut: str
    """``'again'`` (the whole a second time), ``'in order'``, ``'by length'`` (trimmed where padded right), ``'uneven'``
    (one row, then all others); in the program ``'stock Composer'``, ``'in order'`` or ``'regrouped'``."""
    padding: str
    """``'right'`` or ``'left'``."""
    microbatch_size: int
    """Rows of a microbatch on each rank."""
    error: float
    """Norm of the difference over norm of the reference, over all parameters."""
    factor: float
    """Length of the gradient along the reference: 2.0 for one that is right but for a factor of 2."""
    reason: str
    """The parameter that is furthest off, and how."""
    is_held: bool = True
    """Whether it is held to the tolerance, rather than shown beside the others."""

    @classmethod
    def from_gradients(
        cls, found: Gradients, expected: Gradients, *, cut: str, padding: str, microbatch_size: int,
        is_held: bool = True,
    ) -> InvarianceCase:  # fmt: skip
        """Compares gradients on every rank, and gives the worst: the same verdict on all; a collective."""
        error, reason = relative_error(found, expected)
        along = sum(_product(found[name], expected[name]) for name in found.keys() & expected.keys())
        factor = along / sum(_product(value, value) for value in expected.values())
        case = cls(
            cut=cut, padding=padding, microbatch_size=microbatch_size, error=error, factor=factor, reason=reason,
            is_held=is_held,
        )  # fmt: skip
        return max(all_gather_object(case), key=lambda one: one.error)


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
        return max((case for case in self.cases if case.is_held), key=lambda case: case.error)

    @property
    def is_exact(self) -> bool:
        """Whether no error is over the tolerance."""
        return self.worst.error <= self.tolerance

    def __str__(self) -> str:
        width = 2 + max(10, *(len(case.cut) for case in self.cases))
        lines = [f'{"cut":<{width}}{"padding":<10}{"microbatch":>10}{"gradient error":>16}{"factor":>9}']
        for case in self.cases:
            is_off = case.is_held and case.error > self.tolerance
            lines.append(
                f'{case.cut:<{width}}{case.padding:<10}{case.microbatch_size:>10}{case.error:>16.1e}'
                f'{case.factor:>9.4f}{f"  over tolerance; {case.reason}" if is_off else ""}'
            )
        verdict = f'largest relative gradient error {self.worst.error:.1e}, tolerance {self.tolerance:.0e}'
        lines += [self.note] if self.note else []
        return '\n'.join([*lines, f'{"exact" if self.is_exact else "NOT exact"}: {verdict}'])


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

    Dropout must be off and the learning rate 0, or the weights put back; in shorter types than float32 round-off
    hides what is looked for. On several ranks every rank calls it, with its own rows.

    Args:
        gradients: Any way to the gradients of one optimizer step: gets this rank's microbatches in order and gives the
            gradient of each parameter as the optimizer would see it, whole (not sharded), by name.
        rows: This rank's rows, at least two, as many on every rank: one-row batches, or a batch of all of them, as a
            processor or collator makes them, with ``input_ids`` and ``labels``.
        layout: How tensors belong to rows; by default what the batch's keys imply. ``BatchLayout.for_model(model)``
            knows more.
        reference: Gives the gradients of one forward over the rows of all ranks. By default ``gradients`` is asked for
            them, as a step of one microbatch, the same on every rank: that shows whether the cut matters, not whether
            the whole is right.
        microbatch_sizes: Rows of a microbatch; by default 1, 2, 3 and all.
        padding_sides: Where the rows are padded; a model that counts positions from the first column is not the same
            when padded left.
        tolerance: Largest relative error that is taken for round-off.

    Returns:
        The cases and a verdict: ``assert report.is_exact, report``.

    Raises:
        ValueError: With rows that prove nothing: fewer than two, as many labels in all, or unlike numbers on the ranks.

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
    layout, own, everyone = _telling_rows(layout, batches)
    if not callable(gradients):
        raise ValueError(f'`gradients` must be a function of microbatches, got: {gradients!r:.80}.')
    for size in microbatch_sizes or ():
        check_count('microbatch_sizes', size)
    if not padding_sides:
        raise ValueError(f"`padding_sides` must be 'right', 'left' or both, got: {padding_sides!r}.")
    if not tolerance >= 0:
        raise ValueError(f'`tolerance` must be at least 0, got: {tolerance}.')
    cases = []
    for padding in [padding_sides] if isinstance(padding_sides, str) else padding_sides:
        whole = dict(layout.with_media(layout.concat(everyone, padding_side=padding)))
        given = with_own_tensors(whole)
        expected = reference(given) if reference is not None else gradients([given])
        if not isinstance(expected, Mapping) or not all(isinstance(one, torch.Tensor) for one in expected.values()):
            raise TypeError(f'`gradients` must give a tensor for each parameter, by name, got: {str(expected)[:60]}.')
        # Out of reach of the next step, which may write into the same tensors.
        expected = {name: gradient.detach().clone() for name, gradient in expected.items()}
        for cut, size, microbatches in _cuts(layout, own, whole, padding, microbatch_sizes):
            # Copies, as a trainer may write into its batches, and cuts share their tensors.
            found = gradients([dict(layout.with_media(with_own_tensors(one))) for one in microbatches])
            cases.append(InvarianceCase.from_gradients(found, expected, cut=cut, padding=padding, microbatch_size=size))
    return InvarianceReport(cases=tuple(cases), tolerance=tolerance)


def _telling_rows(
    layout: BatchLayout | None, batches: Sequence[Batch]
) -> tuple[BatchLayout, list[dict[str, Any]], list[dict[str, Any]]]:
    """The layout, this rank's rows one by one, and those of all ranks; refuses what proves nothing. A collective."""
    counts = all_gather_object(sum(len(labels_of(batch)) for batch in batches))
    if len(set(counts)) > 1 or counts[0] < 2:
        raise ValueError(f'`rows` must hold as many rows on every rank, and at least 2, got: {counts}.')
    # Those with media have the most entries, and tell the layout.
    layout = BatchLayout.infer(max(batches, key=len)) if layout is None else layout
    check_kind('layout', layout, BatchLayout)
    own: list[dict[str, Any]] = []
    for batch in map(without_metadata, batches):
        own += [layout.trim(layout.select(batch, [row])) for row in range(layout.num_rows(batch))]
    of_ranks = all_gather_object(own)
    everyone = [row for of_rank in of_ranks for row in of_rank]
    counts = {rule: [int(loss_mask(row, rule).sum()) for row in everyone] for rule in ('unshifted', 'causal')}
    for rule, labels in counts.items():  # whichever the model counts by
        if len(set(labels)) == 1:
            raise ValueError(
                f'`rows` must differ in their numbers of labels, got: {labels[0]} in each of {len(everyone)} rows, '
                f'counted {rule}. Among such rows a mean of means is the mean over all tokens, and nothing is proven.'
            )
    totals = torch.tensor(list(counts.values())).view(len(counts), -1, len(own)).sum(dim=2).tolist()
    if len(of_ranks) > 1 and any(len(set(of_rule)) == 1 for of_rule in totals):
        # Ranks with equally many labels would hide a mean over ranks: rows are dealt anew, those of few labels first.
        order = sorted(range(len(everyone)), key=lambda row: [labels[row] for labels in counts.values()])
        everyone = [everyone[row] for row in order]
        own = everyone[get_global_rank() * len(own) :][: len(own)]
    return layout, own, everyone


def relative_error(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """Returns ``|found - expected| / |expected|`` over all parameters, and a line that names the one most off.

    A gradient that is absent counts as zero. Raises ValueError if the reference is zero everywhere.
    """
    none, squares = torch.zeros(()), {}
    for name in sorted(found.keys() | expected.keys()):
        off = found.get(name, none).cpu().double() - expected.get(name, none).cpu().double()
        square = float(off.square().sum())
        squares[name] = square if square == square else float('inf')  # NaN is no number to compare
    norm = sum(_product(value, value) for value in expected.values())
    if not norm > 0.0:
        raise ValueError(
            f'The reference gradient must be above zero, got: norm {norm} over {len(expected)} parameters. Rows need '
            'labels that are not ignored, and parameters `requires_grad`.'
        )
    worst = max(squares, key=squares.__getitem__)
    reason = 'has no gradient' if worst not in found else 'has none expected' if worst not in expected else 'is off'
    return (sum(squares.values()) / norm) ** 0.5, f'most of all, {worst} {reason}'


def _product(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.cpu().double() * second.cpu().double()).sum())


def _cuts(
    layout: BatchLayout, rows: Sequence[Batch], whole: Batch, padding: str, sizes: Sequence[int] | None
) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Microbatches of this rank's rows; as many on every rank."""
    own = layout.concat(rows, padding_side=padding)
    num_rows = len(rows)
    yield 'again', num_rows, [dict(whole)]
    by_length = sorted(range(num_rows), key=lambda row: -labels_of(rows[row]).shape[1])
    for size in sorted({min(size, num_rows) for size in sizes or (1, 2, 3, num_rows)}):
        chunks = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        yield 'in order', size, [layout.select(own, list(chunk)) for chunk in chunks]
        sorted_rows = [layout.select(own, [by_length[k] for k in chunk]) for chunk in chunks]
        # Padding on the left may predict a first label, and move positions.
        yield 'by length', size, list(map(layout.trim, sorted_rows)) if padding == 'right' else sorted_rows
    yield 'uneven', 1, [layout.select(own, [0]), layout.select(own, list(range(1, num_rows)))]


@dataclass(frozen=True, kw_only=True)
class IsolationReport:
    """What :func:`.verify_isolation` found; printed as a line for each leak."""

    leaks: tuple[tuple[int, int, int, float], ...]
    """Row, document, the document that it sees, and the norm of the gradient by which that shows."""

    @property
    def is_isolated(self) -> bool:
        """Whether no document sees another one."""
        return not self.leaks

    def __str__(self) -> str:
        leaks = [f'row {row}: document {seer} sees document {seen}: {size:.1e}' for row, seer, seen, size in self.leaks]
        return '\n'.join([*leaks, f'{"NOT isolated" if leaks else "isolated"}: {len(leaks)} leaks'])


def verify_isolation(model: torch.nn.Module, packed: Batch, documents: torch.Tensor) -> IsolationReport:
    """Tells whether documents of packed rows see each other: in any model, however they were packed.

    The gradient of each document's logits by the input embeddings of the others must be exactly 0: masked attention
    makes it so in every precision, and no tolerance is needed.

    Args:
        model: A Hugging Face model, or what wraps one, in the mode that is to be looked at.
        packed: A batch as the model takes it, on its device; labels are left out.
        documents: int ``(rows, width)``, which document each position belongs to; negative: none.

    Raises:
        ValueError: If ``documents`` has another shape than ``input_ids``, or there is but one in every row.

    Example:
        >>> import torch
        >>> from composer_tokacc import verify_isolation
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model, packed = LlamaForCausalLM(config), {'input_ids': torch.tensor([[1, 2, 3, 4, 5]]), 'use_cache': False}
        >>> documents = torch.tensor([[0, 0, 0, 1, 1]])
        >>> verify_isolation(model, packed, documents).is_isolated
        False
        >>> packed['position_ids'] = torch.tensor([[0, 1, 2, 0, 1]])
        >>> verify_isolation(model, packed, documents).is_isolated
        True
    """
    check_kind('model', model, torch.nn.Module)
    ids, documents = text_of(packed), torch.as_tensor(documents)
    named = [sorted(set(row.tolist()) - {-1}) for row in documents.clamp(min=-1)]
    if documents.is_floating_point() or documents.shape != ids.shape or max(map(len, named), default=0) < 2:
        raise ValueError(
            f'`documents` must number those of a packed row, of shape {tuple(ids.shape)} as `input_ids`, got: '
            f'{named} of shape {tuple(documents.shape)}.'
        )
    embeddings: list[torch.Tensor] = []

    def embed(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    host: Any = next((one for one in model.modules() if hasattr(one, 'get_input_embeddings')), None)
    if host is None:
        raise TypeError(f'`model` must be a Hugging Face model, or hold one, got: {type(model).__name__}.')
    hook = host.get_input_embeddings().register_forward_hook(embed)
    try:
        given = {key: value for key, value in packed.items() if key != 'labels'}
        outputs = model(given) if hasattr(model, 'eval_forward') else model(**given)
    except IndexError as error:  # as torch says on a CPU
        raise ValueError(f'`packed` must hold what the model takes, got: {error}.') from error
    finally:
        hook.remove()
    logits: Any = logits_of(outputs)
    leaks = []
    # Random factors, so that no two parts of a sum cancel.
    factors = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    for row, numbers in enumerate(named):
        for seer in numbers:
            seen_by = (logits * factors)[row][documents[row] == seer].sum()
            (gradient,) = torch.autograd.grad(seen_by, embeddings[0], retain_graph=True)
            for seen in numbers:
                size = float(gradient[row][documents[row] == seen].float().norm())
                leaks += [(row, seer, seen, size)] if seen != seer and size != 0.0 else []
    return IsolationReport(leaks=tuple(leaks))
