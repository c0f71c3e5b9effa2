# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples that cannot be read: found in the one reading that also measures, and remembered with the lengths."""

from __future__ import annotations

import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data.lengths import build_length_table, length_table
from examples.digits import DigitsDataset, build_digits_processor
from tests.data.chat_processors import small
from tests.support.conversations import turns, write_json
from tests.support.launch import launch_json


class WithBadOnes(Dataset):
    def __init__(self, num_samples):
        self.digits = DigitsDataset(num_samples=num_samples)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if index % 100 == 7:
            raise BadSampleError(f'sample "{index}"')
        return self.digits[index]


class CountingDataset(LlavaDataset):
    reads: list[str] = []  # noqa: RUF012  # of the class: the constructor reads too

    def __getitem__(self, index):
        CountingDataset.reads.append(self.records[index].sample_id)
        return super().__getitem__(index)


def build(dataset, **options):
    return build_length_table(dataset, build_digits_processor(), **options)


def test_lengths_and_errors_by_index():
    dataset = WithBadOnes(20)
    table = build(dataset, on_error='skip')
    assert table.errors == {7: 'sample "7"'}
    assert table.lengths[7] == table.loss_tokens[7] == table.image_tokens[7] == 0
    for index in (0, 1, 19):
        sample = dataset[index]
        assert table.lengths[index] == sample['input_ids'].shape[1]
        assert table.loss_tokens[index] == int((sample['labels'] != -100).sum())
        assert table.image_tokens[index] == sample['num_images'][0]


def test_bad_samples_of_parts(tmp_path):
    """They are left out by their place in the whole."""
    parts = ConcatDataset([WithBadOnes(9), WithBadOnes(20)])
    processor = build_digits_processor()
    for _ in range(2):  # measured, then read again
        table = length_table(parts, processor, folder=tmp_path, on_error='skip')
        assert table.errors == {7: 'sample "7"', 16: 'sample "7"'}
        lengths = [parts[i]['input_ids'].shape[1] if i not in table.errors else 0 for i in range(29)]
        assert table.lengths.tolist() == lengths
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(BadSampleError, match=r'^sample "7"$'):
        length_table(parts, processor, folder=tmp_path)


@pytest.mark.slow
def test_workers_find_the_same():
    dataset = WithBadOnes(520)
    alone, workers = (build(dataset, on_error='skip', num_workers=number) for number in (0, 2))
    assert alone.errors == workers.errors == {index: f'sample "{index}"' for index in range(7, 520, 100)}
    assert alone.lengths.tolist() == workers.lengths.tolist()
    with pytest.raises(BadSampleError, match=r'^sample "7"$'):
        build(dataset, num_workers=2)


def test_other_errors_are_no_bad_samples():
    class Broken(WithBadOnes):
        def __getitem__(self, index):
            raise KeyError('a programming error')

    with pytest.raises(KeyError, match='a programming error'):
        build(Broken(3), num_workers=0, on_error='skip')


def write_records(folder, names, *, broken='bad.png'):
    Image.new('RGB', (8, 8)).save(folder / 'good.png')
    (folder / broken).write_bytes(b'not an image')
    spoken = turns('<image>What is this?', 'A red square.')
    return write_json(folder, [{'id': str(i), 'image': name, 'conversations': spoken} for i, name in enumerate(names)])


def test_sample_is_read_once(tmp_path):
    path = write_records(tmp_path, ['good.png', 'bad.png', 'good.png'])
    CountingDataset.reads = []

    def start():
        dataset = CountingDataset(path, small(), on_error='skip', lengths_folder=tmp_path / 'lengths')
        table = length_table(dataset, dataset.encoder.processor, folder=tmp_path / 'lengths')
        return dataset, table

    (first, first_table), (second, second_table) = start(), start()
    assert sorted(CountingDataset.reads) == ['0', '1', '2'], 'neither the lengths nor the second start read again'
    assert first.skipped == second.skipped
    assert 'bad.png' in second.skipped[0]
    assert [record.sample_id for record in second.records] == ['0', '2']
    assert first_table.lengths.tolist() == second_table.lengths.tolist()
    assert first_table.lengths.tolist() == [second[index]['input_ids'].shape[1] for index in range(2)]
    # One table for both purposes.
    assert len(list((tmp_path / 'lengths').iterdir())) == 1


def test_a_fixed_image_is_read_again(tmp_path):
    path = write_records(tmp_path, ['good.png', 'bad.png'])
    options = {'on_error': 'skip', 'lengths_folder': tmp_path / 'lengths'}
    assert len(LlavaDataset(path, small(), **options)) == 1
    Image.new('RGB', (8, 8)).save(tmp_path / 'bad.png')
    assert len(LlavaDataset(path, small(), **options)) == 2


def test_kept_table_hides_no_bad_sample(tmp_path):
    path = write_records(tmp_path, ['good.png', 'bad.png'])
    LlavaDataset(path, small(), on_error='skip', lengths_folder=tmp_path / 'lengths')
    strict = LlavaDataset(path, small())
    with pytest.raises(BadSampleError, match=r'sample "1".*bad\.png'):
        length_table(strict, strict.encoder.processor, folder=tmp_path / 'lengths')


def test_program_fault_is_no_bad_sample(tmp_path, monkeypatch):
    path = write_records(tmp_path, ['good.png'])
    processor = small()
    dataset = LlavaDataset(path, processor)

    def broken(*_, **__):
        raise TypeError('a programming error')

    monkeypatch.setattr(dataset.encoder, '_encode', broken)
    with pytest.raises(RuntimeError, match=r'sample "0" \(.*data\.json, entry 1\): TypeError: a programming error'):
        dataset[0]


@pytest.mark.slow
def test_ranks_share_the_reading_and_agree(tmp_path):
    names = ['good.png', 'bad.png', 'none.png', 'good.png', 'good.png', 'bad.png', 'good.png']
    path = write_records(tmp_path, names)
    first, second = launch_json('tests/ranks/scan_samples.py', str(path), str(tmp_path / 'lengths'), ranks=2)
    assert first['kept'] == second['kept'] == ['0', '3', '4', '6']
    assert first['skipped'] == second['skipped']
    assert [reason.split('"')[1] for reason in first['skipped']] == ['2', '1', '5']
    # The missing file is known without reading; the other six are read once, by one rank or the other.
    assert first['read'] == [0, 2, 4]
    assert second['read'] == [1, 3, 5]
    # A bad sample that one rank meets is raised by both.
    assert 'sample "1"' in first['raised']
    assert first['raised'] == second['raised']
