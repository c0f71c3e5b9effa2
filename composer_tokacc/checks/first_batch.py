# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks run on the first batch: which labels the model's loss counts, and which cuts leave every row's gradient alone.

Everything this package does rests on one fact: where a step has T loss-generating tokens, T times the gradient of the
loss by the logits of a row is the same in every cut, whatever rows are beside it, and however it is padded, trimmed or
packed. It is true of most models and losses and false of some, and where it is false nothing shows. So a few rows go
through the run's own model twice, once as the loader padded them and once as the split would cut them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from composer.utils import dist

from composer_tokacc.checks.logits import targets_of, tolerance_of
from composer_tokacc.checks.probe import NOISE_FACTOR, Probe, ProbeResult
from composer_tokacc.checks.rows import KINDS, chosen_rows, documents_of, kinds_of, telling_batch, with_unequal_row
from composer_tokacc.counting import (
    IGNORE_INDEX,
    LOSS_RULES,
    Batch,
    loss_mask,
    num_rows,
    sample_name,
    with_own_tensors,
    without_carried,
)
from composer_tokacc.layout import BatchLayout, microbatches_of
from composer_tokacc.layout.layout import own_labels

__all__ = ['Cutter', 'FirstBatchCheck', 'find_loss_rule']

log = logging.getLogger(__name__)

MAX_ROWS = 6
"""Rows of a check at the most. Without gradients a row takes about half of the memory that it takes in training, so a
microbatch of k rows leaves room for 2 k; at least four are needed to show the ways in which rows differ."""
MORE_COLUMNS = 256
"""Padding before a row that shows whether columns matter: a scale that grows with them hardly moves with a few."""
GRADIENT_TOLERANCE = 3e-6
"""Largest relative change of a row's gradient where rounding moves it less. Independent rows differ by 1e-7, the weakest
leaks and undeclared terms that matter by 5e-5."""
SMALL_ROW = 1e-3
"""A gradient below this part of the largest row's is compared with that: of a row that the model is sure of little is
left but round-off."""

OTHER_POSITIONS_REMEDY = (
    'The loss holds a mean over other positions (prompts, padding) or over rows. Take it over the positions whose '
    'labels count, return the terms as a dict and name the unit of each in `loss_units`, or leave it out.'
)
ROUTER_REMEDY = (
    'Name what it is multiplied by in `router_aux_loss_coef` of its config, or set `output_router_logits=False` there, '
    'or return a dict of terms from `loss` and declare it: '
    "`loss_units={'lm': 'tokens', 'router': 'microbatches'}` with `token_data_spec(..., regroup=False)`."
)


class Cutter(Protocol):
    """A split, as far as the check asks it: the rules are its own, and the check only finds those that hold."""

    @property
    def must_pack(self) -> bool:
        """Whether rows are packed or the run stops."""
        ...

    def candidates(self, layout: BatchLayout, rows: Batch, known: Any) -> Iterable[Any]:
        """Rules that are to be tried on such rows, cheapest first; ``known``: those found on other rows."""
        ...

    def assemble(self, layout: BatchLayout, batch: Batch, rows: Sequence[int], rules: Any) -> dict[str, Any]:
        """The microbatch of some rows by such rules."""
        ...


class FirstBatchCheck:
    """Asks the model about the rows of a batch, on all ranks alike.

    Args:
        probe: The model.
        layout: How tensors belong to rows; None: rows cannot be told apart, so only the rule is found.
        to_device: Moves a batch to the model's device.
        loss_tokens: ``'auto'``, or the rule that must be confirmed.
        check_loss: Whether to hold the rule, and the formula, to the model's own loss.
        microbatch_size: Rows of a microbatch, by which the memory of the check is kept.
    """

    def __init__(
        self,
        probe: Probe,
        layout: BatchLayout | None,
        to_device: Callable[[Any], Any],
        *,
        loss_tokens: str,
        check_loss: bool,
        microbatch_size: float,
    ) -> None:
        self.layout = layout
        self.rule: str | None = None if check_loss else loss_tokens
        self.token_scale: float | None = None
        """What all tokens weigh in the loss of one forward, times their number: 1 for a mean of cross-entropies. None:
        they do not weigh the same there (label smoothing, focal losses), or nothing tells."""
        self.vocabulary: int | None = None
        """Ids that a label may have, by the model's logits."""
        self._probe, self._to_device = probe, to_device
        self._loss_tokens, self._check_loss = loss_tokens, check_loss
        self._max_rows = min(max(int(2 * microbatch_size), 4), MAX_ROWS)
        self._proven = [False] * len(KINDS)
        self._was_run = False

    def is_new(self, kinds: Sequence[int]) -> bool:
        """Whether any of the kinds was not looked at yet."""
        return any(kind and not seen for kind, seen in zip(kinds, self._proven, strict=True))

    def prove(
        self, batch: Batch, cutter: Cutter | None, rules: Any, kinds: Sequence[int], of_ranks: Sequence[Sequence[int]]
    ) -> Any:
        """Looks at rows of every kind that was not looked at yet; a collective.

        Args:
            batch: This rank's device batch, on the CPU.
            cutter: The split whose cuts are tried; None: whole rows alone.
            rules: By which it cuts so far.
            kinds: Which of :data:`KINDS` this rank's batch has.
            of_ranks: Those of the ranks' batches, so that all ranks agree on what is new.

        Returns:
            The rules by which it may cut.

        Raises:
            RuntimeError: On all ranks, if no cut leaves the gradients of the rows alone.
        """
        present = [any(of_kind) for of_kind in zip(*of_ranks, strict=True)]
        # The first check looks at the rows of a batch without any kind as well.
        while self.is_new(present) or not self._was_run:
            new = [bool(kind and not seen) for kind, seen in zip(present, self._proven, strict=True)]
            wanted = [int(kind and is_new) for kind, is_new in zip(kinds, new, strict=True)]
            try:
                found, shown = self._run(batch, cutter, rules, wanted)
            except IndexError as error:  # as torch says on a CPU; a GPU stops the process
                raise RuntimeError(
                    f'The model must take the batch, got: {_without_stop(error)}, for {_ids_of(batch)}. Labels must be '
                    "-100 or ids of the model's vocabulary, and its embedding must hold every token. Take the "
                    'tokenizer that belongs to the model.'
                ) from error
            if getattr(found, 'packing', False) != getattr(rules, 'packing', False):
                self._proven = [False] * len(KINDS)  # what was proven of packed rows says nothing of padded ones
            rules = found
            self._proven = [bool(old or kind) for old, kind in zip(self._proven, shown, strict=True)]
            if not any(kind and is_new for kind, is_new in zip(shown, new, strict=True)):
                # A kind that no chosen row shows, such as media that the layout cannot tell apart.
                self._proven = [bool(old or kind) for old, kind in zip(self._proven, present, strict=True)]
        return rules

    def _run(
        self, batch: Batch, cutter: Cutter | None, rules: Any, kinds: Sequence[int]
    ) -> tuple[Any, tuple[int, ...]]:
        """Finds the rule, if it is not known yet, and the rules of the cut for rows like those of ``batch``.

        All ranks probe the rows of one rank, because FSDP hangs if only some ranks' rows have images: of the rank with
        the most of the wanted kinds. Gives the rules, and which kinds the probed rows were of.
        """
        started = time.perf_counter()
        rows = self._shared_rows(batch, kinds)
        if self.rule is None:
            telling = self._on_device(telling_batch(self.layout, rows))
            self.rule = find_loss_rule(self._probe, telling, loss_tokens=self._loss_tokens)
        self._was_run = True
        if self.layout is None:
            log.warning(
                'Rows of the batch could not be told apart, so it was not checked that they are independent of each '
                'other. Use token_data_spec(), with a `layout` that knows every entry.'
            )
            return rules, kinds_of(None, batch)
        rows = with_unequal_row(self.layout, rows, self.rule)
        with self._probe.with_varied_norms():
            comparison = RowComparison(self._probe, self.layout, self._on_device, self.rule, rows, self._check_loss)
            found = comparison.first_exact(cutter, rules)
        self.token_scale, self.vocabulary = comparison.token_scale(), comparison.whole.vocabulary
        log.info('The first-batch check took %.2f s. %s', time.perf_counter() - started, found)
        shown = kinds_of(self.layout, rows)
        if not comparison.has_shown_trimming:
            shown = tuple(
                int(seen and kind not in ('left', 'positions', 'right'))
                for kind, seen in zip(KINDS, shown, strict=True)
            )
        return found, shown

    def _on_device(self, batch: Batch) -> Any:
        return self._to_device(with_own_tensors(without_carried(batch)))

    def _shared_rows(self, batch: Batch, kinds: Sequence[int]) -> dict[str, Any]:
        """The rows that all ranks probe with."""
        offers = dist.all_gather_object((sum(kinds), num_rows(batch)))
        owner = max(range(len(offers)), key=lambda rank: (offers[rank], -rank))
        shared: list[Any] = [None]
        if dist.get_global_rank() == owner:
            shared = [dict(batch)]
            if self.layout is not None:
                shared = [chosen_rows(self.layout, batch, kinds, self._max_rows)]
        dist.broadcast_object_list(shared, src=owner)
        return shared[0]


def find_loss_rule(probe: Probe, row: Batch, *, loss_tokens: str = 'auto') -> str:
    """Finds, or confirms, the rule by which the model counts labels: where the gradient of its loss is not 0.

    The rule depends on the model class and the transformers version, and a wrong one is silent.

    Args:
        probe: The model.
        row: A row as of :func:`.telling_batch`, on the model's device.
        loss_tokens: ``'auto'``, or the rule that must be confirmed.

    Raises:
        RuntimeError: If no rule, or not the given one, is the model's.
    """
    gradients = next(iter(probe.run(row).gradients.values()))
    gradient = next((one for one in reversed(gradients) if one is not None), torch.zeros(*row['labels'].shape, 1))
    norms = gradient.norm(dim=-1)
    matching = []
    for rule in LOSS_RULES:
        predicts = targets_of(row, rule).cpu() != IGNORE_INDEX
        elsewhere = float(norms[~predicts].norm() / norms.norm())
        if elsewhere < 0.1 and bool((norms[predicts] > 0).all()):
            matching.append((elsewhere, rule))
    where = norms.nonzero()[:, 1].tolist()
    if not matching:
        raise RuntimeError(
            "The model's own loss must be the mean over its loss-generating tokens, got: a gradient at the positions "
            f'{_listed(where)} for labels at {_listed((row["labels"] != IGNORE_INDEX).nonzero()[:, 1].tolist())}, which '
            'no rule explains. The model changes labels inside forward, or its loss holds a term over other positions; '
            'a model that returns a dict of terms can name them in `loss_units`. `check_loss=False` with an explicit '
            '`loss_tokens` skips this check.'
        )
    # Rules that agree even here (no attention mask) count the same: the first of them.
    found = min(matching, key=lambda pair: pair[0])[1]
    if loss_tokens not in ('auto', *(rule for _, rule in matching)):
        raise RuntimeError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {loss_tokens!r}, but the model '
            f'averages by {found!r} (the gradient of its loss is at the positions {_listed(where)}). Set '
            f'`loss_tokens={found!r}`.'
        )
    return found if loss_tokens == 'auto' else loss_tokens


class RowComparison:
    """Some rows together, as the loader padded them, and every cut of them that is held against that.

    Args:
        probe: The model.
        layout: How tensors belong to rows.
        on_device: Moves a batch to the model's device.
        rule: Which labels carry loss.
        rows: As of :func:`.chosen_rows`.
        check_loss: Whether the rows must weigh in the loss what their tokens say.
    """

    def __init__(
        self,
        probe: Probe,
        layout: BatchLayout,
        on_device: Callable[[Batch], Any],
        rule: str,
        rows: dict[str, Any],
        check_loss: bool,
    ) -> None:
        self._probe, self._layout, self._on_device, self._rule = probe, layout, on_device, rule
        self._rows, self._check_loss = rows, check_loss
        self._side = layout.padding_side(rows)
        self._counts = loss_mask(rows, rule).sum(dim=1).tolist()
        moved = on_device(rows)
        found = loss_mask(moved, rule).sum(dim=1).tolist()
        if found != self._counts:
            raise RuntimeError(
                f'`microbatch_transforms` must leave labels alone, got: {sum(found)} loss-generating tokens where '
                f'{sum(self._counts)} were counted. Change labels in `batch_transforms`, which runs before the count.'
            )
        self.whole = probe.run(moved)
        with probe.with_rounding():
            rounded = probe.run(moved)
        self._noise = {unit: abs(rounded.losses[unit] - loss) for unit, loss in self.whole.losses.items()}
        everyone = list(range(len(self._counts)))
        self._expected = self._gradients_of(moved, self.whole, everyone)
        of_rounded = self._gradients_of(moved, rounded, everyone)
        self._allowed = {
            key: max(GRADIENT_TOLERANCE, NOISE_FACTOR * float(_relative(of_rounded[key], expected).max()))
            for key, expected in self._expected.items()
        }
        self._narrowest = self._width
        if check_loss:
            self._refuse_router_loss()
            self._check_positions(moved)

    @property
    def _width(self) -> int:
        """Padded width of the rows, by the labels."""
        return self._rows['labels'].shape[1]

    @property
    def has_shown_trimming(self) -> bool:
        """Whether any row was computed narrower than it came."""
        return self._narrowest < self._width

    def token_scale(self) -> float | None:
        """What all tokens weigh in the loss, times their number, if they weigh the same and nothing else is in it."""
        measured = self.whole.measured
        if measured is None or not sum(self._counts):
            return None
        squares = measured.sizes.square() * (measured.targets != IGNORE_INDEX)
        mean = float((measured.weights * squares).sum() / squares.sum())
        if not mean or not math.isfinite(mean):
            return None
        worst = float(((measured.weights / mean - 1).abs() * measured.sizes).max())
        is_same = max(worst, float(measured.residual)) <= tolerance_of(measured.dtype)
        return mean * sum(self._counts) if is_same else None

    def first_exact(self, cutter: Cutter | None, rules: Any) -> Any:
        """Returns the first rules under which every row keeps its gradient."""
        failures = []
        for candidate in [rules] if cutter is None else cutter.candidates(self._layout, self._rows, rules):
            failure = self._failure(cutter, candidate)
            if failure is None and cutter is not None and not self.has_shown_trimming:
                return candidate.with_side_of(rules, self._side)  # a label behind padding keeps a row as wide as it is
            if failure is None:
                return candidate
            log.info('%s: %s', candidate, failure)
            failures.append(failure)
        # Where rows must be packed, the first says why; else the last, of the cut that leaves most alone.
        raise RuntimeError(failures[0 if cutter is not None and cutter.must_pack else -1])

    def _check_positions(self, moved: Batch) -> None:
        """The gradient of the tokens' terms is 0 at the logits of all positions that predict no counted label."""
        measured = self.whole.measured
        if measured is None:
            return
        norms = (measured.weights * measured.sizes).cpu()
        at_tokens = targets_of(moved, self._rule).cpu() != IGNORE_INDEX
        share = float(norms[~at_tokens].norm() / norms[at_tokens].norm().clamp(min=torch.finfo(torch.float32).tiny))
        if share > GRADIENT_TOLERANCE:
            raise RuntimeError(
                "The gradient of the model's own loss by its logits must be 0 where no label counts, got: "
                f'{share:.1e} of what it is where one does. {OTHER_POSITIONS_REMEDY}'
            )

    def _refuse_router_loss(self) -> None:
        """A statistic of the microbatch, however small its weight: below every tolerance it is still not exact."""
        whole = self.whole
        if not whole.has_router_loss:
            return
        rest = math.inf if whole.explained is None else abs(whole.losses['tokens'] - whole.explained)
        if self.token_scale() is None or rest > whole.loss_tolerance('tokens', 0):
            raise RuntimeError(
                "The model's own loss must be the mean over its loss-generating tokens, got: one that holds the "
                f'load-balancing loss of its router as well, a statistic of the microbatch. {ROUTER_REMEDY}'
            )

    def _failure(self, cutter: Cutter | None, rules: Any) -> str | None:
        """How the first microbatch fails in which another cut changes a gradient; None: none does."""
        everyone, packing = list(range(len(self._counts))), getattr(rules, 'packing', '')
        # A leak runs from one document into the next, so every document must have been behind the others.
        groups = [everyone, everyone[::-1]] if packing else [[row] for row in everyone]
        errors = (AttributeError, IndexError, TypeError, ValueError, *((RuntimeError, KeyError) if packing else ()))
        losses: dict[str, list[tuple[float, int]]] = {unit: [] for unit in self.whole.losses}
        for group in groups:
            try:
                part = self._cut(cutter, group, rules)
                result = self._probe.run(self._on_device(part))
            except errors as error:  # BLIP-2 takes no batch without images
                what = 'packed rows' if packing else f'{sample_name(self._rows, group[0])} by itself'
                return (
                    f'The model must take {what}, got: {_without_stop(error)}.{" Set `packing=False`." * bool(packing)}'
                )
            failure = self._difference(part, result, group, 'packed' if packing else 'by itself')
            if failure is not None:
                return failure
            for unit, number in self._numbers(part, group).items():
                if unit in result.losses and number:
                    losses[unit].append((result.losses[unit], number))
            self._narrowest = min(self._narrowest, part['labels'].shape[1])
        if self._side == 'left' and (packing or getattr(rules, 'left', '') == 'trim'):
            failure = self._failure_behind_padding(packing)
        return failure or (self._loss_failure(losses) if self._check_loss else None)

    def _cut(self, cutter: Cutter | None, rows: Sequence[int], rules: Any) -> dict[str, Any]:
        if cutter is None:
            return self._layout.select(self._rows, rows)
        return cutter.assemble(self._layout, self._rows, rows, rules)

    def _numbers(self, part: Batch, group: Sequence[int]) -> dict[str, int]:
        """Of what the terms of each unit are a mean."""
        numbers = {'tokens': int(loss_mask(part, self._rule).sum()), 'samples': len(group)}
        return {unit: numbers[unit] for unit in self.whole.losses}

    def _gradients_of(
        self, part: Batch, result: ProbeResult, group: Sequence[int]
    ) -> dict[tuple[str, int], torch.Tensor]:
        """Gradients of each row times the number of what they are a mean of, where the whole has its positions."""
        numbers, found = self._numbers(part, group), {}
        for unit, points in result.gradients.items():
            for index, point in enumerate(points):
                point = torch.zeros(*part['labels'].shape, 1) if point is None else point
                found[unit, index] = self._aligned(part, point, group) * numbers[unit]
        return found

    def _aligned(self, part: Batch, point: torch.Tensor, group: Sequence[int]) -> torch.Tensor:
        whole = point.new_zeros(len(group), self._width, point.shape[-1])
        if len(point) < len(group):  # one row of documents
            real, documents = self._layout.real_positions(self._rows), documents_of(part)[0]
            for place, row in enumerate(group):
                whole[place, real[row]] = point[0, documents == place]
            return whole
        start = self._width - point.shape[1] if self._side == 'left' else 0
        whole[:, start : start + point.shape[1]] = point[: len(group), : self._width]
        return whole

    def _difference(self, part: Batch, result: ProbeResult, group: Sequence[int], how: str) -> str | None:
        """How the gradients of some rows differ from what they are beside the others; None: by round-off."""
        count = int(loss_mask(part, self._rule).sum())
        expected_count = sum(self._counts[row] for row in group)
        if count != expected_count:
            return self._explained(f'{count} loss-generating tokens {how} instead of {expected_count}', how)
        for key, found in self._gradients_of(part, result, group).items():
            expected = self._expected[key]
            factors = _factors(found, expected[group])
            if not self._check_loss:
                found = found / factors[:, None, None]
            errors = _relative(found, expected[group], float(expected.flatten(1).norm(dim=1).max()))
            worst = int(errors.argmax())
            if float(errors[worst]) <= self._allowed[key]:
                continue
            name = sample_name(self._rows, group[worst])
            scaled = found[worst : worst + 1] / factors[worst]
            rest = float(_relative(scaled, expected[group][worst : worst + 1]))
            if key[0] == 'samples':
                return (
                    "The terms that `loss_units` calls 'samples' must be means over samples, got: a gradient of "
                    f'{name} that changes by {float(errors[worst]):.1e} {how}. A mean over columns changes with the '
                    'padding: take it over the tokens of each row, or give its unit.'
                )
            if rest < 0.1 * float(errors[worst]):
                return (
                    f"The model's own loss must be the mean over its loss-generating tokens, got: {name}, whose tokens "
                    f'weigh {float(factors[worst]):.6f} times as much {how} as beside {len(self._counts) - 1} others. '
                    'It is a mean over rows or columns or a sum, divides by the weights of classes, or holds a term '
                    'over other positions. Divide by the number of tokens, or return a dict of terms and name the unit '
                    'of each in `loss_units`.'
                )
            failure = f'{name}: the gradient at its logits changes by {float(errors[worst]):.1e} {how}'
            return self._explained(f'{failure} (round-off is {self._allowed[key]:.0e})', how)
        return None

    def _failure_behind_padding(self, packing: str) -> str | None:
        """How a row fails behind more padding than the loader gave it; None: it does not, or it cannot be told."""
        columns = min(MORE_COLUMNS, (self._layout.num_positions or 0) - self._layout.width(self._rows))
        mask, labels = self._rows.get('attention_mask'), own_labels(self._rows)
        if columns <= 0 or mask is None or mask.dim() != 2:
            return None
        rows = list(range(len(self._counts)))
        if labels is not None:  # a label on a row's first token is predicted from padding
            first = self._layout.real_positions(self._rows).int().argmax(dim=1, keepdim=True)
            rows = [row for row in rows if int(labels[row, first[row]]) == IGNORE_INDEX]
        if not rows:
            return None
        row = max(rows, key=self._counts.__getitem__)
        part = self._layout.select(self._rows, [row])
        result = self._probe.run(self._on_device(self._layout.pad_left(part, columns)))
        kept = {
            unit: [None if one is None else one[:, columns:] for one in points]
            for unit, points in result.gradients.items()
        }
        failure = self._difference(part, replace(result, gradients=kept), [row], 'behind more padding')
        if failure is not None and packing:
            return (
                f"A row's losses must not depend on its columns for it to be packed, got: {failure} Pad on the right, "
                'or set `packing=False`, which is exact.'
            )
        return failure

    def _loss_failure(self, losses: dict[str, list[tuple[float, int]]]) -> str | None:
        """The formula itself: the loss of all rows is the mean of those of the microbatches, by tokens or samples."""
        for unit, found in losses.items():
            expected = self.whole.losses[unit]
            total = sum(number for _, number in found)
            if not total or (unit == 'samples' and len(found) < len(self._counts)):
                continue  # a term that is absent for one row alone says nothing of the others
            mean = sum(loss * number for loss, number in found) / total
            if abs(mean - expected) <= self.whole.loss_tolerance(unit, self._noise[unit]):
                continue
            got = f'{expected:.6f} for {len(self._counts)} rows together, and {mean:.6f} as the mean of the rows one by one'
            if unit == 'samples':
                return (
                    f"The terms that `loss_units` calls 'samples' must be means over samples, got: {got}. Give their "
                    'own unit.'
                )
            hint = (
                f'The model adds the load-balancing loss of its router, a statistic of the microbatch. {ROUTER_REMEDY}'
                if self.whole.has_router_loss
                else 'It holds a term that depends on which rows share a microbatch. Return the terms as a dict and name '
                "the unit of each in `loss_units` ('samples', 'coupled_samples' or 'microbatches'), or leave it out."
            )
            return f"The model's own loss must be the mean over its loss-generating tokens, got: {got}. {hint}"
        return None

    def _explained(self, failure: str, how: str) -> str:
        if how == 'packed':
            pads = ', or a pad predicts a label on the first token of a row (mask it, -100)' * (self._side == 'left')
            return (
                f'The model must tell packed documents apart, got: {failure}. Attention, positions or states leak from '
                f'one document to the next{pads}. Set `packing=False`, which is exact.'
            )
        return (
            f"A row's losses must not depend on the rows beside it nor on its padding, got: {failure}. No cut leaves "
            'them alone: rows see each other in this model (statistics of the batch, attention over padding, a state '
            'that runs on). Exact is one microbatch a rank that holds the whole device batch, on one rank; else pad '
            'rows on the other side, freeze the layer, or pass `position_ids` and an `attention_mask` that tell '
            'padding apart.'
        )


def _relative(found: torch.Tensor, expected: torch.Tensor, largest: float | None = None) -> torch.Tensor:
    """Norm of the difference over that of what is expected, by row; ``largest``: of all rows."""
    sizes = expected.flatten(1).norm(dim=1)
    least = SMALL_ROW * (float(sizes.max()) if largest is None else largest)
    return ((found - expected).flatten(1).norm(dim=1) / sizes.clamp(min=least or 1e-30)).nan_to_num(nan=torch.inf)


def _factors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How much longer the gradients of each row are than expected, along these; 1 where there are none."""
    along, square = (found * expected).flatten(1).sum(dim=1), expected.square().flatten(1).sum(dim=1)
    return torch.where((square > 0) & (along != 0), along / square, torch.ones_like(square))


def _listed(places: Sequence[int]) -> str:
    return str(places[:8])[:-1] + (', ...]' if len(places) > 8 else ']')


def _without_stop(error: Exception) -> str:
    """What an error says, for the middle of a sentence."""
    return str(error).rstrip('.')


def _ids_of(batch: Batch) -> str:
    """The ids of a batch, for a message."""
    ends = []
    for key in ('labels', 'input_ids'):
        ids = [one[key][one[key] != IGNORE_INDEX] for one in microbatches_of(batch) if one.get(key) is not None]
        joined = torch.cat(ids) if ids else torch.empty(0)
        ends += [f'`{key}` of {int(joined.min())} to {int(joined.max())}'] if joined.numel() else []
    return ' and '.join(ends)
