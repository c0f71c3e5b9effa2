# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples that cannot be read: they are found while samples are measured, and saved with the lengths."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset

from composer_tokacc.data import BadSampleError, LlavaDataset, media, sizes, videos
from composer_tokacc.data.lengths import build_length_table, length_table
from composer_tokacc.data.media import check_files, decode_media, open_files
from composer_tokacc.data.records import Medium, Record, Turn
from examples.digits import DigitsDataset, build_digits_processor
from tests.data.chat_processors import small
from tests.data.length_tables import CountingDataset, assert_same_table, lengths_of
from tests.support.conversations import turns, write_json
from tests.support.launch import launch_json


class DigitsWithBadSamples(Dataset):
    """Every hundredth sample, beginning with sample 7, cannot be read."""

    def __init__(self, num_samples):
        self.digits = DigitsDataset(num_samples=num_samples)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if index % 100 == 7:
            raise BadSampleError(f'sample "{index}"')
        return self.digits[index]


def build(dataset, **options):
    return build_length_table(dataset, build_digits_processor(), **options)


def test_bad_samples_of_parts(tmp_path):
    """The table names bad samples by their index in the concatenation: 7, and 9 + 7. The second call has them, too."""
    parts = ConcatDataset([DigitsWithBadSamples(9), DigitsWithBadSamples(20)])
    processor = build_digits_processor()
    for _ in range(2):
        table = length_table(parts, processor, folder=tmp_path, on_error='skip')
        assert table.errors == {7: 'sample "7"', 16: 'sample "7"'}
        good_indices = [index for index in range(29) if index not in table.errors]
        good_samples = [parts[index] for index in good_indices]
        assert_same_table(table.select(good_indices), build(good_samples))
        for column in (table.lengths, table.loss_tokens, table.image_tokens):
            assert not column[list(table.errors)].any()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(BadSampleError, match=r'^sample "7"$'):
        length_table(parts, processor, folder=tmp_path)


def test_workers_name_the_same_samples(monkeypatch):
    monkeypatch.setattr(sizes, 'FEWEST_FOR_WORKERS', 1)
    dataset = DigitsWithBadSamples(109)
    table = build(dataset, on_error='skip', num_workers=0)
    table_of_workers = build(dataset, on_error='skip', num_workers=2)
    assert table.errors == {7: 'sample "7"', 107: 'sample "107"'}
    assert table_of_workers.errors == table.errors
    assert_same_table(table_of_workers, table)
    with pytest.raises(BadSampleError, match=r'^sample "7"$'):
        build(dataset, num_workers=2)


def test_other_errors_are_no_bad_samples(monkeypatch):
    monkeypatch.setattr(DigitsDataset, '__getitem__', mock.Mock(side_effect=KeyError('a programming error')))
    with pytest.raises(KeyError, match='a programming error'):
        build(DigitsDataset(num_samples=3), num_workers=0, on_error='skip')


def record_of(medium):
    return Record(
        sample_id='a',
        source='data.json, line 3',
        turns=(Turn('user', f'<{medium.modality}>?'), Turn('assistant', 'Yes.')),
        media=(medium,),
    )


def write_records(folder, names):
    """Writes a sample for each image: ``good.png``, which can be read, or ``bad.png``, which cannot."""
    Image.new('RGB', (8, 8)).save(folder / 'good.png')
    (folder / 'bad.png').write_bytes(b'not an image')
    conversation = turns('<image>What is this?', 'A red square.')
    records = []
    for index, name in enumerate(names):
        records.append({'id': str(index), 'image': name, 'conversations': conversation})
    return write_json(folder, records)


def test_sample_is_read_once(tmp_path):
    """One reading finds the bad samples and measures the others. A second start reads only the bad ones."""
    path = write_records(tmp_path, ['good.png', 'bad.png', 'good.png'])
    folder = tmp_path / 'lengths'

    first = CountingDataset(path, small(), on_error='skip', lengths_folder=folder)
    first_table = length_table(first, first.encoder.processor, folder=folder)
    assert sorted(first.reads) == [0, 1, 2]

    second = CountingDataset(path, small(), on_error='skip', lengths_folder=folder)
    second_table = length_table(second, second.encoder.processor, folder=folder)
    assert second.reads == [1]

    assert second.skipped == first.skipped
    assert 'bad.png' in second.skipped[0]
    assert [record.sample_id for record in second.records] == ['0', '2']
    assert_same_table(second_table, first_table)
    assert first_table.lengths.tolist() == lengths_of(second)
    assert len(list(folder.iterdir())) == 1


def test_repaired_sample_is_used(tmp_path):
    """Neither name nor size of its file changes, so the length table of the first run is used again."""
    path = write_records(tmp_path, ['good.png', 'bad.png', 'good.png'])
    folder = tmp_path / 'lengths'
    complete = (tmp_path / 'good.png').read_bytes()
    (tmp_path / 'bad.png').write_bytes(bytes(len(complete)))  # a download that has just begun
    assert len(CountingDataset(path, small(), on_error='skip', lengths_folder=folder)) == 2
    strict = CountingDataset(path, small())
    with pytest.raises(BadSampleError, match=r'bad\.png'):
        length_table(strict, small(), folder=folder)

    (tmp_path / 'bad.png').write_bytes(complete)
    table = length_table(strict, small(), folder=folder)
    assert strict.reads == [1, 1]
    assert table.lengths.tolist() == lengths_of(strict)
    repaired = CountingDataset(path, small(), on_error='skip', lengths_folder=folder)
    assert len(repaired) == 3
    assert repaired.skipped == []
    assert repaired.reads == []


def test_program_fault_is_no_bad_sample(tmp_path, monkeypatch):
    dataset = LlavaDataset(write_records(tmp_path, ['good.png']), small())
    monkeypatch.setattr(dataset.encoder, '_encode', mock.Mock(side_effect=TypeError('a programming error')))
    with pytest.raises(RuntimeError, match=r'sample "0" .*entry 1.*TypeError: a programming error'):
        dataset[0]


@pytest.mark.slow
def test_ranks_share_the_reading_and_agree(tmp_path):
    names = ['good.png', 'bad.png', 'none.png', 'good.png', 'good.png', 'bad.png', 'good.png']
    path = write_records(tmp_path, names)
    folder = tmp_path / 'lengths'
    first, second = launch_json('tests/ranks/scan_samples.py', str(path), str(folder), ranks=2)
    assert first['kept'] == ['0', '3', '4', '6']
    assert second['kept'] == first['kept']
    assert second['skipped'] == first['skipped']
    for sample_id, line in zip(('2', '1', '5'), first['skipped'], strict=True):
        assert line.startswith(f'sample "{sample_id}"')
    # Sample 2, whose file is missing, is skipped without reading. Each of the other six is read by one rank. `read` has
    # their indices among these six.
    assert first['read'] == [0, 2, 4]
    assert second['read'] == [1, 3, 5]
    # Both ranks raise for a bad sample, though only one of them read it.
    assert 'sample "1"' in first['raised']
    assert first['raised'] == second['raised']


@pytest.mark.parametrize(
    'fault',
    [
        MemoryError(),
        OSError(errno.ESTALE, 'Stale file handle'),
        OSError(errno.EMFILE, 'Too many open files'),
        OSError(errno.EAGAIN, 'Resource temporarily unavailable'),
        NameError('a programming error'),
    ],
    ids=lambda fault: repr(fault),
)
@pytest.mark.parametrize(('modality', 'num_files'), [('image', 1), ('video', 2)], ids=['one image', 'frames'])
def test_machine_faults_keep_their_error(tmp_path, monkeypatch, fault, modality, num_files):
    path = tmp_path / 'good.png'
    Image.new('RGB', (8, 8)).save(path)
    record = record_of(Medium(modality, (str(path),) * num_files))
    for module in (media, videos):
        monkeypatch.setattr(module, 'read_image', mock.Mock(side_effect=fault))
    with pytest.raises(type(fault)) as raised:
        decode_media(record, open_files(record))
    assert raised.value is fault


def test_lost_network_keeps_its_error(monkeypatch, tmp_path):
    """Nothing can be said about a file of a network that does not answer."""
    record = record_of(Medium('image', (str(tmp_path / 'good.png'),)))
    for name in ('stat', 'lstat'):
        monkeypatch.setattr(os, name, mock.Mock(side_effect=OSError(errno.ESTALE, 'Stale file handle')))
    with pytest.raises(OSError, match='Stale'):
        check_files(record, allow_outside=True)
    with pytest.raises(OSError, match='Stale'):
        open_files(record)
