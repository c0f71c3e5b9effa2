# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about the rows of a collated batch, which decide how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from composer_tokacc.batch import (
    COUNT_KEYS,
    IGNORE_INDEX,
    Batch,
    Reach,
    attended_positions,
    has_input_text,
    lengths_of_runs,
    num_runs,
    padding_positions,
    sample_name,
)
from composer_tokacc.compat import num_writes
from composer_tokacc.counting import LossRule
from composer_tokacc.layout.families import Media
from composer_tokacc.layout.layout import (
    BatchLayout,
    labels_along_text,
    layout_of_rows,
    media_entries,
    modalities_of,
    real_positions_of,
)
from composer_tokacc.layout.pre_split import microbatches_of
from composer_tokacc.layout.readings import has_audio_along_text
from composer_tokacc.layout.tensors import Entry
from composer_tokacc.refusals import InvalidInputError

LOWEST_CODE = -128
"""Lowest code, see :attr:`RowFacts.codes`. Lower integers count as this one. Usual codes are not below -100."""
HIGHEST_CODE = 16
"""Highest code. Higher integers are usually ids or counts. If they were codes, the check would run in nearly every
step. For the same reason ``checks/row_ranges.py`` reads codes above 0 only if the tensor has no higher integer."""
KEYS_WITHOUT_CODES = ('input_ids', 'attention_mask', 'labels', 'position_ids', *COUNT_KEYS)
"""Keys without :attr:`RowFacts.codes`. A loss leaves out no row or token by ids, positions or counts, and other facts
describe the mask and the labels."""
COLLATED_BY_LOADER = 'microbatches that a loader has collated'
"""The ``kind`` of the rows of a pre-split batch, for :func:`check_first_labels`."""


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
    _writes: dict[str, int] = field(init=False, repr=False, compare=False)
    """How often each tensor of the batch had been written into when these facts were found."""

    def __post_init__(self) -> None:
        # The dataclass is frozen.
        object.__setattr__(self, '_writes', _writes_into(self.batch))

    def describes(self, layout: BatchLayout, batch: Batch) -> bool:
        """Returns whether these facts hold for a batch: it has the same layout, and no value was changed since.

        A callback or an algorithm may have replaced a value, or may have written into a tensor.
        """
        if layout is not self.layout or batch.keys() != self.batch.keys():
            return False
        are_same = all(value is self.batch[key] for key, value in batch.items())
        return are_same and _writes_into(batch) == self._writes

    @cached_property
    def layout_of_rows(self) -> BatchLayout:
        """The layout of rows that are selected from the batch."""
        return layout_of_rows(self.layout, [self.batch])

    @cached_property
    def _reach(self) -> Reach:
        """How far the real positions of each row reach from the first and from the last column."""
        return Reach.of(self.real)

    @cached_property
    def _has_padding_on_left(self) -> list[bool]:
        """Which rows have padding before their first real position, on whichever side the batch is padded."""
        # Such a row does not reach from the last column to the first. A row without real positions reaches 0 columns.
        return [0 < num_columns < self.width for num_columns in self._reach.from_last]

    @cached_property
    def lengths(self) -> list[int]:
        """Width of each row without its padding, at least 1."""
        return self._reach.lengths(self.side)

    @property
    def has_ids(self) -> bool:
        """Whether the input of the model is text, see ``has_input_text``.

        If it is not (Whisper), the rows are those of ``labels``.
        """
        return has_input_text(self.batch)

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
    def _media_entry_by_key(self) -> dict[str, Entry]:
        """How the tensors of images, videos and audios belong to the rows, by key."""
        return media_entries(self.layout, self.batch)

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """Number of items of each row, by modality. Only modalities that have tensors in the batch are keys."""
        counts = {}
        for modality in modalities_of(self._media_entry_by_key):
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
        return self._has_padding_on_left

    @cached_property
    def codes(self) -> dict[str, list[list[int]]]:
        """The codes of each row, by key. A code is an integer from ``LOWEST_CODE`` to ``HIGHEST_CODE``, or a bool.

        A loss may leave out rows or tokens by a code of a further tensor: a flag, a mask, a category, or the labels of
        a second task. So rows with a new code are checked, see ``checks/row_ranges.py``. The tensor has one value or
        several for each row, or one for each token. In the last case only values at tokens with labels count. Tensors
        of more than two dimensions, such as boxes of tokens, are not read, to save time.
        """
        labels = labels_along_text(self.layout, self.batch)
        codes_by_key: dict[str, list[list[int]]] = {}
        for key, value in self.batch.items():
            if key in KEYS_WITHOUT_CODES or not _may_hold_codes(value):
                continue
            entry = self.layout.entry_of(self.batch, key)
            if entry.unit != 'row' or entry.is_media or value.shape[entry.row_dim] != len(self.real):
                continue
            values = value.movedim(entry.row_dim, 0).long()  # (rows, ...)
            is_of_tokens = labels is not None and values.shape == labels.shape
            if is_of_tokens:
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
        pairs = zip(self.has_first_label, self._has_padding_on_left, strict=True)
        return [has_label and has_padding for has_label, has_padding in pairs]


def _writes_into(batch: Batch) -> dict[str, int]:
    """Returns how often each tensor of a batch was written into."""
    writes = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            writes[key] = num_writes(value)
    return writes


def _may_hold_codes(value: object) -> bool:
    """Returns whether a value is a tensor of integers or bools, not empty, of at most two dimensions."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return value.numel() > 0 and value.dim() <= 2


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


def check_first_labels(facts_of_batches: Sequence[RowFacts], rule: LossRule | None, kind: str) -> None:
    """Raises ValueError if padding on the left predicts a label, or would predict it in one batch of all rows.

    Called for rows whose padding depends on the cut or on the loader. Such a label makes the loss depend on it, too: a
    shifted loss counts the label if a pad stands before it, and does not count it if nothing does.

    Nothing is raised if no batch is padded on the left. Then a row that begins with padding probably does so in every
    cut. For example, its first token is a BOS that the mask hides, because the tokenizer has the same id for padding.

    Args:
        facts_of_batches: The facts about the rows: of a batch, or of each microbatch that a loader has collated.
        rule: The loss rule. Nothing is raised if it does not shift labels, because no pad predicts a label then. None:
            it is not known yet, and nothing is raised.
        kind: A name of the rows for the message, such as ``'packed rows'``.
    """
    if rule is None or not rule.shifts_labels:
        return
    if not any(facts.side == 'left' for facts in facts_of_batches):
        return
    widest = max(facts.width for facts in facts_of_batches)
    for facts in facts_of_batches:
        # One batch of all rows would pad all rows of a narrower microbatch on the left.
        gets_padding = facts.width < widest
        for row, has_label in enumerate(facts.has_first_label):
            if has_label and (gets_padding or facts._has_padding_on_left[row]):
                raise InvalidInputError(
                    f'The first token of a row must have no label in {kind} if rows are padded on the left, got: a '
                    f'label in {sample_name(facts.batch, row)}. A pad would predict it, so whether it counts depends '
                    'on the cut. Mask that label (-100) in the collator, or pad on the right '
                    '(docs/errors.md#padding).'
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
    # Fills the cached property, so that the reach is computed only once.
    vars(facts)['_reach'] = reach
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
    is_wrong = padding_positions(real) & (types != 0) & ~layout.is_placeholder(batch)
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


def is_ragged(modality: str, facts_of_batches: Sequence[RowFacts]) -> bool:
    """Returns whether microbatches pad a tensor of the modality to different sizes."""
    first_shapes: dict[str, list[int]] = {}
    for facts in facts_of_batches:
        for key, entry in facts._media_entry_by_key.items():
            if entry.modality != modality:
                continue
            shape_of_entries = list(facts.batch[key].shape)
            del shape_of_entries[entry.row_dim]  # the number of entries
            first_shape = first_shapes.setdefault(key, shape_of_entries)
            if shape_of_entries != first_shape:
                return True
    return False
