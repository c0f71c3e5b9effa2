# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks, before the optimizer moves, that a step was exact: what its tokens weighed, and that all were there."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of, sample_name
from composer_tokacc.checks.logits import deviations, on_gradient, targets_of, tolerance_of, whole
from composer_tokacc.counting import loss_mask
from composer_tokacc.labelled import LabelledPositions, places_of
from composer_tokacc.weights import LOSS_WEIGHTS

RELATIVE_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3
"""Of sums in float32, in another order."""
NUM_SAMPLED = 16
"""Tokens of a microbatch that are measured. A loss that divides by something else than the number of tokens changes the
weight of every token in a microbatch, so that any of them shows it."""
WHOLE_SHARE = 1 / 64
"""Of microbatches after the first step, the share of which every position and every entry is measured: a tenth of a
microbatch with a large vocabulary, so one in 64 costs 0.2 %."""
CHOICE = random.Random(0)
"""Chooses tokens, so that the run's own random numbers are left alone."""


class TokenChoice:
    """Chooses which tokens of a run are measured: all in the first step, then some of one microbatch of each step.

    Of a microbatch with a label that no batch before had, some are as well: what a loss does to some labels alone
    shows in the first step that has them.
    """

    def __init__(self) -> None:
        self.step = 0
        self._seen, self._new, self._num_microbatches = torch.zeros(0, dtype=torch.bool), torch.zeros(0), 1

    def begin_step(self, microbatches: Sequence[Batch]) -> None:
        """Notes which label ids come for the first time; on the CPU."""
        labels = torch.cat([labels_of(microbatch).flatten() for microbatch in microbatches]).clamp_min_(0)
        if (missing := int(labels.max()) + 1 - len(self._seen)) > 0:
            self._seen = torch.nn.functional.pad(self._seen, (0, missing))
        self._new = labels[~self._seen.index_select(0, labels)]
        self._seen[self._new] = True

    def has(self, index: int, labels: torch.Tensor | None) -> bool:
        """Returns whether any token of a microbatch is measured; ``labels``: its own, if they are on the CPU."""
        has_new = len(self._new) > 0 and (labels is None or bool(torch.isin(labels, self._new).any()))
        return has_new or self.step == 0 or index == self.step % self._num_microbatches

    def is_whole(self) -> bool:
        """Returns whether all tokens of the next microbatch are measured."""
        return self.step == 0 or CHOICE.random() < WHOLE_SHARE

    def end_step(self, num_microbatches: int) -> None:
        """Goes on to the next step; the last had so many microbatches."""
        self.step, self._num_microbatches = self.step + 1, max(num_microbatches, 1)


@dataclass(kw_only=True, eq=False)
class MicrobatchRecord:
    """What was counted of a microbatch on the CPU, and what is heard of it in its backward."""

    batch: Batch  # on the device
    rule: str
    num_tokens: int
    loss_weight: float = 0.0  # of all its tokens
    num_samples: int = 1
    num_microbatches: int | None = None  # that this rank was to make of the step, where a term is divided by them
    composers_weight: float = 1.0  # that its loss is to be multiplied by
    has_bypass: bool = False  # whether its loss has a term that is not made of the logits
    factor: torch.Tensor | None = None  # that its loss was multiplied by
    token_loss: torch.Tensor | None = None  # the sum of its tokens' own, where tokens have weights
    was_reached: bool = False  # whether a gradient came by its logits
    positions_of_logits: LabelledPositions | None = None  # where they were computed; None: at every position
    # Of the tokens that were measured, all on the device:
    deviations: torch.Tensor | None = None  # of each one's gradient, in parts of a plain token's weight, (tokens,)
    positions: torch.Tensor | None = None  # where they are predicted, counted through all rows; None: at every one
    count: torch.Tensor | None = None  # of all that carry loss, measured or not, ()
    tolerance: float = 0.0

    def watch(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor | None,
        unit: float | None,
        *,
        is_whole: bool,
        selected: Batch | None = None,
    ) -> None:
        """Has all or a few tokens measured when the gradient by the logits comes.

        Args:
            logits: ``(rows, width, vocabulary)``; only at labels: ``(1, labels (+ 1), vocabulary)``.
            weights: What each token must weigh beside the others, of the first two dimensions of the logits.
            unit: What a plain token must weigh; None: none is measured.
            is_whole: Whether all tokens are measured, or a few.
            selected: The labels in the shape of the logits, see :func:`.batch_at_logits`; None: those of the batch.
        """
        # Detached: a graph whose hook holds its own logits is never freed.
        on_gradient(logits, partial(self._hear, logits.detach(), weights, unit, is_whole, selected=selected))

    def observe(self, gradient: torch.Tensor) -> None:
        """Notes the gradient that reaches the scaled loss: the weight that Composer applied; a tensor hook."""
        found = gradient.detach().sum(dtype=torch.float32)
        self.factor = found if self.factor is None else self.factor + found

    def _hear(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor | None,
        unit: float | None,
        is_whole: bool,
        grad: torch.Tensor,
        *,
        selected: Batch | None = None,
    ) -> None:
        self.was_reached = True
        if unit is None:
            return
        self.tolerance = tolerance_of(grad.dtype)
        batch = self.batch if selected is None else selected
        has_all_logits = self.positions_of_logits is None  # selected labels say nothing of how many there are
        if is_whole:
            targets = targets_of(batch, self.rule)
            if has_all_logits:
                self.count = (targets != IGNORE_INDEX).sum()
            self.deviations = deviations(unit, logits, grad, targets, weights).flatten()
            return
        ordinals = loss_mask(batch, self.rule).flatten().cumsum(dim=0)
        if has_all_logits:
            self.count = ordinals[-1]
        # By their numbers, of which the host knows how many there are, so that nothing waits for the device.
        step = -(-self.num_tokens // NUM_SAMPLED)
        places = places_of(ordinals, range(1 + CHOICE.randrange(step), self.num_tokens + 1, step))
        targets = labels_of(batch).flatten()[places]
        self.positions = places if self.rule == 'unshifted' else places - 1  # in the same row: column 0 never counts
        given: list[Any] = [logits, grad, None, weights]
        given = [None if one is None else whole(one).flatten(0, 1)[self.positions][None] for one in given]
        given[2] = targets[None]
        self.deviations = deviations(unit, *given).flatten()

    def worst(self) -> tuple[str, int]:
        """Returns sample and label of the token that is furthest off."""
        assert self.deviations is not None
        place = int(self.deviations.argmax())
        place = place if self.positions is None else int(self.positions[place])
        if self.positions_of_logits is not None:
            place = int(self.positions_of_logits.of_predictions[place])
        targets = targets_of(self.batch, self.rule)
        return sample_name(self.batch, place // targets.shape[1]), int(targets.flatten()[place])


@dataclass
class StepCheck:
    """Collects what happened in one optimizer step on this rank and refuses it if it was not exact."""

    num_tokens: int
    num_samples: int
    loss_weight: float
    is_weighted: bool = False  # whether tokens may have weights of their own
    has_bypass: bool | None = None  # whether the loss has terms that are not made of the logits; None: not known yet
    gradient_scale: float = 1.0  # of mixed precision
    records: list[MicrobatchRecord] = field(default_factory=list)

    @property
    def _with_tokens(self) -> list[MicrobatchRecord]:
        return [record for record in self.records if record.loss_weight and record.num_samples]

    @property
    def is_measured(self) -> bool:
        """Whether some token of every microbatch was measured."""
        return all(record.deviations is not None for record in self._with_tokens)

    def check(self) -> None:
        """Raises RuntimeError unless samples, tokens and weights are all there."""
        if self.is_weighted and not all(record.was_reached and not record.has_bypass for record in self._with_tokens):
            raise RuntimeError(
                "The model's own loss must be made of the logits that it returns for `token_weights`, got: one whose "
                'gradient does not come by them, or not all of it (a fused kernel, a compiled forward, another term). '
                'Switch the kernel off, leave out `compile_config` or the term, or set '
                "`token_weights='token'` (docs/errors.md#model-loss)."
            )
        found = self._read()
        self._check_counts(found)
        self._check_factors([factor / self.gradient_scale for factor in found['factors']])
        self._check_tokens(found['tokens'])
        expected = {record.num_microbatches for record in self.records} - {None}
        count = sum(record.num_samples > 0 for record in self.records)
        if expected - {count}:
            raise RuntimeError(
                f"A term in units of 'microbatches' needs their number beforehand, got: {count} microbatches where "
                f'{expected.pop()} were expected. Split with token_data_spec().'
            )

    def _read(self) -> Mapping[str, list[float]]:
        """Reads everything from the device at once: the only sync of a step, where Composer reads the loss anyway."""
        weighted = self.records if self.is_weighted else []
        groups: dict[str, list[torch.Tensor]] = {
            'Labels': [loss_mask(r.batch, r.rule).sum() if r.count is None else r.count for r in self.records],
            'Weights': [(r.batch[LOSS_WEIGHTS] * loss_mask(r.batch, r.rule)).sum() for r in weighted],
            'factors': [record.factor for record in self.records if record.factor is not None],
            'tokens': [record.deviations.amax() for record in self._with_tokens if record.deviations is not None],
        }
        stacked = [torch.stack(values).double() for values in groups.values() if values]
        read = iter(torch.cat(stacked).tolist() if stacked else [])
        return {name: [next(read) for _ in values] for name, values in groups.items()}

    def _check_counts(self, found: Mapping[str, list[float]]) -> None:
        samples = sum(record.num_samples for record in self.records)
        tokens = sum(record.num_tokens for record in self.records)
        weight = sum(record.loss_weight for record in self.records)
        is_all = math.isclose(weight, self.loss_weight, rel_tol=RELATIVE_TOLERANCE)
        if (samples, tokens) != (self.num_samples, self.num_tokens) or not is_all:
            raise RuntimeError(
                f'The microbatches of a step must hold its {self.num_samples} samples and {self.num_tokens} '
                f'loss-generating tokens of weight {self.loss_weight:g}, got: {samples} and {tokens} of weight '
                f'{weight:g}. `split_batch` drops or repeats rows, or a later algorithm does: use token_data_spec(), '
                'and put TokenAccumulation last (docs/errors.md#counts).'
            )
        for what, name, tolerance in (('Labels', 'num_tokens', 0), ('Weights', 'loss_weight', WEIGHT_TOLERANCE)):
            for index, (record, value) in enumerate(zip(self.records, found[what], strict=False)):
                if not math.isclose(value, counted := getattr(record, name), rel_tol=tolerance):
                    raise RuntimeError(
                        f'{what} must not change after BATCH_START, got: {value:g} in microbatch {index}, where '
                        f'{counted:g} was counted of its loss-generating tokens. Change them in `batch_transforms`, '
                        'not in `microbatch_transforms` or an algorithm (docs/errors.md#counts).'
                    )

    def _check_factors(self, observed: Sequence[float]) -> None:
        if not observed and self.num_tokens == 0:
            return  # nothing required a gradient
        expected = [record.composers_weight for record in self.records]
        # Composer computes its weight in double and applies it in float32.
        is_close = partial(math.isclose, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
        if len(observed) != len(expected) or not all(map(is_close, observed, expected)):
            raise RuntimeError(
                f'Composer must weight microbatches by their samples {np.round(expected[:8], 6).tolist()}, got: '
                f'{np.round(observed[:8], 6).tolist()}. Set `accumulate_train_batch_on_tokens` to False, use '
                'token_data_spec() for another `get_num_samples_in_batch`, and put TokenAccumulation last '
                '(docs/errors.md#composers-weights).'
            )

    def _check_tokens(self, found: Sequence[float]) -> None:
        worst = iter(found)
        for record in self._with_tokens:
            if record.has_bypass and self.has_bypass is False:
                raise RuntimeError(
                    "The model's own loss must be made of its logits alone, as it was before, got: another term, "
                    f'which began in a microbatch with {sample_name(record.batch, 0)}. Have it in the loss from the '
                    'first batch on, or name the terms of a dict in `loss_units` (docs/errors.md#model-loss).'
                )
            deviation = next(worst) if record.deviations is not None else 0.0
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
