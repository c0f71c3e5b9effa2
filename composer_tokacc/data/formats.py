# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parses the entries of files into records. Each entry is a conversation in the format of some project.

Reads the formats of LLaVA, VILA, LLaMA-Factory, TRL, OpenAI, ms-swift, Monkey, The Cauldron and VideoChat2. Every key
of a format is used as its own project means it, or the record is refused. A record is also refused if it has one of
``REFUSED_KEYS``, if another key seems to hold a medium, or if one of ``KEYS_OF_TEXTS`` holds a text that no turn has.
All other keys, such as ``category``, are ignored.

:func:`parse_record` is the function to call. The errors of the other functions describe only the fault. It adds the
name of the sample.

The files of media are named in the turns, or listed under keys such as ``images``. So parsing has two steps. First,
each placeholder in a turn gets a *slot*, which is a :class:`.Medium`. The slot is empty (has no files) if the turn does
not name the file. Then the listed media are put into the empty slots. For example, ``<image> or <img>b.png</img>?``
becomes ``<image> or <image>?``, with an empty slot and a slot of ``b.png``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_tokacc.batch import MODALITIES
from composer_tokacc.data.records import (
    ROLES_WITH_MEDIA,
    TURN_NOTES,
    EmbeddedFile,
    JsonObject,
    Medium,
    RawRecord,
    Record,
    Turn,
    is_given,
    leaves_of,
    short_repr,
)
from composer_tokacc.data.unread_media import (
    MEDIA_KEYS,
    URL_SCHEME,
    check_unread_keys,
)
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.weights import MAX_LOSS_WEIGHT, MIN_LOSS_WEIGHT

MODALITY_OF_TAG = {
    '<image>': 'image',
    '<video>': 'video',
    '<vila/video>': 'video',
    '<audio>': 'audio',
    '<sound>': 'audio',
}
"""The modality that a tag in a text stands for."""
# Finds a tag, or <img>NAME</img> with the name of an image's file, as Qwen-VL and Monkey write it. Group 1 is the name,
# or None for a tag. A name may not contain `<img>`: otherwise a text with many unclosed `<img>` would be searched to
# its end for each of them.
MEDIUM_IN_TEXT = re.compile(rf'<img>((?:(?!</?img>).)*)</img>|{"|".join(MODALITY_OF_TAG)}', re.DOTALL)

TAG = re.compile(r'<[^<>\s]*>')
"""A tag of any kind, such as ``<|im_end|>`` or ``<b>``."""
SWIFT_TAG = re.compile('<(ref-object|bbox)>')
"""Stands for a name or a box in the ``objects`` of ms-swift."""

MODALITY_OF_PART = {
    'text': 'text',
    'input_text': 'text',
    'output_text': 'text',
    'image': 'image',
    'image_url': 'image',
    'input_image': 'image',
    'video': 'video',
    'video_url': 'video',
    'input_video': 'video',
    'audio': 'audio',
    'audio_url': 'audio',
    'input_audio': 'audio',
}
"""Modality of a content part, or ``text``, by its type."""
PART_NOTES = ('type', 'detail', 'index')
"""Keys of a content part that do not hold its content. ``detail`` is for OpenAI's API, and is not read. ``index``
numbers the images of a TRL table; `_parse_part` checks that they are in order."""
FILE_OBJECT_KEYS = ('bytes', 'data', 'path', 'url')
"""Keys of a file object. The first of them that has a value holds the file."""
FILE_NOTES = ('detail', 'format')
"""Keys that a file object may also have. They are not read, because a file is recognized by its content."""
TURN_KEYS = (
    'role',
    'from',
    'content',
    'value',
    'weight',
    'loss',
    *TURN_NOTES,
)
"""Keys that a turn may have."""
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
"""The role that ``Turn.role`` gets, by the name that a project writes."""
ROLES_IN_ORDER = re.compile(r'user assistant( (user|tool( tool)*) assistant)*( user|( tool)*)')
"""The roles of a conversation without its system turns, which may be anywhere. One or more results of tools may be in
the place of a question. The last turns may be a question, or results, without an answer. They have no loss."""

_NO_TOOLS = "because each model writes tools in its own way. Write the text of the model's template into the turns"
_NO_PREFERENCES = 'because this is training on answers, not on preferences'
_WEIGHT_OF_SAMPLE = 'because turns have a weight of their own. Call the weight of a whole sample `loss_weights`'
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
    'sample_weight': _WEIGHT_OF_SAMPLE,
    'loss_mask': 'because it would be dropped. Give each answer without loss `weight` 0',
    'chat_template_kwargs': "because it changes the template's text of this sample (TRL). Take it out",
}
"""Keys that are not supported but would change the training, and the reason for the message."""

KEYS_OF_EVERY_FORMAT = {
    'id',
    'system',
    'loss_weights',
    *chain.from_iterable(MEDIA_KEYS.values()),
}
"""Keys that are read in a record of any format."""


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
    """If other projects use the same ``keys`` for other lists: keys that each object in the list must have."""
    media_first: bool = False
    """Whether the listed media go before the first question if a record has no placeholders. If not, such a record is
    refused."""

    @property
    def quoted_keys(self) -> str:
        """The keys for an error message, such as "`prompt` and `completion`"."""
        return ' and '.join(f'`{key}`' for key in self.keys)

    def matches(self, data: JsonObject) -> bool:
        """Tells whether a record is of this format."""
        for key in self.keys:
            value = data.get(key)
            if value is None or value == []:  # '' is a value: a question may be empty
                return False
            if self.keys_of_entry and not _is_list_of_objects(value, self.keys_of_entry):
                return False
        return True


def parse_record(raw: RawRecord, folder: Path = Path()) -> Record:
    """Parses an entry of a file into a record. Checks all that can be checked without the files of its media.

    Args:
        raw: The entry.
        folder: Folder to which the names of its media are relative.

    Raises:
        BadSampleError: If one of these checks fails. The error names the sample.
    """
    # It has no turns yet, but it can already name the sample in an error.
    record = Record(
        sample_id=_sample_id_of(raw),
        source=f'{raw.path}, {raw.where}',
        turns=(),
        media=(),
        folder=folder,
    )
    try:
        return _parse_entry(raw, record)
    except ValueError as error:
        raise record.error(error) from None
    except RecursionError:  # Python 3.13 decodes deeper values than `leaves_of` and `ascii` can walk
        raise record.error('brackets within brackets, too deep') from None


def _sample_id_of(raw: RawRecord) -> str:
    """Returns the ``id`` of an entry as a short text on one line, or its place in the file if it has no id.

    An id may hold anything. Lone surrogates, line breaks and length must not break the messages that show it.
    """
    if not isinstance(raw.data, dict) or raw.data.get('id') is None:
        return raw.where
    try:
        text = str(raw.data['id'])
    except RecursionError:  # a list of lists, too deep
        return raw.where
    printable = text.encode('utf-8', 'backslashreplace').decode()
    return ' '.join(printable.split())[:200] or raw.where


def _parse_entry(raw: RawRecord, record: Record) -> Record:
    """Returns the record with the turns, media and weight of an entry.

    Args:
        raw: The entry.
        record: The record, without turns, media and weight.
    """
    data = _check_object(raw.data)
    record_format = _format_of(data, raw.unnamed_media)
    slots: list[Medium] = []  # of all turns, in the order of their placeholders. `_parse_turn` adds those of a turn
    turns = [_parse_turn(turn, slots) for turn in _raw_turns(data, record_format)]
    listed = {modality: _listed_media(data, modality) for modality in MODALITIES}
    listed_media = list(chain.from_iterable(listed.values()))
    media_read = listed_media + [slot for slot in slots if slot.files]
    keys_read = {
        *KEYS_OF_EVERY_FORMAT,
        *record_format.keys,
        *record_format.further_keys,
    }
    # Before `_fill_slots`, which would only say that a medium is missing, and not that it is under an unread key.
    check_unread_keys(data, keys_read, media_read, raw.unnamed_media)
    if record_format.media_first and not slots:
        slots = [Medium(medium.modality) for medium in listed_media]
        turns = _with_media_first(turns, slots)
    if _are_images_of_video(slots, listed):
        slots = [Medium('video')] * len(slots)
        turns = [_with_video_placeholders(turn) for turn in turns]
    media = _fill_slots(slots, listed)
    _check_turns(turns)
    _check_texts_of_other_keys(data, keys_read, turns)
    texts = [turn.text for turn in turns]
    if is_given(data.get('objects')) and SWIFT_TAG.search('\n'.join(texts)):
        raise InvalidInputError(
            '`objects` is not supported, because ms-swift writes its names and boxes in place of `<ref-object>` '
            'and `<bbox>`. Write them into the text'
        )
    for medium in media:
        texts.extend(medium.names)
    _check_characters('\n'.join(texts))
    loss_weights = _parse_loss_weights(data.get('loss_weights'))
    return replace(
        record,
        turns=tuple(turns),
        media=tuple(media),
        loss_weights=loss_weights,
    )


def _check_object(data: object) -> JsonObject:
    """Returns the object of an entry. Raises ValueError if it is no object, or has a key that is not supported."""
    if isinstance(data, Exception):  # see RawRecord
        raise InvalidInputError(f'not valid JSON: {data}. A file holds one array, or an object in each line')
    if not isinstance(data, dict):
        raise InvalidInputError(f'must be a JSON object, got: {type(data).__name__}')
    for key, value in data.items():
        # LLaMA-Factory and others write the tools as a JSON text, '[]' for none.
        if key in REFUSED_KEYS and is_given(value) and value != '[]':
            raise InvalidInputError(f'`{key}` is not supported, {REFUSED_KEYS[key]}')
    return data


def _parse_loss_weights(value: Any) -> float | None:
    """Returns ``Record.loss_weights``: one number, the weight of every token. None if the record has no weight."""
    if value is None:
        return None
    is_number = type(value) in (int, float)  # True is not a number here
    if is_number and (value == 0 or MIN_LOSS_WEIGHT <= value <= MAX_LOSS_WEIGHT):
        return float(value)
    raise InvalidInputError(
        f'`loss_weights` must be 0, or a number from {MIN_LOSS_WEIGHT} to {MAX_LOSS_WEIGHT}, got: {short_repr(value)}'
    )


# The formats. Each function `_read_...` returns the turns of a record as objects, such as `{'role': 'user', 'content':
# 'Hi'}`. `_parse_turn` checks and parses these objects later.


def _read_alpaca(data: JsonObject) -> list[JsonObject]:
    """Reads Stanford Alpaca's format. The question is the ``instruction``, and the ``input`` on the next line."""
    lines = [data['instruction']]
    if is_given(data.get('input')):
        lines.append(data['input'])
    if not all(isinstance(line, str) for line in lines):
        raise InvalidInputError(f'`instruction` and `input` must be strings, got: {short_repr(lines)}')
    question = '\n'.join(line for line in lines if line)
    return _read_pairs(data, question, data['output'])


def _read_pairs(data: JsonObject, question: object, answer: object) -> list[JsonObject]:
    """Returns the turns of the ``history``, a list of pairs, and then of the question and its answer."""
    history = data.get('history') or []
    if not isinstance(history, list):
        history = [history]  # refused below, because its entry is not a pair
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidInputError(f'`history` must hold pairs of question and answer, got: {short_repr(pair)}')
    pairs = [*history, [question, answer]]
    return _turns_of(pairs)


def _turns_of(pairs: Iterable[Sequence[object]]) -> list[JsonObject]:
    """Returns the turns of pairs of question and answer."""
    turns = []
    for question, answer in pairs:
        turns.append({'role': 'user', 'content': question})
        turns.append({'role': 'assistant', 'content': answer})
    return turns


def _read_prompt_and_completion(data: JsonObject) -> list[JsonObject]:
    """Reads TRL's format. Only the completion carries loss, so answers inside the prompt get ``weight`` 0."""
    prompt = data['prompt']
    completion = data['completion']
    if not (_is_list_of_objects(prompt) and _is_list_of_objects(completion)):
        raise InvalidInputError('`prompt` and `completion` must be lists of turns (a plain string names no speaker)')
    # `weight` and `loss` of ms-swift mean the same. A turn may not have both, so `loss` becomes null.
    turns_without_loss = [{**turn, 'weight': 0, 'loss': None} for turn in prompt]
    return [*turns_without_loss, *completion]


def _read_cauldron(data: JsonObject) -> list[JsonObject]:
    """Reads The Cauldron's ``texts``, a list of pairs."""
    pairs = []
    for pair in data['texts']:
        # `source` names the dataset from which The Cauldron took the pair. It is not read.
        _check_keys(pair, ('user', 'assistant', 'source'), 'an entry of `texts`')
        pairs.append((pair['user'], pair['assistant']))
    return _turns_of(pairs)


def _read_videochat2(data: JsonObject) -> list[JsonObject]:
    """Reads VideoChat2's ``QA``: question ``q``, answer ``a``, and an instruction ``i`` for the whole conversation.

    VideoChat2 puts the instruction of the first entry before the conversation. The question may be empty, as in
    captions: then the video is the whole question.
    """
    for key in ('start', 'end'):
        if is_given(data.get(key)):
            raise InvalidInputError(
                f'`{key}` is not supported, because a video is read as a whole. Cut the video (`ffmpeg '
                '-ss START -to END -i a.mp4 b.mp4`), and take the key out'
            )
    entries = data['QA']
    instruction = entries[0].get('i')
    pairs = []
    for index, entry in enumerate(entries):
        _check_keys(entry, ('i', 'q', 'a'), 'an entry of `QA`')
        if index > 0 and not is_given(entry['q']):
            # VideoChat2 writes two answers in a row here, which most chat templates refuse.
            raise InvalidInputError(
                '`q` may be empty only in the first entry of `QA`. Write a question, or join the answers'
            )
        if is_given(entry.get('i')) and entry['i'] != instruction:
            raise InvalidInputError(
                f'`i` must be the same in all entries of `QA`, got: {short_repr(entry["i"])}. VideoChat2 '
                'reads only the first. Write the others into `q`'
            )
        pairs.append((entry['q'], entry['a']))
    turns = _turns_of(pairs)
    if is_given(instruction):
        return [{'role': 'system', 'content': instruction}, *turns]
    return turns


FORMATS = (
    # LLaVA, VILA, Monkey, LLaMA-Factory (ShareGPT)
    RecordFormat(('conversations',), lambda data: data['conversations']),
    # OpenAI, TRL, ms-swift, Qwen-VL and others
    RecordFormat(('messages',), lambda data: data['messages']),
    # TRL
    RecordFormat(('prompt', 'completion'), _read_prompt_and_completion, media_first=True),
    # Stanford Alpaca, LLaMA-Factory
    RecordFormat(
        ('instruction', 'output'),
        _read_alpaca,
        further_keys=('input', 'history'),
    ),
    # ms-swift
    RecordFormat(
        ('query', 'response'),
        lambda data: _read_pairs(data, data['query'], data['response']),
        further_keys=('history',),
    ),
    # The Cauldron, FineVision
    RecordFormat(('texts',), _read_cauldron, keys_of_entry=('user', 'assistant'), media_first=True),
    # VideoChat2
    RecordFormat(('QA',), _read_videochat2, keys_of_entry=('q', 'a'), media_first=True),
)
"""All formats that are read. A record must have the keys of exactly one."""

KEYS_OF_ANSWERS = ('completion', 'output', 'response')
"""Keys that hold the last answer in some format."""
KEYS_OF_SYSTEM = ('system_message', 'system_prompt')
"""Names that other projects give to the key ``system``."""
KEYS_OF_TEXTS = (*KEYS_OF_ANSWERS, *KEYS_OF_SYSTEM, 'history', 'input', 'instruction', 'query')
"""Keys that hold a text of the conversation in some format, or in other projects. ``prompt`` is not among them, because
without a ``completion`` it is only a note in many data sets: it repeats the first question (UltraChat) or the whole
sample with the tags of a template (tables of Alpaca), or a model wrote the conversation from it."""


def _format_of(data: JsonObject, unnamed_media: JsonObject) -> RecordFormat:
    """Returns the format of a record. Raises ValueError unless exactly one matches.

    Args:
        data: The record.
        unnamed_media: As in :class:`.RawRecord`. Only the message shows its keys.
    """
    matching = [record_format for record_format in FORMATS if record_format.matches(data)]
    if len(matching) == 1:
        return matching[0]
    keys = sorted(str(key) for key, value in {**unnamed_media, **data}.items() if is_given(value))
    expected = ', or '.join(record_format.quoted_keys for record_format in FORMATS)
    raise InvalidInputError(f'must hold one conversation: {expected}, got the keys: {short_repr(keys, 200)}')


def _raw_turns(data: JsonObject, record_format: RecordFormat) -> list[JsonObject]:
    """Returns the turns of a record, before their keys are checked. A ``system`` text becomes the first turn."""
    turns = record_format.read_turns(data)
    if not _is_list_of_objects(turns) or not turns:
        raise InvalidInputError(
            f'{record_format.quoted_keys} must be a non-empty list of turns, got: {short_repr(turns)}'
        )
    if is_given(data.get('system')):
        return [{'role': 'system', 'content': data['system']}, *turns]
    return turns


def _is_list_of_objects(value: object, keys: Iterable[str] = ()) -> TypeGuard[list[JsonObject]]:
    """Tells whether a value is a list of objects that have all these keys."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, dict) and item.keys() >= set(keys) for item in value)


# Turns and their parts. A function with the argument `slots` appends a slot for each placeholder that it writes. The
# argument is None for a turn that may not hold media, such as an answer. Tags in such a turn are text.


def _parse_turn(raw_turn: JsonObject, slots: list[Medium]) -> Turn:
    """Returns a turn whose text has a placeholder for each medium."""
    turn = {}
    for key, value in raw_turn.items():
        # An empty text stays, because the user may say nothing. `_check_turns` refuses empty answers.
        if is_given(value) or key in ('content', 'value'):
            turn[key] = value
    role_name = _single_value(turn, ('role', 'from'))
    content = _single_value(turn, ('content', 'value'))
    _check_keys(turn, TURN_KEYS, 'a turn')
    if not isinstance(role_name, str) or role_name not in ROLES:
        raise InvalidInputError(f'the role of a turn must be one of {sorted(ROLES)}, got: {short_repr(role_name)}')
    role = ROLES[role_name]
    slots_of_turn = slots if role in ROLES_WITH_MEDIA else None
    if isinstance(content, str):
        text = _parse_text(content, slots_of_turn)
    elif isinstance(content, list):
        text = ''.join(_parse_part(part, slots_of_turn) for part in content)
    else:
        raise InvalidInputError(f'the text of a turn must be a string, got: {type(content).__name__}')
    return Turn(role, text, _parse_carries_loss(turn, role))


def _parse_carries_loss(turn: JsonObject, role: str) -> bool:
    """Returns ``Turn.carries_loss``. Reads ``weight`` of OpenAI and ShareGPT, and ``loss`` of ms-swift.

    Only answers can carry loss. For turns of other roles the result is always True, and has no effect.
    """
    weight = _single_value(turn, ('weight', 'loss'))  # `loss` may be true or false, which equal 1 and 0
    if weight is None:
        return True
    if role == 'assistant' and weight in (0, 1):
        return weight == 1
    if role != 'assistant' and weight == 0:
        return True
    raise InvalidInputError(
        f'`weight` (or `loss`) of a turn must be 0 or 1, and 1 only for an answer, got: {short_repr(weight)} for a '
        f'turn of the {role}'
    )


def _parse_part(part: object, slots: list[Medium] | None) -> str:
    """Returns the text of one part of a content list. For a medium, this is its placeholder."""
    if not isinstance(part, dict):
        raise InvalidInputError(f'a part of `content` must be an object, got: {short_repr(part)}')
    # In a table, every part has the keys of all parts, and null under those that it does not need.
    values = {key: value for key, value in part.items() if value is not None}
    part_type = values.get('type')
    if part_type is None and len(values) == 1:
        part_type = next(iter(values))  # Qwen-VL writes {'text': ...} and {'image': ...}
    if not isinstance(part_type, str) or part_type not in MODALITY_OF_PART:
        raise InvalidInputError(
            f'a part of `content` must be of type {sorted(MODALITY_OF_PART)}, got: {short_repr(part_type)}'
        )
    modality = MODALITY_OF_PART[part_type]
    content_keys: tuple[str, ...] = ('text',)
    if modality != 'text':
        content_keys = (modality, f'{modality}_url', f'input_{modality}', 'url', 'path', 'base64')
    _check_keys(values, (*content_keys, *PART_NOTES), f'a part of type {part_type}')
    content = _single_value(values, content_keys)
    if modality == 'text':
        if not isinstance(content, str):
            raise InvalidInputError(f'`text` of a part of `content` must be a string, got: {short_repr(content)}')
        return _parse_text(content, slots)
    if slots is None:
        raise InvalidInputError(f'a part of type {part_type} may stand only in turns of the user and of tools')
    if 'index' in values:
        _check_index(values['index'], modality, slots)
    if content is None:  # {'type': 'image'} without a file stands for the next listed medium
        slot = Medium(modality)
    elif 'base64' in values:
        slot = _parse_medium(modality, {'data': content})  # a file object, whose `data` is read as base64
    else:
        slot = _parse_medium(modality, content)
    slots.append(slot)
    return f'<{modality}>'


def _check_index(index: object, modality: str, slots: Sequence[Medium]) -> None:
    """Refuses a part of a TRL table if its ``index`` is not the number of the media of its modality before it.

    Args:
        index: The index of the part. It counts the media of a modality in the whole record.
        modality: The modality of the part.
        slots: The slots of all parts before this one in the record.
    """
    expected_index = sum(slot.modality == modality for slot in slots)
    if index != expected_index:
        got = f'{short_repr(index)} for {modality} {expected_index}'
        raise InvalidInputError(f'`index` of {modality} parts must count up from 0, got: {got}')


def _parse_text(text: str, slots: list[Medium] | None) -> str:
    """Returns the text with one placeholder for each tag of a medium, and for each ``<img>NAME</img>``."""
    if slots is None or '<' not in text:
        return text

    def add_slot(match: re.Match[str]) -> str:
        """Returns the placeholder for a match of `MEDIUM_IN_TEXT`, and appends its slot."""
        file_name = match[1]
        if file_name is not None:  # the match is <img>file_name</img>
            slots.append(_parse_medium('image', file_name.strip()))
            return '<image>'
        modality = MODALITY_OF_TAG[match[0]]
        slots.append(Medium(modality))
        return f'<{modality}>'

    text = MEDIUM_IN_TEXT.sub(add_slot, text)
    if '<img>' in text:
        raise InvalidInputError(
            '`<img>` in a text stands for an image, and `</img>` must end its name. If it is text, as in HTML, write '
            '`<img >`'
        )
    return text


# Media and their files.


def _listed_media(data: JsonObject, modality: str) -> list[Medium]:
    """Returns the media that a record lists under the keys of a modality, such as ``image`` or ``images``.

    Tables may have the same files under two keys. They are read once. Different files are refused.
    """
    listed: list[Medium] = []
    for key in MEDIA_KEYS[modality]:
        value = data.get(key)
        if not is_given(value):
            continue
        files = value if isinstance(value, list) else [value]
        media = []
        for file in files:
            media.append(_parse_medium(modality, file))
        if listed and media != listed:
            raise InvalidInputError(f'the keys {MEDIA_KEYS[modality]} must name the same files. Keep only one of them')
        listed = media
    return listed


def _with_media_first(turns: Sequence[Turn], slots: Sequence[Medium]) -> list[Turn]:
    """Puts a placeholder for each slot before the first question."""
    placeholders = ''
    for slot in slots:
        placeholders += f'<{slot.modality}>'
    placed = []
    for turn in turns:
        if turn.role == 'user':
            turn = turn._replace(text=placeholders + turn.text)
            placeholders = ''
        placed.append(turn)
    return placed


def _are_images_of_video(slots: Sequence[Medium], listed: Mapping[str, Sequence[Medium]]) -> bool:
    """Tells whether ``<image>`` stands for a video in a record, as in LLaVA-Video.

    That is so if the record lists videos and no images, but all of its slots are empty slots of images.
    """
    if not listed['video'] or listed['image']:
        return False
    empty_slot = Medium('image')
    return all(slot == empty_slot for slot in slots)


def _with_video_placeholders(turn: Turn) -> Turn:
    """Replaces ``<image>`` by ``<video>``, if it stands for media in this turn."""
    if not turn.placeholders:
        return turn
    return turn._replace(text=turn.text.replace('<image>', '<video>'))


def _fill_slots(slots: Sequence[Medium], listed: Mapping[str, Sequence[Medium]]) -> list[Medium]:
    """Returns the media in the order of their placeholders: the slots, with the listed media in the empty ones."""
    filled = list(slots)
    for modality, media in listed.items():
        empty_slot = Medium(modality)
        empty_places = [place for place, slot in enumerate(slots) if slot == empty_slot]
        if len(media) != len(empty_places):
            got = f'{len(media)} {modality}s and {len(empty_places)} placeholders'
            raise InvalidInputError(
                f'the number of {modality}s must match the `<{modality}>` placeholders, got: {got}. If a tag is text, '
                f'as in HTML, write `<{modality} >`'
            )
        for place, medium in zip(empty_places, media, strict=True):
            filled[place] = medium
    return filled


def _parse_medium(modality: str, value: object) -> Medium:
    """Returns a medium of one file. A video may also be a list of images, its frames (LLaMA-Factory, Qwen-VL)."""
    if modality == 'video' and isinstance(value, list) and value:
        frames = [_parse_file('image', frame) for frame in value]
        if len(frames) == 1:
            frames *= 2  # a medium of one file would be read as a video file
        return Medium(modality, tuple(frames))
    return Medium(modality, (_parse_file(modality, value),))


def _parse_file(modality: str, value: object) -> str | EmbeddedFile:
    """Returns the name of a file, or its embedded content.

    Args:
        modality: The modality of the file.
        value: A name, a URI, bytes, an embedded file of a table, or an object that holds one of these.
    """
    if isinstance(value, dict):
        value = _file_of_object(modality, value)
    if isinstance(value, EmbeddedFile):
        return value
    if isinstance(value, bytes):
        return EmbeddedFile.from_bytes('in the record', value)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f'`{modality}` must be a file name or a list of file names, got: {short_repr(value)}')
    if value[:5].lower() == 'data:':
        return _decode_data_uri(modality, value)
    if value[:7].lower() == 'file://':
        return url2pathname(urlsplit(value).path)
    if URL_SCHEME.match(value):
        raise InvalidInputError(
            f'`{modality}` must be a file, got: {short_repr(value)}, which is on a network. Download it'
        )
    return value


def _file_of_object(modality: str, file_object: JsonObject) -> object:
    """Returns the file in an object of ms-swift or `datasets`, or in OpenAI's ``image_url`` and ``input_audio``.

    `datasets` may give both ``bytes`` and ``path``. Then ``path`` is only the name that the file had. Returns None if
    the object holds no file. `_parse_file` refuses that.
    """
    _check_keys(file_object, (*FILE_OBJECT_KEYS, *FILE_NOTES), f'a file object ({modality})')
    for key in FILE_OBJECT_KEYS:
        value = file_object.get(key)
        if not is_given(value):
            continue
        if key in ('bytes', 'data') and isinstance(value, str):
            return f'data:{modality};base64,{value}'  # `_parse_file` decodes it
        return value
    return None


def _decode_data_uri(modality: str, uri: str) -> EmbeddedFile:
    """Returns the content of a URI such as ``data:image/png;base64,iVBORw0...``.

    The name of the file, which messages show, is the part before ``;base64``.
    """
    header, _, payload = uri.partition(',')
    name, _, _ = header.rpartition(';')
    try:
        payload_on_one_line = ''.join(payload.split())  # `validate` refuses line breaks
        content = base64.b64decode(payload_on_one_line, validate=True)
    except ValueError as error:
        raise InvalidInputError(f'a data: URI of {modality} must be base64, got: {short_repr(uri)}: {error}') from error
    return EmbeddedFile.from_bytes(name[:60], content)


# Checks of a whole record.


def _check_turns(turns: Sequence[Turn]) -> None:
    """Raises ValueError if the turns are out of order, no answer carries loss, or an answer with loss is empty."""
    roles = []
    learned_answers = []
    for turn in turns:
        if turn.role != 'system':
            roles.append(turn.role)
        if turn.role == 'assistant' and turn.carries_loss:
            learned_answers.append(turn.text)
    if not ROLES_IN_ORDER.fullmatch(' '.join(roles)):
        got = short_repr(roles, 200)
        raise InvalidInputError(f'turns must alternate between user (or tool) and assistant, user first, got: {got}')
    if not learned_answers:
        raise InvalidInputError('at least one answer must carry loss, got: `weight` 0 for all. Take the sample out')
    for answer in learned_answers:
        # Zero-width spaces say nothing, too. `strip` keeps them, but they are not printable.
        if not any(character.isprintable() for character in answer.strip()):
            raise InvalidInputError(
                f'an answer must say something, got: {short_repr(answer)}. Take it out, or give it `weight` 0'
            )


def _check_texts_of_other_keys(data: JsonObject, keys_read: Container[str], turns: Sequence[Turn]) -> None:
    """Raises ValueError if one of ``KEYS_OF_TEXTS`` is not read, and has a text that no turn has.

    The text would be lost, for example an ``output`` in a record whose turns are read from ``messages``. A copy of a
    turn, or of a part of one, is allowed. Under one of ``KEYS_OF_ANSWERS``, it must be the copy of an answer. Spaces
    and tags do not matter.
    """
    other_keys = [key for key in KEYS_OF_TEXTS if key in data and key not in keys_read]
    if not other_keys:
        return
    for key in other_keys:
        turns_to_copy = turns
        if key in KEYS_OF_ANSWERS:
            turns_to_copy = [turn for turn in turns if turn.role == 'assistant']
            # If the last turn is not an answer, the text is the missing answer, even if it repeats an earlier one.
            if turns[-1].role != 'assistant':
                turns_to_copy = []
        letters_to_copy = ''.join(_letters_of(turn.text) for turn in turns_to_copy)
        for text in leaves_of(data[key]):
            if not isinstance(text, str) or _letters_of(text) in letters_to_copy:
                continue
            # In a list of turns, the names of speakers and types of parts are strings, too.
            is_in_list = not isinstance(data[key], str)
            if is_in_list and (text in ROLES or text in MODALITY_OF_PART):
                continue
            raise InvalidInputError(
                f'`{key}` must not hold a text that no turn has, because this record is not read from it, got: '
                f'{short_repr(text)}. Write it into the turns, or take it out'
            )


def _letters_of(text: str) -> str:
    """Returns a text without spaces, line breaks, placeholders of media, and tags such as ``<|im_end|>``."""
    return ''.join(TAG.sub('', MEDIUM_IN_TEXT.sub('', text)).split())


def _check_characters(text: str) -> None:
    """Refuses lone surrogates, which no tokenizer takes. `files.py` decodes bytes that are not UTF-8 to surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # For the bytes 0x80 to 0xff that are not UTF-8, `files.py` writes \udc80 to \udcff.
        got = f'the lone surrogate {text[error.start]!a}'
        raise InvalidInputError(
            f'text must be valid Unicode, got: {got}. Save the file as UTF-8, or take it out'
        ) from error


def _check_keys(values: JsonObject, allowed_keys: Container[str], place: str) -> None:
    """Raises ValueError if an object has a value under a key that is not allowed. ``place`` names it in the message."""
    for key, value in values.items():
        if key not in allowed_keys and is_given(value):
            reason = REFUSED_KEYS.get(key, 'it would be dropped; take it out or write it into the text')
            raise InvalidInputError(f'`{key[:60]}` of {place} is not supported, {reason}')


def _single_value(values: JsonObject, keys: Iterable[str]) -> Any:
    """Returns the only value under these keys that is not null, or None if all are null.

    An empty value is not null. Raises ValueError if several values are not null.
    """
    values_given = {key: values[key] for key in keys if values.get(key) is not None}
    if len(values_given) > 1:
        names = ' and '.join(f'`{key}`' for key in values_given)
        raise InvalidInputError(f'{names} must not be given together. Remove all but one')
    return next(iter(values_given.values()), None)
