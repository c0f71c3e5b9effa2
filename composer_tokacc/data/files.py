# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files and tables of samples -> raw records: JSON, JSON lines, LLaMA-Factory's list of datasets, parquet, the hub.

A path may end in ``#name``: the dataset of a ``dataset_info.json``, or the split of a table.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.hub import ask_hub
from composer_tokacc.data.media import MediaFolders, check_decoder, regular_file
from composer_tokacc.data.records import BadSampleError, EmbeddedFile, PathLike, RawRecord, Record
from composer_tokacc.planning import check_kind

HUB = 'hf://datasets/'
"""How a dataset of the hub is named: ``hf://datasets/owner/name``, perhaps ``/subset`` behind it."""

# LLaMA-Factory's names of columns -> the keys of a record; those of `SAME` are called alike.
SAME = ('history', 'system', 'tools', 'images', 'videos', 'audios', 'chosen', 'rejected', 'kto_tag')
KEY_OF_COLUMN = {
    **dict(zip(SAME, SAME, strict=True)),
    'prompt': 'instruction',
    'query': 'input',
    'response': 'output',
    'messages': 'conversations',
}
DEFAULT_COLUMNS = {
    'alpaca': {'prompt': 'instruction', 'query': 'input', 'response': 'output'},
    'sharegpt': {'messages': 'conversations'},
    'openai': {'messages': 'messages'},
}
# Its tags, what stands in a file under them where an entry says nothing, and the key or role of a turn.
TAGS = {
    'role_tag': ('from', 'role'),
    'content_tag': ('value', 'content'),
    'user_tag': ('human', 'user'),
    'assistant_tag': ('gpt', 'assistant'),
    'observation_tag': ('observation', 'tool'),
    'function_tag': ('function_call', 'function_call'),
    'system_tag': ('system', 'system'),
}
ENTRY_KEYS = ('file_name', 'hf_hub_url', 'subset', 'split', 'formatting', 'columns', 'tags')
MAX_BYTES = 2**32
"""Of a text in memory, unpacked: a small gzip file may hold more than a machine does."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for name, after in pairwise(names) if name == after)
        raise ValueError(f'the key {twice!r} stands twice in one object. Remove one')
    return found


JSON = json.JSONDecoder(object_pairs_hook=_without_repeats)
LENIENT = json.JSONDecoder(parse_int=float)
"""Finds the end of a record that is none for its content: a repeated key, an integer of thousands of digits."""


def read_records(
    paths: PathLike | Sequence[PathLike], *, image_dir: PathLike | None = None, allow_outside: bool = False
) -> Iterator[tuple[Record, Path] | BadSampleError]:
    """Yields the records of files, each with the folder of its media, which are there; or what is wrong with it.

    Args:
        paths: As for :class:`.LlavaDataset`.
        image_dir: Folder that names of media start from. None: that of the file.
        allow_outside: Whether names may lead out of that folder: ``../``, absolute ones, links.
    """
    folders = MediaFolders(allow_outside=allow_outside)
    for path, raw in _read_all(paths):
        folder = image_folder(path) if image_dir is None else Path(image_dir)
        try:
            record = parse_record(raw)
            check_decoder(record)
            folders.check(record, folder)
        except BadSampleError as error:
            yield error
        else:
            yield record, folder


def read_texts(paths: PathLike | Sequence[PathLike]) -> Iterator[str]:
    """Yields the text of every turn of files, without placeholders; bad records have none."""
    for _, raw in _read_all(paths):
        with suppress(BadSampleError):
            yield from parse_record(raw).texts


def _read_all(paths: PathLike | Sequence[PathLike]) -> Iterator[tuple[PathLike, RawRecord]]:
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    check_kind('path', paths, Sequence)
    for path in paths:
        yield from ((path, raw) for raw in read_raw_records(path))


def read_raw_records(path: PathLike) -> Iterator[RawRecord]:
    """Yields what a file, a table or a dataset of the hub holds, in its order.

    A line that is no JSON is yielded as the error that it raised.
    """
    file, name = _split_name(path)
    if file.startswith(HUB) or os.path.isdir(file) or _is_parquet(file):
        yield from _read_table(file, name)
    elif name is not None:
        yield from _read_described(file, name)
    else:
        yield from _read_json(file)


def image_folder(path: PathLike) -> Path:
    """Returns the folder that image names start from where none is given: that of the file."""
    file, _ = _split_name(path)
    return Path() if file.startswith(HUB) else Path(file).parent


def _split_name(path: PathLike) -> tuple[str, str | None]:
    file, mark, name = os.fspath(path).rpartition('#')
    return (file, name) if mark and not os.path.exists(path) else (os.fspath(path), None)


def _is_parquet(file: str) -> bool:
    try:
        with regular_file(Path(file)).open('rb') as opened:
            return file.endswith('.parquet') or opened.read(4) == b'PAR1'
    except (OSError, ValueError):  # whoever reads it says why not
        return False


def _read_text(file: str) -> str:
    """Returns the text of a file, unpacked, without byte-order mark.

    Bytes that are no UTF-8 become surrogates, for which the record that holds them is refused later, by name.
    """
    try:
        with regular_file(Path(file)).open('rb') as opened:
            is_packed = opened.peek(2).startswith(b'\x1f\x8b')
            with gzip.open(opened) if is_packed else opened as unpacked:
                data = unpacked.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f'it holds more than {MAX_BYTES} bytes. Cut it into several files, or make it a parquet')
        encoding = json.detect_encoding(data)
        return data.decode(encoding, 'surrogateescape' if encoding.startswith('utf-8') else 'strict')
    except FileNotFoundError as error:
        known = f'a JSON, JSONL or parquet file, a folder that `datasets` saved, or {HUB}owner/name'
        raise ValueError(f'`path` must be {known}, got: {file}, which does not exist.') from error
    except UnicodeDecodeError as error:
        found = f'{file} with a wrong byte at line {error.object[: error.start].count(10) + 1}'
        raise ValueError(f'`path` must be UTF-8, or UTF-16 throughout, got: {found}.') from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f'`path` must be a file that can be read, got: {file}: {error}.') from error


def _read_json(file: str) -> Iterator[RawRecord]:
    text = _read_text(file)
    start = text.lstrip()[:1]
    if start == '[':
        yield from _read_array(text, file)
        return
    if start == '{' and (keys := _keys_of_object(text)) is not None:
        found = f'{file} with one object of the keys {", ".join(keys)[:200]}'
        remedy = f'For a dataset_info.json add the name of a dataset: {file}#name'
        raise ValueError(f'`path` must be a JSON array or JSON lines, got: {found}. {remedy}.')
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            yield RawRecord(file, f'line {number}', _loaded(line))


def _loaded(line: str) -> Any:
    try:
        return JSON.decode(line)
    except json.JSONDecodeError as error:
        return ValueError(f'{error.msg} at column {error.colno}')
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError('brackets within brackets, too deep')


def _keys_of_object(text: str) -> list[str] | None:
    """Returns the keys where the text is one object over several lines rather than JSON lines."""
    if not isinstance(_loaded(text.lstrip().partition('\n')[0]), ValueError):
        return None
    whole = _loaded(text)
    return list(whole) if isinstance(whole, dict) else None


def _read_array(text: str, file: str) -> Iterator[RawRecord]:
    """Reads one object after the other, because ``json.loads`` would not tell on which line each begins.

    Entries of the same line are told apart by their number.
    """
    separator = re.compile(r'[\s,]*')
    has_lines = '\n' in text.strip()
    position, line, counted, number, last_line = text.index('[') + 1, 1, 0, 0, 0
    while True:
        position = separator.match(text, position).end()  # type: ignore[union-attr]
        line, counted = line + text.count('\n', counted, position), position
        if text.startswith(']', position):
            break
        number += 1
        try:
            record, position = _decoded(text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            at = (error.lineno, error.colno, error.msg) if isinstance(error, json.JSONDecodeError) else (line, 1, error)
            found = f'{file} with a syntax error at line {at[0]}, column {at[1]} (entry {number}: {at[2]})'
            remedy = 'Fix it, or write JSON lines: there one bad line costs one sample'
            raise ValueError(f'`path` must be a valid JSON file, got: {found}. {remedy}.') from error
        yield RawRecord(file, f'line {line}' if has_lines and line != last_line else f'entry {number}', record)
        last_line = line
    if rest := text[position + 1 :].lstrip():
        line = text.count('\n', 0, len(text) - len(rest)) + 1
        found = f'{file} with {rest.rstrip()[:20]!r} behind its end, at line {line}'
        remedy = 'Join the arrays, or name each file by itself'
        raise ValueError(f'`path` must hold one JSON array, got: {found}. {remedy}.')


def _decoded(text: str, position: int) -> tuple[Any, int]:
    """Returns a record, or what is wrong with its content alone, and where it ends."""
    try:
        return JSON.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return error, LENIENT.raw_decode(text, position)[1]


def _read_described(file: str, name: str) -> Iterator[RawRecord]:
    """Yields records of an entry of LLaMA-Factory's ``dataset_info.json``, with the keys that this package knows.

    As there, a column that the entry does not name is not read.
    """
    described = _loaded(_read_text(file))
    if not isinstance(described, dict) or not isinstance(described.get(name), dict):
        names = ', '.join(described) if isinstance(described, dict) else 'no JSON object'
        raise ValueError(f'`path` must name a dataset of {file} behind the #, got: {name!r}, of: {names}.')
    entry = described[name]
    try:
        path, columns, tags = _check_entry(entry, Path(file).parent)
    except ValueError as error:
        raise ValueError(f'`path` must name a dataset that can be read, got: {file}#{name}: {error}.') from error
    for raw in read_raw_records(path):
        yield raw._replace(data=_renamed(raw.data, columns, tags)) if isinstance(raw.data, Mapping) else raw


def _check_entry(entry: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """Returns path, columns and tags of a dataset."""
    for key in ENTRY_KEYS:
        value = entry.get(key)
        if key not in ('columns', 'tags'):
            if not isinstance(value, str | None):
                raise ValueError(f'`{key}` must be a string, got: {value!r}')
        elif value and not (isinstance(value, dict) and all(isinstance(name, str | None) for name in value.values())):
            raise ValueError(f'`{key}` must map names to names, got: {value!r}')
    formatting = entry.get('formatting') or 'alpaca'
    if formatting not in DEFAULT_COLUMNS:
        raise ValueError(f'`formatting` must be one of {list(DEFAULT_COLUMNS)}, got: {formatting!r}')
    columns = {**DEFAULT_COLUMNS[formatting], **(entry.get('columns') or {})}
    tags = {**{tag: default for tag, (default, _) in TAGS.items()}, **(entry.get('tags') or {})}
    unknown = [key for key, value in entry.items() if key not in ENTRY_KEYS and value]  # `ranking: false` says nothing
    unknown += [*(columns.keys() - KEY_OF_COLUMN.keys()), *(tags.keys() - TAGS.keys())]
    if unknown:
        raise ValueError(f'`{unknown[0]}` is not supported')
    if entry.get('hf_hub_url'):
        path = HUB + '/'.join(filter(None, (entry['hf_hub_url'], entry.get('subset'))))
        return f'{path}#{entry.get("split") or "train"}', columns, tags
    if not entry.get('file_name'):
        raise ValueError('`file_name` or `hf_hub_url` must be given')
    path = str(folder / entry['file_name'])
    if _split_name(path)[1] is not None:  # it could be this entry again, without end
        raise ValueError(f'`file_name` must be the name of a file, got: {entry["file_name"]!r}')
    return path, columns, tags


def _renamed(data: Mapping[str, Any], columns: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, Any]:
    record = {KEY_OF_COLUMN[ours]: data[theirs] for ours, theirs in columns.items() if theirs in data}
    record |= {key: data.get(key) for key in ('id', 'loss_weights')}
    turns = record.get('conversations')
    if isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
        keys, roles = ({tags[tag]: TAGS[tag][1] for tag in some} for some in (list(TAGS)[:2], list(TAGS)[2:]))
        record['conversations'] = turns = [{keys.get(key, key): turn[key] for key in turn} for turn in turns]
        for turn in turns:
            if isinstance(role := turn.get('role'), str):
                turn['role'] = roles.get(role, role)
    return record


def _read_table(path: str, split: str | None) -> Iterator[RawRecord]:
    """Yields rows of a table, whose media stay where they are until they are decoded."""
    table = _open_table(path, split)
    features = type(table.features)(_undecoded(dict(table.features)))
    # Arrow's own values: `datasets` would decode every image.
    arrow = table.with_format('arrow')
    cell = partial(_cell, arrow, features)
    for index in range(len(arrow)):
        yield RawRecord(path, f'row {index}', _embed(cell(index), partial(cell, index), ()))


def _open_table(path: str, split: str | None) -> Any:
    if importlib.util.find_spec('datasets') is None:
        remedy = "pip install 'composer_tokacc[datasets]'"
        raise ValueError(f'`path` must be JSON or JSONL where `datasets` is not installed, got: {path}. {remedy}')
    import datasets.exceptions
    import pyarrow.parquet

    try:
        if path.startswith(HUB):
            parts = path.removeprefix(HUB).split('/')
            ask_hub('/'.join(parts[:2]), 'dataset')
            found: Any = datasets.load_dataset('/'.join(parts[:2]), '/'.join(parts[2:]) or None)
        elif Path(path).is_dir():
            for file in Path(path).rglob('*'):
                if not file.is_dir():
                    regular_file(file)
            found = datasets.load_from_disk(path)
        else:
            # `datasets` reads as many rows at a time as the first row group has, which may be none.
            has_rows = pyarrow.parquet.read_metadata(path).num_rows > 0
            found = datasets.Dataset.from_parquet(path) if has_rows else datasets.Dataset.from_dict({})
    except Exception as error:  # of pyarrow, of `datasets`, of the network
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # which says no more than that there is one
            error = error.__cause__ or error
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise ValueError(f'`path` must be a table that `datasets` reads, got: {path}: {reason.rstrip(".")}.') from error
    if isinstance(found, datasets.Dataset):
        if split is not None:
            raise ValueError(f'`path` must not name a split of a table without, got: {path}#{split}.')
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise ValueError(f'`path` must name a split, {path}#one of {list(found)}, got: {split or "none"}.')
    return found[split]


def _undecoded(feature: Any) -> Any:
    """Returns the same feature with images, videos and audios as bytes and paths."""
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(inner) for inner in feature]
    if hasattr(feature, 'feature'):  # List, LargeList and Sequence of `datasets`
        return replace(feature, feature=_undecoded(feature.feature))
    if hasattr(feature, 'decode') and type(feature).__name__ != 'Json':  # Image, Audio, Video
        return replace(feature, decode=False)
    return feature


def _cell(arrow: Any, features: Any, index: int, keys: tuple[str | int, ...] = ()) -> Any:
    """Returns what stands in a row of a table behind the given keys."""
    value = features.decode_example(arrow[index].to_pylist()[0])
    for key in keys:
        value = value[key]
    return value


def _embed(value: Any, read: Any, keys: tuple[str | int, ...]) -> Any:
    """Returns the value with every piece of bytes replaced by a file that is read when it is needed."""
    if isinstance(value, bytes):
        return EmbeddedFile('.'.join(map(str, keys)), zlib.crc32(value), partial(read, keys)) if value else None
    if isinstance(value, Mapping):
        return {key: _embed(inner, read, (*keys, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_embed(inner, read, (*keys, index)) for index, inner in enumerate(value)]
    return value
