# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes conversations and their media as MDS shards, which mosaicml-streaming reads.

python -m composer_tokacc.data.to_mds data.json images out_folder [--size-limit 64mb] [--on-error raise|skip]
[--allow-outside]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from composer_tokacc.data.files import read_records
from composer_tokacc.data.media import decode_media, open_files
from composer_tokacc.data.records import BadSampleError, Medium, Record, Turn

SHARD_COLUMNS = {'media': 'bytes', 'record': 'json'}
"""Columns of a shard and their MDS encodings: files byte for byte, one behind the other, and all else."""
SAMPLES_AT_ONCE = 256
"""Samples that are read at once, and so held in memory."""


class Written(NamedTuple):
    """What became of the records of a file; ``skipped`` says why each bad sample was left out."""

    num_samples: int
    num_shards: int
    num_bytes: int
    skipped: tuple[str, ...]


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
    if find_spec('streaming') is None:
        raise ImportError("shards need mosaicml-streaming, got: none. pip install 'composer_tokacc[streaming]'")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f'`out_folder` must be empty or absent, got: {out}, which is not. Name another, or remove it.')
    records = list(read_records(path, image_dir=image_dir, allow_outside=allow_outside))
    writer = _open_writer(out, size_limit)
    skipped: list[str] = []
    try:
        with tqdm(_read_rows(records), total=len(records), desc='writing samples', disable=None, leave=False) as bar:
            for row in bar:
                if not isinstance(row, BadSampleError):
                    writer.write(row)
                elif on_error == 'raise':
                    raise row
                else:
                    skipped.append(str(row))
                    bar.write(f'skipped: {row}', file=sys.stderr)
        if len(skipped) == len(records):
            raise ValueError(f'`path` must hold at least one good sample, got: {path} with none.')
        writer.finish()
    except BaseException:
        writer.cancel_future_jobs()
        shutil.rmtree(out)  # only what was written here: it was empty
        raise
    sizes = [shard['raw_data']['bytes'] for shard in writer.shards]
    return Written(len(records) - len(skipped), len(sizes), sum(sizes), tuple(skipped))


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
        written = write_shards(**vars(options))
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


def _read_rows(records: Sequence[tuple[Record, Path] | BadSampleError]) -> Iterator[dict[str, Any] | BadSampleError]:
    """Yields rows in order, read by several threads: file systems and image decoders do without Python's lock."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(records), SAMPLES_AT_ONCE):
            yield from pool.map(_read_row, records[start : start + SAMPLES_AT_ONCE])


def _read_row(found: tuple[Record, Path] | BadSampleError) -> dict[str, Any] | BadSampleError:
    if isinstance(found, BadSampleError):
        return found
    record, folder = found
    try:
        opened = open_files(record, folder)
        files = [file.read_bytes() if isinstance(file, Path) else file.read() for file in opened]
        decode_media(record, [BytesIO(file) for file in files])
        return _to_row(record, files)
    except BadSampleError as error:
        return error
    except OSError as error:
        return record.error(f'file {error.filename} cannot be read: {error.strerror}')


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
    """Returns the record and the content of its files that a row of a shard was made of."""
    if row.keys() != SHARD_COLUMNS.keys():
        remedy = 'Write them with `python -m composer_tokacc.data.to_mds`'
        raise ValueError(f'shards must have the columns {sorted(SHARD_COLUMNS)}, got: {sorted(row)}. {remedy}.')
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
