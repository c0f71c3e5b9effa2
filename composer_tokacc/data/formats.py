# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations as LLaVA, VILA, LLaMA-Factory, TRL, OpenAI, ms-swift and Monkey write them -> records.

What a record holds is used as its own project means it, or refused by name: nothing is dropped without a word.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import PLACEHOLDER, EmbeddedFile, Medium, RawRecord, Record, Turn

# Keys of a record that list the files of a modality.
LIST_KEYS = {'image': ('image', 'images'), 'video': ('video', 'videos'), 'audio': ('audio', 'audios', 'sound')}
MODALITY_OF_TAG = {**{f'<{name}>': name for name in MODALITIES}, '<vila/video>': 'video', '<sound>': 'audio'}
# Every tag, or what Qwen-VL and Monkey write: the file's name inside the text. No name runs over another tag, or a
# text of unclosed ones would be searched to its end for each.
MEDIUM_IN_TEXT = re.compile(rf'<img>((?:(?!</?img>).)*)</img>|{"|".join(MODALITY_OF_TAG)}', re.DOTALL)
# Types of content parts -> what they hold, and the keys that may hold it.
PART_TYPES = {
    **dict.fromkeys(('text', 'input_text', 'output_text'), ('text', ('text',))),
    'image': ('image', ('image', 'url', 'path', 'base64')),
    'image_url': ('image', ('image_url',)),
    'input_image': ('image', ('image_url',)),
    'video': ('video', ('video', 'url', 'path', 'base64')),
    'video_url': ('video', ('video_url',)),
    'audio': ('audio', ('audio', 'audio_url', 'url', 'path', 'base64')),
    'audio_url': ('audio', ('audio_url',)),
    'input_audio': ('audio', ('input_audio',)),
}
# An API of OpenAI's or a table makes use of these, and no training does: `index` is held to the order of the media.
PART_NOTES = ('type', 'detail', 'index')
FILE_NOTES = ('detail', 'format')
TURN_KEYS = {'role', 'from', 'content', 'value', 'weight', 'loss', 'id', 'index', 'timestamp'}
ROLES = {
    **{name: name for name in ('system', 'user', 'assistant', 'tool')},
    'developer': 'system',
    'human': 'user',
    'gpt': 'assistant',
    'model': 'assistant',
    'observation': 'tool',
}
FOLLOWS = {'': ('user',), 'user': ('assistant',), 'assistant': ('user', 'tool'), 'tool': ('assistant', 'tool')}
"""Who may speak after whom; a tool's result stands in the place of a question. System turns may stand anywhere."""

_NO_TOOLS = "write what the model's own template makes of it into the text of the turns"
_NO_PAIRS = 'this is training on answers, not on preferences'
REFUSED_KEYS = {
    **dict.fromkeys(('tools', 'functions', 'tool_calls', 'function_call'), _NO_TOOLS),
    **dict.fromkeys(('chosen', 'rejected', 'rejected_response', 'kto_tag'), _NO_PAIRS),
    **dict.fromkeys(('weight', 'loss_weight'), 'call the weight of a whole sample `loss_weights`'),
}
"""Keys that would change the training, and why they are not taken or what to do."""
_NAMES_MEDIUM = re.compile(r'(img|(image|video|audio)_(file|path|url|name))s?').fullmatch

# The modality of a placeholder, and the medium where the text itself names it.
Slot = tuple[str, Medium | None]


def parse_record(raw: RawRecord) -> Record:
    """Makes a record of what a file holds and checks all that needs no other file."""
    # Printable, whatever the id holds.
    own = raw.data.get('id') if isinstance(raw.data, dict) else None
    name = raw.where if own is None else ' '.join(str(own).encode('utf-8', 'backslashreplace').decode().split())[:200]
    record = Record(sample_id=name, source=f'{raw.path}, {raw.where}', turns=(), media=())
    try:
        return replace(record, **_parsed(raw.data))
    except ValueError as error:
        raise record.error(error) from None


def _parsed(data: Any) -> dict[str, Any]:
    if isinstance(data, Exception):
        raise ValueError(f'not valid JSON: {data}')
    if not isinstance(data, dict):
        raise ValueError(f'must be a JSON object, got: {type(data).__name__}')
    for key, value in data.items():
        if key in REFUSED_KEYS and _is_given(value):
            raise ValueError(f'`{key}` is not supported, {REFUSED_KEYS[key]}')
    slots: list[Slot] = []
    turns = [_turn(turn, slots) for turn in _raw_turns(data)]
    listed = {modality: _listed(data, modality) for modality in MODALITIES}
    if listed['video'] and not listed['image'] and set(slots) == {('image', None)}:  # as LLaVA-Video has it
        slots = [('video', None)] * len(slots)
        turns = [turn._replace(text=turn.text.replace('<image>', '<video>')) for turn in turns]
    media = _fill(slots, listed)
    for key in () if media else filter(_NAMES_MEDIUM, map(str, data)):  # it would be dropped
        if _is_given(data.get(key)):
            raise ValueError(f'`{key}` is not supported, call it `image`, `video` or `audio`, or take it out')
    _check_turns(turns)
    for text in (*(turn.text for turn in turns), *(name for medium in media for name in medium.names)):
        _check_characters(text)
    # As float32.
    weights = data.get('loss_weights')
    is_number = isinstance(weights, (int, float)) and not isinstance(weights, bool)
    if weights is not None and not (is_number and (weights == 0 or 1e-30 < weights < 1e30)):
        raise ValueError(f'`loss_weights` must be a finite number, 0 or more, got: {_short(weights)}')
    weights = None if weights is None else float(weights)
    return {'turns': tuple(turns), 'media': tuple(media), 'loss_weights': weights}


def _alpaca(
    data: Mapping[str, Any], *, question: str = 'instruction', detail: str = 'input', answer: str = 'output'
) -> list[Any]:
    """Returns question and answer behind a history of such pairs; the detail stands on a line of its own."""
    pairs = data.get('history') or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f'`history` must be a list of pairs of question and answer, got: {_short(pairs)}')
    asked = [data[question], *([data[detail]] if _is_given(data.get(detail)) else [])]
    if not all(isinstance(text, str) for text in asked):
        raise ValueError(f'`{question}` and `{detail}` must be strings, got: {_short(asked)}')
    pairs = [*pairs, ['\n'.join(filter(None, asked)), data[answer]]]
    return [{'role': ('user', 'assistant')[i], 'content': pair[i]} for pair in pairs for i in range(2)]


def _prompt_and_completion(data: Mapping[str, Any]) -> list[Any]:
    """Learns TRL's completion only; media without placeholders stand before the first question."""
    prompt, completion = data['prompt'], data['completion']
    if not (_are_turns(prompt) and _are_turns(completion)):
        raise ValueError('`prompt` and `completion` must be lists of turns (a plain string says nobody speaks)')
    answers = [turn.get('role', turn.get('from')) in ('assistant', 'gpt', 'model') for turn in prompt]
    prompt = [{**turn, 'weight': 0} if answer else turn for turn, answer in zip(prompt, answers, strict=True)]
    if all(isinstance(turn.get('content'), str) and not MEDIUM_IN_TEXT.search(turn['content']) for turn in prompt):
        first = next((i for i, turn in enumerate(prompt) if turn.get('role') == 'user'), 0)
        placeholders = ''.join(f'<{modality}>' * len(_listed(data, modality)) for modality in MODALITIES)
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


def _raw_turns(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [keys for keys in FORMATS if all(data.get(key) is not None and data[key] != [] for key in keys)]
    if len(found) != 1:
        known = ', or '.join(map(_quoted, FORMATS))
        names = (
            sorted(str(key) for key in data if _is_given(data[key]))
            if not found
            else [key for keys in found for key in keys]
        )
        raise ValueError(f'must hold one conversation: {known}, got the keys: {_short(names, 200)}')
    turns = FORMATS[found[0]](data)
    if not turns or not _are_turns(turns):
        raise ValueError(f'{_quoted(found[0])} must be a non-empty list of turns, got: {_short(turns)}')
    system = data.get('system')
    return [{'role': 'system', 'content': system}, *turns] if _is_given(system) else turns


def _are_turns(turns: Any) -> bool:
    return isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)


def _turn(turn: Mapping[str, Any], slots: list[Slot]) -> Turn:
    """Returns a turn; each medium in it adds one to the slots."""
    turn = {key: value for key, value in turn.items() if _is_given(value) or key in ('content', 'value')}
    name, content = _only(turn, 'role', 'from'), _only(turn, 'content', 'value')
    if others := turn.keys() - TURN_KEYS:
        reason = REFUSED_KEYS.get(min(others), 'no model would see it; take it out or write it into the text')
        raise ValueError(f'`{min(others)}` of a turn is not supported, {reason}')
    if name == 'function_call':
        raise ValueError(f'the role of a turn must not be function_call, {_NO_TOOLS}')
    if not isinstance(name, str) or name not in ROLES:
        raise ValueError(f'the role of a turn must be one of {sorted(ROLES)}, got: {_short(name)}')
    if not isinstance(content, list | str):
        raise ValueError(f'the text of a turn must be a string, got: {type(content).__name__}')
    text = _text(content, slots) if isinstance(content, str) else ''.join(_part(part, slots) for part in content)
    role = ROLES[name]
    if (placeholder := PLACEHOLDER.search(text)) and role != 'user':
        raise ValueError(f'`{placeholder[0]}` may stand in user turns only')
    return Turn(role, text, _carries_loss(turn, role))


def _carries_loss(turn: Mapping[str, Any], role: str) -> bool:
    """Reads OpenAI's and ShareGPT's `weight`, ms-swift's `loss`."""
    given = {key: turn[key] for key in ('weight', 'loss') if key in turn}
    allowed = [0, 1] if role == 'assistant' else [0]
    if not any(all(value == one for value in given.values()) for one in allowed):
        found = f'{_short(given)} for a turn of the {role}'
        raise ValueError(f'`weight` (or `loss`) of a turn must be 0 or 1, and 1 only for an answer, got: {found}')
    return role != 'assistant' or 0 not in given.values()


def _part(part: Any, slots: list[Slot]) -> str:
    """Returns the text of one part of a content list, a placeholder where it is a medium."""
    if not isinstance(part, dict):
        raise ValueError(f'a part of `content` must be an object, got: {_short(part)}')
    given = {key: value for key, value in part.items() if value is not None}
    part_type = given.get('type', next(iter(given)) if len(given) == 1 else None)  # Qwen-VL's parts are {'text': ...}
    if not isinstance(part_type, str) or part_type not in PART_TYPES:
        raise ValueError(f'a part of `content` must be of type {sorted(PART_TYPES)}, got: {_short(part_type)}')
    modality, keys = PART_TYPES[part_type]
    if others := given.keys() - {*keys, *PART_NOTES}:
        raise ValueError(f'`{min(others)}` of a part of type {part_type} is not supported; take it out')
    if modality == 'text':
        if not isinstance(given.get('text'), str):
            raise ValueError(f'`text` of a part of `content` must be a string, got: {_short(given.get("text"))}')
        return _text(given['text'], slots)
    number = sum(other == modality for other, _ in slots)
    if given.get('index', number) != number:
        found = f'{_short(given["index"])} for {modality} {number}'
        raise ValueError(f'`index` of {modality} parts must count up from 0, got: {found}')
    if not any(key in given for key in keys) and part_type != modality:
        raise ValueError(f'a part of type {part_type} must have `{keys[0]}`, got: none (files by id cannot be read)')
    value = _only(given, *keys)
    if 'base64' in given:
        value = f'data:{modality};base64,{value}'
    slots.append((modality, None if value is None else _medium(modality, value)))
    return f'<{modality}>'


def _text(text: str, slots: list[Slot]) -> str:
    """Returns the text with one placeholder for each medium."""
    if '<' not in text:
        return text

    def placeholder(match: re.Match[str]) -> str:
        modality = MODALITY_OF_TAG.get(match[0], 'image')
        slots.append((modality, None if match[1] is None else _medium(modality, match[1].strip())))
        return f'<{modality}>'

    text = MEDIUM_IN_TEXT.sub(placeholder, text)
    if '<img>' in text:
        raise ValueError('`<img>` in a text stands for an image, and `</img>` must end its name')
    return text


def _listed(data: Mapping[str, Any], modality: str) -> list[Medium]:
    """Returns what ``image`` or ``images``, ``video`` or ``videos``, ... name."""
    listed = {
        key: data[key] if isinstance(data[key], list) else [data[key]]
        for key in LIST_KEYS[modality]
        if _is_given(data.get(key))
    }
    if any(values != next(iter(listed.values())) for values in listed.values()):
        names = ' and '.join(f'`{key}`' for key in listed)
        raise ValueError(f'{names} must name the same, got: lists that differ. Keep one of them')
    return [_medium(modality, value) for value in next(iter(listed.values()), [])]


def _fill(slots: list[Slot], listed: Mapping[str, list[Medium]]) -> list[Medium]:
    """Returns the media in the order of their placeholders; those of the lists go where no other stands."""
    for modality, media in listed.items():
        placeholders = [medium for other, medium in slots if other == modality]
        num_media = len(media) + sum(medium is not None for medium in placeholders)
        if num_media != len(placeholders):
            found = f'{num_media} {modality}s and {len(placeholders)} placeholders'
            raise ValueError(f'the number of {modality}s must match the `<{modality}>` placeholders, got: {found}')
    rest = {modality: iter(media) for modality, media in listed.items()}
    return [next(rest[modality]) if medium is None else medium for modality, medium in slots]


def _medium(modality: str, value: Any) -> Medium:
    """Returns a medium of one file, or of a list of images, as LLaMA-Factory's and Qwen's videos may be."""
    if modality == 'video' and isinstance(value, list) and value:
        frames = tuple(_file('image', frame) for frame in value)
        return Medium(modality, frames if len(frames) > 1 else frames * 2)  # a single file would be a video
    return Medium(modality, (_file(modality, value),))


def _file(modality: str, value: Any) -> str | EmbeddedFile:
    """Reads a name, a URL, or a mapping of ``path``, ``url``, ``bytes`` and ``data``."""
    if isinstance(value, EmbeddedFile):
        return value
    if isinstance(value, dict):  # of ms-swift, of `datasets`, of OpenAI's `image_url` and `input_audio`
        given = {key: item for key, item in value.items() if _is_given(item) and key not in FILE_NOTES}
        if others := given.keys() - {'path', 'url', 'bytes', 'data'}:
            raise ValueError(f'`{min(others)}` of {_a(modality)} is not supported; take it out')
        for key in ('bytes', 'data'):
            if isinstance(given.get(key), str):
                return _from_data_uri(modality, f'data:{modality};base64,{given[key]}')
        return _file(modality, given.get('bytes', given.get('path', given.get('url'))))
    if isinstance(value, bytes):
        return EmbeddedFile.from_bytes('in the record', value)
    if not isinstance(value, str) or not value:
        raise ValueError(f'`{modality}` must be a file name or a list of file names, got: {_short(value)}')
    if value.startswith('data:'):
        return _from_data_uri(modality, value)
    if value.startswith('file://'):
        return url2pathname(urlsplit(value).path)
    if re.match(r'[A-Za-z][A-Za-z0-9+.-]*://', value):
        raise ValueError(f'`{modality}` must be a file, got: {_short(value)}, which is on a network. Download it')
    if max(map(len, value.split(os.sep))) > 255:  # longer than file systems allow
        known = f'Write bytes as `data:{modality}/<type>;base64,...`'
        raise ValueError(f'`{modality}` must be a file name, got: {_short(value)}. {known}')
    return value


def _from_data_uri(modality: str, uri: str) -> EmbeddedFile:
    what = f'a data: URI of {_a(modality)}'
    header, _, payload = uri.partition(',')
    if not payload:  # made of `base64` or `bytes`, which holds no header, or cut short
        raise ValueError(f'{what} must hold base64, got: {_short(uri)}')
    if not header.endswith(';base64'):
        raise ValueError(f'{what} must be base64, got: {_short(header)}')
    try:
        content = base64.b64decode(''.join(payload.split()), validate=True)
    except ValueError as error:
        raise ValueError(f'{what} must be base64, got: {_short(uri)}: {error}') from error
    return EmbeddedFile.from_bytes(header.removesuffix(';base64'), content)


def _a(modality: str) -> str:
    return f'{"a" if modality == "video" else "an"} {modality}'


def _check_turns(turns: list[Turn]) -> None:
    spoken = [turn.role for turn in turns if turn.role != 'system']
    if len(spoken) < 2 or any(role not in FOLLOWS[last] for last, role in zip(['', *spoken], spoken, strict=False)):
        raise ValueError(f'turns must alternate between user (or tool) and assistant, user first, got: {spoken}')
    answers = [turn.text.strip() for turn in turns if turn.role == 'assistant' and turn.carries_loss]
    if not all(any(map(str.isprintable, answer)) for answer in answers):  # zero-width spaces are not
        raise ValueError('an answer must say something, got: one that is blank. Take it out, or give it `weight` 0')
    if not answers:
        raise ValueError('at least one answer must carry loss, got: `weight` 0 for all. Take the sample out')


def _check_characters(text: str) -> None:
    """Refuses what no tokenizer takes; bytes that could not be decoded come as surrogates too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f'the lone surrogate \\u{code:04x}, half a character. Take it out'
        if 0xDC80 <= code <= 0xDCFF:
            found = f'the byte 0x{code - 0xDC00:02x}, which is no UTF-8. Save the file as UTF-8'
        raise ValueError(f'text must be valid Unicode, got: {found}') from error


def _only(values: Mapping[str, Any], *keys: str) -> Any:
    """Returns the value of the one key that is given."""
    given = [key for key in keys if values.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f'only one of {", ".join(f"`{key}`" for key in given)} may be given, got: all of them')
    return values[given[0]] if given else None


def _quoted(keys: tuple[str, ...]) -> str:
    return ' and '.join(f'`{key}`' for key in keys)


def _is_given(value: Any) -> bool:
    """Returns False for what tables and files write where there is nothing."""
    return value is not None and not (isinstance(value, str | bytes | list | dict) and not value)


def _short(value: Any, limit: int = 60) -> str:
    text = ' '.join(ascii(value).split())
    return text if len(text) <= limit else f'{text[:limit]}...'
