# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a multimodal batch: which tensors belong to which row; select, trim, join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from composer_tokacc.batch import MODALITIES, Batch, span, text_of
from composer_tokacc.layout.families import FAMILIES, TEXT_ENTRIES, Entry, Family
from composer_tokacc.layout.found import (
    carried_counts,
    found_counts,
    found_entry,
    found_family,
    has_sound_along_text,
    items_of_rows,
)
from composer_tokacc.layout.placeholders import stand_at, token_ids
from composer_tokacc.layout.tensors import cat_padded, compact, renumber, select_rows
from composer_tokacc.planning import check_choice, check_count, check_kind

PATCHES = {'patch': ('image', 'image_grid_thw'), 'video_patch': ('video', 'video_grid_thw')}
"""Units that are parts of another: of which, and the tensor whose product says how many."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the entries of a batch belong to its rows.

    A batch is a mapping with ``input_ids`` of shape ``(rows, width)``; without them (Whisper) its rows are those of
    ``labels``, and nothing is trimmed. Python lists are per-row facts, one entry per row (``num_images`` among them);
    strings, numbers, booleans and ``None`` are shared by all rows.

    Args:
        family: The model family's media tensors.
        config: The model's config: placeholder ids and sizes, which tell the images of one row from those of the next.
            None: only what the batch carries is known.
        extra: Entries registered on top, by key: see :meth:`with_entries`.
    """

    family: Family
    config: Any = None
    extra: Mapping[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kind('family', self.family, Family)
        for name, entry in self.extra.items():
            check_kind(name, entry, Entry)

    @classmethod
    def infer(cls, batch: Batch) -> BatchLayout:
        """Returns the layout that the batch's own keys and shapes imply."""
        check_kind('batch', batch, Mapping)
        return cls(family=next((family for family in FAMILIES if family.matches(batch)), Family(name='found')))

    @classmethod
    def for_model(cls, model: Any) -> BatchLayout:
        """The layout of a Hugging Face model (or its config, or a Composer ``HuggingFaceModel``, in DDP or not)."""
        model = getattr(model, 'module', model)
        config = getattr(model, 'config', model)
        if not hasattr(config, 'model_type'):
            raise TypeError(f'`model` must have a `config` with a `model_type`, got: {type(model).__name__}.')
        registered = (family for family in FAMILIES if config.model_type in family.model_types)
        return cls(family=next(registered, None) or found_family(config), config=config)

    def with_entries(self, **entries: Entry) -> BatchLayout:
        """Returns a layout that knows further entries, e.g. ``with_entries(ocr_boxes=Entry(unit='image'))``."""
        return replace(self, extra={**self.extra, **entries})

    @property
    def image_token_id(self) -> int | None:
        """Placeholder id of an image, where the config names one."""
        return next(iter(token_ids(self.config, 'image')), None)

    def image_tokens_per_row(self, batch: Batch) -> list[int]:
        """Returns placeholders of images, videos and audios in each row.

        Raises:
            ValueError: If the layout knows no config, which names them.
        """
        if self.config is None:
            raise ValueError(
                'Image tokens must be known to count them, got: a layout without the model. Pass `model=`, or use '
                'TokenAccumulation.'
            )
        return self.is_placeholder(batch).sum(dim=1).tolist()

    def is_placeholder(self, batch: Batch) -> torch.Tensor:
        """Returns where placeholders of images, videos and audios stand, ``(rows, width)`` bool."""
        ids = [token_id for modality in MODALITIES for token_id in token_ids(self.config, modality)]
        return stand_at(text_of(batch), ids)

    @cached_property  # asked of every microbatch, and reading a config is slow
    def width_limit(self) -> int | None:
        """Width beyond which the rotary embedding depends on the width of the batch; None: it never does."""
        config = self.config.get_text_config() if hasattr(self.config, 'get_text_config') else self.config
        rope = getattr(config, 'rope_parameters', None) or getattr(config, 'rope_scaling', None) or {}
        nested = [value for value in rope.values() if isinstance(value, Mapping)]  # by the type of a layer
        scalings = [one for one in (rope, *nested) if one.get('rope_type', one.get('type')) in ('dynamic', 'longrope')]
        name = 'original_max_position_embeddings'
        limits = [scaling.get(name) or getattr(config, name, None) for scaling in scalings]
        return min((limit or config.max_position_embeddings for limit in limits), default=None)

    def width_matters(self, batch: Batch) -> bool:
        """Whether no column of the batch may be trimmed, as the model's positions depend on the batch's width."""
        limit = self.width_limit
        return limit is not None and batch.get('input_ids') is not None and self.width(batch) > limit

    # Which entry is what.

    @cached_property
    def _known(self) -> Mapping[str, Entry]:
        return {**TEXT_ENTRIES, **self.family.entries, **self.extra}

    def num_rows(self, batch: Batch) -> int:
        """Returns the number of rows."""
        return text_of(batch).shape[0]

    def width(self, batch: Batch) -> int:
        """Returns the number of columns of the rows' text."""
        return text_of(batch).shape[1]

    def entry_of(self, batch: Batch, key: str) -> Entry:
        """Returns how a tensor belongs to rows; one with a width of its own (a decoder's labels) has no columns.

        Raises:
            ValueError: If neither the layout knows its name, nor its shape tells.
        """
        value, width = batch[key], self.width(batch)
        entry = self._known.get(key) or found_entry(batch, key, self.num_rows(batch), width)
        if entry is None:
            raise ValueError(
                f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, or of the rows, got: a '
                f'tensor of shape {tuple(value.shape)}. Register it: `layout.with_entries({key}=Entry(unit=...))`, '
                "with unit one of 'row', 'image', 'patch', 'video', 'video_patch', 'audio', 'shared'."
            )
        if key == 'loss_weights' and value.dim() == 1:
            return Entry(absent=entry.absent)  # of rows, not of positions
        if key == 'attention_mask' and value.dim() > 2:
            # (rows, width, width) and (rows, heads, width, width) carry the width twice; 0 in an additive mask would
            # attend.
            fill = torch.finfo(value.dtype).min if value.dtype.is_floating_point else 0
            entry = Entry(seq_dims=(-2, -1), fill=fill)
        if key == 'position_ids' and value.shape == (1, width):
            entry = Entry(unit='row' if self.num_rows(batch) == 1 else 'shared', seq_dims=(1,))
        is_decoders = 'input_ids' not in batch or (key in ('labels', 'loss_weights') and 'decoder_input_ids' in batch)
        has_width = all(value.shape[dim] == width for dim in entry.seq_dims) and not is_decoders
        return entry if has_width else replace(entry, seq_dims=())

    def _not_text(self, batch: Batch) -> dict[str, Entry]:
        """Returns how tensors that are no text belong to rows; asked of every microbatch, so text is told by name."""
        text = TEXT_ENTRIES.keys() - self.extra.keys() - self.family.entries.keys()
        keys = [key for key, value in batch.items() if key not in text and isinstance(value, torch.Tensor)]
        return {key: self.entry_of(batch, key) for key in keys}

    def tensors_of(self, batch: Batch, unit: str) -> dict[str, torch.Tensor]:
        """Returns the tensors that have one entry per image, video, audio or part of one, by key."""
        return {key: batch[key] for key, entry in self._not_text(batch).items() if entry.unit == unit}

    def media_of(self, batch: Batch) -> list[str]:
        """Returns which of images, videos and audios have tensors in the batch."""
        entries = self._not_text(batch).values()
        units = {'image' if entry.slot_dim is not None else entry.unit.partition('/')[0] for entry in entries}
        units |= {PATCHES[unit][0] for unit in units & PATCHES.keys()}
        return [unit for unit in MODALITIES if unit in units]

    # What each row holds.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Number of images of each row; where the processor cuts an image into tiles (InternVL), each is an image."""
        return self.units_per_row(batch, 'image')

    def media_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of images, videos and audios of each row."""
        return [sum(row) for row in zip(*(self.units_per_row(batch, unit) for unit in MODALITIES), strict=True)]

    def units_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns how many of a unit (``'image'``, ``'video'``, ``'audio'``, ``'patch'``, ...) every row holds.

        Known by the family's slots, by the carried list ``num_<unit>s`` where it sums up to the items of the batch, or
        by the placeholders: rows hold whole items, whose placeholders the config and the batch tell, in order.

        Raises:
            ValueError: If nothing tells which of them belong to which row.
        """
        if unit == 'row':
            return [1] * self.num_rows(batch)
        if unit in PATCHES:
            whole, grid = PATCHES[unit]
            ends = [0, *accumulate(batch[grid].prod(dim=1).tolist())]
            rows = [0, *accumulate(self.units_per_row(batch, whole))]
            return [ends[end] - ends[start] for start, end in pairwise(rows)]
        if unit == 'image' and self.family.slots is not None and batch.get('pixel_values') is not None:
            occupied = self.family.slots(batch)
            if len(occupied) != self.num_rows(batch):
                raise ValueError(
                    f'`pixel_values` must have a row of slots for each of {self.num_rows(batch)} rows, got: '
                    f'{len(occupied)}. Lay all images, or frames of videos, of a row into its slots.'
                )
            return (occupied * torch.arange(1, occupied.shape[1] + 1, device=occupied.device)).amax(dim=1).tolist()
        modality, _, count = unit.partition('/')
        if count:
            return found_counts(batch, self.config, modality, int(count), self.num_rows(batch))
        return self._units_by_items(batch, unit)

    def _units_by_items(self, batch: Batch, unit: str) -> list[int]:
        num_rows, carried = self.num_rows(batch), carried_counts(batch, unit)
        sizes = {key: value.shape[0] for key, value in self.tensors_of(batch, unit).items()}
        if not sizes:
            # What the found tensors of a modality enumerate, the fewest of it: items rather than tiles and patches.
            found = {entry.unit for entry in self._not_text(batch).values() if entry.unit.startswith(f'{unit}/')}
            if found:
                return self.units_per_row(batch, min(found, key=lambda one: int(one.partition('/')[2])))
            return carried or [0] * num_rows
        num_items = max(sizes.values())
        if min(sizes.values()) < num_items:
            raise ValueError(f'The tensors of {unit}s must have one entry per {unit} each, got: {sizes}.')
        if not (self.family.has_queries and token_ids(self.config, unit)):
            if num_rows == 1:
                return [num_items]
            # The carried number is the user's: it says nothing where images were cut into tiles.
            if carried is not None and len(carried) == num_rows and sum(carried) == num_items:
                return carried
        return self._units_by_placeholders(batch, unit, num_items)

    def _units_by_placeholders(self, batch: Batch, unit: str, num_items: int) -> list[int]:
        media, num_rows = self.family.media.get(unit), self.num_rows(batch)
        carry = f'Carry `num_{unit}s` in the batch, one int per row'
        carry += ' (tiles counted)' if unit == 'image' else ''
        is_placeholder = media.placeholders(batch, self.config, unit) if media is not None else None
        if media is None or media.sizes is None or is_placeholder is None:
            model = '' if self.config is not None else ', or pass `layout=BatchLayout.for_model(model)`'
            raise ValueError(
                f'`layout` must tell which of {num_items} {unit}s belong to which of {num_rows} rows, got: no '
                f'placeholder id, and `num_{unit}s`={batch.get(f"num_{unit}s")}. {carry}{model}.'
            )
        tokens = is_placeholder.sum(dim=1).tolist()
        sizes = media.sizes(batch, self.config, num_items, sum(tokens))
        found = items_of_rows(tokens, sizes)
        if found is None:
            remedy = f'{carry}, or do not cut rows inside their media'
            if self.family.has_queries:
                remedy = f'Give processor and model the same `num_query_tokens`, and write no {unit} into the text'
            raise ValueError(
                f'`input_ids` must hold the placeholders of {num_items} whole {unit}s, got: {tokens} by row, where the '
                f'{unit}s fill {sizes or "an unknown number"}. {remedy}.'
            )
        return found

    def with_media(self, batch: Batch) -> Batch:
        """Returns the batch with grey media of no row, where it has none and the model takes none such: `has_queries`.

        An instruction is of one token. Videos have four frames: their processor writes placeholders for as many.
        """
        family = self.family
        if not family.has_queries or self.config is None or any(batch.get(key) is not None for key in family.entries):
            return batch
        device, size = text_of(batch).device, self.config.vision_config.image_size
        frames, one = (4,) if 'video' in family.media else (), torch.ones(1, 1, dtype=torch.long, device=device)
        media = {key: one for key in family.entries if key != 'pixel_values'}
        return {**batch, **media, 'pixel_values': torch.full((1, *frames, 3, size, size), 0.5, device=device)}

    # New batches out of old ones.

    def select(self, batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
        """Returns the batch of the given rows, in the given order, with exactly their images; same width.

        Raises:
            ValueError: If the layout does not know an entry, or does not find its rows in it.
        """
        if any(isinstance(row, bool) for row in rows):
            raise ValueError(f'`rows` must be numbers of rows, got: {rows}. Give those that are true.')
        (selected,) = self.split(batch, [rows])
        return selected

    def split(self, batch: Batch, groups: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
        """Returns the batches of several groups of rows: as :meth:`select` for each, but rows are counted once.

        Each row's media are copied once; not at all where a group is a run of rows in order and the batch is on its way
        to a GPU. Page-locked tensors stay page-locked.
        """
        entries: dict[str, Entry] = {}
        for key, value in batch.items():
            self._check(batch, key, value)
            if isinstance(value, torch.Tensor):
                entries[key] = self.entry_of(batch, key)
        everything, groups = list(range(self.num_rows(batch))), [list(rows) for rows in groups]
        if strange := set().union(*groups) - set(everything):
            raise ValueError(f'`rows` must be of the {len(everything)} of the batch, from 0, got: {strange}.')
        if all(rows == everything for rows in groups):
            return [dict(batch) for _ in groups]
        units = {'image' if entry.slot_dim is not None else entry.unit for entry in entries.values()}
        ends = {unit: [0, *accumulate(self.units_per_row(batch, unit))] for unit in {'row', *units} - {'shared'}}
        return [dict(batch) if rows == everything else select_rows(batch, entries, ends, rows) for rows in groups]

    def _check(self, batch: Batch, key: str, value: Any) -> None:
        is_list = isinstance(value, (list, tuple)) and len(value) == self.num_rows(batch)
        is_media = key in self.family.entries and self.family.entries[key].is_media
        is_known = isinstance(value, (torch.Tensor, str, bool, int, float))
        if (is_list and is_media) or not (is_list or is_known or value is None):
            raise ValueError(
                f'`batch[{key!r}]` must be a tensor, a list with one entry per row, or a plain value, got: '
                f'{"list of media" if is_list else type(value).__name__}. Turn it into one of these in the collator.'
            )

    def trim(self, batch: Batch, *, width_multiple: int = 1) -> dict[str, Any]:
        """Cuts the columns that no row needs; widths round up to ``width_multiple``, never beyond the batch's own."""
        check_count('width_multiple', width_multiple)
        if has_sound_along_text(batch, self.config):
            return dict(batch)
        (side, lengths), width = span(batch), self.width(batch)
        needed = min(-(-max(lengths) // width_multiple) * width_multiple, width)
        return self.narrow(batch, width - needed if side == 'left' else 0, needed)

    def narrow(self, batch: Batch, start: int, width: int) -> dict[str, Any]:
        """Keeps so many columns of the rows' text from ``start`` on."""
        kept: dict[str, Any] = dict(batch)
        if width == self.width(batch):
            return kept
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                for dim in self.entry_of(batch, key).seq_dims:
                    # Composer's LanguageCrossEntropy views labels flat, which a narrowed tensor does not allow.
                    kept[key] = compact(kept[key].narrow(dim, start, width), like=value)
        return kept

    def concat(self, batches: Sequence[Batch], *, padding_side: str = 'right', pad_token_id: int = 0) -> dict[str, Any]:
        """Returns one batch of all rows: sequence axes padded to the widest, images of all rows one after the other.

        Args:
            batches: Batches, or one-row samples; those without images may lack the image entries.
            padding_side: ``'left'`` or ``'right'``.
            pad_token_id: Id to pad ``input_ids`` with. It must be no image placeholder.

        Raises:
            ValueError: If the layout does not know an entry, or only some batches have it and it is none of images.
        """
        check_choice('padding_side', padding_side, ('left', 'right'))
        if not batches:
            raise ValueError('`batches` must hold at least one batch, got: none.')
        width = max(self.width(batch) for batch in batches)
        joined: dict[str, Any] = {}
        for key in dict.fromkeys(key for batch in batches for key in batch):
            present = [batch for batch in batches if batch.get(key) is not None]
            first = present[0][key] if present else None
            if isinstance(first, torch.Tensor):
                joined[key] = self._joined(key, present, batches, width, padding_side, pad_token_id)
            elif isinstance(first, (list, tuple)):
                _refuse_absent(key, present, batches)
                joined[key] = [item for batch in batches for item in batch[key]]
            else:
                joined[key] = first
        for unit in MODALITIES:
            if f'num_{unit}s' in joined:
                # A one-row sample tells its tiles; once joined, only the placeholders would.
                joined[f'num_{unit}s'] = [count for batch in batches for count in self._carried_counts(batch, unit)]
        return joined

    def _carried_counts(self, batch: Batch, unit: str) -> list[int]:
        return self.units_per_row(batch, unit) if self.tensors_of(batch, unit) else list(batch[f'num_{unit}s'])

    def _joined(
        self, key: str, present: Sequence[Batch], batches: Sequence[Batch], width: int, side: str, pad_token_id: int
    ) -> torch.Tensor:
        """Returns a tensor of all batches, of those in which it is present."""
        # Sequence-shaped only if so in every batch: a decoder's labels may have the encoder's width by chance.
        entries = [self.entry_of(batch, key) for batch in present]
        entry = min(entries, key=lambda entry: (entry.unit != 'shared', bool(entry.seq_dims)))
        if entry.unit == 'shared':
            return max((batch[key] for batch in present), key=torch.Tensor.numel)
        if entry.unit == 'video' and present[0][key].dim() == 5:
            _refuse_ragged_clips(self.family.name, key, present)
        if entry.is_media and entry.slot_dim is None:
            values = [batch[key] for batch in present]
        else:
            values = self._with_absent(key, present, batches, entry)
        joined = cat_padded(values, replace(entry, fill=pad_token_id) if key == 'input_ids' else entry, width, side)
        if entry.points_into is None:
            return joined
        sizes = [batch[entry.points_into].shape[:2].numel() for batch in present]
        return renumber(joined, [len(batch[key]) for batch in present], [0, *accumulate(sizes)][:-1])

    def _with_absent(
        self, key: str, present: Sequence[Batch], batches: Sequence[Batch], entry: Entry
    ) -> list[torch.Tensor]:
        """Returns the tensors to join; of batches without one no slots, or rows of the entry's ``absent`` value."""
        if entry.slot_dim is None and entry.absent is None:
            _refuse_absent(key, present, batches)
        like: torch.Tensor = present[0][key]
        values = []
        for batch in batches:
            shape = list(like.shape)
            shape[entry.row_dim] = self.num_rows(batch)
            for dim in entry.seq_dims:
                shape[dim] = self.width(batch)
            if entry.slot_dim is not None:
                shape[entry.slot_dim] = 0
            values.append(batch[key] if batch.get(key) is not None else like.new_full(shape, entry.absent or 0))
        return values


def _refuse_absent(key: str, present: Sequence[Batch], batches: Sequence[Batch]) -> None:
    if len(present) < len(batches):
        raise ValueError(
            f'`{key}` must be in every batch or in none, got: {len(present)} of {len(batches)}. Encode all samples '
            'with the same processor.'
        )


def _refuse_ragged_clips(family: str, key: str, batches: Sequence[Batch]) -> None:
    """Clips lie in one tensor without a mask: the model would compute the frames that fill it up."""
    frames = {batch[key].shape[1]: batch for batch in batches}
    if len(frames) > 1:
        names = ', '.join(f'{count} (sample {frames[count].get("sample_ids")})' for count in sorted(frames))
        raise ValueError(
            f'Videos of a batch must be of one number of frames for {family}, got: {names}. Take as many of each: '
            '`dataset.video.num_frames`.'
        )
