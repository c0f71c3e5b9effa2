# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The page of file formats, from the records of the tests: ``python -m tests.data.formats_page > docs/formats.md``."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from composer_tokacc.data import BadSampleError
from tests.data.test_formats import FORMATS, REFUSED, lines_of
from tests.support.conversations import parse

__all__ = ['page']

HEAD = """# File formats

Examples of records, each as the documentation of its project writes it. The first table shows how a record is read:
the turns and the media files. The second table shows records that are refused, with the message. What to type for your
file: [your data](data.md).

- `(no loss)` marks an answer that is read but not learned.
- `...` in a record stands for a long string, such as the bytes of an image.

Made by `python -m tests.data.formats_page > docs/formats.md` from the records that `tests/data/test_formats.py` reads.
"""


def page() -> str:
    """Returns the page: a table of the records that are read, and one of those that are refused."""
    lines = [HEAD, '## Read', '', '| format | record | is read as |', '|---|---|---|']
    for name, example in FORMATS.items():
        lines.append(_read_row(name, example.record))
    lines += [
        '',
        '## Refused',
        '',
        '| | record | message, after the id, file and line of the sample |',
        '|---|---|---|',
    ]
    for name, (record, _) in REFUSED.items():
        lines.append(f'| {name} | {_code(record)} | {_cell(_short(_message_of(record)))} |')
    return '\n'.join(lines) + '\n'


def _read_row(name: str, data: Any) -> str:
    cells = [_cell(_short(line)) for line in lines_of(parse(data))]
    return f'| {name} | {_code(data)} | {"<br>".join(cells)} |'


def _message_of(data: Any) -> str:
    """Returns the message that refuses a record, without the sample and the line at its front."""
    with pytest.raises(BadSampleError) as raised:
        parse({'id': 'a', **data})
    return str(raised.value).split('): ', 1)[1]


def _code(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=True, default=lambda value: f'<{len(value)} bytes>')
    escaped = _short(text).replace('|', '\\|')
    return f'`` {escaped} ``'


def _short(text: str) -> str:
    """Replaces the bytes of an image by dots."""
    return re.sub(r'[A-Za-z0-9+/=]{40,}', '...', text)


def _cell(text: str) -> str:
    """Escapes a text for a cell of a table. Code between backticks stays as it is."""
    pieces = re.split(r'(`[^`]*`)', text.replace('|', '\\|').replace('\n', ' '))
    for index in range(0, len(pieces), 2):  # every second piece is code
        pieces[index] = pieces[index].replace('<', '&lt;').replace('*', '\\*')
    return ''.join(pieces)


if __name__ == '__main__':
    print(page(), end='')
