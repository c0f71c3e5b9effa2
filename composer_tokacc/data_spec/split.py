# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split of a device batch into trimmed microbatches under a token budget.

:class:`MicrobatchSplit` describes the rows, cuts them into pieces under the caps (:mod:`.pieces`) and builds the
microbatches. On several ranks :func:`in_step` first adds dummy rows and empty microbatches, so that no rank waits for
another without end. The functions at the end find the split and the layout of a loader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from composer_tokacc.batch import MODALITIES, Batch, BatchDict, sample_name
from composer_tokacc.checks.step import Step
from composer_tokacc.collectives import all_gather_object, from_any_rank, get_world_size, max_over_ranks
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.pieces import CutRules, DummyRows, Piece, build, padded_candidates, zero_weight
from composer_tokacc.layout import BatchLayout, PreSplitBatch, RowFacts, describe, describe_all, microbatches_of
from composer_tokacc.planning import CutOptions, check_kind, cut_rows, pack_lengths, token_budget
from composer_tokacc.row_counts import rows_of, without_rows

if TYPE_CHECKING:
    from composer.core import State

log = logging.getLogger(__name__)

FEW_TOKENS = 8
"""Width of an empty microbatch of text, which only keeps a rank in step. Models with convolutions need 8 tokens."""

MicrobatchTransforms = Callable[[Any], Any]


class MicrobatchSplit:
    """Composer's ``split_batch``. A microbatch size of ``k`` means the memory of ``k`` rows of ``slot_tokens`` tokens.

    Args:
        dataloader: The loader whose batches are split. The algorithm finds the split by its loader.
        layout: How tensors belong to rows. None: the model's own layout, as soon as the model is known.
        options: The caps, and how to cut under them.
        microbatch_transforms: The user's own transforms of a microbatch on the device.
    """

    def __init__(
        self,
        dataloader: Any,
        layout: BatchLayout | None,
        options: CutOptions,
        microbatch_transforms: MicrobatchTransforms | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.options = options
        self.given_layout = layout
        self.layout = layout
        self.rules = CutRules(right='trim')
        """How rows are cut. Before the first-batch check only padding on the right is trimmed, because no causal model
        can see it. Trimming on the left may change positions."""
        self.checked = False
        """Whether the first-batch check has seen the model."""
        self.reduces_once = False
        """Whether DDP reduces gradients only in the last microbatch of a step. Then ranks may leave an encoder unused
        and make different numbers of microbatches. The algorithm observes this, and gives DDP zeros for what is
        unused."""
        self.step: Step | None = None
        """The step whose batch is split next; None: no algorithm counts it."""
        self._microbatch_transforms = microbatch_transforms
        self._model: torch.nn.Module | None = None
        self._attention: DocumentAttention | None = None
        self._wants_packing = False
        self._has_packed = False
        self._warned: set[str] = set()

    # Called by the algorithm.

    def start(self, model: torch.nn.Module, layout: BatchLayout | None, batch: Batch, microbatch_size: float) -> None:
        """Takes a model whose rules are not known yet, and decides whether to try packing. A collective."""
        self.restore_attention()
        self._model = model
        self.layout = layout or self.given_layout
        self.rules = CutRules()
        self.checked = False
        self._wants_packing = self.options.packing is True
        if self.options.packing == 'auto' and self.layout is not None:
            self._wants_packing = self._packing_costs_less(describe_all(self.layout, batch), microbatch_size)

    def _packing_costs_less(self, sources: Sequence[RowFacts], microbatch_size: float) -> bool:
        """Returns whether packing costs less on this batch, over all ranks; a collective."""
        lengths = np.array(_lengths_of(sources))
        longest = int(lengths.max())
        slot_tokens = self.options.slot_tokens or max(facts.width for facts in sources)
        budget = token_budget(microbatch_size, slot_tokens)
        options = replace(self.options.without_caps(), max_tokens=max(budget, longest), packing=False)
        # Cut the lengths in both ways, and add up the cost of the microbatches.
        cost = options.cost
        padded_cost = 0.0
        for rows in cut_rows(lengths, options, max_width=longest):
            width = lengths[rows].max(keepdims=True)
            padded_cost += len(rows) * float(cost.rows(width)[0]) + cost.launch
        packed_cost = 0.0
        for rows in pack_lengths(lengths, budget):
            packed_cost += cost.packed(lengths[rows].tolist())
        costs_of_ranks = np.array(all_gather_object((packed_cost, padded_cost)))
        total_packed, total_padded = costs_of_ranks.sum(axis=0)
        costs_less = bool(total_packed < total_padded)
        log.info(
            'packing=%s: the first batch costs %.0f packed and %.0f padded.', costs_less, total_packed, total_padded
        )
        return costs_less

    def adopt(self, rules: CutRules, *, reduces_once: bool = False) -> None:
        """Cuts by these rules from now on."""
        self.rules = rules
        self.checked = True
        self.reduces_once = reduces_once
        self._attend(rules.packing)
        if rules.packing == 'positions':
            self._warn('Packed rows get a mask as wide as all their documents: attention document by document fails.')

    # Called by the first-batch check.

    def largest_packed_row(self, sources: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of a batch can have; 0: its rows are not packed."""
        is_packed = self.packing or (self._wants_packing and not self.checked)
        if not is_packed or not sources:
            return 0
        lengths = _lengths_of(sources)
        budget = token_budget(microbatch_size, self._slot_width(sources))
        # A row over the budget is packed alone.
        return max(min(budget, sum(lengths)), *lengths)

    def _slot_width(self, sources: Sequence[RowFacts]) -> int:
        """Returns the tokens of a slot, plus the width of the decoder's text if there is one."""
        width = self.options.slot_tokens or max(facts.width for facts in sources)
        return width + max(facts.decoder_width for facts in sources)

    @property
    def must_pack(self) -> bool:
        """Whether the run stops if rows cannot be packed: the user asked for it, or earlier rows were packed."""
        return self.options.packing is True or self._has_packed

    def candidates(self, facts: RowFacts, earlier: CutRules) -> Iterator[CutRules]:
        """Yields the rules to try on such rows, cheapest first. ``earlier`` are the rules found on other rows."""
        if earlier.packing or (self._wants_packing and not self.checked):
            yield replace(earlier, packing=earlier.packing or 'documents')
            if self.must_pack and not earlier.packing:
                yield replace(earlier, packing='positions')
            if self.must_pack:
                return
        yield from padded_candidates(facts, earlier)

    def assemble(self, facts: RowFacts, rows: Sequence[int], rules: CutRules) -> BatchDict:
        """Returns the microbatch of some rows, cut and packed by the rules. The check computes its gradient."""
        coupling = facts.layout.family.coupling
        if rules.packing and coupling:
            raise RuntimeError(f'rows that are not independent: {coupling}')
        if rules.packing:
            self._attend(rules.packing)
        options = self.options.without_caps()
        piece = Piece.from_facts(facts, rules, options).take(rows)
        if rules.needs_media:
            piece = replace(piece, dummies=_dummies_of_first_modality([facts]).missing(facts, rows))
        (microbatch,) = build([piece], self._attention)
        return without_rows(microbatch)

    # The model.

    def as_the_model_takes_it(self, batch: Any) -> Any:
        """Returns a microbatch on the device as the model gets it."""
        if self._microbatch_transforms is not None:
            batch = self._microbatch_transforms(batch)
            check_kind('microbatch_transforms', batch, Mapping)
        return batch if self.layout is None else self.layout.with_media(batch)

    def _attend(self, packing: str) -> None:
        """Changes the model's attention for rows that are packed in this way, if it is not changed yet."""
        if not packing:
            self.restore_attention()
            return
        by_positions = packing == 'positions'
        is_changed = self._attention is not None and self._attention.has_masks != by_positions
        if self._model is not None and not is_changed:
            self.restore_attention()
            self._attention = DocumentAttention(self._model, by_positions=by_positions)

    def restore_attention(self) -> None:
        """Restores the model's own attention if it was changed."""
        if self._attention is not None:
            self._attention.undo()
        self._attention = None

    # The split.

    @property
    def packing(self) -> bool:
        """Whether a microbatch's rows become one packed row."""
        return bool(self.rules.packing)

    def __call__(self, batch: Batch, microbatch_size: int | float) -> list[BatchDict]:
        """Splits a batch into microbatches under the caps.

        In evaluation (no gradients) rows keep their order, and ``microbatch_size`` counts rows.
        """
        if microbatch_size <= 0:
            raise ValueError(f'`device_train_microbatch_size` must be positive, got: {microbatch_size}.')
        # Without a layout the batch tells it. The microbatch with the most keys has media.
        layout = self.layout or BatchLayout.infer(max(microbatches_of(batch), key=len))
        if not torch.is_grad_enabled():
            return self._split_in_order(layout, batch, max(int(microbatch_size), 1))
        sources = self._describe(layout, batch)
        stays_pre_split = False
        indices = None
        if isinstance(batch, PreSplitBatch):
            stays_pre_split = self._may_stay_pre_split(sources)
            if stays_pre_split:
                indices = batch.indices
            else:
                # All rows are joined into one batch and cut again.
                sources = [describe(layout, batch.joined(layout))]
        self._check_packing(sources)
        budget = token_budget(microbatch_size, self._slot_width(sources))
        options = replace(self.options, max_tokens=budget)
        pieces = self._cut(sources, options, indices, stays_pre_split=stays_pre_split)
        empty: list[BatchDict] = []
        if get_world_size() > 1:
            may_have_media = self.layout is None or bool(layout.family.media or layout.extra)
            # If DDP reduces only once, it does not wait for an unused encoder.
            takes_media = may_have_media and (self.rules.needs_media or not self.reduces_once)
            pieces, empty = in_step(
                sources, pieces, self.rules, options, takes_media=takes_media, reduces_once=self.reduces_once
            )
        elif self.rules.needs_media:
            pieces = with_dummies(pieces, _dummies_of_first_modality(sources))
        self._warn_of(sources, pieces)
        microbatches = [*build(pieces, self._attention), *empty]
        if self.step is not None:
            self.step.planned = microbatches
            self.step.num_planned = len(pieces)
        return microbatches

    def _split_in_order(self, layout: BatchLayout, batch: Batch, size: int) -> list[BatchDict]:
        """Returns microbatches of ``size`` rows, in order.

        The trainer drops repeated samples by ``split_batch(batch, n - 1)[0]``, so the order must stay.
        """
        rules = replace(self.rules, packing='')
        options = self.options.without_caps()
        all_rows = Piece.from_facts(describe(layout, batch), rules, options)
        num_rows = len(all_rows.rows)
        pieces = []
        for start in range(0, num_rows, size):
            pieces.append(all_rows.take(range(start, min(start + size, num_rows))))
        return list(build(pieces))

    def _describe(self, layout: BatchLayout, batch: Batch) -> Sequence[RowFacts]:
        """Returns the facts of the batch, or of each microbatch. Reuses those of the step if they still hold."""
        sources = [] if self.step is None else self.step.facts
        microbatches = microbatches_of(batch)
        has_facts = len(sources) == len(microbatches)
        for facts, microbatch in zip(sources, microbatches, strict=False):
            has_facts = has_facts and facts.describes(layout, microbatch)
        return sources if has_facts else describe_all(layout, batch)

    def _may_stay_pre_split(self, sources: Sequence[RowFacts]) -> bool:
        """Returns whether the microbatches of a loader need not be joined. If so, each is used as it is, or cut alone.

        Rows padded on the left must be joined if their positions depend on the padding, or if a pad predicts a first
        label.
        """
        if not self.options.regroup or self.packing or self.rules.right != 'trim':
            return False
        if any(facts.layout.width_matters(facts.batch) for facts in sources):
            return False
        padded_left = [facts for facts in sources if facts.side == 'left']
        if not padded_left:
            return True
        widest = max(sources, key=lambda facts: facts.width)
        has_label_behind_padding = any(any(facts.has_label_behind_padding) for facts in padded_left)
        return self.rules.policy(replace(widest, side='left')) == 'trim' and not has_label_behind_padding

    def _check_packing(self, sources: Sequence[RowFacts]) -> None:
        if self.options.packing and not self.checked:
            raise RuntimeError(
                f'`packing={self.options.packing!r}` needs TokenAccumulation, which checks that the model tells packed '
                'documents apart, got: no such check. Add it to `algorithms`, or set `packing=False`.'
            )
        if not self.packing:
            return
        if any(facts.layout.width_matters(facts.batch) for facts in sources):
            raise RuntimeError(
                f'Rows must not be wider than {sources[0].layout.width_limit} tokens for `packing=True`, got: '
                f'{max(facts.width for facts in sources)}. Beyond, the rotary embedding of this model changes with the '
                'width, which packing changes. Set `packing=False`, which keeps it.'
            )
        self._has_packed = True

    def _cut(
        self,
        sources: Sequence[RowFacts],
        options: CutOptions,
        indices: Sequence[Sequence[int]] | None,
        *,
        stays_pre_split: bool,
    ) -> list[Piece]:
        """Returns pieces under the caps. A microbatch that a loader has collated stays as it is if it fits.

        ``indices`` are the indices of the rows of each source in the dataset.
        """
        pieces: list[Piece] = []
        has_ranks = get_world_size() > 1
        for number, facts in enumerate(sources):
            piece = Piece.from_facts(facts, self.rules, options)
            piece.check_caps(indices[number] if indices else None)
            if has_ranks:
                # Repeated samples have no weight, and need not be computed.
                rows = rows_of(facts.batch)
                piece = piece.take([row for row in piece.rows if rows[row].samples])
            if not piece.rows:
                continue
            if stays_pre_split and piece.fits:
                pieces.append(piece)
            else:
                pieces += piece.cut()
        return pieces

    def _warn_of(self, sources: Sequence[RowFacts], pieces: Sequence[Piece]) -> None:
        """Warns of rows that keep their padding, and of dummy rows that do not fit under the caps."""
        is_kept: list[bool] = []
        for facts in sources:
            if not self.packing and self.rules.policy(facts) != 'keep':
                is_kept += facts.has_label_behind_padding
        if any(is_kept):
            self._warn(
                '%d of %d rows have a label on their first token, which padding on the left lets a pad predict. They '
                'are computed untrimmed. Mask that label (-100), or pad on the right.',
                sum(is_kept),
                len(is_kept),
            )
        for piece in pieces:
            if piece.dummies and not piece.fits:
                self._warn(
                    '%s must fit into a microbatch together with the dummy rows that keep the encoders of all ranks in '
                    'use, got: %d tokens and %d image tokens beside rows of %s tokens, over the caps of %d and %s. '
                    'They are computed over the cap. Raise it by the difference.',
                    sample_name(piece.facts.batch, piece.rows[0]),
                    piece.widths[0],
                    sum(piece.sizes.get('image_tokens', [])),
                    [row.width for row in piece.dummies],
                    piece.options.max_tokens,
                    piece.options.max_image_tokens,
                )

    def _warn(self, message: str, *values: object) -> None:
        """Warns, but only once for each message."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)


def _lengths_of(sources: Sequence[RowFacts]) -> list[int]:
    lengths: list[int] = []
    for facts in sources:
        lengths += facts.lengths
    return lengths


# Several ranks in step: all of them use the same encoders, and make equally many microbatches if they must.
#
# FSDP gathers the weights of an encoder in every microbatch, and hangs if one rank leaves the encoder unused. DDP waits
# for gradients when it reduces them. In most runs it reduces only in the last microbatch, where `ReductionWatch` gives
# it zeros.


def in_step(
    sources: Sequence[RowFacts],
    pieces: Sequence[Piece],
    rules: CutRules,
    options: CutOptions,
    *,
    takes_media: bool,
    reduces_once: bool,
) -> tuple[list[Piece], list[BatchDict]]:
    """Returns this rank's pieces with their dummy rows, and the empty microbatches behind them; a collective.

    Args:
        sources: Facts of this rank's batch, or of each of its microbatches.
        pieces: The pieces of these batches; none if this rank has no sample.
        rules: How rows may be cut.
        options: Says whether all ranks make equally many microbatches.
        takes_media: Whether the model may need dummy rows with media. It is the same on all ranks.
        reduces_once: Whether ranks wait for each other only in the last microbatch.
    """
    dummies = DummyRows(sources)
    if takes_media:
        dummies = _dummies_of_ranks(sources)
    # If no row of the step has media, `dummies.needed` is empty and no piece gets a dummy row.
    completed = list(pieces)
    if rules.needs_media or not reduces_once:
        completed = with_dummies(pieces, dummies)
    num_microbatches = len(completed)
    if rules.needs_media and not dummies.needed and not reduces_once:
        num_microbatches += 1
    num_microbatches = max(num_microbatches, 1)
    if options.equal_counts is True or (options.equal_counts == 'auto' and not reduces_once):
        (num_microbatches,) = max_over_ranks([num_microbatches])
    num_empty = num_microbatches - len(completed)
    if num_empty == 0:
        return completed, []
    return completed, [_empty_microbatch(sources, dummies)] * num_empty


def _dummies_of_ranks(sources: Sequence[RowFacts]) -> DummyRows:
    """Returns dummy rows of all modalities that some rank has; a collective."""
    dummies = DummyRows(sources)
    has_modality = [modality in dummies.present for modality in MODALITIES]
    lacks_modality = [not has for has in has_modality]
    flags = max_over_ranks([*has_modality, *lacks_modality])
    some_rank_has = dict(zip(MODALITIES, flags[: len(MODALITIES)], strict=True))
    some_rank_lacks: dict[str, int] = dict(zip(MODALITIES, flags[len(MODALITIES) :], strict=True))
    needed: list[str] = [modality for modality in MODALITIES if some_rank_has[modality]]
    if sources[0].layout.family.one_kind:
        needed = needed[:1]
    dummies.needed = needed
    for modality in needed:
        if not some_rank_lacks[modality]:
            continue
        # A rank without the modality gets the row of another rank.
        row = dummies.row(modality)
        shared_row = from_any_rank(None if row is None else row.batch)
        if row is None:
            dummies.set_row(modality, shared_row)
    return dummies


def _dummies_of_first_modality(sources: Sequence[RowFacts]) -> DummyRows:
    """Returns dummy rows of the first modality that the rows have.

    One modality is enough for ``CutRules.needs_media``: text rows only depend on whether the batch has media.
    """
    dummies = DummyRows(sources)
    dummies.needed = [modality for modality in MODALITIES if modality in dummies.present][:1]
    return dummies


def with_dummies(pieces: Sequence[Piece], dummies: DummyRows) -> list[Piece]:
    """Returns each piece with dummy rows of the modalities that it lacks.

    If a piece with its dummy rows is over a cap, it is halved until it fits or has one row.
    """
    completed = []
    pending = list(reversed(pieces))
    while pending:
        piece = pending.pop()
        with_missing = replace(piece, dummies=dummies.missing(piece.facts, piece.rows))
        num_rows = len(piece.rows)
        if num_rows > 1 and with_missing.dummies and not with_missing.fits:
            middle = num_rows // 2
            # The last of `pending` is taken first, so the halves stay in order.
            pending += [piece.take(range(middle, num_rows)), piece.take(range(middle))]
        else:
            completed.append(with_missing)
    return completed


def _empty_microbatch(sources: Sequence[RowFacts], dummies: DummyRows) -> BatchDict:
    """Returns a microbatch without weight: a dummy row of each needed modality, else a part of the shortest row."""
    dummy_rows = [dummies.row(modality) for modality in dummies.needed]
    batches = [row.batch for row in dummy_rows if row is not None]
    if batches:
        return sources[0].layout.concat(batches)
    facts = min(sources, key=lambda facts: min(facts.lengths))
    layout = facts.layout
    shortest = facts.lengths.index(min(facts.lengths))
    empty = zero_weight(layout.trim(layout.select(facts.batch, [shortest])))
    width = layout.width(empty)
    if facts.media[shortest] or 'input_ids' not in empty or width <= FEW_TOKENS:
        return empty
    start = width - FEW_TOKENS if facts.side == 'left' else 0
    return layout.narrow(empty, start, FEW_TOKENS)


# Which split, and which layout, belongs to a loader.

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


def layout_of(state: State, split: MicrobatchSplit | None) -> BatchLayout | None:
    """Returns the layout that the user gave, else the layout of the model, else the one that the batch implies.

    Returns None if rows cannot be told apart. A collective.
    """
    if split is not None and split.given_layout is not None:
        return split.given_layout
    try:
        layout = BatchLayout.for_model(state.model)
    except TypeError:
        # The model has no config. A rank without media infers the layout of a text model.
        layouts = all_gather_object(BatchLayout.infer(state.batch))
        layout = max(layouts, key=lambda layout: len(layout.family.entries))
    if split is None:
        try:
            layout.select(state.batch, [0])
            layout.media_per_row(state.batch)
        except (KeyError, ValueError):
            return None  # only the user's own split knows
    return layout
