# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds media in a record under keys that are not read, so that no sample is trained without its image or video.

A key is refused if its value looks like a medium: a path with the ending of an image, video or audio file, a
``data:`` URI, base64 of such a file, bytes, or lists and objects of those. A key whose name says "image", "video",
"audio" or "media" is refused as well. :func:`check_unread_keys` names two exceptions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import EmbeddedFile, Medium, short_repr
from composer_tokacc.refusals import InvalidInputError

MEDIA_KEYS = {
    'image': ('image', 'images'),
    'video': ('video', 'videos'),
    'audio': ('audio', 'audios', 'sound'),
}
"""Keys of a record that list the files of a modality, and are read."""

_IMAGE_ENDINGS = 'jpg jpeg jpe jfif png webp gif bmp tif tiff heic heif avif jp2 j2k tga ppm pgm svg eps'
_VIDEO_ENDINGS = 'mp4 mkv webm mov avi m4v mpg mpeg flv wmv 3gp ogv mts m2ts m3u8'
_AUDIO_ENDINGS = 'wav mp3 flac ogg oga opus m4a aac wma aiff aif'
MODALITY_OF_ENDING = {
    **dict.fromkeys(_IMAGE_ENDINGS.split(), 'image'),
    **dict.fromkeys(_VIDEO_ENDINGS.split(), 'video'),
    **dict.fromkeys(_AUDIO_ENDINGS.split(), 'audio'),
}

# The first bytes of common formats, in base64: JPEG, PNG, GIF, RIFF (WebP, AVI, WAV), TIFF; MP4, AVIF and HEIF, which
# begin with the size of a box; Matroska, MP3, FLAC and Ogg. No file is shorter than 40 characters.
_BASE64 = re.compile(
    r'(?=/9j/|iVBORw0KGgo|R0lGOD|UklGR|SUkqA|TU0AK|AAAA..Z0eX|GkXfo|SUQz|ZkxhQ|T2dnUw)'
    r'[A-Za-z0-9+/\s]{40,}={0,2}\s*'
)
_DATA_URI = re.compile(r'data:(\w*)(/[\w.+-]+)?(;[\w=-]+)*,', re.IGNORECASE)
ADDRESS = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')
"""The start of an address in a network, or of a file: URL."""

_ANNOUNCING_KEY = re.compile(
    r'((?P<image>image|img|picture|pic|photo|jpe?g|png)'
    r'|(?P<video>video|clip|film|movie|frame|mp4)'
    r'|(?P<audio>audio|speech|wav|mp3)'
    r'|media|medium|visual|vision|attachment)'
    r'(_?(id|name|file|file_?name|file_?path|path|ur[il]|src|list|data|bytes|b64|base64))?s?(_?\d+)?'
)
"""Names of keys that announce a medium: a word, perhaps a suffix, a plural and a number, as in ``img_paths_2``."""
_ID_KEY = re.compile(r'.*ids?')
"""Keys whose number is the id of a medium, such as ``image_id``. Under other keys a number is a count."""


class Likeness(NamedTuple):
    """A sign of a medium: a file, an address of a file, or a key that announces one."""

    modality: str
    """'' if the sign does not say which."""
    file_name: str = ''
    """Name of the file without folders. '' if there is none, as for bytes."""
    may_be_source: bool = False
    """Whether it may only note where a medium comes from: an address in a network, or the name of a key."""


def check_unread_keys(
    data: Mapping[str, object],
    keys_read: Container[str],
    media: Sequence[Medium],
) -> None:
    """Raises ValueError if a key that is not read looks like a medium.

    Two signs are allowed, because they only note where a medium comes from that is read under another key: the name of
    its file; and a network address or the name of a key, if the record has a medium of the same modality.

    Args:
        data: The record.
        keys_read: Keys whose values are used. Media in them are checked by their own rules.
        media: Media of the record that are read.
    """
    names_read = set()
    modalities_read = set()
    for medium in media:
        names_read.update(os.path.basename(name) for name in medium.names)
        modalities_read.update((medium.modality, ''))  # a sign without modality may note any medium
    for key, value in data.items():
        if key in keys_read:
            continue
        for likeness in chain(find_media(value), _announced_medium(str(key), value)):
            is_source = likeness.may_be_source and likeness.modality in modalities_read
            if not is_source and likeness.file_name not in names_read:
                raise InvalidInputError(_refusal(str(key), value, likeness.modality))


def find_media(value: object) -> Iterator[Likeness]:
    """Yields everything in a value that looks like a medium."""
    if isinstance(value, bytes | EmbeddedFile):
        yield Likeness('')
    elif isinstance(value, str):
        yield from _likeness_of_text(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_media(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_media(item)


def _likeness_of_text(text: str) -> Iterator[Likeness]:
    """Yields a sign if a text is a ``data:`` URI, base64 of a file, or the path or address of a media file."""
    uri = _DATA_URI.match(text)
    address = ADDRESS.match(text)
    if uri:
        modality = uri[1].lower()
        yield Likeness(modality if modality in MODALITIES else '')
    elif is_base64_of_file(text):
        yield Likeness('')
    elif '\n' not in text and (address or '://' not in text):  # a text with lines, or around an address, is no path
        path = text.strip()  # a path may hold spaces, so a sentence that ends in a file name counts as a path
        if address:
            path = re.split('[?#]', path)[0]
        file_name = os.path.basename(path)
        _, dot, ending = file_name.rpartition('.')
        modality = MODALITY_OF_ENDING.get(ending.lower())
        if dot and modality:
            # A file: URL is a path, not a place in a network.
            is_in_network = address is not None and address[0].lower() != 'file://'
            yield Likeness(modality, file_name, is_in_network)


def is_base64_of_file(text: str) -> bool:
    """Tells whether a text is base64 of an image, a video or an audio, by the first bytes."""
    return _BASE64.fullmatch(text) is not None


def _announced_medium(key: str, value: object) -> Iterator[Likeness]:
    """Yields the medium that the name of a key announces.

    Yields nothing for a sentence, a count or a flag, because such a value is not a medium.
    """
    match = _ANNOUNCING_KEY.fullmatch(key.lower())
    is_sentence_or_empty = isinstance(value, str) and len(value.split()) != 1
    is_count = isinstance(value, int) and not _ID_KEY.fullmatch(key.lower())
    if match is None or is_sentence_or_empty or is_count:
        return
    if isinstance(value, bool | float) or value in (None, [], {}):
        return
    modality = ''
    for name in MODALITIES:
        if match[name]:  # the group of the modality
            modality = name
    yield Likeness(modality, may_be_source=True)


def _refusal(key: str, value: object, modality: str) -> str:
    """Returns the message that refuses a key, with the key to use instead."""
    # `frames` of .jpg files are a video, but a .mp4 file is a video under any name.
    if modality in ('', 'image'):
        for announced in _announced_medium(key, value):
            modality = announced.modality or modality
    singular, plural, *_ = MEDIA_KEYS[modality or 'image']
    key_to_use = plural if isinstance(value, list) else singular
    problem = (
        f'`{key[:60]}` looks like an image, a video or an audio, but this key is not read, got: {short_repr(value)}'
    )
    return f'{problem}. Call it `{key_to_use}`, or take it out'
