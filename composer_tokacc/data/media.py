# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media of a sample: opening their files, and how many patches the vision tower computes for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from composer_tokacc.data.formats import Record

__all__ = ['DEFAULT_PATCH_SIZE', 'count_patches', 'declared_patch_size', 'image_size', 'open_images', 'side_of_patch']

MAX_16_BIT = 65535
SIZE_IN_HEADER = ('JPEG', 'MPO', 'PNG', 'WEBP', 'GIF', 'BMP')
"""Formats of PIL whose images have the size that stands in the header, before an EXIF entry turns them."""
QUARTER_TURNS = (5, 6, 7, 8)
"""Values of EXIF's orientation that exchange width and height."""
DEFAULT_PATCH_SIZE = 14
"""The commonest side of a patch, in pixels, for where neither model nor processor names one."""


def open_images(record: Record, files: Sequence[PathLike[str] | BinaryIO]) -> list[Image.Image]:
    """Decodes the image files of a record in full.

    Args:
        record: Whose images they are.
        files: One path or open file for each of ``record.images``.

    Returns:
        The images in RGB, turned as a camera's EXIF entry says, 16 bits a channel scaled to 8.

    Raises:
        BadSampleError: If one cannot be decoded; names sample and file.
    """
    images = []
    for file, name in zip(files, record.image_names, strict=True):
        try:
            with Image.open(file) as image:
                images.append(_to_rgb(ImageOps.exif_transpose(image)))
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            path = file if isinstance(file, PathLike) else name
            raise record.error(f'image file {path} cannot be read: {error}') from error
    return images


def image_size(file: PathLike[str] | BinaryIO) -> tuple[int, int]:
    """Width and height of the image that :func:`open_images` makes of a file, from its header where that says so.

    Raises:
        Exception: Whatever PIL raises on a file that is no image.
    """
    with Image.open(file) as image:
        if image.format not in SIZE_IN_HEADER:
            return ImageOps.exif_transpose(image).size
        if image.format == 'PNG' and _has_metadata_at_end(image.fp):
            image.load()
        # Of the base class: that of PNG decodes the image to look behind it.
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in QUARTER_TURNS
        width, height = image.size
        return (height, width) if turned else (width, height)


def _has_metadata_at_end(file: Any) -> bool:
    """Whether metadata come behind the pixels of a PNG file; its chunks are passed over, not read."""
    start, seen = file.tell(), False
    file.seek(len(b'\x89PNG\r\n\x1a\n'))
    while len(head := file.read(8)) == 8:
        kind = head[4:]
        if seen and kind not in (b'IDAT', b'IEND'):
            break
        seen |= kind == b'IDAT'
        file.seek(int.from_bytes(head[:4], 'big') + 4, os.SEEK_CUR)  # its content and a check sum
    file.seek(start)
    return len(head) == 8


def _to_rgb(image: Image.Image) -> Image.Image:
    """PIL itself clips what is above 255 to white."""
    if image.mode == 'F' or image.mode.startswith('I'):
        values = np.asarray(image)
        if image.mode == 'F' or values.min(initial=0) < 0 or values.max(initial=0) > MAX_16_BIT:
            raise ValueError(f'a picture of mode {image.mode} has no known white; save it with 8 or 16 bits a channel')
        image = Image.fromarray((values // (MAX_16_BIT // 255)).astype(np.uint8))
    return image.convert('RGB')


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Patches that the vision tower computes for one sample; a class token is none.

    What the tower is given but drops before its first block does not count: tiles that only fill up an image's row,
    and what surrounds an image smaller than its batch (Pixtral). Padding that the tower computes does: Mllama's unused
    tiles, and the margins of a tile.

    Args:
        sample: What the processor returns for it.
        patch_size: Side of a patch in pixels. Of no importance where the processor cuts the patches (Qwen-VL).
    """
    images, videos = sample.get('pixel_values'), sample.get('pixel_values_videos')
    num_patches = 0 if images is None else _patches_of(images, patch_size, sample.get('image_sizes'))
    return num_patches + (0 if videos is None else _patches_of(videos, patch_size, None))


def declared_patch_size(processor: Any) -> int | None:
    """Side of a patch in pixels, as the processor declares it: LLaVA's does, Idefics3's does not."""
    owners = (processor, getattr(processor, 'image_processor', None))
    sides = (side_of_patch(getattr(owner, 'patch_size', None)) for owner in owners)
    return next((side for side in sides if side is not None), None)


def side_of_patch(value: Any) -> int | None:
    """The height in what configs and processors call `patch_size`: a number, a pair, or a mapping."""
    if isinstance(value, Mapping):
        value = value.get('height')
    elif isinstance(value, list | tuple):
        value = value[0] if value else None
    value = getattr(value, 'height', value)  # SizeDict of transformers 5
    return value if isinstance(value, int) and value > 0 else None


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Patches of ``(..., channels, height, width)``, or of ``(..., values)`` where each entry is one already."""
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
