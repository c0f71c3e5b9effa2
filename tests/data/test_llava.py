# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from composer_tokacc.data import BadSampleError, LlavaDataset, VisionLanguageCollator, build_small_processor
from composer_tokacc.data.processor import train_tokenizer
from tests.data.chat_processors import PROCESSORS, TEXTS, small
from tests.support.conversations import turns

COLOURS = {'red.png': (255, 0, 0), 'green.jpg': (0, 255, 0), 'sub/blue.png': (0, 0, 255)}


def one_image(sample_id, image='red.png', answer='Red.'):
    return {'id': sample_id, 'image': image, 'conversations': turns('<image>\nWhich colour?', answer)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'images' / 'sub').mkdir(parents=True)
    for name, colour in COLOURS.items():
        Image.new('RGB', (24, 20), colour).save(tmp_path / 'images' / name)
    return tmp_path


def write(folder, records, name='data.json'):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    text = '\n'.join(lines) if name.endswith('.jsonl') else '[\n' + ',\n'.join(lines) + '\n]\n'
    (folder / name).write_text(text)
    return folder / name


def open_dataset(folder, records, *, name='data.json', processor=None, **kwargs):
    path = write(folder, records, name)
    return LlavaDataset(path, processor or small(), image_dir=folder / 'images', **kwargs)


def spoken(dataset, index):
    """Text that carries loss, and text that does not."""
    sample, tokenizer = dataset[index], dataset.encoder.tokenizer
    carrying = sample['labels'][0] != -100
    return tokenizer.decode(sample['input_ids'][0][carrying]), tokenizer.decode(sample['input_ids'][0][~carrying])


def shown(sample):
    """Mean colour of each image, as the model gets it, in 0 to 1."""
    return [tuple((pixels.mean(dim=(1, 2)) * 0.5 + 0.5).round().int().tolist()) for pixels in sample['pixel_values']]


def test_images_in_order_of_their_placeholders(folder):
    record = {
        'id': 'three',
        'image': list(COLOURS),
        'conversations': turns('<image> then <image>', 'Red, green.', 'And <image>?', 'Blue.'),
    }
    dataset = open_dataset(folder, [record])
    assert shown(dataset[0]) == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert dataset[0]['num_images'] == [3]
    assert spoken(dataset, 0)[0] == 'Red, green.<|end|>Blue.<|end|>'


@pytest.mark.parametrize('family', PROCESSORS)
def test_rows_with_and_without_images(folder, family):
    records = [
        {'id': 'text', 'conversations': turns('What is blue?', 'A colour.')},
        one_image('one'),
        {'id': 'two', 'image': ['green.jpg', 'red.png'], 'conversations': turns('<image><image>\nAnd now?', 'Both.')},
    ]
    dataset = open_dataset(folder, records, processor=PROCESSORS[family][0]())
    samples = [dataset[i] for i in range(3)]
    batch = VisionLanguageCollator(dataset.encoder.processor)(samples)
    assert next(iter(batch)) == 'input_ids'
    assert batch['sample_ids'] == ['text', 'one', 'two']
    assert batch['num_images'] == [0, 1, 2]
    for row, sample in enumerate(samples):
        length = sample['input_ids'].shape[1]
        assert int(batch['attention_mask'][row].sum()) == length
        assert torch.equal(batch['input_ids'][row, :length], sample['input_ids'][0])


def test_text_alone_with_a_tokenizer(folder):
    records = [{'conversations': turns('What is blue?', 'A colour.', 'And red?', 'Too.')}]
    dataset = open_dataset(folder, records, processor=train_tokenizer(TEXTS, vocab_size=512))
    assert spoken(dataset, 0)[0] == 'A colour.<|end|>Too.<|end|>'
    with pytest.raises(BadSampleError, match='has images, but the processor takes none'):
        open_dataset(folder, [one_image('a')], processor=train_tokenizer(TEXTS, vocab_size=512))


def test_several_files_and_images_beside_them(folder):
    for name in ('a.json', 'b.jsonl'):
        write(folder / 'images', [one_image(name)], name)
    dataset = LlavaDataset([folder / 'images' / 'a.json', folder / 'images' / 'b.jsonl'], small())
    assert [dataset[i]['sample_ids'] for i in range(len(dataset))] == [['a.json'], ['b.jsonl']]


STRUCTURAL = {
    'missing file': (one_image('bad', image='none.png'), r'image file .*none\.png does not exist'),
    'more images than placeholders': (
        {**one_image('bad'), 'image': ['red.png', 'green.jpg']},
        'got: 2 images and 1 placeholders',
    ),
}


@pytest.mark.parametrize(('record', 'message'), STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_bad_record_is_named_or_skipped(folder, record, message):
    records = [one_image('good'), record, one_image('fine', 'green.jpg')]
    with pytest.raises(BadSampleError, match=rf'sample "bad" \(.*data\.json, entry 2\): .*{message}') as raised:
        open_dataset(folder, records)
    assert '\n' not in str(raised.value)
    dataset = open_dataset(folder, records, on_error='skip')
    assert [dataset[i]['sample_ids'] for i in range(len(dataset))] == [['good'], ['fine']]
    assert dataset.skip_report() == f'skipped 1 of 3 samples; first: {raised.value}'


def test_long_sample_is_never_cut(folder):
    records = [one_image('good'), one_image('long', answer='Red. ' * 50)]
    lengths = [sample['input_ids'].shape[1] for sample in open_dataset(folder, records)]
    dataset = open_dataset(folder, records, max_length=lengths[0])
    with pytest.raises(BadSampleError, match=rf'sample "long" .*: `max_length` .*got: {lengths[0]} < {lengths[1]} tok'):
        dataset[1]
    dataset = open_dataset(folder, records, max_length=lengths[0], on_error='skip')
    assert len(dataset) == 1
    assert 'skipped 1 of 2' in dataset.skip_report()


def test_file_without_good_sample_is_refused(folder):
    with pytest.raises(ValueError, match=r'at least one good sample, got: .* First: sample "a"'):
        open_dataset(folder, [one_image('a', 'none.png')], on_error='skip')
    with pytest.raises(ValueError, match='does not exist'):
        LlavaDataset(folder / 'none.json', small())
    with pytest.raises(ValueError, match="`on_error` must be 'raise' or 'skip', got: 'ignore'"):
        open_dataset(folder, [one_image('a')], on_error='ignore')


def test_small_processor_of_the_files_texts(folder):
    path = write(folder, [one_image('a', answer='Carmine, says the painter.'), '{}'])
    texts = list(LlavaDataset.texts(path))
    assert texts == ['\nWhich colour?', 'Carmine, says the painter.']
    processor = build_small_processor(texts * 20, vocab_size=400, image_size=32, patch_size=16)
    sample = open_dataset(folder, [one_image('b', answer='Never seen: ß 三!')], processor=processor)[0]
    assert processor.tokenizer.decode(sample['labels'][0][sample['labels'][0] != -100]) == 'Never seen: ß 三!<|end|>'
    assert sample['pixel_values'].shape == (1, 3, 32, 32)
    assert int((sample['input_ids'] == processor.tokenizer.convert_tokens_to_ids('<image>')).sum()) == 4
    assert len(processor.tokenizer('the painter')['input_ids']) == 2


def test_name_longer_than_file_systems_allow(folder):
    for name in ('a/' * 3000 + 'red.png', '字' * 200 + '/red.png'):
        with pytest.raises(BadSampleError, match=r'sample "a" .*red\.png does not exist'):
            open_dataset(folder, [one_image('a', image=name)])


def test_names_outside_the_image_folder(folder):
    (folder / 'private').mkdir()
    Image.new('RGB', (24, 20)).save(folder / 'private' / 'key.png')
    (folder / 'images' / 'link.png').symlink_to(folder / 'private' / 'key.png')
    (folder / 'images' / 'links').symlink_to(folder / 'private')
    (folder / 'images' / 'inside.png').symlink_to('red.png')
    for name in ('../private/key.png', str(folder / 'private' / 'key.png'), 'link.png', 'links/key.png'):
        record = one_image('a', image=name)
        with pytest.raises(BadSampleError, match=r'"a".*must lie under .*images, got: .*private.*`allow_outside=true`'):
            open_dataset(folder, [record])
        assert open_dataset(folder, [record], allow_outside=True)[0]['num_images'] == [1]
    for name in ('sub/../red.png', str(folder / 'images' / 'red.png'), 'inside.png'):
        assert open_dataset(folder, [one_image('a', image=name)])[0]['num_images'] == [1]
