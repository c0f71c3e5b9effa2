# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Images as models see them: RGB, upright, 8 bits a channel; and their sizes from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from composer_tokacc.data.records import MediaFile

MAX_16_BIT = 65535
MAX_PIXELS = 89_478_485
"""Of one image; above it PIL warns of a decompression bomb."""
SIZE_IN_HEADER = ('JPEG', 'MPO', 'PNG', 'WEBP', 'GIF', 'BMP')
"""Formats of PIL whose images have the size that stands in the header, before an EXIF entry turns them."""
IMAGE_FORMATS = ('AVIF', 'BMP', 'DIB', 'GIF', 'HEIF', 'JPEG', 'JPEG2000', 'PNG', 'PPM', 'TGA', 'TIFF', 'WEBP')
"""What is read, where PIL can: others call programs (EPS), hold several sizes, or are no more than known by name."""
QUARTER_TURNS = (5, 6, 7, 8)
"""Values of EXIF's orientation that exchange width and height."""


@contextmanager
def _open_image(file: MediaFile) -> Iterator[Image.Image]:
    """Gives the image, not decoded yet, unless it is too large: 100 million pixels took 1.9 GiB."""
    Image.init()
    known = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    try:
        opened = Image.open(file, formats=known)
    except UnidentifiedImageError as error:
        raise ValueError(f'it is no image of a known format ({", ".join(known)}; no EPS), or damaged') from error
    with opened as image:
        if image.format != 'MPO' and getattr(image, 'is_animated', False):  # cameras put previews behind an image
            raise ValueError('it holds several images, of which a model would see the first. Save one, or make a video')
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f'it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; make it smaller')
        yield image


def read_image(file: MediaFile) -> Image.Image:
    """Returns an image in RGB, turned as its EXIF entry says."""
    with _open_image(file) as image:
        return _to_rgb(ImageOps.exif_transpose(image), has_32_bits=(image.format, image.mode) == ('TIFF', 'I'))


def image_size(file: MediaFile) -> tuple[int, int]:
    """Returns width and height of what :func:`read_image` makes of a file, from its header where that says so."""
    with _open_image(file) as image:
        if image.format not in SIZE_IN_HEADER:
            return ImageOps.exif_transpose(image).size
        if image.format == 'PNG' and _has_metadata_at_end(image.fp):
            image.load()
        # Of the base class: that of PNG decodes the image to look behind it.
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in QUARTER_TURNS
        width, height = image.size
        return (height, width) if turned else (width, height)


def _has_metadata_at_end(file: Any) -> bool:
    """Tells whether metadata come behind the pixels of a PNG file; its chunks are passed over, not read."""
    start, is_behind = file.tell(), False
    file.seek(len(b'\x89PNG\r\n\x1a\n'))
    while len(head := file.read(8)) == 8:
        kind = head[4:]
        if is_behind and kind not in (b'IDAT', b'IEND'):
            break
        is_behind |= kind == b'IDAT'
        file.seek(int.from_bytes(head[:4], 'big') + 4, os.SEEK_CUR)  # its content and a check sum
    file.seek(start)
    return len(head) == 8


def _to_rgb(image: Image.Image, *, has_32_bits: bool) -> Image.Image:
    """Scales 16 bits a channel to 8: PIL itself clips what is above 255 to white."""
    if image.mode == 'F' or image.mode.startswith('I'):
        values = np.asarray(image)
        if has_32_bits or image.mode == 'F' or values.min(initial=0) < 0 or values.max(initial=0) > MAX_16_BIT:
            raise ValueError(f'an image of mode {image.mode} has no known white; save it with 8 or 16 bits a channel')
        image = Image.fromarray((values // (MAX_16_BIT // 255)).astype(np.uint8))
    return image.convert('RGB')
