# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Conversation files as LLaVA, VILA, LLaMA-Factory and Monkey write them -> records, or the reason why not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ['BadSampleError', 'Record', 'parse_record', 'read_raw_records']

PLACEHOLDER = '<image>'
ROLES = {
    'system': 'system',
    'human': 'user',
    'user': 'user',
    'gpt': 'assistant',
    'assistant': 'assistant',
    'model': 'assistant',
}
# Qwen-VL and Monkey name the file inside the text instead.
INLINE_IMAGE = re.compile(r'<img>(.*?)</img>', re.DOTALL)


class BadSampleError(ValueError):
    """A sample that cannot be used; the message names its id, its file and its line."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation of a file.

    Args:
        sample_id: The record's own ``id``, or ``line <n>``.
        source: File and line, for messages.
        turns: ``(role, text)`` with role ``system``, ``user`` or ``assistant``; ``<image>`` stands where an image goes.
        images: File names, in the order of the placeholders, relative to the image folder.
    """

    sample_id: str
    source: str
    turns: tuple[tuple[str, str], ...]
    images: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        """Text of every turn, without placeholders."""
        return [text.replace(PLACEHOLDER, '') for _, text in self.turns]

    def error(self, reason: str) -> BadSampleError:
        """The error that says what is wrong with this sample."""
        return BadSampleError(f'sample "{self.sample_id}" ({self.source}): {reason}')

    def messages(self) -> list[dict[str, Any]]:
        """Turns as chat templates want them; the line breaks around a placeholder belong to the template."""
        messages = []
        for role, text in self.turns:
            content: list[dict[str, str]] = []
            for position, piece in enumerate(text.split(PLACEHOLDER)):
                if position > 0:
                    content.append({'type': 'image'})
                if piece := piece.strip('\n'):
                    content.append({'type': 'text', 'text': piece})
            messages.append({'role': role, 'content': content})
        return messages


def read_raw_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yields ``(line, object)`` of a JSON array or of JSON lines; a bad line yields its ``JSONDecodeError``.

    Raises:
        ValueError: If the file is missing, or is a JSON array with a syntax error: what follows one cannot be read.
    """
    if not Path(path).is_file():
        raise ValueError(f'`path` must be a JSON or JSONL file, got: {path}, which does not exist.')
    text = Path(path).read_text(encoding='utf-8')
    if text.lstrip().startswith('['):
        yield from _read_array(text, path)
        return
    for line, content in enumerate(text.split('\n'), start=1):
        if content.strip():
            try:
                yield line, json.loads(content)
            except json.JSONDecodeError as error:
                yield line, error


def _read_array(text: str, path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """One object after the other, because ``json.loads`` would not tell on which line each begins."""
    decoder, separator = json.JSONDecoder(), re.compile(r'[\s,]*')
    position, line, counted = text.index('[') + 1, 1, 0
    while True:
        position = separator.match(text, position).end()  # type: ignore[union-attr]
        line, counted = line + text.count('\n', counted, position), position
        if text.startswith(']', position):
            return
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(
                f'`path` must be a valid JSON file, got: {path} with a syntax error at line {error.lineno}, column '
                f'{error.colno} ({error.msg}). Mend it, or write JSON lines: there one bad line costs one sample.'
            ) from error
        yield line, record


def parse_record(raw: Any, *, path: str | os.PathLike[str], line: int) -> Record:
    """Makes a record of one JSON object and checks all that needs no other file.

    Raises:
        BadSampleError: If the object is no conversation, or its images do not match its placeholders.
    """
    source, sample_id = f'{path}, line {line}', f'line {line}'
    try:
        if isinstance(raw, json.JSONDecodeError):
            raise ValueError(f'not valid JSON: {raw.msg} at column {raw.colno}')
        if not isinstance(raw, Mapping):
            raise ValueError(f'must be a JSON object, got: {type(raw).__name__}')
        sample_id = str(raw.get('id', sample_id))
        turns, images = _turns(raw), _image_names(raw)
        images += [name.strip() for _, text in turns for name in INLINE_IMAGE.findall(text)]
        turns = [(role, INLINE_IMAGE.sub(PLACEHOLDER, text)) for role, text in turns]
        _check_turns(turns, images)
    except ValueError as error:
        raise BadSampleError(f'sample "{sample_id}" ({source}): {error}') from None
    return Record(sample_id=sample_id, source=source, turns=tuple(turns), images=tuple(images))


def _turns(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    listed = raw.get('conversations') or raw.get('messages')
    if not isinstance(listed, list) or not all(isinstance(turn, Mapping) for turn in listed):
        raise ValueError('`conversations` (or `messages`) must be a non-empty list of turns')
    turns = [('system', str(raw['system']))] if raw.get('system') else []
    for turn in listed:
        name, text = turn.get('from', turn.get('role')), turn.get('value', turn.get('content'))
        if name not in ROLES:
            raise ValueError(f'the role of a turn must be one of {sorted(ROLES)}, got: {name!r}')
        if isinstance(text, list):  # [{'type': 'image'}, {'type': 'text', 'text': ...}]
            text = ''.join(PLACEHOLDER if part.get('type') == 'image' else part.get('text', '') for part in text)
        if not isinstance(text, str):
            raise ValueError(f'the text of a turn must be a string, got: {type(text).__name__}')
        turns.append((ROLES[name], text))
    return turns


def _image_names(raw: Mapping[str, Any]) -> list[str]:
    for key in ('video', 'videos', 'audio', 'audios'):
        if raw.get(key):
            raise ValueError(f'`{key}` is not supported, only images are')
    names = raw.get('image') or raw.get('images') or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError('`image` must be a file name or a list of file names')
    return list(names)


def _check_turns(turns: list[tuple[str, str]], images: list[str]) -> None:
    num_placeholders = sum(text.count(PLACEHOLDER) for _, text in turns)
    if num_placeholders != len(images):
        raise ValueError(
            f'the number of images must match the `{PLACEHOLDER}` placeholders, got: {len(images)} images '
            f'and {num_placeholders} placeholders'
        )
    if any(PLACEHOLDER in text for role, text in turns if role != 'user'):
        raise ValueError(f'`{PLACEHOLDER}` may stand in user turns only')
    spoken = [role for role, _ in turns if role != 'system']
    if len(spoken) < 2 or any(role != ('user', 'assistant')[i % 2] for i, role in enumerate(spoken)):
        raise ValueError(f'turns must alternate between user and assistant, user first, got: {spoken}')
