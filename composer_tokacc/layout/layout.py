# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a multimodal batch: which tensors belong to which row; select, trim, join; the smallest row with an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, own_labels, text_of
from composer_tokacc.layout import blank_rows
from composer_tokacc.layout.families import FAMILIES, TEXT_ENTRIES, Entry, Family

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

    @classmethod
    def infer(cls, batch: Batch) -> BatchLayout:
        """The layout that the batch's own keys and shapes imply.

        Raises:
            ValueError: If no known family puts its images into a batch in this way.
        """
        for family in FAMILIES:
            if family.matches(batch):
                return cls(family=family)
        shape = tuple(batch['pixel_values'].shape)
        raise ValueError(
            f'`layout` must be given for a batch with `pixel_values` of shape {shape} and keys {sorted(batch)}: no '
            'family in composer_tokacc/layout/families.py has this format. Pass `layout=BatchLayout.for_model(model)`.'
        )

    @classmethod
    def for_model(cls, model: Any) -> BatchLayout:
        """The layout of a Hugging Face model (or its config, or a Composer ``HuggingFaceModel``, in DDP or not)."""
        model = getattr(model, 'module', model)
        config = getattr(model, 'config', model)
        families = [family for family in FAMILIES if config.model_type in family.model_types]
        if not families and hasattr(config, 'vision_config'):
            known = sorted(kind for family in FAMILIES for kind in family.model_types)
            raise ValueError(
                f'`model_type` must be one of {known}, got: {config.model_type!r}. Add a Family to '
                'composer_tokacc/layout/families.py, or pass BatchLayout(family=Family(...), config=model.config).'
            )
        return cls(family=families[0] if families else FAMILIES[-1], config=config)

    def with_entries(self, **entries: Entry) -> BatchLayout:
        """A layout that knows further entries, e.g. ``with_entries(ocr_boxes=Entry(unit='image'))``."""
        return replace(self, extra={**self.extra, **entries})

    def with_row_entries(self, batch: Batch) -> BatchLayout:
        """A layout that takes unknown tensors with one entry per row for just that."""
        unknown = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == self.num_rows(batch):
                try:
                    self.entry(key, value)
                except ValueError:
                    unknown[key] = Entry()
        return self.with_entries(**unknown)

    @property
    def image_token_id(self) -> int | None:
        """Placeholder id of an image, where the config names one."""
        return blank_rows.token_id(self.config, 'image')

    def image_tokens_per_row(self, batch: Batch) -> list[int]:
        """Placeholders of images, videos and audios in each row.

        Raises:
            ValueError: If the layout knows no config, which names them.
        """
        if self.config is None:
            raise ValueError(
                'Image tokens must be known to count them, got: a layout without the model. Pass `model=`, or use '
                'TokenAccumulation.'
            )
        found = (blank_rows.token_id(self.config, unit) for unit in MODALITIES)
        ids = torch.tensor([token_id for token_id in found if token_id is not None], dtype=torch.long)
        return torch.isin(text_of(batch), ids.to(text_of(batch).device)).sum(dim=1).tolist()

    @property
    def merge_size(self) -> int:
        """Side of the patch square that becomes one token (Qwen-VL)."""
        return getattr(getattr(self.config, 'vision_config', None), 'spatial_merge_size', 2)

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

    @cached_property
    def num_positions(self) -> int | None:
        """Columns that a row may have, as far as the config says so."""
        config = self.config.get_text_config() if hasattr(self.config, 'get_text_config') else self.config
        found = (self.width_limit, getattr(config, 'max_position_embeddings', None))
        return min((limit for limit in found if isinstance(limit, int)), default=None)

    def width_matters(self, batch: Batch) -> bool:
        """Whether no column of the batch may be trimmed, as the model's positions depend on the batch's width."""
        return (
            self.width_limit is not None and batch.get('input_ids') is not None and self.width(batch) > self.width_limit
        )

    # Which entry is what.

    def num_rows(self, batch: Batch) -> int:
        """Number of rows."""
        return text_of(batch).shape[0]

    def width(self, batch: Batch) -> int:
        """Number of columns of the rows' text."""
        return text_of(batch).shape[1]

    def entry(self, key: str, value: torch.Tensor) -> Entry:
        """How one tensor belongs to rows; unknown keys are refused by name."""
        for entries in (self.extra, self.family.entries, TEXT_ENTRIES):
            if key in entries:
                if key == 'loss_weights' and value.dim() == 1:
                    return Entry(absent=entries[key].absent)  # of rows, not of positions
                if key != 'attention_mask' or value.dim() == 2:
                    return entries[key]
                # (rows, width, width) and (rows, heads, width, width) carry the width twice; 0 in an additive mask
                # would attend.
                fill = torch.finfo(value.dtype).min if value.dtype.is_floating_point else 0
                return Entry(seq_dims=(-2, -1), fill=fill)
        raise ValueError(
            f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, got: a tensor of shape '
            f'{tuple(value.shape)}. Register it: `layout.with_entries({key}=Entry(unit=...))`, with unit one of '
            "'row', 'image', 'patch', 'video', 'video_patch', 'audio', 'shared'."
        )

    def entry_of(self, batch: Batch, key: str) -> Entry:
        """As :meth:`entry`, but a tensor with a width of its own (a decoder's labels) is not sequence-shaped."""
        value, width = batch[key], self.width(batch)
        entry = self.entry(key, value)
        is_decoders = 'input_ids' not in batch or (key in ('labels', 'loss_weights') and 'decoder_input_ids' in batch)
        has_width = all(value.shape[dim] == width for dim in entry.seq_dims) and not is_decoders
        return entry if has_width else replace(entry, seq_dims=())

    def tensors_of(self, batch: Batch, unit: str) -> dict[str, torch.Tensor]:
        """The tensors that have one entry per unit, by key."""
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        return {key: value for key, value in tensors.items() if self.entry(key, value).unit == unit}

    def media_of(self, batch: Batch) -> list[str]:
        """Which of images, videos and audios have tensors in the batch."""
        entries = [self.entry(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]
        units = {'image' if entry.slot_dim is not None else entry.unit for entry in entries}
        units |= {PATCHES[unit][0] for unit in units & PATCHES.keys()}
        return [unit for unit in MODALITIES if unit in units]

    # What each row holds.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Number of images of each row; where the processor cuts an image into tiles (InternVL), each is an image."""
        return self.units_per_row(batch, 'image')

    def media_per_row(self, batch: Batch) -> list[int]:
        """Number of images, videos and audios of each row."""
        return [sum(row) for row in zip(*(self.units_per_row(batch, unit) for unit in MODALITIES), strict=True)]

    def units_per_row(self, batch: Batch, unit: str) -> list[int]:
        """How many of a unit (``'image'``, ``'video'``, ``'audio'``, ``'patch'``, ...) every row holds.

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
            return (occupied * torch.arange(1, occupied.shape[1] + 1, device=occupied.device)).amax(dim=1).tolist()
        return self._units_by_items(batch, unit)

    def _units_by_items(self, batch: Batch, unit: str) -> list[int]:
        num_rows, carried = self.num_rows(batch), batch.get(f'num_{unit}s')
        sizes = {key: value.shape[0] for key, value in self.tensors_of(batch, unit).items()}
        if not sizes:
            return [0] * num_rows if carried is None else list(carried)
        num_items = max(sizes.values())
        if min(sizes.values()) < num_items:
            raise ValueError(f'The tensors of {unit}s must have one entry per {unit} each, got: {sizes}.')
        if self.family.has_queries and blank_rows.token_id(self.config, unit) is not None:
            return self._units_by_placeholders(batch, unit, num_items)
        if num_rows == 1:
            return [num_items]
        # The carried number is the user's: it says nothing where images were cut into tiles.
        if carried is not None and len(carried) == num_rows and sum(carried) == num_items:
            return list(carried)
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
        found = _match(tokens, sizes)
        if found is None:
            remedy = f'{carry}, or do not cut rows inside their media'
            if self.family.has_queries:
                remedy = f'Give processor and model the same `num_query_tokens`, and write no {unit} into the text'
            raise ValueError(
                f'`input_ids` must hold the placeholders of {num_items} whole {unit}s, got: {tokens} by row, where the '
                f'{unit}s fill {sizes or "an unknown number"}. {remedy}.'
            )
        return found

    def coupling(self, batch: Batch) -> str | None:
        """Why the loss of this batch's rows depends on how they are grouped, or None: it does not."""
        images = self.images_per_row(batch) if self.family.coupling else [0]
        return self.family.coupling if any(images) and not all(images) else None

    # The real span of the sequence axis.

    def real_positions(self, batch: Batch, columns: slice = slice(None)) -> torch.Tensor:
        """``(rows, width)`` bool: attended, or labelled (a label on a pad counts for some models and must stay).

        ``columns`` are those to look at; by default all.
        """
        ids, mask = text_of(batch), batch.get('attention_mask')
        if mask is None or 'input_ids' not in batch:
            return torch.ones_like(ids[:, columns], dtype=torch.bool)
        if mask.dim() > 2:  # additive masks hold 0 where a key is attended, boolean ones True
            attended = mask == 0 if mask.dtype.is_floating_point else mask.bool()
            real = attended.flatten(1, -2).any(dim=1).expand_as(ids)[:, columns]
        else:
            real = mask[:, columns] != 0
        labels = own_labels(batch)
        return real if labels is None else real | (labels[:, columns] != IGNORE_INDEX)

    def padding_side(self, batch: Batch) -> str:
        """``'left'`` if every row ends at the last column and some do not start at the first, else ``'right'``."""
        return padding_side_of(self.real_positions(batch, slice(None, None, max(self.width(batch) - 1, 1))))

    def lengths(self, batch: Batch) -> list[int]:
        """Width that each row needs by itself, once trimmed; at least 1."""
        return self.span(batch)[1]

    def span(self, batch: Batch) -> tuple[str, list[int]]:
        """:meth:`padding_side` and :meth:`lengths`, from one look at the batch."""
        real = self.real_positions(batch)
        rows, width = real.shape
        if bool(real.all()):
            return 'right', [width] * rows
        side = padding_side_of(real)
        positions = torch.arange(1, width + 1, device=real.device)
        distance = positions.flip(0) if side == 'left' else positions
        return side, (real * distance).amax(dim=1).clamp(min=1).tolist()

    # New batches out of old ones.

    def select(self, batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
        """The batch of the given rows, in the given order, with exactly their images; same width.

        Raises:
            ValueError: If the layout does not know an entry, or does not find its rows in it.
        """
        (selected,) = self.split(batch, [rows])
        return selected

    def split(self, batch: Batch, groups: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
        """The batches of several groups of rows: as :meth:`select` for each, but rows are counted once.

        Each row's media are copied once; not at all where a group is a run of rows in order and the batch is on its way
        to a GPU. Page-locked tensors stay page-locked.
        """
        units = {'row'}
        for key, value in batch.items():
            self._check(batch, key, value)
            if isinstance(value, torch.Tensor):
                entry = self.entry(key, value)
                units.add('image' if entry.slot_dim is not None else entry.unit)
        everything, groups = list(range(self.num_rows(batch))), [list(rows) for rows in groups]
        if all(rows == everything for rows in groups):
            return [dict(batch) for _ in groups]
        ends = {unit: [0, *accumulate(self.units_per_row(batch, unit))] for unit in units - {'shared'}}
        return [dict(batch) if rows == everything else self._select(batch, ends, rows) for rows in groups]

    def _select(self, batch: Batch, ends: Mapping[str, Sequence[int]], rows: Sequence[int]) -> dict[str, Any]:
        selected: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                entry = self.entry(key, value)
                chosen = _select_units(key, value, entry, ends, rows)
                # A model takes no image entries for no images, rather than empty ones.
                if not entry.is_media or chosen.numel() > 0:
                    selected[key] = chosen
            else:
                selected[key] = [value[row] for row in rows] if isinstance(value, (list, tuple)) else value
        return selected

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
        width = self.width(batch)
        side, lengths = self.span(batch)
        needed = min(-(-max(lengths) // width_multiple) * width_multiple, width)
        if needed == width:
            return dict(batch)
        start = width - needed if side == 'left' else 0
        trimmed: dict[str, Any] = dict(batch)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                for dim in self.entry_of(batch, key).seq_dims:
                    # Composer's LanguageCrossEntropy views labels flat, which a narrowed tensor does not allow.
                    trimmed[key] = _compact(trimmed[key].narrow(dim, start, needed), like=value)
        return trimmed

    def pad_left(self, batch: Batch, columns: int) -> dict[str, Any]:
        """The batch, padded on the left, with so many more columns of padding there."""
        padding = text_of(batch)[~self.real_positions(batch)]
        padded: dict[str, Any] = dict(batch)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and (entry := self.entry_of(batch, key)).seq_dims:
                if key == 'input_ids':
                    entry = replace(entry, fill=int(padding[0]) if len(padding) else 0)
                padded[key] = _cat_padded([value], entry, self.width(batch) + columns, 'left')
        return padded

    def concat(self, batches: Sequence[Batch], *, padding_side: str = 'right', pad_token_id: int = 0) -> dict[str, Any]:
        """One batch of all rows: sequence axes padded to the widest, images of all rows one after the other.

        Args:
            batches: Batches, or one-row samples; those without images may lack the image entries.
            padding_side: ``'left'`` or ``'right'``.
            pad_token_id: Id to pad ``input_ids`` with. It must be no image placeholder.

        Raises:
            ValueError: If the layout does not know an entry, or only some batches have it and it is none of images.
        """
        if padding_side not in ('left', 'right'):
            raise ValueError(f"`padding_side` must be 'left' or 'right', got: {padding_side!r}.")
        width = max(self.width(batch) for batch in batches)
        joined: dict[str, Any] = {}
        for key in dict.fromkeys(key for batch in batches for key in batch):
            first = next((batch[key] for batch in batches if batch.get(key) is not None), None)
            if isinstance(first, torch.Tensor):
                entry = self._common_entry(batches, key)
                if entry.unit == 'video' and first.dim() == 5:
                    self._refuse_ragged_clips(batches, key)
                if key == 'input_ids':
                    entry = replace(entry, fill=pad_token_id)
                joined[key] = _cat_padded(self._with_absent(batches, key, entry), entry, width, padding_side)
            elif isinstance(first, (list, tuple)):
                _refuse_absent(batches, key)
                joined[key] = [item for batch in batches for item in batch[key]]
            else:
                joined[key] = first
        for unit in MODALITIES:
            if f'num_{unit}s' in joined:
                # A one-row sample tells its tiles; once joined, only the placeholders would.
                joined[f'num_{unit}s'] = [count for batch in batches for count in self._carried_counts(batch, unit)]
        return joined

    def _refuse_ragged_clips(self, batches: Sequence[Batch], key: str) -> None:
        """Clips lie in one tensor without a mask: the model would compute the frames that fill it up."""
        frames = {batch[key].shape[1]: batch for batch in batches if batch.get(key) is not None}
        if len(frames) > 1:
            names = ', '.join(f'{count} (sample {frames[count].get("sample_ids")})' for count in sorted(frames))
            raise ValueError(
                f'Videos of a batch must be of one number of frames for {self.family.name}, got: {names}. Take as many '
                'of each: `dataset.video.num_frames`.'
            )

    def _carried_counts(self, batch: Batch, unit: str) -> list[int]:
        return self.units_per_row(batch, unit) if self.tensors_of(batch, unit) else list(batch[f'num_{unit}s'])

    def _common_entry(self, batches: Sequence[Batch], key: str) -> Entry:
        """Sequence-shaped only if so in every batch: a decoder's labels may have the encoder's width by chance."""
        entries = [self.entry_of(batch, key) for batch in batches if batch.get(key) is not None]
        return next((entry for entry in entries if not entry.seq_dims), entries[0])

    def _with_absent(self, batches: Sequence[Batch], key: str, entry: Entry) -> list[torch.Tensor]:
        """The tensors to join; batches without one bring no media, or rows of the entry's ``absent`` value."""
        if entry.slot_dim is None and entry.is_media:
            return [batch[key] for batch in batches if batch.get(key) is not None]
        if entry.slot_dim is None and entry.absent is None:
            _refuse_absent(batches, key)
        like: torch.Tensor = next(batch[key] for batch in batches if batch.get(key) is not None)
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

    # Rows out of nothing.

    def blank_row(self, unit: str = 'image', *, like: Batch | None = None) -> dict[str, Any] | None:
        """The smallest row with one image, video or audio, without labels: a function of the config alone.

        Joined with other rows it keeps the encoder in use; its loss has no tokens, so it changes no gradient.

        Args:
            unit: ``'image'``, ``'video'`` or ``'audio'``.
            like: A batch to join it with: the row gets the entries of that batch that it lacks, other media excepted,
                and keeps none of the text entries that the batch does without. In lists it counts 0, says what all rows
                say, or None. None: ``attention_mask`` and ``labels``.

        Returns:
            dict | None: The row; None where the family has no such media, or its config does not tell their size.
        """
        media = self.family.media.get(unit)
        if media is None or media.blank is None or self.config is None:
            return None
        row = media.blank(self.config)
        if row is None:
            return None
        if like is not None and 'pixel_values' in like and 'pixel_values_images' in row:
            row['pixel_values'] = row.pop('pixel_values_images')  # Video-LLaVA's newer processors say it so
        ids = row['input_ids']
        row = {**row, 'attention_mask': torch.ones_like(ids), 'labels': torch.full_like(ids, IGNORE_INDEX)}
        return row if like is None else self._completed(row, like)

    def with_media(self, batch: Batch) -> Batch:
        """The batch, with media of no row where it has none and the model takes no batch without: see `has_queries`."""
        if not self.family.has_queries or any(batch.get(key) is not None for key in self.family.entries):
            return batch
        (unit,) = self.family.media
        blank = self.blank_row(unit) or {}
        device = text_of(batch).device
        return {**batch, **{key: blank[key].to(device) for key in blank.keys() & self.family.entries.keys()}}

    def _completed(self, row: dict[str, Any], like: Batch) -> dict[str, Any]:
        """The row with the entries of a batch that it is to join, no more and no less but for its media."""
        width = self.width(row)
        completed = {}
        for key, value in like.items():
            if key in row:
                completed[key] = row[key]
            elif not isinstance(value, (torch.Tensor, list, tuple)):
                completed[key] = value
            elif isinstance(value, (list, tuple)):
                completed[key] = [_neutral(value)]
            elif not (entry := self.entry_of(like, key)).is_media:
                shape = list(value.shape)
                shape[entry.row_dim] = shape[entry.row_dim] if entry.unit == 'shared' else 1
                for dim in entry.seq_dims:
                    shape[dim] = width
                completed[key] = value if entry.unit == 'shared' else value.new_full(shape, entry.fill)
        needs = {key: value for key, value in row.items() if self.entry(key, value).is_media}
        needs |= {key: row[key] for key in row if self.entry(key, row[key]).absent is not None}
        if 'position_ids' in completed:
            completed['position_ids'] = torch.arange(width).expand_as(completed['position_ids']).clone()
        return {**completed, **needs}


def padding_side_of(real: torch.Tensor) -> str:
    """The side on which rows are padded, from what :meth:`BatchLayout.real_positions` gives."""
    return 'left' if bool(real[:, -1].all()) and not bool(real[:, 0].all()) else 'right'


def _neutral(values: Sequence[Any]) -> Any:
    """What a row that is no sample has in a list of per-row facts."""
    if isinstance(values[0], (int, float)):
        return type(values[0])()
    return values[0] if all(value == values[0] for value in values) else None


def _match(tokens: list[int], sizes: list[int]) -> list[int] | None:
    """Items per row, where rows hold whole items: 20 and 10 tokens of items of 10 are 2 and 1.

    There is one way at most, as every item has tokens and items come in the order of the rows.
    """
    ends, row_ends = [0, *accumulate(sizes)], list(accumulate(tokens))
    if not sizes or min(sizes) < 1 or row_ends[-1] != ends[-1] or not set(row_ends) <= set(ends):
        return None
    return [ends.index(stop) - ends.index(start) for start, stop in pairwise([0, *row_ends])]


def _select_units(
    key: str, value: torch.Tensor, entry: Entry, ends: Mapping[str, Sequence[int]], rows: Sequence[int]
) -> torch.Tensor:
    """The entries of the rows; ``ends``: by unit, how many there are up to each row and in all."""
    if entry.unit == 'shared':
        return value
    of_unit = ends[entry.unit]
    if of_unit[-1] != value.shape[entry.row_dim]:
        raise ValueError(
            f'`batch[{key!r}]` must have {of_unit[-1]} entries, one per {entry.unit} of its rows, got: '
            f'{value.shape[entry.row_dim]} (by row: {[end - start for start, end in pairwise(of_unit)]}).'
        )
    chosen = _take(value, entry.row_dim, [unit for row in rows for unit in range(of_unit[row], of_unit[row + 1])])
    if entry.slot_dim is not None:
        num_slots = max((ends['image'][row + 1] - ends['image'][row] for row in rows), default=0)
        # The models view rows and slots as one dimension, which a narrowed tensor does not allow.
        chosen = _compact(chosen.narrow(entry.slot_dim, 0, min(num_slots, chosen.shape[entry.slot_dim])), like=value)
    return chosen


# Memory. These three are all that touch it, so that tests can stand in for a GPU.


_has_gpu = cache(torch.cuda.is_available)
"""Asked of every tensor of every microbatch, and torch reads the environment each time."""


def _on_the_way_to_a_gpu(value: torch.Tensor) -> bool:
    # For metrics of training Composer deep-copies each microbatch after its move to the device, and a deep copy of a
    # view copies all that it is a view of. The move to a GPU makes it a tensor of its own; on the CPU nothing does.
    return _has_gpu() and value.device.type == 'cpu'


def _is_page_locked(value: torch.Tensor) -> bool:
    return _has_gpu() and value.is_pinned()


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, pin_memory=_is_page_locked(like))


def _take(value: torch.Tensor, dim: int, index: list[int]) -> torch.Tensor:
    """The entries at the indices: a view where that is allowed, otherwise one copy, page-locked if the tensor was."""
    if index and index == list(range(index[0], index[-1] + 1)):
        view = value.narrow(dim, index[0], len(index))
        if view.is_contiguous() and _on_the_way_to_a_gpu(value):
            return view
        return _empty(view.shape, value).copy_(view)
    shape = list(value.shape)
    shape[dim] = len(index)
    target = _empty(shape, value)
    return torch.index_select(value, dim, torch.tensor(index, dtype=torch.long, device=value.device), out=target)


def _compact(view: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    return view if view.is_contiguous() else _empty(view.shape, like).copy_(view)


def _refuse_absent(batches: Sequence[Batch], key: str) -> None:
    num_present = sum(batch.get(key) is not None for batch in batches)
    if num_present < len(batches):
        raise ValueError(
            f'`{key}` must be in every batch or in none, got: {num_present} of {len(batches)}. Encode all samples with '
            'the same processor.'
        )


def _cat_padded(values: Sequence[torch.Tensor], entry: Entry, width: int, side: str) -> torch.Tensor:
    """Concatenates along the rows, every other dimension padded to the largest."""
    row_dim = entry.row_dim % values[0].dim()
    seq_dims = {dim % values[0].dim() for dim in entry.seq_dims}
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    for dim in seq_dims:
        shape[dim] = width
    shape[row_dim] = sum(value.shape[row_dim] for value in values)
    joined = values[0].new_full(shape, entry.fill)
    start = 0
    for value in values:
        target = joined.narrow(row_dim, start, value.shape[row_dim])
        for dim, size in enumerate(value.shape):
            if dim != row_dim:
                from_left = dim in seq_dims and side == 'left'
                target = target.narrow(dim, target.shape[dim] - size if from_left else 0, size)
        target.copy_(value)
        start += value.shape[row_dim]
    return joined
