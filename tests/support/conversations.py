# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Records of conversations and their images, as a test writes them into a file."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.records import RawRecord, Record


def png(colour: str = 'red') -> bytes:
    """Returns the bytes of a small image of one colour."""
    stream = io.BytesIO()
    Image.new('RGB', (8, 8), colour).save(stream, 'PNG')
    return stream.getvalue()


def turns(*texts: str) -> list[dict[str, str]]:
    """Returns questions and answers in turn, as LLaVA writes them."""
    roles = itertools.cycle(['human', 'gpt'])
    return [{'from': role, 'value': text} for role, text in zip(roles, texts, strict=False)]


IMAGE = {'type': 'image'}
DATASET_NAME = 'mine'
"""Name of the dataset that :func:`write_dataset_info` describes."""


def message(role: str, *parts: Any) -> dict[str, Any]:
    """Returns a message of these parts, in the form of a processor. A string is a text."""
    content = []
    for part in parts:
        if isinstance(part, str):
            part = {'type': 'text', 'text': part}
        content.append(part)
    return {'role': role, 'content': content}


def user(*parts: Any) -> dict[str, Any]:
    """Returns a question, see :func:`message`."""
    return message('user', *parts)


def assistant(text: str) -> dict[str, Any]:
    """Returns an answer, see :func:`message`."""
    return message('assistant', text)


def parse(data: Any, folder: Path = Path()) -> Record:
    """Returns the record of an entry of a file. ``folder`` has its media."""
    raw_record = RawRecord('data.json', 'line 3', data)
    return parse_record(raw_record, folder)


def write_json(folder: Path, records: Sequence[Any]) -> Path:
    """Writes ``data.json`` and returns its path."""
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def write_dataset_info(folder: Path, entry: dict[str, Any]) -> str:
    """Writes a ``dataset_info.json`` of LLaMA-Factory, and returns the path of its dataset with this entry."""
    entries = {'other': {}, DATASET_NAME: entry}
    path = folder / 'dataset_info.json'
    path.write_text(json.dumps(entries, indent=2))
    return f'{path}#{DATASET_NAME}'
