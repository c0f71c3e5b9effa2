# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Records of conversations: turns, the media that they show, and what is wrong with a bad sample."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from composer_tokacc.batch import MODALITIES

PathLike = str | os.PathLike[str]
MediaFile = os.PathLike[str] | BinaryIO

PLACEHOLDER = re.compile(f'<({"|".join(MODALITIES)})>')
_PLACEHOLDER_ON_LINES = re.compile(rf'\n*{PLACEHOLDER.pattern}\n*')


class BadSampleError(ValueError):
    """A sample that cannot be used; the message names its id, its file and its line."""


class RawRecord(NamedTuple):
    """What a file holds for one sample, nothing checked yet."""

    path: str
    where: str
    """``line 3``, ``entry 3`` or ``row 3`` of the file."""
    data: Any
    """The object, or the error that reading it raised."""


class Turn(NamedTuple):
    """What one side says."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    text: str
    """``<image>``, ``<video>`` or ``<audio>`` stands where one goes."""
    carries_loss: bool = True
    """False for an answer that the model reads and does not learn."""


@dataclass(frozen=True)
class EmbeddedFile:
    """A file inside a record, which holds its content."""

    name: str
    """For messages."""
    checksum: int
    read: Callable[[], bytes]
    """Returns the content, so that a record of a table on disk need not hold it."""

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> EmbeddedFile:
        """Returns the file with the given content, which stays in memory."""
        return cls(name, zlib.crc32(content), partial(bytes, content))


class Medium(NamedTuple):
    """An image, a video or an audio of a record."""

    modality: str
    files: tuple[str | EmbeddedFile, ...]
    """One, named from the media folder or embedded; or several images, which are the frames of a video."""

    @property
    def names(self) -> list[str]:
        """What messages call the files."""
        return [file if isinstance(file, str) else file.name for file in self.files]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation of a file."""

    sample_id: str
    """The record's own ``id``, or ``line <n>``."""
    source: str
    """File and line, for messages."""
    turns: tuple[Turn, ...]
    media: tuple[Medium, ...]
    """In the order of the placeholders."""
    loss_weights: float | None = None
    """What each of its tokens weighs, where a run asks for such weights; None: the data do not say."""

    @property
    def texts(self) -> list[str]:
        """Text of every turn, without placeholders."""
        return [PLACEHOLDER.sub('', turn.text) for turn in self.turns]

    @property
    def files(self) -> list[tuple[str, str | EmbeddedFile]]:
        """Modality and file, of all files of its media."""
        return [(medium.modality, file) for medium in self.media for file in medium.files]

    @property
    def file_name(self) -> str:
        """Name of the file that it stands in."""
        return os.path.basename(self.source.rpartition(', ')[0])

    def count(self, modality: str) -> int:
        """Returns how many media of a modality it has."""
        return sum(medium.modality == modality for medium in self.media)

    def error(self, reason: object) -> BadSampleError:
        """Returns the error that says what is wrong with this sample."""
        text = f'sample "{self.sample_id}" ({self.source}): {reason}'
        return BadSampleError(''.join(one if one.isprintable() else ascii(one)[1:-1] for one in text))

    def messages(self) -> list[dict[str, Any]]:
        """Returns the turns as chat templates want them, plus ``weight`` 0 for an answer without loss.

        The line breaks around a placeholder belong to the template.
        """
        messages = []
        for role, text, carries_loss in self.turns:
            pieces = enumerate(_PLACEHOLDER_ON_LINES.split(text))  # the modalities stand at the odd positions
            content = [{'type': piece} if i % 2 else {'type': 'text', 'text': piece} for i, piece in pieces if piece]
            messages.append({'role': role, 'content': content, **({} if carries_loss else {'weight': 0})})
        return messages


def check_message(message: Any) -> None:
    """Raises ValueError unless a message is one that chat templates write."""
    given = message if isinstance(message, Mapping) else {}
    parts: Any = [{'type': 'text', 'text': text}] if isinstance(text := given.get('content'), str) else text
    is_known = isinstance(parts, Sequence) and all(
        isinstance(one, Mapping)
        and (one.get('type') in MODALITIES or (one.get('type') == 'text' and isinstance(one.get('text'), str)))
        for one in parts
    )
    if not is_known or not isinstance(given.get('role'), str) or given.get('weight', 1) not in (0, 1):
        known = 'with a `role`, text, image, video or audio as `content`, and a `weight` of 0 or 1'
        raise ValueError(f'`messages` must hold turns {known}, got: {message!r:.200}.')
