# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files in LLaVA's format as a dataset: images, text-only samples, bad records, and paths of images."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from PIL import Image

from composer_tokacc.data import BadSampleError, LlavaDataset, VisionLanguageCollator, build_small_processor, llava
from composer_tokacc.data.processor import train_tokenizer
from tests.data.chat_processors import PROCESSORS, TEXTS, learned_text, small
from tests.data.length_tables import lengths_of
from tests.support.conversations import turns, write_json

COLOURS = {'red.png': 'red', 'green.jpg': 'lime', 'sub/blue.png': 'blue'}


def one_image(sample_id, image='red.png', answer='Red.'):
    return {'id': sample_id, 'image': image, 'conversations': turns('<image>\nWhich colour?', answer)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'images' / 'sub').mkdir(parents=True)
    for name, colour in COLOURS.items():
        Image.new('RGB', (24, 20), colour).save(tmp_path / 'images' / name)
    return tmp_path


def open_dataset(folder, records, *, processor=None, **options):
    path = write_json(folder, records)
    return LlavaDataset(path, processor or small(), image_dir=folder / 'images', **options)


def sample_ids(dataset):
    return [sample_id for sample in dataset for sample_id in sample['sample_ids']]


def image_colours(sample):
    """Returns the name of the brightest channel of each image, as the model gets it."""
    brightness = sample['pixel_values'].mean(dim=(2, 3))
    channels = ('red', 'green', 'blue')
    return [channels[index] for index in brightness.argmax(dim=1)]


def test_images_in_order_of_their_placeholders(folder):
    record = {
        'id': 'three',
        'image': list(COLOURS),
        'conversations': turns('<image> then <image>', 'Red, green.', 'And <image>?', 'Blue.'),
    }
    dataset = open_dataset(folder, [record])
    assert image_colours(dataset[0]) == ['red', 'green', 'blue']
    assert dataset[0]['num_images'] == [3]
    assert learned_text(dataset[0], dataset.encoder.tokenizer) == 'Red, green.<|end|>Blue.<|end|>'


@pytest.mark.parametrize('family', PROCESSORS)
def test_rows_with_and_without_images(folder, family):
    make_processor, _ = PROCESSORS[family]
    records = [
        {'id': 'text', 'conversations': turns('What is blue?', 'A colour.')},
        one_image('one'),
        {'id': 'two', 'image': ['green.jpg', 'red.png'], 'conversations': turns('<image><image>\nAnd now?', 'Both.')},
    ]
    dataset = open_dataset(folder, records, processor=make_processor())
    samples = list(dataset)
    collate = VisionLanguageCollator(dataset.encoder.processor)
    batch = collate(samples)
    assert next(iter(batch)) == 'input_ids'
    assert batch['sample_ids'] == ['text', 'one', 'two']
    assert batch['num_images'] == [0, 1, 2]
    for sample, ids, mask in zip(samples, batch['input_ids'], batch['attention_mask'], strict=True):
        length = sample['input_ids'].shape[1]
        assert mask.sum() == length
        assert torch.equal(ids[:length], sample['input_ids'][0])


def test_text_alone_with_a_tokenizer(folder):
    tokenizer = train_tokenizer(TEXTS, vocab_size=512)
    records = [{'conversations': turns('What is blue?', 'A colour.', 'And red?', 'Too.')}]
    dataset = open_dataset(folder, records, processor=tokenizer)
    assert learned_text(dataset[0], tokenizer) == 'A colour.<|end|>Too.<|end|>'
    with pytest.raises(BadSampleError, match='has images, but the processor takes none'):
        open_dataset(folder, [one_image('a')], processor=tokenizer)


def test_several_files_with_their_images(folder):
    array = folder / 'images' / 'a.json'
    array.write_text(json.dumps([one_image('of array')]))
    lines = folder / 'images' / 'b.jsonl'
    lines.write_text(json.dumps(one_image('of lines')))
    assert sample_ids(LlavaDataset([array, lines], small())) == ['of array', 'of lines']


def test_sources_of_several_files(tmp_path):
    """Files of one name are told apart by their folders."""
    paths = []
    for name in ('a/train.json', 'b/train.json', 'b/other.json'):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([{'conversations': turns('What is blue?', 'A colour.')}]))
        paths.append(path)
    first, same_name, other_name = paths
    tokenizer = train_tokenizer(TEXTS, vocab_size=512)

    def sources(*files):
        return [sample.get('source') for sample in LlavaDataset(files, tokenizer)]

    assert sources(first, same_name) == [['a/train.json'], ['b/train.json']]
    assert sources(first, other_name) == [['train.json'], ['other.json']]
    assert sources(first) == [None]
    assert sources(first, f'{tmp_path}/b/../a/train.json') == [None, None]


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('none.png', 'No such file'),
        ('a/' * 3000 + 'none.png', ''),
        ('字' * 200 + '/none.png', 'too long'),
    ],
)
def test_missing_image_is_named_or_skipped(folder, name, reason):
    """Some names are longer than file systems allow."""
    records = [one_image('good'), one_image('bad', name), one_image('fine', 'green.jpg')]
    message = rf'sample "bad" \(.*data\.json, entry 2\): image file .*none\.png cannot be found: .*{reason}'
    with pytest.raises(BadSampleError, match=message) as raised:
        open_dataset(folder, records)
    assert '\n' not in str(raised.value)
    dataset = open_dataset(folder, records, on_error='skip')
    assert sample_ids(dataset) == ['good', 'fine']
    assert dataset.skip_report() == f'skipped 1 of 3 samples; first: {raised.value}'


def test_long_sample_is_never_cut(folder):
    records = [one_image('short'), one_image('long', answer='Red. ' * 50)]
    short, long = lengths_of(open_dataset(folder, records))
    dataset = open_dataset(folder, records, max_length=short)
    with pytest.raises(BadSampleError, match=rf'sample "long" .*: `max_length` .*got: {short} < {long} tok'):
        dataset[1]
    dataset = open_dataset(folder, records, max_length=short, on_error='skip')
    assert sample_ids(dataset) == ['short']
    assert 'skipped 1 of 2' in dataset.skip_report()


def test_file_without_good_sample_is_refused(folder):
    with pytest.raises(ValueError, match=r'at least one good sample, but .* The first is bad: sample "a"'):
        open_dataset(folder, [one_image('a', 'none.png')], on_error='skip')
    with pytest.raises(ValueError, match="`on_error` must be 'raise' or 'skip', got: 'ignore'"):
        open_dataset(folder, [one_image('a')], on_error='ignore')


def test_small_processor_of_the_files_texts(folder):
    path = write_json(folder, [one_image('a', answer='Carmine, says the painter.'), {}])
    texts = list(LlavaDataset.texts(path))
    assert texts == ['\nWhich colour?', 'Carmine, says the painter.']
    processor = build_small_processor(texts * 20, vocab_size=400, image_size=32, patch_size=16)
    tokenizer = processor.tokenizer
    record = one_image('b', answer='Never seen: ß 三!')
    sample = open_dataset(folder, [record], processor=processor)[0]
    assert learned_text(sample, tokenizer) == 'Never seen: ß 三!<|end|>'
    assert sample['pixel_values'].shape == (1, 3, 32, 32)
    ids = sample['input_ids'][0].tolist()
    assert ids.count(tokenizer.convert_tokens_to_ids('<image>')) == 4
    assert len(tokenizer('the painter')['input_ids']) == 2


@pytest.fixture
def folder_with_links(folder):
    """Adds a private file, links to it, and a link that stays inside the folder of images."""
    images = folder / 'images'
    private = folder / 'private'
    private.mkdir()
    Image.new('RGB', (24, 20)).save(private / 'key.png')
    (images / 'link.png').symlink_to(private / 'key.png')
    (images / 'links').symlink_to(private)
    (images / 'inside.png').symlink_to('red.png')
    return folder


def test_identity_in_older_checkpoints(tmp_path):
    """Checkpoints hold the identity of their data. If it changed, no older checkpoint could be resumed."""
    path = write_json(tmp_path, [{'id': 'a', 'conversations': turns('What is blood?', 'Red.')}])
    identity = LlavaDataset(path, small(), train_on='last').identity()
    assert identity == 'eeb159746f0746996def31dd3eeb2405c9bfd57130cc7485b61cfdd8e0a00605'


def test_files_are_identified_once(folder, monkeypatch):
    """A million files take minutes. The identity is that of the good samples, also if all were identified before."""
    expected = open_dataset(folder, [one_image('a')]).identity()
    identify_file = mock.Mock(side_effect=llava._identify_file)
    monkeypatch.setattr(llava, '_identify_file', identify_file)
    records = [one_image('a'), one_image('too long', answer='Red. ' * 100)]
    dataset = open_dataset(folder, records, max_length=100, on_error='skip', lengths_folder=folder / 'lengths')
    dataset.fingerprint()
    assert dataset.identity() == expected
    files_of_all_samples = 2  # for the name of their length table
    assert identify_file.call_count == files_of_all_samples + 1


@pytest.mark.parametrize('name', ['../private/key.png', '{folder}/private/key.png', 'link.png', 'links/key.png'])
def test_names_outside_the_image_folder(folder_with_links, name):
    record = one_image('a', image=name.format(folder=folder_with_links))
    with pytest.raises(BadSampleError, match=r'"a".*must lie under .*images, got: .*private.*`allow_outside=true`'):
        open_dataset(folder_with_links, [record])
    dataset = open_dataset(folder_with_links, [record], allow_outside=True)
    assert dataset[0]['num_images'] == [1]


def test_names_inside_the_image_folder(folder_with_links):
    names = ['sub/../red.png', f'{folder_with_links}/images/red.png', 'inside.png']
    dataset = open_dataset(folder_with_links, [one_image('a', image=name) for name in names])
    assert [sample['num_images'] for sample in dataset] == [[1]] * 3
