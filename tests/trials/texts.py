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

QUESTION, ANSWER = turns('A?', 'B.')
TURNS = [QUESTION, ANSWER]
GOOD = json.dumps({'id': 'good', 'conversations': TURNS})
NINES = '9' * 5000


# Files of data.


def of_lines(*lines: str, ends: str = '\n') -> Make:
    """Makes a data file of these lines, in UTF-8."""
    text = ends.join(lines)
    return of_bytes(text.encode())


def of_gzip(*members: bytes) -> Make:
    """Makes a data file of compressed members, one after the other."""
    compressed = [gzip.compress(member) for member in members]
    return of_bytes(b''.join(compressed))


def of_half_a_gzip() -> Make:
    compressed = gzip.compress(os.urandom(9999))
    return of_bytes(compressed[:500])


def of_entry(**entries: Any) -> Make:
    """Makes one record with the id ``a`` and these entries."""
    record = {'id': 'a', **entries}
    return of_text(json.dumps([record]))


def of_sample(**entries: Any) -> Make:
    """Makes one record of a short conversation, with further or other entries."""
    return of_entry(**{'conversations': TURNS, **entries})


def info_that_names_itself(folder: Path) -> Path:
    """A ``dataset_info.json`` of LLaMA-Factory."""
    path = folder / 'dataset_info.json'
    path.write_text('{"d": {"file_name": "dataset_info.json#d"}}')
    return folder / 'dataset_info.json#d'


def of_link(name: str, target: str) -> Make:
    def make(folder: Path) -> Path:
        link = folder / name
        link.symlink_to(folder / target)
        return link

    return make


def file_with_a_long_name(folder: Path) -> Path:
    name = 'x' * 300
    return folder / f'{name}.json#a'


def device_as_file(folder: Path) -> Path:
    return Path('/dev/zero')


FILES: dict[str, Reading] = {
    'a file of NUL bytes': Reading(of_bytes(bytes(100)), 'line 1'),
    'lines that end in carriage returns': Reading(of_lines(GOOD, GOOD, ends='\r'), 'line 1'),
    'a byte order mark in the middle': Reading(of_lines(GOOD, f'\ufeff{GOOD}'), 'line 2'),
    'UTF-32': Reading(of_bytes(f'[{GOOD}]'.encode('utf-32')), WORKS),
    'a gzip of a gzip': Reading(of_gzip(gzip.compress(GOOD.encode())), 'line 1'),
    'half a gzip': Reading(of_half_a_gzip(), 'data.json'),
    'a gzip of two members': Reading(of_gzip(f'{GOOD}\n'.encode(), GOOD.encode()), WORKS),
    'JSON with single quotes': Reading(of_text("[{'id':'a'}]"), 'line 1 column 3'),
    'lines that end in commas': Reading(of_lines(GOOD, GOOD, ends=',\n'), 'line 1'),
    'a dataset_info.json that names itself': Reading(info_that_names_itself, 'does not exist'),
    'a column whose answer is null': Reading(
        of_entry(instruction='A?', output=None),
        "got the keys: ['id', 'instruction']",
    ),
    'an allow_outside of "no"': Reading(of_sample(), '`allow_outside`', options={'allow_outside': 'no'}),
    'a max_length that is a text': Reading(of_sample(), '`max_length`', options={'max_length': '2048'}),
    'a CSV': Reading(of_bytes(b'id,question\n1,a\n', 'a.csv'), 'a.csv'),
    'a name too long for a file system': Reading(file_with_a_long_name, 'too long'),
    'a device': Reading(device_as_file, 'no regular file'),
    'a link to nothing as the file': Reading(of_link('a.json', 'nothing'), 'does not exist'),
    'a parquet that links to itself': Reading(of_link('a.parquet', 'a.parquet'), 'a.parquet'),
}


# Tables.


def write_parquet(folder: Path, table: pyarrow.Table) -> Path:
    path = folder / 'a.parquet'
    pyarrow.parquet.write_table(table, path)
    return path


def of_row(**row: Any) -> Make:
    """Makes a Parquet file of one row."""

    def make(folder: Path) -> Path:
        table = pyarrow.Table.from_pylist([row])
        return write_parquet(folder, table)

    return make


def parquet_without_its_footer(folder: Path) -> Path:
    make = of_row(conversations=TURNS)
    path = make(folder)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    return path


def two_columns_of_one_name(folder: Path) -> Path:
    question = pyarrow.array(['A?'])
    answer = pyarrow.array(['B.'])
    another_answer = pyarrow.array(['C.'])
    table = pyarrow.Table.from_arrays(
        [question, answer, another_answer],
        names=['instruction', 'output', 'output'],
    )
    return write_parquet(folder, table)


def of_saved_table(damage: Callable[[Path], Any]) -> Make:
    """Makes a folder as ``save_to_disk`` writes it, and damages it."""

    def make(folder: Path) -> Path:
        path = folder / 'table'
        dataset = datasets.Dataset.from_list([{'conversations': TURNS}])
        dataset.save_to_disk(str(path))
        damage(path)
        return path

    return make


def pipe_for_state(folder: Path) -> None:
    path = folder / 'state.json'
    path.unlink()
    os.mkfifo(path)


def cut_arrow(folder: Path) -> None:
    for path in folder.glob('*.arrow'):
        content = path.read_bytes()
        path.write_bytes(content[:100])


NULL_ANSWER = {'from': 'gpt', 'value': None}
TABLES: dict[str, Reading] = {
    'a pipe in the folder of a table': Reading(of_saved_table(pipe_for_state), 'no regular file'),
    'a cut Arrow file': Reading(of_saved_table(cut_arrow), 'must be a table'),
    'a parquet without its footer': Reading(parquet_without_its_footer, 'a.parquet'),
    'two columns of one name': Reading(two_columns_of_one_name, '`path` must be a table'),
    'a parquet of numbers': Reading(of_row(x=1), 'row 0'),
    'a parquet with an answer of null': Reading(of_row(conversations=[QUESTION, NULL_ANSWER]), 'row 0'),
    'a conversation that is a JSON text': Reading(
        of_row(id='a', conversations=json.dumps(TURNS)),
        'must be a non-empty list of turns, got: ',
    ),
    'a weight that is a decimal': Reading(
        of_row(id='a', loss_weights=Decimal('1.5'), conversations=TURNS),
        '`loss_weights`',
    ),
}


# Keys, numbers and texts of records.


def of_turns(*texts: str, **entries: Any) -> Make:
    """Makes a record of a conversation. Question and answer alternate."""
    return of_sample(conversations=turns(*texts), **entries)


LARGE_ID = f'{{"id":{NINES}}}'
"""A record whose id has 5,000 digits."""
TWO_IDS = '{"id":"a","id":"b"}'
TWO_VALUES = '[{"id":"a","conversations":[{"from":"human","value":"A?"},{"value":"B","from":"gpt","value":"C"}]}]'
MANY_SAMPLES = ','.join([GOOD] * 1000)
KEYS_AND_NUMBERS: dict[str, Reading] = {
    'a key twice in a turn': Reading(of_text(TWO_VALUES), "'value' stands twice"),
    'a key twice in a line, skipped': Reading(of_lines(TWO_IDS, GOOD), WORKS, options=SKIP),
    'an integer of 5,000 digits in an array': Reading(of_text(f'[{LARGE_ID},{GOOD}]'), 'one valid JSON array'),
    'an integer of 5,000 digits in a line': Reading(of_text(LARGE_ID), 'line 1'),
    'a weight of 400 digits': Reading(of_sample(loss_weights=10**400), '`loss_weights`'),
    'a weight that is 0 in float32': Reading(of_sample(loss_weights=1e-300), '`loss_weights`'),
    'an id with control codes': Reading(of_sample(id='a\x1b[31m\x07', conversations=[]), 'sample "a\\x1b[31m\\x07"'),
    'an id of several lines': Reading(of_sample(id='a\n\r\u2028b', conversations=[]), 'sample "a b"'),
    'an id that is an object': Reading(of_sample(id={'x': [1]}), WORKS),
    '1,000 samples with the same id': Reading(of_text(f'[{MANY_SAMPLES}]'), WORKS),
}

SECOND_QUESTION = {'from': 'human', 'value': 'C?'}
BLANK_ANSWER_OF_NO_WEIGHT = {'from': 'gpt', 'value': '', 'weight': 0}
MESSAGES_WITHOUT_PARTS = [
    {'role': 'user', 'content': 'A?'},
    {'role': 'assistant', 'content': []},
]
MANY_TURNS = ['A?', 'B.'] * 500
CONVERSATIONS: dict[str, Reading] = {
    'an answer of zero-width spaces': Reading(of_turns('A?', '\u200b\u200b'), 'must say something'),
    'an answer without parts': Reading(of_entry(messages=MESSAGES_WITHOUT_PARTS), 'must say something'),
    'a blank answer in the history': Reading(
        of_entry(instruction='A?', output='B', history=[['C?', ' ']]),
        'must say something',
    ),
    'a blank answer that is not learned': Reading(
        of_sample(conversations=[*TURNS, SECOND_QUESTION, BLANK_ANSWER_OF_NO_WEIGHT]),
        WORKS,
    ),
    'a blank question': Reading(of_turns('', 'B.'), WORKS),
    'code of a template in an answer': Reading(of_turns('A?', '{{ 7*7 }}{% for %}'), WORKS),
    'markers of ours in an answer': Reading(of_turns('A?', '\ue0000\ue001'), WORKS),
    '100,000 tags that are not closed': Reading(of_turns('<img>' * 100_000, 'B.'), '`</img>` must end'),
    'a tag in a tag': Reading(of_turns('<img>a<img>a.png</img>', 'B.'), '`</img>` must end'),
    'a word of 100,000 letters': Reading(of_turns('A?', 'x' * 100_000), WORKS),
    '1,000 turns': Reading(of_turns(*MANY_TURNS), WORKS),
    'a list in a list as a video': Reading(of_turns('<video>A?', 'B.', videos=[[[]]]), SAMPLE, processor=VIDEO),
}


# Names of media.


def of_image_name(name: Any) -> Make:
    """Makes a record that names an image, in a folder with ``a.png``."""
    make_record = of_turns('<image>A?', 'B.', image=name)

    def make(folder: Path) -> str:
        picture(folder / 'a.png')
        return make_record(folder)

    return make


def of_data_uri(content: bytes, encode: Callable[[bytes], bytes] = base64.b64encode) -> Make:
    text = encode(content).decode()
    return of_image_name(f'data:image/png;base64,{text}')


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name('pipe'))
    path.symlink_to('pipe')


OUTSIDE = {'allow_outside': True}
IN_A_FILE = {'image_dir': '/etc/passwd'}
NAMES_OF_MEDIA: dict[str, Reading] = {
    'a name in capitals': of_image('A.PNG', partial(picture, format='PNG'), WORKS),
    'a name with a percent sign': of_image('a%20b.png', picture, WORKS),
    'a name with a hash sign': of_image('a#b.png', picture, WORKS),
    'a file as the folder of images': of_image('a.png', picture, SAMPLE, options=IN_A_FILE),
    'a name with a NUL': Reading(of_image_name('a\0.png'), SAMPLE),
    'the folder itself as a picture': Reading(of_image_name('.'), SAMPLE),
    'a home folder in a name': Reading(of_image_name('~/a.png'), SAMPLE),
    'names as an object': Reading(of_image_name({'a.png': 1}), SAMPLE),
    'a device as a picture': Reading(of_image_name('/dev/zero'), 'no regular file', options=OUTSIDE),
    'the memory of the process as a picture': Reading(of_image_name('/proc/self/mem'), SAMPLE, options=OUTSIDE),
    'an invalid URL': Reading(of_image_name('file://['), SAMPLE),
    'base64 of an SVG': Reading(of_data_uri(b'<svg/>'), 'no image of a known format'),
    'base64 for URLs': Reading(of_data_uri(b'\xff\xfe\xfb' * 20, base64.urlsafe_b64encode), 'must be base64'),
    'a link to a pipe': of_image('a.png', link_to_a_pipe, 'no regular file'),
}

TEXTS = {**FILES, **TABLES, **KEYS_AND_NUMBERS, **CONVERSATIONS, **NAMES_OF_MEDIA}
