# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The converter: what it writes is read back by mosaicml-streaming's own reader, byte for byte."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip('streaming')

from streaming.base.format import reader_from_json  # pyright: ignore[reportMissingImports]

from composer_tokacc.data import BadSampleError
from composer_tokacc.data.to_mds import main, write_shards
from tests.support.llava_folder import write_llava_folder


def rows(out):
    index = json.loads((out / 'index.json').read_text())
    readers = [reader_from_json(str(out), None, shard) for shard in index['shards']]
    return [reader[k] for reader in readers for k in range(len(reader))], index['shards']


def convert(path, out, **kwargs):
    return write_shards(path, path.parent / 'images', out, **kwargs)


def test_records_come_back_with_their_files(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 600)  # more than is read at once
    written = convert(path, tmp_path / 'out', size_limit='200kb')
    found, shards = rows(tmp_path / 'out')
    assert written.num_samples == len(found) == 600
    assert written.num_shards == len(shards) > 2
    assert written.num_bytes == sum(file.stat().st_size for file in (tmp_path / 'out').glob('*.mds'))
    assert max(shard['raw_data']['bytes'] for shard in shards) <= 200 * 1024
    num_images = set()
    for row, record in zip(found, json.loads(path.read_text()), strict=True):
        names = record.get('image', [])
        names = [names] if isinstance(names, str) else names
        assert row['record']['id'] == record['id']
        assert [turn['value'] for turn in row['record']['conversations']] == [
            turn['value'] for turn in record['conversations']
        ]
        files = [(tmp_path / 'in' / 'images' / name).read_bytes() for name in names]
        assert row['record']['media'] == [['image', [name]] for name in names]
        assert row['record']['bytes'] == [len(file) for file in files]
        assert row['media'] == b''.join(files)
        num_images.add(len(files))
    assert num_images == {0, 1, 2}


def test_sample_over_the_size_limit(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 3)
    written = convert(path, tmp_path / 'out', size_limit=500)
    found, shards = rows(tmp_path / 'out')
    assert [row['record']['id'] for row in found] == ['s0', 's1', 's2']
    assert [shard['samples'] for shard in shards] == [1] * written.num_shards


@pytest.fixture
def broken(tmp_path):
    """Of 8 samples, four bad ones: a missing file, one that is cut, an image without placeholder, no conversation."""
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
    's0': r'image file .*0_0\.png does not exist',
    's3': r'image file .*3_0\.png cannot be read',
    's5': 'got: 1 images and 0 placeholders',
    's7': '`conversations`',
}


def test_bad_samples_are_named_and_counted(broken, tmp_path, capsys):
    with pytest.raises(BadSampleError, match=rf'sample "s0" \(.*data\.json, line 1\): {REASONS["s0"]}'):
        convert(broken, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    arguments = [str(broken), str(broken.parent / 'images'), str(tmp_path / 'out')]
    assert main([*arguments, '--on-error', 'skip']) == 0
    seen = capsys.readouterr()
    assert seen.out.startswith('wrote 4 samples in 1 shards, ')
    assert seen.out.endswith(f'bytes, to {tmp_path / "out"}; skipped 4\n')
    assert seen.out.count('\n') == 1
    named = [line for line in seen.err.splitlines() if 'skipped: sample' in line]
    assert len(named) == 4
    for line, (name, reason) in zip(named, REASONS.items(), strict=True):
        assert re.search(reason, line)
        assert f'sample "{name}"' in line
    assert [row['record']['id'] for row in rows(tmp_path / 'out')[0]] == ['s1', 's2', 's4', 's6']


def test_names_outside_the_folder(tmp_path, capsys):
    """As for LlavaDataset: shards may be shared with others."""
    path = write_llava_folder(tmp_path / 'in', 2)
    (tmp_path / 'in' / 'images' / '0_0.png').rename(tmp_path / 'private.png')
    records = json.loads(path.read_text())
    records[0]['image'] = '../../private.png'
    path.write_text(json.dumps(records))
    arguments = [str(path), str(path.parent / 'images'), str(tmp_path / 'out')]
    assert main(arguments) == 2
    assert re.search(r'"s0" .*must lie under .*images, got: .*`allow_outside=true`', capsys.readouterr().err)
    assert main([*arguments, '--allow-outside']) == 0
    assert rows(tmp_path / 'out')[0][0]['record']['media'][0] == ['image', ['../../private.png']]


MISTAKES = {
    'raise': ([], 'sample "s0"'),
    'missing': (['none.json'], 'none.json, which does not exist'),
    'size': (['--size-limit', '8gb'], '`size_limit` must be above 0 and below 4gb (offsets are 32 bits), got: 8gb'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_program_ends_with_one_line(broken, tmp_path, capsys, name):
    extra, message = MISTAKES[name]
    path = str(broken) if extra[:1] != ['none.json'] else 'none.json'
    options = extra if extra[:1] != ['none.json'] else []
    assert main([path, str(broken.parent / 'images'), str(tmp_path / 'out'), *options]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / 'out').exists()


def test_full_folder_is_refused(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 2)
    (tmp_path / 'out').mkdir()
    convert(path, tmp_path / 'out')
    before = sorted(file.name for file in (tmp_path / 'out').iterdir())
    with pytest.raises(ValueError, match='`out_folder` must be empty or absent, got: '):
        convert(path, tmp_path / 'out')
    assert sorted(file.name for file in (tmp_path / 'out').iterdir()) == before


def test_file_without_good_sample_is_refused(tmp_path):
    path = write_llava_folder(tmp_path / 'in', 1)
    (tmp_path / 'in' / 'images' / '0_0.png').write_bytes(b'')
    with pytest.raises(ValueError, match='at least one good sample'):
        convert(path, tmp_path / 'out', on_error='skip')
    assert not (tmp_path / 'out').exists()
