# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads records from files and tables: JSON, JSON lines, LLaMA-Factory's dataset_info.json, parquet, and the hub.

A path may end in ``#name``: the name of a dataset in a ``dataset_info.json``, or the split of a table.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_tokacc.arguments import check_kind
from composer_tokacc.cache import fingerprint
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.hub import HUB, ask_hub
from composer_tokacc.data.llama_factory import DatasetEntry
from composer_tokacc.data.media import check_files, check_pyav, regular_file
from composer_tokacc.data.records import (
    BadSampleError,
    EmbeddedFile,
    PathLike,
    RawRecord,
    Record,
    short_repr,
)
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from datasets import Dataset

GZIP_SIGNATURE = b'\x1f\x8b'
BYTES_AT_END = 2**20
"""Bytes at the end of a parquet file that are read to recognize it. In most files they hold all its metadata."""


def read_records(
    paths: PathLike | Sequence[PathLike],
    *,
    image_dir: PathLike | None = None,
    allow_outside: bool = False,
) -> Iterator[Record | BadSampleError]:
    """Yields the records of files. A bad record is yielded as its error, for example if a media file does not exist.

    Does not open media files. Raises ValueError if a file of records cannot be read, or a decoder is missing.

    Args:
        paths: As for :class:`.LlavaDataset`.
        image_dir: Folder to which names of media are relative. None: the folder of the file.
        allow_outside: Whether names may lead out of that folder: ``../``, absolute ones, links.
    """
    for path in _list_paths(paths):
        folder = image_folder(path) if image_dir is None else Path(image_dir)
        for raw_record in read_raw_records(path):
            try:
                record = parse_record(raw_record, folder)
                check_pyav(record)
                check_files(record, allow_outside=allow_outside)
            except BadSampleError as error:
                yield error
            else:
                yield record


def read_texts(paths: PathLike | Sequence[PathLike]) -> Iterator[str]:
    """Yields the text of every turn of files, without placeholders, to train a tokenizer on. Leaves out bad records."""
    for path in _list_paths(paths):
        for raw_record in read_raw_records(path):
            with suppress(BadSampleError):
                yield from parse_record(raw_record).texts


def _list_paths(paths: PathLike | Sequence[PathLike]) -> Sequence[PathLike]:
    """Returns one or several paths as a sequence."""
    if isinstance(paths, str | os.PathLike):
        return [paths]
    check_kind('path', paths, Sequence)
    return paths


def read_raw_records(path: PathLike) -> Iterator[RawRecord]:
    """Yields the entries of a file, a table or a dataset of the hub, in their order.

    A line or an entry that cannot be decoded is yielded too, with the error as its ``data``.
    """
    file, name = _split_name(path)
    if name is not None and not _is_table(file):  # the file is a `dataset_info.json`, and the name that of a dataset
        yield from _read_entry(_find_entry(file, name))
    else:
        yield from _read_file(file, split=name)


def _read_entry(entry: DatasetEntry) -> Iterator[RawRecord]:
    """Yields the entries of a dataset in a ``dataset_info.json``, with the keys that `formats.py` reads."""
    for raw_record in _read_file(entry.path, entry.split):
        data = raw_record.data
        if isinstance(data, Mapping):
            raw_record = raw_record._replace(data=entry.rename(data), unnamed_media=entry.unnamed_media(data))
        yield raw_record


def _read_file(file: str, split: str | None) -> Iterator[RawRecord]:
    """Yields the entries of a table, or of a JSON file, which has no splits."""
    if _is_table(file):
        return _read_table(file, split)
    return _read_json(file)


def image_folder(path: PathLike) -> Path:
    """Returns the default folder of media: the folder of the file, or the current folder for a dataset of the hub."""
    file, _ = _split_name(path)
    if file.startswith(HUB):
        return Path()
    return Path(file).parent


def _split_name(path: PathLike) -> tuple[str, str | None]:
    """Splits ``file#name`` into both. The name is None without a #, or if the whole text is the name of a file."""
    file, mark, name = os.fspath(path).rpartition('#')
    if not mark or os.path.exists(path):
        return os.fspath(path), None
    return file, name


def _is_table(file: str) -> bool:
    """Tells whether the library `datasets` reads it: the hub, a folder, or a parquet file."""
    return file.startswith(HUB) or os.path.isdir(file) or (file.endswith('.parquet') and os.path.isfile(file))


# JSON.


def _read_text(file: str) -> str:
    """Returns the text of a file, unpacked, without byte-order mark.

    Bytes that are not UTF-8 become surrogates. `formats.py` refuses a record with surrogates. So the other records of
    the file can be used.
    """
    try:
        with regular_file(Path(file)).open('rb') as opened:
            if opened.peek(2).startswith(GZIP_SIGNATURE):
                with gzip.open(opened) as unpacked:
                    content = unpacked.read()
            else:
                content = opened.read()
        encoding = json.detect_encoding(content)
        errors = 'surrogateescape' if encoding.startswith('utf-8') else 'strict'
        return content.decode(encoding, errors)
    except FileNotFoundError as error:
        raise InvalidInputError(
            '`path` must be a JSON, JSONL or parquet file, a folder that `datasets` saved, or '
            f'{HUB}owner/name, got: {file[:300]}, which does not exist.'
        ) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise InvalidInputError(f'`path` must be a file that can be read, got: {file[:300]}: {reason}.') from error


def _read_json(file: str) -> Iterator[RawRecord]:
    """Yields the entries of a JSON array, or of JSON lines."""
    text = _read_text(file)
    if text.lstrip().startswith('['):
        yield from _read_array(text, file)
        return
    # Not `splitlines`, because a JSON text may contain its other line breaks, such as U+2028.
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            yield RawRecord(file, f'line {number}', _decode_value(line))


def _read_array(text: str, file: str) -> Iterator[RawRecord]:
    """Reads a JSON array. Its entries are named by their number, because ``json`` does not tell their lines."""
    try:
        entries = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f'`path` must hold one valid JSON array, got: {file}: {error}. Fix it, or write JSON lines: '
            'there one bad line costs one sample.'
        ) from error
    for number, entry in enumerate(entries, start=1):
        yield RawRecord(file, f'entry {number}', entry)


def _decode_value(text: str) -> object:
    """Returns the value of a JSON text, such as a line. If it cannot be decoded, returns the error, see RawRecord."""
    try:
        return DECODER.decode(text)
    except ValueError as error:  # of JSON, or of Python for an integer with thousands of digits
        return error
    except RecursionError:
        return ValueError('brackets within brackets, too deep')


def _decode_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the dict of a JSON object. Raises ValueError if a key stands twice in it: one value would be lost."""
    decoded = dict(pairs)
    if len(decoded) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = max(keys, key=keys.count)
        raise InvalidInputError(
            f'the key {short_repr(repeated_key)} stands twice in {short_repr(decoded, 200)}. Remove one'
        )
    return decoded


DECODER = json.JSONDecoder(object_pairs_hook=_decode_object)


def _find_entry(file: str, name: str) -> DatasetEntry:
    """Returns the entry of a dataset in a ``dataset_info.json``."""
    datasets = _decode_value(_read_text(file))
    if isinstance(datasets, ValueError):
        raise InvalidInputError(f'`path` must name a valid JSON file before the #, got: {file}: {datasets}.')
    if not isinstance(datasets, dict) or not isinstance(datasets.get(name), dict):
        raise InvalidInputError(
            f'`path` must name a dataset of {file} behind the #, got: {name!r}. It has {short_repr(datasets, 300)}.'
        )
    try:
        return DatasetEntry(datasets[name], Path(file).parent)
    except ValueError as error:
        raise InvalidInputError(f'`path` must name a dataset that can be read, got: {file}#{name}: {error}.') from error


# Tables of the library `datasets`.


def _read_table(path: str, split: str | None) -> Iterator[RawRecord]:
    """Yields the rows of a table. Their media stay in the table until they are decoded."""
    table = _open_table(path, split)
    # Here all rows are read, and `table[index]` would decode their images. So the rows are read in Arrow's format, and
    # `_ArrowRow` decodes them by features (types of columns) that leave media as bytes.
    feature_of_column = _without_decoding(table.features)
    features = type(table.features)(feature_of_column)  # of the class `Features`, which can decode rows
    arrow_table = table.with_format('arrow')
    for index in range(len(arrow_table)):
        row = _ArrowRow(arrow_table, features, index)
        yield RawRecord(path, f'row {index}', _replace_bytes(row.decode(), row, ()))


def _open_table(path: str, split: str | None) -> Dataset:
    """Returns a table of `datasets`. ``split`` may be None if the table has no splits, or only one."""
    if importlib.util.find_spec('datasets') is None:
        remedy = "pip install 'composer_tokacc[datasets]'"
        raise InvalidInputError(f'`path` must be JSON, because `datasets` is not installed, got: {path}. {remedy}')
    import datasets.exceptions

    try:
        table = _load_table(path)
    except Exception as error:  # of pyarrow, of `datasets`, or of the network
        cause: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
            cause = error.__cause__  # the outer one says only that there is an error
        message = ' '.join(str(cause).split()) or type(cause).__name__
        reason = message.rstrip('.')[:1000]
        raise InvalidInputError(f'`path` must be a table that `datasets` reads, got: {path}: {reason}.') from cause
    if isinstance(table, datasets.Dataset):
        if split is not None:
            raise InvalidInputError(f'`path` must not name a split, because the table has none, got: {path}#{split}.')
        return table
    if split is None and len(table) == 1:
        return next(iter(table.values()))
    if split not in table:
        raise InvalidInputError(
            f'`path` must name a split of {path} behind a #, one of {list(table)}, got: {split or "none"}.'
        )
    return table[split]


def _load_table(path: str) -> Any:
    """Returns the table of a dataset of the hub, a folder or a parquet file, or its tables by split."""
    import datasets

    if path.startswith(HUB):
        parts = path.removeprefix(HUB).split('/')  # owner, name, and perhaps the subset
        name = '/'.join(parts[:2])
        subset = '/'.join(parts[2:])
        ask_hub(name, 'dataset')
        return datasets.load_dataset(name, subset or None)
    if Path(path).is_dir():
        for file in Path(path).rglob('*'):
            if not file.is_dir():
                regular_file(file)  # raises for a pipe, which would block `datasets`
        return datasets.load_from_disk(path)
    # `datasets` reads a path as a glob pattern, after it has joined a relative path to the current folder. So the path
    # is made absolute first: the names of all its folders must be escaped, too.
    pattern = glob.escape(os.path.abspath(path))
    return datasets.Dataset.from_parquet(pattern, config_name=_name_in_cache(path))


def _name_in_cache(file: str) -> str:
    """Returns the name under which `datasets` keeps the unpacked copy of a parquet file in its cache.

    By itself `datasets` recognizes a file by its path and time. But a file may have been replaced by one of the same
    time: container images and `rsync` keep or set the time. So the name depends on the size and the end of the file,
    too. The end of a parquet file holds the places, sizes, and the least and largest values of all columns.
    """
    with regular_file(Path(file)).open('rb') as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - BYTES_AT_END))
        end = opened.read()
    return f'composer_tokacc-{fingerprint([size, zlib.crc32(end)], length=16)}'


def _without_decoding(feature: Any) -> Any:
    """Returns the type of a column (a feature of `datasets`) that gives images, videos and audio as bytes and paths."""
    if isinstance(feature, dict):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    if hasattr(feature, 'feature'):  # List and LargeList of `datasets`
        return replace(feature, feature=_without_decoding(feature.feature))
    # Image, Audio and Video. `Json` has `decode` too, but it must stay set: its values are kept as JSON texts.
    if hasattr(feature, 'decode') and type(feature).__name__ != 'Json':
        return replace(feature, decode=False)
    return feature


class _ArrowRow(NamedTuple):
    """A row of a table, which is on disk until it is decoded."""

    arrow_table: Any
    """The table, in Arrow's format."""
    features: Any
    """Types of its columns, which leave media as bytes."""
    index: int

    def decode(self) -> dict[str, Any]:
        """Reads the row from the table. Returns the value of each column."""
        (row,) = self.arrow_table[self.index].to_pylist()
        return self.features.decode_example(row)

    def read_value(self, keys: tuple[str | int, ...]) -> Any:
        """Reads the row from the table. Returns the value in it that the keys lead to."""
        value: Any = self.decode()
        for key in keys:
            value = value[key]
        return value


def _replace_bytes(value: object, row: _ArrowRow, keys: tuple[str | int, ...]) -> object:
    """Replaces all bytes in a value of a row by an :class:`.EmbeddedFile`, which reads them from the table again.

    So the content of the files is not held in memory.

    Args:
        value: The decoded row, or a value in it.
        row: The row.
        keys: The keys that lead from the row to the value, such as ``('images', 0, 'bytes')``.
    """
    if isinstance(value, bytes):
        if not value:
            return None  # empty bytes stand for a missing file
        name = '.'.join(map(str, keys))
        return EmbeddedFile(name, zlib.crc32(value), partial(row.read_value, keys))
    if isinstance(value, Mapping):
        return {key: _replace_bytes(inner, row, (*keys, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_bytes(inner, row, (*keys, index)) for index, inner in enumerate(value)]
    return value
