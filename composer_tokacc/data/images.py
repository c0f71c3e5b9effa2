# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads images as models see them (RGB, upright, 8 bits a channel), and their sizes from their headers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from composer_tokacc.data.records import MediaFile
from composer_tokacc.refusals import InvalidInputError

MAX_16_BIT = 65535
"""Largest value of a channel with 16 bits."""
FORMATS_WITH_SIZE_IN_HEADER = ('JPEG', 'MPO', 'PNG', 'WEBP', 'GIF', 'BMP')
"""Formats whose header has the size of the image. An EXIF entry may still exchange width and height."""
IMAGE_FORMATS = (
    'AVIF',
    'BMP',
    'DIB',
    'GIF',
    'HEIF',
    'JPEG',
    'JPEG2000',
    'PNG',
    'PPM',
    'TGA',
    'TIFF',
    'WEBP',
)
"""Formats of PIL that are read. Others start programs (EPS), hold several sizes, or are recognized only by name."""
UPRIGHT_OPERATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that turns an image upright, by EXIF's orientation."""
SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
"""Orientations of EXIF whose operation exchanges width and height."""


def read_image(file: MediaFile) -> Image.Image:
    """Returns an image in RGB, turned as its EXIF entry says. 16 bits a channel are scaled to 8."""
    with _open_image(file) as image:
        _check_white(image)  # before `_upright`, which may drop the tags of a TIFF file
        return _to_rgb(_upright(image))


def image_size(file: MediaFile) -> tuple[int, int]:
    """Returns width and height of the image that :func:`read_image` returns.

    Reads only the header, if the format has them there. Exception: if the EXIF of a PNG comes after the pixels, it is
    not read, so width and height are those before the turn.
    """
    with _open_image(file) as image:
        if image.format not in FORMATS_WITH_SIZE_IN_HEADER:
            return _upright(image).size
        # The base class's `getexif`, because PNG's own method would decode the image to look for EXIF after the pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
        width, height = image.size
        if orientation in SIDEWAYS_ORIENTATIONS:
            return height, width
        return width, height


def _upright(image: Image.Image) -> Image.Image:
    """Returns the image, turned as its EXIF entry says.

    PIL's own ``exif_transpose`` also writes the EXIF block again, and raises if any entry of it has an unusual type.
    """
    image.load()
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    if orientation in UPRIGHT_OPERATIONS:
        return image.transpose(UPRIGHT_OPERATIONS[orientation])
    return image


@contextmanager
def _open_image(file: MediaFile) -> Iterator[Image.Image]:
    """Opens an image without decoding it. Refuses an image with several pages. PIL refuses too many pixels."""
    formats = _known_formats()
    try:
        opened = Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        raise InvalidInputError(
            f'it is damaged, or no image of a known format ({", ".join(formats)}; no EPS; a HEIF image needs '
            '`pip install pillow-heif`)'
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidInputError(f'{error} Make it smaller') from error
    with opened as image:
        # An MPO file holds several images too, but those after the first are a camera's previews.
        if image.format != 'MPO' and getattr(image, 'is_animated', False):
            raise InvalidInputError(
                'it holds several images, but a model would see only the first. Save one, or make a video'
            )
        yield image


def _known_formats() -> list[str]:
    """Returns the IMAGE_FORMATS that PIL can open here. Registers pillow-heif with PIL if it is installed."""
    Image.init()
    if 'HEIF' not in Image.OPEN and importlib.util.find_spec('pillow_heif') is not None:
        import pillow_heif  # pyright: ignore[reportMissingImports]

        pillow_heif.register_heif_opener()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def _check_white(image: Image.Image) -> None:
    """Raises ValueError if it is not known which value of a channel is white.

    It is 255 in images of 8 bits a channel, and 65535 in images of 16 bits. But floats have no white. And in a TIFF
    file, white may be the largest value of 12 or 32 bits, or 0. If white is 0, PIL inverts the values, but only in
    images of up to 8 bits.
    """
    is_float = image.mode == 'F'
    is_deep_tiff = image.format == 'TIFF' and _has_more_than_8_bits(image)
    if is_float or (is_deep_tiff and not _is_white_65535(image)):
        raise _error_of_unknown_white(image)


def _has_more_than_8_bits(image: Image.Image) -> bool:
    """Tells whether an image has integers of 16 or 32 bits. PIL's modes for them begin with I."""
    return image.mode.startswith('I')


def _is_white_65535(image: Image.Image) -> bool:
    """Tells whether 0 is black and 65535 is white in a TIFF file of 16 or 32 bits a value, by its TIFF tags."""
    # In a TIFF file, mode I is for 32 bits, or for 16 bits with a sign. (An older PIL uses it for any PNG of 16 bits.)
    if image.mode == 'I':
        return False
    tags: Any = getattr(image, 'tag_v2', {})
    is_black_zero = tags.get(ExifTags.Base.PhotometricInterpretation) == 1
    return is_black_zero and tags.get(ExifTags.Base.BitsPerSample) == (16,)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB, and scales 16 bits a channel to 8. PIL itself would turn all values above 255 white."""
    if _has_more_than_8_bits(image):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > MAX_16_BIT:
            raise _error_of_unknown_white(image)
        values_of_8_bits = values // (MAX_16_BIT // 255)  # 65535 becomes 255
        image = Image.fromarray(values_of_8_bits.astype(np.uint8))
    return image.convert('RGB')


def _error_of_unknown_white(image: Image.Image) -> InvalidInputError:
    return InvalidInputError(
        f'it has no known white (PIL mode {image.mode}). Save it with 8 or 16 bits a channel, and 0 for black'
    )
