# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Makes records of conversations as other projects write them.

Reads the formats of LLaVA, VILA, LLaMA-Factory, TRL, OpenAI, ms-swift, Monkey, The Cauldron and VideoChat2. Every key
of a record is used as its own project means it, or the record is refused: nothing is dropped in silence.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import (
    PLACEHOLDER,
    EmbeddedFile,
    JsonObject,
    Medium,
    RawRecord,
    Record,
    Turn,
    short_repr,
)
from composer_tokacc.data.unread_media import (
    MEDIA_KEYS,
    check_unread_keys,
    modality_of_base64,
)

MODALITY_OF_TAG = {f'<{modality}>': modality for modality in MODALITIES}
MODALITY_OF_TAG |= {'<vila/video>': 'video', '<sound>': 'audio'}
# A tag, or the file's name inside the text as Qwen-VL and Monkey write it. A name may not contain `<img>`: otherwise a
# text with many unclosed `<img>` would be searched to its end for each of them.
MEDIUM_IN_TEXT = re.compile(rf'<img>((?:(?!</?img>).)*)</img>|{"|".join(MODALITY_OF_TAG)}', re.DOTALL)


class PartType(NamedTuple):
    """A type of content part."""

    modality: str
    """``text``, or the modality of the medium."""
    keys: tuple[str, ...]
    """Keys that may hold the text or the file."""


PART_TYPES = {
    'text': PartType('text', ('text',)),
    'input_text': PartType('text', ('text',)),
    'output_text': PartType('text', ('text',)),
    'image': PartType('image', ('image', 'url', 'path', 'base64')),
    'image_url': PartType('image', ('image_url',)),
    'input_image': PartType('image', ('image_url',)),
    'video': PartType('video', ('video', 'url', 'path', 'base64')),
    'video_url': PartType('video', ('video_url',)),
    'audio': PartType('audio', ('audio', 'audio_url', 'url', 'path', 'base64')),
    'audio_url': PartType('audio', ('audio_url',)),
    'input_audio': PartType('audio', ('input_audio',)),
}
# Keys of a part, and of a file in it, that are accepted but change nothing in training. `detail` is for OpenAI's API.
# `index` numbers the images of a TRL table; `_parse_part` checks that they are in order.
PART_NOTES = ('type', 'detail', 'index')
FILE_NOTES = ('detail', 'format')
TURN_KEYS = {
    'role',
    'from',
    'content',
    'value',
    'weight',
    'loss',
    'id',
    'index',
    'timestamp',
}
ROLES = {
    'system': 'system',
    'developer': 'system',
    'user': 'user',
    'human': 'user',
    'assistant': 'assistant',
    'gpt': 'assistant',
    'model': 'assistant',
    'tool': 'tool',
    'observation': 'tool',
}
ROLES_WITH_MEDIA = ('user', 'tool')
FOLLOWS = {
    '': ('user',),
    'user': ('assistant',),
    'assistant': ('user', 'tool'),
    'tool': ('assistant', 'tool'),
}
"""Roles that may follow a role; '' is the start. The result of a tool may replace a question. System turns may be
anywhere."""

_NO_TOOLS = "write what the model's own template makes of it into the text of the turns"
_NO_PREFERENCES = 'this is training on answers, not on preferences'
_WEIGHT_OF_SAMPLE = 'call the weight of a whole sample `loss_weights`'
REFUSED_KEYS = {
    'tools': _NO_TOOLS,
    'functions': _NO_TOOLS,
    'tool_calls': _NO_TOOLS,
    'function_call': _NO_TOOLS,
    'chosen': _NO_PREFERENCES,
    'rejected': _NO_PREFERENCES,
    'rejected_response': _NO_PREFERENCES,
    'kto_tag': _NO_PREFERENCES,
    'weight': _WEIGHT_OF_SAMPLE,
    'loss_weight': _WEIGHT_OF_SAMPLE,
}
"""Keys that would change the training, and the reason or the remedy."""

KEYS_OF_EVERY_FORMAT = {'id', 'system', 'loss_weights', *REFUSED_KEYS}
for media_keys in MEDIA_KEYS.values():
    KEYS_OF_EVERY_FORMAT.update(media_keys)

# Not smaller or larger than float32 holds: loss weights are multiplied in float32.
MIN_LOSS_WEIGHT, MAX_LOSS_WEIGHT = 1e-30, 1e30


class Slot(NamedTuple):
    """The place of a medium in the text of the turns."""

    modality: str
    medium: Medium | None = None
    """None: the next medium of the record's lists belongs here."""


@dataclass(frozen=True)
class RecordFormat:
    """How one project writes a conversation. Every format may also have a ``system`` text and media."""

    keys: tuple[str, ...]
    """A record of this format has all of these keys."""
    read_turns: Callable[[JsonObject], object]
    """Returns the turns of a record as objects with ``role`` and ``content``, or ``from`` and ``value``."""
    further_keys: tuple[str, ...] = ()
    """Other keys that ``read_turns`` reads."""
    keys_of_entry: tuple[str, ...] = ()
    """Keys that each object in the list under ``keys`` must have. For formats whose key other projects use, too."""

    @property
    def quoted_keys(self) -> str:
        """The keys as messages name them."""
        return ' and '.join(f'`{key}`' for key in self.keys)

    def matches(self, data: JsonObject) -> bool:
        """Tells whether a record is of this format."""
        for key in self.keys:
            value = data.get(key)
            if value is None or value == []:
                return False
            if not self.keys_of_entry:
                continue
            if not _is_list_of_objects(value):
                return False
            if not all(entry.keys() >= set(self.keys_of_entry) for entry in value):
                return False
        return True


def parse_record(raw: RawRecord) -> Record:
    """Makes a record of an entry of a file. Checks everything that needs no other file."""
    sample_id = raw.where
    if isinstance(raw.data, dict) and raw.data.get('id') is not None:
        # An id may hold anything: lone surrogates and line breaks must not break the message.
        printable = str(raw.data['id']).encode('utf-8', 'backslashreplace').decode()
        sample_id = ' '.join(printable.split())[:200]
    record = Record(
        sample_id=sample_id,
        source=f'{raw.path}, {raw.where}',
        turns=(),
        media=(),
    )
    try:
        return _parse_data(raw.data, record)
    except ValueError as error:
        raise record.error(error) from None


def _parse_data(data: object, record: Record) -> Record:
    """Returns the record with the content of an entry."""
    if isinstance(data, Exception):
        raise ValueError(f'not valid JSON: {data}')
    if not isinstance(data, dict):
        raise ValueError(f'must be a JSON object, got: {type(data).__name__}')
    for key, value in data.items():
        if key in REFUSED_KEYS and _is_given(value):
            raise ValueError(f'`{key}` is not supported, {REFUSED_KEYS[key]}')
    record_format = _format_of(data)
    slots: list[Slot] = []
    turns = [_parse_turn(turn, slots) for turn in _raw_turns(data, record_format)]
    listed = {modality: _listed_media(data, modality) for modality in MODALITIES}
    # Before the slots are filled: if a medium is under an unread key, this message says more than a wrong number.
    _check_unread(data, record_format, slots, listed)
    if listed['video'] and not listed['image'] and set(slots) == {Slot('image')}:
        # LLaVA-Video writes `<image>` for a video.
        slots = [Slot('video')] * len(slots)
        turns = [turn._replace(text=turn.text.replace('<image>', '<video>')) for turn in turns]
    media = _fill_slots(slots, listed)
    _check_turns(turns)
    for turn in turns:
        _check_characters(turn.text)
    for medium in media:
        for name in medium.names:
            _check_characters(name)
    loss_weights = _parse_loss_weights(data.get('loss_weights'))
    return replace(
        record,
        turns=tuple(turns),
        media=tuple(media),
        loss_weights=loss_weights,
    )


def _parse_loss_weights(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value == 0 or MIN_LOSS_WEIGHT < value < MAX_LOSS_WEIGHT):
        return float(value)
    raise ValueError(f'`loss_weights` must be a finite number, 0 or more, got: {short_repr(value)}')


def _check_unread(
    data: JsonObject,
    record_format: RecordFormat,
    slots: Sequence[Slot],
    listed: Mapping[str, Sequence[Medium]],
) -> None:
    media = [slot.medium for slot in slots if slot.medium is not None]
    for media_of_modality in listed.values():
        media.extend(media_of_modality)
    keys_read = {
        *KEYS_OF_EVERY_FORMAT,
        *record_format.keys,
        *record_format.further_keys,
    }
    check_unread_keys(data, keys_read, media)


# The formats: each function returns the turns of a record.


def _read_alpaca(data: JsonObject, *, question: str, detail: str, answer: str) -> list[JsonObject]:
    """Reads one question and answer, after a ``history`` of pairs. The detail goes on a line of its own."""
    history = data.get('history') or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError(f'`history` must be a list of pairs of question and answer, got: {short_repr(history)}')
    lines = [data[question]]
    if _is_given(data.get(detail)):
        lines.append(data[detail])
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f'`{question}` and `{detail}` must be strings, got: {short_repr(lines)}')
    full_question = '\n'.join(line for line in lines if line)
    turns = []
    for user_text, answer_text in [*history, [full_question, data[answer]]]:
        turns.append({'role': 'user', 'content': user_text})
        turns.append({'role': 'assistant', 'content': answer_text})
    return turns


def _read_prompt_and_completion(data: JsonObject) -> list[JsonObject]:
    """Reads TRL's format. Only the completion carries loss."""
    prompt, completion = data['prompt'], data['completion']
    if not (_is_list_of_objects(prompt) and _is_list_of_objects(completion)):
        raise ValueError('`prompt` and `completion` must be lists of turns (a plain string names no speaker)')
    turns = []
    for turn in prompt:
        name = turn.get('role', turn.get('from'))
        is_answer = isinstance(name, str) and ROLES.get(name) == 'assistant'
        if is_answer:
            turn = {**turn, 'weight': 0}
        turns.append(turn)
    return [*_with_media_first(turns, data), *completion]


def _read_cauldron(data: JsonObject) -> list[JsonObject]:
    """Reads The Cauldron's ``texts``, a list of pairs. All images of a record come before the first question."""
    turns = []
    for pair in data['texts']:
        _check_keys_of_entry(pair, ('user', 'assistant', 'source'), 'texts')
        turns.append({'role': 'user', 'content': pair['user']})
        turns.append({'role': 'assistant', 'content': pair['assistant']})
    return _with_media_first(turns, data)


def _read_videochat2(data: JsonObject) -> list[JsonObject]:
    """Reads VideoChat2's ``QA``: question ``q``, answer ``a``, and an instruction ``i`` for the whole conversation.

    VideoChat2 puts the instruction of the first entry before the conversation. The question may be empty, as in
    captions: then the video is the whole question.
    """
    for key in ('start', 'end'):
        if _is_given(data.get(key)):
            remedy = 'Cut the video (`ffmpeg -ss START -to END -i a.mp4 b.mp4`), and take the key out'
            raise ValueError(f'`{key}` is not supported, because a video is read as a whole. {remedy}')
    entries = data['QA']
    instruction = entries[0].get('i')
    turns = []
    if _is_given(instruction):
        turns.append({'role': 'system', 'content': instruction})
    for index, entry in enumerate(entries):
        _check_keys_of_entry(entry, ('i', 'q', 'a'), 'QA')
        if index > 0 and not _is_given(entry['q']):
            # VideoChat2 writes two answers in a row here, which most chat templates refuse.
            raise ValueError('`q` may be empty only in the first entry of `QA`. Write a question, or join the answers')
        if _is_given(entry.get('i')) and entry['i'] != instruction:
            problem = f'`i` must be the same in all entries of `QA`, got: {short_repr(entry["i"])}'
            raise ValueError(f'{problem}. VideoChat2 reads only the first. Write the others into `q`')
        turns.append({'role': 'user', 'content': entry['q']})
        turns.append({'role': 'assistant', 'content': entry['a']})
    return _with_media_first(turns, data)


def _check_keys_of_entry(entry: JsonObject, keys: Sequence[str], list_name: str) -> None:
    for key, value in entry.items():
        if key not in keys and _is_given(value):
            raise ValueError(f'`{key[:60]}` of an entry of `{list_name}` is not supported; take it out')


def _with_media_first(turns: Sequence[JsonObject], data: JsonObject) -> list[JsonObject]:
    """Puts the record's media before the first question, if no turn says where they belong."""
    for turn in turns:
        content = turn.get('content')
        if not isinstance(content, str) or MEDIUM_IN_TEXT.search(content):
            return [dict(turn) for turn in turns]
    placeholders = ''
    for modality in MODALITIES:
        placeholders += f'<{modality}>' * len(_listed_media(data, modality))
    placed = []
    for turn in turns:
        if ROLES.get(str(turn.get('role'))) == 'user':
            turn = {**turn, 'content': placeholders + turn['content']}
            placeholders = ''
        placed.append(dict(turn))
    return placed


FORMATS = (
    RecordFormat(('conversations',), lambda data: data['conversations']),
    RecordFormat(('messages',), lambda data: data['messages']),
    RecordFormat(('prompt', 'completion'), _read_prompt_and_completion),
    RecordFormat(
        ('instruction', 'output'),
        partial(
            _read_alpaca,
            question='instruction',
            detail='input',
            answer='output',
        ),
        further_keys=('input', 'history'),
    ),
    RecordFormat(
        ('query', 'response'),
        partial(_read_alpaca, question='query', detail='', answer='response'),  # '': this format has no detail
        further_keys=('history',),
    ),
    RecordFormat(('texts',), _read_cauldron, keys_of_entry=('user', 'assistant')),
    RecordFormat(('QA',), _read_videochat2, keys_of_entry=('q', 'a')),
)


def _format_of(data: JsonObject) -> RecordFormat:
    """Returns the format of a record."""
    matching = [record_format for record_format in FORMATS if record_format.matches(data)]
    if len(matching) == 1:
        return matching[0]
    keys: list[str] = []
    for record_format in matching:
        keys.extend(record_format.keys)
    if not matching:
        keys = sorted(str(key) for key in data if _is_given(data[key]))
    expected = ', or '.join(record_format.quoted_keys for record_format in FORMATS)
    raise ValueError(f'must hold one conversation: {expected}, got the keys: {short_repr(keys, 200)}')


def _raw_turns(data: JsonObject, record_format: RecordFormat) -> list[JsonObject]:
    turns = record_format.read_turns(data)
    if not isinstance(turns, list) or not turns or not _is_list_of_objects(turns):
        raise ValueError(f'{record_format.quoted_keys} must be a non-empty list of turns, got: {short_repr(turns)}')
    if _is_given(data.get('system')):
        return [{'role': 'system', 'content': data['system']}, *turns]
    return turns


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


# Turns and their parts. A medium in a turn adds a slot to the list `slots`.


def _parse_turn(raw_turn: JsonObject, slots: list[Slot]) -> Turn:
    turn = {}
    for key, value in raw_turn.items():
        # An empty text of a turn stays: `_check_turns` refuses it with the right reason.
        if _is_given(value) or key in ('content', 'value'):
            turn[key] = value
    role_name = _only_value(turn, ('role', 'from'))
    content = _only_value(turn, ('content', 'value'))
    unknown_keys = turn.keys() - TURN_KEYS
    if unknown_keys:
        key = min(unknown_keys)
        reason = REFUSED_KEYS.get(key, 'no model would see it; take it out or write it into the text')
        raise ValueError(f'`{key[:60]}` of a turn is not supported, {reason}')
    if role_name == 'function_call':
        raise ValueError(f'the role of a turn must not be function_call, {_NO_TOOLS}')
    if not isinstance(role_name, str) or role_name not in ROLES:
        raise ValueError(f'the role of a turn must be one of {sorted(ROLES)}, got: {short_repr(role_name)}')
    if isinstance(content, str):
        text = _parse_text(content, slots)
    elif isinstance(content, list):
        text = ''.join(_parse_part(part, slots) for part in content)
    else:
        raise ValueError(f'the text of a turn must be a string, got: {type(content).__name__}')
    role = ROLES[role_name]
    placeholder = PLACEHOLDER.search(text)
    if placeholder and role not in ROLES_WITH_MEDIA:
        raise ValueError(f'`{placeholder[0]}` may stand only in turns of the user and of tools')
    return Turn(role, text, _parse_weight(turn, role))


def _parse_weight(turn: JsonObject, role: str) -> bool:
    """Returns ``carries_loss`` of a turn. Reads ``weight`` of OpenAI and ShareGPT, and ``loss`` of ms-swift."""
    weights = {key: turn[key] for key in ('weight', 'loss') if key in turn}
    if not weights:
        return True
    if all(value == 0 for value in weights.values()):
        return role != 'assistant'  # other roles never carry loss, and keep the default
    if role == 'assistant' and all(value == 1 for value in weights.values()):
        return True
    got = f'{short_repr(weights)} for a turn of the {role}'
    raise ValueError(f'`weight` (or `loss`) of a turn must be 0 or 1, and 1 only for an answer, got: {got}')


def _parse_part(part: object, slots: list[Slot]) -> str:
    """Returns the text of one part of a content list: its placeholder if it is a medium."""
    if not isinstance(part, dict):
        raise ValueError(f'a part of `content` must be an object, got: {short_repr(part)}')
    values = {key: value for key, value in part.items() if value is not None}
    part_type = values.get('type')
    if part_type is None and len(values) == 1:
        part_type = next(iter(values))  # Qwen-VL writes {'text': ...} and {'image': ...}
    if not isinstance(part_type, str) or part_type not in PART_TYPES:
        raise ValueError(f'a part of `content` must be of type {sorted(PART_TYPES)}, got: {short_repr(part_type)}')
    modality, keys = PART_TYPES[part_type]
    unknown_keys = values.keys() - {*keys, *PART_NOTES}
    if unknown_keys:
        raise ValueError(f'`{min(unknown_keys)[:60]}` of a part of type {part_type} is not supported; take it out')
    if modality == 'text':
        if not isinstance(values.get('text'), str):
            raise ValueError(f'`text` of a part of `content` must be a string, got: {short_repr(values.get("text"))}')
        return _parse_text(values['text'], slots)
    number = sum(slot.modality == modality for slot in slots)
    if values.get('index', number) != number:
        got = f'{short_repr(values["index"])} for {modality} {number}'
        raise ValueError(f'`index` of {modality} parts must count up from 0, got: {got}')
    has_file = any(key in values for key in keys)
    if not has_file and part_type != modality:
        raise ValueError(f'a part of type {part_type} must have `{keys[0]}`, got: none (files by id cannot be read)')
    value = _only_value(values, keys)
    if 'base64' in values:
        value = f'data:{modality};base64,{value}'
    medium = None
    if value is not None:
        medium = _parse_medium(modality, value)
    slots.append(Slot(modality, medium))
    return f'<{modality}>'


def _parse_text(text: str, slots: list[Slot]) -> str:
    """Returns the text with one placeholder for each medium."""
    if '<' not in text:
        return text

    def add_slot(match: re.Match[str]) -> str:
        modality = MODALITY_OF_TAG.get(match[0], 'image')
        file_name = match[1]
        medium = None
        if file_name is not None:
            medium = _parse_medium(modality, file_name.strip())
        slots.append(Slot(modality, medium))
        return f'<{modality}>'

    text = MEDIUM_IN_TEXT.sub(add_slot, text)
    if '<img>' in text:
        raise ValueError('`<img>` in a text stands for an image, and `</img>` must end its name')
    return text


# Media and their files.


def _listed_media(data: JsonObject, modality: str) -> list[Medium]:
    """Returns the media that a record lists under the keys of a modality, such as ``image`` or ``images``."""
    lists = {}
    for key in MEDIA_KEYS[modality]:
        value = data.get(key)
        if _is_given(value):
            lists[key] = value if isinstance(value, list) else [value]
    if not lists:
        return []
    first_list = next(iter(lists.values()))
    if any(values != first_list for values in lists.values()):
        names = ' and '.join(f'`{key}`' for key in lists)
        raise ValueError(f'{names} must name the same, got: lists that differ. Keep one of them')
    return [_parse_medium(modality, value) for value in first_list]


def _fill_slots(slots: Sequence[Slot], listed: Mapping[str, Sequence[Medium]]) -> list[Medium]:
    """Returns the media in the order of their slots. The media that the record lists go into the empty slots."""
    for modality, media in listed.items():
        num_media = len(media)
        num_slots = 0
        for slot in slots:
            if slot.modality == modality:
                num_slots += 1
                num_media += slot.medium is not None
        if num_media != num_slots:
            got = f'{num_media} {modality}s and {num_slots} placeholders'
            raise ValueError(f'the number of {modality}s must match the `<{modality}>` placeholders, got: {got}')
    next_media = {modality: iter(media) for modality, media in listed.items()}
    filled = []
    for slot in slots:
        filled.append(slot.medium or next(next_media[slot.modality]))
    return filled


def _parse_medium(modality: str, value: object) -> Medium:
    """Returns a medium of one file, or a video of a list of images (LLaMA-Factory, Qwen-VL)."""
    if modality == 'video' and isinstance(value, list) and value:
        frames = [_parse_file('image', frame) for frame in value]
        if len(frames) == 1:
            frames *= 2  # a medium of one file would be read as a video file
        return Medium(modality, tuple(frames))
    return Medium(modality, (_parse_file(modality, value),))


def _parse_file(modality: str, value: object) -> str | EmbeddedFile:
    """Reads a file: a name, a URL, bytes, or an object with ``path``, ``url``, ``bytes`` or ``data``."""
    if isinstance(value, EmbeddedFile):
        return value
    if isinstance(value, dict):
        return _parse_file_object(modality, value)
    if isinstance(value, bytes):
        return EmbeddedFile.from_bytes('in the record', value)
    if not isinstance(value, str) or not value:
        raise ValueError(f'`{modality}` must be a file name or a list of file names, got: {short_repr(value)}')
    scheme, colon, _ = value[:10].lower().partition(':')
    if colon and scheme == 'data':
        return _decode_data_uri(modality, value)
    if value[:7].lower() == 'file://':
        return url2pathname(urlsplit(value).path)
    if re.match(r'[A-Za-z][A-Za-z0-9+.-]*://', value):
        raise ValueError(f'`{modality}` must be a file, got: {short_repr(value)}, which is on a network. Download it')
    longest_name = max(len(name) for name in value.split(os.sep))
    is_too_long = longest_name > 255  # the limit of common file systems
    if is_too_long or modality_of_base64(value) is not None:
        remedy = f'Write bytes as `data:{modality}/<type>;base64,...`'
        raise ValueError(f'`{modality}` must be a file name, got: {short_repr(value)}. {remedy}')
    return value


def _parse_file_object(modality: str, value: JsonObject) -> str | EmbeddedFile:
    """Reads the objects of ms-swift and `datasets`, and OpenAI's ``image_url`` and ``input_audio``."""
    entries = {}
    for key, item in value.items():
        if _is_given(item) and key not in FILE_NOTES:
            entries[key] = item
    unknown_keys = entries.keys() - {'path', 'url', 'bytes', 'data'}
    if unknown_keys:
        raise ValueError(f'`{min(unknown_keys)[:60]}` of {_with_article(modality)} is not supported; take it out')
    for key in ('bytes', 'data'):
        if isinstance(entries.get(key), str):
            return _decode_data_uri(modality, f'data:{modality};base64,{entries[key]}')
    for key in ('bytes', 'path', 'url'):
        if key in entries:
            return _parse_file(modality, entries[key])
    return _parse_file(modality, None)  # raises: the object names no file


def _decode_data_uri(modality: str, uri: str) -> EmbeddedFile:
    subject = f'a data: URI of {_with_article(modality)}'
    header, _, payload = uri.partition(',')
    if not payload:  # cut short, or made of an empty `base64` or `bytes`
        raise ValueError(f'{subject} must hold base64, got: {short_repr(uri)}')
    media_type, semicolon, encoding = header.rpartition(';')
    if not semicolon or encoding.lower() != 'base64':
        raise ValueError(f'{subject} must be base64, got: {short_repr(header)}')
    try:
        content = base64.b64decode(''.join(payload.split()), validate=True)
    except ValueError as error:
        raise ValueError(f'{subject} must be base64, got: {short_repr(uri)}: {error}') from error
    return EmbeddedFile.from_bytes(media_type[:60], content)


def _with_article(modality: str) -> str:
    return 'a video' if modality == 'video' else f'an {modality}'


# Checks of a whole record.


def _check_turns(turns: Sequence[Turn]) -> None:
    """Raises ValueError if the turns are out of order or teach nothing."""
    roles = []
    for turn in turns:
        if turn.role != 'system':
            roles.append(turn.role)
    previous = ''
    is_in_order = len(roles) >= 2
    for role in roles:
        is_in_order = is_in_order and role in FOLLOWS[previous]
        previous = role
    if not is_in_order:
        got = short_repr(roles, 200)
        raise ValueError(f'turns must alternate between user (or tool) and assistant, user first, got: {got}')
    answers = []
    for turn in turns:
        if turn.role == 'assistant' and turn.carries_loss:
            answers.append(turn.text)
    if not answers:
        raise ValueError('at least one answer must carry loss, got: `weight` 0 for all. Take the sample out')
    for answer in answers:
        # Zero-width spaces are neither white space nor printable.
        if not any(character.isprintable() for character in answer.strip()):
            raise ValueError('an answer must say something, got: a blank one. Take it out, or give it `weight` 0')


def _check_characters(text: str) -> None:
    """Refuses lone surrogates, which no tokenizer takes. Bytes that are not UTF-8 were decoded to surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        got = f'the lone surrogate \\u{code:04x}, half a character. Take it out'
        if 0xDC80 <= code <= 0xDCFF:  # made by Python's 'surrogateescape'
            got = f'the byte 0x{code - 0xDC00:02x}, which is no UTF-8. Save the file as UTF-8'
        raise ValueError(f'text must be valid Unicode, got: {got}') from error


def _only_value(values: JsonObject, keys: Iterable[str]) -> Any:
    """Returns the value of the one key that is given. None if there is none."""
    keys_given = [key for key in keys if values.get(key) is not None]
    if len(keys_given) > 1:
        names = ', '.join(f'`{key}`' for key in keys_given)
        raise ValueError(f'only one of {names} may be given, got: all of them')
    if not keys_given:
        return None
    return values[keys_given[0]]


def _is_given(value: object) -> bool:
    """Tells whether a value is given. Tables and files write null, '' or [] for a missing value."""
    if value is None:
        return False
    return not isinstance(value, str | bytes | list | dict) or len(value) > 0
