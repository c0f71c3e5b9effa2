# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The record of an optimizer step, and the check that the step was exact.

A :class:`Step` is made when its batch is counted. The split, the algorithm and the check read it and fill it in, and a
:class:`MicrobatchRecord` is added to it for each microbatch that is computed. Before the optimizer moves,
:func:`check_step` tells whether all tokens were computed with their right weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of, sample_name
from composer_tokacc.checks.logits import measure, tolerance_of, whole_vocabulary
from composer_tokacc.counting import LossRule
from composer_tokacc.graph import on_gradient
from composer_tokacc.labelled import LabelledPositions, places_of
from composer_tokacc.layout import RowFacts, microbatches_of
from composer_tokacc.refusals import NotExactError
from composer_tokacc.row_counts import CountSums, RowCounts
from composer_tokacc.weights import LOSS_WEIGHTS

RELATIVE_TOLERANCE = 1e-5
"""Largest relative error of the weight that Composer gives a microbatch, which is applied in float32. Also of the sum
of the token weights that were counted on the CPU, over the microbatches of a step."""
WEIGHT_TOLERANCE = 1e-3
"""Largest relative error of the sum of the token weights in a microbatch on the device, which adds them in float32."""
NUM_SAMPLED = 16
"""Most tokens that are measured of a microbatch, unless all are. If a loss is divided by a wrong number, the weight of
every token of the microbatch changes, so any token shows it."""
ALL_TOKENS_SHARE = 1 / 64
"""If only some tokens of a step are measured, all tokens are measured in this part of the measured microbatches. With a
large vocabulary that takes a tenth of the time of the microbatch, so one in 64 costs 0.2 %."""
GENERATOR = random.Random(0)
"""Chooses tokens. Not the global generator, so that the random numbers of the run stay the same."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Added to the turn of :class:`TokenChoice` after each step, modulo 1. So turns fill the range from 0 to 1 evenly, also
those of every second or third step. If one microbatch after the other had its turn instead, and steps of one and of two
microbatches alternated, some of them might never have it."""


class TokenChoice:
    """Chooses which tokens of a run are measured.

    In the first step with each microbatch size all tokens are measured, because a loss may depend on the size.

    In each other step some microbatches are measured: those with a label that counts for the first time, and one more,
    by turns. The turn of a step is a number from 0 (its first microbatch) to 1 (its end). For example, steps of four
    microbatches with the turns 0, 0.62, 0.24, 0.85 and 0.47 measure the microbatches 0, 2, 0, 3 and 1. If our split
    does not cut the batch, the number of microbatches is not known before the last one, and the number of the previous
    step stands for it. Then a step with fewer microbatches may have no turn, and a step with more may have several.

    In a measured microbatch some tokens are measured; in one of 64, drawn at random, all tokens.

    If tokens have weights, the algorithm measures every microbatch. This class then only decides whether all of its
    tokens are measured.

    A loss may treat some labels in another way. If it then also divides by another number, the weight of every token
    changes, and the first microbatch with these labels shows it. If only the tokens with these labels get another
    weight, they may not be among the measured tokens. But this weight does not depend on the cut, so the step is exact.
    """

    def __init__(self) -> None:
        self._turn = 0.0  # of the step that runs now
        self._is_unknown = torch.zeros(0, dtype=torch.bool)  # by token id: whether no batch had it as a label
        self._num_microbatches = 1  # of the last step
        self._measured_sizes: set[float] = set()  # microbatch sizes of the steps that have begun
        self._measures_whole_step = False  # whether all tokens of the step that runs now are measured

    def begin_step(self, microbatch_size: float) -> None:
        """Begins a step. If it is the first one with this microbatch size, all of its tokens are measured."""
        self._measures_whole_step = microbatch_size not in self._measured_sizes
        self._measured_sizes.add(microbatch_size)

    def rows_with_new_labels(self, batch: Batch, rule: LossRule) -> list[bool]:
        """Returns which rows have a label with a token id that counts for the first time, and remembers the id.

        If several microbatches of a pre-split batch have the same new id, only rows of the first of them are returned.
        An id is not remembered from a label that does not count (in column 0, or masked), because no loss was measured
        with it.

        Args:
            batch: A batch on the CPU, after its tokens were counted.
            rule: Which labels count.
        """
        has_new_label: list[bool] = []
        for microbatch in microbatches_of(batch):
            # -100 is looked up as id 0, but the mask is False there.
            labels = labels_of(microbatch).clamp(min=0)
            # The table grows with the largest label.
            num_missing = int(labels.max()) + 1 - len(self._is_unknown)
            if num_missing > 0:
                self._is_unknown = torch.nn.functional.pad(self._is_unknown, (0, num_missing), value=True)
            is_new = rule.mask(microbatch) & self._is_unknown[labels]
            has_new_label_in_row = is_new.any(dim=1).tolist()
            has_new_label += has_new_label_in_row
            if any(has_new_label_in_row):  # in most steps no label is new
                self._is_unknown[labels[is_new]] = False
        return has_new_label

    def chooses(self, place: int, rows: Sequence[RowCounts], num_planned: int = 0) -> bool:
        """Returns whether tokens of a microbatch are measured.

        Args:
            place: Its place in the step, from 0.
            rows: The counts of its rows.
            num_planned: The number of microbatches of the step; 0: it is not known.
        """
        if self._measures_whole_step or any(row.has_new_label for row in rows):
            return True
        num_microbatches = num_planned or self._num_microbatches
        place_of_turn = int(self._turn * num_microbatches)
        # If the number is not known, there may be more microbatches. Then every n-th one has its turn.
        return place % num_microbatches == place_of_turn

    def draws_all(self) -> bool:
        """Returns whether all tokens of a measured microbatch are measured, or only some. Draws it at random."""
        return self._measures_whole_step or GENERATOR.random() < ALL_TOKENS_SHARE

    def end_step(self, num_microbatches: int) -> None:
        """Goes on to the next step. ``num_microbatches`` is the number of microbatches of the step that ends."""
        self._turn = (self._turn + GOLDEN_RATIO) % 1
        self._num_microbatches = max(num_microbatches, 1)


@dataclass(kw_only=True, eq=False)
class MicrobatchRecord:
    """The counts of a microbatch, made on the CPU, and observations from its backward."""

    batch: Batch  # on the device; from BEFORE_BACKWARD on only the entries that check_step() reads
    rows: Sequence[RowCounts]
    # How many microbatches with samples this rank should compute in the step. None: no loss term is divided by it.
    num_microbatches: int | None = None
    composers_weight: float = 1.0  # the factor that Composer should apply to its loss
    applied_factor: Tensor | None = None  # the factor that Composer did apply to its loss, times the gradient scale
    has_bypass: bool = False  # whether it was seen to have a bypass, see _check_tokens()
    token_loss: Tensor | None = None  # the unweighted sum of the losses of its tokens, only if tokens have weights
    was_reached: bool = False  # whether a gradient came to its logits
    # Numbers of the dummy rows and repeated samples that share it with other rows.
    added_rows: Sequence[int] = ()
    # Whether a term of the loss has a gradient in them, see watch_added_rows(). None: no watched output got a gradient.
    trains_added_rows: Tensor | None = None
    # How far the total of a dict loss is from the sum of its terms, as a multiple of the round-off. None: no total.
    total_error: Tensor | None = None
    # How far the gradient at each measured position is off, ``(positions,)``. The unit is the weight of a token whose
    # relative weight is 1. None: nothing was measured.
    deviations: Tensor | None = None
    # The measured positions, as indices into the flattened logits. None: every position, if any was measured.
    measured_positions: Tensor | None = None
    tolerance: float = 0.0  # largest deviation that round-off explains
    positions_of_logits: LabelledPositions | None = None  # where logits were computed; None: at every position
    rule: LossRule = field(init=False)  # the loss rule that counted its tokens
    counts: CountSums = field(init=False)  # of all rows together
    is_empty: bool = field(init=False)  # whether it has no loss-generating token, or no sample (only dummy rows)
    has_weight: bool = field(init=False)  # whether it changes the gradient of the step

    def __post_init__(self) -> None:
        rule = self.rows[0].rule  # all rows have the same
        assert rule is not None, 'its tokens were counted'
        self.rule = rule
        self.counts = CountSums.of(self.rows)
        self.is_empty = self.counts.loss_tokens == 0 or self.counts.samples == 0
        self.has_weight = self.counts.loss_weight > 0 and self.counts.samples > 0

    def watch(
        self,
        logits: Tensor,
        weights: Tensor | None,
        plain_token_weight: float | None,
        *,
        batch: Batch,
        measures_all: bool,
    ) -> None:
        """Adds a hook that measures tokens when the gradient by the logits comes.

        Args:
            logits: ``(rows, width, vocabulary)``. If they are only at labels, rows and width are
                :attr:`.LabelledPositions.logits_shape`.
            weights: Relative weights of the tokens, ``(rows, width)`` of the logits; None: they are equal.
            plain_token_weight: The weight of a token whose relative weight is 1. None: tokens are not measured, and the
                hook only notes that a gradient has come.
            batch: A batch with labels in the shape of the logits, see :func:`.batch_at_logits`.
            measures_all: Whether to measure all tokens, or only some.
        """
        measure_tokens = partial(
            self._measure,
            batch=batch,
            logits=logits.detach(),  # a graph whose hook holds its own logits is never freed
            weights=weights,
            plain_token_weight=plain_token_weight,
            measures_all=measures_all,
        )
        on_gradient(logits, measure_tokens)

    def watch_added_rows(self, output: Tensor) -> None:
        """Adds a hook that notes whether a gradient by a model's output, ``(rows, ...)``, is not 0 in added rows.

        A mean over tokens has none there, because added rows have no labels. Only another term can have one.
        """
        on_gradient(output, self._note_added_rows)

    def _note_added_rows(self, gradient: Tensor) -> None:
        has_gradient = whole_vocabulary(gradient)[self.added_rows].any()
        if self.trains_added_rows is not None:
            has_gradient = has_gradient | self.trains_added_rows.to(has_gradient.device)
        self.trains_added_rows = has_gradient

    def observe(self, gradient: Tensor) -> None:
        """Notes the factor that Composer has applied to the loss: its weight times the gradient scale.

        It is a hook on a scaled term of the loss, see ``LossTerms.scaled``. The gradient there is this factor. If there
        are several backwards, their factors are added, as their gradients are in the model.
        """
        factor = gradient.detach().sum(dtype=torch.float32)
        if self.applied_factor is not None:
            factor = self.applied_factor + factor
        self.applied_factor = factor

    def _measure(
        self,
        gradient: Tensor,
        *,
        batch: Batch,
        logits: Tensor,
        weights: Tensor | None,
        plain_token_weight: float | None,
        measures_all: bool,
    ) -> None:
        """Measures tokens by the gradient by the logits. It is the hook of :meth:`watch`, which has its arguments."""
        self.was_reached = True
        if plain_token_weight is None:
            return
        # The two types differ if the model has converted its logits: this gradient is the one before the conversion,
        # see edge_of(). Then both hold numbers that were rounded to the coarser type.
        self.tolerance = max(tolerance_of(gradient.dtype), tolerance_of(logits.dtype))
        targets = self.rule.targets(batch)
        if not measures_all:
            positions = self._sampled_positions(targets)
            self.measured_positions = positions
            logits = _at(positions, logits)
            gradient = _at(positions, gradient)
            targets = _at(positions, targets)
            if weights is not None:
                weights = _at(positions, weights)
        measured = measure(logits, gradient, targets)
        relative_weights = 1.0 if weights is None else weights
        self.deviations = measured.deviations(plain_token_weight, relative_weights).flatten()

    def _sampled_positions(self, targets: Tensor) -> Tensor:
        """Returns the positions of every n-th token, from a random first one on, int64 ``(positions,)``.

        Tokens are numbered from 1. The host knows how many there are, so it can choose their numbers without waiting
        for the device. The device finds their positions.
        """
        num_tokens = self.counts.loss_tokens
        stride = -(-num_tokens // NUM_SAMPLED)  # rounded up, so at most NUM_SAMPLED are measured
        first_number = 1 + GENERATOR.randrange(stride)
        chosen_numbers = range(first_number, num_tokens + 1, stride)
        is_token = (targets != IGNORE_INDEX).flatten()
        return places_of(is_token.cumsum(dim=0), chosen_numbers)

    def worst_token(self) -> tuple[str, int]:
        """Returns the token with the largest deviation: the name of its sample, and its label."""
        assert self.deviations is not None
        place = int(self.deviations.argmax())  # among the measured positions
        index_of_logits = place
        if self.measured_positions is not None:
            index_of_logits = int(self.measured_positions[place])
        index_in_rows = index_of_logits
        if self.positions_of_logits is not None:
            index_in_rows = int(self.positions_of_logits.logit_indices[index_of_logits])
        targets = self.rule.targets(self.batch)
        width = targets.shape[1]
        row, column = divmod(index_in_rows, width)
        label = int(targets[row, column])
        return sample_name(self.batch, row), label


def _at(positions: Tensor, values: Tensor) -> Tensor:
    """Returns values ``(rows, width, ...)`` at some positions, as one row, with the whole vocabulary."""
    return whole_vocabulary(values).flatten(0, 1).index_select(0, positions)[None]


@dataclass(kw_only=True, eq=False)
class Step:
    """Everything that is known of one optimizer step on this rank."""

    rows: Sequence[RowCounts]
    counts: CountSums = field(init=False)  # of all rows together
    totals: CountSums = field(init=False)  # the counts of all ranks together
    # Facts about the rows: one entry for a batch, or one for each microbatch of a pre-split batch. Empty without a
    # layout, which says how to divide the entries of the batch among its rows.
    facts: Sequence[RowFacts] = ()
    is_weighted: bool = False  # whether tokens may have weights
    # Whether DDP reduces gradients only in the last microbatch, as earlier steps have shown on some rank.
    reduces_once: bool = False
    gradient_scale: float = 1.0  # of mixed precision
    # The microbatch size that completed the gradient of the step. From then on the optimizer may have moved. None:
    # it is not complete yet.
    completed_size: float | None = None
    # Microbatches that our split has made, on the CPU, in the order of their computation. Empty if another split cuts.
    planned: Sequence[Batch] = ()
    microbatches: list[MicrobatchRecord] = field(default_factory=list)  # that were computed so far, in order

    def __post_init__(self) -> None:
        self.counts = CountSums.of(self.rows)

    @property
    def with_weight(self) -> list[MicrobatchRecord]:
        """Microbatches that change the gradient of the step."""
        return [record for record in self.microbatches if record.has_weight]

    @property
    def has_bypass(self) -> bool:
        """Whether a bypass was seen in a microbatch, see :func:`_check_tokens`."""
        return any(record.has_bypass for record in self.microbatches)

    @property
    def is_measured(self) -> bool:
        """Whether tokens were measured in every microbatch that changes the gradient."""
        return all(record.deviations is not None for record in self.with_weight)


def check_step(step: Step, *, forbids_bypass: bool = False) -> None:
    """Raises RuntimeError unless all samples and tokens of a step were computed with their right weights.

    Args:
        step: After its last backward.
        forbids_bypass: Whether a bypass would be a new term, because earlier steps had none, see :func:`_check_tokens`.
    """
    if step.is_weighted:
        _check_reached(step)
    microbatches = [_read_from_device(record, is_weighted=step.is_weighted) for record in step.microbatches]
    _check_totals(step)
    for microbatch in microbatches:
        check_total_of_loss(microbatch.total_error)
        if microbatch.trains_added_rows:
            raise trained_added_rows(microbatch.record)
    _check_labels_and_weights(microbatches)
    _check_factors(step, microbatches)
    _check_tokens(microbatches, forbids_bypass=forbids_bypass)
    _check_num_microbatches(step)


@dataclass(frozen=True, kw_only=True)
class _ObservedMicrobatch:
    """A microbatch after the last backward of the step, with the numbers that the device has computed."""

    record: MicrobatchRecord
    tokens: float  # labels that count
    weight: float  # sum of their weights; their number if tokens have no weights
    applied_factor: float | None  # see MicrobatchRecord; None: no loss of the microbatch required a gradient
    largest_deviation: float  # of MicrobatchRecord.deviations; 0 also if no token was measured
    total_error: float  # see MicrobatchRecord; 0 also if the loss has no total
    trains_added_rows: bool  # see MicrobatchRecord; False also if no watched output got a gradient


def _read_from_device(record: MicrobatchRecord, *, is_weighted: bool) -> _ObservedMicrobatch:
    """Reads the numbers of a microbatch from the device. ``is_weighted`` says whether tokens may have weights.

    Waits for the device once. This costs little time here, because Composer waits for the device at this point anyway,
    to read the loss.
    """
    counted = record.rule.mask(record.batch)
    values = {'tokens': counted.sum()}
    if is_weighted:
        values['weight'] = (record.batch[LOSS_WEIGHTS] * counted).sum()
    if record.applied_factor is not None:
        values['applied_factor'] = record.applied_factor
    if record.deviations is not None:
        values['largest_deviation'] = record.deviations.amax()
    if record.total_error is not None:
        values['total_error'] = record.total_error
    if record.trains_added_rows is not None:
        values['trains_added_rows'] = record.trains_added_rows
    in_one_tensor = torch.stack([value.to(counted.device).double() for value in values.values()])
    numbers: dict[str, float] = dict(zip(values, in_one_tensor.tolist(), strict=True))
    return _ObservedMicrobatch(
        record=record,
        tokens=numbers['tokens'],
        weight=numbers.get('weight', numbers['tokens']),
        applied_factor=numbers.get('applied_factor'),
        largest_deviation=numbers.get('largest_deviation', 0.0),
        total_error=numbers.get('total_error', 0.0),
        trains_added_rows=bool(numbers.get('trains_added_rows', 0.0)),
    )


def _check_reached(step: Step) -> None:
    """Raises RuntimeError unless token weights apply to the whole loss: all of its gradient must pass the logits."""
    for record in step.with_weight:
        if record.was_reached and not record.has_bypass:
            continue
        raise NotExactError(
            "The model's own loss must be made of the logits that it returns for `token_weights`, got: a loss whose "
            'gradient does not pass through these logits, or only a part of it (a fused kernel, a compiled forward, '
            'another term, or logits in a tuple). Switch the kernel off, leave out `compile_config` or the term, '
            "return `logits` by name, or set `token_weights='token'` (docs/errors.md#model-loss)."
        )


def _check_totals(step: Step) -> None:
    """Raises RuntimeError if samples or tokens were lost or repeated between BATCH_START and the backwards."""
    counted = step.counts
    computed_rows: list[RowCounts] = []
    for record in step.microbatches:
        computed_rows += record.rows
    computed = CountSums.of(computed_rows)
    has_all = computed.samples == counted.samples and computed.loss_tokens == counted.loss_tokens
    is_same_weight = math.isclose(computed.loss_weight, counted.loss_weight, rel_tol=RELATIVE_TOLERANCE)
    if not has_all or not is_same_weight:
        raise NotExactError(
            f'The microbatches of a step must hold its {counted.samples} samples and {counted.loss_tokens} '
            f'loss-generating tokens of weight {counted.loss_weight:g}, got: {computed.samples} and '
            f'{computed.loss_tokens} of weight {computed.loss_weight:g}. `split_batch` drops or repeats rows, or a '
            'later algorithm does: use token_data_spec(), and put TokenAccumulation last (docs/errors.md#counts).'
        )


def check_total_of_loss(error: float) -> None:
    """Raises RuntimeError if the total of a dict loss is not the sum of its terms.

    A NaN passes. The first-batch check refuses it in its own way. In later steps it is left to Composer's NaNMonitor.

    Args:
        error: The difference, as a multiple of the round-off, see ``LossTerms.total_error``.
    """
    if error > 1.0:
        raise NotExactError(
            f"`loss['total']` must be the sum of the other terms, got: a difference of {error:.3g} times the "
            'round-off. Return each term with its weight. An algorithm that adds a term must add it to the dict, with '
            'its unit in `loss_units`, and to the total (docs/errors.md#model-loss).'
        )


def trained_added_rows(record: MicrobatchRecord) -> NotExactError:
    """Returns the error of a term that has a gradient in dummy rows or repeated samples."""
    return NotExactError(
        'Only means over tokens may see the rows without labels that fill up a rank, but another term has a gradient '
        f'in such rows ({len(record.added_rows)} of {len(record.rows)} rows fill up). Multiply what a row adds to a '
        'mean over samples by `(labels != -100).any(dim=1)`, take only these rows in a term that couples rows, or give '
        'every rank equally many samples (`drop_last=True`).'
    )


def _check_labels_and_weights(microbatches: Sequence[_ObservedMicrobatch]) -> None:
    """Raises RuntimeError if a microbatch has other loss tokens or token weights than were counted at BATCH_START."""
    for index, microbatch in enumerate(microbatches):
        counts = microbatch.record.counts
        is_same_weight = math.isclose(microbatch.weight, counts.loss_weight, rel_tol=WEIGHT_TOLERANCE)
        if microbatch.tokens != counts.loss_tokens or not is_same_weight:
            first_sample = sample_name(microbatch.record.batch, 0)
            raise NotExactError(
                'Labels and token weights must not change after BATCH_START, got: '
                f'{microbatch.tokens:g} loss-generating tokens of weight {microbatch.weight:g} in microbatch {index}, '
                f'which begins with {first_sample}, where {counts.loss_tokens} of weight {counts.loss_weight:g} were '
                'counted. Change them in `batch_transforms`, not in `microbatch_transforms` or an algorithm '
                '(docs/errors.md#counts).'
            )


def _check_factors(step: Step, microbatches: Sequence[_ObservedMicrobatch]) -> None:
    """Raises RuntimeError if Composer has not weighted each microbatch by its share of the samples."""
    factors = []
    for microbatch in microbatches:
        if microbatch.applied_factor is not None:
            factors.append(microbatch.applied_factor / step.gradient_scale)
    if not factors and step.counts.loss_tokens == 0:
        return  # no loss of the step required a gradient, so no hook has noted a factor
    expected = [microbatch.record.composers_weight for microbatch in microbatches]
    are_expected = len(factors) == len(expected)
    for factor, weight in zip(factors, expected, strict=False):
        # The weight of a microbatch without samples is 0, which has no relative error.
        are_expected &= math.isclose(factor, weight, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
    if not are_expected:
        raise NotExactError(
            f'Composer must weight microbatches by their samples {np.round(expected[:8], 6).tolist()}, got: '
            f'{np.round(factors[:8], 6).tolist()}. Set `accumulate_train_batch_on_tokens` to False, use '
            'token_data_spec() for another `get_num_samples_in_batch`, and put TokenAccumulation last '
            '(docs/errors.md#composers-weights).'
        )


def _check_tokens(microbatches: Sequence[_ObservedMicrobatch], *, forbids_bypass: bool) -> None:
    """Raises RuntimeError if a measured token has a wrong weight, or if the loss has a new term.

    A bypass is a part of a mean over tokens that is made neither of the logits nor of the router's loss. The algorithm
    looks for it only in microbatches that it measures. If the first step with a weight had none, a later one is a new
    term.
    """
    for microbatch in microbatches:
        record = microbatch.record
        if not record.has_weight:
            continue
        if record.has_bypass and forbids_bypass:
            raise NotExactError(
                "The model's own loss must be made of its logits alone, as it was before, got: another term, "
                f'which began in a microbatch with {sample_name(record.batch, 0)}. Have it in the loss from the '
                'first batch on, or name the terms of a dict in `loss_units` (docs/errors.md#model-loss).'
            )
        deviation = microbatch.largest_deviation
        # A NaN or inf is not refused here. It is left to Composer's NaNMonitor.
        if math.isfinite(deviation) and deviation > record.tolerance:
            sample, token = record.worst_token()
            raise NotExactError(
                "The model's own loss must stay the mean over its loss-generating tokens, got: the label "
                f"{token} of {sample}, whose weight in the gradient is off by {deviation:.1e} of a token's weight "
                f'(round-off: {record.tolerance:.0e}). The loss changes in training, or an algorithm changes labels '
                'around the forward. Name the terms of the loss in `loss_units`, or set `check_loss=False` '
                '(docs/errors.md#model-loss).'
            )


def _check_num_microbatches(step: Step) -> None:
    """Raises RuntimeError if a loss term was divided by another number of microbatches than the step has."""
    num_with_samples = sum(record.counts.samples > 0 for record in step.microbatches)
    for record in step.microbatches:
        expected = record.num_microbatches
        if expected is not None and expected != num_with_samples:
            raise NotExactError(
                "The number of microbatches must be known before a term with the unit 'microbatches' is divided by it, "
                f'got: {num_with_samples}, but {expected} were expected. Split with token_data_spec().'
            )
