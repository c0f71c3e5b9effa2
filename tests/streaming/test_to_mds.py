# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The converter to shards, whose output is read back by mosaicml-streaming's own reader, byte for byte."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip('streaming')

from streaming.base.format import reader_from_json  # pyright: ignore[reportMissingImports]

from composer_tokacc.data import BadSampleError, media
from composer_tokacc.data.to_mds import main, write_shards
from tests.support.llava_folder import write_llava_folder


def read_shards(folder):
    """Returns all rows of the shards, and the entries of the index."""
    shards = json.loads((folder / 'index.json').read_text())['shards']
    rows = []
    for shard in shards:
        reader = reader_from_json(str(folder), None, shard)
        rows += [reader[index] for index in range(len(reader))]
    return rows, shards


def ids_of(rows):
    return [row['record']['id'] for row in rows]


def convert(path, out, **options):
    return write_shards(path, path.parent / 'images', out, **options)


def images_of(record):
    images = record.get('image', [])
    return [images] if isinstance(images, str) else images


def texts_of(record):
    return [turn['value'] for turn in record['conversations']]


def test_records_come_back_with_their_files(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 600)  # more than are read at once
    written = convert(path, tmp_path / 'out', size_limit='200kb')
    rows, shards = read_shards(tmp_path / 'out')
    assert written.num_samples == len(rows) == 600
    assert written.num_shards == len(shards) > 2
    sizes = [shard['raw_data']['bytes'] for shard in shards]
    assert max(sizes) <= 200 * 1024
    files = (tmp_path / 'out').glob('*.mds')
    assert written.num_bytes == sum(file.stat().st_size for file in files)
    numbers_of_images = set()
    for row, record in zip(rows, json.loads(path.read_text()), strict=True):
        shard_record = row['record']
        names = images_of(record)
        contents = [(tmp_path / 'in' / 'images' / name).read_bytes() for name in names]
        assert shard_record['id'] == record['id']
        assert texts_of(shard_record) == texts_of(record)
        assert shard_record['media'] == [['image', [name]] for name in names]
        assert shard_record['bytes'] == [len(content) for content in contents]
        assert row['media'] == b''.join(contents)
        numbers_of_images.add(len(names))
    assert numbers_of_images == {0, 1, 2}


def test_sample_over_the_size_limit(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 3)
    convert(path, tmp_path / 'out', size_limit=500)
    rows, shards = read_shards(tmp_path / 'out')
    assert ids_of(rows) == ['s0', 's1', 's2']
    assert [shard['samples'] for shard in shards] == [1, 1, 1]


@pytest.fixture
def broken(tmp_path):
    """Writes 8 samples. In four of them a file is missing or cut, an image has no placeholder, or no one speaks."""
    path = write_llava_folder(tmp_path / 'in', 8)
    records = json.loads(path.read_text())
    (tmp_path / 'in' / 'images' / '0_0.png').unlink()
    cut = tmp_path / 'in' / 'images' / '3_0.png'
    cut.write_bytes(cut.read_bytes()[:100])
    records[5]['image'] = '4_0.png'
    del records[7]['conversations']
    path.write_text('\n'.join(map(json.dumps, records)))
    return path


REASONS = {
    's0': r'image file .*0_0\.png cannot be found',
    's3': r'image file .*3_0\.png cannot be read',
    's5': 'got: 1 images and 0 placeholders',
    's7': '`conversations`',
}


def run_program(path, out, *options):
    return main([str(path), str(path.parent / 'images'), str(out), *options])


def test_bad_samples_are_named_and_counted(broken, tmp_path, capsys):
    out = tmp_path / 'out'
    with pytest.raises(BadSampleError, match=rf'sample "s0" \(.*data\.json, line 1\): {REASONS["s0"]}'):
        convert(broken, out)
    assert not out.exists()
    assert run_program(broken, out, '--on-error', 'skip') == 0
    printed = capsys.readouterr()
    assert re.fullmatch(f'wrote 4 samples in 1 shards, .* bytes, to {out}; skipped 4\n', printed.out)
    lines = [line for line in printed.err.splitlines() if 'skipped: sample' in line]
    for line, (name, reason) in zip(lines, REASONS.items(), strict=True):
        assert f'sample "{name}"' in line
        assert re.search(reason, line)
    rows, _ = read_shards(out)
    assert ids_of(rows) == ['s1', 's2', 's4', 's6']


def test_linked_folder_is_emptied_after_an_error(broken, tmp_path):
    """The folder may lie on another disk, or belong to somebody else. It stays."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    out = tmp_path / 'out'
    out.symlink_to(disk)
    with pytest.raises(BadSampleError, match='sample "s0"'):
        convert(broken, out)
    assert list(disk.iterdir()) == []
    convert(broken, out, on_error='skip')
    assert (disk / 'index.json').exists()


def test_names_outside_the_folder(tmp_path, capsys):
    """Shards may be shared with others, so private files must be allowed, as for LlavaDataset."""
    path = write_llava_folder(tmp_path / 'in', 2)
    (tmp_path / 'in' / 'images' / '0_0.png').rename(tmp_path / 'private.png')
    records = json.loads(path.read_text())
    records[0]['image'] = '../../private.png'
    path.write_text(json.dumps(records))
    assert run_program(path, tmp_path / 'out') == 2
    assert re.search(r'"s0" .*must lie under .*images, got: .*`allow_outside=true`', capsys.readouterr().err)
    assert run_program(path, tmp_path / 'out', '--allow-outside') == 0
    rows, _ = read_shards(tmp_path / 'out')
    assert rows[0]['record']['media'][0] == ['image', ['../../private.png']]


@pytest.mark.parametrize(
    ('name', 'options', 'message'),
    [
        ('data.json', [], 'sample "s0"'),
        ('none.json', [], 'none.json, which does not exist'),
        ('data.json', ['--size-limit', '8gb'], '`size_limit` must be less than 2**32'),
        ('data.json', ['--size-limit', '0mb'], '`size_limit` must be above 0'),
    ],
    ids=['bad sample', 'missing file', 'size limit', 'no size limit'],
)
def test_program_ends_with_one_line(broken, tmp_path, capsys, name, options, message):
    out = tmp_path / 'out'
    assert run_program(broken.with_name(name), out, *options) == 2
    printed = capsys.readouterr().err
    (error,) = [line for line in printed.splitlines() if line.startswith('error: ')]
    assert message in error
    assert not out.exists()


def test_full_folder_is_refused(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 2)
    out = tmp_path / 'out'
    out.mkdir()
    convert(path, out)
    files = {file: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ValueError, match='`out_folder` must be empty or absent, but '):
        convert(path, out)
    assert {file: file.read_bytes() for file in out.iterdir()} == files


def test_missing_file_leaves_empty_folder(tmp_path):
    out = tmp_path / 'out'
    out.mkdir()
    with pytest.raises(ValueError, match=r'none\.json, which does not exist'):
        convert(tmp_path / 'none.json', out)
    assert out.exists()


def test_sample_of_failing_disk_is_skipped(tmp_path, monkeypatch):
    """A file may lie on a bad sector of the disk. The other samples are written."""
    path = write_llava_folder(tmp_path / 'in', 3)
    read_image = media.read_image

    def read_or_fail(file):
        if file.name == '0_0.png':
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return read_image(file)

    monkeypatch.setattr(media, 'read_image', read_or_fail)
    written = convert(path, tmp_path / 'out', on_error='skip')
    (reason,) = written.skipped
    assert re.search(r'sample "s0" .*0_0\.png cannot be read: .*Input/output error', reason)
    rows, _ = read_shards(tmp_path / 'out')
    assert ids_of(rows) == ['s1', 's2']


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOENT])
def test_file_that_fails_after_decoding_is_skipped(tmp_path, monkeypatch, number):
    """Decoding need not read all of a file. It may also go in between."""
    path = write_llava_folder(tmp_path / 'in', 3)
    read_bytes = Path.read_bytes

    def read_or_fail(file):
        if file.name == '0_0.png':
            raise OSError(number, os.strerror(number), str(file))
        return read_bytes(file)

    monkeypatch.setattr(Path, 'read_bytes', read_or_fail)
    written = convert(path, tmp_path / 'out', on_error='skip')
    (reason,) = written.skipped
    assert re.search(rf'sample "s0" .*0_0\.png cannot be read: .*{os.strerror(number)}', reason)


def test_file_that_goes_after_decoding_is_skipped(tmp_path, monkeypatch):
    path = write_llava_folder(tmp_path / 'in', 3)
    read_image = media.read_image

    def read_and_remove(file):
        image = read_image(file)
        if file.name == '0_0.png':
            file.unlink()
        return image

    monkeypatch.setattr(media, 'read_image', read_and_remove)
    written = convert(path, tmp_path / 'out', on_error='skip')
    assert len(written.skipped) == 1
    rows, _ = read_shards(tmp_path / 'out')
    assert ids_of(rows) == ['s1', 's2']


def test_file_without_good_sample_is_refused(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 1)
    (tmp_path / 'in' / 'images' / '0_0.png').write_bytes(b'')
    with pytest.raises(ValueError, match='at least one good sample'):
        convert(path, tmp_path / 'out', on_error='skip')
    assert not (tmp_path / 'out').exists()
