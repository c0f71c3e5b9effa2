# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Patches that a vision encoder computes for a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DEFAULT_PATCH_SIZE = 14
"""The commonest side of a patch, in pixels, for where neither model nor processor names one."""


def patch_size_of(*owners: Any) -> int:
    """Returns the side of a patch in pixels that the first of some owners names, else the commonest.

    Args:
        *owners: A number; a model's config, or its ``vision_config``; a processor, or its ``image_processor``; None.
    """
    for owner in owners:
        parts = (getattr(owner, 'vision_config', None), owner, getattr(owner, 'image_processor', None))
        for named in (owner, *(getattr(part, 'patch_size', None) for part in parts)):
            if isinstance(named, Mapping):
                named = named.get('height')
            elif isinstance(named, list | tuple):
                named = next(iter(named), None)
            named = getattr(named, 'height', named)  # SizeDict of transformers 5
            if isinstance(named, int) and named > 0:
                return named
    return DEFAULT_PATCH_SIZE


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Counts the patches that a vision encoder computes for one sample; a class token is none.

    What the encoder is given but drops before its first block does not count: tiles that only fill up an image's row,
    and what surrounds an image smaller than its batch (Pixtral). Padding that it computes does: Mllama's unused
    tiles, and the margins of a tile.

    Args:
        sample: What the processor returns for it.
        patch_size: Side of a patch in pixels. Of no importance where the processor cuts the patches (Qwen-VL).
    """
    # Video-LLaVA's processor names images by themselves.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    videos = sample.get('pixel_values_videos')
    num_patches = 0 if images is None else _patches_of(images, patch_size, sample.get('image_sizes'))
    if videos is not None and videos.dim() == 5:  # of clips all is computed, what is grey too
        videos = videos.flatten(0, 1)
    return num_patches + (0 if videos is None else _patches_of(videos, patch_size, None))


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Counts patches of ``(..., channels, height, width)``, or of ``(..., values)`` where each entry is one already."""
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    if pixels.dim() == 4 and image_sizes is not None:
        return int((torch.as_tensor(image_sizes) // patch_size).prod(dim=1).sum())
    num_tiles = pixels.shape[:-3].numel()
    if pixels.dim() == 5 and not pixels.is_meta:
        # Idefics3 takes out tiles of nothing but zeros; LLaVA-NeXT and OneVision those that their processors add, which
        # are the same. Mllama (6 dimensions) computes all. Where only sizes are asked for (meta), no tile fills up.
        num_tiles = int(pixels.flatten(2).any(dim=2).sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)
