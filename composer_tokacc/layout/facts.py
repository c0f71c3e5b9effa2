# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about the rows of a collated batch: everything that a cut must know about them, found once per batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from composer_tokacc.batch import (
    IGNORE_INDEX,
    Batch,
    attended_positions,
    labels_at_text,
    lengths_of,
    real_positions,
    sample_name,
    side_of,
    text_of,
)
from composer_tokacc.layout.found import has_audio_along_text
from composer_tokacc.layout.layout import BatchLayout
from composer_tokacc.layout.placeholders import stand_at, token_ids
from composer_tokacc.layout.pre_split import microbatches_of

ZERO_ON_PADDING = ('mm_token_type_ids', 'loss_mask')
"""Keys that every processor pads with 0. Other keys differ by processor: XLNet pads `token_type_ids` with 3."""


@dataclass(frozen=True)
class RowFacts:
    """Facts about the rows of one collated batch, as :func:`describe` finds them.

    Args:
        batch: A shallow copy of the batch. Its rows are selected later.
        layout: How its tensors belong to rows.
        side: The side on which rows are padded, ``'left'`` or ``'right'``.
        width: Padded width of the rows.
        is_padded: Whether some position is padding.
        real: Which positions are attended or labelled, ``(rows, width)`` bool.
    """

    batch: Batch = field(repr=False)
    layout: BatchLayout = field(repr=False)
    side: str
    width: int
    is_padded: bool
    real: torch.Tensor = field(repr=False)

    def describes(self, layout: BatchLayout, batch: Batch) -> bool:
        """Returns whether these facts hold for a batch: same layout, and no entry was replaced since."""
        if layout is not self.layout or batch.keys() != self.batch.keys():
            return False
        return all(value is self.batch[key] for key, value in batch.items())

    @cached_property
    def lengths(self) -> list[int]:
        """Width of each row without its padding, at least 1."""
        return lengths_of(self.real, self.side)

    @property
    def has_ids(self) -> bool:
        """Whether the batch has ``input_ids``. If not (Whisper), its rows are those of ``labels``."""
        return self.batch.get('input_ids') is not None

    @property
    def has_positions(self) -> bool:
        """Whether the batch gives the positions of its tokens."""
        return self.batch.get('position_ids') is not None

    @cached_property
    def may_be_trimmed(self) -> bool:
        """Whether columns may be cut off: not if positions depend on the width, nor if audio lies along the text."""
        if not self.has_ids or self.layout.width_matters(self.batch):
            return False
        return not has_audio_along_text(self.batch, self.layout.config)

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """Number of items of each row, by modality; only modalities that have tensors in the batch."""
        counts = {}
        for modality in self.layout.media_of(self.batch):
            counts[modality] = self.layout.units_per_row(self.batch, modality)
        return counts

    @cached_property
    def media(self) -> list[int]:
        """Number of images, videos and audios of each row, all together."""
        if not self.counts:
            return [0] * len(self.real)
        return [sum(counts) for counts in zip(*self.counts.values(), strict=True)]

    def media_sizes(self, modality: str) -> list[float | None]:
        """Returns the mean number of placeholders of an item in each row; None: the row has no item."""
        counts = self.counts.get(modality, [])
        if not any(counts):
            return [None] * len(self.real)
        is_placeholder = stand_at(text_of(self.batch), token_ids(self.layout.config, modality))
        tokens_per_row = is_placeholder.sum(dim=1).tolist()
        sizes: list[float | None] = []
        for num_tokens, num_items in zip(tokens_per_row, counts, strict=True):
            sizes.append(num_tokens / num_items if num_items else None)
        return sizes

    @cached_property
    def image_tokens(self) -> list[int]:
        """Number of placeholders of images, videos and audios in each row."""
        return self.layout.image_tokens_per_row(self.batch)

    @cached_property
    def decoder_width(self) -> int:
        """Width of a decoder's text in an encoder-decoder model with ``input_ids``, else 0.

        It is never trimmed.
        """
        if not self.has_ids:
            return 0
        widths = [0]
        for key in ('labels', 'decoder_input_ids'):
            text = self.batch.get(key)
            if not isinstance(text, torch.Tensor) or text.dim() != 2:
                continue
            # Only a decoder's text does not lie along `input_ids`.
            if not self.layout.entry_of(self.batch, key).seq_dims:
                widths.append(text.shape[1])
        return max(widths)

    @cached_property
    def has_hole(self) -> list[bool]:
        """Which rows have a position without attention between attended ones. Some models count such positions."""
        attended = attended_positions(self.batch)
        # A run of attended positions starts in the first column, or behind a position without attention.
        num_runs = (attended[:, 1:] > attended[:, :-1]).sum(dim=1) + attended[:, 0]
        return (num_runs > 1).tolist()

    @cached_property
    def has_label_behind_padding(self) -> list[bool]:
        """Which left-padded rows have a label on their first token.

        The last pad before it predicts this label, so the row cannot be trimmed.
        """
        labels = labels_at_text(self.batch)
        if labels is None or self.side != 'left':
            return [False] * len(self.real)
        first_real = self.real.int().argmax(dim=1)
        is_labelled = labels.gather(1, first_real[:, None])[:, 0] != IGNORE_INDEX
        has_padding = first_real > 0
        return (is_labelled & has_padding).tolist()


def describe(layout: BatchLayout, batch: Batch) -> RowFacts:
    """Returns the facts about a batch's rows.

    Reads masks and labels now. Media are counted on first use.

    Raises:
        ValueError: If ``mm_token_type_ids`` or ``loss_mask`` are padded on another side than the ids.
    """
    real = real_positions(batch)
    side = side_of(real)
    is_padded = not bool(real.all())
    if is_padded:
        for key in ZERO_ON_PADDING:
            _check_zero_on_padding(batch, key, real)
        _check_types_of_images(layout, batch)
    return RowFacts(dict(batch), layout, side, layout.width(batch), is_padded, real)


def _check_zero_on_padding(batch: Batch, key: str, real: torch.Tensor) -> None:
    """Raises ValueError, naming the row, if a tensor of the text's shape is not 0 on padding.

    Otherwise the tensor may be padded on another side than the ids, and a trimmed microbatch would hide that.
    """
    value = batch.get(key)
    if not isinstance(value, torch.Tensor) or value.shape != real.shape:
        return
    is_wrong = (value != 0) & ~real
    if not bool(is_wrong.any()):
        return
    # A hole between real positions is not padding. There the collator may write any value.
    has_real_before = real.cumsum(dim=1) > 0
    has_real_after = real.flip(1).cumsum(dim=1).flip(1) > 0
    is_wrong &= ~(has_real_before & has_real_after)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f'`batch[{key!r}]` must be 0 where `attention_mask` is 0, got: {value[row, column].item()} in column '
            f'{column} of {sample_name(batch, row)}. Pad it on the side on which `input_ids` are padded.'
        )


def _check_types_of_images(layout: BatchLayout, batch: Batch) -> None:
    """Raises ValueError, naming the row, if ``mm_token_type_ids`` are 0 at a placeholder of an image.

    Types that are padded on another side than the ids can still be 0 on all padding. This check finds them.
    """
    ids, types = batch.get('input_ids'), batch.get('mm_token_type_ids')
    if not isinstance(ids, torch.Tensor) or not isinstance(types, torch.Tensor) or types.shape != ids.shape:
        return
    is_unmarked = stand_at(ids, token_ids(layout.config, 'image')) & (types == 0)
    if not bool(is_unmarked.any()):
        return
    # Some processors mark nothing in a row. Then the model does not read the types.
    is_unmarked &= (types != 0).any(dim=1, keepdim=True)
    if bool(is_unmarked.any()):
        row, column = is_unmarked.nonzero()[0].tolist()
        raise ValueError(
            f'`mm_token_type_ids` must mark the placeholders of images, got: 0 at the placeholder in column {column} '
            f'of {sample_name(batch, row)}. Pad it on the side on which `input_ids` are padded.'
        )


def describe_all(layout: BatchLayout | None, batch: Batch) -> list[RowFacts]:
    """Returns the facts of a batch, or of each microbatch of a pre-split one; an empty list without a layout."""
    if layout is None:
        return []
    return [describe(layout, microbatch) for microbatch in microbatches_of(batch)]
