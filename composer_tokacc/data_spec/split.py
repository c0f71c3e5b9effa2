# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split of a device batch into trimmed microbatches under a token budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.utils import dist

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, own_labels, sample_name
from composer_tokacc.collectives import from_any_rank, max_over_ranks
from composer_tokacc.data_spec.added_rows import AddedRow, MediaRows, add_rows, zero_weight
from composer_tokacc.data_spec.cut_rules import CutRules, padded_candidates
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import BatchLayout, Family, ReadyBatch, microbatches_of
from composer_tokacc.metadata import num_rows, with_metadata, without_metadata
from composer_tokacc.planning import CutOptions, cut_rows, pack_lengths

log = logging.getLogger(__name__)


class MicrobatchSplit:
    """Composer's ``split_batch``: a microbatch size of ``k`` is a memory of ``k`` rows of ``slot_tokens``.

    Args:
        dataloader: The loader whose batches it splits; held, because the algorithm finds the split by it.
        layout: How tensors belong to rows. None: the model's own, once it is known; until then that of each batch.
        options: What the user asked for.
        microbatch_transforms: The user's, done to microbatches on the device.
    """

    def __init__(
        self,
        dataloader: Any,
        layout: BatchLayout | None,
        options: CutOptions,
        microbatch_transforms: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.layout = self.given_layout = layout
        self.options = options
        self.rules = CutRules(right='trim')
        """What may be trimmed. Nothing is known before the first-batch check, but that padding on the right, which no
        causal model can see, may go; on the left it may move positions."""
        self.checked = False
        """Whether the first-batch check has seen the model."""
        self.reduces_once = False
        """Whether ranks meet in the last microbatch of a step alone, where DDP reduces gradients: then the others may
        leave an encoder unused, and ranks may make unequally many. The algorithm sees it happen."""
        self.copies_microbatches: Callable[[], bool] | None = None
        """Asks whether metrics of training read a copy of each microbatch; None: no algorithm is in this step."""
        self._microbatch_transforms = microbatch_transforms
        self._model: Any = None
        self._attention: DocumentAttention | None = None
        self._wants_packing = self._has_packed = False
        self._warned: set[str] = set()

    def start(self, model: Any, layout: BatchLayout | None, batch: Batch, microbatch_size: float) -> None:
        """Begins with a model, of which nothing is known but its layout; a collective."""
        self.attend_as_before()
        self._model, self.layout = model, layout or self.given_layout
        self.rules, self.checked = CutRules(), False
        self._wants_packing = self.options.packing is True
        if self.options.packing == 'auto' and self.layout is not None:
            self._wants_packing = self._choose_packing(self.layout, batch, microbatch_size)

    def adopt(self, rules: CutRules, *, reduces_once: bool = False) -> None:
        """Cuts by these rules from now on.

        Raises:
            RuntimeError: If microbatches of this step should have had other rows beside them.
        """
        if self.checked and rules.companions and not self.rules.companions:
            raise RuntimeError(
                'Rows without media must have the same loss beside rows with media and without, got: another one, '
                'seen first in this step, which was cut without regard to it. Start again with such rows in the '
                'first batch; then every microbatch gets a row with media.'
            )
        self.rules, self.checked, self.reduces_once = rules, True, reduces_once
        self._attend(rules.packing)
        if rules.packing == 'positions':
            self._warn(
                'Every packed row gets a mask as wide as all its documents: attention document by document fails.'
            )

    def begin_step(self, *, copies_microbatches: Callable[[], bool] | None) -> None:
        """Learns what the trainer does with the microbatches of a step."""
        self.copies_microbatches = copies_microbatches

    def as_the_model_takes_it(self, batch: Any) -> Any:
        """Returns a microbatch on the device as the model gets it."""
        batch = self._microbatch_transforms(batch) if self._microbatch_transforms is not None else batch
        return batch if self.layout is None else self.layout.with_media(batch)

    @property
    def packing(self) -> bool:
        """Whether a microbatch's rows become one packed row."""
        return bool(self.rules.packing)

    @property
    def regroups(self) -> bool:
        """Whether rows may change their company."""
        return self.options.regroup or bool(self.options.packing)

    def _choose_packing(self, layout: BatchLayout, batch: Batch, microbatch_size: float) -> bool:
        """Whether packing costs less on this batch, over all ranks; a collective."""
        cost = self.options.cost
        lengths = [length for one in microbatches_of(batch) for length in layout.lengths(one)]
        budget = int(microbatch_size * (self.options.slot_tokens or max(map(layout.width, microbatches_of(batch)))))
        options = CutOptions(max_tokens=max(budget, *lengths), regroup=self.options.regroup, cost=cost)
        cuts = cut_rows(lengths, options, max_width=max(lengths))
        widths = np.array([max(lengths[row] for row in rows) for rows in cuts])
        padded = float((np.array([len(rows) for rows in cuts]) * cost.rows(widths) + cost.launch).sum())
        packed = sum(cost.packed([lengths[row] for row in rows]) for rows in pack_lengths(lengths, budget))
        packed, padded = map(sum, zip(*dist.all_gather_object((packed, padded)), strict=True))
        log.info('packing=%s: the first batch costs %.0f packed and %.0f padded.', packed < padded, packed, padded)
        return packed < padded

    @property
    def must_pack(self) -> bool:
        """Whether rows are packed or the run stops: asked for, or begun so."""
        return self.options.packing is True or self._has_packed

    def candidates(self, layout: BatchLayout, rows: Batch, known: CutRules) -> Iterator[CutRules]:
        """Gives the rules that are to be tried on such rows, cheapest first; ``known``: those found on other rows."""
        if known.packing or (self._wants_packing and not self.checked):
            yield replace(known, packing=known.packing or 'documents')
            if self.must_pack and not known.packing:
                yield replace(known, packing='positions')
            if self.must_pack:
                return
        yield from padded_candidates(layout, rows, known)

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

    def __call__(self, batch: Batch, microbatch_size: int | float) -> list[dict[str, Any]]:
        """Splits in training; in evaluation (no gradients) rows keep order and ``microbatch_size`` counts rows.

        Raises:
            ValueError: If ``microbatch_size`` is not positive, a row is over the cap, or the layout does not know an
                entry.
        """
        if microbatch_size <= 0:
            raise ValueError(f'`device_train_microbatch_size` must be positive, got: {microbatch_size}.')
        # Those with images have the most entries, and tell the layout.
        layout = self.layout or BatchLayout.infer(max(microbatches_of(batch), key=len))
        if not torch.is_grad_enabled():
            # The trainer drops a sampler's padding with split_batch(batch, n - 1)[0]: exactly n - 1 rows, in order.
            return self._chunks(layout, batch, max(int(microbatch_size), 1))
        if self.options.packing and not self.checked:
            raise RuntimeError(
                f'`packing={self.options.packing!r}` needs TokenAccumulation, which checks that the model tells packed '
                'documents apart, got: no such check. Add it to `algorithms`, or set `packing=False`.'
            )
        if self.packing and any(map(layout.width_matters, microbatches_of(batch))):
            raise RuntimeError(
                f'Rows must not be wider than {layout.width_limit} tokens for `packing=True`, got: '
                f'{max(map(layout.width, microbatches_of(batch)))}. Beyond, the rotary embedding of this model changes '
                'with the width, which packing changes. Set `packing=False`, which keeps it.'
            )
        self._has_packed = self._has_packed or self.packing
        batch, spans = self._with_spans(layout, batch)
        sources = [
            self._rows_of(layout, source, *span) for source, span in zip(microbatches_of(batch), spans, strict=True)
        ]
        slot = (self.options.slot_tokens or max(map(_width, sources))) + max(rows.decoder_width for rows in sources)
        budget = int(microbatch_size * slot)
        pieces = []
        for number, rows in enumerate(sources):
            is_ready = isinstance(batch, ReadyBatch)
            indices = batch.indices[number] if isinstance(batch, ReadyBatch) and batch.indices else None
            self._check_caps(rows, budget, indices)
            if is_ready and self._fits(rows, [], budget):
                pieces.append(rows)
            else:
                pieces += [rows.take(places) for places in self._cut(rows, budget)]
        if dist.get_world_size() > 1:
            return self._in_step(layout, sources, pieces, budget)
        if not self.rules.companions:
            return self._microbatches(layout, [(piece, []) for piece in pieces])
        media = _companions(layout, [(rows.source, rows.lengths) for rows in sources])
        return self._microbatches(layout, self._with_media(pieces, media, budget))

    def assemble(self, layout: BatchLayout, batch: Batch, rows: Sequence[int], rules: CutRules) -> dict[str, Any]:
        """The microbatch of the given rows, cut by the given rules and, where asked, packed."""
        microbatch = self._trimmed(layout, layout.select(batch, rows), rules)
        if rules.companions:
            added = _companions(layout, [(batch, layout.lengths(batch))]).missing(batch, rows)
            microbatch = add_rows(layout, microbatch, [one.row for one in added]) if added else microbatch
        if rules.packing and layout.family.coupling:
            raise RuntimeError(f'rows that are not independent: {layout.family.coupling}')
        if rules.packing:
            self._attend(rules.packing)
            microbatch = pack_rows(layout, microbatch, self._attention)
        return without_metadata(microbatch)

    def _chunks(self, layout: BatchLayout, batch: Batch, size: int) -> list[dict[str, Any]]:
        num_rows = layout.num_rows(batch)
        chunks = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        return [self._trimmed(layout, layout.select(batch, rows), self.rules) for rows in chunks]

    def _trimmed(self, layout: BatchLayout, batch: Batch, rules: CutRules) -> dict[str, Any]:
        """The batch without the columns that no row needs, as far as the rules allow."""
        if batch.get('input_ids') is None or layout.width_matters(batch):
            return dict(batch)
        side = layout.padding_side(batch)
        left, way = side == 'left', rules.way(side, batch)
        if way == 'keep':
            return dict(batch)
        if left and any(_labels_behind_padding(layout, batch)):
            return dict(batch)
        trimmed = layout.trim(batch, width_multiple=self.options.width_multiple)
        rows, width = trimmed['input_ids'].shape
        start = batch['input_ids'].shape[1] - width
        if way == 'columns' and left and start and 'position_ids' not in batch:
            # The model counts positions from column 0 of what it is given: it shall count on from where it would have.
            trimmed['position_ids'] = torch.arange(start, start + width).expand(rows, width).contiguous()
        return trimmed

    def _lengths(self, layout: BatchLayout, batch: Batch, side: str, lengths: list[int]) -> list[int]:
        """Columns that each row needs by the rules: all of them where its padding stays."""
        if self.packing or batch.get('input_ids') is None:
            return lengths
        width = batch['input_ids'].shape[1]
        if self.rules.way(side, batch) == 'keep' or layout.width_matters(batch):
            return [width] * len(lengths)
        if side == 'left':
            kept = _labels_behind_padding(layout, batch)
            lengths = [width if keep else length for keep, length in zip(kept, lengths, strict=True)]
            if any(kept):
                self._warn(
                    '%d of %d rows have a label on their first token, which padding on the left lets a pad predict. '
                    'They are computed untrimmed. Mask that label (-100), or pad on the right.', sum(kept), len(kept)
                )  # fmt: skip
        return lengths

    def _warn(self, message: str, *values: Any) -> None:
        """Once a split."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    def _rows_of(self, layout: BatchLayout, source: Batch, side: str, lengths: list[int]) -> _Rows:
        """All rows of a batch, padded on that side, that are as long as that."""
        lengths = self._lengths(layout, source, side, lengths)
        is_capped = self.options.max_image_tokens is not None
        images = layout.image_tokens_per_row(source) if is_capped else [0] * len(lengths)
        return _Rows(source, list(range(len(lengths))), lengths, images, _decoder_width(layout, source))

    def _fits(self, rows: _Rows, added: Sequence[AddedRow], budget: int) -> bool:
        """Whether a microbatch of the rows, and of the added ones, is within the caps."""
        widths, cap = [row.width for row in added], self.options.max_image_tokens
        size = (len(rows.lengths) + len(added)) * (max([self._trimmed_width(rows), *widths]) + rows.decoder_width)
        if self.packing:  # one row of them all, as wide as they are together
            size = sum(rows.lengths) + sum(widths)
        images, added_images = sum(rows.image_tokens), sum(row.image_tokens for row in added)
        # An added row that is over the cap of images by itself stays so, however few rows it is beside.
        return size <= budget and (cap is None or not images or images + added_images <= cap)

    def _check_caps(self, rows: _Rows, budget: int, indices: Sequence[int] | None) -> None:
        """Refuses, or names, the row that is furthest over a cap by itself."""
        for sizes, cap, unit, setting in (
            (_sizes(rows), budget, 'tokens', '`device_train_microbatch_size` x `slot_tokens`'),
            (rows.image_tokens, self.options.max_image_tokens, 'image tokens', '`max_image_tokens`'),
        ):
            if cap is None or max(sizes) <= cap:
                continue
            row = max(range(len(sizes)), key=sizes.__getitem__)
            name = sample_name(rows.source, row)
            if indices is not None and 'sample_ids' not in rows.source:
                name = f'sample number {indices[row]} of the dataset'
            message = (
                f'A row must fit into a microbatch, got: {name} of {sizes[row]} {unit}, over the cap of {cap} '
                f'({setting}). Raise it, shorten the sample, or measure the lengths again if a table of lengths '
                'promised less'
            )
            if self.options.on_oversize == 'raise':
                raise ValueError(f"{message}; `on_oversize='warn'` computes it alone, over the cap.")
            log.warning('%s. It is computed alone.', message)

    def _cut(self, rows: _Rows, budget: int) -> list[list[int]]:
        options = replace(self.options, max_tokens=budget, packing=self.packing)
        if self.packing:
            return cut_rows(rows.lengths, options, image_tokens=rows.image_tokens)
        if rows.decoder_width:  # what is rounded up is the width without it
            widths = [self._trimmed_width(rows.take([k])) for k in range(len(rows.lengths))]
            rows, options = rows._replace(lengths=widths), replace(options, width_multiple=1)
        max_width = _width(rows) + rows.decoder_width
        return cut_rows(_sizes(rows), options, image_tokens=rows.image_tokens, max_width=max_width)

    def _with_spans(self, layout: BatchLayout, batch: Batch) -> tuple[Batch, list[tuple[str, list[int]]]]:
        """The batch with the span of each of its microbatches; joined, unless a loader's are good as they are."""
        if isinstance(batch, ReadyBatch):
            if self.options.regroup and not self.packing and self.rules.right == 'trim':
                spans = [layout.span(one) for one in batch.microbatches]
                if self._hands_on(layout, batch, [side for side, _ in spans]):
                    return batch, spans
            batch = batch.joined(layout)
        return batch, [layout.span(batch)]

    def _hands_on(self, layout: BatchLayout, batch: ReadyBatch, sides: Sequence[str]) -> bool:
        """Whether microbatches that a loader has collated are good as they are, or at least each for itself.

        Where padding on the left decides positions, or what a first label is predicted from, each of them would mean
        what it means only beside the others.
        """
        if any(map(layout.width_matters, batch.microbatches)):
            return False
        left = [one for one, side in zip(batch.microbatches, sides, strict=True) if side == 'left']
        way = self.rules.way('left', max(batch.microbatches, key=layout.width))
        return not left or (way == 'trim' and not any(any(_labels_behind_padding(layout, one)) for one in left))

    def _trimmed_width(self, rows: _Rows) -> int:
        multiple = self.options.width_multiple
        return min(-(-max(rows.lengths) // multiple) * multiple, _width(rows))

    def _microbatches(self, layout: BatchLayout, planned: Sequence[Planned]) -> list[dict[str, Any]]:
        """The pieces, trimmed, each with the rows that are added to it; packed where asked."""
        microbatches = []
        selected = self._selected(layout, [piece for piece, _ in planned])
        for microbatch, (_, added) in zip(selected, planned, strict=True):
            microbatch = add_rows(layout, microbatch, [one.row for one in added]) if added else microbatch
            microbatch = pack_rows(layout, microbatch, self._attention) if self.packing else microbatch
            microbatches.append(with_metadata(microbatch, microbatches=[len(planned)] * num_rows(microbatch)))
        return microbatches

    def _selected(self, layout: BatchLayout, pieces: Sequence[_Rows]) -> Iterator[dict[str, Any]]:
        """The rows of each piece, trimmed where they need fewer columns than the batch has."""
        for _, of_source in groupby(pieces, key=lambda piece: id(piece.source)):
            same = list(of_source)
            for piece, selected in zip(same, layout.split(same[0].source, [one.places for one in same]), strict=True):
                is_trim = self._trimmed_width(piece) == _width(piece)
                yield selected if is_trim else self._trimmed(layout, selected, self.rules)

    def _in_step(
        self, layout: BatchLayout, sources: Sequence[_Rows], pieces: list[_Rows], budget: int
    ) -> list[dict[str, Any]]:
        """Several ranks: encoders are used on all ranks alike, and counts are equal where they must be.

        An encoder that one rank leaves unused makes DDP raise or skip its reduction, and FSDP hang. FSDP gathers the
        weights in every microbatch; DDP looks for gradients where it reduces them, in most runs in the last one alone.
        """
        media, in_use = self._media_in_use(layout, sources)
        if self.rules.companions and not in_use:
            # A text row must not see an image where no row of the step has one: a microbatch of its own, the last,
            # uses the encoder.
            planned, apart = [(piece, []) for piece in pieces], True
        elif self.reduces_once and not self.rules.companions:
            planned, apart = self._with_media_in_last(pieces, media, budget)
        else:
            planned, apart = self._with_media(pieces, media, budget), False
        count, is_equal = len(planned) + apart, self.options.equal_counts
        if is_equal is True or (is_equal == 'auto' and not self.reduces_once):
            (count,) = max_over_ranks([count])
        microbatches = self._microbatches(layout, planned)
        if len(planned) < count:
            shortest = min(pieces, key=lambda piece: min(piece.lengths))
            place = shortest.places[shortest.lengths.index(min(shortest.lengths))]
            text = zero_weight(self._trimmed(layout, layout.select(shortest.source, [place]), self.rules))
            rows = [row.row for unit in media.needed if (row := media.row(unit)) is not None]
            filler = layout.concat(rows) if rows else text
            filler = with_metadata(filler, microbatches=[len(planned)] * num_rows(filler))
            microbatches += [filler] * (count - len(planned))
        return microbatches

    def _media_in_use(self, layout: BatchLayout, sources: Sequence[_Rows]) -> tuple[MediaRows, list[str]]:
        """Media of the rows with those that must be in use, and the media that some rank has; a collective."""
        may_have_media = self.layout is None or layout.family.media or layout.extra
        media = MediaRows(layout, [(rows.source, rows.lengths) for rows in sources] if may_have_media else [])
        if not may_have_media:
            return media, []
        present = media.present
        lacks = [unit not in present and media.row(unit) is None for unit in MODALITIES]
        flags = max_over_ranks([*(unit in present for unit in MODALITIES), *lacks])
        in_use = [unit for unit, used in zip(MODALITIES, flags, strict=False) if used]
        lacking = {unit for unit, lacked in zip(MODALITIES, flags[len(MODALITIES) :], strict=True) if lacked}
        media.needed = _units_needed(layout.family, in_use)
        if in_use and not lacking.isdisjoint(media.needed):
            for unit in media.needed:
                own = media.row(unit)
                media.take(unit, from_any_rank(None if own is None else own.row))
        return media, in_use

    def _with_media_in_last(self, pieces: Sequence[_Rows], media: MediaRows, budget: int) -> tuple[list[Planned], bool]:
        """The pieces in an order in which the last one holds the media, or is the smallest and gets rows with them.

        And whether they find no room there, and need a microbatch of their own behind it.
        """
        *others, last = pieces
        if self.regroups and media.missing(last.source, last.places):
            num_missing = [len(media.missing(piece.source, piece.places)) for piece in pieces]
            place = min(range(len(pieces)), key=lambda k: (num_missing[k], sum(pieces[k].lengths)))
            *others, last = *pieces[:place], *pieces[place + 1 :], pieces[place]
        missing = media.missing(last.source, last.places)
        has_room = not missing or self._fits(last, missing, budget)
        return [*((piece, []) for piece in others), (last, missing if has_room else [])], not has_room

    def _with_media(self, pieces: Sequence[_Rows], media: MediaRows, budget: int) -> list[Planned]:
        """Each piece with rows of the media that it lacks; halved until they fit under the caps as well."""
        planned: list[Planned] = []
        pending = list(reversed(pieces))
        while pending:
            piece = pending.pop()
            missing, num = media.missing(piece.source, piece.places), len(piece.places)
            has_room = not missing or self._fits(piece, missing, budget)
            if num > 1 and not has_room:
                pending += [piece.take(range(num // 2, num)), piece.take(range(num // 2))]
                continue
            planned.append((piece, missing))
            if not has_room:
                self._warn(
                    '%s must fit into a microbatch together with the zero-weight rows that keep the encoders of all '
                    'ranks in use, got: %d tokens and %d image tokens beside rows of %s tokens, over the caps of %d '
                    'and %s. They are computed over the cap. Raise it by the difference.',
                    sample_name(piece.source, piece.places[0]), piece.lengths[0], piece.image_tokens[0],
                    [row.width for row in missing], budget, self.options.max_image_tokens,
                )  # fmt: skip
        return planned


def _companions(layout: BatchLayout, batches: Sequence[tuple[Batch, Sequence[int]]]) -> MediaRows:
    """Media of the rows, of which every microbatch needs the first kind: beside it rows without have their loss."""
    media = MediaRows(layout, batches)
    media.needed = [unit for unit in MODALITIES if unit in media.present][:1]
    return media


class _Rows(NamedTuple):
    """Some rows of a batch, not selected yet."""

    source: Batch
    places: list[int]
    """Where they are in it."""
    lengths: list[int]
    """Columns that each of them needs."""
    image_tokens: list[int]
    """Image tokens of each of them; zeros without a cap of them."""
    decoder_width: int
    """Columns that each of them has besides, of a decoder's own text, which is not trimmed."""

    def take(self, which: Iterable[int]) -> _Rows:
        """Some of these rows."""
        which = list(which)
        places, lengths, images = (
            [column[k] for k in which] for column in (self.places, self.lengths, self.image_tokens)
        )
        return self._replace(places=places, lengths=lengths, image_tokens=images)


Planned = tuple[_Rows, Sequence[AddedRow]]
"""A microbatch: rows of a batch, and those that are added to them."""


def _width(rows: _Rows) -> int:
    """Columns of the batch that the rows are in."""
    ids = rows.source.get('input_ids')
    return max(rows.lengths) if ids is None else ids.shape[1]


def _sizes(rows: _Rows) -> list[int]:
    """Columns of each row, those of a decoder's own text included."""
    return [length + rows.decoder_width for length in rows.lengths]


def _decoder_width(layout: BatchLayout, batch: Batch) -> int:
    """Columns of a text that is not the rows' own: what a decoder is given, where the rows' is an encoder's."""
    texts = {key: batch.get(key) for key in ('labels', 'decoder_input_ids') if 'input_ids' in batch}
    widths = [
        text.shape[1] for key, text in texts.items()
        if isinstance(text, torch.Tensor) and text.dim() == 2 and not layout.entry_of(batch, key).seq_dims
    ]  # fmt: skip
    return max(widths, default=0)


def _labels_behind_padding(layout: BatchLayout, batch: Batch) -> list[bool]:
    """Which left-padded rows have a label on their first token: it is predicted from a pad, which trimming takes."""
    labels, real = own_labels(batch), layout.real_positions(batch)
    if labels is None:
        return [False] * len(real)
    first = real.int().argmax(dim=1)
    labelled = labels.gather(1, first[:, None])[:, 0] != IGNORE_INDEX
    return (labelled & (first > 0)).tolist()


def _units_needed(family: Family, in_use: Sequence[str]) -> list[str]:
    """Media that every microbatch must hold: those that the step has, and one for each tower that it would not use."""
    towers = [tower for tower in family.towers if not set(tower) & set(in_use)]
    needed = [*in_use, *(tower[0] for tower in towers)]
    return needed[:1] if family.one_kind else needed
