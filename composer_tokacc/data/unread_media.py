# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds media in a record under keys that are not read, so that no sample is trained without its image or video.

A medium is an image, a video or an audio. A key is refused if its value looks like one: a path or URL with the ending
of a media file, a ``data:`` URI, base64 of such a file, bytes, or lists and objects of those. A key whose name says
"image", "video", "audio" or "media" is refused as well, unless its value is a sentence, a count, a flag or empty.
:func:`_is_note` names two exceptions for both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import EmbeddedFile, Medium, is_given, leaves_of, short_repr
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
"""Modality by the ending of a file name, in lower case and without the dot."""

# The first bytes of common formats, in base64: JPEG, PNG, GIF, RIFF (WebP, AVI, WAV), TIFF (two byte orders); MP4, AVIF
# and HEIF, which begin with a size and `ftyp`; Matroska, MP3, FLAC and Ogg. No such file is shorter than 40 characters.
_BASE64 = re.compile(
    r'(?=/9j/|iVBORw0KGgo|R0lGOD|UklGR|SUkqA|TU0AK|AAAA..Z0eX|GkXfo|SUQz|ZkxhQ|T2dnUw)'
    r'[A-Za-z0-9+/\s]{40,}={0,2}\s*'
)
# The group is the modality, as in `data:image/png;base64,`. Other text may begin like a URI: `data:2020,2021`. So the
# type of a medium, or the word base64, is required.
_DATA_URI = re.compile(r'data:(?=(?:image|video|audio)/|[^,\s]*;base64,)(\w*)[^,\s]*,', re.IGNORECASE)
URL_SCHEME = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')
"""The start of a URL, such as ``https://``, ``s3://`` or ``file://``."""

_ANNOUNCING_KEY = re.compile(
    r'(?:(?P<image>image|img|picture|pic|photo|jpe?g|png)'
    r'|(?P<video>video|clip|film|movie|frame|mp4)'
    r'|(?P<audio>audio|speech|wav|mp3)'
    r'|media|medium|visual|vision|attachment)'
    r'(?:_?(?:id|name|file|file_?name|file_?path|path|ur[il]|src|list|data|bytes|b64|base64))?s?(?:_?\d+)?'
)
"""Names of keys that announce a medium, such as ``img_paths_2``: a word for a medium, which may have a suffix, an ``s``
and a number."""
_ID_KEY = re.compile(r'.*ids?(?:_?\d+)?')
"""Keys whose number is the id of a medium, such as ``image_id`` or ``image_id_2``. Under other keys a number is a
count."""


class MediaSign(NamedTuple):
    """A sign that a key holds a medium: a value that looks like one, or the name of the key."""

    modality: str | None
    """None if the sign does not say which."""
    file_name: str | None = None
    """Name of the file without folders. None if the sign has no file name."""
    may_be_source: bool = False
    """Whether the key may only tell where a medium came from, while another key holds the medium. That may be so if the
    value is a URL of a network, or if only the name of the key is a sign."""


def check_unread_keys(
    data: Mapping[str, object],
    keys_read: Container[str],
    media: Sequence[Medium],
    unnamed_media: Mapping[str, object],
) -> None:
    """Raises ValueError if a key that is not read looks like a medium.

    Args:
        data: The record.
        keys_read: Keys whose values are used. Media in them are checked by their own rules.
        media: Media of the record that are read.
        unnamed_media: As in :class:`.RawRecord`. Of these keys only the values are checked, not the names.
    """
    names_read = set()
    for medium in media:
        names_read.update(os.path.basename(name) for name in medium.names)
    modalities_read = {medium.modality for medium in media}
    for key, value in data.items():
        if key in keys_read:
            continue
        signs = list(_signs_in_value(value))
        sign_in_key = _sign_in_key(str(key), value)
        if sign_in_key is not None:
            signs.append(sign_in_key)
        for sign in signs:
            if not _is_note(sign, names_read, modalities_read):
                key_to_use = _key_to_use(str(key), value, sign)
                raise InvalidInputError(
                    f'{_problem_of(str(key), value)}. Call it `{key_to_use}` if it is one. If not, take it out'
                )
    for key, value in unnamed_media.items():
        for sign in _signs_in_value(value):
            if not _is_note(sign, names_read, modalities_read):
                key_to_use = _key_to_use(key, value, sign)
                problem = _problem_of(f'{key} (named by no column)', value)
                # An entry that names any column has no default columns, so it must name all.
                raise InvalidInputError(
                    f'{problem}. Name it in `columns` of `dataset_info.json` as `{key_to_use}`, beside all other '
                    f'columns that are read, or write `"{key_to_use}": null` there, which ignores such keys'
                )


def _is_note(sign: MediaSign, names_read: Container[str | None], modalities_read: Collection[str]) -> bool:
    """Tells whether a key with this sign may be a note about a medium that is read under another key.

    That may be so if the sign is the file name of such a medium, or if it may be a source and a medium of the same
    modality is read. A sign without a modality may be about any medium.
    """
    if sign.file_name in names_read:
        return True
    if sign.modality is None:
        return sign.may_be_source and len(modalities_read) > 0
    return sign.may_be_source and sign.modality in modalities_read


def _signs_in_value(value: object) -> Iterator[MediaSign]:
    """Yields a sign for everything in a value that looks like a medium."""
    for leaf in leaves_of(value):
        if isinstance(leaf, bytes | EmbeddedFile):
            yield MediaSign(modality=None)
        elif isinstance(leaf, str):
            sign = _sign_in_text(leaf)
            if sign is not None:
                yield sign


def _sign_in_text(text: str) -> MediaSign | None:
    """Returns a sign if a text is a ``data:`` URI, base64 of a file, or the path or URL of a media file."""
    data_uri = _DATA_URI.match(text)
    if data_uri:
        type_name = data_uri[1].lower()  # `image` in `data:image/png`
        return MediaSign(type_name if type_name in MODALITIES else None)
    if _BASE64.fullmatch(text):
        return MediaSign(modality=None)
    scheme = URL_SCHEME.match(text)
    if '\n' in text or (scheme is None and '://' in text):
        return None  # neither a text of several lines nor a text around a URL is a path
    path = text.strip()
    if scheme:
        path = re.split('[?#]', path)[0]
    # A path may hold spaces, so a sentence that ends in a file name counts as a path.
    file_name = os.path.basename(path)
    _, dot, ending = file_name.rpartition('.')
    modality = MODALITY_OF_ENDING.get(ending.lower())
    if not dot or modality is None:
        return None
    is_in_network = scheme is not None and scheme[0].lower() != 'file://'
    return MediaSign(modality, file_name, may_be_source=is_in_network)


def announces_medium(key: str) -> bool:
    """Tells whether the name of a key announces a medium."""
    return _ANNOUNCING_KEY.fullmatch(key.lower()) is not None


def _sign_in_key(key: str, value: object) -> MediaSign | None:
    """Returns a sign if the name of a key announces a medium.

    Returns None if the value is a sentence, a count, a fraction or a flag, or is empty, because then it is not a
    medium.
    """
    match = _ANNOUNCING_KEY.fullmatch(key.lower())
    if match is None:
        return None
    # A path may have spaces, too. If it is that of a media file, `_sign_in_text` returns a sign.
    is_sentence_or_space = isinstance(value, str) and len(value.split()) != 1
    is_count = isinstance(value, int) and not _ID_KEY.fullmatch(key.lower())
    is_flag_or_fraction = isinstance(value, bool | float)
    if is_sentence_or_space or is_count or is_flag_or_fraction or not is_given(value):
        return None
    # The pattern has a group for each modality, and no others.
    return MediaSign(match.lastgroup, may_be_source=True)


def _key_to_use(key: str, value: object, sign: MediaSign) -> str:
    """Returns the key that should hold the medium, such as ``images``. Its value is one file, or a list.

    A .mp4 file is a video under any key. But if the value looks like an image, or does not show its modality, the name
    of the key decides, because images under ``frames`` are a video.
    """
    modality = sign.modality
    if modality in (None, 'image'):
        sign_in_key = _sign_in_key(key, value)
        if sign_in_key is not None and sign_in_key.modality is not None:
            modality = sign_in_key.modality
    return f'{modality or "image"}s'


def _problem_of(key: str, value: object) -> str:
    """Returns the first part of the message that refuses a key."""
    return f'`{key[:60]}` looks like an image, a video or an audio, but this key is not read, got: {short_repr(value)}'
