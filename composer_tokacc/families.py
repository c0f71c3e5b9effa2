# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which tensors a vision-language family puts into a batch, and how each belongs to rows.

This is the one place to add a family: one :class:`Family` in :data:`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ['FAMILIES', 'TEXT_ENTRIES', 'Entry', 'Family']


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor of a batch belongs to its rows.

    Args:
        unit: What dimension 0 (or ``row_dim``) enumerates: ``'row'`` (one per row), ``'image'``, ``'patch'``,
            ``'video'``, ``'video_patch'`` (several per row, or none, in row order), or ``'shared'`` (no rows at all).
        row_dim: The dimension that enumerates the units.
        seq_dims: Dimensions as long as the row's tokens; they are padded and trimmed together.
        slot_dim: A dimension padded to the largest number of images of any row (Idefics3 style).
        fill: Padding value.
    """

    unit: str = 'row'
    row_dim: int = 0
    seq_dims: tuple[int, ...] = ()
    slot_dim: int | None = None
    fill: float = 0

    @property
    def is_media(self) -> bool:
        """Whether the tensor exists only where there are images or videos."""
        return self.unit not in ('row', 'shared') or self.slot_dim is not None


@dataclass(frozen=True, kw_only=True)
class Family:
    """The batch format of one model family.

    Args:
        name: Name for error messages.
        model_types: ``config.model_type`` values that use it.
        entries: Media tensors by key; text tensors are the same for all (:data:`TEXT_ENTRIES`).
        matches: Whether a batch without any model at hand has this format.
        image_tokens: Placeholder tokens of each image, ``(batch, merge_size) -> list[int]``, where the batch alone
            tells; ``None`` where only the processor knows.
    """

    name: str
    model_types: tuple[str, ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict)
    matches: Callable[[Mapping[str, Any]], bool] = lambda batch: False
    image_tokens: Callable[[Mapping[str, Any], int], list[int]] | None = None


TEXT_ENTRIES: dict[str, Entry] = {
    'input_ids': Entry(seq_dims=(1,)),
    'attention_mask': Entry(seq_dims=(1,)),  # a 4-D mask is (rows, 1, width, width): see BatchLayout.entry
    'labels': Entry(seq_dims=(1,), fill=-100),
    # (rows, width), or (3, rows, width) for multimodal rotary positions.
    'position_ids': Entry(row_dim=-2, seq_dims=(-1,)),
    'token_type_ids': Entry(seq_dims=(1,)),
    'mm_token_type_ids': Entry(seq_dims=(1,)),
    'special_tokens_mask': Entry(seq_dims=(1,)),
    'loss_mask': Entry(seq_dims=(1,)),
    # Encoder-decoder: the decoder has a width of its own, which the encoder's mask says nothing about.
    'decoder_input_ids': Entry(),
    'decoder_attention_mask': Entry(),
}

_IMAGE, _VIDEO = Entry(unit='image'), Entry(unit='video')


def _ndim(batch: Mapping[str, Any], key: str) -> int:
    value = batch.get(key)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _grid_tokens(batch: Mapping[str, Any], merge_size: int) -> list[int]:
    return (batch['image_grid_thw'].prod(dim=1) // merge_size**2).tolist()


def _equal_tokens(batch: Mapping[str, Any], merge_size: int) -> list[int]:
    # Every image of these families fills the same number of placeholders; -1 says "equal, divide".
    return [-1] * len(batch['pixel_values'])


FAMILIES: tuple[Family, ...] = (
    Family(
        name='Qwen-VL',
        model_types=('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'qwen3_vl_moe', 'glm4v'),
        entries={
            'pixel_values': Entry(unit='patch'),
            'image_grid_thw': _IMAGE,
            'pixel_values_videos': Entry(unit='video_patch'),
            'video_grid_thw': _VIDEO,
            'second_per_grid_ts': _VIDEO,
        },
        matches=lambda batch: 'image_grid_thw' in batch or 'video_grid_thw' in batch,
        image_tokens=_grid_tokens,
    ),
    Family(
        name='Mllama',
        model_types=('mllama',),
        entries={
            'pixel_values': Entry(slot_dim=1),
            'aspect_ratio_ids': Entry(slot_dim=1),
            'aspect_ratio_mask': Entry(slot_dim=1),
            'cross_attention_mask': Entry(seq_dims=(1,), slot_dim=2),
        },
        matches=lambda batch: 'aspect_ratio_ids' in batch,
    ),
    Family(
        name='Idefics3/SmolVLM',
        model_types=('idefics2', 'idefics3', 'smolvlm'),
        entries={'pixel_values': Entry(slot_dim=1), 'pixel_attention_mask': Entry(slot_dim=1)},
        matches=lambda batch: 'pixel_attention_mask' in batch,
    ),
    Family(
        name='LLaVA-NeXT/OneVision',
        model_types=('llava_next', 'llava_next_video', 'llava_onevision'),
        entries={
            'pixel_values': _IMAGE,
            'image_sizes': _IMAGE,
            'batch_num_images': Entry(),
            'pixel_values_videos': _VIDEO,
            'image_sizes_videos': _VIDEO,
        },
        matches=lambda batch: 'image_sizes' in batch and _ndim(batch, 'pixel_values') == 5,
    ),
    Family(
        name='LLaVA',
        model_types=('llava', 'vipllava', 'paligemma', 'gemma3', 'mistral3', 'got_ocr2', 'aya_vision'),
        entries={'pixel_values': _IMAGE, 'image_sizes': _IMAGE},
        matches=lambda batch: _ndim(batch, 'pixel_values') == 4,
        image_tokens=_equal_tokens,
    ),
    Family(name='text', matches=lambda batch: 'pixel_values' not in batch),
)
