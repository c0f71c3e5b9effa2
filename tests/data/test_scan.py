# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json

import pytest
from PIL import Image
from torch.utils.data import Dataset

from composer_tokacc.data import BadSampleError, DigitsDataset
from composer_tokacc.data.lengths import ScannedSample, scan_samples
from tests.support.launch import launch_json


class WithBadOnes(Dataset):
    """Every hundredth sample is bad."""

    def __init__(self, num_samples):
        self.digits = DigitsDataset(num_samples=num_samples)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if index % 100 == 7:
            raise BadSampleError(f'sample "{index}"')
        return self.digits[index]


def test_lengths_and_errors_by_index():
    dataset = WithBadOnes(20)
    scanned = scan_samples(dataset, progress=False)
    assert [sample.index for sample in scanned] == list(range(20))
    assert scanned[7] == ScannedSample(7, error='sample "7"')
    for index in (0, 1, 19):
        sample = dataset[index]
        assert scanned[index].length == sample['input_ids'].shape[1]
        assert scanned[index].num_loss_tokens == int((sample['labels'] != -100).sum())
        assert scanned[index].num_images == sample['num_images'][0]


def test_workers_find_the_same():
    dataset = WithBadOnes(520)
    assert scan_samples(dataset, num_workers=2, progress=False) == scan_samples(dataset, num_workers=0, progress=False)


def test_other_errors_are_not_taken_for_bad_samples():
    class Broken(WithBadOnes):
        def __getitem__(self, index):
            raise KeyError('a programming error')

    with pytest.raises(KeyError, match='a programming error'):
        scan_samples(Broken(3), num_workers=0, progress=False)


@pytest.mark.slow
def test_ranks_share_the_reading_and_agree(tmp_path):
    Image.new('RGB', (8, 8)).save(tmp_path / 'good.png')
    (tmp_path / 'bad.png').write_bytes(b'not an image')
    turns = [{'from': 'human', 'value': '<image>What is this?'}, {'from': 'gpt', 'value': 'A red square.'}]
    names = ['good.png', 'bad.png', 'none.png', 'good.png', 'good.png', 'bad.png', 'good.png']
    records = [{'id': str(i), 'image': name, 'conversations': turns} for i, name in enumerate(names)]
    (tmp_path / 'data.json').write_text(json.dumps(records))
    first, second = launch_json('tests/ranks/scan_samples.py', str(tmp_path / 'data.json'), ranks=2)
    assert first['kept'] == second['kept'] == ['0', '3', '4', '6']
    assert first['skipped'] == second['skipped']
    assert [reason.split('"')[1] for reason in first['skipped']] == ['2', '1', '5']
    # The missing file is known without reading; the other six are read once, by one rank or the other.
    assert first['read'] == [0, 2, 4]
    assert second['read'] == [1, 3, 5]
