# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about the rows of a collated batch, which decide how it is cut, and ranges of such facts.

The first-batch check computes gradients of a few rows to show that no cut of a batch changes them. :class:`RowRanges`
remember which rows the check has looked at. If a later step has rows outside of them, the check runs again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch

from composer_tokacc.batch import (
    COUNT_KEYS,
    IGNORE_INDEX,
    MODALITIES,
    Batch,
    Reach,
    attended_positions,
    has_text,
    lacks_labels,
    num_runs,
    outer_positions,
    sample_name,
)
from composer_tokacc.compat import num_writes
from composer_tokacc.layout.families import Media
from composer_tokacc.layout.found import (
    Readings,
    agreed_readings,
    has_audio_along_text,
    joined_readings,
    lengths_of_runs,
)
from composer_tokacc.layout.layout import (
    BatchLayout,
    labels_along_text,
    layout_of_rows,
    media_entries,
    modalities_of,
    real_positions_of,
)
from composer_tokacc.layout.pre_split import microbatches_of
from composer_tokacc.layout.tensors import Entry
from composer_tokacc.refusals import InvalidInputError

KEYS_WITHOUT_CODES = ('input_ids', 'attention_mask', 'labels', 'position_ids', *COUNT_KEYS)
"""Keys without :attr:`RowFacts.codes`. Their values leave no row or token out of a loss, or are described by other
facts."""
LOWEST_CODE = -128
"""Lowest code, see :attr:`RowFacts.codes`. Lower integers count as this one. Usual codes are not below -100."""
HIGHEST_CODE = 16
"""Highest code. Higher integers are usually ids or counts. If they were codes, the check would run in nearly every
step. For the same reason codes above 0 count only if the tensor has no higher one, see :func:`_keys_of_numbers`."""


@dataclass(frozen=True)
class RowFacts:
    """Facts about the rows of one collated batch, as :func:`describe` finds them.

    Args:
        batch: A shallow copy of the batch. Its rows are selected later.
        layout: How its tensors belong to rows.
        side: The side on which rows are padded, ``'left'`` or ``'right'``. If none is padded, ``'right'``.
        width: Padded width of the rows.
        is_padded: Whether some position is not real: padding, or a hole between attended positions.
        real: Which positions are attended or labelled, ``(rows, width)`` bool.
    """

    batch: Batch = field(repr=False)
    layout: BatchLayout = field(repr=False)
    side: str
    width: int
    is_padded: bool
    real: torch.Tensor = field(repr=False)

    def describes(self, layout: BatchLayout, batch: Batch) -> bool:
        """Returns whether these facts hold for a batch: it has the same layout, and no value was changed since.

        A callback or an algorithm may have replaced a value, or may have written into a tensor.
        """
        if layout is not self.layout or batch.keys() != self.batch.keys():
            return False
        are_same = all(value is self.batch[key] for key, value in batch.items())
        return are_same and _writes_into(batch) == self._writes

    @cached_property
    def _writes(self) -> dict[str, int]:
        """How often each tensor had been written into when :func:`describe`, which fills this, found the facts."""
        return _writes_into(self.batch)

    @cached_property
    def layout_of_rows(self) -> BatchLayout:
        """The layout of rows that are selected from the batch."""
        return layout_of_rows(self.layout, [self.batch])

    @cached_property
    def _reach(self) -> Reach:
        """How far the real positions of each row reach from the first and from the last column."""
        return Reach.of(self.real)

    @cached_property
    def lengths(self) -> list[int]:
        """Width of each row without its padding, at least 1."""
        return self._reach.lengths(self.side)

    @property
    def has_ids(self) -> bool:
        """Whether the batch has the ids or the vectors of its text. If not (Whisper), rows are those of ``labels``."""
        return has_text(self.batch)

    @property
    def has_positions(self) -> bool:
        """Whether the batch gives the positions of its tokens."""
        return self.batch.get('position_ids') is not None

    @cached_property
    def may_be_trimmed(self) -> bool:
        """Whether padding may be cut off. Not if positions depend on the width, or if audio lies along the text.

        Without ids or vectors (Whisper) nothing tells which positions are padding.
        """
        if not self.has_ids or self.layout.width_matters(self.batch):
            return False
        return not has_audio_along_text(self.batch, self.layout.config)

    @cached_property
    def _media_entries(self) -> dict[str, Entry]:
        """How the tensors of images, videos and audios belong to the rows, by key."""
        return media_entries(self.layout, self.batch)

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """Number of items of each row, by modality. Only modalities that have tensors in the batch are keys."""
        counts = {}
        for modality in modalities_of(self._media_entries):
            counts[modality] = self.layout.units_per_row(self.batch, modality)
        return counts

    @cached_property
    def media(self) -> list[int]:
        """Number of images, videos and audios of each row, all together."""
        if not self.counts:
            return [0] * len(self.real)
        return [sum(counts) for counts in zip(*self.counts.values(), strict=True)]

    def media_sizes(self, modality: str) -> list[float | None]:
        """Returns the number of placeholders of the largest item in each row; None: the row has no item.

        The number stands for the size of the item. The largest item counts, because a model that pads items pads them
        to the largest one. Each item is expected to have one run of placeholders. If a row has another number of runs
        than items, because images touch each other or a token ends each line, the mean of its items is returned.
        """
        counts = self.counts.get(modality, [])
        if not any(counts):
            return [None] * len(self.real)
        media = self.layout.family.media.get(modality, Media())
        is_placeholder = media.placeholders(self.batch, self.layout.config, modality)
        if is_placeholder is None:  # nothing tells the placeholders, so all items get the size 0
            is_placeholder = torch.zeros_like(self.real)
        sizes: list[float | None] = []
        for runs, num_items in zip(lengths_of_runs(is_placeholder), counts, strict=True):
            if num_items == 0:
                sizes.append(None)
            elif len(runs) == num_items:
                sizes.append(max(runs))
            else:
                sizes.append(sum(runs) / num_items)
        return sizes

    @cached_property
    def image_tokens(self) -> list[int]:
        """Number of placeholders of images, videos and audios in each row."""
        return self.layout.image_tokens_per_row(self.batch)

    @cached_property
    def decoder_width(self) -> int:
        """Width of the decoder's text if the encoder has another text, else 0. It is never trimmed."""
        # Labels that lie along the text show that the batch has only one text.
        if not self.has_ids or labels_along_text(self.layout, self.batch) is not None:
            return 0
        widths = [0]
        for key in ('labels', 'decoder_input_ids'):
            text = self.batch.get(key)
            if isinstance(text, torch.Tensor) and text.dim() == 2:
                widths.append(text.shape[1])
        return max(widths)

    @cached_property
    def attended(self) -> torch.Tensor:
        """Which positions the mask does not hide, ``(rows, width)`` bool."""
        return attended_positions(self.batch)

    @cached_property
    def has_hole(self) -> list[bool]:
        """Which rows have a position without attention between attended ones.

        With media in the batch, a model may number the tokens behind such a hole in another way (Qwen2-VL).
        """
        runs_of_rows = num_runs(self.attended).tolist()
        return [runs > 1 for runs in runs_of_rows]

    @cached_property
    def has_unattended_label(self) -> list[bool]:
        """Which rows have a label at a position without attention. In DeBERTa this position attends to all padding."""
        # A position is real if it has attention or a label. So without attention it has a label.
        is_unattended = self.real & ~self.attended
        return is_unattended.any(dim=1).tolist()

    @cached_property
    def begins_with_padding(self) -> list[bool]:
        """Which rows of a batch that is padded on the right have padding on the left, too.

        Trimming keeps that padding, but packing cuts it off.
        """
        if self.side == 'left':
            return [False] * len(self.real)
        # `columns` counts the columns from the first real position to the end. It is 0 in a row without real positions.
        return [0 < columns < self.width for columns in self._reach.from_last]

    @cached_property
    def codes(self) -> dict[str, list[list[int]]]:
        """The codes of each row, by key: ``LOWEST_CODE`` to ``HIGHEST_CODE`` in further tensors of integers or bools.

        Such a tensor may hold a flag, a mask, a category, or the labels of a second task, and a loss may leave out rows
        or tokens by it. It has one value or several for each row, or one for each token. In the last case only values
        at tokens with labels count. Tensors of more than two dimensions, such as boxes of tokens, are not read, to save
        time.
        """
        labels = labels_along_text(self.layout, self.batch)
        codes_by_key: dict[str, list[list[int]]] = {}
        for key, value in self.batch.items():
            if key in KEYS_WITHOUT_CODES or not isinstance(value, torch.Tensor):
                continue
            is_integer = not (value.is_floating_point() or value.is_complex())
            if not is_integer or not value.numel() or value.dim() > 2:
                continue
            entry = self.layout.entry_of(self.batch, key)
            if entry.unit != 'row' or entry.is_media or value.shape[entry.row_dim] != len(self.real):
                continue
            values = value.movedim(entry.row_dim, 0).long()
            if labels is not None and values.shape == labels.shape:
                values = values.masked_fill(labels == IGNORE_INDEX, HIGHEST_CODE + 1)  # not a code
            codes_by_key[key] = _codes_of_rows(values.reshape(len(values), -1))
        return codes_by_key

    @property
    def lowest_values(self) -> dict[str, list[int]]:
        """The lowest of the :attr:`codes` of each row, by key; 1: the row has none. Only tests read it."""
        lowest: dict[str, list[int]] = {}
        for key, codes_of_rows in self.codes.items():
            lowest[key] = [min(codes, default=1) for codes in codes_of_rows]
        return lowest

    @cached_property
    def has_first_label(self) -> list[bool]:
        """Which rows have a label on their first token."""
        labels = labels_along_text(self.layout, self.batch)
        if labels is None:
            return [False] * len(self.real)
        first_real = self.real.int().argmax(dim=1, keepdim=True)
        first_labels = labels.gather(1, first_real)[:, 0]
        return (first_labels != IGNORE_INDEX).tolist()

    @cached_property
    def has_label_behind_padding(self) -> list[bool]:
        """Which rows of a batch that is padded on the left have padding, and a label on the first token behind it.

        The last pad predicts this label. Without the pad the label would not count, so the row cannot be trimmed.
        """
        if self.side != 'left':
            return [False] * len(self.real)
        has_padding = ~self.real[:, 0]
        has_label = torch.tensor(self.has_first_label, device=self.real.device)
        return (has_label & has_padding).tolist()


def _writes_into(batch: Batch) -> dict[str, int]:
    """Returns how often each tensor of a batch was written into."""
    writes = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            writes[key] = num_writes(value)
    return writes


def _codes_of_rows(values: torch.Tensor) -> list[list[int]]:
    """Returns the codes among the values of each row, ``(rows, values)``, each code once and rising."""
    # A table with a column for each code, and a last one for all higher values.
    num_codes = HIGHEST_CODE + 1 - LOWEST_CODE
    columns = values.clamp(LOWEST_CODE, HIGHEST_CODE + 1) - LOWEST_CODE
    has_code = torch.zeros(len(values), num_codes + 1, dtype=torch.bool, device=values.device)
    has_code.scatter_(1, columns, True)
    codes: list[list[int]] = [[] for _ in range(len(values))]
    for row, column in has_code[:, :num_codes].nonzero().tolist():
        codes[row].append(column + LOWEST_CODE)
    return codes


COLLATED_BY_LOADER = 'microbatches that a loader has collated'
"""The ``kind`` of the rows of a pre-split batch, for :func:`check_first_labels`."""


def check_first_labels(facts: RowFacts, loss_rule: str, kind: str) -> None:
    """Raises ValueError if padding on the left predicts a label.

    Called for rows whose padding depends on the cut or on the loader. Such a label makes the loss depend on it, too.

    Args:
        facts: The facts about the rows.
        loss_rule: Nothing is raised for ``'unshifted'``, because no pad predicts a label then, and for ``''``, because
            the rule is not known yet.
        kind: A name of the rows for the message, such as ``'packed rows'``.
    """
    if loss_rule in ('', 'unshifted') or not any(facts.has_label_behind_padding):
        return
    row = facts.has_label_behind_padding.index(True)
    raise InvalidInputError(
        f'The first token of a row must have no label in {kind} if rows are padded on the left, got: a label in '
        f'{sample_name(facts.batch, row)}. A pad would predict it, so whether it counts depends on the cut. Mask that '
        'label (-100) in the collator, or pad on the right (docs/errors.md#padding).'
    )


def describe(layout: BatchLayout, batch: Batch) -> RowFacts:
    """Returns the facts about a batch's rows. Reads masks and labels now. Other facts are found when first read.

    Raises:
        ValueError: If ``mm_token_type_ids`` are padded on another side than the ids.
    """
    real = real_positions_of(layout, batch)
    _check_types_on_padding(layout, batch, real)
    reach = Reach.of(real)
    facts = RowFacts(
        batch=dict(batch),
        layout=layout,
        side=reach.side,
        width=layout.width(batch),
        is_padded=not bool(real.all()),
        real=real,
    )
    # Fills two cached properties: the reach is computed once, and writes are counted from now on.
    vars(facts)['_reach'] = reach
    vars(facts)['_writes'] = _writes_into(facts.batch)
    return facts


def _check_types_on_padding(layout: BatchLayout, batch: Batch, real: torch.Tensor) -> None:
    """Raises ValueError, naming the row, if ``mm_token_type_ids`` are not 0 on padding.

    Then they are probably padded on another side than the ids. Trimming would cut off the types of images, and a model
    that numbers its positions by them (Qwen-VL) would number images as text. A placeholder on padding may have any
    type: if a batch has no image, LLaMA-Factory adds the placeholders of a dummy image, and hides them by the mask.
    """
    types = batch.get('mm_token_type_ids')
    if not isinstance(types, torch.Tensor) or types.shape != real.shape:
        return
    is_wrong = outer_positions(real) & (types != 0) & ~layout.is_placeholder(batch)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise InvalidInputError(
            f'`mm_token_type_ids` must be 0 where `attention_mask` is 0, got: {types[row, column].item()} in column '
            f'{column} of {sample_name(batch, row)}. Pad them on the side on which `input_ids` are padded.'
        )


def describe_all(layout: BatchLayout | None, batch: Batch) -> list[RowFacts]:
    """Returns the facts of a batch, or of each microbatch of a pre-split one; an empty list without a layout."""
    if layout is None:
        return []
    return [describe(layout, microbatch) for microbatch in microbatches_of(batch)]


Limit = tuple[float, ...]
"""The largest values of a property that were seen. For example, a limit of images ``(3, True, -16, 64, False)`` begins
with: up to 3 images in a row, several rows with images, 16 to 64 placeholders. A smallest value, such as 16, is kept as
its negative, and a bool says whether rows had something. So rows lie within a limit if none of their values is larger.
A property without values has the limit ``()``: it is enough to have seen it once."""

# Names of properties.
PACKED_ROWS = 'packed rows'
UNATTENDED_LABELS = 'labels without attention'
PADDING_ON_BOTH_SIDES = 'padding on both sides'
UNLABELLED_ROWS = 'rows without labels'
PARTLY_UNLABELLED = 'rows with and without labels'
SEVERAL_ROWS = 'several rows'
PADDED_ROWS = 'rows padded'
"""The beginning of the name. It goes on with the side, such as ``' on the left'``."""
BEYOND_ROTARY_LIMIT = 'rows beyond the rotary limit'
WITH_POSITIONS = ', with position_ids'
"""The end of the names of padded rows and of rows beyond the rotary limit if the batch has ``position_ids``."""


@dataclass(frozen=True, kw_only=True)
class RowRanges:
    """Ranges of the properties of some rows, for example of those that the first-batch check has looked at.

    The check shows on a few rows that no cut changes their gradient. This holds for other rows only if the model treats
    them in the same way. But models change at some size. DeepSeek-V3.2 attends to the best k keys as soon as there are
    more than k columns, Llama 4 scales attention from some column on, HunYuan-VL numbers the images of a batch,
    Qwen3-Omni pads short audios to the longest one, and in GLM-ASR the padding changes the output. Nobody knows these
    thresholds beforehand.

    So the ranges are exact: a row outside of them is looked at before the step is cut, and the ranges grow to include
    it. A range ends at the smallest and the largest value that was seen, never at a rounded one, because a threshold
    could lie in between. Random lengths set a new maximum about log(n) times in n steps. With the lengths of AI2D,
    ChartQA and DocVQA, rows lie outside of a range in 5 to 15 of the first 200 steps (`tests/checks/test_ranges.py`).

    Args:
        limits: Limits of the properties that the rows had, by name. A name about images, videos or audios begins with
            that word.
        readings: Possible readings of the tensors that no family registers.
    """

    limits: Mapping[str, Limit] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)

    def missing(self, other: RowRanges) -> list[str]:
        """Returns names of the properties in which the other rows lie outside of these ranges."""
        missing = []
        for name, other_limit in other.limits.items():
            limit = self.limits.get(name)
            if limit is None or _larger(limit, other_limit) != limit:
                missing.append(name)
        for key, possible in other.readings.items():
            # The key is missing if it is new, or if its most likely reading would change.
            earlier = self.readings.get(key)
            if earlier is None or agreed_readings(earlier, possible)[:1] != earlier[:1]:
                missing.append(f'the key {key!r}')
        return missing

    def joined(self, other: RowRanges) -> RowRanges:
        """Returns the smallest ranges that cover both. Raises ValueError if a key means different things in them."""
        limits = dict(self.limits)
        for name, limit in other.limits.items():
            limits[name] = _larger(limits.get(name, limit), limit)
        return RowRanges(limits=limits, readings=joined_readings(self.readings, other.readings))

    def without_padding(self) -> RowRanges:
        """Returns the ranges without the limits of padded rows, for a check that has not trimmed any row."""
        limits = {name: limit for name, limit in self.limits.items() if not name.startswith(PADDED_ROWS)}
        return RowRanges(limits=limits, readings=self.readings)


def _larger(first: Limit, second: Limit) -> Limit:
    """Returns the larger one of each pair of values."""
    return tuple(map(max, first, second))


def ranges_of(facts_of_batches: Sequence[RowFacts], largest_packed_row: int = 0) -> RowRanges:
    """Returns the ranges of the rows of one rank's batch.

    Args:
        facts_of_batches: Facts of the batch, or of each of its microbatches.
        largest_packed_row: The most tokens that a packed row made of these rows can have; 0: they are not packed.
    """
    lengths: list[int] = []
    media_per_row: list[int] = []
    has_no_label: list[bool] = []
    has_holes = False
    limits: dict[str, Limit] = {}
    readings: Readings = {}
    keys_of_numbers = _keys_of_numbers(facts_of_batches)
    for facts in facts_of_batches:
        lengths += facts.lengths
        media_per_row += facts.media
        has_holes = has_holes or any(facts.has_hole)
        if any(facts.has_unattended_label):
            limits[UNATTENDED_LABELS] = ()
        if any(facts.begins_with_padding):
            limits[PADDING_ON_BOTH_SIDES] = ()
        has_no_label += lacks_labels(facts.batch)
        for key, codes_of_rows in facts.codes.items():
            for code in set(chain.from_iterable(codes_of_rows)):
                if code <= 0 or key not in keys_of_numbers:
                    limits[name_of_code(key, code)] = ()
        readings = joined_readings(readings, facts.layout_of_rows.readings)
    if len(lengths) > 1:
        limits[SEVERAL_ROWS] = ()
    if any(has_no_label):
        limits[UNLABELLED_ROWS] = ()
        if not all(has_no_label):
            limits[PARTLY_UNLABELLED] = ()
    # Without ids or vectors (Whisper) no row is trimmed.
    with_ids = [facts for facts in facts_of_batches if facts.has_ids]
    suffix = ''
    if any(facts.has_positions for facts in with_ids):
        suffix = WITH_POSITIONS
    limits |= _rotary_limits(with_ids, suffix)
    limits |= _padded_limits(with_ids, suffix)
    if largest_packed_row:
        # The longest document, and the largest packed row.
        limits[PACKED_ROWS] = (max(lengths), largest_packed_row)
    for modality in MODALITIES:
        limit = _media_limit(modality, facts_of_batches)
        if limit is not None:
            limits[f'{modality}s'] = limit
    has_media = any(media_per_row)
    if has_media and not all(media_per_row):
        limits['rows with and without media'] = ()
    # Two names, because a model may handle holes in another way if the batch has media. So holes that were seen in text
    # alone say nothing about holes in a batch with media.
    if has_holes and has_media:
        limits['holes beside media'] = ()
    elif has_holes:
        limits['holes'] = ()
    return RowRanges(limits=limits, readings=readings)


def _keys_of_numbers(facts_of_batches: Iterable[RowFacts]) -> set[str]:
    """Returns the keys of tensors that have a value above ``HIGHEST_CODE``, so that they hold ids or counts.

    In such a tensor every small number comes up sooner or later. Only 0 and negative values, such as -100, may have a
    meaning of their own.
    """
    keys: set[str] = set()
    for facts in facts_of_batches:
        for key in facts.codes:
            if int(facts.batch[key].long().max()) > HIGHEST_CODE:
                keys.add(key)
    return keys


def name_of_code(key: str, code: int) -> str:
    """Returns the name of the property that a row has this code under this key, see :attr:`RowFacts.codes`."""
    return f'the value {code} of {key}'


def largest_positions(facts: RowFacts) -> list[int]:
    """Returns for each row its largest position plus one. Without ``position_ids`` this is the length of the row.

    It is less than the length if the positions begin again with each document of a row.
    """
    positions = facts.batch.get('position_ids')
    if positions is None:
        return facts.lengths
    # (rows, width), (1, width) for all rows, or (axes, rows, width).
    num_rows = positions.shape[-2]
    largest_per_axis = positions.amax(dim=-1).view(-1, num_rows)
    largest = largest_per_axis.amax(dim=0) + 1
    return largest.expand(len(facts.real)).tolist()


def is_beyond_rotary_limit(facts: RowFacts) -> bool:
    """Returns whether the rotary embedding depends on the width, or with ``position_ids`` on the largest position."""
    width_limit = facts.layout.width_limit
    if width_limit is not None and facts.has_positions:
        return max(largest_positions(facts)) > width_limit
    return facts.layout.width_matters(facts.batch)


def _rotary_limits(facts_of_batches: Iterable[RowFacts], suffix: str) -> dict[str, Limit]:
    """Returns the limit of all rows together if some of them are beyond the rotary limit, else an empty dict.

    Its two values are the smallest one of the :func:`largest_positions`, as its negative, and the largest one.
    """
    positions: list[int] = []
    is_beyond = False
    for facts in facts_of_batches:
        if facts.layout.width_limit is not None:
            positions += largest_positions(facts)
            is_beyond |= is_beyond_rotary_limit(facts)
    if not is_beyond:
        return {}
    return {f'{BEYOND_ROTARY_LIMIT}{suffix}': (-min(positions), max(positions))}


def _padded_limits(facts_of_batches: Iterable[RowFacts], suffix: str) -> dict[str, Limit]:
    """Returns the limit of padded rows, as if all batches were one padded batch; an empty dict if no row is padded.

    Its values are the length of the shortest row, as its negative, the length of the longest row with padding, and the
    width.
    """
    lengths: list[int] = []
    width = 0
    side = 'right'
    for facts in facts_of_batches:
        for length, needs_padding in zip(facts.lengths, facts.has_label_behind_padding, strict=True):
            if not needs_padding:  # a row that cannot be trimmed shows nothing about trimming
                lengths.append(length)
        width = max(width, facts.width)
        # Rows without padding have the side 'right', so one 'left' decides.
        if facts.side == 'left':
            side = 'left'
    # A row without padding shows nothing about trimming.
    padded_lengths = [length for length in lengths if length < width]
    if not padded_lengths:
        return {}
    name = f'{PADDED_ROWS} on the {side}{suffix}'
    return {name: (-min(lengths), max(padded_lengths), width)}


def _media_limit(modality: str, facts_of_batches: Sequence[RowFacts]) -> Limit | None:
    """Returns the limit of a modality's items; None: no row has any.

    Its five values are:

    - the largest number of items in a row;
    - whether several rows have items;
    - two values for the range of :meth:`RowFacts.media_sizes`: the smallest size as its negative, and the largest size;
    - whether the microbatches of a pre-split batch pad items to different sizes, so that a row that moves to another
      microbatch meets another padding.
    """
    counts: list[int] = []
    sizes: list[float] = []
    for facts in facts_of_batches:
        items_per_row = facts.counts.get(modality, ())
        if any(items_per_row):
            counts += [num_items for num_items in items_per_row if num_items]
            sizes += [size for size in facts.media_sizes(modality) if size is not None]
    if not counts:
        return None
    smallest = min(sizes)
    largest = max(sizes)
    if smallest == largest:
        # No row pads the items of another, so their size does not matter. An empty range lies within any other.
        smallest = math.inf
        largest = -math.inf
    return (
        max(counts),
        len(counts) > 1,
        -smallest,
        largest,
        _is_ragged(modality, facts_of_batches),
    )


def _is_ragged(modality: str, facts_of_batches: Sequence[RowFacts]) -> bool:
    """Returns whether microbatches pad a tensor of the modality to different sizes."""
    first_shapes: dict[str, torch.Size] = {}
    for facts in facts_of_batches:
        for key, entry in facts._media_entries.items():
            if entry.modality != modality:
                continue
            item_shape = facts.batch[key].shape[1:]
            first_shape = first_shapes.setdefault(key, item_shape)
            if item_shape != first_shape:
                return True
    return False
