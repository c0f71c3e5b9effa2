# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split of a device batch into trimmed microbatches under a token budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from composer_tokacc.batch import MODALITIES, Batch, sample_name
from composer_tokacc.collectives import all_gather_object, get_world_size
from composer_tokacc.data_spec.cut_rules import CutRules, padded_candidates
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.dummy_rows import DummyRows
from composer_tokacc.data_spec.in_step import in_step, with_dummies
from composer_tokacc.data_spec.pieces import Piece, build
from composer_tokacc.layout import BatchLayout, PreSplitBatch, RowFacts, describe, describe_all, microbatches_of
from composer_tokacc.metadata import num_rows, samples_of, with_metadata, without_metadata
from composer_tokacc.planning import CutOptions, check_kind, cut_rows, pack_lengths, token_budget

if TYPE_CHECKING:
    from composer.core import State

log = logging.getLogger(__name__)


class MicrobatchSplit:
    """Composer's ``split_batch``: a microbatch size of ``k`` is a memory of ``k`` rows of ``slot_tokens``.

    It holds its loader, by which the algorithm finds it. The layout, if none is given, is the model's own once that is
    known, until then that of each batch. ``microbatch_transforms`` are the user's, done on the device.
    """

    def __init__(
        self, dataloader: Any, layout: BatchLayout | None, options: CutOptions,
        microbatch_transforms: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.dataloader, self.options = dataloader, options
        self.layout = self.given_layout = layout
        self.rules = CutRules(right='trim')
        """What may be trimmed. Nothing is known before the first-batch check, but that padding on the right, which no
        causal model can see, may go; on the left it may move positions."""
        self.checked = False
        """Whether the first-batch check has seen the model."""
        self.reduces_once = False
        """Whether ranks meet in the last microbatch of a step alone, where DDP reduces gradients: then they may leave
        an encoder unused, and make unequally many. The algorithm sees it happen, and gives DDP zeros."""
        self.copies_microbatches: Callable[[], bool] | None = None
        """Asks whether metrics of training read a copy of each microbatch; None: no algorithm is in this step."""
        self.made: list[dict[str, Any]] = []
        """Microbatches of the batch that was split last, those of no weight included."""
        self._counted: tuple[RowFacts, list[Any]] | None = None
        """Facts of the batch of this step, as the check has described it, and the values that they were read from."""
        self._microbatch_transforms = microbatch_transforms
        self._model: Any = None
        self._attention: DocumentAttention | None = None
        self._wants_packing = self._has_packed = False
        self._warned: set[str] = set()

    # What the algorithm tells it.

    def start(self, model: Any, layout: BatchLayout | None, batch: Batch, microbatch_size: float) -> None:
        """Begins with a model, of which nothing is known but its layout; a collective."""
        self.attend_as_before()
        self._model, self.layout = model, layout or self.given_layout
        self.rules, self.checked = CutRules(), False
        self._wants_packing = self.options.packing is True
        if self.options.packing == 'auto' and self.layout is not None:
            self._wants_packing = self._packing_costs_less(describe_all(self.layout, batch), microbatch_size)

    def _packing_costs_less(self, sources: Sequence[RowFacts], microbatch_size: float) -> bool:
        """Returns whether packing costs less on this batch, over all ranks; a collective."""
        lengths = [length for facts in sources for length in facts.lengths]
        slot_tokens = self.options.slot_tokens or max(facts.width for facts in sources)
        budget = token_budget(microbatch_size, slot_tokens)
        options = replace(self.options.without_caps(), max_tokens=max(budget, *lengths), packing=False)
        cost = options.cost
        cuts = cut_rows(lengths, options, max_width=max(lengths))
        widths = np.array([max(lengths[row] for row in rows) for rows in cuts])
        padded = float((np.array([len(rows) for rows in cuts]) * cost.rows(widths) + cost.launch).sum())
        packed = sum(cost.packed([lengths[row] for row in rows]) for rows in pack_lengths(lengths, budget))
        packed, padded = map(sum, zip(*all_gather_object((packed, padded)), strict=True))
        log.info('packing=%s: the first batch costs %.0f packed and %.0f padded.', packed < padded, packed, padded)
        return packed < padded

    def adopt(self, rules: CutRules, *, reduces_once: bool = False) -> None:
        """Cuts by these rules from now on."""
        self.rules, self.checked, self.reduces_once = rules, True, reduces_once
        self._attend(rules.packing)
        if rules.packing == 'positions':
            self._warn('Packed rows get a mask as wide as all their documents: attention document by document fails.')

    def begin_step(self, *, copies_microbatches: Callable[[], bool] | None) -> None:
        """Learns what the trainer does with the microbatches of a step."""
        self.copies_microbatches = copies_microbatches

    def end_step(self) -> None:
        """Lets a step's microbatches go: nobody waits for them while the next batch is read."""
        self.made = []
        self._counted = None

    # What the first-batch check asks.

    def largest_packed_row(self, sources: Sequence[RowFacts], microbatch_size: float) -> int:
        """Returns the most tokens that a packed row of a batch can have; 0: its rows are not packed.

        Keeps the facts of a batch, so that it is described once a step.
        """
        if len(sources) == 1:
            self._counted = sources[0], list(sources[0].batch.values())
        is_packed = self.packing or (self._wants_packing and not self.checked)
        if not is_packed or not sources:
            return 0
        lengths = [length for facts in sources for length in facts.lengths]
        budget = token_budget(microbatch_size, self._slot_width(sources))
        return max([min(budget, sum(lengths)), *lengths])

    def _slot_width(self, sources: Sequence[RowFacts]) -> int:
        """Returns the tokens that one row of the microbatch size stands for.

        A row of memory is a slot, and what a decoder computes of a text of its own.
        """
        width = self.options.slot_tokens or max(facts.width for facts in sources)
        return width + max(facts.decoder_width for facts in sources)

    @property
    def must_pack(self) -> bool:
        """Whether rows are packed or the run stops: asked for, or begun so."""
        return self.options.packing is True or self._has_packed

    def candidates(self, facts: RowFacts, known: CutRules) -> Iterator[CutRules]:
        """Gives the rules that are to be tried on such rows, cheapest first; ``known``: those found on other rows."""
        if known.packing or (self._wants_packing and not self.checked):
            yield replace(known, packing=known.packing or 'documents')
            if self.must_pack and not known.packing:
                yield replace(known, packing='positions')
            if self.must_pack:
                return
        yield from padded_candidates(facts, known)

    def assemble(self, facts: RowFacts, rows: Sequence[int], rules: CutRules) -> dict[str, Any]:
        """Returns the microbatch of the given rows, cut by the given rules and, where asked, packed."""
        layout = facts.layout
        if rules.packing and layout.family.coupling:
            raise RuntimeError(f'rows that are not independent: {layout.family.coupling}')
        if rules.packing:
            self._attend(rules.packing)
        piece = Piece.from_facts(facts, rules, self.options.without_caps()).take(rows)
        if rules.needs_media:
            piece = piece._replace(dummies=_first_modality([facts]).missing(facts, rows))
        (microbatch,) = build([piece], self._attention)
        return without_metadata(microbatch)

    # The model, as far as it is touched.

    def as_the_model_takes_it(self, batch: Any) -> Any:
        """Returns a microbatch on the device as the model gets it."""
        if self._microbatch_transforms is not None:
            batch = self._microbatch_transforms(batch)
            check_kind('microbatch_transforms', batch, Mapping)
        return batch if self.layout is None else self.layout.with_media(batch)

    def _attend(self, packing: str) -> None:
        """Has the model's attention take rows that are so packed; called again it changes nothing."""
        by_positions = packing == 'positions'
        if not packing:
            self.attend_as_before()
        elif self._model is not None and (self._attention is None or self._attention.has_masks == by_positions):
            self.attend_as_before()
            self._attention = DocumentAttention(self._model, by_positions=by_positions)

    def attend_as_before(self) -> None:
        """Gives the model its own attention back, where it had to change."""
        if self._attention is not None:
            self._attention.undo()
        self._attention = None

    # The split.

    @property
    def packing(self) -> bool:
        """Whether a microbatch's rows become one packed row."""
        return bool(self.rules.packing)

    def __call__(self, batch: Batch, microbatch_size: int | float) -> list[dict[str, Any]]:
        """Splits in training; in evaluation (no gradients) rows keep order and ``microbatch_size`` counts rows."""
        if microbatch_size <= 0:
            raise ValueError(f'`device_train_microbatch_size` must be positive, got: {microbatch_size}.')
        # Those with images have the most entries, and tell the layout.
        layout = self.layout or BatchLayout.infer(max(microbatches_of(batch), key=len))
        if not torch.is_grad_enabled():
            return self._in_order(layout, batch, max(int(microbatch_size), 1))
        sources, pre_split = self._described(layout, batch)
        self._check_packing(sources)
        budget = token_budget(microbatch_size, self._slot_width(sources))
        options = replace(self.options, max_tokens=budget)
        pieces = self._cut(sources, pre_split, options)
        empty: list[dict[str, Any]] = []
        if get_world_size() > 1:
            takes_media = self.layout is None or bool(layout.family.media or layout.extra)
            takes_media &= self.rules.needs_media or not self.reduces_once
            pieces, empty = in_step(
                sources, pieces, self.rules, options, takes_media=takes_media, reduces_once=self.reduces_once
            )
        elif self.rules.needs_media:
            pieces = with_dummies(pieces, _first_modality(sources))
        self._warn_of(sources, pieces)
        microbatches = build(pieces, self._attention)
        self.made = [with_metadata(one, microbatches=[len(pieces)] * num_rows(one)) for one in microbatches] + empty
        return self.made

    def _in_order(self, layout: BatchLayout, batch: Batch, size: int) -> list[dict[str, Any]]:
        """Returns chunks of rows: the trainer drops a sampler's padding with split_batch(batch, n - 1)[0]."""
        rules, options = replace(self.rules, packing=''), self.options.without_caps()
        whole = Piece.from_facts(describe(layout, batch), rules, options)
        starts = range(0, len(whole.rows), size)
        pieces = [whole.take(range(start, min(start + size, len(whole.rows)))) for start in starts]
        return list(build(pieces))

    def _described(self, layout: BatchLayout, batch: Batch) -> tuple[list[RowFacts], PreSplitBatch | None]:
        """Returns the facts of the batch's rows: of all, or of each microbatch of a loader, where they may stay so."""
        if not isinstance(batch, PreSplitBatch):
            return [self._facts_of(layout, batch)], None
        if self.options.regroup and not self.packing and self.rules.right == 'trim':
            sources = describe_all(layout, batch)
            if self._stand_alone(sources):
                return sources, batch
        return [describe(layout, batch.joined(layout))], None

    def _facts_of(self, layout: BatchLayout, batch: Batch) -> RowFacts:
        """Returns the facts of a batch: those that the check has asked about, if nothing has changed since."""
        if self._counted is None:
            return describe(layout, batch)
        facts, values = self._counted
        is_same = facts.batch is batch and facts.layout is layout and len(values) == len(batch)
        if is_same and all(old is new for old, new in zip(values, batch.values(), strict=True)):
            return facts
        return describe(layout, batch)

    def _stand_alone(self, sources: Sequence[RowFacts]) -> bool:
        """Returns whether microbatches that a loader has collated are good as they are, or at least each for itself.

        Where padding on the left decides positions, or what a first label is predicted from, each of them would mean
        what it means only beside the others.
        """
        if any(facts.layout.width_matters(facts.batch) for facts in sources):
            return False
        left = [facts for facts in sources if facts.side == 'left']
        policy = self.rules.policy(replace(max(sources, key=lambda facts: facts.width), side='left'))
        return not left or (policy == 'trim' and not any(any(facts.has_label_behind_padding) for facts in left))

    def _check_packing(self, sources: Sequence[RowFacts]) -> None:
        if self.options.packing and not self.checked:
            raise RuntimeError(
                f'`packing={self.options.packing!r}` needs TokenAccumulation, which checks that the model tells packed '
                'documents apart, got: no such check. Add it to `algorithms`, or set `packing=False`.'
            )
        if self.packing and any(facts.layout.width_matters(facts.batch) for facts in sources):
            raise RuntimeError(
                f'Rows must not be wider than {sources[0].layout.width_limit} tokens for `packing=True`, got: '
                f'{max(facts.width for facts in sources)}. Beyond, the rotary embedding of this model changes with the '
                'width, which packing changes. Set `packing=False`, which keeps it.'
            )
        self._has_packed = self._has_packed or self.packing

    def _cut(self, sources: Sequence[RowFacts], pre_split: PreSplitBatch | None, options: CutOptions) -> list[Piece]:
        """Returns pieces under the caps; those that a loader has collated, as they are where they fit."""
        pieces: list[Piece] = []
        indices = pre_split.indices if pre_split is not None else None
        has_ranks = get_world_size() > 1
        for number, facts in enumerate(sources):
            piece = Piece.from_facts(facts, self.rules, options)
            piece.check_caps(indices[number] if indices else None)
            if has_ranks:  # rows that only fill up a rank weigh nothing, and need not be computed
                samples = samples_of(facts.batch)
                piece = piece.take([row for row in piece.rows if samples[row]])
            if piece.rows:
                pieces += [piece] if pre_split is not None and piece.fits else piece.cut()
        return pieces

    def _warn_of(self, sources: Sequence[RowFacts], pieces: Sequence[Piece]) -> None:
        """Warns of rows that keep their padding, and of dummy rows that find no room."""
        kept = [
            is_kept for facts in sources if not self.packing and self.rules.policy(facts) != 'keep'
            for is_kept in facts.has_label_behind_padding
        ]  # fmt: skip
        if any(kept):
            self._warn(
                '%d of %d rows have a label on their first token, which padding on the left lets a pad predict. They '
                'are computed untrimmed. Mask that label (-100), or pad on the right.', sum(kept), len(kept)
            )  # fmt: skip
        for piece in pieces:
            if piece.dummies and not piece.fits:
                self._warn(
                    '%s must fit into a microbatch together with the dummy rows that keep the encoders of all ranks in '
                    'use, got: %d tokens and %d image tokens beside rows of %s tokens, over the caps of %d and %s. '
                    'They are computed over the cap. Raise it by the difference.',
                    sample_name(piece.facts.batch, piece.rows[0]), piece.widths[0],
                    sum(piece.sizes.get('image_tokens', [])), [row.width for row in piece.dummies],
                    piece.options.max_tokens, piece.options.max_image_tokens,
                )  # fmt: skip

    def _warn(self, message: str, *values: Any) -> None:
        """Warns once a split."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)


def _first_modality(sources: Sequence[RowFacts]) -> DummyRows:
    """Returns dummy rows of the first modality that the rows have: beside it rows without media have their loss."""
    dummies = DummyRows(sources)
    dummies.needed = [modality for modality in MODALITIES if modality in dummies.present][:1]
    return dummies


# Which split, and which layout, goes with a loader.

_SPLITS: WeakValueDictionary[int, MicrobatchSplit] = WeakValueDictionary()


def register_split(dataloader: Any, split: MicrobatchSplit) -> None:
    """Lets :func:`split_of` find the split of a loader; the split must hold on to its loader."""
    _SPLITS[id(dataloader)] = split


def split_of(dataloader: Any) -> MicrobatchSplit | None:
    """Returns the split that ``token_data_spec`` made for a loader.

    The trainer shows an algorithm the loader, not the DataSpec, and nothing of ours may lie in a batch before
    BATCH_START: Composer's own algorithms clone every entry of it.
    """
    return _SPLITS.get(id(dataloader))


def layout_of(state: State, split: MicrobatchSplit | None) -> BatchLayout | None:
    """The layout that the user gave, else the model's own, else that of the batch; None: rows cannot be told apart."""
    if split is not None and split.given_layout is not None:
        return split.given_layout
    try:
        layout = BatchLayout.for_model(state.model)
    except TypeError:  # no config; a rank without media sees a text model
        layout = max(all_gather_object(BatchLayout.infer(state.batch)), key=lambda one: len(one.family.entries))
    if split is None:
        try:
            layout.select(state.batch, [0])
            layout.media_per_row(state.batch)
        except (KeyError, ValueError):  # only the user's own split knows
            return None
    return layout
