# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes conversations and their media as MDS shards, which mosaicml-streaming reads.

python -m composer_tokacc.data.to_mds data.json images out_folder [--size-limit 64mb] [--on-error raise|skip]
[--allow-outside]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from composer_tokacc.arguments import check_choice
from composer_tokacc.data.files import read_records
from composer_tokacc.data.media import decode_media, open_files
from composer_tokacc.data.records import (
    BadSampleError,
    JsonObject,
    Medium,
    Record,
    Turn,
    is_from_file,
)
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

SHARD_COLUMNS = {'media': 'bytes', 'record': 'json'}
"""Columns of a shard and their MDS encodings. ``media`` holds the joined files of a record, ``record`` the rest."""
SAMPLES_AT_ONCE = 256
"""Samples that threads read together. They are held in memory until they are written."""

ShardRow = dict[str, Any]
"""A row of a shard: its value in each column of :data:`SHARD_COLUMNS`."""


class Written(NamedTuple):
    """What :func:`write_shards` has written."""

    num_samples: int
    num_shards: int
    num_bytes: int
    """Size of all shards."""
    skipped: tuple[str, ...]
    """For each bad sample that was left out, the reason."""


def write_shards(
    path: str | Path,
    image_dir: str | Path,
    out: str | Path,
    *,
    size_limit: int | str = '64mb',
    on_error: str = 'raise',
    allow_outside: bool = False,
) -> Written:
    """Writes every record of a file with the bytes of its media, in the order of the file.

    Media are decoded once as a check, and written as they are. No lengths of samples are written, because they depend
    on the processor, which is not needed here.

    Args:
        path: File of conversations, in any format that :class:`.LlavaDataset` reads.
        image_dir: Folder to which names of media are relative.
        out: Folder for the shards, empty or absent. If writing fails, it is empty or absent again.
        size_limit: Largest shard, in bytes or as ``'64mb'``. A larger sample is the only one in its shard.
        on_error: ``'raise'`` at the first bad sample; or ``'skip'``: leave it out and print the reason.
        allow_outside: Whether names of media may lead out of ``image_dir``, by ``../``, as absolute paths or through
            links.

    Raises:
        BadSampleError: For the first bad sample (``'raise'``).
        ValueError: If an argument is wrong, the file cannot be read, no sample is good, or there are videos or audio
            and PyAV is not installed.
        ImportError: If mosaicml-streaming is not installed.
    """
    check_choice('on_error', on_error, ('raise', 'skip'))
    if find_spec('streaming') is None:
        raise ImportError("shards need mosaicml-streaming. pip install 'composer_tokacc[streaming]'")
    out = Path(out)
    out_exists = out.exists()
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out_exists and not is_empty_folder:
        raise InvalidInputError(f'`out_folder` must be empty or absent, but {out} is not. Name another, or remove it.')
    records = list(read_records(path, image_dir=image_dir, allow_outside=allow_outside))
    writer = _open_writer(out, size_limit)
    try:
        skipped = _write_rows(writer, records, on_error)
        if len(skipped) == len(records):
            raise InvalidInputError(f'`path` must hold at least one good sample, but {path} has none.')
        writer.finish()
    except BaseException:
        writer.cancel_future_jobs()
        _remove_files(out)  # all of them are of this writer
        if not out_exists:
            out.rmdir()
        raise
    sizes = [shard['raw_data']['bytes'] for shard in writer.shards]
    num_samples = len(records) - len(skipped)
    return Written(num_samples, len(sizes), sum(sizes), tuple(skipped))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status.

    It is 2 after a bad sample that is not skipped, a wrong value, an error of the file system or a missing package.
    Otherwise it is 0. If argparse refuses an option, it raises SystemExit.
    """
    parser = argparse.ArgumentParser(prog='python -m composer_tokacc.data.to_mds', description=__doc__)
    parser.add_argument(
        'path',
        metavar='data.json',
        help='conversations, as `dataset.path` of a run',
    )
    parser.add_argument(
        'image_dir',
        metavar='images',
        help='folder to which names of media are relative',
    )
    parser.add_argument(
        'out',
        metavar='out_folder',
        help='folder for the shards, empty or absent',
    )
    parser.add_argument('--size-limit', default='64mb', help='largest shard (default: 64mb)')
    parser.add_argument(
        '--on-error',
        choices=('raise', 'skip'),
        default='raise',
        help='handling of a bad sample',
    )
    parser.add_argument(
        '--allow-outside',
        action='store_true',
        help='let names of media lead out of their folder',
    )
    options = parser.parse_args(arguments)  # the options have the names of the arguments of `write_shards`
    try:
        written = write_shards(**vars(options))
    except (ValueError, OSError, ImportError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    print(
        f'wrote {written.num_samples:,} samples in {written.num_shards:,} shards, {written.num_bytes:,} bytes, to '
        f'{options.out}; skipped {len(written.skipped):,}'
    )
    return 0


def _open_writer(out: Path, size_limit: int | str) -> MDSWriter:
    """Returns an MDSWriter that writes no empty shards.

    The class itself writes one before a sample that is larger than ``size_limit``.
    """
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]
    from streaming.base.util import bytes_to_int  # pyright: ignore[reportMissingImports]

    class Writer(MDSWriter):
        def flush_shard(self) -> None:
            if self.new_samples:
                super().flush_shard()

    if bytes_to_int(size_limit) == 0:  # for MDSWriter 0 means no limit, but offsets in a shard have only 32 bits
        raise InvalidInputError(f'`size_limit` must be above 0, got: {size_limit}.')
    return Writer(columns=SHARD_COLUMNS, out=str(out), size_limit=size_limit)


def _remove_files(folder: Path) -> None:
    """Removes all files of a folder, which may be a link."""
    for file in folder.iterdir():
        file.unlink()


def _write_rows(
    writer: MDSWriter,
    records: Sequence[Record | BadSampleError],
    on_error: str,
) -> list[str]:
    """Writes the rows of all records. Returns the reasons why bad ones were skipped."""
    skipped = []
    with tqdm(
        _read_rows(records),
        total=len(records),
        desc='writing samples',
        disable=None,  # no bar if the output is not a terminal
        leave=False,
    ) as bar:
        for row_or_error in bar:
            if not isinstance(row_or_error, BadSampleError):
                writer.write(row_or_error)
                continue
            if on_error == 'raise':
                raise row_or_error
            skipped.append(str(row_or_error))
            bar.write(f'skipped: {row_or_error}', file=sys.stderr)
    return skipped


def _read_rows(records: Sequence[Record | BadSampleError]) -> Iterator[ShardRow | BadSampleError]:
    """Yields rows in order. Threads read them, because reading and decoding release Python's lock."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(records), SAMPLES_AT_ONCE):
            yield from pool.map(_read_row, records[start : start + SAMPLES_AT_ONCE])


def _read_row(record: Record | BadSampleError) -> ShardRow | BadSampleError:
    """Returns the row of a record, or the error if the record is bad or one of its files cannot be read or decoded."""
    if isinstance(record, BadSampleError):
        return record
    try:
        decode_media(record, open_files(record))  # only a check, see `write_shards`
        contents = _read_files(record)
    except BadSampleError as error:
        return error
    return _to_row(record, contents)


def _read_files(record: Record) -> list[bytes]:
    """Returns the contents of the files of a record, in order. Raises BadSampleError if one of them cannot be read."""
    contents = []
    # Opened again, because decoding may have read an open file to its end.
    for file in open_files(record):  # a path, or the open content of a file that is embedded in the data file
        try:
            content = file.read_bytes() if isinstance(file, Path) else file.read()
        except OSError as error:  # decoding need not have read all of it
            if not is_from_file(error):
                raise
            raise record.error(f'file {file} cannot be read: {error}') from error
        contents.append(content)
    return contents


def _to_row(record: Record, contents: Sequence[bytes]) -> ShardRow:
    """Returns the row that holds a record and the contents of its files, which are in the order of ``record.files``."""
    turns = []
    for turn in record.turns:
        raw_turn: dict[str, Any] = {'from': turn.role, 'value': turn.text}
        if not turn.carries_loss:
            raw_turn['weight'] = 0
        turns.append(raw_turn)
    media = [[medium.modality, medium.names] for medium in record.media]
    file_sizes = [len(content) for content in contents]
    raw_record = {
        'id': record.sample_id,
        'source': record.source,
        'conversations': turns,
        'media': media,
        'bytes': file_sizes,
    }
    if record.loss_weights is not None:
        raw_record['loss_weights'] = record.loss_weights
    return {'record': raw_record, 'media': b''.join(contents)}


def from_row(row: JsonObject) -> tuple[Record, list[bytes]]:
    """Returns the record and the contents of its files from a row of a shard: the opposite of ``_to_row``."""
    if row.keys() != SHARD_COLUMNS.keys():
        raise InvalidInputError(
            f'shards must have the columns {sorted(SHARD_COLUMNS)}, got: {sorted(row)}. Write them with '
            '`python -m composer_tokacc.data.to_mds`.'
        )
    raw_record = row['record']
    turns = []
    for raw_turn in raw_record['conversations']:
        carries_loss = raw_turn.get('weight') != 0
        turns.append(Turn(raw_turn['from'], raw_turn['value'], carries_loss))
    media = [Medium(modality, tuple(names)) for modality, names in raw_record['media']]
    record = Record(
        sample_id=raw_record['id'],
        source=raw_record['source'],
        turns=tuple(turns),
        media=tuple(media),
        loss_weights=raw_record.get('loss_weights'),
    )
    media_bytes = BytesIO(row['media'])
    contents = [media_bytes.read(num_bytes) for num_bytes in raw_record['bytes']]
    return record, contents


if __name__ == '__main__':
    sys.exit(main())
