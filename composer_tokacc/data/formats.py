# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations as LLaVA, VILA, LLaMA-Factory, TRL, OpenAI, ms-swift and Monkey write them -> records.

What a record holds is used as its own project means it, or refused by name: nothing is dropped without a word.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ['KINDS', 'BadSampleError', 'EmbeddedFile', 'Medium', 'RawRecord', 'Record', 'Turn', 'parse_record']


class MediaKind(NamedTuple):
    """How records name media of one kind."""

    keys: tuple[str, ...]
    """Keys of a record that list its files."""
    tags: tuple[str, ...]
    """What stands in a text where one goes, the placeholder of this package first."""
    parts: Mapping[str, tuple[str, ...]]
    """Types of content parts -> the keys that may hold the file."""


KINDS = {
    'image': MediaKind(
        keys=('image', 'images'),
        tags=('<image>',),
        parts={
            'image': ('image', 'url', 'path', 'base64'),
            'image_url': ('image_url',),
            'input_image': ('image_url',),
        },
    ),
    'video': MediaKind(
        keys=('video', 'videos'),
        tags=('<video>', '<vila/video>'),
        parts={'video': ('video', 'url', 'path', 'base64'), 'video_url': ('video_url',)},
    ),
    'audio': MediaKind(
        keys=('audio', 'audios', 'sound'),
        tags=('<audio>', '<sound>'),
        parts={
            'audio': ('audio', 'audio_url', 'url', 'path', 'base64'),
            'audio_url': ('audio_url',),
            'input_audio': ('input_audio',),
        },
    ),
}
"""By the name that content parts and processors have for them."""
PLACEHOLDER = re.compile(f'<({"|".join(KINDS)})>')
PLACEHOLDER_ON_LINES = re.compile(rf'\n*{PLACEHOLDER.pattern}\n*')
# Every tag, or what Qwen-VL and Monkey write: the file's name inside the text.
KIND_OF_TAG = {tag: name for name, kind in KINDS.items() for tag in kind.tags}
MEDIUM_IN_TEXT = re.compile(rf'<img>(.*?)</img>|{"|".join(KIND_OF_TAG)}', re.DOTALL)
ROLES = {
    'system': 'system',
    'developer': 'system',
    'human': 'user',
    'user': 'user',
    'gpt': 'assistant',
    'assistant': 'assistant',
    'model': 'assistant',
    'tool': 'tool',
    'observation': 'tool',
}
FOLLOWS = {'': ('user',), 'user': ('assistant',), 'assistant': ('user', 'tool'), 'tool': ('assistant', 'tool')}
"""Who may speak after whom; a tool's result stands in the place of a question. System turns may stand anywhere."""

# Types of content parts, and the keys that may hold what they show or say.
TEXT_PARTS = dict.fromkeys(('text', 'input_text', 'output_text'), ('text',))
KIND_OF_PART = {part: name for name, kind in KINDS.items() for part in kind.parts}
PARTS = {**TEXT_PARTS, **{part: keys for kind in KINDS.values() for part, keys in kind.parts.items()}}
# Of these an API of OpenAI's or a table makes use, and no training does: `index` is held to the order of the media.
PART_NOTES = ('type', 'detail', 'index')
FILE_NOTES = ('detail', 'format')
TURN_KEYS = {'role', 'from', 'content', 'value', 'weight', 'loss', 'id', 'index', 'timestamp'}

_NO_TOOLS = "write what the model's own template makes of it into the text of the turns"
_NO_PAIRS = 'this is training on answers, not on preferences'
REFUSED_KEYS = {
    **dict.fromkeys(('tools', 'functions', 'tool_calls', 'function_call'), _NO_TOOLS),
    **dict.fromkeys(('chosen', 'rejected', 'rejected_response', 'kto_tag'), _NO_PAIRS),
    **dict.fromkeys(('weight', 'loss_weight'), 'call the weight of a whole sample `loss_weights`'),
}
"""Keys of a record that would change the training, and why they are not taken or what to do."""


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
    """A file inside a record, which holds its content.

    Args:
        name: For messages.
        checksum: Of the content.
        read: Returns the content, so that a record of a table on disk need not hold it.
    """

    name: str
    checksum: int
    read: Callable[[], bytes]

    @classmethod
    def of(cls, name: str, content: bytes) -> EmbeddedFile:
        """The file with the given content, which stays in memory."""
        return cls(name, zlib.crc32(content), partial(bytes, content))


class Medium(NamedTuple):
    """An image, a video or a sound of a record."""

    kind: str
    """A key of ``KINDS``."""
    files: tuple[str | EmbeddedFile, ...]
    """One, named from the media folder or embedded; or several pictures, which are the frames of a video."""

    @property
    def names(self) -> list[str]:
        """What messages call the files."""
        return [file if isinstance(file, str) else file.name for file in self.files]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation of a file.

    Args:
        sample_id: The record's own ``id``, or ``line <n>``.
        source: File and line, for messages.
        turns: The turns in their order.
        media: In the order of the placeholders.
        loss_weights: What each of its tokens weighs, where a run asks for such weights; None: the data do not say.
    """

    sample_id: str
    source: str
    turns: tuple[Turn, ...]
    media: tuple[Medium, ...]
    loss_weights: float | None = None

    @property
    def texts(self) -> list[str]:
        """Text of every turn, without placeholders."""
        return [PLACEHOLDER.sub('', turn.text) for turn in self.turns]

    def count(self, kind: str) -> int:
        """How many media of a kind it has."""
        return sum(medium.kind == kind for medium in self.media)

    def files(self, folder: Path) -> list[Path | BinaryIO]:
        """The files of all media, in their order: paths, and embedded ones as open files.

        Raises:
            BadSampleError: If a path is a folder, a pipe or a device, which would be waited for without an end.
        """
        opened: list[Path | BinaryIO] = []
        for medium in self.media:
            for file in medium.files:
                if isinstance(file, EmbeddedFile):
                    opened.append(BytesIO(file.read()))
                    continue
                path = folder / file
                if path.exists() and not path.is_file():
                    raise self.error(f'{medium.kind} file {path} cannot be read: it is no regular file')
                opened.append(path)
        return opened

    def error(self, reason: str) -> BadSampleError:
        """The error that says what is wrong with this sample."""
        return BadSampleError(f'sample "{self.sample_id}" ({self.source}): {reason}')

    def messages(self) -> list[dict[str, Any]]:
        """Turns as chat templates want them, plus ``weight`` 0 for an answer without loss.

        The line breaks around a placeholder belong to the template.
        """
        messages = []
        for role, text, carries_loss in self.turns:
            content: list[dict[str, str]] = []
            for position, piece in enumerate(PLACEHOLDER_ON_LINES.split(text)):  # the kinds at the odd positions
                if position % 2:
                    content.append({'type': piece})
                elif piece:
                    content.append({'type': 'text', 'text': piece})
            messages.append({'role': role, 'content': content, **({} if carries_loss else {'weight': 0})})
        return messages


def parse_record(raw: RawRecord) -> Record:
    """Makes a record of what a file holds and checks all that needs no other file.

    Raises:
        BadSampleError: If it is no conversation, its media do not match its placeholders, or it holds what would be
            dropped.
    """
    source, sample_id, data = f'{raw.path}, {raw.where}', raw.where, raw.data
    try:
        if isinstance(data, Exception):
            raise ValueError(f'not valid JSON: {data}')
        if not isinstance(data, dict):
            raise ValueError(f'must be a JSON object, got: {type(data).__name__}')
        if data.get('id') is not None:  # printable, whatever it holds
            sample_id = ' '.join(str(data['id']).encode('utf-8', 'backslashreplace').decode().split())
        for key, value in data.items():
            if key in REFUSED_KEYS and _is_given(value):
                raise ValueError(f'`{key}` is not supported, {REFUSED_KEYS[key]}')
        slots: list[Slot] = []
        turns = [_turn(turn, slots) for turn in _raw_turns(data)]
        listed = {kind: _listed(data, kind) for kind in KINDS}
        if listed['video'] and not listed['image'] and set(slots) == {('image', None)}:
            # As LLaVA-Video has it.
            slots = [('video', None)] * len(slots)
            turns = [turn._replace(text=turn.text.replace('<image>', '<video>')) for turn in turns]
        media = _fill(slots, listed)
        _check_turns(turns)
        weight = _loss_weights(data.get('loss_weights'))
        for text in (*(turn.text for turn in turns), *(name for medium in media for name in medium.names)):
            _check_characters(text)
    except ValueError as error:
        raise BadSampleError(f'sample "{sample_id}" ({source}): {error}') from None
    return Record(sample_id=sample_id, source=source, turns=tuple(turns), media=tuple(media), loss_weights=weight)


def _alpaca(
    data: Mapping[str, Any], *, question: str = 'instruction', detail: str = 'input', answer: str = 'output'
) -> list[Any]:
    """Question and answer behind a history of such pairs; the detail stands on a line of its own."""
    pairs = data.get('history') or []
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(f'`history` must be a list of pairs of question and answer, got: {_short(pairs)}')
    asked = [data[question], *([data[detail]] if _is_given(data.get(detail)) else [])]
    if not all(isinstance(text, str) for text in asked):
        raise ValueError(f'`{question}` and `{detail}` must be strings, got: {_short(asked)}')
    pairs = [*pairs, ['\n'.join(filter(None, asked)), data[answer]]]
    return [{'role': ('user', 'assistant')[i], 'content': pair[i]} for pair in pairs for i in range(2)]


def _prompt_and_completion(data: Mapping[str, Any]) -> list[Any]:
    """TRL's: loss on the completion only; media without placeholders stand before the first question."""
    prompt, completion = data['prompt'], data['completion']
    if not all(
        isinstance(part, list) and all(isinstance(turn, dict) for turn in part) for part in (prompt, completion)
    ):
        raise ValueError(
            '`prompt` and `completion` must be lists of turns (a plain string says nobody speaks), got others'
        )
    answers = [turn.get('role', turn.get('from')) in ('assistant', 'gpt', 'model') for turn in prompt]
    prompt = [{**turn, 'weight': 0} if answer else turn for turn, answer in zip(prompt, answers, strict=True)]
    if all(isinstance(turn.get('content'), str) and not MEDIUM_IN_TEXT.search(turn['content']) for turn in prompt):
        first = next((i for i, turn in enumerate(prompt) if turn.get('role') == 'user'), 0)
        placeholders = ''.join(f'<{kind}>' * len(_listed(data, kind)) for kind in KINDS)
        prompt[first] = {**prompt[first], 'content': placeholders + prompt[first]['content']}
    return [*prompt, *completion]


FORMATS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Any]] = {
    ('conversations',): lambda data: data['conversations'],
    ('messages',): lambda data: data['messages'],
    ('prompt', 'completion'): _prompt_and_completion,
    ('instruction', 'output'): _alpaca,
    ('query', 'response'): partial(_alpaca, question='query', detail='', answer='response'),
}
"""Keys that mark a format -> what makes a list of turns of its record. All may have a `system` text and media."""

# The kind of a placeholder, and the medium where the text itself names it.
Slot = tuple[str, Medium | None]


def _raw_turns(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [keys for keys in FORMATS if all(data.get(key) is not None and data[key] != [] for key in keys)]
    if len(found) != 1:
        known = ', or '.join(map(_quoted, FORMATS))
        names = sorted(map(str, data)) if not found else [key for keys in found for key in keys]
        raise ValueError(f'must hold one conversation: {known}, got the keys: {_short(names, 200)}')
    turns = FORMATS[found[0]](data)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f'{_quoted(found[0])} must be a non-empty list of turns')
    system = data.get('system')
    return [{'role': 'system', 'content': system}, *turns] if _is_given(system) else turns


def _turn(turn: Mapping[str, Any], slots: list[Slot]) -> Turn:
    """A turn; each medium in it adds one to the slots."""
    turn = {key: value for key, value in turn.items() if _is_given(value) or key in ('content', 'value')}
    name, content = _only(turn, 'role', 'from'), _only(turn, 'content', 'value')
    if others := turn.keys() - TURN_KEYS:
        reason = REFUSED_KEYS.get(min(others), 'no model would see it; take it out or write it into the text')
        raise ValueError(f'`{min(others)}` of a turn is not supported, {reason}')
    if name == 'function_call':
        raise ValueError(f'the role of a turn must not be function_call, {_NO_TOOLS}')
    if not isinstance(name, str) or name not in ROLES:
        raise ValueError(f'the role of a turn must be one of {sorted(ROLES)}, got: {_short(name)}')
    if isinstance(content, list):
        text = ''.join(_part(part, slots) for part in content)
    elif isinstance(content, str):
        text = _text(content, slots)
    else:
        raise ValueError(f'the text of a turn must be a string, got: {type(content).__name__}')
    role = ROLES[name]
    if (placeholder := PLACEHOLDER.search(text)) and role != 'user':
        raise ValueError(f'`{placeholder[0]}` may stand in user turns only')
    return Turn(role, text, _carries_loss(turn, role))


def _carries_loss(turn: Mapping[str, Any], role: str) -> bool:
    """OpenAI's and ShareGPT's `weight`, ms-swift's `loss`."""
    given = {key: turn[key] for key in ('weight', 'loss') if key in turn}
    if not given:
        return True
    wrong = [value for value in given.values() if value not in (0, 1)]
    if wrong or len(set(given.values())) > 1 or (role != 'assistant' and 1 in given.values()):
        raise ValueError(
            f'`weight` (or `loss`) of a turn must be 0 or 1, and 1 only for an answer, got: {_short(given)} for a turn '
            f'of the {role}. Weights between are not supported; write 0 or 1, or take them out'
        )
    return role != 'assistant' or 0 not in given.values()


def _loss_weights(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float('inf'):
        raise ValueError(
            f'`loss_weights` must be a finite number, 0 or more, for all tokens of the sample, got: {_short(value)}'
        )
    return float(value)


def _part(part: Any, slots: list[Slot]) -> str:
    """The text of one part of a content list, a placeholder where it is a medium."""
    if not isinstance(part, dict):
        raise ValueError(f'a part of `content` must be an object, got: {_short(part)}')
    given = {key: value for key, value in part.items() if value is not None}
    part_type = given.get('type', next(iter(given)) if len(given) == 1 else None)  # Qwen-VL's parts are {'text': ...}
    if not isinstance(part_type, str) or part_type not in PARTS:
        raise ValueError(
            f'a part of `content` must be of type {sorted(PARTS)}, got: {_short(part_type)}, which is not supported'
        )
    keys = PARTS[part_type]
    if others := given.keys() - {*keys, *PART_NOTES}:
        raise ValueError(f'`{min(others)}` of a part of type {part_type} is not supported; take it out')
    if part_type in TEXT_PARTS:
        if not isinstance(given.get('text'), str):
            raise ValueError(f'`text` of a part of `content` must be a string, got: {_short(given.get("text"))}')
        return _text(given['text'], slots)
    kind = KIND_OF_PART[part_type]
    number = sum(other == kind for other, _ in slots)
    if given.get('index', number) != number:
        raise ValueError(
            f'`index` of {kind} parts must count up from 0, got: {_short(given["index"])} for {kind} {number}'
        )
    if not any(key in given for key in keys) and part_type != kind:
        raise ValueError(f'a part of type {part_type} must have `{keys[0]}`, got: none (files by id cannot be read)')
    value = _only(given, *keys)
    if 'base64' in given:
        value = f'data:{kind};base64,{value}'
    slots.append((kind, None if value is None else _medium(kind, value)))
    return f'<{kind}>'


def _text(text: str, slots: list[Slot]) -> str:
    """The text with one placeholder for each medium."""
    if '<' not in text:
        return text

    def placeholder(match: re.Match[str]) -> str:
        kind = KIND_OF_TAG.get(match[0], 'image')
        slots.append((kind, None if match[1] is None else _medium(kind, match[1].strip())))
        return f'<{kind}>'

    text = MEDIUM_IN_TEXT.sub(placeholder, text)
    if '<img>' in text:
        raise ValueError(
            '`<img>` in a text stands for an image, and `</img>` must end its name; write the word in another way if '
            'it is meant as text'
        )
    return text


def _listed(data: Mapping[str, Any], kind: str) -> list[Medium]:
    """What ``image`` or ``images``, ``video`` or ``videos``, ... name."""
    listed = {
        key: data[key] if isinstance(data[key], list) else [data[key]]
        for key in KINDS[kind].keys
        if _is_given(data.get(key))
    }
    if any(values != next(iter(listed.values())) for values in listed.values()):
        names = ' and '.join(f'`{key}`' for key in listed)
        raise ValueError(f'{names} must name the same, got: lists that differ. Keep one of them')
    return [_medium(kind, value) for value in next(iter(listed.values()), [])]


def _fill(slots: list[Slot], listed: Mapping[str, list[Medium]]) -> list[Medium]:
    """The media in the order of their placeholders; those of the lists go where no other stands."""
    for kind in KINDS:
        placeholders = [medium for other, medium in slots if other == kind]
        num_media = len(listed[kind]) + sum(medium is not None for medium in placeholders)
        if num_media != len(placeholders):
            raise ValueError(
                f'the number of {kind}s must match the `<{kind}>` placeholders, got: {num_media} {kind}s '
                f'and {len(placeholders)} placeholders'
            )
    rest = {kind: iter(media) for kind, media in listed.items()}
    return [next(rest[kind]) if medium is None else medium for kind, medium in slots]


def _medium(kind: str, value: Any) -> Medium:
    """A medium of one file, or of a list of pictures, as LLaMA-Factory's and Qwen's videos may be."""
    if kind == 'video' and isinstance(value, list) and value:
        return Medium(kind, tuple(_file('image', frame) for frame in value))
    return Medium(kind, (_file(kind, value),))


def _file(kind: str, value: Any) -> str | EmbeddedFile:
    """A file by name or embedded; from a name, a URL, or a mapping of ``path``, ``url``, ``bytes`` and ``data``."""
    if isinstance(value, EmbeddedFile):
        return value
    if isinstance(value, dict):  # of ms-swift, of `datasets`, of OpenAI's `image_url` and `input_audio`
        given = {key: item for key, item in value.items() if _is_given(item) and key not in FILE_NOTES}
        if others := given.keys() - {'path', 'url', 'bytes', 'data'}:
            raise ValueError(f'`{min(others)}` of {_a(kind)} is not supported; take it out')
        for key in ('bytes', 'data'):
            if isinstance(given.get(key), str):
                return _from_data_uri(kind, f'data:{kind};base64,{given[key]}')
        return _file(kind, given.get('bytes', given.get('path', given.get('url'))))
    if isinstance(value, bytes):
        return EmbeddedFile.of('in the record', value)
    if not isinstance(value, str) or not value:
        raise ValueError(f'`{kind}` must be a file name or a list of file names, got: {_short(value)}')
    if value.startswith('data:'):
        return _from_data_uri(kind, value)
    if value.startswith('file://'):
        return url2pathname(urlsplit(value).path)
    if re.match(r'[A-Za-z][A-Za-z0-9+.-]*://', value):
        raise ValueError(
            f'`{kind}` must be a file, got: {_short(value)}, which is on a network. Download it and name the file'
        )
    if max(map(len, value.split(os.sep))) > 255:  # longer than file systems allow
        raise ValueError(
            f'`{kind}` must be a file name, got: {_short(value)}. Write bytes as `data:{kind}/<type>;base64,...`'
        )
    return value


def _from_data_uri(kind: str, uri: str) -> EmbeddedFile:
    header, _, payload = uri.partition(',')
    if not payload:  # made of `base64` or `bytes`, which holds no header, or cut short
        raise ValueError(f'a data: URI of {_a(kind)} must hold base64, got: {_short(uri)}')
    if not header.endswith(';base64'):
        raise ValueError(f'a data: URI of {_a(kind)} must be base64, got: {_short(header)}')
    try:
        content = base64.b64decode(''.join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f'a data: URI of {_a(kind)} must be base64, got: {_short(uri)}: {error}') from error
    return EmbeddedFile.of(header.removesuffix(';base64'), content)


def _a(kind: str) -> str:
    return f'{"a" if kind == "video" else "an"} {kind}'


def _check_turns(turns: list[Turn]) -> None:
    spoken = [turn.role for turn in turns if turn.role != 'system']
    if len(spoken) < 2 or any(role not in FOLLOWS[last] for last, role in zip(['', *spoken], spoken, strict=False)):
        raise ValueError(f'turns must alternate between user (or tool) and assistant, user first, got: {spoken}')
    if not any(turn.carries_loss for turn in turns if turn.role == 'assistant'):
        raise ValueError('at least one answer must carry loss, got: `weight` 0 for all. Take the sample out')


def _check_characters(text: str) -> None:
    """Refuses what no tokenizer takes; bytes that could not be decoded come as surrogates too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            found = f'the byte 0x{code - 0xDC00:02x}, which is no UTF-8. Save the file as UTF-8'
        else:
            found = f'the lone surrogate \\u{code:04x}, half a character. Take it out'
        raise ValueError(f'text must be valid Unicode, got: {found}') from error


def _only(values: Mapping[str, Any], *keys: str) -> Any:
    """The value of the one key that is given."""
    given = [key for key in keys if values.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f'only one of {", ".join(f"`{key}`" for key in given)} may be given, got: all of them')
    return values[given[0]] if given else None


def _quoted(keys: tuple[str, ...]) -> str:
    return ' and '.join(f'`{key}`' for key in keys)


def _is_given(value: Any) -> bool:
    """False for what tables and files write where there is nothing."""
    return value is not None and not (isinstance(value, str | bytes | list | dict) and not value)


def _short(value: Any, limit: int = 60) -> str:
    text = ' '.join(ascii(value).split())
    return text if len(text) <= limit else f'{text[:limit]}...'
