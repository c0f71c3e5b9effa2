# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks that a step was exact, before the optimizer moves: all tokens were computed, with their right weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of, sample_name
from composer_tokacc.checks.logits import (
    deviations,
    on_gradient,
    places_of,
    targets_of,
    tolerance_of,
    whole_vocabulary,
)
from composer_tokacc.counting import loss_mask
from composer_tokacc.weights import LOSS_WEIGHTS

RELATIVE_TOLERANCE = 1e-5
"""Composer computes its weights in double precision and applies them in float32."""
WEIGHT_TOLERANCE = 1e-3
"""Sums of weights are taken in float32, in another order."""
NUM_SAMPLED = 16
"""Number of tokens of a microbatch that are measured. A loss that is divided by another number than that of the tokens
changes the weight of every token of a microbatch, so that any of them shows it."""
WHOLE_SHARE = 1 / 64
"""After the first step every position is measured in this part of the microbatches. It takes a tenth of the time of a
microbatch with a large vocabulary, so one in 64 costs 0.2 %."""
CHOICE = random.Random(0)
"""Chooses tokens. It is a generator of its own, so that the random numbers of the run stay the same."""


class TokenChoice:
    """Chooses which tokens of a run are measured: all in the first step, later some of one microbatch of each step.

    Some tokens of a microbatch are measured too if it has a label that no batch had before. If a loss treats some
    labels in another way, the first step that has these labels shows it.
    """

    def __init__(self) -> None:
        self.step = 0
        self._is_known = torch.zeros(0, dtype=torch.bool)  # of each id: whether a batch had it as a label
        self._new_labels = torch.zeros(0)
        self._num_microbatches = 1

    def begin_step(self, microbatches: Sequence[Batch]) -> None:
        """Notes which labels come for the first time. The microbatches are on the CPU."""
        labels = torch.cat([labels_of(microbatch).flatten() for microbatch in microbatches])
        labels.clamp_min_(0)
        # The table of known labels grows with the largest label.
        num_missing = int(labels.max()) + 1 - len(self._is_known)
        if num_missing > 0:
            self._is_known = torch.nn.functional.pad(self._is_known, (0, num_missing))
        self._new_labels = labels[~self._is_known.index_select(0, labels)]
        self._is_known[self._new_labels] = True

    def has(self, index: int, labels: Tensor | None) -> bool:
        """Returns whether a token of a microbatch is measured. ``labels`` are its labels, if they are on the CPU."""
        if self.step == 0 or index == self.step % self._num_microbatches:
            return True
        if len(self._new_labels) == 0:
            return False
        return labels is None or bool(torch.isin(labels, self._new_labels).any())

    def is_whole(self) -> bool:
        """Returns whether all tokens of the next microbatch are measured."""
        return self.step == 0 or CHOICE.random() < WHOLE_SHARE

    def end_step(self, num_microbatches: int) -> None:
        """Goes on to the next step. ``num_microbatches``: of the step that ends."""
        self.step += 1
        self._num_microbatches = max(num_microbatches, 1)


@dataclass(kw_only=True, eq=False)
class MicrobatchRecord:
    """Counts of a microbatch from the CPU, and observations from its backward."""

    batch: Batch  # on the device
    rule: str
    num_tokens: int
    loss_weight: float = 0.0  # the sum of the weights of its tokens
    num_samples: int = 1
    # Number of microbatches that this rank makes of the step, if a loss term is divided by it.
    num_microbatches: int | None = None
    composers_weight: float = 1.0  # the factor that Composer should apply to its loss
    has_bypass: bool = False  # whether its loss has a term that is not made of the logits
    factor: Tensor | None = None  # the factor that was applied to its loss
    token_loss: Tensor | None = None  # the sum of the losses of its tokens, if tokens have weights
    was_reached: bool = False  # whether a gradient came to its logits
    # By how much the gradient of each measured token is off, in parts of a plain token's weight, ``(tokens,)``.
    deviations: Tensor | None = None
    # Where the measured tokens are predicted, counted through all rows. None: every position was measured.
    positions: Tensor | None = None
    count: Tensor | None = None  # number of all loss-generating tokens, ``()``
    tolerance: float = 0.0  # largest deviation that round-off explains

    def watch(
        self,
        logits: Tensor,
        weights: Tensor | None,
        unit: float | None,
        *,
        is_whole: bool,
    ) -> None:
        """Measures tokens when the gradient by the logits comes.

        Args:
            logits: ``(rows, width, vocabulary)``.
            weights: Relative weights of the tokens, ``(rows, width)``; None: they are equal.
            unit: The weight of a plain token; None: nothing is measured.
            is_whole: Whether to measure all tokens, or only some.
        """
        # Detached, because a graph whose hook holds its own logits is never freed.
        on_gradient(
            logits,
            partial(
                self._measure,
                logits.detach(),
                weights,
                unit,
                is_whole,
            ),
        )

    def observe(self, gradient: Tensor) -> None:
        """Notes the gradient of the scaled loss, which is the weight that Composer applied; a tensor hook."""
        factor = gradient.detach().sum(dtype=torch.float32)
        self.factor = factor if self.factor is None else self.factor + factor

    def _measure(
        self,
        logits: Tensor,
        weights: Tensor | None,
        unit: float | None,
        is_whole: bool,
        gradient: Tensor,
    ) -> None:
        self.was_reached = True
        if unit is None:
            return
        self.tolerance = tolerance_of(gradient.dtype)
        if is_whole:
            targets = targets_of(self.batch, self.rule)
            self.count = (targets != IGNORE_INDEX).sum()
            self.deviations = deviations(
                unit,
                logits,
                gradient,
                targets,
                weights,
            ).flatten()
        else:
            self._measure_some(logits, weights, unit, gradient)

    def _measure_some(
        self,
        logits: Tensor,
        weights: Tensor | None,
        unit: float,
        gradient: Tensor,
    ) -> None:
        ordinals = loss_mask(self.batch, self.rule).flatten().cumsum(dim=0)
        self.count = ordinals[-1]
        # Tokens are chosen by their number, because the host knows how many there are. So nothing waits for the device.
        # Every step-th token from a random first one: evenly over the rows.
        step = -(-self.num_tokens // NUM_SAMPLED)
        numbers = range(
            1 + CHOICE.randrange(step),
            self.num_tokens + 1,
            step,
        )
        label_positions = places_of(ordinals, numbers)
        # The position before a label is in the same row, because column 0 never counts.
        self.positions = label_positions if self.rule == 'unshifted' else label_positions - 1
        self.deviations = deviations(
            unit,
            _at(self.positions, logits),
            _at(self.positions, gradient),
            labels_of(self.batch).flatten()[label_positions][None],
            None if weights is None else _at(self.positions, weights),
        ).flatten()

    def worst(self) -> tuple[str, int]:
        """Returns sample and label of the token that is off the most."""
        assert self.deviations is not None
        position = int(self.deviations.argmax())
        if self.positions is not None:
            position = int(self.positions[position])
        targets = targets_of(self.batch, self.rule)
        # Positions are counted through all rows.
        row = position // targets.shape[1]
        return sample_name(self.batch, row), int(targets.flatten()[position])


def _at(positions: Tensor, values: Tensor) -> Tensor:
    """Returns values ``(rows, width, ...)`` at some positions, as one row."""
    return whole_vocabulary(values).flatten(0, 1)[positions][None]


class _Observed(NamedTuple):
    """Numbers that a step left on the device."""

    tokens: Sequence[float]  # loss-generating tokens of each microbatch
    weights: Sequence[float]  # sum of weights of each microbatch, if tokens have weights
    factors: Sequence[float]  # that Composer applied
    deviations: Sequence[float]  # the largest of each microbatch that was measured


@dataclass
class StepCheck:
    """Collects observations of one optimizer step on this rank, and refuses the step if it was not exact."""

    num_tokens: int
    num_samples: int
    loss_weight: float
    is_weighted: bool = False  # whether tokens may have weights
    has_bypass: bool | None = None  # whether the loss has terms that are not made of the logits. None: not known yet
    gradient_scale: float = 1.0  # of mixed precision
    records: list[MicrobatchRecord] = field(default_factory=list)

    @property
    def _records_with_tokens(self) -> list[MicrobatchRecord]:
        return [record for record in self.records if record.loss_weight and record.num_samples]

    @property
    def is_measured(self) -> bool:
        """Whether a token of every microbatch was measured."""
        return all(record.deviations is not None for record in self._records_with_tokens)

    def check(self) -> None:
        """Raises RuntimeError unless all samples and tokens were computed with their weights."""
        if self.is_weighted:
            self._check_reached()
        observed = self._read()
        self._check_totals(observed)
        self._check_each(
            'Labels',
            observed.tokens,
            lambda record: record.num_tokens,
            tolerance=0,
        )
        self._check_each(
            'Weights',
            observed.weights,
            lambda record: record.loss_weight,
            tolerance=WEIGHT_TOLERANCE,
        )
        self._check_factors([factor / self.gradient_scale for factor in observed.factors])
        self._check_tokens(observed.deviations)
        self._check_number()

    def _check_reached(self) -> None:
        for record in self._records_with_tokens:
            if record.was_reached and not record.has_bypass:
                continue
            raise RuntimeError(
                "The model's own loss must be made of the logits that it returns for `token_weights`, got: one whose "
                'gradient does not come by them, or not all of it (a fused kernel, a compiled forward, another term). '
                'Switch the kernel off, leave out `compile_config` or the term, or set '
                "`token_weights='token'` (docs/errors.md#model-loss)."
            )

    def _read(self) -> _Observed:
        """Reads everything from the device at once. Composer reads the loss at this point and waits anyway."""
        tokens: list[Tensor] = []
        weights: list[Tensor] = []
        factors: list[Tensor] = []
        largest_deviations: list[Tensor] = []
        for record in self.records:
            counted = None
            if record.count is None or self.is_weighted:
                counted = loss_mask(record.batch, record.rule)
            if record.count is not None:
                tokens.append(record.count)
            elif counted is not None:
                tokens.append(counted.sum())
            if self.is_weighted and counted is not None:
                weights.append((record.batch[LOSS_WEIGHTS] * counted).sum())
            if record.factor is not None:
                factors.append(record.factor)
        for record in self._records_with_tokens:
            if record.deviations is not None:
                largest_deviations.append(record.deviations.amax())
        # One tensor for all numbers, so that the device is read once.
        groups = (tokens, weights, factors, largest_deviations)
        stacked = [torch.stack(group).double() for group in groups if group]
        numbers = iter(torch.cat(stacked).tolist() if stacked else ())
        return _Observed(*([next(numbers) for _ in group] for group in groups))

    def _check_totals(self, observed: _Observed) -> None:
        num_samples = sum(record.num_samples for record in self.records)
        num_tokens = sum(record.num_tokens for record in self.records)
        weight = sum(record.loss_weight for record in self.records)
        # Nothing may be lost or repeated between BATCH_START and the backwards.
        has_all = (num_samples, num_tokens) == (self.num_samples, self.num_tokens)
        if not has_all or not math.isclose(
            weight,
            self.loss_weight,
            rel_tol=RELATIVE_TOLERANCE,
        ):
            raise RuntimeError(
                f'The microbatches of a step must hold its {self.num_samples} samples and {self.num_tokens} '
                f'loss-generating tokens of weight {self.loss_weight:g}, got: {num_samples} and {num_tokens} of weight '
                f'{weight:g}. `split_batch` drops or repeats rows, or a later algorithm does: use token_data_spec(), '
                'and put TokenAccumulation last (docs/errors.md#counts).'
            )

    def _check_each(
        self,
        subject: str,
        values: Sequence[float],
        counted: Callable[[MicrobatchRecord], float],
        *,
        tolerance: float,
    ) -> None:
        """Checks values of each microbatch against the counts of BATCH_START. Without weights there are no values."""
        for index, (record, value) in enumerate(
            zip(
                self.records,
                values,
                strict=False,
            )
        ):
            expected = counted(record)
            if not math.isclose(value, expected, rel_tol=tolerance):
                raise RuntimeError(
                    f'{subject} must not change after BATCH_START, got: {value:g} in microbatch {index}, where '
                    f'{expected:g} was counted of its loss-generating tokens. Change them in `batch_transforms`, '
                    'not in `microbatch_transforms` or an algorithm (docs/errors.md#counts).'
                )

    def _check_factors(self, factors: Sequence[float]) -> None:
        if not factors and self.num_tokens == 0:
            return  # nothing required a gradient
        expected = [record.composers_weight for record in self.records]
        are_close = len(factors) == len(expected)
        for factor, weight in zip(factors, expected, strict=False):
            are_close = are_close and math.isclose(
                factor,
                weight,
                rel_tol=RELATIVE_TOLERANCE,
                abs_tol=1e-9,
            )
        if not are_close:
            raise RuntimeError(
                f'Composer must weight microbatches by their samples {np.round(expected[:8], 6).tolist()}, got: '
                f'{np.round(factors[:8], 6).tolist()}. Set `accumulate_train_batch_on_tokens` to False, use '
                'token_data_spec() for another `get_num_samples_in_batch`, and put TokenAccumulation last '
                '(docs/errors.md#composers-weights).'
            )

    def _check_tokens(self, largest_deviations: Sequence[float]) -> None:
        remaining = iter(largest_deviations)
        for record in self._records_with_tokens:
            if record.has_bypass and self.has_bypass is False:
                raise RuntimeError(
                    "The model's own loss must be made of its logits alone, as it was before, got: another term, "
                    f'which began in a microbatch with {sample_name(record.batch, 0)}. Have it in the loss from the '
                    'first batch on, or name the terms of a dict in `loss_units` (docs/errors.md#model-loss).'
                )
            if record.deviations is None:
                continue
            deviation = next(remaining)
            # A loss of NaN is the business of the trainer's callbacks.
            if math.isfinite(deviation) and deviation > record.tolerance:
                sample, token = record.worst()
                raise RuntimeError(
                    "The model's own loss must stay the mean over its loss-generating tokens, got: a gradient by its "
                    f'logits that is {deviation:.1e} of a token off in {sample}, where the label is {token} (round-off '
                    f'is {record.tolerance:.0e}). It changes in training, or an algorithm changes labels around the '
                    'forward. Name a term that is meant in `loss_units`, or set `check_loss=False` '
                    '(docs/errors.md#model-loss).'
                )
        if self.has_bypass is None and self.loss_weight:
            self.has_bypass = any(record.has_bypass for record in self.records)

    def _check_number(self) -> None:
        """Checks the number of microbatches, if a loss term was divided by it beforehand."""
        number = sum(record.num_samples > 0 for record in self.records)
        for record in self.records:
            if record.num_microbatches not in (None, number):
                raise RuntimeError(
                    f"A term in units of 'microbatches' needs their number beforehand, got: {number} microbatches "
                    f'where {record.num_microbatches} were expected. Split with token_data_spec().'
                )
