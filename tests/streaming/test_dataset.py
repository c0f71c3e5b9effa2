# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The streamed samples are those of LlavaDataset, tensor by tensor; StreamingDataset's own features still work."""

from __future__ import annotations

import base64
import json

import pytest
import torch

streaming = pytest.importorskip('streaming')

from composer_tokacc.data import BadSampleError, LlavaDataset, VisionLanguageCollator
from composer_tokacc.data.llava_streaming import LlavaStreamingDataset
from composer_tokacc.data.processor import train_tokenizer
from composer_tokacc.data.to_mds import write_shards
from tests.data.chat_processors import PROCESSORS, TEXTS, small
from tests.support.llava_folder import write_llava_folder


def shards(folder, num_samples=12, **kwargs):
    path = write_llava_folder(folder / 'in', num_samples, **kwargs)
    write_shards(path, folder / 'in' / 'images', folder / 'out', size_limit='8kb')
    return path, str(folder / 'out')


def stream(local, processor=None, **kwargs):
    return LlavaStreamingDataset(processor=processor or small(), local=local, **{'batch_size': 4, **kwargs})


def names(samples):
    return [sample['sample_ids'][0] for sample in samples]


@pytest.mark.parametrize('family', PROCESSORS)
def test_samples_equal_the_map_style_datasets(tmp_path, family):
    path, local = shards(tmp_path)
    processor = PROCESSORS[family][0]()
    expected = LlavaDataset(path, processor, image_dir=tmp_path / 'in' / 'images')
    dataset = stream(local, processor)
    found = list(dataset)
    assert len(found) == dataset.size == len(expected) == 12
    for index, (sample, other) in enumerate(zip(found, expected, strict=False)):
        assert sample.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert sample[key].dtype == value.dtype
                assert torch.equal(sample[key], value), (index, key)
            else:
                assert sample[key] == value
    batch = VisionLanguageCollator(processor)(found)
    assert next(iter(batch)) == 'input_ids'


def test_embedded_images_and_weights_of_turns(tmp_path):
    path, _ = shards(tmp_path)
    record = next(record for record in json.loads(path.read_text()) if isinstance(record.get('image'), str))
    content = (tmp_path / 'in' / 'images' / record['image']).read_bytes()
    record['image'] = f'data:image/png;base64,{base64.b64encode(content).decode()}'
    again = [{'from': 'human', 'value': 'Sure?'}, {'from': 'gpt', 'value': 'Yes.'}]
    record['conversations'] = [*record['conversations'][:2], *again]
    record['conversations'][1]['weight'] = 0
    path.write_text(json.dumps([record]))
    write_shards(path, tmp_path / 'nowhere', tmp_path / 'own')
    expected = LlavaDataset(path, small())[0]
    (found,) = list(stream(str(tmp_path / 'own'), batch_size=1))
    assert torch.equal(found['pixel_values'], expected['pixel_values'])
    assert torch.equal(found['labels'], expected['labels'])
    assert small().tokenizer.decode(found['labels'][found['labels'] != -100]) == 'Yes.<|end|>'


def test_samples_are_those_of_the_file(tmp_path):
    _, local = shards(tmp_path)
    in_order = [f's{k}' for k in range(12)]
    shuffled = stream(local, shuffle=True, shuffle_seed=1)
    first, second = names(shuffled), names(shuffled)
    assert first != in_order
    assert first != second
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert names(stream(local)) == in_order
    assert stream(local)[7]['sample_ids'] == ['s7']


def test_shards_of_a_remote_folder(tmp_path):
    _, remote = shards(tmp_path)
    dataset = stream(str(tmp_path / 'cache'), remote=remote, predownload=4, cache_limit='1mb')
    assert sorted(names(dataset)) == sorted(f's{k}' for k in range(12))
    assert list((tmp_path / 'cache').glob('*.mds'))


def test_streams_are_mixed_by_their_proportions(tmp_path):
    locals_ = [shards(tmp_path / name, number)[1] for name, number in (('a', 30), ('b', 10))]
    streams = {
        name: {'local': local, 'proportion': share}
        for name, local, share in zip('ab', locals_, (0.25, 0.75), strict=True)
    }
    dataset = LlavaStreamingDataset(processor=small(), streams=streams, epoch_size=40, batch_size=4, shuffle=True)
    found = names(dataset)
    assert len(found) == 40
    many = [name for name in found if int(name[1:]) >= 10]
    assert len(many) <= 10, 'only a quarter may be of the first stream, which alone has so many samples'
    assert isinstance(dataset.streams[0], streaming.Stream)


def test_bad_samples_are_named(tmp_path):
    path, local = shards(tmp_path)
    expected = LlavaDataset(path, small(), image_dir=tmp_path / 'in' / 'images')
    lengths = [sample['input_ids'].shape[1] for sample in expected]
    longest = max(range(12), key=lengths.__getitem__)
    dataset = stream(local, max_length=lengths[longest] - 1)
    where = rf'data\.json, entry {longest + 1}'
    with pytest.raises(BadSampleError, match=rf'sample "s{longest}" \(.*{where}\): `max_length` must be'):
        list(dataset)
    with pytest.raises(BadSampleError, match=r'sample "s0" .*has images, but the processor takes none'):
        stream(local, train_tokenizer(TEXTS, vocab_size=512))[0]
    # An image that was broken behind the converter's back.
    (shard,) = (shard for shard in (tmp_path / 'out').glob('shard.00000.mds'))
    content = shard.read_bytes()
    start = content.index(b'\x89PNG')
    shard.write_bytes(content[: start + 30] + bytes(40) + content[start + 70 :])
    with pytest.raises(BadSampleError, match=r'sample "s0" \(.*data\.json, entry 1\): image file 0_0\.png cannot be'):
        stream(local)[0]


def test_other_shards_are_refused(tmp_path):
    with streaming.MDSWriter(columns={'text': 'str'}, out=str(tmp_path / 'out')) as writer:
        writer.write({'text': 'a'})
    with pytest.raises(ValueError, match=r"columns \['media', 'record'\], got: \['text'\]"):
        stream(str(tmp_path / 'out'))[0]


def test_texts_are_those_of_the_turns(tmp_path):
    path, local = shards(tmp_path)
    turns = [turn['value'] for record in json.loads(path.read_text()) for turn in record['conversations']]
    assert list(LlavaStreamingDataset.texts(local)) == [text.replace('<image>', '') for text in turns]
    assert len(list(LlavaStreamingDataset.texts(tmp_path, local))) == len(turns)
    (tmp_path / 'out' / 'shard.00001.mds').unlink()
    with pytest.raises(ValueError, match='must be a folder with all shards'):
        next(LlavaStreamingDataset.texts(tmp_path, local))


@pytest.mark.parametrize('position', [0, 4, 8])
def test_state_leads_to_following_samples(tmp_path, position):
    _, local = shards(tmp_path)
    options = {'shuffle': True, 'num_canonical_nodes': 1}
    dataset = stream(local, **options)
    list(dataset)
    second = iter(dataset)
    seen = [next(second) for _ in range(position)]
    state = dataset.state_dict(position, True)
    rest = names([*seen, *second])[position:]
    resumed = stream(local, **options)
    resumed.load_state_dict(state)
    assert names(resumed) == rest
    assert len(rest) == 12 - position


def test_state_between_two_epochs(tmp_path):
    """StreamingDataset's own says the first, from its start."""
    _, local = shards(tmp_path)
    options = {'shuffle': True, 'num_canonical_nodes': 1}
    dataset = stream(local, **options)
    list(dataset)
    state = dataset.state_dict(0, True)
    expected = names(dataset)
    for _ in range(2):  # a run that saves again before it trains
        resumed = stream(local, **options)
        resumed.load_state_dict(state)
        state = resumed.state_dict(0, True)
        assert state['epoch'] == 1
    assert names(resumed) == expected
