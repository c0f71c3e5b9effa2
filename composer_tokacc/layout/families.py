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

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor of a batch belongs to its rows.

    Args:
        unit: What dimension 0 (or ``row_dim``) enumerates: ``'row'`` (one per row), ``'image'``, ``'patch'``,
            ``'video'``, ``'video_patch'``, ``'audio'`` (several per row, or none, in row order), or ``'shared'`` (no
            rows at all). Any other name will do as well, where the batch carries a list ``num_<name>s``.
        row_dim: The dimension that enumerates the units.
        seq_dims: Dimensions as long as the row's tokens; they are padded and trimmed together.
        slot_dim: A dimension padded to the largest number of images of any row (Idefics3 style).
        fill: Padding value.
        absent: Value for the rows of a batch that lacks the entry, where it is joined with one that has it; None: such
            batches cannot be joined. Media entries need none.
    """

    unit: str = 'row'
    row_dim: int = 0
    seq_dims: tuple[int, ...] = ()
    slot_dim: int | None = None
    fill: float = 0
    absent: float | None = None

    @property
    def is_media(self) -> bool:
        """Whether the tensor exists only where there are images or videos."""
        return self.unit not in ('row', 'shared') or self.slot_dim is not None


def _never(batch: Batch) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Family:
    """The batch format of one model family.

    Args:
        name: Name for error messages.
        model_types: ``config.model_type`` values that use it.
        entries: Media tensors by key; text tensors are the same for all (:data:`TEXT_ENTRIES`).
        matches: Whether a batch without any model at hand has this format.
        image_tokens: Placeholder tokens of each image, ``(batch, merge_size) -> list[int]``, where the batch alone
            tells; -1 for "each image as many as the others". None, or an empty list: only the processor knows.
        slots: ``(rows, slots)`` bool, which slots hold an image and which are padding, for families with slots.
        coupling: Why a row without an image has another loss beside one with an image; empty where it has not.
    """

    name: str
    model_types: tuple[str, ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict)
    matches: Callable[[Batch], bool] = _never
    image_tokens: Callable[[Batch, int], list[int]] | None = None
    slots: Callable[[Batch], torch.Tensor] | None = None
    coupling: str = ''


TEXT_ENTRIES: dict[str, Entry] = {
    'input_ids': Entry(seq_dims=(1,)),
    'attention_mask': Entry(seq_dims=(1,)),  # or (rows, heads, width, width): see BatchLayout.entry
    'labels': Entry(seq_dims=(1,), fill=-100),
    # (rows, width), or (3, rows, width) for multimodal rotary positions.
    'position_ids': Entry(row_dim=-2, seq_dims=(-1,)),
    'token_type_ids': Entry(seq_dims=(1,)),
    'mm_token_type_ids': Entry(seq_dims=(1,), absent=0),  # 0 is text
    'special_tokens_mask': Entry(seq_dims=(1,)),
    'loss_mask': Entry(seq_dims=(1,)),
    # Encoder-decoder: the decoder has a width of its own, which the encoder's mask says nothing about.
    'decoder_input_ids': Entry(),
    'decoder_attention_mask': Entry(),
}

_IMAGE, _VIDEO, _AUDIO = Entry(unit='image'), Entry(unit='video'), Entry(unit='audio')


def _ndim(batch: Batch, key: str) -> int:
    value = batch.get(key)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _has_grid(batch: Batch) -> bool:
    return 'image_grid_thw' in batch or 'video_grid_thw' in batch


def _has_aspect_ratios(batch: Batch) -> bool:
    return 'aspect_ratio_ids' in batch


def _has_pixel_mask(batch: Batch) -> bool:
    return 'pixel_attention_mask' in batch


def _has_tiled_images(batch: Batch) -> bool:
    return 'image_sizes' in batch and _ndim(batch, 'pixel_values') == 5


def _has_plain_images(batch: Batch) -> bool:
    return _ndim(batch, 'pixel_values') == 4


def _has_audio(batch: Batch) -> bool:
    return batch.get('input_features') is not None and batch.get('pixel_values') is None


def _has_no_media(batch: Batch) -> bool:
    return batch.get('pixel_values') is None


def _grid_tokens(batch: Batch, merge_size: int) -> list[int]:
    return (batch['image_grid_thw'].prod(dim=1) // merge_size**2).tolist()


def _equal_tokens(batch: Batch, merge_size: int) -> list[int]:
    # Square images all fill the same number of placeholders; Pixtral's, which bring their sizes, do not.
    return [] if batch.get('image_sizes') is not None else [-1] * len(batch['pixel_values'])


def _masked_slots(batch: Batch) -> torch.Tensor:
    # Images are padded at the right and at the bottom, so a real one has its first pixel.
    mask = batch.get('pixel_attention_mask')
    return mask[:, :, 0, 0] != 0 if mask is not None else (batch['pixel_values'].flatten(2) != 0).any(dim=2)


def _aspect_ratio_slots(batch: Batch) -> torch.Tensor:
    return batch['aspect_ratio_ids'] != 0


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
        matches=_has_grid,
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
        matches=_has_aspect_ratios,
        slots=_aspect_ratio_slots,
        # MllamaCrossAttentionDecoderLayer masks its MLP for such rows, but not its attention.
        coupling='Mllama skips cross-attention in a batch without images, but beside a row with an image lets a row '
        'without one attend to padding images',
    ),
    Family(
        name='Idefics3/SmolVLM',
        model_types=('idefics2', 'idefics3', 'smolvlm'),
        entries={'pixel_values': Entry(slot_dim=1), 'pixel_attention_mask': Entry(slot_dim=1)},
        matches=_has_pixel_mask,
        slots=_masked_slots,
    ),
    Family(
        name='LLaVA-NeXT/OneVision',
        model_types=('llava_next', 'llava_next_video', 'llava_onevision'),
        entries={
            'pixel_values': _IMAGE,
            'image_sizes': _IMAGE,
            # Images by row. OneVision cuts an image into tiles only where it is the row's only one.
            'batch_num_images': Entry(absent=0),
            'pixel_values_videos': _VIDEO,
            'image_sizes_videos': _VIDEO,
        },
        matches=_has_tiled_images,
    ),
    Family(
        name='LLaVA',
        model_types=('llava', 'vipllava', 'paligemma', 'gemma3', 'internvl', 'mistral3', 'got_ocr2', 'aya_vision'),
        entries={'pixel_values': _IMAGE, 'image_sizes': _IMAGE},
        matches=_has_plain_images,
        image_tokens=_equal_tokens,
    ),
    Family(
        name='Qwen-Audio',
        model_types=('qwen2_audio',),
        entries={'input_features': _AUDIO, 'feature_attention_mask': _AUDIO},
        matches=_has_audio,
    ),
    Family(name='text', matches=_has_no_media),
)
