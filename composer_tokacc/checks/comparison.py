# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Some rows as the loader padded them, and every cut of them held against that: one question, one number.

Everything this package does rests on one fact: where a step has T loss-generating tokens, T times the gradient of the
loss by the logits of a row is the same in every cut, whatever rows are beside it, and however it is padded, trimmed or
packed. It is true of most models and losses and false of some, and where it is false nothing shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from composer_tokacc.batch import Batch, sample_name
from composer_tokacc.checks.probe import NOISE_FACTOR, AtLabels, Probe, ProbeResult
from composer_tokacc.counting import loss_mask
from composer_tokacc.label_selector import LabelSelector
from composer_tokacc.labelled import LabelledPositions
from composer_tokacc.layout import BatchLayout, describe

log = logging.getLogger(__name__)

RowGradients = dict[tuple[str, int], torch.Tensor]
"""Those of some rows, of the terms of a unit, by one of the points where gradients are taken."""

GRADIENT_TOLERANCE = 3e-6
"""Largest relative change of a row's gradient where rounding moves it less. Independent rows differ by 1e-7, the
weakest leaks and undeclared terms that matter by 5e-5."""
MOST_ROUNDINGS, MOST_NOISE = 1e4, 0.3
"""Above these multiples of the machine epsilon, and above this, nothing is taken for round-off."""
PLAIN_TOLERANCE = 2e-6
"""Above it a loss is no pure mean of cross-entropies: closer than steps are held to, as small terms grow."""
SMALL_ROW = 1e-3
"""A gradient below this part of the largest row's is compared with that: of a row that the model is sure of little is
left but round-off."""

AT_LABELS = 'with logits only at labels'
OWN_PADDING = 'with media padded as in its microbatch'
TAKES = 'The model must take '
MEAN = "The model's own loss must be the mean over its loss-generating tokens, got: "
SAMPLES = "The terms that `loss_units` calls 'samples' must be means over samples, got: "
NOT_A_NUMBER = (
    "The model's loss must be a number, got: nan ({}). Look for NaN in its weights and in its batch, such as "
    '`pixel_values`, and for an overflow of its precision (docs/errors.md#model-loss).'
)
NAME_TERMS = (
    "Return its terms as a dict and name the unit of each in `loss_units`, or a router's factor in "
    '`router_aux_loss_coef` of the config (docs/errors.md#model-loss).'
)


class RowComparison:
    """Holds every cut of some rows against all of them together, as the loader padded them.

    The ``cutter`` of its methods is a split, whose rules are its own: ``candidates(facts, known)`` are those to try
    on such rows, cheapest first; ``assemble(facts, rows, rules)`` is the microbatch of some rows. None: there is none.

    ``rows`` are as of :func:`.chosen_rows`; with ``check_loss`` they must weigh in the loss what their tokens say.
    """

    def __init__(
        self, probe: Probe, layout: BatchLayout, on_device: Callable[..., Any], rule: str, rows: Batch, check_loss: bool
    ) -> None:
        self._probe, self._layout, self._on_device, self._rule = probe, layout, on_device, rule
        self._rows, self._facts, self._check_loss = rows, describe(layout, rows), check_loss
        self._counts = loss_mask(rows, rule).sum(dim=1).tolist()
        self._width = self._narrowest = rows['labels'].shape[1]  # of a decoder's text, where it has one of its own
        self._everyone = list(range(len(self._counts)))
        self._moved = on_device(rows)
        found = loss_mask(self._moved, rule).sum(dim=1).tolist()
        if found != self._counts:
            raise RuntimeError(
                f'`microbatch_transforms` must leave labels alone, got: {sum(found)} loss-generating tokens where '
                f'{sum(self._counts)} were counted. Change labels in `batch_transforms` (docs/errors.md#counts).'
            )
        self.whole = probe.run(self._moved, measured=True)
        self._expected = self._placed(rows, self.whole, self._everyone)

    @cached_property
    def _rounded(self) -> ProbeResult:
        """The whole with one more rounding at every layer; few models are so deep that anyone asks."""
        return self._probe.run(self._moved, rounded=True)

    @cached_property
    def _noise(self) -> dict[tuple[str, int], float]:
        """By how much round-off may change a gradient, by unit and point."""
        rounded = self._placed(self._rows, self._rounded, self._everyone)
        return {key: NOISE_FACTOR * float(_relative(rounded[key], one).max()) for key, one in self._expected.items()}

    def _numbers(self, rows: Sequence[int]) -> dict[str, int]:
        """Returns of what the terms of each unit are a mean."""
        return {'tokens': sum(self._counts[row] for row in rows), 'samples': len(rows)}

    @property
    def has_shown_trimming(self) -> bool:
        """Whether any row was computed narrower than it came."""
        return self._narrowest < self._width

    def token_scale(self) -> float | None:
        """Returns what all tokens weigh in the loss, times their number; None: not the same, or there is more in it."""
        measured = self.whole.measured
        if measured is None or not self._check_loss:
            return None
        squares = measured.sizes.square()
        mean = float((measured.weights * squares).sum() / squares.sum())
        worst = float(((measured.weights / mean - 1).abs() * measured.sizes).max()) if mean else math.inf
        is_same = max(worst, float(measured.residual)) <= PLAIN_TOLERANCE + self.whole.gradient_eps
        return mean * sum(self._counts) if is_same and math.isfinite(mean) else None

    def first_exact(self, cutter: Any, rules: Any) -> Any:
        """Returns the first rules under which every row keeps its gradient."""
        failures = []
        for candidate in [rules] if cutter is None else cutter.candidates(self._facts, rules):
            failure = self._failure(cutter, candidate)
            if failure is None:
                # A label behind padding keeps a row as wide as it is, and nothing was learnt of trimming.
                is_shown = cutter is None or self.has_shown_trimming
                return candidate if is_shown else candidate.with_side_of(rules, self._facts.side)
            log.info('%s: %s', candidate, failure)
            failures.append(failure)
        if cutter is not None and cutter.must_pack:  # why the first fails that the model takes at all
            raise RuntimeError(min(failures, key=lambda failure: failure.startswith(TAKES)))
        raise RuntimeError(failures[-1])  # of the cut that leaves most alone

    def _failure(self, cutter: Any, rules: Any) -> str | None:
        """Returns how the first microbatch fails in which another cut changes a gradient; None: none does."""
        packing, parts = getattr(rules, 'packing', ''), []
        how = 'packed' if packing else 'by itself'
        # A leak runs from one document into the next, so every document must have been behind the others.
        groups = [self._everyone, self._everyone[::-1]] if packing else [[row] for row in self._everyone]
        errors = (AttributeError, IndexError, TypeError, ValueError, *((RuntimeError, KeyError) if packing else ()))
        for rows in groups:
            try:
                is_whole = cutter is None
                batch = self._layout.select(self._rows, rows) if is_whole else cutter.assemble(self._facts, rows, rules)
                result = self._probe.run(self._on_device(batch))
            except errors as error:  # BLIP-2 takes no batch without images
                what = 'packed rows' if packing else f'{sample_name(self._rows, rows[0])} by itself'
                remedy = ' Set `packing=False` (docs/errors.md#packing).' if packing else ''
                return f'{TAKES}{what}, got: {str(error).rstrip(".")}.{remedy}'
            count, expected = int(loss_mask(batch, self._rule).sum()), self._numbers(rows)['tokens']
            if count != expected:
                return self._explained(f'{count} loss-generating tokens {how} instead of {expected}', how)
            if (failure := self._difference(self._placed(batch, result, rows), rows, how)) is not None:
                return failure
            parts.append((rows, result.losses))
            self._narrowest = min(self._narrowest, batch['labels'].shape[1])
        return self._loss_failure(parts) if self._check_loss else None

    def check_media(self, media: Mapping[int, Batch]) -> None:
        """Raises RuntimeError if a row has another gradient with its media padded as its own microbatch pads them."""
        for row, own in media.items():
            batch = {**self._layout.select(self._rows, [row]), **own}
            result = self._probe.run(self._on_device(batch))
            if (failure := self._difference(self._placed(batch, result, [row]), [row], OWN_PADDING)) is not None:
                raise RuntimeError(failure)

    def selection_failure(self, selector: LabelSelector) -> str | None:
        """Returns why the model's loss or gradient is another one with logits only at labels; None: both are the same.

        The gradient by the logits is compared. The output embedding is applied to each position by itself, so that
        the same gradient at the same positions is the same gradient by the hidden states.
        """
        positions = LabelledPositions.from_batch(self._moved, self._rule, sum(self._counts))
        try:
            result = self._probe.run(self._moved, at_labels=AtLabels(selector, self._rule, positions))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return _first_line(error)
        finally:
            selector.disarm()
        gradients = list(result.gradients.get('tokens', ()))
        if len(gradients) != len(self.whole.gradients['tokens']) or not gradients or gradients[-1] is None:
            return 'no gradient by the logits can be compared'
        rows, width = self._moved['labels'].shape
        placed = []
        for gradient in gradients:
            is_selected = gradient is not None and tuple(gradient.shape[:2]) == positions.shape
            placed.append(positions.put_back(gradient, rows, width) if is_selected else gradient)
        result = replace(result, gradients={**result.gradients, 'tokens': placed})
        row_gradients = self._placed(self._rows, result, self._everyone)
        if self._difference(row_gradients, self._everyone, AT_LABELS) is not None:
            return 'the gradient by the logits changes'
        if self._loss_failure([(self._everyone, result.losses)]) is not None:
            return 'the loss changes'
        return None

    def _placed(self, batch: Batch, result: ProbeResult, rows: Sequence[int]) -> RowGradients:
        """Returns the gradients of each row times that number, by unit and point, where the whole has its columns."""
        width, gradients = self._width, {}
        for unit, points in result.gradients.items():
            for index, point in enumerate(points):
                placed = torch.zeros(len(rows), width, 1 if point is None else point.shape[-1])
                gradients[unit, index] = placed
                if point is None:
                    continue
                if len(point) < len(rows):  # one row of documents
                    documents = documents_of(batch)[0]
                    for place, row in enumerate(rows):
                        placed[place, self._facts.real[row]] = point[0, documents == place]
                elif self._facts.side == 'left':
                    placed[:, -point.shape[1] :] = point[: len(rows), -width:]
                else:
                    placed[:, : point.shape[1]] = point[: len(rows), :width]
                placed *= self._numbers(rows)[unit]
        return gradients

    def _difference(self, gradients: RowGradients, rows: Sequence[int], how: str) -> str | None:
        """Returns how the gradients of some rows differ from what they are beside the others; None: by round-off."""
        for key, found in gradients.items():
            expected = self._expected[key]
            largest, expected = float(expected.flatten(1).norm(dim=1).max()), expected[rows]
            # How much longer each row's gradient is than expected, along it: a factor is not a leak.
            along, square = (found * expected).flatten(1).sum(dim=1), expected.square().flatten(1).sum(dim=1)
            factors = torch.where((square > 0) & (along != 0), along / square, 1.0)
            unscaled = found / factors[:, None, None]
            errors = _relative(found if self._check_loss else unscaled, expected, largest)
            worst = int(errors.argmax())
            error = float(errors[worst])
            if error <= (allowed := self._allowed(key, error)):
                continue
            name = sample_name(self._rows, rows[worst])
            if key[0] == 'samples':
                return (
                    f'{SAMPLES}a gradient of {name} that changes by {error:.1e} {how}. Take a mean over columns over '
                    'the tokens of each row, or give its own unit (docs/errors.md#model-loss).'
                )
            if float(_relative(unscaled[worst][None], expected[worst][None])) < 0.1 * error:
                return (
                    f'{MEAN}{name}, whose tokens weigh {float(factors[worst]):.6f} times as much {how} as beside '
                    f'{len(self._counts) - 1} others. Divide by the number of tokens. {NAME_TERMS}'
                )
            failure = f'{name}: the gradient at its logits changes by {error:.1e} {how} (round-off is {allowed:.0e})'
            return self._explained(failure, how)
        return None

    def _allowed(self, key: tuple[str, int], error: float) -> float:
        """By how much a row's gradient may change and be the same, if it has changed by ``error``."""
        if error <= GRADIENT_TOLERANCE:
            return GRADIENT_TOLERANCE
        # The gradient is rounded itself; and what differs by more than any round-off is no round-off (a stale state).
        eps = self.whole.gradient_eps
        return max(GRADIENT_TOLERANCE, eps, min(self._noise[key], MOST_ROUNDINGS * eps, MOST_NOISE))

    def _loss_failure(self, parts: Sequence[tuple[Sequence[int], Mapping[str, float]]]) -> str | None:
        """The formula itself: the loss of all rows is the mean of those of the microbatches, by tokens or samples."""
        for unit, expected in self.whole.losses.items():
            found = [(losses[unit], self._numbers(rows)[unit]) for rows, losses in parts if unit in losses]
            total = sum(number for _, number in found)
            if not total or (unit == 'samples' and len(found) < len(self._counts)):
                continue  # a term that is absent for one row alone says nothing of the others
            mean = sum(loss * number for loss, number in found if number) / total
            # The noise takes a forward more, so it is asked for only where it decides.
            if self.whole.is_same_loss(unit, mean) or self.whole.is_same_loss(
                unit, mean, noise=abs(self._rounded.losses[unit] - expected)
            ):
                continue
            got = f'{expected:.6f} for {len(self._counts)} rows together, and {mean:.6f} as their mean one by one'
            if unit == 'samples':
                return f'{SAMPLES}{got}. Give their own unit (docs/errors.md#model-loss).'
            return f'{MEAN}{got}. It holds a term that depends on which rows share a microbatch. {NAME_TERMS}'
        return None

    def _explained(self, failure: str, how: str) -> str:
        if self.whole.is_nan:
            return NOT_A_NUMBER.format(failure)
        if how == 'packed':
            pads = ', or a pad predicts the label of a first token (mask it, -100)' * (self._facts.side == 'left')
            return (
                f'The model must tell packed documents apart, got: {failure}. Attention, positions or states leak from '
                f'one document to the next{pads}. Set `packing=False`, which is exact (docs/errors.md#packing).'
            )
        if how == OWN_PADDING:
            return (
                f'Media must be computed alike however far they are padded, got: {failure}. The model sees padding of '
                'sounds or images, which microbatches that are collated by themselves change. Pad all to one size in '
                "the collator (`padding='max_length'`), or give token_data_spec() a plain DataLoader "
                '(docs/errors.md#row-coupling).'
            )
        if self._probe.is_random:
            return (
                f'The forward must not be random in evaluation, or no two cuts can be compared, got: {failure}. Switch '
                'off its noise (docs/errors.md#row-coupling).'
            )
        return (
            f"A row's losses must not depend on the rows beside it nor on its padding, got: {failure}. Rows see each "
            'other in this model (statistics of the batch, attention over padding, a mean over other positions in the '
            "loss). Pad on the other side, freeze the layer, leave the term out or name a router's factor in "
            '`router_aux_loss_coef` (docs/errors.md#row-coupling).'
        )


def _relative(found: torch.Tensor, expected: torch.Tensor, largest: float | None = None) -> torch.Tensor:
    """Norm of the difference over that of what is expected, by row; ``largest``: of all rows."""
    sizes = expected.flatten(1).norm(dim=1)
    least = SMALL_ROW * (float(sizes.max()) if largest is None else largest)
    return ((found - expected).flatten(1).norm(dim=1) / sizes.clamp(min=least or 1e-30)).nan_to_num(nan=torch.inf)


def _first_line(error: Exception) -> str:
    """Returns what an error says, without the rest of a long message of the host."""
    return f'{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}'


def documents_of(packed: Batch) -> torch.Tensor:
    """Returns which document each position of a packed row belongs to, ``(1, width)``."""
    mask = packed.get('attention_mask')
    if mask is not None:
        return mask.int().argmax(dim=0)[None]
    positions = packed['position_ids']  # of text come first
    return (positions.flatten(0, -2)[:1] == 0).cumsum(dim=1) - 1
