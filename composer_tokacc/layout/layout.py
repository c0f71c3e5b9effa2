# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which tensors of a multimodal batch belong to which row; selects, trims and joins rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from composer_tokacc.batch import (
    MODALITIES,
    Batch,
    side_and_lengths,
    text_of,
)
from composer_tokacc.layout.families import (
    FAMILIES,
    PART_UNITS,
    TEXT_ENTRIES,
    Entry,
    Family,
)
from composer_tokacc.layout.found import (
    Readings,
    agreed_readings,
    carried_counts,
    entries_per_row,
    entry_of_reading,
    has_audio_along_text,
    inferred_family,
    items_of_rows,
    meaning_has_changed,
    possible_readings,
    sums_of_runs,
)
from composer_tokacc.layout.placeholders import stand_at, token_ids
from composer_tokacc.layout.tensors import (
    cat_padded,
    compact,
    renumber,
    select_rows,
)
from composer_tokacc.planning import check_choice, check_count, check_kind

SCALED_ROTARY_TYPES = ('dynamic', 'longrope')
"""Rotary embeddings that change with the largest position of the batch, once that is over a limit."""
NUM_DUMMY_FRAMES = 4
"""Frames of a dummy video. InstructBLIP-Video's processor writes placeholders for as many."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the entries of a batch belong to its rows.

    A batch is a mapping with ``input_ids`` of shape ``(rows, width)``. Without them (Whisper) its rows are those of
    ``labels``, and nothing is trimmed. Python lists have one entry per row (``num_images`` among them); strings,
    numbers, booleans and ``None`` are shared by all rows.

    Args:
        family: The media tensors of the model's family.
        config: The model's config. Its placeholder ids and sizes tell the images of one row from those of the next.
            None: only the batch itself tells.
        extra: Further registered entries, by key: see :meth:`with_entries`.
    """

    family: Family
    config: Any = None
    extra: Mapping[str, Entry] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict, init=False, repr=False, compare=False)
    """How the batches of a fit allow to read the keys that are not registered; filled by :meth:`with_readings`."""

    def __post_init__(self) -> None:
        check_kind('family', self.family, Family)
        for name, entry in self.extra.items():
            check_kind(name, entry, Entry)

    @classmethod
    def infer(cls, batch: Batch) -> BatchLayout:
        """Returns the layout that the batch's own keys and shapes imply."""
        check_kind('batch', batch, Mapping)
        for family in FAMILIES:
            if family.matches(batch):
                return cls(family=family)
        return cls(family=Family(name='inferred'))

    @classmethod
    def for_model(cls, model: Any) -> BatchLayout:
        """The layout of a Hugging Face model (or its config, or a Composer ``HuggingFaceModel``, in DDP or not)."""
        model = getattr(model, 'module', model)
        config = getattr(model, 'config', model)
        if not hasattr(config, 'model_type'):
            raise TypeError(f'`model` must have a `config` with a `model_type`, got: {type(model).__name__}.')
        for family in FAMILIES:
            if config.model_type in family.model_types:
                return cls(family=family, config=config)
        return cls(family=inferred_family(config), config=config)

    def with_entries(self, **entries: Entry) -> BatchLayout:
        """Returns a layout that knows further entries, e.g. ``with_entries(ocr_boxes=Entry(unit='image'))``."""
        return replace(self, extra={**self.extra, **entries})

    def with_readings(self, readings: Readings) -> BatchLayout:
        """Returns a layout that reads unregistered keys as the batches so far allow: see :meth:`readings_of`."""
        layout = replace(self)
        object.__setattr__(layout, 'readings', readings)
        return layout

    # Placeholders and positions.

    @property
    def image_token_id(self) -> int | None:
        """Placeholder id of an image, if the config names one."""
        return next(iter(token_ids(self.config, 'image')), None)

    def image_tokens_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of placeholders of images, videos and audios in each row.

        Raises:
            ValueError: If the layout has no config, which names the placeholders.
        """
        if self.config is None:
            raise ValueError(
                'Image tokens must be known to count them, got: a layout without the model. Pass `model=`, or use '
                'TokenAccumulation.'
            )
        return self.is_placeholder(batch).sum(dim=1).tolist()

    def is_placeholder(self, batch: Batch) -> torch.Tensor:
        """Returns the positions of all placeholders of images, videos and audios, ``(rows, width)`` bool."""
        ids: list[int] = []
        for modality in MODALITIES:
            ids += token_ids(self.config, modality)
        return stand_at(text_of(batch), ids)

    @cached_property  # read for every microbatch, and reading a config is slow
    def width_limit(self) -> int | None:
        """Width from which on the rotary embedding depends on the width of the batch; None: it never does."""
        config = self.config
        if hasattr(config, 'get_text_config'):
            config = config.get_text_config()
        rope = getattr(config, 'rope_parameters', None) or getattr(config, 'rope_scaling', None) or {}
        # Models with several types of layers nest the parameters of each type.
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        limits: list[int] = []
        for scaling in [rope, *nested]:
            if scaling.get('rope_type', scaling.get('type')) in SCALED_ROTARY_TYPES:
                limit = scaling.get('original_max_position_embeddings')
                limit = limit or getattr(config, 'original_max_position_embeddings', None)
                limits.append(limit or config.max_position_embeddings)
        return min(limits, default=None)

    def width_matters(self, batch: Batch) -> bool:
        """Returns whether the model's positions depend on the width of this batch, so that nothing may be trimmed."""
        limit = self.width_limit
        return limit is not None and batch.get('input_ids') is not None and self.width(batch) > limit

    # How each entry belongs to rows.

    @cached_property
    def _registered(self) -> Mapping[str, Entry]:
        return {**TEXT_ENTRIES, **self.family.entries, **self.extra}

    def num_rows(self, batch: Batch) -> int:
        """Returns the number of rows."""
        return text_of(batch).shape[0]

    def width(self, batch: Batch) -> int:
        """Returns the number of columns of the rows' text."""
        return text_of(batch).shape[1]

    def readings_of(self, batch: Batch) -> Readings:
        """Returns how the shapes of this batch allow to read each tensor that is not registered."""
        readings = {}
        num_rows, width = text_of(batch).shape[:2]
        for key, value in batch.items():
            if key in self._registered or not isinstance(value, torch.Tensor):
                continue
            possible = possible_readings(batch, key, num_rows, width)
            if possible:  # else entry_of() refuses the key
                readings[key] = possible
        return readings

    def entry_of(self, batch: Batch, key: str) -> Entry:
        """Returns how a tensor belongs to rows; one with a width of its own (a decoder's labels) has no columns.

        Raises:
            ValueError: If the key is not registered and its shape does not tell, or tells something else than before.
        """
        value = batch[key]
        entry = self._registered.get(key)
        if entry is None:
            entry = self._inferred_entry(batch, key)
        width = self.width(batch)
        if key == 'loss_weights' and value.dim() == 1:
            return Entry(absent=entry.absent)  # one weight per row
        if key == 'attention_mask' and value.dim() > 2:
            # (rows, width, width) and (rows, heads, width, width) have the width twice. In an additive mask 0 means
            # "attend", so it is filled with the lowest number.
            fill = torch.finfo(value.dtype).min if value.dtype.is_floating_point else 0
            entry = Entry(seq_dims=(-2, -1), fill=fill)
        if key == 'position_ids' and value.shape == (1, width):
            entry = Entry(unit='row' if self.num_rows(batch) == 1 else 'shared', seq_dims=(1,))
        is_decoders = 'input_ids' not in batch
        if key in ('labels', 'loss_weights') and 'decoder_input_ids' in batch:
            is_decoders = True
        if is_decoders or any(value.shape[dim] != width for dim in entry.seq_dims):
            return replace(entry, seq_dims=())
        return entry

    def _inferred_entry(self, batch: Batch, key: str) -> Entry:
        """Returns the entry of a key that is not registered, as all batches of the fit allow to read it."""
        possible = possible_readings(batch, key, self.num_rows(batch), self.width(batch))
        if not possible:
            raise ValueError(
                f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, or of the rows, got: a '
                f'tensor of shape {tuple(batch[key].shape)}. Register it: '
                f'`layout.with_entries({key}=Entry(unit=...))`, '
                "with unit one of 'row', 'image', 'patch', 'video', 'video_patch', 'audio', 'shared'."
            )
        earlier = self.readings.get(key, possible)
        agreed = agreed_readings(earlier, possible)
        if not agreed:
            raise ValueError(meaning_has_changed(key, earlier, possible))
        return entry_of_reading(agreed[0], batch, key)

    def _media_entries(self, batch: Batch) -> dict[str, Entry]:
        """Returns how the tensors that are not text belong to rows.

        Called for every microbatch, so text is recognised by its key.
        """
        entries = {}
        for key, value in batch.items():
            is_text = key in TEXT_ENTRIES and key not in self.extra and key not in self.family.entries
            if isinstance(value, torch.Tensor) and not is_text:
                entries[key] = self.entry_of(batch, key)
        return entries

    def tensors_of(self, batch: Batch, unit: str) -> dict[str, torch.Tensor]:
        """Returns the tensors that have one entry per image, video, audio or part of one, by key."""
        tensors = {}
        for key, entry in self._media_entries(batch).items():
            if entry.unit == unit:
                tensors[key] = batch[key]
        return tensors

    def media_of(self, batch: Batch) -> list[str]:
        """Returns the modalities that have tensors in the batch."""
        present = {entry.modality for entry in self._media_entries(batch).values()}
        return [modality for modality in MODALITIES if modality in present]

    # How many items each row has.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Number of images of each row; if the processor cuts an image into tiles (InternVL), each tile is an image."""
        return self.units_per_row(batch, 'image')

    def media_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of images, videos and audios of each row."""
        counts = [self.units_per_row(batch, modality) for modality in MODALITIES]
        return [sum(counts_of_row) for counts_of_row in zip(*counts, strict=True)]

    def units_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns how many of a unit (``'image'``, ``'video'``, ``'audio'``, ``'patch'``, ...) every row has.

        The family's slots tell it, or the list ``num_<unit>s`` of the batch if it adds up to the items of the batch, or
        the placeholders: a row has whole items, and config and batch tell the placeholders of each item, in order.

        Raises:
            ValueError: If nothing tells which of them belong to which row.
        """
        if unit == 'row':
            return [1] * self.num_rows(batch)
        if unit in PART_UNITS:
            return self._parts_per_row(batch, unit)
        if unit == 'image' and self.family.slots is not None and batch.get('pixel_values') is not None:
            return self._occupied_slots_per_row(batch, self.family.slots(batch))
        modality, _, num_entries = unit.partition('/')
        if num_entries:
            return entries_per_row(batch, self.config, modality, int(num_entries), self.num_rows(batch))
        return self._items_per_row(batch, unit)

    def _parts_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns the number of patches of each row."""
        part = PART_UNITS[unit]
        parts_per_item = batch[part.grid_key].prod(dim=1).tolist()
        items_per_row = self.units_per_row(batch, part.modality)
        return sums_of_runs(parts_per_item, items_per_row)

    def _occupied_slots_per_row(self, batch: Batch, is_occupied: torch.Tensor) -> list[int]:
        """Returns the number of the last occupied slot of each row; ``is_occupied`` is ``(rows, slots)`` bool."""
        num_rows = self.num_rows(batch)
        if len(is_occupied) != num_rows:
            raise ValueError(
                f'`pixel_values` must have a row of slots for each of {num_rows} rows, got: {len(is_occupied)}. Put '
                'all images, or frames of videos, of a row into its slots.'
            )
        slot_numbers = torch.arange(1, is_occupied.shape[1] + 1, device=is_occupied.device)
        return (is_occupied * slot_numbers).amax(dim=1).tolist()

    def _items_per_row(self, batch: Batch, unit: str) -> list[int]:
        num_rows = self.num_rows(batch)
        carried = carried_counts(batch, unit)
        sizes = {key: value.shape[0] for key, value in self.tensors_of(batch, unit).items()}
        if not sizes:
            return self._inferred_items_per_row(batch, unit) or carried or [0] * num_rows
        num_items = max(sizes.values())
        if min(sizes.values()) < num_items:
            raise ValueError(f'The tensors of {unit}s must have one entry per {unit} each, got: {sizes}.')
        has_placeholders_only = self.family.has_queries and token_ids(self.config, unit)
        if not has_placeholders_only:
            if num_rows == 1:
                return [num_items]
            # The user counts images. If the processor cuts them into tiles, his numbers do not add up to the tiles.
            if carried is not None and len(carried) == num_rows and sum(carried) == num_items:
                return carried
        return self._items_by_placeholders(batch, unit, num_items)

    def _inferred_items_per_row(self, batch: Batch, modality: str) -> list[int] | None:
        """Returns the items of each row by unregistered tensors of a modality; None: there are none.

        The tensor with the fewest entries counts: it has items, others have tiles or patches.
        """
        fewest = None
        for entry in self._media_entries(batch).values():
            unit_modality, _, num_entries = entry.unit.partition('/')
            if unit_modality == modality and num_entries:
                count = int(num_entries)
                fewest = count if fewest is None else min(fewest, count)
        if fewest is None:
            return None
        return self.units_per_row(batch, f'{modality}/{fewest}')

    def _items_by_placeholders(
        self,
        batch: Batch,
        unit: str,
        num_items: int,
    ) -> list[int]:
        media = self.family.media.get(unit)
        num_rows = self.num_rows(batch)
        carry = f'Carry `num_{unit}s` in the batch, one int per row'
        if unit == 'image':
            carry += ' (tiles counted)'
        is_placeholder = media.placeholders(batch, self.config, unit) if media is not None else None
        if media is None or media.sizes is None or is_placeholder is None:
            model = '' if self.config is not None else ', or pass `layout=BatchLayout.for_model(model)`'
            raise ValueError(
                f'`layout` must tell which of {num_items} {unit}s belong to which of {num_rows} rows, got: no '
                f'placeholder id, and `num_{unit}s`={batch.get(f"num_{unit}s")}. {carry}{model}.'
            )
        tokens = is_placeholder.sum(dim=1).tolist()
        sizes = media.sizes(batch, self.config, num_items, sum(tokens))
        items = items_of_rows(tokens, sizes)
        if items is None:
            remedy = f'{carry}, or do not cut rows inside their media'
            if self.family.has_queries:
                remedy = f'Give processor and model the same `num_query_tokens`, and write no {unit} into the text'
            raise ValueError(
                f'`input_ids` must hold the placeholders of {num_items} whole {unit}s, got: {tokens} by row, where the '
                f'{unit}s fill {sizes or "an unknown number"}. {remedy}.'
            )
        return items

    def with_media(self, batch: Batch) -> Batch:
        """Adds one grey dummy image or video if the batch has none and the model needs one: see ``has_queries``.

        Its instruction has one token. It belongs to no row.
        """
        family = self.family
        if not family.has_queries or self.config is None:
            return batch
        if any(batch.get(key) is not None for key in family.entries):
            return batch
        device = text_of(batch).device
        side = self.config.vision_config.image_size
        shape = [1, 3, side, side]
        if 'video' in family.media:
            shape.insert(1, NUM_DUMMY_FRAMES)
        dummy: dict[str, torch.Tensor] = {'pixel_values': torch.full(shape, 0.5, device=device)}
        for key in family.entries:
            if key != 'pixel_values':
                dummy[key] = torch.ones(1, 1, dtype=torch.long, device=device)
        return {**batch, **dummy}

    # New batches from existing ones.

    def select(self, batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
        """Returns the batch of the given rows, in the given order, with exactly their images; the width stays.

        Raises:
            ValueError: If the layout does not know an entry, or cannot tell its rows.
        """
        if any(isinstance(row, bool) for row in rows):
            raise ValueError(f'`rows` must be numbers of rows, got: {rows}. Give the numbers of those that are true.')
        (selected,) = self.split(batch, [rows])
        return selected

    def split(self, batch: Batch, groups: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
        """Returns the batches of several groups of rows: like :meth:`select` for each, but units are counted once.

        Each row's media are copied once, or not at all if a group is a run of rows in order and the batch is on its way
        to a GPU. Page-locked tensors stay page-locked.
        """
        entries: dict[str, Entry] = {}
        for key, value in batch.items():
            self._check_entry(batch, key, value)
            if isinstance(value, torch.Tensor):
                entries[key] = self.entry_of(batch, key)
        all_rows = list(range(self.num_rows(batch)))
        row_groups = [list(rows) for rows in groups]
        unknown_rows = set().union(*row_groups) - set(all_rows)
        if unknown_rows:
            raise ValueError(f'`rows` must be of the {len(all_rows)} of the batch, from 0, got: {unknown_rows}.')
        ends: dict[str, list[int]] | None = None
        selected = []
        for rows in row_groups:
            if rows == all_rows:
                selected.append(dict(batch))
                continue
            if ends is None:  # counting media takes a while
                ends = self._ends_of_rows(batch, entries)
            selected.append(select_rows(batch, entries, ends, rows))
        return selected

    def _ends_of_rows(self, batch: Batch, entries: Mapping[str, Entry]) -> dict[str, list[int]]:
        """Returns for each unit 0, then how many of it the rows up to each row have together."""
        units = {'row'}
        for entry in entries.values():
            units.add('image' if entry.slot_dim is not None else entry.unit)
        units.discard('shared')
        ends = {}
        for unit in units:
            ends[unit] = [0, *accumulate(self.units_per_row(batch, unit))]
        return ends

    def _check_entry(
        self,
        batch: Batch,
        key: str,
        value: object,
    ) -> None:
        """Raises ValueError if nothing tells how to select rows of a value."""
        if value is None or isinstance(value, (torch.Tensor, str, bool, int, float)):
            return
        has_entry_per_row = isinstance(value, (list, tuple)) and len(value) == self.num_rows(batch)
        registered = self.family.entries.get(key)
        is_media = registered is not None and registered.is_media
        if not has_entry_per_row or is_media:
            raise ValueError(
                f'`batch[{key!r}]` must be a tensor, a list with one entry per row, or a plain value, got: '
                f'{"list of media" if has_entry_per_row else type(value).__name__}. Turn it into one of these in the '
                'collator.'
            )

    def trim(
        self,
        batch: Batch,
        *,
        width_multiple: int = 1,
    ) -> dict[str, Any]:
        """Cuts off the columns that no row needs; widths round up to ``width_multiple``, never beyond the batch's."""
        check_count('width_multiple', width_multiple)
        if has_audio_along_text(batch, self.config):
            return dict(batch)
        side, lengths = side_and_lengths(batch)
        width = self.width(batch)
        num_multiples = -(-max(lengths) // width_multiple)
        needed = min(num_multiples * width_multiple, width)
        start = width - needed if side == 'left' else 0
        return self.narrow(batch, start, needed)

    def narrow(
        self,
        batch: Batch,
        start: int,
        width: int,
    ) -> dict[str, Any]:
        """Keeps ``width`` columns of the rows' text, from ``start`` on."""
        kept: dict[str, Any] = dict(batch)
        if width == self.width(batch):
            return kept
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            narrowed = value
            for dim in self.entry_of(batch, key).seq_dims:
                # Composer's LanguageCrossEntropy views labels flat, which a narrowed tensor does not allow.
                narrowed = compact(narrowed.narrow(dim, start, width), like=value)
            kept[key] = narrowed
        return kept

    def concat(
        self,
        batches: Sequence[Batch],
        *,
        padding_side: str = 'right',
        pad_token_id: int = 0,
    ) -> dict[str, Any]:
        """Returns one batch of all rows: text padded to the widest, images of all rows one after the other.

        Args:
            batches: Batches, or one-row samples; those without images may lack the image entries.
            padding_side: ``'left'`` or ``'right'``.
            pad_token_id: Id to pad ``input_ids`` with. It must not be an image placeholder.

        Raises:
            ValueError: If the layout does not know an entry, or if only some batches have an entry that is not media.
        """
        check_choice('padding_side', padding_side, ('left', 'right'))
        if not batches:
            raise ValueError('`batches` must hold at least one batch, got: none.')
        keys: dict[str, None] = {}  # a dict keeps their order
        for batch in batches:
            keys |= dict.fromkeys(batch)
        joined: dict[str, Any] = {}
        for key in keys:
            present = [batch for batch in batches if batch.get(key) is not None]
            first = present[0][key] if present else None
            if isinstance(first, torch.Tensor):
                joined[key] = self._joined_tensor(key, batches, padding_side, pad_token_id)
            elif isinstance(first, (list, tuple)):
                _check_present(key, present, batches)
                joined[key] = [value for batch in batches for value in batch[key]]
            else:
                joined[key] = first
        for modality in MODALITIES:
            key = f'num_{modality}s'
            if key not in joined:
                continue
            # The shapes of a one-row sample tell its tiles; once rows are joined, only the placeholders would.
            joined[key] = []
            for batch in batches:
                joined[key] += self._carried_or_counted(batch, modality)
        return joined

    def _carried_or_counted(self, batch: Batch, modality: str) -> list[int]:
        if self.tensors_of(batch, modality):
            return self.units_per_row(batch, modality)
        return list(batch[f'num_{modality}s'])

    def _joined_tensor(
        self,
        key: str,
        batches: Sequence[Batch],
        side: str,
        pad_token_id: int,
    ) -> torch.Tensor:
        """Returns a tensor of all batches, made of those that have it."""
        present = [batch for batch in batches if batch.get(key) is not None]
        # It lies along the text only if it does in every batch: a decoder's labels can have the encoder's width by
        # chance.
        entries = [self.entry_of(batch, key) for batch in present]
        entry = min(entries, key=lambda entry: (entry.unit != 'shared', bool(entry.seq_dims)))
        if entry.unit == 'shared':
            return max((batch[key] for batch in present), key=torch.Tensor.numel)
        if entry.unit == 'video' and present[0][key].dim() == 5:
            _check_equal_clips(self.family.name, key, present)
        if entry.is_media and entry.slot_dim is None:
            values = [batch[key] for batch in present]
        else:
            values = self._with_absent(key, present, batches, entry)
        if key == 'input_ids':
            entry = replace(entry, fill=pad_token_id)
        width = max(self.width(batch) for batch in batches)
        joined = cat_padded(values, entry, width, side)
        if entry.points_into is None:
            return joined
        num_entries = [len(batch[key]) for batch in present]
        num_patches = [batch[entry.points_into].shape[:2].numel() for batch in present]
        first_patches = [0, *accumulate(num_patches)][:-1]
        return renumber(joined, num_entries, first_patches)

    def _with_absent(
        self, key: str, present: Sequence[Batch], batches: Sequence[Batch], entry: Entry
    ) -> list[torch.Tensor]:
        """Returns the tensors to join.

        A batch without the tensor gets no slots, or rows of the entry's ``absent`` value.
        """
        if entry.slot_dim is None and entry.absent is None:
            _check_present(key, present, batches)
        like: torch.Tensor = present[0][key]
        values = []
        for batch in batches:
            if batch.get(key) is not None:
                values.append(batch[key])
                continue
            shape = list(like.shape)
            shape[entry.row_dim] = self.num_rows(batch)
            for dim in entry.seq_dims:
                shape[dim] = self.width(batch)
            if entry.slot_dim is not None:
                shape[entry.slot_dim] = 0
            values.append(like.new_full(shape, entry.absent or 0))
        return values


def _check_present(key: str, present: Sequence[Batch], batches: Sequence[Batch]) -> None:
    """Raises ValueError if some batches lack the key."""
    if len(present) < len(batches):
        raise ValueError(
            f'`{key}` must be in every batch or in none, got: {len(present)} of {len(batches)}. Encode all samples '
            'with the same processor.'
        )


def _check_equal_clips(family: str, key: str, batches: Sequence[Batch]) -> None:
    """Raises ValueError if clips have different numbers of frames.

    Clips are in one tensor without a mask, so the model would compute the frames that pad a shorter clip.
    """
    batch_of_count = {batch[key].shape[1]: batch for batch in batches}
    if len(batch_of_count) > 1:
        names = []
        for count in sorted(batch_of_count):
            sample_ids = batch_of_count[count].get('sample_ids')
            names.append(f'{count} (sample {sample_ids})')
        raise ValueError(
            f'Videos of a batch must be of one number of frames for {family}, got: {", ".join(names)}. Take as many of '
            'each: `dataset.video.num_frames`.'
        )
