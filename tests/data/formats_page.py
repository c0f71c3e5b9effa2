# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The page of file formats, from the records of the tests: ``python -m tests.data.formats_page > docs/formats.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from composer_tokacc.data import BadSampleError
from composer_tokacc.data.records import Record
from tests.data.test_formats import FORMATS, MEDIA, REFUSED, parse

__all__ = ['page']

HEAD = """# File formats

Records as each project's own documentation writes them, and what becomes of them: who says what, and which files belong
to it. `(no loss)` marks an answer that is read and not learned. What to type for which file: [your data](data.md).
Made by `python -m tests.data.formats_page > docs/formats.md` from the records that `tests/data/test_formats.py` reads.
"""


def page() -> str:
    """Markdown: a table of what is used as meant, and one of what is refused."""
    return (
        '\n'.join(
            [
                HEAD,
                '## Used as meant',
                '',
                '| format | record | is read as |',
                '|---|---|---|',
                *_used('', FORMATS),
                *_used(', videos and audio', MEDIA),
                '',
                '## Refused',
                '',
                '| | record, or the part of it | message, behind id, file and line |',
                '|---|---|---|',
                *_refused(),
            ]
        )
        + '\n'
    )


def _used(suffix: str, records: Mapping[str, Any]) -> Iterator[str]:
    for name, (data, *_) in records.items():
        yield f'| {name}{suffix} | {_code(data)} | {_read(parse(data))} |'


def _refused() -> Iterator[str]:
    for name, (data, _) in REFUSED.items():
        try:
            parse({'id': 'a', **data})
        except BadSampleError as error:
            message = str(error).split('): ', 1)[1]
            yield f'| {name} | {_code(data)} | {_cell(_short(message))} |'


def _read(record: Record) -> str:
    said = [f'{turn.role}: {turn.text}{"" if turn.carries_loss else " (no loss)"}' for turn in record.turns]
    files = [f'{medium.modality} {", ".join(medium.names)}' for medium in record.media]
    return '<br>'.join(_cell(_short(line)) for line in (*said, *files))


def _code(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=True, default=lambda value: f'<{len(value)} bytes>')
    return f'`` {_short(text).replace("|", chr(92) + "|")} ``'


def _short(text: str) -> str:
    """Without the bytes of a picture."""
    return re.sub(r'[A-Za-z0-9+/=]{40,}', '...', text)


def _cell(text: str) -> str:
    plain_and_code = re.split(r'(`[^`]*`)', text.replace('|', '\\|').replace('\n', ' '))
    plain_and_code[::2] = [part.replace('<', '&lt;').replace('*', '\\*') for part in plain_and_code[::2]]
    return ''.join(plain_and_code)


if __name__ == '__main__':
    print(page(), end='')
