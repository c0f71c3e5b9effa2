# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The record of one conversation: its turns, its media, and the error that names a bad sample.

`files.py` reads raw records, `formats.py` makes records of them, and `conversation.py` encodes records as samples. All
of them use the types of this file.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from composer_tokacc.batch import MODALITIES
from composer_tokacc.refusals import InvalidInputError

PathLike = str | os.PathLike[str]
MediaFile = os.PathLike[str] | BinaryIO
"""The path of a file, or an open one. Both PIL and `containers.py` read an open file from its start."""
JsonObject = Mapping[str, Any]
"""A decoded object of a JSON file, or a row of a table."""
Message = Mapping[str, Any]
"""One turn as chat templates take it: ``role``, ``content`` (a text, or a list of parts), perhaps ``weight``."""
EncodedSample = dict[str, Any]
"""One encoded conversation, as a batch of one row. The first dimension of a tensor is 1 for text, and of any size for
media. Lists have one entry."""
DecodedMedia = Mapping[str, Sequence[Any]]
"""By modality: PIL images, :class:`.Video`, and audio, float32 arrays ``(audio samples,)``."""

PLACEHOLDERS = tuple(f'<{modality}>' for modality in MODALITIES)
"""Each marks the place of a medium in the text of a turn."""
PLACEHOLDER = re.compile(f'<(?P<modality>{"|".join(MODALITIES)})>')
"""Finds a placeholder."""
ROLES_WITH_MEDIA = ('user', 'tool')
"""Roles whose turns may hold media. In other turns, such as answers, ``<video>`` is text: perhaps a tag of HTML."""
TURN_NOTES = ('id', 'index', 'timestamp')
"""Keys that a turn may have, and that are not read."""
_PLACEHOLDER_ON_LINES = re.compile(rf'\n*{PLACEHOLDER.pattern}\n*')
"""Finds a placeholder with the line breaks around it."""

MAX_REASON = 1000
"""Longest reason of an error in characters. Chat templates and decoders may put a whole text into their messages."""

MACHINE_ERRNOS = (
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
"""Numbers of system errors that are faults of the machine: its network, memory, or limit of threads (EAGAIN) or of open
files. EIO is not among them, because a bad sector of a disk stays bad, so the file can never be read."""


class BadSampleError(InvalidInputError):
    """A sample that cannot be used. The message names its id, its file and its line.

    ``on_error=skip`` leaves out the samples that raise this error. Any other error ends the run.
    """


def is_from_file(error: Exception) -> bool:
    """Tells whether an error that was raised while a file was read may come from the file, so that its sample is bad.

    If not, it is a fault of the machine or of the program. Such an error must stay as it is, because the sample is
    good, and ``on_error=skip`` must not skip it. Decoders raise almost any class for a damaged file, so this
    function lists the errors that never come from a file.
    """
    # FFmpeg also reports ENOMEM for a damaged header with an absurd size.
    is_of_ffmpeg = type(error).__module__.partition('.')[0] == 'av'
    if is_of_ffmpeg and getattr(error, 'errno', None) == errno.ENOMEM:
        return True
    if isinstance(error, MemoryError | ImportError | NameError):
        return False
    return not isinstance(error, OSError) or error.errno not in MACHINE_ERRNOS


class RawRecord(NamedTuple):
    """The entry of a file for one sample, before anything is checked."""

    path: str
    """The file."""
    where: str
    """Its place in the file, such as ``line 3``, ``entry 3`` or ``row 3``."""
    data: object
    """The decoded object, or the error that decoding it raised."""
    unnamed_media: JsonObject = MappingProxyType({})
    """Keys whose names announce a medium, with their values, if ``dataset_info.json`` names no column of media. They
    are not in ``data``."""


class Turn(NamedTuple):
    """The words of one speaker."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    text: str
    """In a turn that may hold media, ``<image>``, ``<video>`` or ``<audio>`` marks the place of a medium."""
    carries_loss: bool = True
    """False for an answer that the model reads and does not learn. Turns of other roles have True, without effect."""

    @property
    def placeholders(self) -> list[re.Match[str]]:
        """The placeholders of its media, as matches of ``PLACEHOLDER``."""
        if self.role not in ROLES_WITH_MEDIA:
            return []
        return list(PLACEHOLDER.finditer(self.text))


@dataclass(frozen=True)
class EmbeddedFile:
    """A file whose content is part of the record. Files with the same checksum are equal."""

    name: str = field(compare=False)
    """Used in messages."""
    checksum: int
    """CRC-32 of the content, for the fingerprint of the data."""
    read: Callable[[], bytes] = field(compare=False)
    """Reads the content. In a table, such as parquet, it stays on disk until then."""

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> EmbeddedFile:
        """Returns a file whose content stays in memory."""
        # Calling the partial returns the content. A lambda could not be pickled for worker processes.
        return cls(name, zlib.crc32(content), partial(bytes, content))


class Medium(NamedTuple):
    """An image, a video or an audio of a record."""

    modality: str
    files: tuple[str | EmbeddedFile, ...] = ()
    """One file, or the frames of a video as several images. A file is a name inside ``Record.folder``, or embedded.
    Empty only while `formats.py` parses the record."""

    @property
    def names(self) -> list[str]:
        """Names of the files, for messages."""
        names = []
        for file in self.files:
            names.append(file.name if isinstance(file, EmbeddedFile) else file)
        return names


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation of a file."""

    sample_id: str
    """The record's ``id``, or its place, such as ``line 3``."""
    source: str
    """``PATH, line 3``, for messages. The property :attr:`path` is cut out of it: shards store only this text."""
    turns: tuple[Turn, ...]
    media: tuple[Medium, ...]
    """In the order of the placeholders."""
    folder: Path = Path()
    """Folder to which the names of its media are relative."""
    loss_weights: float | None = None
    """One weight for all tokens of the sample, with ``token_weights: column``. None: the record has no weight."""

    @property
    def texts(self) -> list[str]:
        """Text of every turn, without placeholders."""
        texts = []
        for turn in self.turns:
            texts.append(PLACEHOLDER.sub('', turn.text) if turn.placeholders else turn.text)
        return texts

    @property
    def files(self) -> list[tuple[str, str | EmbeddedFile]]:
        """Modality and file, for every file of its media."""
        files = []
        for medium in self.media:
            for file in medium.files:
                files.append((medium.modality, file))
        return files

    @property
    def path(self) -> str:
        """Path of the file that holds the record."""
        path, _, _ = self.source.rpartition(', ')
        return path

    def count(self, modality: str) -> int:
        """Returns the number of its media of a modality."""
        return sum(medium.modality == modality for medium in self.media)

    def error(self, reason: object) -> BadSampleError:
        """Returns the error that names this sample and gives the reason."""
        text = f'sample "{self.sample_id}" ({self.source}): {shorten_middle(str(reason), MAX_REASON)}'
        characters = []
        for character in text:
            # The message is one line, so line breaks and control characters are escaped.
            if not character.isprintable():
                character = ascii(character).strip("'")  # `\n` without the quotes
            characters.append(character)
        return BadSampleError(''.join(characters))

    def messages(self) -> list[dict[str, Any]]:
        """Returns the turns as messages whose content is a list of parts, with ``weight`` 0 for an answer without loss.

        Line breaks around a placeholder are removed, because the template writes its own.
        """
        messages = []
        for turn in self.turns:
            content = []
            pieces = [turn.text]
            if turn.placeholders:
                # The pattern has one group, the modality. So `split` alternates between texts and modalities.
                pieces = _PLACEHOLDER_ON_LINES.split(turn.text)
            for position, piece in enumerate(pieces):
                if position % 2 == 1:
                    content.append({'type': piece})
                elif piece:
                    content.append({'type': 'text', 'text': piece})
            message = {'role': turn.role, 'content': content}
            if not turn.carries_loss:
                message['weight'] = 0
            messages.append(message)
        return messages


def check_message(message: object) -> Message:
    """Returns a message with a list of parts as its content.

    Raises:
        ValueError: If the message has a wrong form, or a value under a key that the encoder would drop. Chat templates
            read such keys, for example ``reasoning_content``.
    """
    content = None
    if isinstance(message, Mapping):
        content = _content_of(message)
    if not isinstance(message, Mapping) or content is None:
        raise InvalidInputError(
            '`messages` must hold turns with a `role`, text, image, video or audio as `content` (only text '
            f'in answers), and a `weight` of 0 or 1, got: {message!r:.200}.'
        )
    for key, value in message.items():
        if key not in ('role', 'content', 'weight', *TURN_NOTES) and is_given(value):
            raise InvalidInputError(
                f'`messages` must hold turns of `role`, `content` and `weight`, but `{key}` would be dropped. Write it '
                'into the text.'
            )
    return {**message, 'content': content}


def _content_of(message: Message) -> Sequence[Mapping[str, Any]] | None:
    """Returns the content of a message as a list of parts. None if the message has a wrong form."""
    role = message.get('role')
    if not isinstance(role, str) or message.get('weight', 1) not in (0, 1):
        return None
    content = message.get('content')
    if isinstance(content, str):
        content = [{'type': 'text', 'text': content}]
    # ROLES_WITH_MEDIA is about tags in the texts of records. Here the user names each medium as a part, so any turn may
    # hold media, except an answer.
    modalities = () if role == 'assistant' else MODALITIES
    if not _is_list_of_parts(content, modalities):
        return None
    return content


def _is_list_of_parts(content: object, modalities: Sequence[str]) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Tells whether a content is a list of texts and of media of these modalities."""
    if not isinstance(content, Sequence):
        return False
    for part in content:
        if not isinstance(part, Mapping):
            return False
        is_text = part.get('type') == 'text' and isinstance(part.get('text'), str)
        if not is_text and part.get('type') not in modalities:
            return False
    return True


def leaves_of(value: object) -> Iterator[object]:
    """Yields everything in a decoded value that is neither an object nor a list."""
    if isinstance(value, dict):  # not Mapping: that check takes longer than all else
        value = value.values()
    elif not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from leaves_of(item)


def is_given(value: object) -> bool:
    """Tells whether a value is given. It is missing if it is null, '', [] or {}, or a list or object of only these.

    For example, a table of images has ``{"bytes": null, "path": null}`` in rows that have only text.
    """
    for leaf in leaves_of(value):
        is_empty_text = isinstance(leaf, str | bytes) and not leaf
        if leaf is not None and not is_empty_text:
            return True
    return False


def short_repr(value: object, limit: int = 60) -> str:
    """Returns ``repr()`` in ASCII, on one line and without its middle if it is too long. For messages."""
    return shorten_middle(' '.join(ascii(value).split()), limit)


def shorten_middle(text: str, limit: int) -> str:
    """Replaces the middle of a text of more than ``limit`` characters by ``...``. Its end stays: it has the remedy."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f'{text[:half]} ... {text[-half:]}'
