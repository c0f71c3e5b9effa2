# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One record with its image files -> one training sample, the same wherever record and files came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, BinaryIO

from jinja2 import TemplateError
from PIL import Image

from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.formats import PLACEHOLDER, Record

__all__ = ['check_takes_images', 'encode_record', 'open_image']


def encode_record(encoder: ConversationEncoder, record: Record, images: Sequence[Image.Image]) -> dict[str, Any]:
    """Encodes a record.

    Args:
        encoder: Its processor must take images if the record has any, see :func:`check_takes_images`.
        record: The conversation.
        images: One per entry of ``record.images``, in order.

    Returns:
        As :class:`ConversationEncoder` gives it.

    Raises:
        BadSampleError: If the encoder, its processor or its template refuses the sample; names it.
        RuntimeError: If one of them fails in another way, which is a fault of the program; names the sample too.
    """
    try:
        return encoder(_messages(record), images, sample_id=record.sample_id)
    except (ValueError, TemplateError) as error:
        raise record.error(str(error)) from error
    except Exception as error:  # no bad sample that `skip` may drop
        raise RuntimeError(str(record.error(f'{type(error).__name__}: {error}'))) from error


def open_image(record: Record, file: str | os.PathLike[str] | BinaryIO, name: str) -> Image.Image:
    """Decodes an image file in full.

    Args:
        record: Whose image it is.
        file: Path or open file.
        name: What messages call it.

    Returns:
        The image in RGB.

    Raises:
        BadSampleError: If it cannot be decoded; names sample and file.
    """
    try:
        with Image.open(file) as image:
            return image.convert('RGB')
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
        raise record.error(f'image file {name} cannot be read: {error}') from error


def check_takes_images(encoder: ConversationEncoder, record: Record) -> None:
    """Refuses a record with images for a processor without, which would drop them.

    Raises:
        BadSampleError: Names the sample.
    """
    if record.images and not encoder.has_images:
        raise record.error('has images, but the processor takes none; use a vision-language processor')


def _messages(record: Record) -> list[dict[str, Any]]:
    """Turns as chat templates want them; the line breaks around a placeholder belong to the template."""
    messages = []
    for role, text in record.turns:
        content: list[dict[str, str]] = []
        for position, piece in enumerate(text.split(PLACEHOLDER)):
            if position > 0:
                content.append({'type': 'image'})
            if piece := piece.strip('\n'):
                content.append({'type': 'text', 'text': piece})
        messages.append({'role': role, 'content': content})
    return messages
