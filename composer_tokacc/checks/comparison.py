# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares cuts of some rows with the rows as the loader padded them.

A cut says how rows become microbatches: which rows share one, and how they are trimmed or packed.

The package rests on one property of models and losses. Take the gradient of the loss of a microbatch by the logits of
one of its rows, times the number of loss-generating tokens of the microbatch. It does not depend on the cut: not on the
other rows of the microbatch, and not on how the row is padded, trimmed or packed. Most models and losses have this
property. If one does not have it, the gradient of a run is wrong and nothing else shows it.

For example, a row with 5 tokens is computed by itself, and together with a row of 7 tokens. If the loss is a mean over
tokens, 5 times its gradient in the first forward equals 12 times its gradient in the second one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX, Batch, sample_name
from composer_tokacc.checks.cut_rules import CutRules, Cutter
from composer_tokacc.checks.probe import NOISE_FACTOR, AtLabels, Probe, ProbeResult
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelledPositions, LabelSelector
from composer_tokacc.layout import BatchLayout, describe
from composer_tokacc.layout.tensors import cat_padded
from composer_tokacc.refusals import NotExactError
from composer_tokacc.row_counts import RowCounts, attach_row_counts, num_rows

log = logging.getLogger(__name__)


GRADIENT_TOLERANCE = 3e-6
"""Largest relative change of a row's gradient, unless round-off changes it more. Independent rows change by 1e-7. The
weakest leaks, and the weakest undeclared terms that matter, change a gradient by 5e-5."""
MOST_ROUNDINGS = 1e4
"""Changes above this multiple of the machine epsilon are not round-off."""
MOST_NOISE = 0.3
"""Changes above this relative size are not round-off."""
PLAIN_TOLERANCE = 2e-6
"""A loss is a plain mean of cross-entropies if the gradient at each position, divided by the mean weight of a token, is
the one of a cross-entropy. It may differ by this. A step tolerates more, but a term that is small now may grow."""
SMALL_ROW = 1e-3
"""A change of a row's gradient is divided by the size of that gradient, but at least by this part of the largest row's
gradient. If the model is sure of a row, little more than round-off is left of its gradient."""
BESIDE_UNLABELLED = ([0, 2], [1])
"""How rows 0, 1 and 2 are cut into two microbatches. Row 2 has no labels. It shares a microbatch with row 0, because a
loss may need labels."""
LARGEST_REMAINDER = 0.1
"""A changed gradient of a row is ``factor * (expected + remainder)``. If the remainder is less than this part of the
change, the row has a wrong weight. Otherwise something leaks into the row."""

# The first two begin a message, and the third ends one.

MUST_BE_MEAN = "The model's own loss must be the mean over its loss-generating tokens, got: "
MUST_BE_SAMPLE_MEANS = "The terms that `loss_units` calls 'samples' must be means over samples, got: "
NAME_TERMS = (
    "Return its terms as a dict and name the unit of each in `loss_units`, or a router's factor in "
    '`router_aux_loss_coef` of the config (docs/errors.md#model-loss).'
)


def not_a_number(loss: float, details: str) -> str:
    """Returns a message about a loss that is NaN or infinite. ``details`` says where it was found."""
    return (
        f"The model's loss must be a number, got: {loss} ({details}). Look for NaN in its weights and in its batch, "
        'such as `pixel_values`, and for an overflow of its precision. It is inf if the logit of a label is -inf '
        '(docs/errors.md#model-loss).'
    )


class Point(NamedTuple):
    """Names a gradient in a :class:`.ProbeResult`."""

    unit: str
    """The unit of the loss terms that the gradient belongs to: ``'tokens'`` or ``'samples'``."""
    index: int
    """Which of the model's last layers the gradient is taken at: its place in the unit's list of
    :attr:`.ProbeResult.gradients`."""


RowGradients: TypeAlias = dict[Point, Tensor]
"""Gradients of some rows, by point. Each is a sketch ``(rows, width, entries)``, see :attr:`.ProbeResult.gradients`."""


class CutKind(Enum):
    """How rows were cut, in the words of a message."""

    SINGLE_ROW = 'by itself'
    PACKED = 'packed'
    OTHER_PADDING = 'with media padded as in its microbatch'
    AT_LABELS = 'with logits only at labels'
    WITH_UNLABELLED = 'together with a row without labels'


class CutFailure(NotExactError):
    """A difference between a cut and the uncut rows, or an error of the model on rows that were cut."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        """The error of the model. None: it has computed the rows, but they have another gradient or loss."""


class PrecisionChangedError(Exception):
    """Rows could not be computed in float32, only in the trainer's precision.

    Earlier results, in float32, cannot be compared with later ones. So the comparison must be made again.
    """


@dataclass(frozen=True)
class _Change:
    """The largest change of a row's gradient at a point."""

    point: Point
    row: int  # number of the row
    # Size of the change that counts, relative to the expected gradient. If rows may have any weight, it is
    # error_without_factor, see _largest_changes().
    error: float
    factor: float  # how many times as large as expected the whole gradient is; 1 also if that cannot be measured
    error_without_factor: float  # size of the change that is left after division by the factor, relative as ``error``


@dataclass(frozen=True)
class _MicrobatchLosses:
    """The losses of one microbatch of a cut."""

    rows: Sequence[int]  # numbers of its rows
    by_unit: Mapping[str, float]  # the sum of the loss terms of each unit


@dataclass(eq=False)
class RowComparison:
    """Compares cuts of some rows with all rows together, as the loader padded them.

    To make a comparison takes a forward: it runs the probe on all its rows. So does ``replace()``, which makes a new
    one. All ranks compare the same rows, so they make the same forwards and collectives, and give rows the same
    numbers.
    """

    probe: Probe
    layout: BatchLayout
    """Which parts of each tensor belong to which row."""
    on_device: Callable[[Batch], Batch]
    """Returns a batch as the model gets it."""
    rule: LossRule
    """The loss rule of the model."""
    rows: Batch
    """A batch of the rows, with labels."""
    check_loss: bool
    """Whether the loss must be a mean over tokens. If not, a cut may change the weight of a row."""
    _: KW_ONLY
    varies_weights: bool = True
    """Whether the probe varies weights whose entries are all equal, such as a new bias of 0. Equal entries may hide
    that rows depend on each other. Varied ones may hide it, too: see :attr:`.Probe.has_varied_weights`."""

    def __post_init__(self) -> None:
        # These counts hold only the loss rule. pack_rows() reads it there, to decide whether it masks the first label
        # of a document.
        counts = [RowCounts(rule=self.rule)] * num_rows(self.rows)
        self.rows = attach_row_counts(self.rows, counts)
        self._facts = describe(self.layout, self.rows)
        has_loss = self.rule.mask(self.rows)
        self._counts: list[int] = has_loss.sum(dim=1).tolist()
        """Number of loss-generating tokens of each row."""
        self._all_rows = list(range(len(self._counts)))
        self._rows_with_tokens = [row for row in self._all_rows if self._counts[row]]
        self._single_rows = [[row] for row in self._all_rows]
        # The width of the labels. In an encoder-decoder model they are the decoder's text, which is never trimmed, and
        # `_facts.width` is the width of the encoder's text.
        self._width = self.rows['labels'].shape[1]
        self.has_shown_trimming = False
        """Whether a row has kept its gradient in a microbatch that is narrower than the loader made it."""
        self.batch = self.on_device(self.rows)
        """The rows as the model gets them."""
        self._check_labels_kept()
        targets = self.rule.targets(self.batch)
        self.reference = self.probe.run(
            self.batch,
            targets=targets,
            varies_weights=self.varies_weights,
            # The comparison without varied weights is made later. If it changed the precision, the reference of the
            # first comparison could not be compared with later results.
            decides_precision=self.varies_weights,
        )
        """The result of all rows together."""
        self._expected = self._aligned(self.reference, self._all_rows)

    def _check_labels_kept(self) -> None:
        """Raises RuntimeError if a row has lost or got a label on the way to the device."""
        has_loss = self.rule.mask(self.batch)
        counts = has_loss.sum(dim=1).tolist()
        if counts != self._counts:
            raise NotExactError(
                f'`microbatch_transforms` must leave labels alone, got: {sum(counts)} loss-generating tokens where '
                f'{sum(self._counts)} were counted. Change labels in `batch_transforms` (docs/errors.md#counts).'
            )

    @cached_property
    def _at_unvaried_weights(self) -> RowComparison | None:
        """The same comparison without varied weights, because these may hide other faults; a collective.

        None: no rank has varied a weight, or this comparison is the one without varied weights. Made when it is first
        used, which takes a forward.
        """
        if not self.varies_weights or not any(self.probe.gather(self.probe.has_varied_weights)):
            return None
        return replace(self, varies_weights=False)

    @cached_property
    def _rounded_result(self) -> ProbeResult:
        """The result of all rows with one more rounding at every layer. Computed only to judge a change."""
        return self.probe.run(self.batch, rounded=True, varies_weights=self.varies_weights)

    @cached_property
    def _noise(self) -> dict[Point, float]:
        """How far round-off may change a row's gradient, relative to it, by point."""
        rounded = self._aligned(self._rounded_result, self._all_rows)
        noise = {}
        for point, expected in self._expected.items():
            changes = _relative_errors(rounded[point], expected, _sizes(expected))
            # The row that round-off moves the most counts for all, because every cut rounds a row differently.
            noise[point] = NOISE_FACTOR * float(changes.max())
        noise_of_ranks = self.probe.gather(noise)
        return noise_of_ranks[0]  # of the first rank, so that all ranks decide alike

    def _denominator(self, unit: str, rows: Sequence[int]) -> int:
        """Returns the number of tokens or samples by which the terms of a unit are divided.

        As in a step, a term over samples is divided by the number of all rows, even if some rows have no such term.
        """
        if unit == 'samples':
            return len(rows)
        return sum(self._counts[row] for row in rows)

    def token_scale(self) -> float | None:
        """Returns the weight of a token in the loss, times the number of tokens: 1 for a plain mean of cross-entropies.

        None: weights are unequal, or the loss has other terms, is not checked, or could not be measured.
        """
        measured = self.reference.measured
        if measured is None or not self.check_loss:
            return None
        # If the model is sure of a token, its weight is measured badly. So the mean counts each weight by its squared
        # gradient.
        squares = measured.plain_norms.square()
        weighted_squares = measured.weights * squares
        mean_weight = float(weighted_squares.sum() / squares.sum())
        if mean_weight == 0 or not math.isfinite(mean_weight):
            return None
        # Each weight, divided by the mean, should be 1. For the same reason a difference counts only as far as it
        # changes the gradient.
        largest_deviation = float(measured.deviations(mean_weight, 1.0).max())
        eps = self.reference.gradient_eps
        if largest_deviation > PLAIN_TOLERANCE + eps:
            return None
        scale = mean_weight * sum(self._counts)
        # The logits of a fresh model are nearly equal. In half precision label smoothing then looks like a factor, so
        # only a factor of 1 is believed.
        if eps > PLAIN_TOLERANCE and abs(scale - 1) > eps:
            return None
        return scale

    # The cuts.

    def first_exact(
        self,
        cutter: Cutter,
        rules: CutRules,
        largest_packed_row: int,
        *,
        are_new: bool,
    ) -> CutRules:
        """Tries rules until every row keeps its gradient, and returns them. Sets :attr:`has_shown_trimming`.

        If no row was trimmed, the returned rules trim no wider batches than the current rules do.

        Args:
            cutter: Proposes rules, and cuts by them.
            rules: The current rules. They were exact for all earlier rows.
            largest_packed_row: The most tokens that packed rows have in training.
            are_new: Whether some rows are unlike all earlier ones.

        Raises:
            RuntimeError: If no rules are exact, or if no row is new and the current cut is not exact any more.
        """
        failures: list[CutFailure] = []
        for candidate in cutter.candidates(self._facts, rules):
            self.has_shown_trimming = False
            try:
                if candidate.packing:
                    self._check_packing(cutter, candidate, largest_packed_row)
                else:
                    assemble = partial(cutter.assemble, self._facts, rules=candidate)
                    self._check_microbatches(assemble, self._single_rows, CutKind.SINGLE_ROW)
            except CutFailure as failure:
                log.info('%s: %s', candidate, failure)
                if failure.reason is None and not are_new and candidate.cuts_like(rules):
                    raise NotExactError(
                        f'{failure} Earlier steps had rows like these, and this cut was exact for them. So the model '
                        'has changed, and steps since the last check may be wrong: go back to a checkpoint before it.'
                    ) from None
                failures.append(failure)
                continue
            if self.has_shown_trimming:
                return candidate
            # No row was trimmed, so nothing shows that trimming is exact up to this width. A candidate that keeps the
            # padding, because trimming has failed, stays as it is.
            return candidate.with_earlier_width(rules, self._facts.side)
        if cutter.must_pack:
            raise NotExactError(_why_not_packed(failures))
        raise failures[-1]  # the last cut changes the rows the least, so its failure tells the most

    def _check_packing(self, cutter: Cutter, rules: CutRules, largest_packed_row: int) -> None:
        """Raises CutFailure unless rows that are packed by the rules have the expected gradients and losses."""
        assemble = partial(cutter.assemble, self._facts, rules=rules)
        self._check_packed_rows(assemble, largest_packed_row)
        # Some means over samples leave out rows without labels only if rows are packed. Then packing has failed.
        # check_unlabelled_row() makes the same check without packing.
        with_unlabelled = self._with_unlabelled
        if with_unlabelled is not None:
            assemble = partial(cutter.assemble, with_unlabelled._facts, rules=rules)
            with_unlabelled._check_microbatches(assemble, BESIDE_UNLABELLED, CutKind.PACKED)

    def check_single_rows(self) -> None:
        """Raises RuntimeError if a row by itself, not trimmed, has another gradient or loss, or cannot be computed."""
        select = partial(self.layout.select, self.rows)
        self._check_microbatches(select, self._single_rows, CutKind.SINGLE_ROW)

    def _followed_by_unlabelled(self, rows: Sequence[int], unlabelled_rows: Sequence[int]) -> RowComparison:
        """Makes a comparison (one more forward) of some rows, followed by rows whose labels are taken away.

        Raises:
            PrecisionChangedError: On all ranks, if these rows could not be computed in float32, on any rank.
        """
        batch = self.layout.select(self.rows, [*rows, *unlabelled_rows])
        labels = batch['labels'].clone()
        labels[len(rows) :] = IGNORE_INDEX
        batch['labels'] = labels
        used_float32 = self.probe.uses_float32
        comparison = replace(self, rows=batch)
        if self.probe.uses_float32 != used_float32:
            raise PrecisionChangedError
        return comparison

    @cached_property
    def _with_unlabelled(self) -> RowComparison | None:
        """A comparison of two rows and a copy of the first one without its labels; a collective.

        None if there is no term over samples, or if no row has labels. Also None if the loss is NaN in this comparison,
        on any rank. That is not refused here, because the data may have no such row.
        """
        labelled = self._rows_with_tokens
        if 'samples' not in self.reference.losses or not labelled:
            return None
        comparison = self._followed_by_unlabelled([labelled[0], labelled[-1]], labelled[:1])
        is_invalid = self.probe.invalid_loss_of_ranks(comparison.reference) is not None
        return None if is_invalid else comparison

    def check_unlabelled_row(self) -> None:
        """Raises RuntimeError if a mean over samples leaves out rows without labels.

        A step counts these rows. They come from the data, or fill up a rank. Most samples may have labels, so a copy of
        a row without its labels stands for them.
        """
        comparison = self._with_unlabelled
        if comparison is not None:
            select = partial(self.layout.select, comparison.rows)
            comparison._check_microbatches(select, BESIDE_UNLABELLED, CutKind.WITH_UNLABELLED)

    def trains_unlabelled_row(self) -> bool:
        """Returns whether terms over samples have a gradient in rows without labels."""
        comparison = self._with_unlabelled
        if comparison is None:
            return False
        # If none of the three rows has such a term, there are no gradients.
        for gradient in comparison.reference.gradients.get('samples', ()):
            if gradient is not None and gradient[2].any():  # row 2 has no labels
                return True
        return False

    def check_no_loss_in(self, unlabelled_rows: Sequence[int]) -> None:
        """Raises RuntimeError if means over tokens have a gradient or a value in rows without labels.

        ``unlabelled_rows`` came without labels. The check may have given them some, which are taken away again here. A
        step counts no tokens there, so it would leave out such a term in a microbatch that has only these rows.
        """
        if self._has_loss_in(unlabelled_rows):
            name = sample_name(self.rows, unlabelled_rows[0])
            raise NotExactError(
                f'{MUST_BE_MEAN}a term in rows without labels, such as {name}. A microbatch of such rows has no '
                f'loss-generating token, so the term would be left out. {NAME_TERMS}'
            )

    def has_loss_in_dummies(self) -> bool:
        """Returns whether means over tokens would have a gradient or a value in dummy rows.

        Dummy rows have media, but no labels. The rows with media stand for them, without their labels. A step counts no
        tokens there, so a dummy row would add to the loss of its microbatch.
        """
        rows_with_media = [row for row in self._all_rows if self._facts.media[row]]
        return self._has_loss_in(rows_with_media)

    def _has_loss_in(self, unlabelled_rows: Sequence[int]) -> bool:
        """Returns whether means over tokens have a gradient or a value in some rows whose labels are taken away.

        Together with a row with labels they make one microbatch. Returns False if there are no such rows.
        """
        has_tokens = self.check_loss and 'tokens' in self.reference.losses
        if not (has_tokens and unlabelled_rows and self._rows_with_tokens):
            return False
        labelled = self._best_labelled_row(unlabelled_rows)
        comparison = self._followed_by_unlabelled([labelled], unlabelled_rows)
        if 'tokens' not in comparison.reference.losses:
            return False  # these rows have no such term, only other rows do
        changes_loss = False
        # A labelled row without media is not compared with itself together with media, see _best_labelled_row().
        num_media = self._facts.media
        meets_media = any(num_media[row] for row in unlabelled_rows)
        if num_media[labelled] or not meets_media:
            labelled_row = self.layout.select(comparison.rows, [0])
            loss = self.probe.run(self.on_device(labelled_row)).losses.get('tokens', 0.0)
            changes_loss = not comparison._is_same_loss('tokens', loss)
        has_gradient = False
        for gradient in comparison.reference.gradients['tokens']:
            if gradient is not None:
                sizes = gradient.flatten(1).norm(dim=1)
                are_larger = sizes[1:] > GRADIENT_TOLERANCE * sizes[0]  # row 0 is the one with labels
                has_gradient |= bool(are_larger.any())
        return any(self.probe.gather(changes_loss or has_gradient))

    def _best_labelled_row(self, unlabelled_rows: Sequence[int]) -> int:
        """Returns the row with labels that is computed together with the given rows without their labels."""
        num_media = self._facts.media

        def fitness(row: int) -> tuple[bool, bool]:
            # In some models (Mllama) a row without media has another loss if rows with media are in its batch.
            has_media = num_media[row] > 0
            # Else the row would be in the microbatch twice, with and without its labels.
            is_other_row = row not in unlabelled_rows
            return has_media, is_other_row

        return max(self._rows_with_tokens, key=fitness)

    def check_media(self, media: Mapping[int, Batch]) -> None:
        """Raises RuntimeError if the gradient of a row depends on the padding of its media.

        ``media`` maps the number of a row to its media, padded as in the microbatch that the loader has collated.
        """
        for row, row_media in media.items():
            single_row = self.layout.select(self.rows, [row])
            batch = dict(single_row)
            for key, value in row_media.items():
                entry = self.layout.entry_of(single_row, key)
                # Media keep the padding of that microbatch. Only a tensor with a column for each token, such as a mask
                # of image tokens, becomes as wide as the text.
                batch[key] = cat_padded([value], entry, self._facts.width, self._facts.side)
            result = self.probe.run(self.on_device(batch))
            self._check_gradients(result, [row], CutKind.OTHER_PADDING)

    def selection_failure(self, selector: LabelSelector) -> str | None:
        """Returns why logits only at labels change the loss or its gradient; None: both stay the same.

        The gradients by the logits are compared. That is enough: the output embedding is applied to each position by
        itself, so equal gradients by the logits give equal gradients by the hidden states.
        """
        # `num_head_calls` is about the last forward that computed all logits. It does not matter which rows that
        # forward had.
        if selector.num_head_calls != 1:
            return 'the model computes its loss without one call of its output embedding, as a fused kernel does'
        positions = LabelledPositions.from_batch(self.batch, self.rule, sum(self._counts))
        at_labels = AtLabels(selector, self.rule, positions)
        try:
            result = self.probe.run(self.batch, at_labels=at_labels)
        except torch.OutOfMemoryError:
            # All ranks run the same rows, so all raise other errors. This one may come on one rank only. If that rank
            # returned here, it would leave out the collectives below.
            raise
        except Exception as error:  # any error of the model, such as an AssertionError
            return f'{type(error).__name__}: {error}'
        finally:
            selector.disarm()  # Probe.run() has armed it
        result = self._put_back(result, positions)
        try:
            self._check_gradients(result, self._all_rows, CutKind.AT_LABELS)
            self._check_losses([_MicrobatchLosses(self._all_rows, result.losses)])
        except CutFailure:
            return 'the loss or its gradient by the logits changes'
        return None

    def _put_back(self, result: ProbeResult, positions: LabelledPositions) -> ProbeResult:
        """Returns a result with the gradients by the logits at labels put back at their places in the batch."""
        height, width = self.batch['labels'].shape
        gradients = []
        # 'tokens' is the only unit, because a run with `loss_units` computes all logits and does not come here.
        for gradient in result.gradients['tokens']:
            # Gradients by the states of other layers are at all positions already.
            if gradient is not None and tuple(gradient.shape[:2]) == positions.logits_shape:
                gradient = positions.put_back(gradient, height, width)
            gradients.append(gradient)
        return replace(result, gradients={'tokens': gradients})

    def _check_packed_rows(self, assemble: Callable[[list[int]], Batch], largest_packed_row: int) -> None:
        """Raises CutFailure unless packed rows have the expected gradients.

        A leak runs from a document into later ones, so each row must come after every other row. A model may compute
        long packed rows in another way. So one packed row repeats the rows, in their order and in the opposite order by
        turns, until it is as long as in training. Further rows instead of copies would need more memory, because all
        rows of the check are also computed together, padded.

        Some faults depend on the first or the last document. So a second packed row begins with the last row, and ends
        with the first one.

        Each row is also packed by itself, because a loss may depend on which rows are together: on their number, on the
        longest or the shortest one, or on the share of tokens with labels.
        """
        in_order = self._all_rows  # such as 0, 1, 2
        opposite = in_order[::-1]  # 2, 1, 0
        # Within the long row the opposite order begins with the first row, too: 0, 2, 1. Otherwise two copies would end
        # the long row with the document that it begins with, and a fault that compares the two would not show.
        opposite_from_first = [*in_order[:1], *opposite[:-1]]
        num_copies = max(math.ceil(largest_packed_row / sum(self._facts.lengths)), 1)
        long_row: list[int] = []
        for copy in range(num_copies):
            is_opposite = copy % 2 == 1
            long_row += opposite_from_first if is_opposite else in_order
        packed_rows = [long_row, opposite]
        if len(self._all_rows) > 1:
            packed_rows += self._single_rows
        self._check_microbatches(assemble, packed_rows, CutKind.PACKED)

    def _check_microbatches(
        self,
        assemble: Callable[[list[int]], Batch],
        groups: Sequence[list[int]],
        cut_kind: CutKind,
    ) -> None:
        """Raises CutFailure unless each group of rows, as one microbatch, has the expected gradients and losses.

        Repeats this without varied weights. Notes in :attr:`has_shown_trimming` whether a row was trimmed.
        ``assemble`` makes the microbatch of a group.
        """
        losses: list[_MicrobatchLosses] = []
        for rows in groups:
            try:
                batch = assemble(rows)
                result = self.probe.run(self.on_device(batch), varies_weights=self.varies_weights)
            except torch.OutOfMemoryError:
                raise  # says nothing about the model, and may come on one rank only
            except Exception as error:  # each model raises another class
                # Some models cannot compute such a batch: BLIP-2 needs images, Funnel pools rows of 5 tokens or more.
                # Others assert that the width is a multiple of a chunk.
                raise self._not_accepted(rows, error, cut_kind) from error
            self._check_gradients(result, rows, cut_kind)
            losses.append(_MicrobatchLosses(rows, result.losses))
            # A row without a loss token, such as a row of one token, shows nothing.
            has_tokens = any(self._counts[row] for row in rows)
            if has_tokens and self.layout.width(batch) < self._facts.width:
                self.has_shown_trimming = True
        if self.check_loss:
            self._check_losses(losses)
        # The same again without varied weights. That comparison has no further one, so this ends.
        at_unvaried_weights = self._at_unvaried_weights
        if at_unvaried_weights is not None:
            at_unvaried_weights._check_microbatches(assemble, groups, cut_kind)

    def _not_accepted(
        self,
        rows: Sequence[int],
        error: Exception,
        cut_kind: CutKind,
    ) -> CutFailure:
        """Returns the failure of a cut whose rows the model cannot compute."""
        reason = str(error).rstrip('.') or repr(error)  # an assert may have no message
        message = f'The model must take {sample_name(self.rows, rows[0])} {cut_kind.value}, got: {reason}.'
        if cut_kind is CutKind.PACKED:
            message = f'The model must take packed rows, got: {reason}. Set `packing=False` (docs/errors.md#packing).'
        return CutFailure(message, reason)

    def _aligned(
        self,
        result: ProbeResult,
        rows: Sequence[int],
        *,
        is_packed: bool = False,
    ) -> RowGradients:
        """Returns the gradients of each row, in the columns of the uncut rows, times the denominator of the unit.

        In this form they are the same in every exact cut. In its microbatch a row may be narrower than in the uncut
        batch, or be one document of a packed row.
        """
        aligned: RowGradients = {}
        for unit, unit_gradients in result.gradients.items():
            for index, gradient in enumerate(unit_gradients):
                if gradient is None:
                    # A loss that does not depend on an output has the gradient 0 there.
                    row_gradients = torch.zeros(len(rows), self._width, 1)
                elif is_packed:
                    row_gradients = self._unpacked(gradient, rows)
                else:
                    row_gradients = self._in_uncut_columns(gradient, len(rows))
                denominator = self._denominator(unit, rows)
                if denominator == 0:
                    # A mean over no tokens may have the gradient NaN, and NaN times 0 is NaN. A step leaves it out.
                    row_gradients = torch.zeros_like(row_gradients)
                aligned[Point(unit, index)] = row_gradients * denominator
        return aligned

    def _unpacked(self, gradient: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the gradient of each document of a packed row, in the columns of the uncut rows.

        A packed row has the real positions of its rows, one row after the other.
        """
        is_kept = self._facts.real
        if self.rule is LossRule.CAUSAL_ATTENDED:
            # Labels on padding do not count, so pack_rows() drops them together with the padding.
            is_kept = self._facts.attended
        row_gradients = torch.zeros(len(rows), self._width, gradient.shape[-1])
        start = 0
        for place, row in enumerate(rows):
            end = start + int(is_kept[row].sum())
            row_gradients[place, is_kept[row]] = gradient[0, start:end]
            start = end
        return row_gradients

    def _in_uncut_columns(self, gradient: Tensor, num_rows: int) -> Tensor:
        """Returns the gradient of each row in the columns of the uncut rows, ``(rows, width, entries)``."""
        # Leaves out dummy rows, which come after the rows themselves.
        gradient = gradient[:num_rows]
        # Negative if `microbatch_transforms` has made the rows wider than the batch. Then columns are left out.
        num_added = self._width - gradient.shape[1]
        added_entries = (0, 0)
        added_columns = (num_added, 0) if self._facts.side == 'left' else (0, num_added)
        # pad() takes what to add before and after, the last dimension first.
        return torch.nn.functional.pad(gradient, (*added_entries, *added_columns))

    # The differences.

    def _check_gradients(
        self,
        result: ProbeResult,
        rows: Sequence[int],
        cut_kind: CutKind,
    ) -> None:
        """Raises CutFailure if a row's gradient differs from the expected one by more than round-off.

        ``result`` is the probe's result for the microbatch of the rows.
        """
        gradients = self._aligned(result, rows, is_packed=cut_kind is CutKind.PACKED)
        changes_of_ranks = self.probe.gather(self._largest_changes(gradients, rows, cut_kind))
        # All ranks have the same points, in the same order. They decide by the largest change of all ranks, because a
        # change above the tolerance takes one more forward, which all must make.
        for changes_at_point in zip(*changes_of_ranks, strict=True):
            change = max(changes_at_point, key=lambda change: change.error)
            allowed = self._allowed(change.point, change.error)
            if change.error > allowed:
                raise CutFailure(self._explained_change(change, allowed, cut_kind))

    def _explained_change(self, change: _Change, allowed: float, cut_kind: CutKind) -> str:
        """Returns a message about a change of a row's gradient that exceeds ``allowed``; a collective."""
        name = sample_name(self.rows, change.row)
        size = f'changes by {change.error:.1e} {cut_kind.value}'
        difference = f'{name}: the gradient at its logits {size} (round-off is {allowed:.0e})'
        invalid_loss = self.probe.invalid_loss_of_ranks(self.reference)
        if invalid_loss is not None:
            return not_a_number(invalid_loss, difference)
        if change.point.unit == 'samples':
            return (
                f'{MUST_BE_SAMPLE_MEANS}a gradient of {name} that {size}. Take means over the tokens of each row, '
                'not over its columns, and divide their sum by all rows, or name another unit '
                '(docs/errors.md#model-loss).'
            )
        # If the change almost vanishes without the factor, the row only has another weight.
        if change.error_without_factor < LARGEST_REMAINDER * change.error:
            return (
                f'{MUST_BE_MEAN}{name}, whose tokens weigh {change.factor:.6f} times as much {cut_kind.value} as with '
                f'{len(self._counts) - 1} others. Divide by the number of tokens. {NAME_TERMS}'
            )
        return self._explained(difference, cut_kind)

    def _largest_changes(
        self,
        gradients: RowGradients,
        rows: Sequence[int],
        cut_kind: CutKind,
    ) -> list[_Change]:
        """Returns the change of the row whose gradient differs most from the expected one, for each point."""
        # A microbatch may leave out a term. Then it adds nothing to the gradient of this term.
        zero = torch.zeros(len(self._all_rows), self._width, 1)
        changes = []
        for point in {**self._expected, **gradients}:
            all_expected = self._expected.get(point, zero)
            row_gradients = gradients.get(point, zero[rows])
            expected = all_expected[rows]
            sizes = _sizes(all_expected)[rows]
            # The change of a row's gradient consists of a factor on all of it, and a remainder.
            factors = _factors(row_gradients, expected)
            remainders = _relative_errors(row_gradients / factors[:, None, None], expected, sizes)
            # If the loss is not checked, rows may have any weight, so only the remainder counts. But packing must not
            # turn a mean over samples into a mean over packed rows of several samples. So there the factor counts, too.
            is_mean_of_packed = point.unit == 'samples' and cut_kind is CutKind.PACKED
            if self.check_loss or is_mean_of_packed:
                errors = _relative_errors(row_gradients, expected, sizes)
            else:
                errors = remainders
            worst = int(errors.argmax())
            change = _Change(
                point,
                row=rows[worst],
                error=float(errors[worst]),
                factor=float(factors[worst]),
                error_without_factor=float(remainders[worst]),
            )
            changes.append(change)
        return changes

    def _allowed(self, point: Point, error: float) -> float:
        """Returns the largest change of a row's gradient that round-off explains.

        ``error`` is the measured change. The noise takes one more forward, so it is measured only if the change exceeds
        GRADIENT_TOLERANCE.
        """
        if error <= GRADIENT_TOLERANCE:
            return GRADIENT_TOLERANCE
        eps = self.reference.gradient_eps  # the gradient itself is rounded
        # The measured noise is limited, because a random forward or a stale state would make it as large as any fault.
        noise = min(self._noise.get(point, 0.0), MOST_ROUNDINGS * eps, MOST_NOISE)
        return max(GRADIENT_TOLERANCE, eps, noise)

    def _check_losses(self, microbatches: Sequence[_MicrobatchLosses]) -> None:
        """Raises CutFailure if the loss of all rows is not the weighted mean of the losses of the microbatches.

        As in a step, the weight of a microbatch is its number of tokens or samples. Each row must be in the
        microbatches equally often.
        """
        for unit in self.reference.losses:
            weighted_sum = 0.0
            total_denominator = 0
            for microbatch in microbatches:
                denominator = self._denominator(unit, microbatch.rows)
                total_denominator += denominator
                if denominator:  # the loss of a microbatch without tokens may be NaN
                    # A microbatch may lack the term. Then it is 0, as in a step.
                    weighted_sum += microbatch.by_unit.get(unit, 0.0) * denominator
            if total_denominator == 0:
                continue
            mean = weighted_sum / total_denominator
            if not self._is_same_loss(unit, mean):
                raise CutFailure(self._explained_loss(unit, mean))

    def _explained_loss(self, unit: str, mean: float) -> str:
        """Returns a message about a loss that is not the ``mean`` of the losses of the microbatches; a collective."""
        loss_of_all = f'{self.reference.losses[unit]:.6f} for {len(self._counts)} rows together'
        difference = f'{loss_of_all}, and {mean:.6f} as their mean by row'
        invalid_loss = self.probe.invalid_loss_of_ranks(self.reference)
        if invalid_loss is not None:
            return not_a_number(invalid_loss, difference)
        if unit == 'samples':
            return (
                f'{MUST_BE_SAMPLE_MEANS}{difference}. Divide by all rows, also by those without labels, set '
                "`packing=False` if only packed rows differ, or name another unit, such as 'coupled_samples' "
                '(docs/errors.md#model-loss).'
            )
        cause = 'It holds a term that depends on which rows share a microbatch.'
        return f'{MUST_BE_MEAN}{difference}. {cause} {NAME_TERMS}'

    def _is_same_loss(self, unit: str, compared_loss: float) -> bool:
        """Returns whether the loss of all rows equals another loss up to round-off, on all ranks; a collective."""
        is_same = self.reference.is_same_loss(unit, compared_loss)
        if all(self.probe.gather(is_same)):
            return True
        # The noise takes one more forward, so it is measured only if it decides.
        noise = abs(self._rounded_result.losses[unit] - self.reference.losses[unit])
        is_same = self.reference.is_same_loss(unit, compared_loss, noise=noise)
        return all(self.probe.gather(is_same))

    def _explained(self, difference: str, cut_kind: CutKind) -> str:
        """Returns a message with the difference, its possible causes, and what to do."""
        if cut_kind is CutKind.PACKED:
            causes = 'Attention, positions or states leak from one document to the next'
            if self._facts.side == 'left':
                causes += ', or the model counts padding on the left as positions'
                if self.rule.shifts_labels:
                    causes += ', or a pad predicts the label of a first token (mask it, -100)'
            return (
                f'The model must tell packed documents apart, got: {difference}. {causes}. Set `packing=False`, which '
                'is exact (docs/errors.md#packing).'
            )
        if cut_kind is CutKind.OTHER_PADDING:
            return (
                f'Media must have the same result however far they are padded, got: {difference}. The model sees '
                'padding of sounds or images, which differs in microbatches that are collated by themselves. Pad all '
                "to one size in the collator (`padding='max_length'`), or give token_data_spec() a plain DataLoader "
                '(docs/errors.md#row-coupling).'
            )
        if self.probe.is_random:
            return (
                f'The forward must not be random in evaluation, or no two cuts can be compared, got: {difference}. '
                'Switch off its noise (docs/errors.md#row-coupling).'
            )
        return (
            f"A row's losses must not depend on the rows beside it nor on its padding, got: {difference}. Rows see "
            'each other in this model (statistics of the batch, attention over padding, a mean over other positions in '
            "the loss). Pad on the other side, freeze the layer, leave the term out or name a router's factor in "
            '`router_aux_loss_coef` (docs/errors.md#row-coupling).'
        )


def _why_not_packed(failures: Sequence[CutFailure]) -> str:
    """Returns why no packing is exact.

    ``failures`` has one entry for each packing that was tried, attention by document first. If the model has raised an
    error in the first, and has a wrong result in another, the message names both failures. Otherwise it names the
    first.
    """
    first = failures[0]
    wrong_result = next((failure for failure in failures if failure.reason is None), first)
    if wrong_result is first:
        return str(first)
    return f'{wrong_result} Attention document by document was not possible: {first.reason}.'


def _factors(gradients: Tensor, expected: Tensor) -> Tensor:
    """Returns how many times as large as expected each row's gradient is, by projection; ``(rows,)``."""
    products = (gradients * expected).flatten(1).sum(dim=1)
    squares = expected.square().flatten(1).sum(dim=1)
    has_factor = (squares > 0) & (products != 0)
    return torch.where(has_factor, products / squares, 1.0)


def _sizes(gradients: Tensor) -> Tensor:
    """Returns the sizes by which changes of gradients are divided; ``(rows,)``.

    They are the norms of the rows' gradients, but not smaller than :data:`SMALL_ROW` says.
    """
    norms = gradients.flatten(1).norm(dim=1)
    smallest_size = max(SMALL_ROW * float(norms.max()), 1e-30)  # nothing is divided by zero
    return norms.clamp(min=smallest_size)


def _relative_errors(gradients: Tensor, expected: Tensor, sizes: Tensor) -> Tensor:
    """Returns the norm of each row's difference, divided by its entry of ``sizes``; ``(rows,)``. NaN becomes inf."""
    differences = (gradients - expected).flatten(1).norm(dim=1)
    errors = differences / sizes
    return errors.nan_to_num(nan=torch.inf)
