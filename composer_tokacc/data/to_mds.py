# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes conversations and their media as MDS shards, which mosaicml-streaming reads.

python -m composer_tokacc.data.to_mds data.json images out_folder [--size-limit 64mb] [--on-error raise|skip]
[--allow-outside]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from composer_tokacc.data.files import read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.media import decode_media
from composer_tokacc.data.records import BadSampleError, Medium, RawRecord, Record, Turn
from composer_tokacc.data.user_files import MediaFolders, open_files

SHARD_COLUMNS = {'media': 'bytes', 'record': 'json'}
"""Columns of a shard and their MDS encodings: files byte for byte, one behind the other, and all else."""
SAMPLES_AT_ONCE = 256
"""Samples that are read at once, and so held in memory."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of the records of a file."""

    num_samples: int
    num_shards: int
    num_bytes: int
    """Of all shards."""
    skipped: tuple[str, ...]
    """Why each bad sample was left out; names it and its file."""


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

    Media are decoded once, to know that they can be, and written as they are. No processor is needed, so how long a
    sample is in tokens is not known here.

    Args:
        path: As for :class:`.LlavaDataset`.
        image_dir: Folder that names of media start from.
        out: Folder for the shards; empty or absent. If anything raises, nothing is left there.
        size_limit: Largest shard, in bytes or as ``'64mb'``; a sample that is larger has a shard of its own.
        on_error: ``'raise'`` at the first bad sample, or ``'skip'`` it, print why and count it.
        allow_outside: Whether names may lead out of that folder: ``../``, absolute ones, links.

    Raises:
        BadSampleError: For the first bad sample (``raise``).
        ValueError: If an argument is wrong, the file is missing or no JSON, no sample is good, or no decoder of its
            videos is installed.
        ImportError: If mosaicml-streaming is not installed.
    """
    if on_error not in ('raise', 'skip'):
        raise ValueError(f"`on_error` must be 'raise' or 'skip', got: {on_error!r}.")
    if importlib.util.find_spec('streaming') is None:
        raise ImportError("shards need mosaicml-streaming, got: none. pip install 'composer_tokacc[streaming]'")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f'`out_folder` must be empty or absent, got: {out}, which is not. Name another, or remove it.')
    raw_records = list(read_raw_records(path))
    writer = _open_writer(out, size_limit)
    skipped: list[str] = []
    try:
        with tqdm(total=len(raw_records), desc='writing samples', disable=None, leave=False) as bar:
            folders = MediaFolders(allow_outside=allow_outside)
            for row in _read_rows(raw_records, Path(image_dir), folders):
                if not isinstance(row, BadSampleError):
                    writer.write(row)
                elif on_error == 'raise':
                    raise row
                else:
                    skipped.append(str(row))
                    bar.write(f'skipped: {row}', file=sys.stderr)
                bar.update()
        if len(skipped) == len(raw_records):
            raise ValueError(f'`path` must hold at least one good sample, got: {path} with none.')
        writer.finish()
    except BaseException:
        writer.cancel_future_jobs()
        shutil.rmtree(out)  # only what was written here: it was empty
        raise
    return Written(
        num_samples=len(raw_records) - len(skipped),
        num_shards=len(writer.shards),
        num_bytes=sum(shard['raw_data']['bytes'] for shard in writer.shards),
        skipped=tuple(skipped),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; a bad sample or a mistake of the user's ends it with one line and status 2."""
    parser = argparse.ArgumentParser(prog='python -m composer_tokacc.data.to_mds', description=__doc__)
    parser.add_argument('path', metavar='data.json', help='conversations, as `dataset.path` of a run')
    parser.add_argument('image_dir', metavar='images', help='folder that names of media start from')
    parser.add_argument('out', metavar='out_folder', help='folder for the shards, empty or absent')
    parser.add_argument('--size-limit', default='64mb', help='largest shard (default: 64mb)')
    parser.add_argument('--on-error', choices=('raise', 'skip'), default='raise', help='what to do with a bad sample')
    parser.add_argument('--allow-outside', action='store_true', help='let names of media lead out of their folder')
    options = parser.parse_args(arguments)
    try:
        written = write_shards(
            options.path,
            options.image_dir,
            options.out,
            size_limit=options.size_limit,
            on_error=options.on_error,
            allow_outside=options.allow_outside,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    print(
        f'wrote {written.num_samples:,} samples in {written.num_shards:,} shards, {written.num_bytes:,} bytes, to '
        f'{options.out}; skipped {len(written.skipped):,}'
    )
    return 0


def _open_writer(out: Path, size_limit: int | str) -> Any:
    """Returns a writer that starts no shard while one is empty, as MDSWriter does before an oversize sample."""
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]
    from streaming.base.util import bytes_to_int  # pyright: ignore[reportMissingImports]

    class Writer(MDSWriter):
        def flush_shard(self) -> None:
            if self.new_samples:
                super().flush_shard()

    limit = bytes_to_int(size_limit)
    if not 0 < limit < 2**32:
        raise ValueError(f'`size_limit` must be above 0 and below 4gb (offsets are 32 bits), got: {size_limit}.')
    return Writer(columns=SHARD_COLUMNS, out=str(out), size_limit=limit)


def _read_rows(
    raw_records: Iterable[RawRecord], image_dir: Path, folders: MediaFolders
) -> Iterator[dict[str, Any] | BadSampleError]:
    """Yields rows in order, read by several threads: file systems and image decoders do without Python's lock."""

    def read(raw: RawRecord) -> dict[str, Any] | BadSampleError:
        try:
            record = parse_record(raw)
            folders.check(record, image_dir)
            try:
                opened = open_files(record, image_dir)
                files = [file.read() if isinstance(file, BytesIO) else Path(file).read_bytes() for file in opened]
            except OSError as error:
                raise record.error(f'file {error.filename} cannot be read: {error.strerror}') from error
            decode_media(record, [BytesIO(file) for file in files])
            return _to_row(record, files)
        except BadSampleError as error:
            return error

    items = iter(raw_records)
    with ThreadPoolExecutor() as pool:
        while chunk := list(islice(items, SAMPLES_AT_ONCE)):
            yield from pool.map(read, chunk)


def _to_row(record: Record, files: Sequence[bytes]) -> dict[str, Any]:
    """Returns the row of a record and the content of its files, in their order."""
    return {
        'record': {
            'id': record.sample_id,
            'source': record.source,
            'conversations': [
                {'from': turn.role, 'value': turn.text, **({} if turn.carries_loss else {'weight': 0})}
                for turn in record.turns
            ],
            'media': [[medium.modality, medium.names] for medium in record.media],
            'bytes': [len(file) for file in files],
            **({} if record.loss_weights is None else {'loss_weights': record.loss_weights}),
        },
        'media': b''.join(files),
    }


def from_row(row: dict[str, Any]) -> tuple[Record, list[bytes]]:
    """Returns the record and the content of its files that a row of a shard was made of.

    Raises:
        ValueError: If the row is of other columns, so not written by this program.
    """
    if row.keys() != SHARD_COLUMNS.keys():
        raise ValueError(
            f'shards must have the columns {sorted(SHARD_COLUMNS)}, got: {sorted(row)}. Write them with '
            '`python -m composer_tokacc.data.to_mds`.'
        )
    raw = row['record']
    record = Record(
        sample_id=raw['id'],
        source=raw['source'],
        turns=tuple(Turn(turn['from'], turn['value'], turn.get('weight') != 0) for turn in raw['conversations']),
        media=tuple(Medium(modality, tuple(names)) for modality, names in raw['media']),
        loss_weights=raw.get('loss_weights'),
    )
    ends = accumulate(raw['bytes'], initial=0)
    return record, [row['media'][start:end] for start, end in pairwise(ends)]


if __name__ == '__main__':
    sys.exit(main())
