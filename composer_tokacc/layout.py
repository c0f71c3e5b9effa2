# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a multimodal batch: which tensors belong to which row; select, trim, concatenate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from composer_tokacc.families import FAMILIES, TEXT_ENTRIES, Entry, Family

__all__ = ['BatchLayout']

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the entries of a batch belong to its rows.

    A batch is a mapping with ``input_ids`` of shape ``(rows, width)``. Python lists are per-row facts, one entry per
    row (``num_images`` among them); strings, numbers, booleans and ``None`` are shared by all rows.

    Args:
        family: The model family's media tensors.
        image_token_id: Placeholder id of an image, needed where the batch carries no ``num_images`` list.
        merge_size: Side of the patch square that becomes one token (Qwen-VL).
        extra: Entries registered on top, by key: see :meth:`with_entries`.
    """

    family: Family
    image_token_id: int | None = None
    merge_size: int = 2
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
            'family in composer_tokacc/families.py has this format. Pass `layout=BatchLayout.for_model(model)`.'
        )

    @classmethod
    def for_model(cls, model: Any) -> BatchLayout:
        """The layout of a Hugging Face model (or its config, or a Composer ``HuggingFaceModel``)."""
        config = getattr(model, 'config', model)
        families = [family for family in FAMILIES if config.model_type in family.model_types]
        if not families and hasattr(config, 'vision_config'):
            known = sorted(kind for family in FAMILIES for kind in family.model_types)
            raise ValueError(
                f'`model_type` must be one of {known}, got: {config.model_type!r}. Add a Family to '
                'composer_tokacc/families.py, or pass BatchLayout(family=Family(...)).'
            )
        image_token_id = getattr(config, 'image_token_id', None)
        if image_token_id is None:  # transformers < 4.52 called it an index
            image_token_id = getattr(config, 'image_token_index', None)
        merge_size = getattr(getattr(config, 'vision_config', None), 'spatial_merge_size', 2)
        family = families[0] if families else FAMILIES[-1]
        return cls(family=family, image_token_id=image_token_id, merge_size=merge_size)

    def with_entries(self, **entries: Entry) -> BatchLayout:
        """A layout that knows further entries, e.g. ``with_entries(ocr_boxes=Entry(unit='image'))``."""
        return replace(self, extra={**self.extra, **entries})

    def num_rows(self, batch: Batch) -> int:
        """Number of rows."""
        return len(batch['input_ids'])

    def entry(self, key: str, value: torch.Tensor) -> Entry:
        """How one tensor belongs to rows; unknown keys are refused by name."""
        for entries in (self.extra, self.family.entries, TEXT_ENTRIES):
            if key in entries:
                # (rows, 1, width, width) masks carry the width twice.
                is_square = key == 'attention_mask' and value.dim() == 4
                return Entry(seq_dims=(2, 3)) if is_square else entries[key]
        raise ValueError(
            f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, got: a tensor of shape '
            f'{tuple(value.shape)}. Register it: `layout.with_entries({key}=Entry(unit=...))`, with unit one of '
            "'row', 'image', 'patch', 'video', 'video_patch', 'shared'."
        )

    def _entry(self, batch: Batch, key: str) -> Entry:
        """As :meth:`entry`, but a tensor with a width of its own (decoder labels) is not sequence-shaped."""
        value, width = batch[key], batch['input_ids'].shape[1]
        entry = self.entry(key, value)
        has_width = all(value.shape[dim] == width for dim in entry.seq_dims)
        return entry if has_width else replace(entry, seq_dims=())

    # What each row holds.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Number of images of each row: the carried ``num_images``, or found by the image placeholders.

        Raises:
            ValueError: If neither tells which images belong to which row.
        """
        if 'num_images' in batch:
            return list(batch['num_images'])
        pixels = batch.get('image_grid_thw', batch.get('pixel_values'))
        if pixels is None:
            return [0] * self.num_rows(batch)
        if any(entry.slot_dim is not None for entry in self.family.entries.values()):
            # Idefics3 pads with all-zero images, and the model drops them by that.
            return (pixels.flatten(2) != 0).any(dim=2).sum(dim=1).tolist()
        return self._match_placeholders(batch, len(pixels))

    def media_per_row(self, batch: Batch) -> list[int]:
        """Number of images and videos of each row."""
        units = self.units_per_row(batch)
        return [images + videos for images, videos in zip(units['image'], units['video'], strict=True)]

    def _match_placeholders(self, batch: Batch, num_images: int) -> list[int]:
        remedy = 'Carry `num_images` (one int per row) in the batch'
        if self.image_token_id is None:
            raise ValueError(
                f'`layout` must tell which of the {num_images} images belong to which of the {self.num_rows(batch)} '
                f'rows, got: no image token id. {remedy}, or pass `layout=BatchLayout.for_model(model)`.'
            )
        is_image = batch['input_ids'] == self.image_token_id
        tokens = is_image.sum(dim=1).tolist()
        sizes = self.family.image_tokens(batch, self.merge_size) if self.family.image_tokens else []
        if sizes and sizes[0] == -1:
            sizes = [sum(tokens) // num_images] * num_images
        if sizes:
            ends = list(accumulate(sizes))
            row_ends = list(accumulate(tokens))
            if all(end in (0, *ends) for end in row_ends) and row_ends[-1] == ends[-1]:
                first = [0, *row_ends[:-1]]
                return [sum(a < end <= b for end in ends) for a, b in zip(first, row_ends, strict=True)]
        starts = is_image.clone()
        starts[:, 1:] &= ~is_image[:, :-1]
        runs = starts.sum(dim=1).tolist()
        if sum(runs) != num_images:
            raise ValueError(
                f'`input_ids` must hold placeholders for {num_images} images, got: {tokens} image tokens by row in '
                f'{sum(runs)} runs, which does not tell the images apart. {remedy}.'
            )
        return runs

    def units_per_row(self, batch: Batch) -> dict[str, list[int]]:
        """For each ragged unit (``'image'``, ``'patch'``, ...) how many of them every row holds."""
        units = {'row': [1] * self.num_rows(batch), 'image': self.images_per_row(batch)}
        videos = batch.get('video_grid_thw', batch.get('pixel_values_videos'))
        units['video'] = list(batch.get('num_videos', [0] * self.num_rows(batch)))
        if videos is not None and sum(units['video']) != len(videos):
            raise ValueError(
                f'`num_videos` must sum to the {len(videos)} videos of the batch, got: {units["video"]}. Carry it in '
                'the batch, one int per row.'
            )
        for unit, of, grid in (('patch', 'image', 'image_grid_thw'), ('video_patch', 'video', 'video_grid_thw')):
            if batch.get(grid) is not None:
                ends = [0, *accumulate(batch[grid].prod(dim=1).tolist())]
                rows = [0, *accumulate(units[of])]
                units[unit] = [ends[b] - ends[a] for a, b in zip(rows, rows[1:], strict=False)]
        return units

    # The real span of the sequence axis.

    def real_positions(self, batch: Batch) -> torch.Tensor:
        """``(rows, width)`` bool: attended, or labelled (a label on a pad counts for some models and must stay)."""
        ids, mask = batch['input_ids'], batch.get('attention_mask')
        if mask is None:
            return torch.ones_like(ids, dtype=torch.bool)
        if mask.dim() == 4:  # additive masks hold 0 where a key is attended, boolean ones True
            attended = mask == 0 if mask.dtype.is_floating_point else mask.bool()
            real = attended.any(dim=2).any(dim=1)
        else:
            real = mask != 0
        labels = batch.get('labels')
        return real | (labels != -100) if labels is not None and labels.shape == ids.shape else real

    def padding_side(self, batch: Batch) -> str:
        """``'left'`` if every row ends at the last column, else ``'right'``."""
        real = self.real_positions(batch)
        return 'left' if bool(real[:, -1].all()) and not bool(real[:, 0].all()) else 'right'

    def lengths(self, batch: Batch) -> list[int]:
        """Width that each row needs by itself, once trimmed; at least 1."""
        real = self.real_positions(batch)
        width = real.shape[1]
        positions = torch.arange(1, width + 1, device=real.device)
        distance = positions.flip(0) if self.padding_side(batch) == 'left' else positions
        return (real * distance).amax(dim=1).clamp(min=1).tolist()

    # New batches out of old ones.

    def select(self, batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
        """The batch of the given rows, in the given order, with exactly their images; same width."""
        if list(rows) == list(range(self.num_rows(batch))):
            return dict(batch)
        units = self.units_per_row(batch)
        num_slots = max((units['image'][row] for row in rows), default=0)
        selected: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, (list, tuple)) and len(value) == self.num_rows(batch):
                selected[key] = [value[row] for row in rows]
            elif isinstance(value, torch.Tensor):
                entry = self._entry(batch, key)
                if entry.unit == 'shared':
                    selected[key] = value
                    continue
                if entry.unit not in units or sum(units[entry.unit]) != value.shape[entry.row_dim]:
                    raise ValueError(
                        f'`batch[{key!r}]` must have {sum(units.get(entry.unit, []))} entries, one per {entry.unit} of '
                        f'its rows, got: {value.shape[entry.row_dim]} (by row: {units.get(entry.unit)}).'
                    )
                chosen = _select_units(value, entry, units[entry.unit], rows)
                if entry.slot_dim is not None:
                    chosen = chosen.narrow(entry.slot_dim, 0, min(num_slots, chosen.shape[entry.slot_dim]))
                # A model takes no image entries for no images, rather than empty ones.
                if not entry.is_media or chosen.numel() > 0:
                    selected[key] = chosen
            elif value is None or isinstance(value, (str, bool, int, float)):
                selected[key] = value
            else:
                raise ValueError(
                    f'`batch[{key!r}]` must be a tensor, a list with one entry per row, or a plain value, got: '
                    f'{type(value).__name__}. Turn it into one of these in the collator.'
                )
        return selected

    def trim(self, batch: Batch, *, width_multiple: int = 1) -> dict[str, Any]:
        """Cuts the columns that no row needs; widths round up to ``width_multiple``, never beyond the batch's own."""
        width = batch['input_ids'].shape[1]
        needed = max(self.lengths(batch))
        needed = min(-(-needed // width_multiple) * width_multiple, width)
        if needed == width:
            return dict(batch)
        start = width - needed if self.padding_side(batch) == 'left' else 0
        trimmed: dict[str, Any] = dict(batch)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                for dim in self._entry(batch, key).seq_dims:
                    # Composer's LanguageCrossEntropy views labels flat, which a narrowed tensor does not allow.
                    trimmed[key] = trimmed[key].narrow(dim, start, needed).contiguous()
        return trimmed

    def concat(self, batches: Sequence[Batch], *, padding_side: str = 'right', pad_token_id: int = 0) -> dict[str, Any]:
        """One batch of all rows: sequence axes padded to the widest, images of all rows one after the other."""
        if padding_side not in ('left', 'right'):
            raise ValueError(f"`padding_side` must be 'left' or 'right', got: {padding_side!r}.")
        width = max(batch['input_ids'].shape[1] for batch in batches)
        keys = dict.fromkeys(key for batch in batches for key in batch)
        joined: dict[str, Any] = {}
        for key in keys:
            values = [batch.get(key) for batch in batches]
            present = [value for value in values if value is not None]
            if present and isinstance(present[0], torch.Tensor):
                owners = [batch for batch in batches if batch.get(key) is not None]
                entry = self._entry(owners[0], key)
                if len(present) < len(values):
                    if not entry.is_media:
                        raise ValueError(f'`{key}` must be in every batch or in none, got: {len(present)} of {len(values)}.')
                    if entry.slot_dim is not None:
                        like = present[0]
                        shape = list(like.shape)
                        shape[entry.slot_dim] = 0
                        present = [
                            like.new_zeros([self.num_rows(batch), *shape[1:]]) if value is None else value
                            for batch, value in zip(batches, values, strict=True)
                        ]
                fill = pad_token_id if key == 'input_ids' else entry.fill
                joined[key] = _cat_padded(present, entry, width, padding_side, fill)
            elif present and isinstance(present[0], (list, tuple)):
                if len(present) < len(values):
                    raise ValueError(f'`{key}` must be in every batch or in none, got: {len(present)} of {len(values)}.')
                joined[key] = [item for value in present for item in value]
            else:
                joined[key] = present[0] if present else None
        return joined


def _select_units(value: torch.Tensor, entry: Entry, counts: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    starts = [0, *accumulate(counts)]
    index = [unit for row in rows for unit in range(starts[row], starts[row + 1])]
    return value.index_select(entry.row_dim, torch.tensor(index, dtype=torch.long, device=value.device))


def _cat_padded(values: list[torch.Tensor], entry: Entry, width: int, side: str, fill: float) -> torch.Tensor:
    """Concatenates along the rows, every other dimension padded to the largest."""
    row_dim = entry.row_dim % values[0].dim()
    seq_dims = {dim % values[0].dim() for dim in entry.seq_dims}
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    for dim in seq_dims:
        shape[dim] = width
    shape[row_dim] = sum(value.shape[row_dim] for value in values)
    joined = values[0].new_full(shape, fill)
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
