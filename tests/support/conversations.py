# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Records of conversations and their images, as a test writes them into a file."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.records import RawRecord, Record


def png(colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """The content of a small image of one colour."""
    stream = io.BytesIO()
    Image.new('RGB', (8, 8), colour).save(stream, 'PNG')
    return stream.getvalue()


def turns(*texts: str) -> list[dict[str, str]]:
    """Questions and answers in turn, as LLaVA writes them."""
    return [{'from': ('human', 'gpt')[index % 2], 'value': text} for index, text in enumerate(texts)]


IMAGE = {'type': 'image'}


def message(role: str, *parts: Any) -> dict[str, Any]:
    """A message of these parts, as a processor takes it. A string is a text."""
    content = [{'type': 'text', 'text': part} if isinstance(part, str) else part for part in parts]
    return {'role': role, 'content': content}


def user(*parts: Any) -> dict[str, Any]:
    """A question, see :func:`message`."""
    return message('user', *parts)


def assistant(text: str) -> dict[str, Any]:
    """An answer, see :func:`message`."""
    return message('assistant', text)


def parse(data: Any) -> Record:
    """The record of an entry of a file."""
    return parse_record(RawRecord('data.json', 'line 3', data))


def write_json(folder: Path, records: Sequence[Any]) -> Path:
    """Writes ``data.json`` and returns its path."""
    (folder / 'data.json').write_text(json.dumps(records))
    return folder / 'data.json'
