# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``loss_weights`` of samples: read from a JSON file or a shard into the batch, or refused by the sample."""

from __future__ import annotations

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


def records_with(*weights):
    """Returns a record for each weight. None stands for a record without one."""
    records = []
    for index, weight in enumerate(weights):
        record = {'id': f's{index}', 'conversations': turns('Which colour has blood?', 'Red.')}
        if weight is not None:
            record['loss_weights'] = weight
        records.append(record)
    return records


def collated(path):
    """Returns the batch of all samples of a file."""
    processor = small()
    return VisionLanguageCollator(processor)(list(LlavaDataset(path, processor)))


def test_weight_of_a_samples_tokens(tmp_path):
    batch = collated(write_json(tmp_path, records_with(*WEIGHTS)))
    weights = token_weights_of(batch, 'column')
    counted = counted_tokens(batch, 'causal')
    for row, weight in enumerate(WEIGHTS):
        assert counted[row].any()
        assert torch.equal(weights[row], counted[row] * weight)


def test_sample_without_weight_is_named(tmp_path):
    batch = collated(write_json(tmp_path, records_with(0.5, None, 1.0)))
    token_weights_of(batch, 'sqrt')  # does not read the weights of the samples
    with pytest.raises(ValueError, match="got: nan for sample 's1'"):
        token_weights_of(batch, 'column')


@pytest.mark.parametrize('weights', [(0.5, 0.5), (0.5, 2.0)])
def test_plain_numbers_of_a_users_dataset(weights):
    samples = []
    for weight in weights:
        ids = torch.arange(5)[None]
        samples.append({'input_ids': ids, 'labels': ids, 'loss_weights': weight})
    batch = VisionLanguageCollator(small())(samples)
    assert token_weights_of(batch, 'column')[:, 1].tolist() == list(weights)


def test_smallest_and_largest_weight(tmp_path):
    weights = [0, 1e-30, 1e30]
    batch = collated(write_json(tmp_path, records_with(*weights)))
    assert batch['loss_weights'].amax(dim=1).tolist() == pytest.approx(weights)


@pytest.mark.parametrize('weight', [1e-31, 1e31, -1.0, float('nan'), float('inf'), 'much', [0.5, 0.5], True])
def test_bad_weight_is_a_bad_sample(tmp_path, weight):
    path = write_json(tmp_path, records_with(0.5, weight))
    with pytest.raises(BadSampleError, match=r'sample "s1" .*`loss_weights` must be'):
        LlavaDataset(path, small())


def test_other_weights_are_other_data(tmp_path):
    identities = set()
    for weight in (1.0, 2.0, None):
        path = write_json(tmp_path, records_with(weight))
        identities.add(LlavaDataset(path, small()).identity())
    assert len(identities) == 3


def test_shards_keep_the_weight(tmp_path):
    to_mds = pytest.importorskip('composer_tokacc.data.to_mds')
    for raw in read_raw_records(write_json(tmp_path, records_with(0.25, None))):
        record = parse_record(raw)
        record_of_shard, _ = to_mds.from_row(to_mds._to_row(record, []))
        assert record_of_shard.loss_weights == record.loss_weights
