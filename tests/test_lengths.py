# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length tables against the samples themselves, and when a kept one is used again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from composer_tokacc.data import DigitsDataset, LlavaDataset, build_digits_processor
from composer_tokacc.lengths import build_length_table, fingerprint, image_token_ids, length_table


class CountReads(DigitsDataset):
    reads = 0

    def __getitem__(self, index):
        CountReads.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize('num_samples', [40, 600])
def test_table_says_what_the_samples_say(num_samples):
    dataset = DigitsDataset(num_samples=num_samples)
    before = torch.get_rng_state()
    table = build_length_table(dataset, dataset.processor, num_workers=2, progress=False)
    assert torch.equal(before, torch.get_rng_state())
    samples = [dataset[index] for index in range(num_samples)]
    assert table.lengths.tolist() == [sample['input_ids'].shape[1] for sample in samples]
    # One token an image.
    assert table.image_tokens.tolist() == [sample['num_images'][0] for sample in samples]
    assert table.loss_tokens.tolist() == [int((sample['labels'][0, 1:] != -100).sum()) for sample in samples]
    assert (table.image_tokens == 0).any()
    assert len(table) == num_samples


def test_image_tokens_are_counted_by_patches_of_the_processor():
    processor = build_digits_processor(image_size=16, patch_size=8)
    dataset = DigitsDataset(processor, num_samples=20)
    table = build_length_table(dataset, processor, progress=False)
    assert table.image_tokens.tolist() == [4 * dataset[index]['num_images'][0] for index in range(20)]


def test_second_run_reads_only_what_the_fingerprint_needs(tmp_path):
    dataset = CountReads(num_samples=200)
    CountReads.reads = 0
    first = length_table(dataset, dataset.processor, folder=tmp_path, num_workers=0, progress=False)
    assert CountReads.reads == 200 + 64
    again = CountReads(num_samples=200)
    second = length_table(again, build_digits_processor(), folder=tmp_path, num_workers=0, progress=False)
    assert CountReads.reads == 200 + 2 * 64
    for name in ('lengths', 'image_tokens', 'loss_tokens'):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert [path.suffix for path in tmp_path.iterdir()] == ['.npz']


def test_fingerprint_changes_with_data_processor_vocabulary_and_template():
    dataset, processor = DigitsDataset(num_samples=20), build_digits_processor()
    found = {fingerprint(dataset, processor), fingerprint(DigitsDataset(num_samples=20), build_digits_processor())}
    assert len(found) == 1
    found.add(fingerprint(DigitsDataset(num_samples=21), processor))
    found.add(fingerprint(DigitsDataset(num_samples=20, seed=1), processor))
    found.add(fingerprint(dataset, build_digits_processor(image_size=16, patch_size=8)))
    other = build_digits_processor()
    other.chat_template += ' '
    found.add(fingerprint(dataset, other))
    other = build_digits_processor()
    other.tokenizer.add_tokens(['new'])
    found.add(fingerprint(dataset, other))
    assert len(found) == 6


def test_own_fingerprint_of_a_dataset_goes_before_probes():
    class Named(CountReads):
        name = 'first'

        def fingerprint(self):
            return self.name

    dataset, processor = Named(num_samples=20), build_digits_processor()
    CountReads.reads = 0
    first = fingerprint(dataset, processor)
    dataset.name = 'second'
    assert fingerprint(dataset, processor) != first
    assert CountReads.reads == 0


def test_bad_samples_are_named(tmp_path):
    Image.new('RGB', (8, 8)).save(tmp_path / 'good.png')
    (tmp_path / 'bad.png').write_bytes(b'no image')
    turns = [{'from': 'human', 'value': '<image>\nhow many digits'}, {'from': 'gpt', 'value': 'one'}]
    records = [{'id': name, 'image': f'{name}.png', 'conversations': turns} for name in ('good', 'bad')]
    (tmp_path / 'data.json').write_text(json.dumps(records))
    processor = build_digits_processor()
    with pytest.raises(ValueError, match=r'bad.*cannot be read'):
        build_length_table(LlavaDataset(tmp_path / 'data.json', processor), processor, progress=False)


def test_processors_without_images_have_no_image_tokens():
    tokenizer = build_digits_processor().tokenizer
    assert image_token_ids(tokenizer) == ()
