# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a multimodal batch: which tensors belong to which row; select, trim, concatenate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from composer_tokacc.layout.concat import concat
from composer_tokacc.layout.entries import Batch, EntryLayout
from composer_tokacc.layout.families import FAMILIES, Entry
from composer_tokacc.layout.media import count_units, images_per_row

__all__ = ['BatchLayout']


@dataclass(frozen=True, kw_only=True)
class BatchLayout(EntryLayout):
    """How the entries of a batch belong to its rows.

    A batch is a mapping with ``input_ids`` of shape ``(rows, width)``. Python lists are per-row facts, one entry per
    row (``num_images`` among them); strings, numbers, booleans and ``None`` are shared by all rows.

    Args:
        family: The model family's media tensors.
        image_token_id: Placeholder id of an image, needed where the batch carries no ``num_images`` list.
        merge_size: Side of the patch square that becomes one token (Qwen-VL).
        extra: Entries registered on top, by key: see :meth:`with_entries`.
    """

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
                'composer_tokacc/layout/families.py, or pass BatchLayout(family=Family(...)).'
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

    # What each row holds.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Number of images of each row: by slots, by the carried ``num_images``, or by the image placeholders.

        Where the processor cuts an image into tiles (Idefics3, InternVL), each tile is an image.

        Raises:
            ValueError: If nothing tells which images belong to which row.
        """
        return images_per_row(self, batch)

    def media_per_row(self, batch: Batch) -> list[int]:
        """Number of images, videos and audios of each row."""
        counts = [count_units(self, batch, unit) for unit in ('image', 'video', 'audio')]
        return [sum(row) for row in zip(*counts, strict=True)]

    def coupling(self, batch: Batch) -> str | None:
        """Why the loss of this batch's rows depends on how they are grouped, or None: it does not."""
        images = self.images_per_row(batch) if self.family.coupling else [0]
        return self.family.coupling if any(images) and not all(images) else None

    # The real span of the sequence axis.

    def real_positions(self, batch: Batch) -> torch.Tensor:
        """``(rows, width)`` bool: attended, or labelled (a label on a pad counts for some models and must stay)."""
        ids, mask = batch['input_ids'], batch.get('attention_mask')
        if mask is None:
            return torch.ones_like(ids, dtype=torch.bool)
        if mask.dim() > 2:  # additive masks hold 0 where a key is attended, boolean ones True
            attended = mask == 0 if mask.dtype.is_floating_point else mask.bool()
            real = attended.flatten(1, -2).any(dim=1).expand_as(ids)
        else:
            real = mask != 0
        labels = batch.get('labels')
        return real | (labels != -100) if labels is not None and labels.shape == ids.shape else real

    def padding_side(self, batch: Batch) -> str:
        """``'left'`` if every row ends at the last column and some do not start at the first, else ``'right'``."""
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
        """The batch of the given rows, in the given order, with exactly their images; same width.

        Raises:
            ValueError: If the layout does not know an entry, or does not find its rows in it.
        """
        units: dict[str, list[int]] = {}
        for key, value in batch.items():
            self._check(batch, key, value)
            if isinstance(value, torch.Tensor):
                entry = self.entry(key, value)
                units.setdefault('image' if entry.slot_dim is not None else entry.unit, [])
        if list(rows) == list(range(self.num_rows(batch))):
            return dict(batch)
        units = {unit: count_units(self, batch, unit) for unit in {'row', *units} - {'shared'}}
        selected: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                entry = self.entry(key, value)
                chosen = _select_units(key, value, entry, units, rows)
                # A model takes no image entries for no images, rather than empty ones.
                if not entry.is_media or chosen.numel() > 0:
                    selected[key] = chosen
            else:
                selected[key] = [value[row] for row in rows] if isinstance(value, (list, tuple)) else value
        return selected

    def _check(self, batch: Batch, key: str, value: Any) -> None:
        is_list = isinstance(value, (list, tuple)) and len(value) == self.num_rows(batch)
        is_known = isinstance(value, (torch.Tensor, str, bool, int, float))
        if not is_list and not is_known and value is not None:
            raise ValueError(
                f'`batch[{key!r}]` must be a tensor, a list with one entry per row, or a plain value, got: '
                f'{type(value).__name__}. Turn it into one of these in the collator.'
            )

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
                for dim in self.entry_of(batch, key).seq_dims:
                    # Composer's LanguageCrossEntropy views labels flat, which a narrowed tensor does not allow.
                    trimmed[key] = trimmed[key].narrow(dim, start, needed).contiguous()
        return trimmed

    def concat(self, batches: Sequence[Batch], *, padding_side: str = 'right', pad_token_id: int = 0) -> dict[str, Any]:
        """One batch of all rows: sequence axes padded to the widest, images of all rows one after the other.

        Args:
            batches: Batches, or one-row samples; those without images may lack the image entries.
            padding_side: ``'left'`` or ``'right'``.
            pad_token_id: Id to pad ``input_ids`` with. It must be no image placeholder.

        Raises:
            ValueError: If the layout does not know an entry, or only some batches have it and it is none of images.
        """
        return concat(self, batches, padding_side=padding_side, pad_token_id=pad_token_id)


def _select_units(
    key: str, value: torch.Tensor, entry: Entry, units: Mapping[str, Sequence[int]], rows: Sequence[int]
) -> torch.Tensor:
    if entry.unit == 'shared':
        return value
    counts = units[entry.unit]
    if sum(counts) != value.shape[entry.row_dim]:
        raise ValueError(
            f'`batch[{key!r}]` must have {sum(counts)} entries, one per {entry.unit} of its rows, got: '
            f'{value.shape[entry.row_dim]} (by row: {list(counts)}).'
        )
    starts = [0, *accumulate(counts)]
    index = [unit for row in rows for unit in range(starts[row], starts[row + 1])]
    chosen = value.index_select(entry.row_dim, torch.tensor(index, dtype=torch.long, device=value.device))
    if entry.slot_dim is not None:
        num_slots = max((units['image'][row] for row in rows), default=0)
        # The models view rows and slots as one dimension, which a narrowed tensor does not allow.
        chosen = chosen.narrow(entry.slot_dim, 0, min(num_slots, chosen.shape[entry.slot_dim])).contiguous()
    return chosen
