# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length tables from image headers and batches of text, against tables of samples that were all read."""

from __future__ import annotations

import base64
import io
import logging
import struct
import zlib

import numpy as np
import pytest
import torch
import transformers
from PIL import ExifTags, Image

from composer_tokacc.data import BadSampleError, LlavaDataset, lengths, sizes
from composer_tokacc.data.images import image_size
from composer_tokacc.data.lengths import build_length_table, length_table
from composer_tokacc.data.media import decode_media, open_files
from tests.data import chat_processors
from tests.support.conversations import turns, write_json
from tests.support.family_processors import SQUARE
from tests.support.launch import launch_json

SIZES = [(16, 16), (40, 16), (16, 48), (64, 24), (33, 31), (200, 120), (7, 90)]


def gemma3():
    """Line breaks around its images, which the tokenizer joins with those of the text."""
    tokens = {'boi_token': '<start_of_image>', 'eoi_token': '<end_of_image>', 'image_token': '<image_soft_token>'}
    words = chat_processors.tokenizer(
        *tokens.values(), '<|im_start|>', '<|im_end|>', eos_token='<|im_end|>', extra_special_tokens=tokens
    )
    template = chat_processors.QWEN.replace('<|vision_start|><|image_pad|><|vision_end|>', '<start_of_image>')
    pixels = transformers.Gemma3ImageProcessor(size=SQUARE, do_pan_and_scan=False)
    return transformers.Gemma3Processor(pixels, words, template, image_seq_length=4)


PROCESSORS = {
    **{name: make for name, (make, _) in chat_processors.PROCESSORS.items()},
    'qwen2_5_vl': lambda: chat_processors.qwen2_vl('Qwen2_5_VL'),
    'tokenizer': lambda: chat_processors.small().tokenizer,
}


class CountingDataset(LlavaDataset):
    """Knows which samples were read."""

    def __init__(self, *args, **options):
        self.reads = []
        super().__init__(*args, **options)

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


def picture(size, mode='RGB', seed=0):
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def late_metadata(path):
    """A PNG whose EXIF entry, a quarter turn, stands behind its pixels, as the format allows."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    content = exif.tobytes().removeprefix(b'Exif\x00\x00')
    data = path.read_bytes()
    check = struct.pack('>I', zlib.crc32(b'eXIf' + content))
    path.write_bytes(data[:-12] + struct.pack('>I', len(content)) + b'eXIf' + content + check + data[-12:])


def write_pictures(folder):
    """Names of files of all kinds of formats, modes and turns."""
    folder.mkdir(exist_ok=True)
    names = []

    def save(name, image, **options):
        image.save(folder / name, **options)
        names.append(name)

    for number, size in enumerate(SIZES):
        save(f'{number}.jpg', picture(size, seed=number))
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        for ending in ('jpg', 'png', 'webp', 'tiff'):
            save(f'turned{turn}.{ending}', picture((48, 20)), exif=exif)
    for mode in ('P', 'L', '1', 'RGBA', 'LA'):
        save(f'{mode}.png', picture((30, 50)).convert('RGBA' if 'A' in mode else 'RGB').convert(mode))
    save('sixteen.png', Image.fromarray(np.full((20, 60), 40000, np.uint16)))
    save('gray.jpg', picture((20, 60), 'L'))
    save('cmyk.jpg', picture((20, 60), 'CMYK'))
    save('plain.bmp', picture((33, 17)))
    save('colors.gif', picture((50, 20), 'P'))
    save('late.png', picture((48, 20)))
    late_metadata(folder / 'late.png')
    return names


def write_data(folder, *, with_images=True):
    """Every picture alone, then rows of several, of none, over several turns, embedded, with odd text around."""
    rng = np.random.default_rng(0)
    records = []

    def add(images, *texts):
        records.append({'id': f's{len(records)}', 'images': images, 'conversations': turns(*texts)})

    add([], 'What is this?', 'A red square.')
    add([], 'What  is this?\n\n', ' 7 ', 'And now?', 'Blue, I think: <b>7</b> of them. ' * 9)
    if with_images:
        names = write_pictures(folder / 'images')
        for name in names:
            add([name], '<image>\nWhat is this?', 'A red square. ' * int(rng.integers(1, 9)))
        for name in names[:5]:
            add([name], 'What is this?<image>', 'Blue')
            add([name], 'What<image>is  this?', 'Blue\n')
            add([name, name], '<image><image>?', '7')
        for count in (2, 3, 4):
            chosen = rng.choice(names, count).tolist()
            add(chosen, '<image>\n' * count + 'And now?', 'Blue.')
        add(names[2:4], 'What is <image>?', 'A red', 'And <image>?', 'square', 'And now?', '7 of them')
        content = base64.b64encode((folder / 'images' / names[3]).read_bytes()).decode()
        add([f'data:image/jpeg;base64,{content}'], '<image>?', 'Red')
    return write_json(folder, records)


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp('data'))


@pytest.fixture
def by_headers(monkeypatch):
    """Headers for any number of samples, none of them read beside; returns how to change the latter."""
    monkeypatch.setattr(lengths, 'FEWEST_FOR_HEADERS', 0)
    monkeypatch.setattr(lengths, 'NUM_CHECKED', 0)
    return lambda count: monkeypatch.setattr(lengths, 'NUM_CHECKED', count)


def open_dataset(path, processor, **options):
    return CountingDataset(path, processor, image_dir=path.parent / 'images', **options)


def truth(dataset, **options):
    samples = [dataset[index] for index in range(len(dataset))]
    return build_length_table(samples, dataset.encoder.processor, **options)


def assert_same(table, expected):
    for name in lengths.TABLE_COLUMNS:
        assert getattr(table, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(table, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize('name', PROCESSORS)
@pytest.mark.parametrize('padding_side', ['right', pytest.param('left', marks=pytest.mark.slow)])
def test_table_from_headers_matches_samples(name, padding_side, path, tmp_path, by_headers):
    processor = PROCESSORS[name]()
    getattr(processor, 'tokenizer', processor).padding_side = padding_side
    if name == 'tokenizer':
        path = write_data(tmp_path, with_images=False)
    dataset = open_dataset(path, processor)
    before = torch.get_rng_state()
    table = build_length_table(dataset, processor, patch_size=4)
    assert torch.equal(before, torch.get_rng_state())
    assert not dataset.reads
    assert_same(table, truth(dataset, patch_size=4))
    if name != 'tokenizer':
        assert len(set(table.vision_patches.tolist())) > 3
    if name not in ('tokenizer', 'small', 'llava'):
        assert len(set(table.image_tokens.tolist())) > 5, 'sizes make no difference'


@pytest.mark.slow
def test_workers_find_the_same(path, by_headers, monkeypatch):
    monkeypatch.setattr(sizes, 'FEWEST_TEXTS', 0)
    monkeypatch.setattr(sizes, 'FEWEST_SIZES', 0)
    monkeypatch.setattr(sizes, 'TEXTS_TOGETHER', 7)
    processor = PROCESSORS['llava_next']()
    dataset = open_dataset(path, processor)
    assert_same(build_length_table(dataset, processor, num_workers=2), truth(dataset))


def test_header_sizes_match_decoded_images(tmp_path, path):
    dataset = open_dataset(path, PROCESSORS['llava']())
    for record in dataset.records:
        images = decode_media(record, open_files(record)).get('image', [])
        assert [image_size(file) for file in open_files(record)] == [image.size for image in images]
    turned = {name: image_size(path.parent / 'images' / name) for name in ('turned1.png', 'turned6.png', 'late.png')}
    assert turned == {'turned1.png': (48, 20), 'turned6.png': (20, 48), 'late.png': (20, 48)}


def write_rows(folder, *rows):
    records = [{'id': f's{i}', 'image': name, 'conversations': turns(*texts)} for i, (name, *texts) in enumerate(rows)]
    return write_json(folder, records)


def write_jpegs(folder):
    """One that is whole, and one that is cut behind its header."""
    buffer = io.BytesIO()
    picture((200, 100)).save(buffer, 'JPEG')
    (folder / 'good.jpg').write_bytes(buffer.getvalue())
    (folder / 'cut.jpg').write_bytes(buffer.getvalue()[:2000])


def test_unknown_sizes_are_read(path, by_headers, caplog):
    processor = gemma3()
    dataset = open_dataset(path, processor)
    table = build_length_table(dataset, processor)
    assert len(set(dataset.reads)) == sum(bool(record.media) for record in dataset.records)
    assert_same(table, truth(dataset))
    assert not caplog.messages


def test_few_are_read_if_headers_agree(path, by_headers):
    by_headers(10)
    dataset = open_dataset(path, PROCESSORS['llava']())
    build_length_table(dataset, dataset.encoder.processor)
    assert len(dataset.reads) == len(set(dataset.reads)) == 10


def test_all_are_read_if_headers_differ(path, by_headers, caplog):
    class Longer(CountingDataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            tail = torch.zeros_like(sample['input_ids'][:, :1])
            return {
                **sample,
                **{name: torch.cat([sample[name], tail], 1) for name in ('input_ids', 'labels', 'attention_mask')},
            }

    by_headers(10)
    processor = PROCESSORS['llava']()
    dataset = Longer(path, processor, image_dir=path.parent / 'images')
    with caplog.at_level(logging.WARNING):
        table = build_length_table(dataset, processor)
    assert set(dataset.reads) == set(range(len(dataset)))
    assert_same(table, truth(dataset))
    (line,) = caplog.messages
    assert f'so all {len(dataset)} samples are read' in line


def test_placeholder_in_text_needs_the_processor(tmp_path, by_headers):
    picture((16, 16)).save(tmp_path / 'a.png')
    path = write_rows(tmp_path, ('a.png', '<image>?', 'Red'), ('a.png', '<image>What is <|image_pad|>?', 'Blue'))
    processor = PROCESSORS['qwen2_vl']()
    with pytest.raises((BadSampleError, RuntimeError), match='sample "s1"'):
        build_length_table(LlavaDataset(path, processor), processor)


def test_file_that_is_no_image(tmp_path, by_headers):
    write_jpegs(tmp_path)
    (tmp_path / 'none.jpg').write_bytes(b'no image')
    path = write_rows(tmp_path, ('cut.jpg', '<image>?', 'Red'), ('cut.jpg', '<image>?', 'Blue'))
    processor = PROCESSORS['llava_next']()
    dataset = LlavaDataset(path, processor)
    table = build_length_table(dataset, processor)
    assert (table.image_tokens > 0).all()
    with pytest.raises(BadSampleError, match=r'sample "s1".*cut\.jpg cannot be read'):
        dataset[1]
    path = write_rows(tmp_path, ('cut.jpg', '<image>?', 'Red'), ('none.jpg', '<image>?', 'Blue'))
    with pytest.raises(BadSampleError, match=r'sample "s1".*none\.jpg cannot be read'):
        build_length_table(LlavaDataset(path, processor), processor)


def test_sample_over_max_length_is_named(path, by_headers):
    processor = PROCESSORS['llava_next']()
    full = truth(open_dataset(path, processor))
    longest = int(full.lengths.max())
    dataset = open_dataset(path, processor, max_length=longest)
    assert_same(build_length_table(dataset, processor), full)
    assert not dataset.reads
    first = dataset.records[int((full.lengths == longest).argmax())].sample_id
    with pytest.raises(BadSampleError, match=f'sample "{first}".*`max_length` .*{longest - 1} < {longest} tokens'):
        build_length_table(open_dataset(path, processor, max_length=longest - 1), processor)


def test_skip_reads_all_samples(tmp_path, by_headers):
    write_jpegs(tmp_path)
    path = write_rows(tmp_path, ('good.jpg', '<image>?', 'Red'), ('cut.jpg', '<image>?', 'Blue'))
    processor = PROCESSORS['llava']()
    kept = tmp_path / 'lengths'
    quick = CountingDataset(path, processor)
    for _ in range(2):  # the second time from its file
        table = length_table(quick, processor, folder=kept)
    assert not quick.reads
    assert len(table) == 2
    skipping = CountingDataset(path, processor, on_error='skip', lengths_folder=kept)
    assert [record.sample_id for record in skipping.records] == ['s0']
    # Who skipped knows all; a run that raises is told.
    with pytest.raises(BadSampleError, match='cut'):
        length_table(quick, processor, folder=kept)


@pytest.mark.slow
def test_ranks_share_the_work(path):
    found = launch_json('tests/ranks/scan_headers.py', str(path), '12', ranks=2)
    dataset = open_dataset(path, PROCESSORS['llava_next']())
    expected = truth(dataset)
    for rank in found:
        assert rank['columns'] == {name: getattr(expected, name).tolist() for name in lengths.TABLE_COLUMNS}
    first, second = (rank['reads'] for rank in found)
    assert len(first) + len(second) == 12
    assert all(index % 2 == 0 for index in first)
    assert all(index % 2 == 1 for index in second)
