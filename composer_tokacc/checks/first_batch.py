# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks the model on the first batch, before a step with a new kind of rows, and in steps 16, 32, 64 and so on.

It finds out which labels count in the loss, and which cuts keep the gradient of every row.

A check computes only a few rows. Its result also holds for other rows if their properties (length, number of images,
holes in the mask and others) lie in the same ranges. These are the proven ranges, a :class:`.RowRanges`. If a property
of a row lies outside of them, the row is new, and the property is *missing* in the ranges. For example, rows of 20 to
90 tokens were checked. Before the first step with a row of 95 tokens, rows of its batch are checked, and the range
becomes 20 to 95.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import (
    IGNORE_INDEX,
    Batch,
    BatchDict,
    labels_at_text,
    labels_of,
    lacks_labels,
    real_positions,
    sample_name,
    text_of,
    with_copied_tensors,
)
from composer_tokacc.checks.comparison import (
    MUST_BE_MEAN,
    NAME_TERMS,
    PrecisionChangedError,
    RowComparison,
    not_a_number,
)
from composer_tokacc.checks.cut_rules import CutRules, Cutter
from composer_tokacc.checks.logits import TINY
from composer_tokacc.checks.probe import Probe, ProbeResult
from composer_tokacc.checks.row_ranges import MIN_ROWS, RowProperty, RowRanges, chosen_rows, ranges_of
from composer_tokacc.collectives import (
    all_gather_object,
    from_first_rank_with_value,
    get_global_rank,
    get_world_size,
    max_over_ranks,
    raise_on_all_ranks,
)
from composer_tokacc.compat import attention_of, gradient_hooks, hooks_after_gradients
from composer_tokacc.counting import LossRule, document_starts
from composer_tokacc.labelled import LabelSelector
from composer_tokacc.layout import (
    BatchLayout,
    RowFacts,
    describe,
    describe_all,
    media_entries,
    microbatches_of,
)
from composer_tokacc.layout.placeholders import all_placeholders, has_any_id
from composer_tokacc.layout.readings import joined_readings
from composer_tokacc.model_structure import transformers_model
from composer_tokacc.refusals import NotExactError, RefusalError
from composer_tokacc.row_counts import num_rows, without_row_counts

log = logging.getLogger(__name__)

LOOK_AGAIN = 16
"""In this step, and in steps 32, 64 and so on, `TokenAccumulation` checks rows again even if none are new. A model may
change in a way that the measurements of steps do not show: rows begin to see each other, or the loss gets a term of
inner states."""
MAX_ROWS = 6
"""Most rows of a check. There are more if several modalities are new, or if :func:`with_unequal_row` adds one."""
MAX_NEW_LABELS = 4
"""Most labels that :func:`rule_batch` puts after the first token, and that :func:`with_unequal_row` puts on a row."""
LARGEST_ELSEWHERE = 0.1
"""A loss rule names the positions that have a gradient. It fits if the gradient at all other positions is smaller than
this part of the gradient at the named ones. A small part may be round-off, or another loss term, which the comparison
of rows refuses later."""
MEDIA_INPUTS = ('pixel_values', 'input_features', 'input_values')
"""The names of images, videos and audios in batches of processors begin with these words."""
GRADIENT_SIZES = (1e-4, 1.0, 1e4)
"""Sizes of the gradients that a hook is tried with. A hook that clamps shows it only above its limit. In float16,
which ends at 6.5e4, the sum of two larger gradients could overflow."""

GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]


class SharedRows(NamedTuple):
    """The rows of one rank that all ranks probe."""

    rows: BatchDict  # rows without labels got some if possible, see :func:`_with_labels`
    media: dict[int, BatchDict]  # media of some of the rows as the loader padded them, see :func:`media_as_collated`
    largest_packed_row: int  # most tokens of a packed row in training; 0: rows are not packed
    unlabelled_rows: Sequence[int]  # places of the rows that had no label before the check gave them one
    ranges: RowRanges  # of the rows before the check gave them labels, because labels hide that a row had none


@dataclass(frozen=True)
class RowOffer:
    """Message of a rank to the others. It tells how much a check of its rows would show."""

    can_be_checked: bool  # whether the loss rule is known already, or its rows can show it, see _can_show_rule()
    missing: Sequence[RowProperty]  # the properties in which its rows are new
    num_rows: int
    ranges: RowRanges  # of all its rows

    @property
    def priority(self) -> tuple[bool, int, int]:
        """A sort key: the rows of the largest offer are checked. Rows that cannot show the loss rule come last."""
        return self.can_be_checked, len(self.missing), self.num_rows


@dataclass(kw_only=True)
class LossFacts:
    """What :class:`FirstBatchCheck` has found out about the model's loss. Each check of rows updates it."""

    rule: LossRule
    """The loss rule of the model."""
    token_scale: float | None = None
    """The weight of a token in the loss of one forward, times the number of tokens: 1 for a mean of cross-entropies.
    None: the weights differ (label smoothing, focal losses), or nothing is known."""
    vocabulary: int | None = None
    """Number of ids that a label may have, from the model's logits."""
    selection_failure: str | None = None
    """Why logits only at labels would change the loss or its gradient; None: they do not, or nothing was tried."""
    trains_unlabelled_rows: bool = False
    """Whether terms over samples have a gradient in rows without labels."""
    has_loss_in_dummies: bool = False
    """Whether means over tokens have a gradient or a value in dummy rows, which several ranks may need."""
    has_logits: bool = True
    """False if the model returns hidden states, because its loss contains the output embedding."""


class CheckedCut(NamedTuple):
    """What a check of some rows has shown about cuts."""

    rules: CutRules | None  # of the exact cut; None: rows are not cut
    has_shown_trimming: bool  # whether a row was trimmed; if not, nothing was learnt about padding


@dataclass(eq=False)
class FirstBatchCheck:
    """Checks the model with a few rows of a batch, which are the same on all ranks.

    Without a layout rows cannot be told apart, and are not compared. In that case the check only finds the loss rule,
    and looks for state that forwards write.
    """

    probe: Probe
    layout: BatchLayout | None
    to_device: Callable[[Batch], Batch]
    _: KW_ONLY
    cutter: Cutter | None
    """Cuts rows in training. None: rows are not cut, so each row is only computed by itself."""
    named_rule: LossRule | None
    """The loss rule that the user has named; None: it is to be found."""
    check_loss: bool
    """Whether to check the loss rule, and whether rows keep their weights. If not, ``named_rule`` is a rule."""
    selector: LabelSelector | None = None
    """Makes the model compute logits only at labels. None: that is not tried. After a failure it is not tried again."""
    forward_arguments: Collection[str] | None = None
    """The entries of a batch that reach the model. None: all of them may."""
    _loss_facts: LossFacts | None = field(default=None, init=False)
    """None: the loss rule is not known yet. The first check of rows finds it, unless the user's rule is believed."""
    _proven: RowRanges = field(default_factory=RowRanges, init=False)
    """The proven ranges, see the module. They are the same on all ranks."""
    is_due: bool = field(default=True, init=False)
    """Whether :meth:`prove` must check rows even if none are new: at first, and if :meth:`note_step` says so."""

    def __post_init__(self) -> None:
        # If the loss is not checked, the user's rule is believed.
        if not self.check_loss:
            assert self.named_rule is not None
            self._loss_facts = LossFacts(rule=self.named_rule)

    def _ranges_of(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> RowRanges:
        """Returns the ranges of the rows of a batch, from the facts of its microbatches."""
        return ranges_of(facts_of_batches, self._largest_packed_row(facts_of_batches, microbatch_size))

    def _largest_packed_row(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of a batch can have. 0: rows are not packed."""
        if self.cutter is None:
            return 0
        return self.cutter.largest_packed_row(facts_of_batches, microbatch_size)

    def has_new_rows(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> bool:
        """Returns whether this rank has rows outside of the proven ranges.

        Args:
            facts_of_batches: The facts of its batch, or of each of its microbatches.
            microbatch_size: Rows of a microbatch in training. In larger microbatches packed rows are longer.
        """
        return bool(self._proven.missing(self._ranges_of(facts_of_batches, microbatch_size)))

    def note_step(self, step: int) -> None:
        """Notes that a check is due if this is step 16, 32, 64 and so on."""
        is_power_of_two = step & (step - 1) == 0
        if step >= LOOK_AGAIN and is_power_of_two:
            self.is_due = True

    def prove(self, batch: Batch, microbatch_size: float) -> LossFacts:
        """Checks rows until no rank has rows outside of the proven ranges, and once if a check is due; a collective.

        Afterwards the cutter, if there is one, cuts by the rules that were found.

        Args:
            batch: The batch of this rank, on the CPU.
            microbatch_size: Rows of a microbatch in training. It limits the rows of a check, and the length of packed
                rows.

        Returns:
            What this call and earlier ones have found out about the loss.

        Raises:
            RuntimeError: On all ranks, if no loss rule fits, if a forward changes the next one, or if no cut keeps the
                gradients of the rows.
        """
        rules = None if self.cutter is None else self.cutter.rules
        # Each pass checks rows of one rank.
        while (offers := self._offers_of_ranks(batch, microbatch_size)) is not None:
            offer = max(offers, key=lambda offer: offer.priority)  # of equal offers, the one of the first rank
            self._learn_readings(offers)
            is_of_this_rank = offers[get_global_rank()] is offer
            shared = self._shared_rows(batch if is_of_this_rank else None, offer.missing, microbatch_size)
            # In the first check nothing is proven yet.
            are_new = not self._proven.limits or any(other.missing for other in offers)
            with _explained_index_errors(shared.rows):
                new_rules, has_shown_trimming = self._check_rows(shared, rules, are_new=are_new)
            self.is_due = False
            ranges = shared.ranges
            if not has_shown_trimming:
                ranges = ranges.without_padding()
            if rules is not None and new_rules is not None and not new_rules.cuts_like(rules):
                # The earlier rows were compared under another cut, so nothing is proven about them any more, and the
                # next passes check them again. The loop ends nevertheless, because rules change only a few times:
                # packing or trimming that has failed is not tried again.
                self._proven = RowRanges(readings=self._proven.readings).joined(ranges)
            else:
                self._proven = self._proven.joined(ranges)
                self._ensure_progress(shared, offer)
            rules = new_rules
        assert self._loss_facts is not None  # the first call has checked rows
        if self.cutter is not None and rules is not None:
            self.cutter.adopt(rules, self.layout, has_loss_in_dummies=self._loss_facts.has_loss_in_dummies)
        return self._loss_facts

    def _offers_of_ranks(self, batch: Batch, microbatch_size: float) -> list[RowOffer] | None:
        """Returns the offers of all ranks. None: no check is due, and no rank has new rows; a collective.

        FSDP needs the same forwards on all ranks, so the ranks agree on whether to check, and on which rows.

        Raises:
            RuntimeError: On all ranks, if the batch of a rank is refused.
        """
        offer = None
        refusal = None
        try:
            offer = self._offer(batch, microbatch_size)
        except RefusalError as refusal_of_batch:
            refusal = refusal_of_batch
        # With Composer's own flag, `accumulate_train_batch_on_tokens`, this method is called in each step. In most
        # steps these two numbers are all that ranks exchange.
        has_new_rows = offer is not None and bool(offer.missing)
        is_refused = refusal is not None
        any_rank_has_new_rows, any_rank_is_refused = max_over_ranks([has_new_rows, is_refused])
        if any_rank_is_refused:
            raise_on_all_ranks(refusal)
        assert offer is not None  # else the line above has raised
        if not self.is_due and not any_rank_has_new_rows:
            return None
        return all_gather_object(offer)

    def _shared_rows(
        self,
        batch: Batch | None,
        missing: Sequence[RowProperty],
        microbatch_size: float,
    ) -> SharedRows:
        """Returns the rows that all ranks probe, which one rank takes from its batch; a collective.

        ``batch`` is None on the other ranks.

        Raises:
            RuntimeError: On all ranks, if these rows do not tell whose media are whose.
        """
        rows_to_share = None
        refusal = None
        if batch is not None:
            try:
                rows_to_share = self._rows_to_share(batch, missing, microbatch_size)
            except RefusalError as refusal_of_rows:
                refusal = refusal_of_rows
        raise_on_all_ranks(refusal)
        shared = from_first_rank_with_value(rows_to_share)
        assert shared is not None  # one rank has rows
        return shared

    def _ensure_progress(self, shared: SharedRows, offer: RowOffer) -> None:
        """Takes ranges as proven that the check of ``shared`` rows has not shown, if it has shown nothing new at all.

        Otherwise the next pass of :meth:`prove` would check the same rows again, and its loop would not end. A check
        shows nothing new if the layout cannot tell media from each other, or if no row can be trimmed.

        ``offer`` is the offer of the rank whose rows were checked, from before the check.
        """
        if self._has_progress(offer):
            return
        # At first only the ranges of the checked rows, with their padding. If fewer properties are missing then, the
        # next pass checks rows with these properties, in place of the padded ones.
        self._proven = self._proven.joined(shared.ranges)
        if not self._has_progress(offer):
            self._proven = self._proven.joined(offer.ranges)

    def _has_progress(self, offer: RowOffer) -> bool:
        """Returns whether the rows of an offer have fewer new properties now than when it was made."""
        return len(self._proven.missing(offer.ranges)) < len(offer.missing)

    def _offer(self, batch: Batch, microbatch_size: float) -> RowOffer:
        """Returns the offer of this rank. ``batch`` is its batch."""
        ranges = self._ranges_of(describe_all(self.layout, batch), microbatch_size)
        return RowOffer(
            can_be_checked=self._loss_facts is not None or _can_show_rule(batch),
            missing=self._proven.missing(ranges),
            num_rows=num_rows(batch),
            ranges=ranges,
        )

    def _learn_readings(self, offers: Sequence[RowOffer]) -> None:
        """Learns the readings of new keys, and drops readings that the batch of any rank rules out.

        A batch may have a tensor that is registered for no model family. A reading is one possible way in which such a
        tensor belongs to rows: with one entry for each row, or one for each image, see :mod:`.layout.readings`. All
        ranks learn the same readings, so they divide tensors among rows in the same way.
        """
        readings = self._proven.readings
        for offer in offers:
            readings = joined_readings(readings, offer.ranges.readings)
        self._proven = replace(self._proven, readings=readings)
        if self.layout is not None and readings != self.layout.readings:
            self.layout = self.layout.with_readings(readings)

    def _check_rows(
        self,
        shared: SharedRows,
        rules: CutRules | None,
        *,
        are_new: bool,
    ) -> CheckedCut:
        """Finds the loss rule if it is not known yet, checks the rows, and updates the facts about the loss.

        Args:
            shared: The rows.
            rules: The current rules; None: rows are not cut.
            are_new: Whether some rows of the step lie outside of the proven ranges.
        """
        if self.is_due:
            self.probe.forget_judgements()  # of states that a forward writes: a harmless one may have become harmful
        if self._loss_facts is None:
            self._loss_facts = LossFacts(rule=self._find_rule(shared.rows))
            self._warn_of_leaks(shared.rows)
        loss_facts = self._loss_facts
        if self.layout is None:
            self._check_unknown_rows(shared.rows, loss_facts)
            return CheckedCut(rules, has_shown_trimming=False)
        self._check_number_of_keys(shared.rows)
        compare = partial(self._compare_rows, self.layout, shared, rules, loss_facts, are_new=are_new)
        try:
            return compare()
        except PrecisionChangedError:
            log.info('Some rows could not be computed in float32. So all are compared in the precision of the trainer.')
        # Outside of the handler, whose traceback holds the rows of the first comparison on the device. The precision
        # cannot change a second time.
        return compare()

    def _compare_rows(
        self,
        layout: BatchLayout,
        shared: SharedRows,
        rules: CutRules | None,
        loss_facts: LossFacts,
        *,
        are_new: bool,
    ) -> CheckedCut:
        """Compares cuts of the rows, and updates the facts about the loss. For the rest see :meth:`_check_rows`."""
        rows = with_unequal_row(layout, shared.rows, loss_facts.rule)
        comparison = RowComparison(
            self.probe,
            layout,
            on_device=self._on_device,
            rule=loss_facts.rule,
            rows=rows,
            check_loss=self.check_loss,
        )
        self._check_media_reach_model(layout, shared.rows, comparison.batch)
        self.probe.judge_written_state(comparison.batch)
        self.probe.check_next_forward(comparison.batch, self._on_device(layout.select(rows, [0])))
        if self.cutter is None or rules is None:
            comparison.check_single_rows()
        else:
            rules = comparison.first_exact(self.cutter, rules, shared.largest_packed_row, are_new=are_new)
        comparison.check_unlabelled_row()
        loss_facts.trains_unlabelled_rows |= comparison.trains_unlabelled_row()
        comparison.check_no_loss_in(shared.unlabelled_rows)
        if self.cutter is not None and get_world_size() > 1:
            loss_facts.has_loss_in_dummies |= comparison.has_loss_in_dummies()
        # Microbatches that the loader has collated may pad media to other sizes than the batch.
        comparison.check_media(shared.media)
        self._learn_loss(loss_facts, comparison)
        log.info('After the first-batch check: %s', rules)
        return CheckedCut(rules, comparison.has_shown_trimming)

    def _find_rule(self, rows: Batch) -> LossRule:
        """Returns the loss rule of the model. Raises RuntimeError if the rows cannot show it."""
        if _can_show_rule(rows):
            return self._rule_shown_by(rows)
        # From here on all rows have at most one token.
        failure = None
        try:
            rule = self._rule_shown_by(rows)
            # Such a row may show that labels are not shifted. It cannot tell the other rules apart.
            if not rule.shifts_labels or self.named_rule is not None:
                return rule
        except Exception as error:
            # A model that shifts labels has no loss in such a row. It may return NaN, or raise an error.
            failure = error
        raise NotExactError(
            'The first batch must have a row with two tokens, which shows the loss rule of the model, got: '
            f'rows of at most one token, such as {sample_name(rows, 0)}. Begin with other samples.'
        ) from failure

    def _rule_shown_by(self, rows: Batch) -> LossRule:
        """Returns the loss rule that one of the rows shows."""
        row = self._on_device(rule_batch(self.layout, rows))
        return find_loss_rule(self.probe, row, named_rule=self.named_rule)

    def _check_unknown_rows(self, rows: Batch, loss_facts: LossFacts) -> None:
        """Warns that rows are not compared, because they could not be told apart.

        If the loss is checked, it also learns whether the model's output holds logits, and checks written states. For
        this it computes the whole batch, with labels only in the first row.
        """
        log.warning(
            'Rows of the batch could not be told apart, so it was not checked that they are independent of each '
            'other. Use token_data_spec(), with a `layout` that knows every entry.'
        )
        if self.check_loss:
            row = self._on_device(rule_batch(None, rows))
            # If this forward raises an error in float32, all later ones have the trainer's precision.
            result = self.probe.run(row, targets=loss_facts.rule.targets(row), decides_precision=True)
            loss_facts.has_logits = result.has_logits
            self.probe.judge_written_state(row)

    def _learn_loss(self, loss_facts: LossFacts, comparison: RowComparison) -> None:
        """Learns how tokens weigh in the loss, and whether logits at labels are enough; a collective."""
        failure = None
        if self.selector is not None and loss_facts.selection_failure is None:
            failure = comparison.selection_failure(self.selector)
        # All ranks must measure steps in the same way, and compute the same logits. So all of them share their results.
        scale_and_failure = (comparison.token_scale(), failure)
        results_of_ranks = all_gather_object(scale_and_failure)
        scales = [scale for scale, _ in results_of_ranks]
        failures = [failure for _, failure in results_of_ranks if failure is not None]
        # A known scale stays. If the loss is not a plain mean any more, check_step() refuses the step.
        if loss_facts.token_scale is None and None not in scales:
            loss_facts.token_scale = scales[0]
        # A failure stays. The next pass of prove() may check other rows, which do not show it.
        if loss_facts.selection_failure is None and failures:
            loss_facts.selection_failure = failures[0]
        reference = comparison.reference
        loss_facts.has_logits = reference.has_logits
        loss_facts.vocabulary = reference.output_size if reference.has_logits else None

    def _check_number_of_keys(self, rows: BatchDict) -> None:
        """Raises RuntimeError if the model attends to a limited number of keys (Doge), and a row is longer than that.

        Doge attends to the best keys. Its keys have no positions, so repeated tokens have equal keys. Then round-off
        decides which of them are the best, and each microbatch rounds differently.
        """
        config = getattr(transformers_model(self.probe.model), 'config', None)
        window = getattr(config, 'keep_window_size', None)
        longest = int(real_positions(rows).sum(dim=1).max())
        if window is not None and longest > window:
            raise NotExactError(
                f'The model must not choose between keys with equal scores, got: a row of {longest} tokens, and a '
                f'window of {window} keys (`keep_window_size`). Round-off decides which ones it attends to, so a loss '
                'depends on the other rows of a microbatch. Train rows that are no longer than the window, or use '
                'another attention (docs/errors.md#row-coupling).'
            )

    def _warn_of_leaks(self, rows: BatchDict) -> None:
        """Warns if rows come packed, but Transformers does not keep their documents apart.

        Transformers finds the documents by positions that restart. With SDPA and eager attention it does so only if the
        batch has no mask and the model has no cache.
        """
        model = transformers_model(self.probe.model)
        config = getattr(model, 'config', None)
        get_text_config = getattr(config, 'get_text_config', None)  # None: the config is not one of Transformers
        if document_starts(rows) is None or get_text_config is None:
            return
        text_config = get_text_config()
        mask = rows.get('attention_mask')
        if mask is not None:
            are_mixed = mask.dim() == 2  # a mask of four dimensions tells documents apart itself
        else:
            # Transformers switches the cache off for its gradient checkpointing.
            has_checkpoints = getattr(model, 'is_gradient_checkpointing', False)
            are_mixed = getattr(text_config, 'use_cache', False) and not has_checkpoints
        if are_mixed and attention_of(text_config) in ('sdpa', 'eager'):
            log.warning(
                'Rows are packed (`position_ids` restart at 0), and their documents attend to each other, because the '
                'batch has an `attention_mask` of two dimensions or the config has `use_cache=True`. Leave the mask '
                'out and set `use_cache=False`, or give padded rows and set `packing` '
                '(docs/packing.md#rows-that-your-collator-has-packed).'
            )

    def _check_media_reach_model(self, layout: BatchLayout, rows: BatchDict, on_device: Batch) -> None:
        """Raises RuntimeError if the rows have media that Composer does not pass on, such as images for a Llama.

        ``on_device`` are the rows as the model gets them. `microbatch_transforms` may have replaced their media.
        """
        if self.forward_arguments is None:
            return
        for modality in layout.media_of(rows):
            counts = layout.units_per_row(rows, modality)
            keys = []
            for key, entry in media_entries(layout, rows).items():
                # Entries with other names, such as `image_score`, may not be meant for the model.
                if entry.modality == modality and key in on_device and key.startswith(MEDIA_INPUTS):
                    keys.append(key)
            if any(counts) and keys and not set(keys).intersection(self.forward_arguments):
                sample = sample_name(rows, counts.index(max(counts)))
                raise NotExactError(
                    f'The {modality}s of a sample must reach the model, got: {keys} of {sample}. Composer drops them, '
                    'because the forward takes none of them. Train a model that does, or remove them from the batch.'
                )

    def _on_device(self, batch: Batch) -> Batch:
        """Returns a copy of the batch as the model gets it, without the counts of its rows."""
        return self.to_device(with_copied_tensors(without_row_counts(batch)))

    def _rows_to_share(self, batch: Batch, missing: Sequence[RowProperty], microbatch_size: float) -> SharedRows:
        """Returns the rows of this rank that all ranks probe."""
        if self.layout is None:
            # Its rows cannot be told apart, so the whole batch is shared.
            return SharedRows(
                rows=dict(batch),
                media={},
                largest_packed_row=0,
                unlabelled_rows=[],
                ranges=RowRanges(),
            )
        # A row in a probe takes about half the memory that it takes in training, so twice as many rows fit.
        max_rows = min(max(int(2 * microbatch_size), MIN_ROWS), MAX_ROWS)
        chosen = chosen_rows(self.layout, batch, missing, max_rows)
        rows = self.layout.select(without_row_counts(batch), chosen)
        unlabelled_rows = []
        for place, lacks_label in enumerate(lacks_labels(rows)):
            if lacks_label:
                unlabelled_rows.append(place)
        # This length counts as proven even if packing fails in this check. That does no harm, because then no row of
        # the fit is packed any more.
        largest_packed_row = self._largest_packed_row(describe_all(self.layout, batch), microbatch_size)
        return SharedRows(
            rows=_with_labels(self.layout, rows),
            media=media_as_collated(self.layout, batch, chosen),
            largest_packed_row=largest_packed_row,
            unlabelled_rows=unlabelled_rows,
            ranges=ranges_of([describe(self.layout, rows)], largest_packed_row),
        )


@contextmanager
def _explained_index_errors(rows: Batch) -> Iterator[None]:
    """Turns an IndexError of the model into a RuntimeError that names the possible causes.

    The model raises it on a CPU if a position, an id or a label of the rows is out of range. A GPU stops the process.
    """
    try:
        yield
    except IndexError as error:
        if 'out of' not in str(error):
            raise
        text = text_of(rows)
        raise NotExactError(
            f'The model must take the batch, got: {error}, for rows of {text.shape[1]} tokens with ids up to '
            f'{int(text.max())}. Rows must not be longer than the positions of the model, labels must be -100 '
            'or ids of its vocabulary, and its embedding must hold every token (docs/errors.md#counts).'
        ) from error


# The loss rule.


class _RuleFit(NamedTuple):
    """How well a loss rule explains where a row has a gradient."""

    rule: LossRule
    elsewhere: float  # gradient at the positions that the rule does not name, relative to that at the named ones
    is_complete: bool  # whether there is a gradient at each of the named positions


def find_loss_rule(
    probe: Probe,
    row: Batch,
    *,
    named_rule: LossRule | None = None,
) -> LossRule:
    """Finds the rule by which the model counts labels, or confirms the one that the user has named; a collective.

    The gradient by the logits shows the rule: it is not zero at the positions that predict the counted labels. The rule
    is measured, because it depends on the model class and the version of transformers, and a run with a wrong rule
    would look right.

    Args:
        probe: The probe of the model. It examines the model with the row, see :meth:`.Probe.examine`.
        row: As returned by :func:`rule_batch`, on the device of the model.
        named_rule: The rule that the user has named; None: it is to be found.

    Raises:
        RuntimeError: If no rule fits the model, or ``named_rule`` does not.
    """
    result = probe.examine(row)
    invalid_loss = probe.invalid_loss_of_ranks(result)
    if invalid_loss is not None:
        raise NotExactError(not_a_number(invalid_loss, sample_name(row, 0)))
    norms = _gradient_norms(result, row)
    fits = _fitting_rules(norms, row)
    fitting_rules = [fit.rule for fit in fits]
    complete_fits = [fit for fit in fits if fit.is_complete]
    # A loss may have no gradient at some labels, such as a clipped policy gradient. Then the user must name the rule.
    if not complete_fits and named_rule is not None and named_rule in fitting_rules:
        return named_rule
    positions = _columns(norms)
    if not positions:
        raise NotExactError(
            f'{MUST_BE_MEAN}no gradient at any position of {sample_name(row, 0)}. The loss is detached, or the sample '
            'has a factor of 0 (an advantage), or no layer returns a vector for every position, because the model '
            "removes padding inside forward. In the last case set `attn_implementation='sdpa'` "
            '(docs/errors.md#model-loss).'
        )
    if not complete_fits:
        label_positions = _columns(row['labels'] != IGNORE_INDEX)
        raise NotExactError(
            f'{MUST_BE_MEAN}a gradient at the positions {positions} for labels at {label_positions}, which no rule '
            'explains. The model changes labels inside forward, or its loss holds a term over other positions. '
            f'{NAME_TERMS}'
        )
    # Without an attention mask several rules may fit. They count the same labels, so any of them is right.
    best_rule = min(complete_fits, key=lambda fit: fit.elsewhere).rule
    if named_rule is None:
        return best_rule
    if named_rule not in [fit.rule for fit in complete_fits]:
        raise NotExactError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {named_rule!r}, but the model '
            f'averages by {best_rule!r} (the gradient of its loss is at the positions {positions}). Set '
            f'`loss_tokens={best_rule!r}` (docs/errors.md#loss-rule).'
        )
    return named_rule


def _fitting_rules(norms: Tensor, row: Batch) -> list[_RuleFit]:
    """Returns the rules that fit: there is a gradient at positions that the rule names, and hardly any elsewhere.

    ``norms`` are the norms of the gradient at each position of the row.
    """
    fits = []
    for rule in LossRule:
        is_named = rule.targets(row).cpu() != IGNORE_INDEX
        named_norms = norms[is_named]
        other_norms = norms[~is_named]
        elsewhere = float(other_norms.norm() / named_norms.norm().clamp(min=TINY))
        has_gradient = named_norms > 0
        if elsewhere < LARGEST_ELSEWHERE and has_gradient.any():  # NaN is not less
            fits.append(_RuleFit(rule, elsewhere, is_complete=bool(has_gradient.all())))
    return fits


def _gradient_norms(result: ProbeResult, row: Batch) -> Tensor:
    """Returns the norm of the gradient by the logits at each position, or by the states before them, ``(rows, width)``.

    It is the gradient of the terms over tokens if the loss has any, otherwise of those over samples. If it has neither,
    it is the gradient of all terms: see :attr:`.ProbeResult.losses`.
    """
    first_unit = next(iter(result.gradients))  # 'tokens', if there is such a term
    # If there is a gradient by the logits, it is the last one.
    for gradient in reversed(result.gradients[first_unit]):
        if gradient is not None:
            return gradient.norm(dim=-1)
    return torch.zeros(labels_of(row).shape)


def rule_batch(layout: BatchLayout | None, rows: Batch) -> BatchDict:
    """Returns one of the rows, with new labels on a few positions that tell the rules apart.

    One label is on the first position, and one on a position that loses its attention, because only some rules count
    these. All labels are the same token. If the model were sure of all labels, there would be no gradient. It may be
    sure of the row's own labels, but hardly of one token at several positions. If the layout is unknown, the first row
    gets the labels, and the other rows stay in the batch, without labels.
    """
    if layout is not None:
        rows = layout.select(rows, [_row_for_rule(layout, rows)])
    labels = labels_of(rows)
    mask = rows.get('attention_mask')
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        mask = None
    label_columns = _columns_for_labels(layout, rows, mask)
    new_labels = torch.full_like(labels, IGNORE_INDEX)
    # Only the unshifted rule counts the label of the first position.
    new_labels[0, [0, *label_columns]] = _any_token(rows)
    changed = {**rows, 'labels': new_labels}
    if mask is not None and len(label_columns) > 1:
        # Some rules do not count the last label if its position is not attended.
        new_mask = mask.clone()
        new_mask[0, label_columns[-1]] = 0
        changed['attention_mask'] = new_mask
    return changed


def _columns_for_labels(layout: BatchLayout | None, rows: Batch, mask: Tensor | None) -> list[int]:
    """Returns the columns after the first one on which :func:`rule_batch` puts labels, at least one.

    They are the last columns at which the first row has labels. If it has fewer than two, they are its last attended
    columns with text. ``mask`` is the attention mask; None: every column is attended.
    """
    # Labels on padding cannot show the rule: in a model that counts only attended labels, the loss would be NaN.
    has_label = LossRule.CAUSAL_ATTENDED.mask(rows)[0]
    columns = has_label.nonzero().flatten()
    if len(columns) < 2:
        first_row = labels_of(rows)[0]
        is_attended = torch.ones_like(first_row, dtype=torch.bool) if mask is None else mask[0] != 0
        is_attended[0] = False  # the first column gets a label in any case
        columns = is_attended.nonzero().flatten()
        columns = _text_columns_of_last_row(layout, rows, columns)
        if not len(columns):  # a row of one token
            return [len(first_row) - 1]
    return columns[-MAX_NEW_LABELS:].tolist()


def _row_for_rule(layout: BatchLayout, rows: Batch) -> int:
    """Returns the number of a row with enough labels, and with media if possible, because some models need media."""
    num_labels = LossRule.CAUSAL_ATTENDED.mask(rows).sum(dim=1).tolist()
    num_media = layout.media_per_row(rows)

    def fitness(row: int) -> tuple[int, bool]:
        return min(num_labels[row], MAX_NEW_LABELS), num_media[row] > 0

    return max(range(len(num_labels)), key=fitness)


def _any_token(rows: Batch) -> int:
    """Returns a token of the model's vocabulary: a label of the rows, else one of their ids, else 0."""
    labels = labels_of(rows)
    tokens = labels[labels != IGNORE_INDEX]
    if not tokens.numel():
        tokens = rows.get('input_ids', torch.zeros(1)).flatten()
    return int(tokens[-1])


def _columns(is_marked: Tensor) -> list[int]:
    """Returns the columns of the first eight marked entries, for a message. An entry is marked if it is not 0."""
    return is_marked.nonzero()[:8, 1].tolist()


# The rows of a check.


def media_as_collated(
    layout: BatchLayout,
    batch: Batch,
    rows: Sequence[int],
) -> dict[int, BatchDict]:
    """Returns the media of some rows, padded as in the microbatch that the loader has collated, by place in ``rows``.

    Leaves out a row if its media are padded to the same size in the whole batch. Returns an empty dict if the loader
    has not collated several microbatches.
    """
    microbatches = microbatches_of(batch)
    if len(microbatches) < 2:
        return {}
    # For each row of the batch, the microbatch that holds it, and its number there.
    sources: list[tuple[Batch, int]] = []
    for microbatch in microbatches:
        for number in range(num_rows(microbatch)):
            sources.append((microbatch, number))
    collated: dict[int, BatchDict] = {}
    for place, row in enumerate(rows):
        microbatch, number = sources[row]
        row_batch = layout.select(without_row_counts(microbatch), [number])
        if _has_media_of_other_size(layout, row_batch, batch):
            collated[place] = {key: row_batch[key] for key in media_entries(layout, row_batch)}
    return collated


def _has_media_of_other_size(layout: BatchLayout, row_batch: Batch, batch: Batch) -> bool:
    """Returns whether media of a row, as the loader padded them in its microbatch, have another size in the batch."""
    for key, entry in media_entries(layout, row_batch).items():
        # An entry with `seq_dims` is a mask with a value for each token. Its width is the one of the text, so it does
        # not tell the size of the media.
        if not entry.seq_dims and row_batch[key].shape[1:] != batch[key].shape[1:]:
            return True
    return False


def _ids_at_labels(batch: Batch) -> Tensor | None:
    """Returns the ids of the text, or None if the labels are not at the positions of these ids."""
    if labels_at_text(batch) is None:
        return None
    return batch.get('input_ids')


def _can_show_rule(batch: Batch) -> bool:
    """Returns whether a row of the batch can show the loss rule, because it has two tokens or more."""
    for microbatch in microbatches_of(batch):
        num_tokens = real_positions(microbatch).sum(dim=1)
        if (num_tokens > 1).any():
            return True
    return False


def _with_labels(layout: BatchLayout, batch: BatchDict) -> BatchDict:
    """Adds labels to the rows of a check, because a leak may show only at some tokens.

    A row without any label gets one on its last token: if possible a label of another row, because its own token may be
    a placeholder. Rows with a label get more of them, on every token after the first, but two kinds stay as they are:
    rows with media, because a model may not count labels at placeholders, and the row with the longest prompt (the most
    tokens without a label), to show a loss term over positions without a label.
    """
    ids = _ids_at_labels(batch)
    if ids is None:
        return batch
    labels = batch['labels'].clone()
    real = real_positions(batch)
    num_media = layout.media_per_row(batch)
    num_unlabelled = (real & (labels == IGNORE_INDEX)).sum(dim=1)
    longest_prompt = int(num_unlabelled.argmax())
    given_labels = labels[labels != IGNORE_INDEX]  # of all rows
    for row in range(len(labels)):
        columns = real[row].nonzero().flatten()[1:]  # of all tokens but the first
        labels_after_first = labels[row, 1:]
        given_in_row = labels_after_first[labels_after_first != IGNORE_INDEX]
        if not len(given_in_row):
            last_column = columns[-1:]  # empty if the row has one token
            if len(given_labels):
                labels[row, last_column] = given_labels[-1]
            else:
                labels[row, last_column] = ids[row, last_column]
        elif not num_media[row] and row != longest_prompt:
            is_unlabelled = labels[row, columns] == IGNORE_INDEX
            # New labels repeat a label of the row. Its ids may be placeholders, for which the head has no logit.
            labels[row, columns[is_unlabelled]] = given_in_row[-1]
    return {**batch, 'labels': labels}


def _text_columns_of_last_row(layout: BatchLayout | None, rows: Batch, columns: Tensor) -> Tensor:
    """Returns those of the columns at which the last row has text, and no placeholder.

    The last row gets the new labels: it is the one that :func:`rule_batch` selects or :func:`with_unequal_row` adds. A
    model may not count labels at placeholders. If fewer than two columns are left, returns all columns, because one
    label shows little. Also returns all columns if the layout or the ids at the labels are not known.
    """
    ids = _ids_at_labels(rows)
    if layout is None or ids is None:
        return columns
    placeholders = all_placeholders(layout.config)
    is_placeholder = has_any_id(ids[-1], placeholders)
    text_columns = columns[~is_placeholder[columns]]
    if len(text_columns) < 2:
        return columns
    return text_columns


def with_unequal_row(
    layout: BatchLayout,
    rows: BatchDict,
    rule: LossRule,
) -> BatchDict:
    """Adds a copy of a row, with fewer or more labels, unless one row with labels has twice as many as another.

    If all of them had the same number, a mean over tokens would equal the mean over the means of rows, and the check
    could not tell the two losses apart.
    """
    counts = rule.mask(rows).sum(dim=1)
    has_labels = counts > 0
    counts_of_labelled = counts[has_labels].tolist()
    if not counts_of_labelled:
        return rows
    are_unequal = max(counts_of_labelled) >= 2 * min(counts_of_labelled)
    if are_unequal:
        return rows
    # Of the rows with labels the longest one is copied, because it has the most room for more labels.
    lengths = real_positions(rows).sum(dim=1)
    copied_row = int((lengths * has_labels).argmax())
    extended = layout.select(rows, [*range(len(counts)), copied_row])
    return {**extended, 'labels': _with_unequal_last_row(layout, extended, rule)}


def _with_unequal_last_row(layout: BatchLayout, rows: Batch, rule: LossRule) -> Tensor:
    """Returns the labels of some rows, with fewer labels in the last row if it has several, else with more."""
    labels = rows['labels'].clone()
    has_loss = rule.mask(rows)[-1]
    counted_columns = has_loss.nonzero().flatten().tolist()
    if len(counted_columns) > 1:
        # The row keeps only the last of its labels.
        labels[-1, counted_columns[:-1]] = IGNORE_INDEX
    elif _ids_at_labels(rows) is not None:
        # The row gets more labels, but not on its first token, which padding may predict. They repeat its only label,
        # because its ids may be placeholders. Without a config it is not known which tokens are placeholders, but most
        # rows have them before their text. So only the last tokens get a label.
        is_real = real_positions(rows)[-1]
        columns = is_real.nonzero().flatten()[1:]
        columns = _text_columns_of_last_row(layout, rows, columns)
        labels[-1, columns[-MAX_NEW_LABELS:]] = int(labels[-1, counted_columns[0]])
    return labels


# Hooks on parameters.


def check_gradient_hooks(model: torch.nn.Module) -> None:
    """Checks that hooks on parameters are linear, because a step adds up the gradients of its microbatches.

    Raises:
        RuntimeError: If a hook is not linear (clipping, quantising), or if an optimizer steps in the backward.
    """
    for name, parameter in model.named_parameters():
        if hooks_after_gradients(parameter):
            raise NotExactError(
                'Optimizers must step once a batch, got: a `register_post_accumulate_grad_hook` on '
                f'{name!r}. Give the optimizer to the Trainer (docs/errors.md#gradient-hooks).'
            )
        for hook in gradient_hooks(parameter):
            if not _is_linear(hook, parameter):
                raise NotExactError(
                    f'Gradient hooks must be linear, got: {hook} on {name!r}. Clip in '
                    'the algorithm `gradient_clipping`, which sees the whole step (docs/errors.md#gradient-hooks).'
                )


def _is_linear(hook: GradientHook, parameter: Tensor) -> bool:
    """Returns whether a hook is linear: its result for a sum of gradients is the sum of its results.

    Calls the hook with random gradients.
    """
    generator = torch.Generator().manual_seed(0)
    # Under FSDP a hook gets the part of the gradient that this rank holds.
    local = parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
    for size in GRADIENT_SIZES:
        noise = 2 * torch.rand(2, *local.shape, generator=generator) - 1  # no entry exceeds the size
        first, second = noise.to(local) * size
        changed_sum = _changed(hook, first + second)
        sum_of_changed = _changed(hook, first) + _changed(hook, second)
        difference = (changed_sum - sum_of_changed).float()
        expected_norm = float(sum_of_changed.float().norm())
        # 1e-4 is the larger number in float32. Half precision rounds more than that.
        tolerance = max(1e-4, 8 * torch.finfo(first.dtype).eps)
        if float(difference.norm()) > tolerance * expected_norm:
            return False
    return True


def _changed(hook: GradientHook, gradient: Tensor) -> Tensor:
    """Returns a gradient as the hook changes it."""
    copied = gradient.clone()
    changed = hook(copied)
    # A hook that returns nothing may have written into the gradient that it got.
    return copied if changed is None else changed
