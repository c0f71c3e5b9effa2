# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split of a device batch into trimmed microbatches under a token budget.

Each step :class:`MicrobatchSplit` goes from tensors to numbers and back. Take three rows that are padded to 90 tokens:

1. :class:`.RowFacts`, here called facts, describe the batch: its rows have 20, 90 and 30 tokens, with padding on the
   left. ``facts_of_batches`` is a list. A device batch has one entry. A pre-split batch, whose microbatches the loader
   has planned and collated itself, has one entry for each of these microbatches.
2. A :class:`.Piece` names the rows of a microbatch and their widths: rows 0 and 2, of 20 and 30 tokens. The caps, such
   as the most tokens of a microbatch, decide which rows share a piece. :class:`.CutRules`, here called rules, say how
   much padding each row loses.
3. A microbatch is made of each piece: 2 rows of 30 tokens.

On several ranks dummy rows and empty microbatches are added, so that no rank waits forever for another.

A split belongs to a loader. It may serve several fits, one after the other:

1. :meth:`MicrobatchSplit.start` takes the model of the fit.
2. The first-batch check tries the rules that :meth:`MicrobatchSplit.candidates` yields on some rows. The first
   exact ones go to :meth:`MicrobatchSplit.adopt`. The check runs again if a step has rows unlike those.
3. Each step calls the split.
4. :meth:`MicrobatchSplit.stop` ends the fit.

The functions at the end of the file find the split of a loader, and the layout of a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from composer_tokacc.arguments import check_kind
from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, BatchDict, Reach, labels_of, sample_name
from composer_tokacc.checks.cut_rules import CutRules, padded_candidates
from composer_tokacc.checks.step import Step
from composer_tokacc.collectives import (
    all_gather_object,
    from_first_rank_with_value,
    get_world_size,
    max_over_ranks,
    raise_on_all_ranks,
)
from composer_tokacc.compat import is_encoder_decoder
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.pieces import (
    DummyRows,
    Piece,
    add_rows,
    build,
    missing_dummies,
    smallest_row,
    trimmed_dummy,
)
from composer_tokacc.layout import BatchLayout, PreSplitBatch, RowFacts, describe, describe_all, microbatches_of
from composer_tokacc.layout.facts import COLLATED_BY_LOADER, check_first_labels
from composer_tokacc.layout.layout import inferred_layout, layout_of_model
from composer_tokacc.layout.readings import Reading
from composer_tokacc.planning import CutOptions, cut_rows, pack_lengths, padded_widths, token_budget
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.row_counts import row_counts_of, without_row_counts

log = logging.getLogger(__name__)

RULES_WITHOUT_CHECK = CutRules(right=sys.maxsize)
"""Without the first-batch check only padding on the right is trimmed, because no causal model can see it. Trimming on
the left may change positions."""


class _LoaderBudget(NamedTuple):
    """The token budget of a loader that plans microbatches, and the microbatch size that it belongs to."""

    max_tokens: int
    microbatch_size: float

    def at(self, microbatch_size: float) -> int:
        """Returns the share of the budget that a microbatch gets at another microbatch size.

        At half the size it is half of the budget. At the size of the budget, planned microbatches just fit.
        """
        share = microbatch_size / self.microbatch_size
        return int(self.max_tokens * share)


class MicrobatchSplit:
    """Composer's ``split_batch``.

    A microbatch size of ``k`` means the memory of ``k`` slots, each for one row of ``options.slot_tokens`` tokens.

    Args:
        dataloader: The loader whose batches are split. The algorithm finds the split by its loader.
        layout: How tensors belong to rows: the user's layout, or the layout of ``model=``. None: :meth:`start` finds
            one for the fit. If it is not called, each call of the split infers one from its batch.
        options: The caps, and how to cut under them.
        microbatch_transforms: The user's own transforms of a microbatch on the device.
    """

    def __init__(
        self,
        dataloader: Any,
        layout: BatchLayout | None,
        options: CutOptions,
        microbatch_transforms: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.options = options
        self.fixed_layout = layout
        """The layout of the arguments. It holds for every model and batch."""
        self.layout = layout
        """The layout that is used now. None: each call infers it from its batch."""
        self.rules = RULES_WITHOUT_CHECK
        """How rows are cut. After a fit they can still be read, until a batch is split without a check."""
        self.checked = False
        """Whether the rules come from the first-batch check."""
        self.eval_rule: LossRule | None = None
        """The loss rule of a model that is evaluated. The DataSpec counts batches by it, see :func:`.with_counts`."""
        self.step: Step | None = None
        """The step whose batch is split next. The algorithm sets it; None: there is no algorithm."""
        self._loader_budget: _LoaderBudget | None = None
        """None: no batch of a loader that plans microbatches was seen yet. See :meth:`_note_loader_budget`."""
        self._microbatch_transforms = microbatch_transforms
        self._model: torch.nn.Module | None = None
        self._attention: DocumentAttention | None = None
        # Whether the first-batch check should try to pack rows: from start() until packing has failed on some rows, or
        # rules are adopted.
        self._tries_packing = False
        self._has_loss_in_dummies = False
        self._has_warned_of_dummies = False

    # Called by the algorithm. Without one, `CountingDataSpec` calls start() if the user gave it the model.

    def start(
        self,
        model: torch.nn.Module,
        batch: Batch,
        microbatch_size: float,
    ) -> None:
        """Begins a fit of a model whose rules are not known yet, and decides whether to try packing. A collective.

        Forgets the model of an earlier fit. Finds a layout if none was given, see :func:`layout_on_ranks`.

        Args:
            model: The model that is trained.
            batch: The first batch of this rank.
            microbatch_size: The ``device_train_microbatch_size``.
        """
        self.stop()
        self._model = model
        layout = self.fixed_layout or layout_on_ranks(model, batch)
        self.layout = layout
        self.rules = CutRules()  # the first-batch check begins with rules that trim nothing
        self._note_loader_budget(batch, microbatch_size)
        self._tries_packing = self.options.packing is True
        if self.options.packing == 'auto':
            facts_of_batches = describe_all(layout, batch)
            self._tries_packing = self._packing_costs_less(facts_of_batches, microbatch_size)

    def start_evaluation(self, model: torch.nn.Module, rule: LossRule | None) -> None:
        """Takes the loss rule of a model that is evaluated, and its layout. ``rule`` is None if it is not known.

        The layout stays as it is if the loader also serves the training that goes on, which has checked it.
        """
        self.eval_rule = rule
        if self.checked:
            return
        self.layout = self.fixed_layout or layout_of_model(model)

    def stop(self) -> None:
        """Forgets the model, and restores its attention. The next run may have another model, or no algorithm."""
        self._set_attention('')
        self._model = None
        self.layout = self.fixed_layout
        self.checked = False
        self.step = None
        self._has_loss_in_dummies = False

    def _packing_costs_less(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> bool:
        """Returns whether packing the batches of all ranks costs less than padding them; a collective."""
        lengths = np.array(_lengths_of(facts_of_batches))
        budget = self._budget(facts_of_batches, microbatch_size, widest_row=int(lengths.max()))
        cost = self.options.cost
        packed_cost = 0.0
        for rows in pack_lengths(lengths, budget):
            lengths_of_documents = lengths[rows].tolist()
            packed_cost += cost.packed(lengths_of_documents)  # this includes the launch
        batch_width = max(facts.width for facts in facts_of_batches)
        widths = padded_widths(lengths, self.options.width_multiple, min(budget, batch_width))
        # The token budget is the only cap here: loss tokens cannot be counted until the first-batch check has found the
        # loss rule. The widths are rounded up to `width_multiple` already, so the cut must not round them.
        options = replace(self.options.without_caps(), max_tokens=budget, packing=False, width_multiple=1)
        padded_cost = 0.0
        for rows in cut_rows(widths, options):
            # Padding makes each row of a microbatch as expensive as the widest.
            row_costs = cost.rows(widths[rows])
            widest_cost = float(row_costs.max())
            padded_cost += len(rows) * widest_cost + cost.launch
        savings = all_gather_object(padded_cost - packed_cost)
        return sum(savings) > 0

    # Called by the first-batch check.

    def adopt(self, rules: CutRules, layout: BatchLayout | None, *, has_loss_in_dummies: bool = False) -> None:
        """Cuts by these rules from now on, because the first-batch check has found them to be exact.

        The model gets the attention that packed rows need, or its own one if the rules do not pack.

        Args:
            rules: The rules.
            layout: How tensors belong to rows. The check learns this from each batch.
            has_loss_in_dummies: Whether dummy rows add to a mean over tokens. If so, steps that need some are refused.
        """
        if self.checked and self.packs_rows and not rules.packing:
            log.warning(
                'A row of this batch cannot be packed, so all rows are padded from now on. The log at level INFO says '
                'why (docs/packing.md).'
            )
        self.rules = rules
        self.layout = layout
        self.checked = True
        self._tries_packing = False
        self._has_loss_in_dummies = has_loss_in_dummies
        self._set_attention(rules.packing)

    def largest_packed_row(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of a batch can have; 0: its rows are not packed.

        The check packs rows of this length, because a model may compute long rows in another way.
        """
        may_pack = self.packs_rows or self._tries_packing
        if not facts_of_batches or not may_pack:  # without a layout there are no facts
            return 0
        lengths = _lengths_of(facts_of_batches)
        longest_row = max(lengths)  # a row over the budget is packed alone
        budget = self._budget(facts_of_batches, microbatch_size, widest_row=longest_row)
        largest_group = min(budget, sum(lengths))
        return max(largest_group, longest_row)

    def _note_loader_budget(self, batch: Batch, microbatch_size: float) -> None:
        """Notes the token budget of a loader that plans microbatches, and the microbatch size that it belongs to.

        This is the size of the first batch. If memory runs out, Composer halves the size, and :meth:`_budget` halves
        the budget with it. Both numbers are kept for later fits, which may begin with the smaller size.
        """
        if self._loader_budget is None and isinstance(batch, PreSplitBatch) and microbatch_size > 0:
            self._loader_budget = _LoaderBudget(batch.max_tokens, microbatch_size)

    def _budget(self, facts_of_batches: Sequence[RowFacts], microbatch_size: float, *, widest_row: int) -> int:
        """Returns the most tokens of a microbatch: microbatch size times slot, or a share of the loader's budget.

        Both have room for the text of a decoder, if there is one.

        Args:
            facts_of_batches: Facts of the batch, or of each of its microbatches.
            microbatch_size: The ``device_train_microbatch_size``.
            widest_row: Columns that the widest row keeps. Only used to raise the loader's budget so that this row fits.
                The width of the batch may be far greater, if the collator pads all rows to one width.
        """
        decoder_width = max(facts.decoder_width for facts in facts_of_batches)
        if self.options.slot_tokens is None and self._loader_budget is not None:
            # The loader's budget leaves out the text of a decoder, but a microbatch counts it.
            budget = self._loader_budget.at(microbatch_size) + token_budget(microbatch_size, decoder_width)
            largest_row = widest_row + decoder_width
            budget = max(budget, largest_row)  # so that a single row always fits
            # The loader's budget may be the largest integer already, and the planner takes no larger one.
            return min(budget, sys.maxsize)
        width = self.options.slot_tokens or max(facts.width for facts in facts_of_batches)
        return token_budget(microbatch_size, width + decoder_width)

    @property
    def must_pack(self) -> bool:
        """Whether the run stops if rows cannot be packed. With ``'auto'`` it goes on with padded rows."""
        return self.options.packing is True

    def candidates(self, facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
        """Yields the rules to try on these rows, cheapest first. ``earlier`` are the rules found on other rows.

        Packing comes first, if rows may be packed. If the earlier rules pack, only their kind of packing is tried.
        Otherwise it is tried by documents, and by positions if the run must pack. A run that need not pack then tries
        rules without packing, which :func:`.padded_candidates` makes of the earlier ones.

        The check stops at the first rules that are exact. So the code after a ``yield`` only runs if these rules have
        failed. In this way the split learns that packing has failed, and does not try it again.
        """
        if earlier.packing or self._tries_packing:
            yield replace(earlier, packing=earlier.packing or 'documents')
            if self.must_pack and not earlier.packing:
                yield replace(earlier, packing='positions')
            # All packing has failed on these rows.
            if self.must_pack:
                return
            self._tries_packing = False
        # Some models number tokens behind a hole (Qwen2-VL), or labelled padding (Qwen3-VL), in another way if any row
        # of the batch has media. If none of these rows has media, the check cannot see this, but rows of another rank
        # may have media. So if one of these rows has a hole or labelled padding, the rules add a dummy row with media
        # to each microbatch without media.
        if get_world_size() > 1 and self._may_have_media and not any(facts.media):
            may_depend = any(facts.has_hole) or any(facts.has_unattended_label)
            earlier = replace(earlier, needs_media=earlier.needs_media or may_depend)
        yield from padded_candidates(facts, earlier)

    def assemble(self, facts: RowFacts, rows: Sequence[int], rules: CutRules) -> BatchDict:
        """Returns the microbatch of some rows, cut and packed by the rules. The check computes its gradient.

        If the rules pack, it also changes the model's attention. :meth:`adopt` undoes that if its rules do not pack.
        """
        coupling = facts.layout.family.coupling
        if rules.packing:
            if coupling:
                # Part of a sentence: the check says in its own message that rows cannot be packed, and why.
                raise NotExactError(f'rows that are not independent: {coupling}')
            self._set_attention(rules.packing)
        options = self.options.without_caps()
        if not rules.packing:
            # The width is not rounded up, so that the check sees a row without any padding, as training may have one. A
            # single pad may matter, because the last token may see the next column (MobileBERT).
            options = replace(options, width_multiple=1)
        all_rows = Piece.from_facts(facts, rules, options)
        piece = all_rows.take(rows)
        if rules.needs_media:
            dummies = _dummies_of_first_modality([facts])
            (piece,) = with_dummies([piece], dummies)  # no caps, so the piece fits and is not halved
        (microbatch,) = build([piece], self._attention)
        return without_row_counts(microbatch)

    # The model.

    def for_model(self, batch: Any) -> Any:
        """Returns a microbatch on the device after the user's transforms, with a dummy image if the model needs one."""
        if self._microbatch_transforms is not None:
            batch = self._microbatch_transforms(batch)
            check_kind('microbatch_transforms', batch, Mapping)
        return batch if self.layout is None else self.layout.with_media(batch)

    def _set_attention(self, packing: str) -> None:
        """Changes the model's attention for packed rows; ``packing`` says how they are packed, see ``CutRules``.

        If ``packing`` is empty, the model gets its own attention back.
        """
        current = '' if self._attention is None else self._attention.packing
        if packing == current:
            return
        if self._attention is not None:
            self._attention.undo()
        self._attention = None
        if packing and self._model is not None:
            self._attention = DocumentAttention(self._model, packing)

    # The split.

    @property
    def packs_rows(self) -> bool:
        """Whether a microbatch's rows become one packed row."""
        return bool(self.rules.packing)

    def __call__(self, batch: Batch, microbatch_size: int | float) -> list[BatchDict]:
        """Returns the microbatches of a batch, and stores them in the step. In training all ranks call it together.

        In training they are cut under the caps, and ``microbatch_size`` stands for memory, see the class. In evaluation
        (no gradients) rows keep their order, and ``microbatch_size`` counts rows.
        """
        if microbatch_size <= 0:
            raise InvalidInputError(f'`device_train_microbatch_size` must be positive, got: {microbatch_size}.')
        if not self.checked:
            self.rules = RULES_WITHOUT_CHECK  # forgets the rules of an earlier fit
        is_evaluation = not torch.is_grad_enabled()
        layout = self.layout
        if layout is None:
            layout = inferred_layout(microbatches_of(batch))
            # Not a collective in evaluation, where ranks may have unequal numbers of batches.
            if not is_evaluation:
                layout = largest_of_ranks(layout)
        if is_evaluation:
            num_rows = max(int(microbatch_size), 1)  # the size may be less than 1
            return self._split_in_order(layout, batch, num_rows)
        self._note_loader_budget(batch, microbatch_size)
        # From here on facts and pieces stand for the batch, until build() makes the microbatches.
        facts_of_batches = self._describe(layout, batch)
        _check_decoder_padding(facts_of_batches)
        kept_plan: PreSplitBatch | None = None  # the batch, if its microbatches are used as far as they fit
        if isinstance(batch, PreSplitBatch):
            if self._must_join(facts_of_batches):
                facts_of_batches = [self._joined(layout, batch, facts_of_batches)]
            else:
                kept_plan = batch
            _check_all_first_labels(facts_of_batches, COLLATED_BY_LOADER)
        self._check_packing(facts_of_batches)
        widest_row = max(max(self.rules.widths(facts)) for facts in facts_of_batches)
        budget = self._budget(facts_of_batches, microbatch_size, widest_row=widest_row)
        options = replace(self.options, max_tokens=budget)
        pieces = self._cut(facts_of_batches, options, kept_plan)
        dummies = self._dummy_rows(facts_of_batches)
        pieces = with_dummies(pieces, dummies)
        self._check_dummies(pieces)
        self._warn_of_dummies(pieces)
        microbatches = build(pieces, self._attention)
        num_empty = self._num_microbatches(len(pieces)) - len(pieces)
        if num_empty:
            microbatches += [_empty_microbatch(facts_of_batches, dummies)] * num_empty
        if self.step is not None:
            self.step.planned = microbatches
        return microbatches

    def _split_in_order(self, layout: BatchLayout, batch: Batch, size: int) -> list[BatchDict]:
        """Returns microbatches of at most ``size`` rows, in order, trimmed but not packed.

        The order must stay. In evaluation, if the last of ``n`` rows is a repeated sample, Composer drops it by
        ``split_batch(microbatch, n - 1)[0]``. Each microbatch of a pre-split batch is cut by itself.
        """
        rules = replace(self.rules, packing='')
        options = self.options.without_caps()
        pieces = []
        for facts in describe_all(layout, batch):
            all_rows = Piece.from_facts(facts, rules, options)
            num_rows = len(all_rows.rows)
            for start in range(0, num_rows, size):
                end = min(start + size, num_rows)
                pieces.append(all_rows.take(range(start, end)))
        return build(pieces)

    def _describe(self, layout: BatchLayout, batch: Batch) -> Sequence[RowFacts]:
        """Returns the facts of the batch, or of each of its microbatches. Uses the step's facts if they still hold."""
        microbatches = microbatches_of(batch)
        if self.step is None or len(self.step.facts) != len(microbatches):
            return describe_all(layout, batch)
        for facts, microbatch in zip(self.step.facts, microbatches, strict=True):
            if not facts.describes(layout, microbatch):
                return describe_all(layout, batch)
        return self.step.facts

    def _must_join(self, facts_of_batches: Sequence[RowFacts]) -> bool:
        """Returns whether the microbatches of a pre-split batch are joined to one batch and cut again.

        If not, each of them is used as it is, or cut by itself.

        The loader has padded each microbatch to its own widest row. In one batch all rows would be padded to the widest
        row of all. So a microbatch that is used as it is has less padding than in one batch. This is exact only if the
        rules trim such padding.
        """
        if not self.options.regroup:
            return True  # rows are cut in order, as in any other batch, and not as the loader has planned
        if self.packs_rows:
            return True  # without padding other rows fit into a microbatch than the loader has planned
        if _width_matters(facts_of_batches):
            return True  # the rotary embedding must see the width that one batch would have
        padded_sides = {facts.side for facts in facts_of_batches if facts.is_padded}
        if len(padded_sides) == 2:
            return True  # the sides have no common rule
        if any(any(facts.has_label_behind_padding) for facts in facts_of_batches):
            return True  # a pad predicts a label
        # If no microbatch has padding, the narrower ones would be padded on the right in one batch.
        side = 'left' if 'left' in padded_sides else 'right'
        # Rules trim all batches up to a width. So if they trim the widest microbatch, they trim the others, too. The
        # widest one may have no padding, and then its facts name the wrong side.
        widest = max(facts_of_batches, key=lambda facts: facts.width)
        return not self.rules.trims(replace(widest, side=side))

    def _joined(
        self,
        layout: BatchLayout,
        pre_split: PreSplitBatch,
        facts_of_batches: Sequence[RowFacts],
    ) -> RowFacts:
        """Returns the facts of one batch of all rows of a pre-split batch.

        Raises ValueError if joining would change a loss. This may happen if rows are padded on the left, because the
        rows of narrower microbatches get more padding there, which may move positions.
        """
        for facts in facts_of_batches:
            if facts.side == 'left' and self.rules.depends_on_left_padding(facts):
                raise InvalidInputError(
                    'Rows must be padded on the right in microbatches that a loader has collated if the model counts '
                    f'positions from the first column, got: {sample_name(facts.batch, 0)} in a microbatch padded on '
                    'the left. Pad on the right, or give `position_ids` (docs/errors.md#padding).'
                )
        return describe(layout, pre_split.joined(layout))

    def _check_packing(self, facts_of_batches: Sequence[RowFacts]) -> None:
        """Raises if rows should be packed, but nothing shows that this is exact, or it is not exact for these rows."""
        if self.options.packing and not self.checked:
            raise NotExactError(
                f'`packing={self.options.packing!r}` needs TokenAccumulation, which checks that the model tells packed '
                'documents apart. This run has made no such check. Add TokenAccumulation to `algorithms` (without '
                '`accumulate_train_batch_on_tokens`), or set `packing=False`.'
            )
        if not self.packs_rows:
            return
        _check_all_first_labels(facts_of_batches, 'packed rows')
        if _width_matters(facts_of_batches):
            width_limit = facts_of_batches[0].layout.width_limit
            widest = max(facts.width for facts in facts_of_batches)
            raise NotExactError(
                f'Rows must not be wider than {width_limit} tokens for `packing=True`, got: {widest}. In wider rows '
                'the rotary embedding of this model depends on the width, and packing changes the width. Set '
                '`packing=False`, which keeps the width.'
            )

    def _cut(
        self,
        facts_of_batches: Sequence[RowFacts],
        options: CutOptions,
        kept_plan: PreSplitBatch | None,
    ) -> list[Piece]:
        """Returns pieces under the caps. For a row that is over a cap by itself see :meth:`.Piece.check_caps`.

        Each microbatch of ``kept_plan`` stays as it is if it fits. On several ranks repeated samples are left out. The
        list may then be empty.
        """
        pieces: list[Piece] = []
        has_ranks = get_world_size() > 1
        for number, facts in enumerate(facts_of_batches):
            piece = Piece.from_facts(facts, self.rules, options)
            indices = None
            if kept_plan is not None and kept_plan.indices is not None:
                indices = kept_plan.indices[number]
            piece.check_caps(indices)
            if has_ranks:
                # A sampler may repeat samples of other ranks, so that every rank has some, or equally many. Repeated
                # samples have no weight, so they are left out. If no row remains, the rank makes an empty microbatch.
                counts = row_counts_of(facts.batch)
                samples = [row for row in piece.rows if counts[row].samples > 0]
                piece = piece.take(samples)  # the piece has all rows, so the place of a row is its number
            if not piece.rows:
                continue
            if kept_plan is not None and piece.fits:
                pieces.append(piece)
            else:
                pieces += piece.cut()
        return pieces

    # Several ranks in step: all of them use the same encoders, and make equally many microbatches if they must.
    #
    # FSDP gathers the weights of an encoder in every microbatch, and hangs if one rank leaves the encoder unused. DDP
    # waits for the gradients of an encoder when it reduces them. In most runs it reduces only in the last microbatch,
    # and there `ReductionWatch` (algorithm/reduction.py) gives it zeros if the encoder was unused.

    def _dummy_rows(self, facts_of_batches: Sequence[RowFacts]) -> DummyRows:
        """Returns the dummy rows that microbatches get if they lack media; with several ranks a collective."""
        needs_media = self.rules.needs_media
        if get_world_size() == 1:
            return _dummies_of_first_modality(facts_of_batches) if needs_media else {}
        # If DDP reduces only once, it does not wait for an unused encoder.
        if self._may_have_media and (needs_media or not self._reduces_once):
            return _dummies_of_ranks(facts_of_batches)
        return {}

    @property
    def _reduces_once(self) -> bool:
        """Whether DDP reduces gradients only in the last microbatch of a step; False without an algorithm.

        If so, ranks may leave an encoder unused and make different numbers of microbatches. The algorithm watches DDP,
        and gives it zero gradients for the parameters of an unused encoder.
        """
        return self.step is not None and self.step.reduces_once

    @property
    def _may_have_media(self) -> bool:
        """Whether rows of some rank may have media. All ranks agree, because the check gives them the same layout."""
        layout = self.layout
        if layout is None:
            return True
        may_be_media = any(Reading.MEDIA in possible for possible in layout.readings.values())
        # Any entry that the user has registered counts, although it may not be of media. Then the ranks only exchange
        # flags for nothing.
        return bool(layout.family.media or layout.extra or may_be_media)

    def _num_microbatches(self, num_pieces: int) -> int:
        """Returns how many microbatches this rank makes, with empty ones; a collective if all ranks make as many."""
        num_microbatches = max(num_pieces, 1)
        must_be_equal = self.options.equal_counts
        if must_be_equal == 'auto':
            must_be_equal = not self._reduces_once
        if must_be_equal and get_world_size() > 1:
            (num_microbatches,) = max_over_ranks([num_microbatches])
        return num_microbatches

    def _check_dummies(self, pieces: Sequence[Piece]) -> None:
        """Raises RuntimeError if a microbatch has dummy rows, and they would add to a mean over tokens.

        If the first-batch check has found that they add to it, this is a collective, so that all ranks refuse the step.
        """
        if not self._has_loss_in_dummies:
            return
        pieces_with_dummies = [piece for piece in pieces if piece.dummies]
        refusal = None
        if pieces_with_dummies:
            piece = pieces_with_dummies[0]
            refusal = NotExactError(
                "The model's own loss must be the mean over its loss-generating tokens, got: a term in rows "
                f'without labels. {sample_name(piece.facts.batch, piece.rows[0])} must be computed together with '
                'such a row, which has media because other rows or ranks of the step have some. Multiply what a '
                'row adds to the term by `(labels != -100).any(dim=1)` (docs/errors.md#model-loss).'
            )
        raise_on_all_ranks(refusal)

    def _warn_of_dummies(self, pieces: Sequence[Piece]) -> None:
        """Warns of a row that does not fit under the caps together with its dummy rows; only once for this split."""
        if self._has_warned_of_dummies:
            return
        for piece in pieces:
            # A piece that does not fit has one row, because with_dummies() halves others.
            if piece.dummies and not piece.fits:
                self._has_warned_of_dummies = True
                log.warning(
                    '%s must fit into a microbatch together with its dummy rows, which have media because other rows '
                    'or ranks of the step have some, got: %d tokens and dummy rows of %s tokens, over the caps of %d '
                    'and %s image tokens (None: no cap). They are computed over the cap. Raise it.',
                    sample_name(piece.facts.batch, piece.rows[0]),
                    piece.widths[0],
                    [row.width for row in piece.dummies],
                    piece.options.max_tokens,
                    piece.options.max_image_tokens,
                )
                return


def _width_matters(facts_of_batches: Sequence[RowFacts]) -> bool:
    """Returns whether some rows are so wide that the model's rotary embedding depends on the width of the batch."""
    return any(facts.layout.width_matters(facts.batch) for facts in facts_of_batches)


def _lengths_of(facts_of_batches: Sequence[RowFacts]) -> list[int]:
    """Returns the lengths of all rows, see :attr:`.RowFacts.lengths`."""
    lengths: list[int] = []
    for facts in facts_of_batches:
        lengths += facts.lengths
    return lengths


def _dummies_of_ranks(facts_of_batches: Sequence[RowFacts]) -> DummyRows:
    """Returns a dummy row of each modality that some rank has; a collective.

    If the model takes only one kind of media in a forward, only the first of them gets a dummy row. A dummy row is a
    copy of this rank's smallest row with the modality. If this rank has none, another rank sends one.
    """
    layout = facts_of_batches[0].layout
    rows_of_rank: dict[str, Batch | None] = {}
    for modality in MODALITIES:
        rows_of_rank[modality] = smallest_row(facts_of_batches, modality)
    has_modality = [row is not None for row in rows_of_rank.values()]
    lacks_modality = [row is None for row in rows_of_rank.values()]
    flags = max_over_ranks([*has_modality, *lacks_modality])  # one collective for both
    some_rank_has = flags[: len(MODALITIES)]
    some_rank_lacks = flags[len(MODALITIES) :]
    dummies: dict[str, RowFacts] = {}
    for number, (modality, row) in enumerate(rows_of_rank.items()):
        if not some_rank_has[number]:
            continue
        if some_rank_lacks[number]:
            shared_row = from_first_rank_with_value(row)  # a collective, so ranks that have the modality call it, too
            if row is None:
                row = shared_row
        assert row is not None  # some rank has one
        dummies[modality] = describe(layout, row)
        if layout.family.one_kind:
            break
    return dummies


def _dummies_of_first_modality(facts_of_batches: Sequence[RowFacts]) -> DummyRows:
    """Returns a dummy row of the first modality that some row of this rank has.

    One modality is enough for ``CutRules.needs_media``, because text rows only depend on whether the batch has media.
    """
    for modality in MODALITIES:
        row = smallest_row(facts_of_batches, modality)
        if row is not None:
            return {modality: describe(facts_of_batches[0].layout, row)}
    return {}


def with_dummies(pieces: Sequence[Piece], dummies: DummyRows) -> list[Piece]:
    """Returns each piece with dummy rows of the modalities that it lacks.

    If a piece with its dummy rows is over a cap, it is halved until it fits or has one row.

    Raises:
        RuntimeError: If a dummy row of another rank is so wide that the rotary embedding of the piece would change.
    """
    if not dummies:
        # missing_dummies() below counts the media of each row. That is not possible for every batch, so it is not
        # called if there are no dummy rows.
        return list(pieces)
    completed: list[Piece] = []
    for piece in pieces:
        missing = missing_dummies(dummies, piece.facts, piece.rows)
        _check_rotary_limit(piece.facts, missing)
        with_missing = replace(piece, dummies=missing)
        num_rows = len(piece.rows)
        if num_rows > 1 and missing and not with_missing.fits:
            middle = num_rows // 2
            halves = [piece.take(range(middle)), piece.take(range(middle, num_rows))]
            completed += with_dummies(halves, dummies)
        else:
            completed.append(with_missing)
    return completed


def _check_rotary_limit(facts: RowFacts, dummies: Sequence[RowFacts]) -> None:
    """Raises RuntimeError if dummy rows are wider than the limit of the rotary embedding, but the batch is not.

    Then the dummy rows would change the rotary embedding of the batch's own rows.
    """
    if _width_matters([facts]) or not _width_matters(dummies):
        return
    width_limit = facts.layout.width_limit
    widest = max(dummy.width for dummy in dummies)
    raise NotExactError(
        f'Rows with media must not be wider than {width_limit} tokens on one rank if the rows of another rank are '
        f'narrower, got: {widest} and {facts.width}. The row with media is also computed on the other rank, to keep '
        'its encoder in use, and in wider rows the rotary embedding of this model depends on the width. Shorten the '
        'rows with media, or pad all rows to one width.'
    )


def _check_decoder_padding(facts_of_batches: Sequence[RowFacts]) -> None:
    """Raises ValueError if a decoder sees padding on the left that differs between microbatches of a pre-split batch.

    In one batch the narrower microbatches would have more of it. Padding on the right changes nothing, because a
    decoder looks only to the left.
    """
    if not all(_makes_decoder_ids(facts) for facts in facts_of_batches):
        return
    widths = {labels_of(facts.batch).shape[1] for facts in facts_of_batches}
    if len(widths) < 2:
        return
    # Labels that begin after the first column look padded on the left, and labels that end before the last column look
    # padded on the right. But the columns without labels may only be masked. If both occur, the text of the encoder
    # decides, because a tokenizer pads both texts on the same side.
    is_text_padded_on_left = any(facts.side == 'left' for facts in facts_of_batches)
    padded_on_left = None
    for facts in facts_of_batches:
        reach = Reach.of(labels_of(facts.batch) != IGNORE_INDEX)
        # A row with a label in the outermost column (`reach.width`), or without labels (0), shows nothing.
        ends_early = any(0 < num_columns < reach.width for num_columns in reach.from_first)
        begins_late = any(0 < num_columns < reach.width for num_columns in reach.from_last)
        if ends_early and not is_text_padded_on_left:
            return  # padded on the right
        if begins_late:
            padded_on_left = facts
    if padded_on_left is not None:
        raise InvalidInputError(
            'Labels of an encoder-decoder must be padded on the right in microbatches that a loader has collated, '
            f'got: {sample_name(padded_on_left.batch, 0)} in a microbatch with labels padded on the left. The model '
            'makes the ids of its decoder from them, so the decoder sees the padding. Pad labels on the right, or to '
            'one width (docs/errors.md#padding).'
        )


def _makes_decoder_ids(facts: RowFacts) -> bool:
    """Returns whether the model makes the ids of its decoder from the labels. Then no mask hides their padding.

    If the batch has the decoder's inputs, its labels do not show where padding is, because labels of a prompt may be
    masked.
    """
    if not is_encoder_decoder(facts.layout.config):
        return False
    inputs_of_decoder = ('decoder_input_ids', 'decoder_inputs_embeds', 'decoder_attention_mask')
    return all(facts.batch.get(key) is None for key in inputs_of_decoder)


def _check_all_first_labels(facts_of_batches: Sequence[RowFacts], kind: str) -> None:
    """Raises ValueError if a pad predicts the label of a row's first token, see :func:`.check_first_labels`."""
    rule = row_counts_of(facts_of_batches[0].batch)[0].rule
    check_first_labels(facts_of_batches, rule, kind)


def _empty_microbatch(facts_of_batches: Sequence[RowFacts], dummies: DummyRows) -> BatchDict:
    """Returns a microbatch without weight: the dummy rows, or if there are none, a copy of the shortest row."""
    if dummies:  # their weight is 0
        first_dummy, *other_dummies = [dummy.batch for dummy in dummies.values()]
        return add_rows(facts_of_batches[0].layout, first_dummy, other_dummies, 'right')
    facts = min(facts_of_batches, key=lambda candidate: min(candidate.lengths))
    shortest = facts.lengths.index(min(facts.lengths))
    return trimmed_dummy(facts, shortest)


# Which split belongs to a loader, and which layout to a run.

_SPLITS: WeakValueDictionary[int, MicrobatchSplit] = WeakValueDictionary()


def register_split(dataloader: Any, split: MicrobatchSplit) -> None:
    """Lets :func:`split_of` find the split of a loader.

    The split must hold its loader. Otherwise another loader could get the same ``id``.
    """
    _SPLITS[id(dataloader)] = split


def split_of(dataloader: Any) -> MicrobatchSplit | None:
    """Returns the split that ``token_data_spec`` made for a loader.

    An algorithm gets the loader from the trainer, but not the DataSpec. The batch cannot carry the split either,
    because before BATCH_START Composer's own algorithms clone every entry of a batch.
    """
    return _SPLITS.get(id(dataloader))


def largest_of_ranks(layout: BatchLayout) -> BatchLayout:
    """Returns the layout with the most entries. ``layout`` is inferred from the batch of this rank. A collective.

    A rank without media infers the layout of a text model, which has no entries. If there is neither an algorithm nor
    ``model=`` nor ``layout=``, this is called in every step, because each step infers its layout again.
    """
    layouts = all_gather_object(layout)
    return max(layouts, key=lambda inferred: len(inferred.family.entries))


def layout_on_ranks(model: Any, batch: Batch) -> BatchLayout:
    """Returns the layout of a model, else the one that the batches of the ranks imply. A collective."""
    layout = layout_of_model(model)
    if layout is None:
        layout = largest_of_ranks(inferred_layout(microbatches_of(batch)))
    return layout


def layout_without_split(model: Any, batch: Batch) -> BatchLayout | None:
    """Returns the layout of a run that has no split of ours. A collective.

    The user's own split cuts the batch then, so the run does not need a layout. If the layout cannot tell the rows of a
    batch apart, all ranks return None, even if only one rank has such a batch.
    """
    layout = layout_on_ranks(model, batch)
    can_tell_on_ranks = all_gather_object(_tells_rows_apart(layout, batch))
    return layout if all(can_tell_on_ranks) else None


def _tells_rows_apart(layout: BatchLayout, batch: Batch) -> bool:
    """Returns whether a layout can select the rows of a batch, and count their media."""
    try:
        layout.select(batch, [0])
        layout.media_per_row(batch)
    except (KeyError, ValueError):
        return False
    return True
