# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Parquet files and tables of `datasets` give the same samples as JSON. Images are read only when they are needed."""

from __future__ import annotations

import os
import pickle

import pytest

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data import files as files_module
from composer_tokacc.data.files import image_folder, read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.data.records import EmbeddedFile
from tests.data.chat_processors import assert_same, small
from tests.support.conversations import IMAGE, assistant, png, turns, user, write_dataset_info, write_json

datasets = pytest.importorskip('datasets')

COLOURS = {'red.png': 'red', 'blue.png': 'blue'}


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')


ROWS = [
    {
        'id': 'a',
        'images': ['red.png'],
        'messages': [user(IMAGE, 'Which colour?'), assistant('Red.')],
        'loss_weights': 0.5,
    },
    {
        'id': 'b',
        'images': [],
        'messages': [user('Which colour has blood?'), assistant('Red.')],
        'loss_weights': 2.0,
    },
    {
        'id': 'c',
        'images': ['blue.png', 'red.png'],
        'messages': [user(IMAGE, IMAGE, 'And these?'), assistant('Red.')],
    },
]


def table_of_names():
    return datasets.Dataset.from_list(ROWS)


def table_of_bytes():
    """Images are bytes in the table, as TRL's tables have them."""
    rows = []
    for row in ROWS:
        images = [{'bytes': png(COLOURS[name]), 'path': None} for name in row['images']]
        rows.append({**row, 'images': images})
    return datasets.Dataset.from_list(rows)


def table_of_images():
    """Images have the type of `datasets`."""
    table = table_of_bytes()
    features = table.features.copy()
    features['images'] = datasets.List(datasets.Image())
    return table.cast(features)


def to_parquet(table, folder):
    table.to_parquet(folder / 'table.parquet')
    return f'{folder}/table.parquet'


def to_folder(table, folder):
    table.save_to_disk(folder / 'table')
    return f'{folder}/table'


def to_split(table, folder):
    splits = datasets.DatasetDict({'train': table, 'test': table.select([0])})
    splits.save_to_disk(folder / 'table')
    return f'{folder}/table#train'


def to_described(table, folder):
    """Writes a parquet file that LLaMA-Factory's list describes."""
    to_parquet(table.rename_columns({'images': 'pics'}), folder)
    entry = {
        'file_name': 'table.parquet',
        'formatting': 'sharegpt',
        'columns': {'messages': 'messages', 'images': 'pics'},
        'tags': {'role_tag': 'role', 'content_tag': 'content'},
    }
    return write_dataset_info(folder, entry)


@pytest.mark.parametrize('make_table', [table_of_names, table_of_bytes, table_of_images])
@pytest.mark.parametrize('save', [to_parquet, to_folder, to_split, to_described])
def test_samples_match_the_json_file(tmp_path, save, make_table):
    for name, colour in COLOURS.items():
        (tmp_path / name).write_bytes(png(colour))
    expected = LlavaDataset(write_json(tmp_path, ROWS), small())
    path = save(make_table(), tmp_path)
    dataset = LlavaDataset(path, small(), image_dir=tmp_path)
    assert len(dataset) == 3
    for sample, expected_sample in zip(dataset, expected, strict=True):
        assert_same(sample, expected_sample)


def test_records_hold_no_image(tmp_path):
    """A record names the bytes in the table, so that no worker process gets a copy of them."""
    path = to_folder(table_of_images(), tmp_path)
    dataset = LlavaDataset(path, small())
    record = dataset.records[2]
    image = record.media[0].files[0]
    assert isinstance(image, EmbeddedFile)
    assert image.name == 'images.0.bytes'
    blue = png(COLOURS['blue.png'])
    assert image.read() == blue
    pickled = pickle.dumps(record)
    assert blue not in pickled
    assert pickle.loads(pickled).media[0].files[0].read() == blue
    assert dataset.fingerprint() == LlavaDataset(path, small()).fingerprint()


def test_same_images_under_two_keys(tmp_path):
    """They are read once. Other images under the second key are refused."""
    red = {'bytes': png(), 'path': None}
    row = {'image': red, 'images': [{**red, 'path': 'red.png'}], 'conversations': turns('<image>?', 'Red.')}
    path = to_parquet(datasets.Dataset.from_list([row]), tmp_path)
    sample = LlavaDataset(path, small())[0]
    assert sample['num_images'] == [1]
    row['images'] = [{'bytes': png('blue'), 'path': None}]
    path = to_parquet(datasets.Dataset.from_list([row]), tmp_path)
    with pytest.raises(BadSampleError, match='must name the same files'):
        LlavaDataset(path, small())


def test_bad_rows_are_named(tmp_path):
    rows = [
        {'image': {'bytes': png()[:40], 'path': None}, 'conversations': turns('<image>?', 'No.')},
        {'image': {'bytes': png(), 'path': None}, 'conversations': turns('blind?', 'No.')},
    ]
    table = datasets.Dataset.from_list(rows)
    path = to_parquet(table, tmp_path)
    with pytest.raises(BadSampleError, match=r'"row 1" .*table\.parquet, row 1.*number of images'):
        LlavaDataset(path, small())
    path = to_parquet(table.select([0]), tmp_path)
    dataset = LlavaDataset(path, small())
    with pytest.raises(BadSampleError, match=r'"row 0" .*image\.bytes cannot be read'):
        dataset[0]


@pytest.mark.parametrize('is_relative', [False, True])
def test_brackets_in_a_path(tmp_path, monkeypatch, is_relative):
    """`datasets` takes a path as a pattern: `a[1].parquet` would match `a1.parquet`."""
    folder = tmp_path / 'data[12]'
    folder.mkdir()
    for name in ('a1.parquet', 'a[1].parquet'):
        datasets.Dataset.from_dict({'name': [name]}).to_parquet(folder / name)
    monkeypatch.chdir(folder)
    path = 'a[1].parquet' if is_relative else folder / 'a[1].parquet'
    (raw,) = read_raw_records(path)
    assert raw.data == {'name': 'a[1].parquet'}


def test_file_replaced_by_one_of_the_same_time(tmp_path):
    """`datasets` keeps an unpacked copy of a file, which it recognizes by path and time."""
    answers = []
    for answer in ('one', 'two'):
        path = to_parquet(datasets.Dataset.from_dict({'answer': [answer]}), tmp_path)
        os.utime(path, (1, 1))
        answers += [raw.data['answer'] for raw in read_raw_records(path)]
    assert answers == ['one', 'two']


def test_split_of_several_must_be_named(tmp_path):
    path = to_split(table_of_bytes(), tmp_path).removesuffix('#train')
    assert len(list(read_raw_records(f'{path}#test'))) == 1
    for wrong_path, value in ((path, 'none'), (f'{path}#dev', 'dev')):
        with pytest.raises(ValueError, match=rf"`path` .*split of .*\['train', 'test'\], got: {value}"):
            list(read_raw_records(wrong_path))
    without_splits = to_parquet(table_of_bytes(), tmp_path)
    with pytest.raises(ValueError, match='must not name a split'):
        list(read_raw_records(f'{without_splits}#train'))


@pytest.mark.parametrize(
    ('path', 'arguments'),
    [
        ('hf://datasets/owner/name#train', ('owner/name', None)),
        ('hf://datasets/owner/name/subset', ('owner/name', 'subset')),
        ('hf://datasets/squad', ('squad', None)),
    ],
)
def test_path_of_a_hub(monkeypatch, path, arguments):
    requests = []

    def load_dataset(*request):
        requests.append(request)
        return datasets.DatasetDict({'train': table_of_images()})

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(files_module, 'ask_hub', lambda name, kind: None)  # tests have no network
    records = [parse_record(raw) for raw in read_raw_records(path)]
    assert requests == [arguments]
    assert [record.sample_id for record in records] == ['a', 'b', 'c']
    assert str(image_folder(path)) == '.'


def test_missing_package_datasets(tmp_path, monkeypatch):
    path = to_parquet(table_of_names(), tmp_path)
    monkeypatch.setattr(files_module.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'`datasets` .*table\.parquet.*pip install .*\[datasets\]'):
        list(read_raw_records(path))


def test_mixed_content_of_json_columns(tmp_path):
    """A column that holds strings and lists is stored as JSON text."""
    if not hasattr(datasets, 'Json'):
        pytest.skip('datasets without Json')
    conversation = [{'role': 'user', 'content': 'Hello?'}, assistant('Hi.')]
    features = datasets.Features({'messages': datasets.List(datasets.Json())})
    table = datasets.Dataset.from_dict({'messages': [conversation]}, features=features)
    (raw,) = read_raw_records(to_parquet(table, tmp_path))
    assert [turn.text for turn in parse_record(raw).turns] == ['Hello?', 'Hi.']
