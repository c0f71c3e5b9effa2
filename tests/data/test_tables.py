# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parquet files and tables of `datasets`: the same samples as from JSON, images read when they are needed."""

from __future__ import annotations

import json
import pickle
from functools import partial

import pytest

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data import files as files_module
from composer_tokacc.data.files import image_folder, read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.records import EmbeddedFile
from tests.data.chat_processors import assert_same, small
from tests.support.conversations import png, turns, write_json

datasets = pytest.importorskip('datasets')

COLOURS = {'red.png': (255, 0, 0), 'blue.png': (0, 0, 255)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')


def messages(*content):
    return [{'role': 'user', 'content': list(content)}, {'role': 'assistant', 'content': [text('Red.')]}]


def text(value):
    return {'type': 'text', 'text': value}


ROWS = [
    {'id': 'a', 'images': ['red.png'], 'messages': messages({'type': 'image'}, text('Which colour?'))},
    {'id': 'b', 'images': [], 'messages': messages(text('Which colour has blood?'))},
    {'id': 'c', 'images': ['blue.png', 'red.png'], 'messages': messages(*[{'type': 'image'}] * 2, text('And these?'))},
]


def table(kind):
    """The rows as TRL's tables have them: images as files, as bytes, or of the type of `datasets`."""
    rows = [dict(row) for row in ROWS]
    if kind != 'names':
        for row in rows:
            row['images'] = [{'bytes': png(COLOURS[name]), 'path': None} for name in row['images']]
    found = datasets.Dataset.from_list(rows)
    if kind == 'images':
        found = found.cast(datasets.Features({**found.features, 'images': datasets.List(datasets.Image())}))
    return found


def to_parquet(found, folder):
    found.to_parquet(folder / 'table.parquet')
    return f'{folder}/table.parquet'


def to_folder(found, folder):
    found.save_to_disk(folder / 'table')
    return f'{folder}/table'


def to_split(found, folder):
    datasets.DatasetDict({'train': found, 'test': found.select([0])}).save_to_disk(folder / 'table')
    return f'{folder}/table#train'


def to_described(found, folder):
    """A parquet file in LLaMA-Factory's list."""
    to_parquet(found.rename_columns({'images': 'pics'}), folder)
    entry = {
        'file_name': 'table.parquet',
        'formatting': 'sharegpt',
        'columns': {'messages': 'messages', 'images': 'pics'},
        'tags': {'role_tag': 'role', 'content_tag': 'content'},
    }
    (folder / 'dataset_info.json').write_text(json.dumps({'mine': entry}))
    return f'{folder}/dataset_info.json#mine'


@pytest.mark.parametrize('kind', ['names', 'bytes', 'images'])
@pytest.mark.parametrize('save', [to_parquet, to_folder, to_split, to_described])
def test_samples_match_the_json_file(tmp_path, save, kind):
    for name, colour in COLOURS.items():
        (tmp_path / name).write_bytes(png(colour))
    expected = LlavaDataset(write_json(tmp_path, ROWS), small())
    found = LlavaDataset(save(table(kind), tmp_path), small(), image_dir=tmp_path)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_records_hold_no_image(tmp_path):
    dataset = LlavaDataset(to_folder(table('images'), tmp_path), small())
    image = dataset.records[2].media[0].files[0]
    assert isinstance(image, EmbeddedFile)
    assert image.name == 'images.0.bytes'
    assert image.read() == png(COLOURS['blue.png'])
    # As a worker process gets it where processes do not share memory.
    assert png(COLOURS['blue.png']) not in pickle.dumps(dataset.records[2])
    assert pickle.loads(pickle.dumps(dataset.records[2])).media[0].files[0].read() == image.read()
    assert dataset.fingerprint() == LlavaDataset(f'{tmp_path}/table', small()).fingerprint()


def test_bad_rows_are_named(tmp_path):
    rows = [
        {'image': {'bytes': png()[:40], 'path': None}, 'conversations': turns('<image>?', 'No.')},
        {'image': {'bytes': png(), 'path': None}, 'conversations': turns('blind?', 'No.')},
    ]
    path = to_parquet(datasets.Dataset.from_list(rows), tmp_path)
    with pytest.raises(BadSampleError, match=r'sample "row 1" \(.*table\.parquet, row 1\): the number of images'):
        LlavaDataset(path, small())
    path = to_parquet(datasets.Dataset.from_list(rows[:1]), tmp_path)
    with pytest.raises(BadSampleError, match=r'sample "row 0" \(.*\): image file image\.bytes cannot be read'):
        LlavaDataset(path, small())[0]


def test_split_of_several_must_be_named(tmp_path):
    path = to_split(table('bytes'), tmp_path).removesuffix('#train')
    assert len(list(read_raw_records(f'{path}#test'))) == 1
    for wrong in (path, f'{path}#dev'):
        with pytest.raises(
            ValueError, match=r"`path` must name a split, .*table#one of \['train', 'test'\], got: (none|dev)"
        ):
            list(read_raw_records(wrong))
    with pytest.raises(ValueError, match='must not name a split of a table without'):
        list(read_raw_records(f'{to_parquet(table("bytes"), tmp_path)}#train'))


@pytest.mark.parametrize(
    ('path', 'arguments'),
    [
        ('hf://datasets/owner/name#train', ('owner/name', None)),
        ('hf://datasets/owner/name/subset', ('owner/name', 'subset')),
        ('hf://datasets/squad', ('squad', None)),
    ],
)
def test_path_of_a_hub(monkeypatch, path, arguments):
    asked = []

    def load_dataset(*given):
        asked.append(given)
        return datasets.DatasetDict({'train': table('images')})

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(files_module, 'ask_hub', lambda name, kind: None)  # tests have no network
    records = [parse_record(raw) for raw in read_raw_records(path)]
    assert asked == [arguments]
    assert [record.sample_id for record in records] == ['a', 'b', 'c']
    assert str(image_folder(path)) == '.'


def test_missing_package_datasets(tmp_path, monkeypatch):
    path = to_parquet(table('names'), tmp_path)
    monkeypatch.setattr(files_module.importlib.util, 'find_spec', partial(dict.get, {}))
    with pytest.raises(
        ValueError,
        match=r"`datasets` is not installed, got: .*table\.parquet\. pip install 'composer_tokacc\[datasets\]'",
    ):
        list(read_raw_records(path))


def test_mixed_content_of_json_columns(tmp_path):
    """A column whose entries are now strings and now lists is JSON text in the file."""
    if not hasattr(datasets, 'Json'):
        pytest.skip('datasets without Json')
    rows = {'messages': [[{'role': 'user', 'content': 'Hello?'}, {'role': 'assistant', 'content': [text('Hi.')]}]]}
    features = datasets.Features({'messages': datasets.List(datasets.Json())})
    path = to_parquet(datasets.Dataset.from_dict(rows, features=features), tmp_path)
    record = parse_record(next(iter(read_raw_records(path))))
    assert [turn.text for turn in record.turns] == ['Hello?', 'Hi.']
