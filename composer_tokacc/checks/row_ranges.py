# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which rows the first-batch check has looked at, and which rows of a batch it looks at next.

The check computes gradients of a few rows to show that no cut of a batch changes them. But a model may treat rows in
another way if they have some property: they are wider, have more images, or a hole in the mask. Each kind of property
has two functions:

- ``..._limits`` yields the properties that the rows of a batch have, each with its limit: the sizes or numbers seen.
- ``..._criteria`` yields criteria that choose rows with new properties.

:func:`ranges_of` joins all limits to the :class:`RowRanges` of the batch. If a later step has rows outside of the
ranges that were checked, the check runs again, with the rows that :func:`chosen_rows` chooses by all criteria.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, TypeAlias

from composer_tokacc.batch import MODALITIES, Batch, lacks_labels
from composer_tokacc.layout import BatchLayout, RowFacts, describe
from composer_tokacc.layout.facts import HIGHEST_CODE, is_beyond_rotary_limit, is_ragged, largest_positions
from composer_tokacc.layout.readings import Readings, agreed_readings, joined_readings

MIN_ROWS = 4
"""Fewest rows of a check, if the batch has as many. They differ in length and media, so each may show another fault."""

# Properties.


class RowProperty:
    """A property of rows or of a batch. A model may treat rows with this property in another way."""


class Trait(RowProperty, Enum):
    """Properties without details. Only :attr:`PACKED_ROWS` has a limit with values."""

    SEVERAL_ROWS = 'several rows'
    PACKED_ROWS = 'packed rows'
    UNLABELLED_ROWS = 'rows without labels'
    PARTLY_UNLABELLED = 'rows with and without labels'
    PARTLY_WITH_MEDIA = 'rows with and without media'
    HOLES = 'positions without attention between attended ones'
    HOLES_BESIDE_MEDIA = 'holes in a batch with media'
    UNATTENDED_LABELS = 'labels without attention'
    PADDING_ON_BOTH_SIDES = 'padding on both sides'


@dataclass(frozen=True)
class MediaItems(RowProperty):
    """Rows have images, videos or audios."""

    modality: str


@dataclass(frozen=True)
class PaddedRows(RowProperty):
    """Rows are padded on the left or right, in a batch with or without ``position_ids``."""

    side: str
    has_positions: bool


@dataclass(frozen=True)
class BeyondRotaryLimit(RowProperty):
    """The rotary embedding depends on the width of the rows, or on the largest of their ``position_ids``."""

    has_positions: bool


@dataclass(frozen=True)
class Code(RowProperty):
    """A row has this code under this key, see :attr:`.RowFacts.codes`."""

    key: str
    code: int


@dataclass(frozen=True)
class KeyMeaning(RowProperty):
    """How the tensor under this key belongs to rows. Its range is in :attr:`RowRanges.readings`, not in the limits."""

    key: str


Limit: TypeAlias = tuple[float, ...]
"""The largest values of a property that were seen. For example, a limit of images ``(3, True, -16, 64, False)`` begins
with: up to 3 images in a row, several rows with images, 16 to 64 placeholders. A smallest value, such as 16, is kept as
its negative, and a bool says whether rows had something. So rows lie within a limit if none of their values is larger.
For example, 20 to 30 placeholders lie within 16 to 64, because -20 <= -16 and 30 <= 64. A property without values has
the limit ``()``: it is enough to have seen it once."""
Limits: TypeAlias = Iterator[tuple[RowProperty, Limit]]
"""The properties that rows have, each with its limit."""


# Ranges.


@dataclass(frozen=True, kw_only=True)
class RowRanges:
    """Ranges of the properties of some rows, for example of those that the first-batch check has looked at.

    A row outside of the ranges that were checked is looked at before the step is cut, and the ranges grow to include
    it. A range ends at the smallest and the largest value that was seen, never at a rounded one.

    The reason is that a check of a few rows holds for other rows only if the model treats them in the same way. But
    models change at some size, and nobody knows these thresholds beforehand. DeepSeek-V3.2 attends to the best k keys
    as soon as there are more than k columns, Llama 4 scales attention from some column on, HunYuan-VL numbers the
    images of a batch, Qwen3-Omni pads short audios to the longest one, and in GLM-ASR the padding changes the output.
    A threshold could lie between the largest value that was seen and a rounded one.

    Random lengths set a new maximum about log(n) times in n steps. With the lengths of AI2D, ChartQA and DocVQA, rows
    lie outside of a range in 5 to 15 of the first 200 steps (`tests/checks/test_ranges.py`).

    Args:
        limits: Limits of the properties that the rows had.
        readings: Possible readings of the tensors that no family registers.
    """

    limits: Mapping[RowProperty, Limit] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)

    def missing(self, other: RowRanges) -> list[RowProperty]:
        """Returns the properties in which the other rows lie outside of these ranges."""
        missing: list[RowProperty] = []
        for row_property, other_limit in other.limits.items():
            limit = self.limits.get(row_property)
            if limit is None or not _lies_within(other_limit, limit):
                missing.append(row_property)
        for key, possible in other.readings.items():
            # The key is missing if it is new, or if its most likely reading, which is the first one, would change.
            earlier = self.readings.get(key)
            if earlier is None or agreed_readings(earlier, possible)[:1] != earlier[:1]:
                missing.append(KeyMeaning(key))
        return missing

    def joined(self, other: RowRanges) -> RowRanges:
        """Returns the smallest ranges that cover both. Raises ValueError if a key means different things in them."""
        limits = dict(self.limits)
        for row_property, limit in other.limits.items():
            limits[row_property] = _covering_limit(limits.get(row_property, limit), limit)
        return RowRanges(limits=limits, readings=joined_readings(self.readings, other.readings))

    def without_padding(self) -> RowRanges:
        """Returns the ranges without the limits of padded rows, for a check that has not trimmed any row."""
        limits = {
            row_property: limit
            for row_property, limit in self.limits.items()
            if not isinstance(row_property, PaddedRows)
        }
        return RowRanges(limits=limits, readings=self.readings)


def _covering_limit(first: Limit, second: Limit) -> Limit:
    """Returns the smallest limit within which both lie: the larger one of each pair of values."""
    return tuple(map(max, first, second))


def _lies_within(inner: Limit, outer: Limit) -> bool:
    """Returns whether no value of a limit is larger than that of another one."""
    return all(value <= largest for value, largest in zip(inner, outer, strict=True))


class Criterion(NamedTuple):
    """Chooses one row of a batch: among the rows that have a certain property, the one with the lowest cost.

    A few rows are chosen by one criterion after the other. All of these are wishes: if no row fulfils one, another row
    is chosen. The order of their importance is in :func:`_best_row`.
    """

    costs: Sequence[float]  # of each row
    has_property: Sequence[bool] | None = None  # which rows have the property; None: it does not matter
    needs_new_row: bool = False  # whether to choose a row that no earlier criterion has chosen
    needs_label: bool = True  # whether a row with labels comes before one without, whatever their costs are


# Kinds of properties, the most important one first.

# Sizes.


def _rotary_limits(facts_of_batches: Iterable[RowFacts]) -> Limits:
    """Yields one limit for all rows if some of them are beyond the rotary limit.

    Its two values are the smallest one of the :func:`.largest_positions`, as its negative, and the largest one.
    """
    positions: list[int] = []
    is_beyond = False
    has_positions = False
    for facts in facts_of_batches:
        if not facts.has_ids or facts.layout.width_limit is None:
            continue
        has_positions |= facts.has_positions
        positions += largest_positions(facts)
        is_beyond |= is_beyond_rotary_limit(facts)
    if is_beyond:
        yield BeyondRotaryLimit(has_positions), (-min(positions), max(positions))


def _size_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields the criteria for the longest and the shortest row, which are always chosen."""
    sizes = _sizes(facts, missing)
    # The longest row has the least padding to trim, and the shortest row has the most. The longest row is often
    # truncated and has no label. It is chosen nevertheless, because the other rows may depend on its length.
    yield Criterion([-size for size in sizes], needs_label=False)
    yield Criterion(sizes)


def _sizes(facts: RowFacts, missing: Collection[RowProperty]) -> list[int]:
    """Returns the length of each row. If positions beyond the rotary limit are new, returns its largest position."""
    # Without `position_ids` the largest position follows from the length. With them it may be less, because positions
    # restart in a row of several documents.
    if BeyondRotaryLimit(has_positions=True) in missing:
        return largest_positions(facts)
    return facts.lengths


# Rows without labels.


def _unlabelled_limits(facts_of_batches: Iterable[RowFacts]) -> Limits:
    """Yields limits without values if some rows have no label."""
    has_no_label: list[bool] = []
    for facts in facts_of_batches:
        has_no_label += lacks_labels(facts.batch)
    if any(has_no_label):
        yield Trait.UNLABELLED_ROWS, ()
        if not all(has_no_label):
            yield Trait.PARTLY_UNLABELLED, ()


def _unlabelled_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields the criterion for a row without labels if such rows are new, alone or together with other rows."""
    if Trait.UNLABELLED_ROWS in missing or Trait.PARTLY_UNLABELLED in missing:
        yield Criterion(facts.lengths, lacks_labels(facts.batch), needs_label=False)


# Images, videos and audios.


def _media_limits(facts_of_batches: Sequence[RowFacts]) -> Limits:
    """Yields the limits of the modalities that some row has, and a limit without values if other rows have no media."""
    for modality in MODALITIES:
        limit = _limit_of_items(modality, facts_of_batches)
        if limit is not None:
            yield MediaItems(modality), limit
    media_per_row: list[int] = []
    for facts in facts_of_batches:
        media_per_row += facts.media
    if any(media_per_row) and not all(media_per_row):
        # It needs no criterion, because _last_criteria() looks for rows of both kinds.
        yield Trait.PARTLY_WITH_MEDIA, ()


def _limit_of_items(modality: str, facts_of_batches: Sequence[RowFacts]) -> Limit | None:
    """Returns the limit of a modality's items; None: no row has any.

    Its five values are:

    - the largest number of items in a row;
    - whether several rows have items;
    - two values for the range of :meth:`.RowFacts.media_sizes`: the smallest size, as its negative, and the largest;
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
        # No row pads the items of another, so their size does not matter. The range from inf to -inf is empty: it lies
        # within any other.
        smallest = math.inf
        largest = -math.inf
    most_items = max(counts)
    have_several_rows_items = len(counts) > 1
    has_unequal_padding = is_ragged(modality, facts_of_batches)
    return (most_items, have_several_rows_items, -smallest, largest, has_unequal_padding)


def _media_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields two criteria for each new modality: the smallest item, and the largest one."""
    for modality in MODALITIES:
        if MediaItems(modality) not in missing:
            continue
        media_sizes = facts.media_sizes(modality)
        has_modality = [size is not None for size in media_sizes]
        smallest_first = [size or 0 for size in media_sizes]
        largest_first = [-size for size in smallest_first]
        yield Criterion(smallest_first, has_modality)
        # Two rows have the modality, even if their items have equal sizes, because a model may mix the items of rows.
        yield Criterion(largest_first, has_modality, needs_new_row=True)


# Masks.


def _mask_limits(facts_of_batches: Sequence[RowFacts]) -> Limits:
    """Yields limits without values for holes, for labels without attention, and for padding on both sides."""
    has_holes = any(any(facts.has_hole) for facts in facts_of_batches)
    has_media = any(any(facts.media) for facts in facts_of_batches)
    # Two properties, because a model may handle holes in another way if the batch has media. So holes that were seen in
    # text alone say nothing about holes in a batch with media.
    if has_holes and has_media:
        yield Trait.HOLES_BESIDE_MEDIA, ()
    elif has_holes:
        yield Trait.HOLES, ()
    for facts in facts_of_batches:
        if any(facts.has_unattended_label):
            yield Trait.UNATTENDED_LABELS, ()
        if any(facts.begins_with_padding):
            yield Trait.PADDING_ON_BOTH_SIDES, ()


def _mask_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields a criterion for each new property of the masks."""
    if Trait.HOLES in missing or Trait.HOLES_BESIDE_MEDIA in missing:
        yield Criterion(facts.lengths, facts.has_hole)
    if Trait.UNATTENDED_LABELS in missing:
        yield Criterion(facts.lengths, facts.has_unattended_label)
    if Trait.PADDING_ON_BOTH_SIDES in missing:
        yield Criterion(facts.lengths, facts.begins_with_padding)


# Padding.


def _padding_limits(facts_of_batches: Iterable[RowFacts]) -> Limits:
    """Yields the limit of padded rows, as if all batches were one padded batch, if a row is padded.

    Its values are the length of the shortest row, as its negative, the length of the longest row with padding, and the
    width. For example, rows of 20, 50 and 90 tokens in a batch of 90 columns have the limit ``(-20, 50, 90)``.
    """
    lengths: list[int] = []  # of the rows that may be trimmed
    width = 0
    side = 'right'
    has_positions = False
    for facts in facts_of_batches:
        if not facts.has_ids:  # without ids or vectors (Whisper) no row is trimmed
            continue
        for length, has_label_behind_padding in zip(facts.lengths, facts.has_label_behind_padding, strict=True):
            # A row whose padding predicts a label keeps its padding.
            if not has_label_behind_padding:
                lengths.append(length)
        width = max(width, facts.width)
        # Rows without padding have the side 'right', so one 'left' decides.
        if facts.side == 'left':
            side = 'left'
        has_positions |= facts.has_positions
    # A row without padding shows nothing about trimming.
    padded_lengths = [length for length in lengths if length < width]
    if padded_lengths:
        yield PaddedRows(side, has_positions), (-min(lengths), max(padded_lengths), width)


def _padding_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Always yields a criterion for a label behind padding. If padded rows are new, also yields those for widths."""
    # The first label of the row is predicted by the padding before it. Such a row is not trimmed. But packing drops the
    # padding, and the check must see that. Without such a row this criterion chooses the shortest row again.
    yield Criterion(facts.lengths, facts.has_label_behind_padding)
    if any(isinstance(row_property, PaddedRows) for row_property in missing):
        yield from _width_criteria(facts, missing)


def _width_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields the criteria for the longest row with padding, and for a row of medium length.

    A model may compute in another way above some width. Rows as long as the batch is wide do not show that, because
    they are not trimmed.
    """
    has_padding = [length < facts.width for length in facts.lengths]
    yield Criterion([-size for size in _sizes(facts, missing)], has_padding)
    about_half = (min(facts.lengths) + facts.width) / 2
    yield Criterion([abs(length - about_half) for length in facts.lengths])


# Codes: small values of a further tensor of integers or bools, see `RowFacts.codes`. They may be a flag, a mask or a
# category, by which a loss may leave out rows or tokens.


def _code_limits(facts_of_batches: Sequence[RowFacts]) -> Limits:
    """Yields limits without values for the codes of the rows. Small positive ids and counts do not count as codes."""
    keys_of_numbers = _keys_of_numbers(facts_of_batches)
    for facts in facts_of_batches:
        for key, codes_of_rows in facts.codes.items():
            for code in set(chain.from_iterable(codes_of_rows)):
                if code <= 0 or key not in keys_of_numbers:
                    yield Code(key, code), ()


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


def _code_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields a criterion for each new code."""
    for key, codes_of_rows in facts.codes.items():
        for code in sorted(set(chain.from_iterable(codes_of_rows))):
            if Code(key, code) in missing:
                has_code = [code in codes for codes in codes_of_rows]
                yield Criterion(facts.lengths, has_code, needs_label=False)


# All kinds of properties together.


def ranges_of(facts_of_batches: Sequence[RowFacts], largest_packed_row: int = 0) -> RowRanges:
    """Returns the ranges of the rows of one rank's batch.

    Args:
        facts_of_batches: Facts of the batch, or of each of its microbatches.
        largest_packed_row: The most tokens that a packed row made of these rows can have; 0: they are not packed.
    """
    properties_with_limits = chain(
        _rotary_limits(facts_of_batches),
        _unlabelled_limits(facts_of_batches),
        _media_limits(facts_of_batches),
        _mask_limits(facts_of_batches),
        _padding_limits(facts_of_batches),
        _code_limits(facts_of_batches),
    )
    limits = dict(properties_with_limits)
    lengths: list[int] = []
    readings: Readings = {}
    for facts in facts_of_batches:
        lengths += facts.lengths
        readings = joined_readings(readings, facts.layout_of_rows.readings)
    # Any rows show these two properties, so they need no criteria.
    if len(lengths) > 1:
        limits[Trait.SEVERAL_ROWS] = ()
    if largest_packed_row:
        # The longest document, and the largest packed row.
        limits[Trait.PACKED_ROWS] = (max(lengths), largest_packed_row)
    return RowRanges(limits=limits, readings=readings)


def chosen_rows(
    layout: BatchLayout,
    batch: Batch,
    missing: Collection[RowProperty],
    max_rows: int,
) -> list[int]:
    """Returns the numbers of a few rows that differ from each other.

    Args:
        layout: Which parts of each tensor belong to which row.
        batch: The batch of a rank.
        missing: The properties that are new in the batch, as returned by :meth:`RowRanges.missing`.
        max_rows: The most rows, unless new modalities and rows without labels, or :data:`MIN_ROWS`, need more.
    """
    facts = describe(layout, batch)
    # The most important criteria come first.
    first_criteria = [
        *_size_criteria(facts, missing),
        *_unlabelled_criteria(facts, missing),
        *_media_criteria(facts, missing),
    ]
    other_criteria = [
        *_mask_criteria(facts, missing),
        *_padding_criteria(facts, missing),
        *_code_criteria(facts, missing),
        *_last_criteria(facts, missing),
    ]
    has_no_label = lacks_labels(batch)
    rows: list[int] = []
    for criterion in first_criteria + other_criteria:
        _add_best_row(rows, facts, has_no_label, criterion)
    # All rows that the first criteria have chosen are kept, because this check runs for them. Each has chosen at most
    # one row.
    num_kept = max(max_rows, len(first_criteria))
    rows = rows[:num_kept]
    # Fill up with short rows, which cost little.
    for _ in range(MIN_ROWS - len(rows)):
        _add_best_row(rows, facts, has_no_label, Criterion(facts.lengths, needs_new_row=True))
    return rows


def _add_best_row(rows: list[int], facts: RowFacts, has_no_label: Sequence[bool], criterion: Criterion) -> None:
    """Adds the row that a criterion chooses to the rows, unless an earlier criterion has chosen it."""
    row = _best_row(facts, has_no_label, criterion, rows)
    if row not in rows:
        rows.append(row)


def _best_row(
    facts: RowFacts,
    has_no_label: Sequence[bool],
    criterion: Criterion,
    earlier_rows: Collection[int],
) -> int:
    """Returns the row that a criterion chooses. ``earlier_rows`` are those that earlier criteria have chosen."""

    def key(row: int) -> tuple[bool, bool, bool, float, bool, int]:
        lacks_property = criterion.has_property is not None and not criterion.has_property[row]
        is_repeated = criterion.needs_new_row and row in earlier_rows
        lacks_label = criterion.needs_label and has_no_label[row]
        # False is smaller than True, and an earlier entry counts more, so to have the property is most important. A row
        # with labels is better than one that gets them for the check. If the criterion needs no label, labels count
        # only between rows of equal cost.
        return (
            lacks_property,
            is_repeated,
            lacks_label,
            criterion.costs[row],
            has_no_label[row],
            facts.lengths[row],
        )

    return min(range(len(facts.lengths)), key=key)


def _last_criteria(facts: RowFacts, missing: Collection[RowProperty]) -> Iterator[Criterion]:
    """Yields the criteria that always come last: the shortest row of text only, the row with most media, and widths."""
    yield Criterion(facts.lengths, [num_media == 0 for num_media in facts.media])
    yield Criterion([-num_media for num_media in facts.media])
    # If padded rows are new, _padding_criteria() has yielded these already, so that their rows are not dropped.
    yield from _width_criteria(facts, missing)
