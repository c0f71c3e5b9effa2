# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Streamed samples equal LlavaDataset's, tensor by tensor, and StreamingDataset's own features still work."""

from __future__ import annotations

import base64
import json

import pytest

streaming = pytest.importorskip('streaming')

from composer_tokacc.data import BadSampleError, LlavaDataset
from composer_tokacc.data.llava_streaming import LlavaStreamingDataset
from composer_tokacc.data.to_mds import write_shards
from tests.data.chat_processors import PROCESSORS, assert_same, learned_text, small
from tests.support.conversations import png, turns, write_json
from tests.support.llava_folder import write_llava_folder


def write(folder, num_samples=12):
    """Writes a LLaVA folder and its shards, and returns the path of the file and the folder of shards."""
    path = write_llava_folder(folder / 'in', num_samples)
    write_shards(path, folder / 'in' / 'images', folder / 'out', size_limit='8kb')
    return path, str(folder / 'out')


def stream(local, processor=None, *, batch_size=4, **options):
    return LlavaStreamingDataset(processor=processor or small(), local=local, batch_size=batch_size, **options)


def stream_shuffled(local):
    return stream(local, shuffle=True, num_canonical_nodes=1)


def sample_ids(samples):
    return [sample['sample_ids'][0] for sample in samples]


SAMPLE_IDS = [f's{index}' for index in range(12)]


@pytest.mark.parametrize('family', PROCESSORS)
def test_samples_equal_the_map_style_datasets(tmp_path, family):
    path, local = write(tmp_path)
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    expected = LlavaDataset(path, processor, image_dir=tmp_path / 'in' / 'images')
    dataset = stream(local, processor)
    samples = list(dataset)
    assert len(samples) == dataset.size == 12
    for sample, expected_sample in zip(samples, expected, strict=True):
        assert_same(sample, expected_sample)


def test_embedded_images_and_weights_of_turns(tmp_path):
    image = base64.b64encode(png()).decode()
    conversation = turns('<image>Which colour?', 'Red.', 'Sure?', 'Yes.')
    conversation[1]['weight'] = 0
    record = {'id': 'a', 'image': f'data:image/png;base64,{image}', 'conversations': conversation}
    path = write_json(tmp_path, [record])
    write_shards(path, tmp_path / 'nowhere', tmp_path / 'out')
    (sample,) = stream(str(tmp_path / 'out'), batch_size=1)
    assert_same(sample, LlavaDataset(path, small())[0])
    assert learned_text(sample, small().tokenizer) == 'Yes.<|end|>'


def test_samples_are_those_of_the_file(tmp_path):
    _, local = write(tmp_path)
    dataset = stream(local)
    assert sample_ids(dataset) == SAMPLE_IDS
    assert dataset[7]['sample_ids'] == ['s7']
    shuffled = stream(local, shuffle=True, shuffle_seed=1)
    first_epoch = sample_ids(shuffled)
    second_epoch = sample_ids(shuffled)
    assert first_epoch != SAMPLE_IDS
    assert first_epoch != second_epoch
    assert set(first_epoch) == set(second_epoch) == set(SAMPLE_IDS)


def test_shards_of_a_remote_folder(tmp_path):
    _, remote = write(tmp_path)
    dataset = stream(str(tmp_path / 'cache'), remote=remote, predownload=4, cache_limit='1mb')
    assert sorted(sample_ids(dataset)) == sorted(SAMPLE_IDS)
    assert list((tmp_path / 'cache').glob('*.mds'))


def test_streams_are_mixed_by_their_proportions(tmp_path):
    _, large = write(tmp_path / 'large', num_samples=30)
    _, little = write(tmp_path / 'little', num_samples=10)
    streams = {'large': {'local': large, 'proportion': 0.25}, 'little': {'local': little, 'proportion': 0.75}}
    dataset = LlavaStreamingDataset(processor=small(), streams=streams, epoch_size=40, batch_size=4, shuffle=True)
    names = sample_ids(dataset)
    assert len(names) == 40
    names_in_both_streams = {f's{index}' for index in range(10)}
    surely_large = [name for name in names if name not in names_in_both_streams]
    assert 0 < len(surely_large) <= 10, 'a quarter of the samples are of the large stream'


def test_broken_image_in_shard_is_named(tmp_path):
    _, local = write(tmp_path)
    shard = tmp_path / 'out' / 'shard.00000.mds'
    content = bytearray(shard.read_bytes())
    start_of_image = content.index(b'\x89PNG')
    content[start_of_image + 30 : start_of_image + 70] = bytes(40)
    shard.write_bytes(content)
    with pytest.raises(BadSampleError, match=r'sample "s0" \(.*data\.json, entry 1\): image file 0_0\.png'):
        stream(local)[0]


def test_other_shards_are_refused(tmp_path):
    with streaming.MDSWriter(columns={'text': 'str'}, out=str(tmp_path / 'out')) as writer:
        writer.write({'text': 'a'})
    with pytest.raises(ValueError, match=r"columns \['media', 'record'\], got: \['text'\]"):
        stream(str(tmp_path / 'out'))[0]


def test_texts_are_those_of_the_turns(tmp_path):
    path, local = write(tmp_path)
    expected = []
    for record in json.loads(path.read_text()):
        for turn in record['conversations']:
            expected.append(turn['value'].replace('<image>', ''))
    assert list(LlavaStreamingDataset.texts(local)) == expected
    assert list(LlavaStreamingDataset.texts(tmp_path, local)) == expected
    (tmp_path / 'out' / 'shard.00001.mds').unlink()
    with pytest.raises(ValueError, match='all shards'):
        next(LlavaStreamingDataset.texts(tmp_path, local))


@pytest.mark.parametrize('position', [0, 4, 8])
def test_state_leads_to_following_samples(tmp_path, position):
    _, local = write(tmp_path)
    dataset = stream_shuffled(local)
    list(dataset)
    second_epoch = iter(dataset)
    before = [next(second_epoch) for _ in range(position)]
    state = dataset.state_dict(position, True)
    following = sample_ids([*before, *second_epoch])[position:]
    resumed = stream_shuffled(local)
    resumed.load_state_dict(state)
    assert sample_ids(resumed) == following
    assert len(following) == 12 - position


def test_state_between_two_epochs(tmp_path):
    """StreamingDataset's own state would repeat the first epoch."""
    _, local = write(tmp_path)
    dataset = stream_shuffled(local)
    list(dataset)
    state = dataset.state_dict(0, True)
    second_epoch = sample_ids(dataset)
    for _ in range(2):  # a resumed run may save again before it trains
        resumed = stream_shuffled(local)
        resumed.load_state_dict(state)
        state = resumed.state_dict(0, True)
        assert state['epoch'] == 1
    assert sample_ids(resumed) == second_epoch
