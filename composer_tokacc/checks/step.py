# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks, before the optimizer moves, that a step was exact: what its tokens weighed, and that all were there."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, sample_name
from composer_tokacc.checks.logits import (
    LabelEntries,
    counted_labels,
    deviation,
    label_entries,
    node_of,
    on_gradient,
    targets_of,
    tolerance_of,
)
from composer_tokacc.counting import loss_mask
from composer_tokacc.weights import LOSS_WEIGHTS

__all__ = ['MicrobatchRecord', 'StepCheck', 'WatchedTokens', 'has_bypass']

# Composer computes its weight in double and applies it in float32.
RELATIVE_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3
"""Of sums in float32, in another order."""
NUM_SAMPLED = 16
"""Tokens of a microbatch that are measured. A loss that divides by something else than the number of tokens changes the
weight of every token in a microbatch, so that any of them shows it."""

CHOICE = random.Random(0)
"""Chooses them, so that the run's own random numbers are left alone."""


class WatchedTokens:
    """Hears the gradient by the logits of a microbatch go by, and notes how far tokens are from what they must weigh.

    Args:
        logits: ``(rows, width, vocabulary)``, in the graph of the loss.
        batch: Its labels, and attention mask where there is one, on the same device.
        rule: Which labels carry loss.
        weights: What tokens must weigh beside a plain one, ``(rows, width)`` at the positions that predict; None: the
            same.
        unit: What a plain token must weigh in the gradient; None: no token is measured.
        num_tokens: How many there are.
        is_whole: Whether to measure all of them, and all entries of the gradient, rather than a few.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        batch: Mapping[str, Any],
        rule: str,
        weights: torch.Tensor | None,
        unit: float | None,
        *,
        num_tokens: int,
        is_whole: bool,
    ) -> None:
        self.was_reached = False
        self.allowed = 0.0
        self.count: torch.Tensor | None = None
        """Tokens that count, on the device, where they were looked at."""
        self._logits: torch.Tensor | None = logits.detach()
        self._batch, self._rule, self._weights = batch, rule, weights
        self._unit, self._num_tokens, self._is_whole = unit, num_tokens, is_whole
        self._deviations: torch.Tensor | None = None
        self._sample: LabelEntries | None = None
        on_gradient(logits, self._note)

    @property
    def is_measured(self) -> bool:
        """Whether the gradient came by, and some token was measured."""
        return self._deviations is not None or self._sample is not None

    def deviations(self) -> torch.Tensor:
        """Returns how far each measured position is from what it must be, in parts of a plain token's weight."""
        if self._sample is None:
            assert self._deviations is not None
            return self._deviations
        assert self._unit is not None
        weights = 1.0 if self._weights is None else self._weights.flatten()[self._sample.positions]
        return (self._sample.entries.float() / self._unit - weights * self._sample.losses.neg().expm1()).abs()

    def worst(self) -> tuple[int, int]:
        """Returns row and target of the position that is furthest off."""
        place = self.deviations().nan_to_num(nan=-1.0).argmax()
        place = int(place if self._sample is None else self._sample.positions[place])
        targets = targets_of(self._batch, self._rule)
        return place // targets.shape[1], int(targets.flatten()[place])

    def _note(self, gradient: torch.Tensor) -> None:
        self.was_reached = True
        if self._unit is None or self._logits is None:
            return
        self.allowed = tolerance_of(gradient.dtype)
        if self._is_whole:
            targets = targets_of(self._batch, self._rule)
            self.count = (targets != IGNORE_INDEX).sum()
            self._deviations = deviation(self._logits, gradient, targets, self._weights, self._unit)
        else:
            numbers = CHOICE.choices(range(1, self._num_tokens + 1), k=NUM_SAMPLED)
            labels, shift = counted_labels(self._batch, self._rule)
            self._sample = label_entries(self._logits, gradient, labels, shift, numbers)
            self.count = self._sample.count

    def release(self) -> None:
        """Lets go of the logits once backward is through; until then whatever comes last counts."""
        self._logits = None


@dataclass(kw_only=True)
class MicrobatchRecord:
    """What is to be checked of one microbatch.

    Args:
        batch: With its labels, and attention mask where there is one, on the device.
        num_tokens: Loss-generating tokens that were counted before it was moved there.
        loss_weight: Sum of their weights: their number, where all weigh the same.
        num_samples: Rows that are samples.
        num_microbatches: Number of microbatches with samples that this rank was to make of the step.
        composers_weight: What Composer is to multiply its loss by.
        losses: The terms of its loss, as the model gave them.
        is_weighted: Whether the batch says what its tokens weigh.
        watched: What its tokens weigh; None: there are no logits to tell.
        bypass: Whether its loss has a term that is not made of the logits.
    """

    batch: Mapping[str, Any]
    num_tokens: int
    loss_weight: float
    num_samples: int
    num_microbatches: int
    composers_weight: float
    losses: Sequence[torch.Tensor]
    is_weighted: bool
    watched: WatchedTokens | None = None
    bypass: bool = False


@dataclass
class StepCheck:
    """Collects what happened in one optimizer step and refuses it if it was not exact.

    Args:
        rule: Which labels carry loss.
        local_tokens: Loss-generating tokens of this rank.
        local_samples: Samples of this rank.
        local_weight: Weight of its tokens.
        gradient_scale: Loss scale of mixed precision, 1 without.
        has_bypass: Whether the loss of steps before had a term that is not made of the logits; None: there were none.
    """

    rule: str
    local_tokens: int
    local_samples: int
    local_weight: float
    gradient_scale: float = 1.0
    has_bypass: bool | None = None
    records: list[MicrobatchRecord] = field(default_factory=list)
    _observed: list[torch.Tensor] = field(default_factory=list)

    def start_attempt(self) -> None:
        """Forgets an attempt that failed half-way."""
        self.records.clear()
        self._observed.clear()

    def observe(self, gradient: torch.Tensor) -> None:
        """A tensor hook: the gradient that reaches the scaled loss is the weight that Composer applied."""
        self._observed.append(gradient.detach().sum(dtype=torch.float32))

    @property
    def num_empty(self) -> int:
        """Microbatches of this rank without loss-generating tokens."""
        return sum(record.num_tokens == 0 for record in self.records)

    def check(self, *, gradients: Sequence[torch.Tensor], by_microbatch: bool = False) -> None:
        """Raises RuntimeError unless all samples, tokens and weights of the step are accounted for.

        Args:
            gradients: This rank's gradients, to be finite where the losses are; none: not looked at.
            by_microbatch: Whether a term was divided by the number of microbatches.
        """
        measured = [watched for watched in self._watched() if watched.is_measured]
        losses = [loss.flatten().float() for record in self.records for loss in record.losses]
        groups: dict[str, list[torch.Tensor]] = {
            'labels': [self._count(record) for record in self.records],
            'weights': [self._weight(record) for record in self.records if record.is_weighted],
            'finite': [torch.cat(losses).isfinite().all()] if losses else [],
            'gradients': [torch.nn.utils.get_total_norm(gradients).isfinite()] if gradients else [],
            'factors': self._observed,
            'tokens': [watched.deviations().amax() for watched in measured],
        }
        # The only device sync: once a step, where Composer reads the loss anyway.
        stacked = [torch.stack(values).double() for values in groups.values() if values]
        read = iter(torch.cat(stacked).tolist() if stacked else [])
        found = {name: [next(read) for _ in values] for name, values in groups.items()}
        flags = found['finite'] + found['gradients']
        if flags == [1, 0]:  # losses finite, gradients not; where a loss is not, the gradient only follows it
            raise RuntimeError(
                f'Gradients must be finite where every loss is, got: NaN or infinity, with {self.num_empty} of '
                f'{len(self.records)} microbatches without loss-generating tokens. A loss that divides by their number '
                'gives 0 / 0 there; divide by at least 1, or keep samples without labels out of the data.'
            )
        self._check_rows()
        self._check_labels(found['labels'], found['weights'])
        self._check_factors([factor / self.gradient_scale for factor in found['factors']])
        self._check_tokens(measured, found['tokens'])
        count = sum(record.num_samples > 0 for record in self.records)
        if by_microbatch and any(record.num_microbatches != count for record in self.records):
            raise RuntimeError(
                f"A term in units of 'microbatches' needs their number beforehand, got: {count} microbatches where "
                f'{self.records[0].num_microbatches} were expected. Split with token_data_spec().'
            )

    @property
    def is_measured(self) -> bool:
        """Whether some token of every microbatch was measured."""
        return all(one.watched is not None and one.watched.is_measured for one in self._with_tokens())

    def check_reached(self) -> None:
        """Raises RuntimeError if some microbatch's gradient does not come by its logits, where weights are set."""
        records = self._with_tokens()
        if all(one.watched is not None and one.watched.was_reached and not one.bypass for one in records):
            return
        raise RuntimeError(
            "The model's own loss must be made of the logits that it returns for `token_weights`, got: one whose "
            'gradient does not come by them, or not all of it (a fused kernel, a compiled forward, another term). '
            "Switch the kernel off, leave out `compile_config` or the term, or set `token_weights='token'`."
        )

    def _count(self, record: MicrobatchRecord) -> torch.Tensor:
        """Loss-generating tokens of a microbatch, of its labels on the device."""
        count = None if record.watched is None else record.watched.count
        return loss_mask(record.batch, self.rule).sum() if count is None else count

    def _weight(self, record: MicrobatchRecord) -> torch.Tensor:
        return (record.batch[LOSS_WEIGHTS] * loss_mask(record.batch, self.rule)).sum()

    def _with_tokens(self) -> list[MicrobatchRecord]:
        return [record for record in self.records if record.loss_weight and record.num_samples]

    def _watched(self) -> list[WatchedTokens]:
        return [record.watched for record in self._with_tokens() if record.watched is not None]

    def _check_rows(self) -> None:
        samples = sum(record.num_samples for record in self.records)
        tokens = sum(record.num_tokens for record in self.records)
        weight = sum(record.loss_weight for record in self.records)
        is_whole = math.isclose(weight, self.local_weight, rel_tol=RELATIVE_TOLERANCE)
        if (samples, tokens) != (self.local_samples, self.local_tokens) or not is_whole:
            raise RuntimeError(
                f'The microbatches of a step must hold its {self.local_samples} samples and {self.local_tokens} '
                f'loss-generating tokens of weight {self.local_weight:g}, got: {samples} and {tokens} of weight '
                f'{weight:g}. `split_batch` drops or repeats rows, or a later '
                'algorithm changes the batch; put TokenAccumulation last, or use token_data_spec().'
            )

    def _check_labels(self, labelled: Sequence[float], weighed: Sequence[float]) -> None:
        for index, (record, found) in enumerate(zip(self.records, labelled, strict=True)):
            if record.num_tokens != found:
                raise RuntimeError(
                    f'Labels must not change after BATCH_START, got: {found:.0f} loss-generating tokens in microbatch '
                    f'{index} where {record.num_tokens} were counted. `microbatch_transforms` or an algorithm '
                    'changes them; do it in `batch_transforms`, which runs before the count.'
                )
        for record, found in zip((one for one in self.records if one.is_weighted), weighed, strict=True):
            if not math.isclose(found, record.loss_weight, rel_tol=WEIGHT_TOLERANCE):
                raise RuntimeError(
                    f'Weights must not change after BATCH_START, got: {found:g} in a microbatch where '
                    f'{record.loss_weight:g} was counted. `microbatch_transforms` or an algorithm changes '
                    f'`{LOSS_WEIGHTS}`; do it in `batch_transforms`, which runs before the count.'
                )

    def _check_factors(self, observed: Sequence[float]) -> None:
        expected = [record.composers_weight for record in self.records]
        if not observed and self.local_tokens == 0:
            return  # nothing required a gradient
        if len(observed) != len(expected):
            raise RuntimeError(
                f'Composer must run backward on the scaled loss of {len(expected)} microbatches, got: {len(observed)}. '
                'A later algorithm replaces `state.loss` at BEFORE_BACKWARD; put TokenAccumulation last.'
            )
        pairs = zip(observed, expected, strict=True)
        if all(math.isclose(found, weight, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9) for found, weight in pairs):
            return
        raise RuntimeError(
            f'Composer must weight microbatches by their samples {_rounded(expected)}, got: {_rounded(observed)}. '
            'Either `accumulate_train_batch_on_tokens` is on as well (set it to False), or `get_num_samples_in_batch` '
            'does not count rows (use token_data_spec()), or a later algorithm rescales the loss (put '
            'TokenAccumulation last).'
        )

    def _check_tokens(self, measured: Sequence[WatchedTokens], deviations: Sequence[float]) -> None:
        for watched, found in zip(measured, deviations, strict=True):
            if found <= watched.allowed or not math.isfinite(found):
                continue
            record = next(one for one in self.records if one.watched is watched)
            row, token = watched.worst()
            raise RuntimeError(
                "The model's own loss must stay the mean over its loss-generating tokens, got: a gradient by its "
                f'logits that is {found:.1e} of a token off in {sample_name(record.batch, row)}, where the label is '
                f'{token} (round-off is {watched.allowed:.0e}). Its loss leaves out or weights some labels (classes, '
                'label smoothing), divides by something else than their number, is another one in training mode, or an '
                'algorithm changes labels around the forward. Terms and factors that change on purpose: name the terms '
                'of a dict in `loss_units`, or set `check_loss=False` with an explicit `loss_tokens`.'
            )
        began = [record for record in self._with_tokens() if record.bypass and self.has_bypass is False]
        if began:
            raise RuntimeError(
                "The model's own loss must be made of its logits alone, as it was before, got: another term, which "
                f'began in a microbatch with {sample_name(began[0].batch, 0)}. Have it in the loss from the first '
                'batch on, which shows what it is a mean over, or name the terms of a dict in `loss_units`.'
            )


def has_bypass(losses: Sequence[torch.Tensor], through: Sequence[torch.Tensor]) -> bool:
    """Returns whether a loss reaches parameters by another way than through some tensors: by the graph, no host sync.

    Args:
        losses: Terms of a loss.
        through: Where every way must lead through: the logits, and other terms that are judged by themselves.
    """
    stops = {node_of(tensor)[0] for tensor in through}
    pending = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node in stops:
            continue
        if hasattr(node, 'variable'):  # a parameter
            return True
        following = [other for other, _ in node.next_functions if other is not None and other not in seen]
        seen.update(following)
        pending += following
    return False


def _rounded(weights: Sequence[float]) -> list[float]:
    return [round(weight, 6) for weight in weights[:8]]
