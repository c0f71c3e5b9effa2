# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Data files and tables as they should not be, and texts, numbers and names in their records."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from tests.trials.outcomes import WORKS
from tests.trials.records import IMAGE, SAMPLE, SKIP, VIDEO, Make, of_bytes, of_file, of_text, picture

TURNS = [{'from': 'human', 'value': 'A?'}, {'from': 'gpt', 'value': 'B.'}]
GOOD = json.dumps({'id': 'good', 'conversations': TURNS})
NINES = '9' * 5000


def one(**given: Any) -> Make:
    return of_text(json.dumps([{'id': 'a', 'conversations': TURNS, **given}]))


def said(*texts: Any, **given: Any) -> Make:
    turns = [{'from': ('human', 'gpt')[i % 2], 'value': value} for i, value in enumerate(texts)]
    return one(conversations=turns, **given)


def named(name: Any) -> Make:
    """An image by a name, in a folder where ``a.png`` is."""

    def make(folder: Path) -> str:
        picture(folder / 'a.png')
        return said('<image>A?', 'B.', image=name)(folder)

    return make


def data_uri(content: bytes, encode: Callable[[bytes], bytes] = base64.b64encode, *, cut: int = 0) -> Make:
    payload = encode(content).decode()
    return named(f'data:image/png;base64,{payload[: len(payload) - cut]}')


def parts(*content: Any) -> Make:
    turns = [{'role': 'user', 'content': 'A?'}, {'role': 'assistant', 'content': list(content)}]
    return of_text(json.dumps([{'id': 'a', 'messages': turns}]))


def table(rows: list[dict[str, Any]], *, cut: int = 0) -> Make:
    def make(folder: Path) -> Path:
        import pyarrow
        import pyarrow.parquet

        path = folder / 'a.parquet'
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        path.write_bytes(path.read_bytes()[: -cut or None])
        return path

    return make


def two_columns(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array([text]) for text in ('A?', 'B.', 'C.')]
    names = ['instruction', 'output', 'output']
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), folder / 'a.parquet')
    return folder / 'a.parquet'


def described(entries: dict[str, Any]) -> Make:
    def make(folder: Path) -> Path:
        (folder / 'dataset_info.json').write_text(json.dumps(entries))
        return folder / f'dataset_info.json#{next(iter(entries))}'

    return make


def saved(spoil: Callable[[Path], Any]) -> Make:
    def make(folder: Path) -> Path:
        import datasets

        datasets.Dataset.from_list([{'conversations': TURNS}]).save_to_disk(str(folder / 'table'))
        spoil(folder / 'table')
        return folder / 'table'

    return make


def pipe_for_state(folder: Path) -> None:
    (folder / 'state.json').unlink()
    os.mkfifo(folder / 'state.json')


def cut_arrow(folder: Path) -> None:
    for path in folder.glob('*.arrow'):
        path.write_bytes(path.read_bytes()[:100])


def link(name: str, target: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).symlink_to(folder / target)
        return folder / name

    return make


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name('pipe'))
    path.symlink_to('pipe')


TEXTS: dict[str, tuple[Any, ...]] = {
    # as RECORDS
    # files
    'nothing but NUL bytes': (IMAGE, of_bytes(bytes(100)), 'line 1'),
    'lines that end as on an old Mac': (IMAGE, of_bytes(f'{GOOD}\r{GOOD}'.encode()), 'line 1'),
    'a mark of the byte order in the middle': (IMAGE, of_bytes(f'{GOOD}\n\ufeff{GOOD}'.encode()), 'line 2'),
    'UTF-32': (IMAGE, of_bytes(f'[{GOOD}]'.encode('utf-32')), WORKS),
    'a gzip of a gzip': (IMAGE, of_bytes(gzip.compress(gzip.compress(GOOD.encode()))), 'line 1'),
    'half a gzip': (IMAGE, of_bytes(gzip.compress(os.urandom(9999))[:500]), 'data.json'),
    'JSON with single quotes': (IMAGE, of_text("[{'id':'a'}]"), 'line 1 column 3'),
    'lines that end in commas': (IMAGE, of_text(f'{GOOD},\n{GOOD}'), 'line 1'),
    'a gzip of two members': (
        IMAGE,
        of_bytes(gzip.compress(f'{GOOD}\n'.encode()) + gzip.compress(GOOD.encode())),
        WORKS,
    ),
    'a list of datasets that names itself': (
        IMAGE,
        described({'d': {'file_name': 'dataset_info.json#d'}}),
        'does not exist',
    ),
    'an answer of nothing in a column': (
        IMAGE,
        of_text('[{"id": "a", "instruction": "A?", "output": null}]'),
        "got the keys: ['id', 'instruction']",
    ),
    'a conversation that is a JSON text': (
        IMAGE,
        table([{'id': 'a', 'conversations': json.dumps(TURNS)}]),
        'must be a non-empty list of turns, got: ',
    ),
    'a weight that is a decimal': (
        IMAGE,
        table([{'id': 'a', 'loss_weights': Decimal('1.5'), 'conversations': TURNS}]),
        '`loss_weights`',
    ),
    'two columns of one name': (IMAGE, two_columns, '`path` must be a table'),
    'a folder outside that is allowed by a word': (IMAGE, one(), {'allow_outside': 'no'}, '`allow_outside`'),
    'a CSV': (IMAGE, of_bytes(b'id,question\n1,a\n', 'a.csv'), 'a.csv'),
    'a ZIP': (IMAGE, of_bytes(b'PK\3\4' + bytes(99), 'a.zip'), 'a.zip'),
    'a name longer than a file system takes': (IMAGE, lambda folder: folder / f'{"x" * 300}.json#a', {}, 'too long'),
    'a device': (IMAGE, lambda folder: Path('/dev/zero'), 'no regular file'),
    'a link to nothing as the file': (IMAGE, link('a.json', 'nothing'), 'does not exist'),
    'a parquet that links to itself': (IMAGE, link('a.parquet', 'a.parquet'), 'a.parquet'),
    # tables
    'a pipe in the folder of a table': (IMAGE, saved(pipe_for_state), 'no regular file'),
    'a pipe beside a table': (IMAGE, saved(lambda folder: os.mkfifo(folder / 'x')), 'no regular file'),
    'a cut Arrow file': (IMAGE, saved(cut_arrow), 'must be a table'),
    'a parquet without its footer': (IMAGE, table([{'conversations': TURNS}], cut=4), 'a.parquet'),
    'a parquet of numbers': (IMAGE, table([{'x': 1}]), 'row 0'),
    'a parquet where nobody answers': (
        IMAGE,
        table([{'conversations': [*TURNS[:1], {'from': 'gpt', 'value': None}]}]),
        'row 0',
    ),
    # keys and numbers
    'a key twice in a turn': (
        IMAGE,
        of_text('[{"id":"a","conversations":[{"from":"human","value":"A?"},{"value":"B","from":"gpt","value":"C"}]}]'),
        "'value' stands twice",
    ),
    'a key twice in a line, skipped': (IMAGE, of_text(f'{{"id":"a","id":"b"}}\n{GOOD}'), SKIP, WORKS),
    'an integer of 5,000 digits, skipped': (IMAGE, of_text(f'[{{"id":{NINES}}},{GOOD}]'), SKIP, WORKS),
    'an integer of 5,000 digits in a line': (IMAGE, of_text(f'{{"id":{NINES}}}'), 'line 1'),
    'a weight of 400 digits': (IMAGE, one(loss_weights=10**400), '`loss_weights`'),
    'a weight that float32 takes for 0': (IMAGE, one(loss_weights=1e-300), '`loss_weights`'),
    'an id with codes of a terminal': (IMAGE, one(id='a\x1b[31m\x07', conversations=[]), 'sample "a\\x1b[31m\\x07"'),
    'an id of several lines': (IMAGE, one(id='a\n\r\u2028b', conversations=[]), 'sample "a b"'),
    'an id that is an object': (IMAGE, one(id={'x': [1]}), WORKS),
    # what is said
    'an answer of zero-width spaces': (IMAGE, said('A?', '\u200b\u200b'), 'must say something'),
    'an answer of no parts': (IMAGE, parts(), 'must say something'),
    'a blank answer in the history': (
        IMAGE,
        of_text(json.dumps([{'id': 'a', 'instruction': 'A?', 'output': 'B', 'history': [['C?', ' ']]}])),
        'must say something',
    ),
    'a blank answer that is not learned': (
        IMAGE,
        one(conversations=[*TURNS, {'from': 'human', 'value': 'C?'}, {'from': 'gpt', 'value': '', 'weight': 0}]),
        WORKS,
    ),
    'a blank question': (IMAGE, said('', 'B.'), WORKS),
    'code of a template in an answer': (IMAGE, said('A?', '{{ 7*7 }}{% for %}'), WORKS),
    'markers of ours in an answer': (IMAGE, said('A?', '\ue0000\ue001'), WORKS),
    'an answer that is true': (IMAGE, said('A?', True), 'must be a string'),
    'a hundred thousand tags that nothing closes': (IMAGE, said('<img>' * 100_000, 'B.'), '`</img>` must end'),
    'a tag in a tag': (IMAGE, said('<img>a<img>a.png</img>', 'B.'), '`</img>` must end'),
    'a word of 100,000 letters': (IMAGE, said('A?', 'x' * 100_000), WORKS),
    'a thousand turns': (IMAGE, said(*['A?', 'B.'] * 500), WORKS),
    'a thousand samples of one id': (IMAGE, of_text(f'[{",".join([GOOD] * 1000)}]'), WORKS),
    'a name in capitals': (IMAGE, of_file('image', 'A.PNG', partial(picture, format='PNG')), WORKS),
    'a name with a percent sign': (IMAGE, of_file('image', 'a%20b.png', picture), WORKS),
    'a name with a hash sign': (IMAGE, of_file('image', 'a#b.png', picture), WORKS),
    'a file as the folder of images': (IMAGE, of_file('image', 'a.png', picture), {'image_dir': '/etc/passwd'}, SAMPLE),
    'no folder of images': (IMAGE, of_file('image', 'a.png', picture), {'image_dir': '/nowhere'}, SAMPLE),
    'a longest sample below 0': (IMAGE, one(), {'max_length': -1}, '`max_length`'),
    'a longest sample that is a word': (IMAGE, one(), {'max_length': '2048'}, '`max_length`'),
    # names of media
    'a name with a NUL': (IMAGE, named('a\0.png'), SAMPLE),
    'the folder itself as a picture': (IMAGE, named('.'), SAMPLE),
    'a home folder in a name': (IMAGE, named('~/a.png'), SAMPLE),
    'names as an object': (IMAGE, named({'a.png': 1}), SAMPLE),
    'a device as a picture': (IMAGE, named('/dev/zero'), {'allow_outside': True}, 'no regular file'),
    'the memory of the process as a picture': (IMAGE, named('/proc/self/mem'), {'allow_outside': True}, SAMPLE),
    'a URL that is none': (IMAGE, named('file://['), SAMPLE),
    'base64 of an SVG': (IMAGE, data_uri(b'<svg/>'), 'no image of a known format'),
    'base64 for URLs': (IMAGE, data_uri(b'\xff\xfe\xfb' * 20, base64.urlsafe_b64encode), 'must be base64'),
    'a link to a pipe': (IMAGE, of_file('image', 'a.png', link_to_a_pipe), 'no regular file'),
    'a video of a list in a list': (VIDEO, said('<video>A?', 'B.', videos=[[[]]]), SAMPLE),
}
