# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Unusual data files and tables, and unusual texts, numbers and names in their records."""

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

import datasets
import pyarrow
import pyarrow.parquet

from tests.support.conversations import turns
from tests.trials.outcomes import WORKS
from tests.trials.records import SAMPLE, SKIP, VIDEO, Make, Reading, of_bytes, of_image, of_text, picture

TURNS = turns('A?', 'B.')
GOOD = json.dumps({'id': 'good', 'conversations': TURNS})
NINES = '9' * 5000


def of_sample(**entries: Any) -> Make:
    """Makes one record of a short conversation, with further or other entries."""
    return of_text(json.dumps([{'id': 'a', 'conversations': TURNS, **entries}]))


def of_turns(*texts: str, **entries: Any) -> Make:
    """Makes a record of a conversation. Question and answer alternate."""
    return of_sample(conversations=turns(*texts), **entries)


def of_image_name(name: Any) -> Make:
    """Makes a record that names an image, in a folder with ``a.png``."""

    def make(folder: Path) -> str:
        picture(folder / 'a.png')
        return of_turns('<image>A?', 'B.', image=name)(folder)

    return make


def of_data_uri(content: bytes, encode: Callable[[bytes], bytes] = base64.b64encode) -> Make:
    return of_image_name(f'data:image/png;base64,{encode(content).decode()}')


def answer_without_parts(folder: Path) -> list[dict[str, Any]]:
    messages = [{'role': 'user', 'content': 'A?'}, {'role': 'assistant', 'content': []}]
    return [{'id': 'a', 'messages': messages}]


def of_parquet(row: dict[str, Any]) -> Make:
    def make(folder: Path) -> Path:
        table = pyarrow.Table.from_pylist([row])
        pyarrow.parquet.write_table(table, folder / 'a.parquet')
        return folder / 'a.parquet'

    return make


def parquet_without_its_footer(folder: Path) -> Path:
    path = of_parquet({'conversations': TURNS})(folder)
    path.write_bytes(path.read_bytes()[:-4])
    return path


def two_columns_of_one_name(folder: Path) -> Path:
    columns = [pyarrow.array([text]) for text in ('A?', 'B.', 'C.')]
    table = pyarrow.Table.from_arrays(columns, names=['instruction', 'output', 'output'])
    pyarrow.parquet.write_table(table, folder / 'a.parquet')
    return folder / 'a.parquet'


def info_that_names_itself(folder: Path) -> Path:
    """A ``dataset_info.json`` of LLaMA-Factory."""
    (folder / 'dataset_info.json').write_text('{"d": {"file_name": "dataset_info.json#d"}}')
    return folder / 'dataset_info.json#d'


def of_saved_table(damage: Callable[[Path], Any]) -> Make:
    """Makes a folder as ``save_to_disk`` writes it, and damages it."""

    def make(folder: Path) -> Path:
        datasets.Dataset.from_list([{'conversations': TURNS}]).save_to_disk(str(folder / 'table'))
        damage(folder / 'table')
        return folder / 'table'

    return make


def pipe_for_state(folder: Path) -> None:
    (folder / 'state.json').unlink()
    os.mkfifo(folder / 'state.json')


def cut_arrow(folder: Path) -> None:
    for path in folder.glob('*.arrow'):
        path.write_bytes(path.read_bytes()[:100])


def of_link(name: str, target: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).symlink_to(folder / target)
        return folder / name

    return make


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name('pipe'))
    path.symlink_to('pipe')


TEXTS: dict[str, Reading] = {
    # files
    'a file of NUL bytes': Reading(of_bytes(bytes(100)), 'line 1'),
    'lines that end in carriage returns': Reading(of_bytes(f'{GOOD}\r{GOOD}'.encode()), 'line 1'),
    'a byte order mark in the middle': Reading(of_bytes(f'{GOOD}\n\ufeff{GOOD}'.encode()), 'line 2'),
    'UTF-32': Reading(of_bytes(f'[{GOOD}]'.encode('utf-32')), WORKS),
    'a gzip of a gzip': Reading(of_bytes(gzip.compress(gzip.compress(GOOD.encode()))), 'line 1'),
    'half a gzip': Reading(of_bytes(gzip.compress(os.urandom(9999))[:500]), 'data.json'),
    'JSON with single quotes': Reading(of_text("[{'id':'a'}]"), 'line 1 column 3'),
    'lines that end in commas': Reading(of_text(f'{GOOD},\n{GOOD}'), 'line 1'),
    'a gzip of two members': Reading(
        of_bytes(gzip.compress(f'{GOOD}\n'.encode()) + gzip.compress(GOOD.encode())), WORKS
    ),
    'a dataset_info.json that names itself': Reading(info_that_names_itself, 'does not exist'),
    'a column whose answer is null': Reading(
        of_text('[{"id": "a", "instruction": "A?", "output": null}]'), "got the keys: ['id', 'instruction']"
    ),
    'a conversation that is a JSON text': Reading(
        of_parquet({'id': 'a', 'conversations': json.dumps(TURNS)}), 'must be a non-empty list of turns, got: '
    ),
    'a weight that is a decimal': Reading(
        of_parquet({'id': 'a', 'loss_weights': Decimal('1.5'), 'conversations': TURNS}), '`loss_weights`'
    ),
    'two columns of one name': Reading(two_columns_of_one_name, '`path` must be a table'),
    'an allow_outside of "no"': Reading(of_sample(), '`allow_outside`', options={'allow_outside': 'no'}),
    'a CSV': Reading(of_bytes(b'id,question\n1,a\n', 'a.csv'), 'a.csv'),
    'a name too long for a file system': Reading(lambda folder: folder / f'{"x" * 300}.json#a', 'too long'),
    'a device': Reading(lambda folder: Path('/dev/zero'), 'no regular file'),
    'a link to nothing as the file': Reading(of_link('a.json', 'nothing'), 'does not exist'),
    'a parquet that links to itself': Reading(of_link('a.parquet', 'a.parquet'), 'a.parquet'),
    # tables
    'a pipe in the folder of a table': Reading(of_saved_table(pipe_for_state), 'no regular file'),
    'a cut Arrow file': Reading(of_saved_table(cut_arrow), 'must be a table'),
    'a parquet without its footer': Reading(parquet_without_its_footer, 'a.parquet'),
    'a parquet of numbers': Reading(of_parquet({'x': 1}), 'row 0'),
    'a parquet with an answer of null': Reading(
        of_parquet({'conversations': [*TURNS[:1], {'from': 'gpt', 'value': None}]}), 'row 0'
    ),
    # keys and numbers
    'a key twice in a turn': Reading(
        of_text('[{"id":"a","conversations":[{"from":"human","value":"A?"},{"value":"B","from":"gpt","value":"C"}]}]'),
        "'value' stands twice",
    ),
    'a key twice in a line, skipped': Reading(of_text(f'{{"id":"a","id":"b"}}\n{GOOD}'), WORKS, options=SKIP),
    'an integer of 5,000 digits in an array': Reading(of_text(f'[{{"id":{NINES}}},{GOOD}]'), 'one valid JSON array'),
    'an integer of 5,000 digits in a line': Reading(of_text(f'{{"id":{NINES}}}'), 'line 1'),
    'a weight of 400 digits': Reading(of_sample(loss_weights=10**400), '`loss_weights`'),
    'a weight that is 0 in float32': Reading(of_sample(loss_weights=1e-300), '`loss_weights`'),
    'an id with control codes': Reading(of_sample(id='a\x1b[31m\x07', conversations=[]), 'sample "a\\x1b[31m\\x07"'),
    'an id of several lines': Reading(of_sample(id='a\n\r\u2028b', conversations=[]), 'sample "a b"'),
    'an id that is an object': Reading(of_sample(id={'x': [1]}), WORKS),
    # texts
    'an answer of zero-width spaces': Reading(of_turns('A?', '\u200b\u200b'), 'must say something'),
    'an answer without parts': Reading(answer_without_parts, 'must say something'),
    'a blank answer in the history': Reading(
        of_text(json.dumps([{'id': 'a', 'instruction': 'A?', 'output': 'B', 'history': [['C?', ' ']]}])),
        'must say something',
    ),
    'a blank answer that is not learned': Reading(
        of_sample(conversations=[*TURNS, {'from': 'human', 'value': 'C?'}, {'from': 'gpt', 'value': '', 'weight': 0}]),
        WORKS,
    ),
    'a blank question': Reading(of_turns('', 'B.'), WORKS),
    'code of a template in an answer': Reading(of_turns('A?', '{{ 7*7 }}{% for %}'), WORKS),
    'markers of ours in an answer': Reading(of_turns('A?', '\ue0000\ue001'), WORKS),
    '100,000 tags that are not closed': Reading(of_turns('<img>' * 100_000, 'B.'), '`</img>` must end'),
    'a tag in a tag': Reading(of_turns('<img>a<img>a.png</img>', 'B.'), '`</img>` must end'),
    'a word of 100,000 letters': Reading(of_turns('A?', 'x' * 100_000), WORKS),
    '1,000 turns': Reading(of_turns(*['A?', 'B.'] * 500), WORKS),
    '1,000 samples with the same id': Reading(of_text(f'[{",".join([GOOD] * 1000)}]'), WORKS),
    'a name in capitals': of_image('A.PNG', partial(picture, format='PNG'), WORKS),
    'a name with a percent sign': of_image('a%20b.png', picture, WORKS),
    'a name with a hash sign': of_image('a#b.png', picture, WORKS),
    'a file as the folder of images': of_image('a.png', picture, SAMPLE, options={'image_dir': '/etc/passwd'}),
    'a max_length that is a text': Reading(of_sample(), '`max_length`', options={'max_length': '2048'}),
    # names of media
    'a name with a NUL': Reading(of_image_name('a\0.png'), SAMPLE),
    'the folder itself as a picture': Reading(of_image_name('.'), SAMPLE),
    'a home folder in a name': Reading(of_image_name('~/a.png'), SAMPLE),
    'names as an object': Reading(of_image_name({'a.png': 1}), SAMPLE),
    'a device as a picture': Reading(of_image_name('/dev/zero'), 'no regular file', options={'allow_outside': True}),
    'the memory of the process as a picture': Reading(
        of_image_name('/proc/self/mem'), SAMPLE, options={'allow_outside': True}
    ),
    'an invalid URL': Reading(of_image_name('file://['), SAMPLE),
    'base64 of an SVG': Reading(of_data_uri(b'<svg/>'), 'no image of a known format'),
    'base64 for URLs': Reading(of_data_uri(b'\xff\xfe\xfb' * 20, base64.urlsafe_b64encode), 'must be base64'),
    'a link to a pipe': of_image('a.png', link_to_a_pipe, 'no regular file'),
    'a list in a list as a video': Reading(of_turns('<video>A?', 'B.', videos=[[[]]]), SAMPLE, processor=VIDEO),
}
