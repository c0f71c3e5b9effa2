# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds media in a record under keys that are not read, so that no sample is trained without its image or video.

A key is refused if its value looks like a medium: a path with the ending of an image, video or audio file, a
``data:`` URI, base64 of such a file, bytes, or lists and objects of those. A key whose name says "image" or "video" is
refused as well if the record has no other medium of that modality.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import EmbeddedFile, Medium, short_repr

MEDIA_KEYS = {
    'image': ('image', 'images'),
    'video': ('video', 'videos'),
    'audio': ('audio', 'audios', 'sound'),
}
"""Keys of a record that list the files of a modality. These are read."""

_IMAGE_ENDINGS = 'jpg jpeg jpe jfif png webp gif bmp tif tiff heic heif avif jp2 j2k tga ppm pgm svg eps'
_VIDEO_ENDINGS = 'mp4 mkv webm mov avi m4v mpg mpeg flv wmv 3gp ogv mts m2ts m3u8'
_AUDIO_ENDINGS = 'wav mp3 flac ogg oga opus m4a aac wma aiff aif'
MODALITY_OF_ENDING = {
    **dict.fromkeys(_IMAGE_ENDINGS.split(), 'image'),
    **dict.fromkeys(_VIDEO_ENDINGS.split(), 'video'),
    **dict.fromkeys(_AUDIO_ENDINGS.split(), 'audio'),
}

# The first bytes of common formats, in base64. The four free characters of MP4 are the size of its first box.
_IMAGE_STARTS = r'/9j/|iVBORw0KGgo|R0lGOD|UklGR.{7}XRUJQ|SUkqA|TU0AK'
_VIDEO_STARTS = r'AAAA.{4}ZnR5c|GkXfo|UklGR.{7}QVZJI'
_AUDIO_STARTS = r'SUQz|ZkxhQ|T2dnUw|UklGR'
_BASE64_STARTS = {
    'image': re.compile(_IMAGE_STARTS),
    'video': re.compile(_VIDEO_STARTS),
    'audio': re.compile(_AUDIO_STARTS),
}
_DATA_URI = re.compile(r'data:(\w*)(/[\w.+-]+)?(;[\w=-]+)*,', re.IGNORECASE)
_SCHEME = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')
_BASE64 = re.compile(r'[A-Za-z0-9+/\s]+={0,2}\s*')
MIN_BASE64 = 40
"""Fewest characters of a file. A shorter text is a word or a name, because no image file is so small."""

# An announcing key is such a word, perhaps with one of these suffixes, a plural and a number: `img_paths_2`.
_FILE_SUFFIXES = 'id|name|file|file_?name|file_?path|path|ur[il]|src|list|data|bytes|b64|base64'
_ANNOUNCING_KEYS = {
    'image': re.compile(rf'(image|img|picture|pic|photo|jpe?g|png)(_?({_FILE_SUFFIXES}))?s?(_?\d+)?'),
    'video': re.compile(rf'(video|clip|film|movie|frame|mp4)(_?({_FILE_SUFFIXES}))?s?(_?\d+)?'),
    'audio': re.compile(rf'(audio|speech|wav|mp3)(_?({_FILE_SUFFIXES}))?s?(_?\d+)?'),
    '': re.compile(r'(media|medium|visual|vision|attachment)s?(_?(path|file|url|list))?s?'),
}
"""Names of keys that announce a medium, by modality; '' if the name does not say which."""
_ID_KEY = re.compile(r'.*_?ids?')
"""Names of keys whose number is the id of a medium. The number of any other key is a count."""


class Likeness(NamedTuple):
    """A value that looks like a medium: a file, or an address of a file."""

    modality: str
    """'' if the value does not say which."""
    file_name: str
    """Its file name without folders. '' for content."""
    is_address: bool = False
    """Whether the value is an address in a network."""


def check_unread_keys(
    data: Mapping[str, object],
    keys_read: Container[str],
    media: Sequence[Medium],
) -> None:
    """Raises ValueError if a key that is not read looks like a medium.

    Two cases are allowed, because they say where a medium came from and hold no other one: the file name of a medium
    that is read, and a network address in a record with a medium of the same modality.

    Args:
        data: The record.
        keys_read: Keys whose values are used. Media in them are checked by their own rules.
        media: Media of the record that are read.
    """
    names_read = set()
    for medium in media:
        names_read.update(os.path.basename(name) for name in medium.names)
    modalities_read = {medium.modality for medium in media}
    for key, value in data.items():
        if key in keys_read:
            continue
        for likeness in find_media(value):
            is_source = likeness.is_address and likeness.modality in modalities_read
            is_read = likeness.file_name != '' and likeness.file_name in names_read
            if not is_source and not is_read:
                raise ValueError(_refusal(str(key), value, likeness.modality))
        announced = announced_modality(str(key), value)
        if announced is None:
            continue
        # Any medium will do for '', which announces no modality in particular.
        if not modalities_read or (announced and announced not in modalities_read):
            raise ValueError(_refusal(str(key), value, announced))


def find_media(value: object) -> Iterator[Likeness]:
    """Yields everything in a value that looks like a medium."""
    if isinstance(value, bytes | EmbeddedFile):
        yield Likeness('', '')
    elif isinstance(value, str):
        likeness = _likeness_of_text(value)
        if likeness is not None:
            yield likeness
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_media(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_media(item)


def _likeness_of_text(text: str) -> Likeness | None:
    uri = _DATA_URI.match(text)
    if uri:
        modality = uri[1].lower()
        return Likeness(modality if modality in MODALITIES else '', '')
    modality = modality_of_base64(text)
    if modality is not None:
        return Likeness(modality, '')
    scheme = _SCHEME.match(text)
    try:
        path = urlsplit(text).path if scheme else text
    except ValueError:  # not an address after all, such as 'http://[a'
        path = text
    has_address_inside = scheme is None and '://' in path
    if has_address_inside or '\n' in path:  # a text, not a path
        return None
    file_name = os.path.basename(path.strip())
    _, dot, ending = file_name.rpartition('.')
    modality = MODALITY_OF_ENDING.get(ending.lower()) if dot else None
    if modality is None:
        return None
    # A file: URL is a path, not a place in a network.
    is_address = scheme is not None and scheme[0].lower() != 'file://'
    return Likeness(modality, file_name, is_address)


def modality_of_base64(text: str) -> str | None:
    """Returns the modality of a file that a text holds as base64, by the first bytes. None if it holds no such file."""
    if len(text) < MIN_BASE64:
        return None
    for modality, pattern in _BASE64_STARTS.items():
        if pattern.match(text):
            return modality if _BASE64.fullmatch(text) else None
    return None


def announced_modality(key: str, value: object) -> str | None:
    """Returns the modality that the name of a key announces, '' for one of any modality. None if it announces none.

    A value that is a sentence, a count or a flag is not a medium, whatever its key is called.
    """
    if isinstance(value, bool | float) or value is None or value in ('', [], {}):
        return None
    if isinstance(value, str) and len(value.split()) != 1:
        return None
    if isinstance(value, int) and not _ID_KEY.fullmatch(key.lower()):
        return None
    for modality, pattern in _ANNOUNCING_KEYS.items():
        if pattern.fullmatch(key.lower()):
            return modality
    return None


def nearest_key(key: str, value: object, modality: str) -> str:
    """Returns the key under which such a value would be read."""
    announced = announced_modality(key, value)
    modality = announced or modality
    if modality:
        singular, plural, *_ = MEDIA_KEYS[modality]
        return plural if isinstance(value, list) else singular
    matches = difflib.get_close_matches(key.lower(), [*MEDIA_KEYS, 'images', 'videos', 'audios'], n=1)
    return matches[0] if matches else 'image'


def _refusal(key: str, value: object, modality: str) -> str:
    kind = {'image': 'an image', 'video': 'a video', 'audio': 'an audio'}.get(modality, 'an image, a video or an audio')
    problem = f'`{key[:60]}` looks like {kind}, but this key is not read, got: {short_repr(value)}'
    return f'{problem}. Call it `{nearest_key(key, value, modality)}`, or take it out'
