# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``loss_weights`` of samples: from a JSON file, a table or a shard to the batch, or refused with the sample."""

from __future__ import annotations

import json

import pytest
import torch

from composer_tokacc.counting import counted_tokens
from composer_tokacc.data import BadSampleError, LlavaDataset, VisionLanguageCollator
from composer_tokacc.data.files import read_raw_records
from composer_tokacc.data.formats import parse_record
from composer_tokacc.weights import token_weights_of
from tests.data.chat_processors import small
from tests.support.conversations import turns, write_json

WEIGHTS = [0.5, 2.0, 0.0]


def records(weights=WEIGHTS):
    spoken = turns('Which colour has blood?', 'Red.')
    return [
        {'id': f's{index}', 'conversations': spoken, **({} if weight is None else {'loss_weights': weight})}
        for index, weight in enumerate(weights)
    ]


def save_json(rows, folder):
    return write_json(folder, rows)


def save_parquet(rows, folder):
    datasets = pytest.importorskip('datasets')
    datasets.Dataset.from_list(rows).to_parquet(folder / 'data.parquet')
    return folder / 'data.parquet'


def save_described(rows, folder):
    save_json(rows, folder)
    described = {'mine': {'file_name': 'data.json', 'formatting': 'sharegpt'}}
    (folder / 'dataset_info.json').write_text(json.dumps(described))
    return f'{folder / "dataset_info.json"}#mine'


@pytest.mark.parametrize('save', [save_json, save_parquet, save_described])
def test_weight_of_a_samples_tokens(tmp_path, save):
    processor = small()
    dataset = LlavaDataset(save(records(), tmp_path), processor)
    batch = VisionLanguageCollator(processor)([dataset[index] for index in range(3)])
    weights, counted = token_weights_of(batch, 'column'), counted_tokens(batch, 'causal')
    for row, weight in enumerate(WEIGHTS):
        assert counted[row].any()
        assert torch.equal(weights[row], counted[row] * weight)


def test_sample_without_weight_is_named(tmp_path):
    processor = small()
    dataset = LlavaDataset(save_json(records([0.5, None, 1.0]), tmp_path), processor)
    batch = VisionLanguageCollator(processor)([dataset[index] for index in range(3)])
    token_weights_of(batch, 'sqrt')
    with pytest.raises(ValueError, match="got: nan for sample 's1'"):
        token_weights_of(batch, 'column')


@pytest.mark.parametrize('weight', [-1.0, float('nan'), float('inf'), 'much', [0.5, 0.5], True])
def test_bad_weight_is_a_bad_sample(tmp_path, weight):
    path = save_json(records([0.5, weight]), tmp_path)
    with pytest.raises(BadSampleError, match=r'sample "s1" .*`loss_weights` must be a finite number'):
        LlavaDataset(path, small())


def test_other_weights_are_other_data(tmp_path):
    found = []
    for weights in ([1.0], [2.0], [None]):
        found.append(LlavaDataset(save_json(records(weights), tmp_path), small()).identity())
    assert len(set(found)) == 3


def test_shards_keep_the_weight(tmp_path):
    to_mds = pytest.importorskip('composer_tokacc.data.to_mds')
    for raw in read_raw_records(save_json(records([0.25, None]), tmp_path)):
        record = parse_record(raw)
        assert to_mds.from_row(to_mds._to_row(record, []))[0].loss_weights == record.loss_weights
