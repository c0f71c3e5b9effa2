# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Length tables from image headers and batches of text, compared with tables of samples that were all read."""

from __future__ import annotations

import base64
import logging

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
from tests.data.length_tables import CountingDataset, assert_same_table, use_headers
from tests.support.conversations import turns, write_json
from tests.support.launch import launch_json

SIZES = [(16, 16), (40, 16), (16, 48), (64, 24), (33, 31), (200, 120), (7, 90)]
"""Width and height of images."""


def gemma3():
    """Returns a processor that writes line breaks around images. The tokenizer joins them with the text's own."""
    tokens = {'boi_token': '<start_of_image>', 'eoi_token': '<end_of_image>', 'image_token': '<image_soft_token>'}
    tokenizer = chat_processors.tokenizer(
        *tokens.values(), '<|im_start|>', '<|im_end|>', eos_token='<|im_end|>', extra_special_tokens=tokens
    )
    template = chat_processors.QWEN.replace('<|vision_start|><|image_pad|><|vision_end|>', '<start_of_image>')
    images = transformers.Gemma3ImageProcessor(size={'height': 16, 'width': 16}, do_pan_and_scan=False)
    return transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=4)


PROCESSORS = {name: make for name, (make, _) in chat_processors.PROCESSORS.items()}
PROCESSORS['qwen2_5_vl'] = lambda: chat_processors.qwen2_vl('qwen2_5_vl')
PROCESSORS['gemma3'] = gemma3
PROCESSORS['tokenizer'] = lambda: chat_processors.small().tokenizer


def noise(size, mode='RGB', seed=0):
    width, height = size
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def exif_with(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def write_pictures(folder):
    """Writes images of many formats, modes and orientations, and returns their names."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(SIZES):
        image = noise(size, seed=number)
        image.save(folder / f'{number}.jpg')
    upright = noise((48, 20))
    for orientation in range(1, 9):
        upright.save(folder / f'turned{orientation}.jpg', exif=exif_with(orientation))
    for ending in ('png', 'webp', 'tiff'):
        for orientation in (1, 6):
            upright.save(folder / f'turned{orientation}.{ending}', exif=exif_with(orientation))
    for mode in ('P', 'L', '1', 'RGBA', 'LA'):
        image = noise((30, 50), mode)
        image.save(folder / f'{mode}.png')
    sixteen_bits = np.full((20, 60), 40000, np.uint16)
    Image.fromarray(sixteen_bits).save(folder / 'sixteen.png')
    noise((20, 60), 'L').save(folder / 'gray.jpg')
    noise((20, 60), 'CMYK').save(folder / 'cmyk.jpg')
    noise((33, 17)).save(folder / 'plain.bmp')
    noise((50, 20), 'P').save(folder / 'colors.gif')
    return sorted(path.name for path in folder.iterdir())


def row(images, *texts):
    return {'images': images, 'conversations': turns(*texts)}


TEXT_ROWS = [
    row([], 'What is this?', 'A red square.'),
    row([], 'What  is this?\n\n', ' 7 ', 'And now?', 'Blue, I think: <b>7</b> of them. ' * 9),
]


def image_rows(folder):
    """Returns rows with each image alone, with several, over several turns, embedded, and with odd text around."""
    names = write_pictures(folder)
    rng = np.random.default_rng(0)
    rows = []
    for name in names:
        num_repeats = int(rng.integers(1, 9))
        answer = 'A red square. ' * num_repeats
        rows.append(row([name], '<image>\nWhat is this?', answer))
    for name in names[:5]:
        rows.append(row([name], 'What is this?<image>', 'Blue'))
        rows.append(row([name], 'What<image>is  this?', 'Blue\n'))
        rows.append(row([name, name], '<image><image>?', '7'))
    for count in (2, 3, 4):
        chosen = rng.choice(names, count).tolist()
        placeholders = '<image>\n' * count
        rows.append(row(chosen, f'{placeholders}And now?', 'Blue.'))
    rows.append(row(names[2:4], 'What is <image>?', 'A red', 'And <image>?', 'square', 'And now?', '7 of them'))
    file = folder / '3.jpg'
    content = base64.b64encode(file.read_bytes()).decode()
    rows.append(row([f'data:image/jpeg;base64,{content}'], '<image>?', 'Red'))
    return rows


def write_rows(folder, rows):
    """Writes a file of rows, whose ids are ``s0``, ``s1`` and so on."""
    records = []
    for index, entries in enumerate(rows):
        records.append({'id': f's{index}', **entries})
    return write_json(folder, records)


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    rows = TEXT_ROWS + image_rows(folder / 'images')
    return write_rows(folder, rows)


@pytest.fixture
def by_headers(monkeypatch):
    use_headers(monkeypatch)


def open_dataset(path, processor, **options):
    return CountingDataset(path, processor, image_dir=path.parent / 'images', **options)


def truth(dataset, **options):
    """Returns the table of samples that are all read."""
    return build_length_table(list(dataset), dataset.encoder.processor, **options)


@pytest.mark.parametrize('name', PROCESSORS)
def test_table_from_headers_matches_samples(name, path, tmp_path, by_headers):
    processor = PROCESSORS[name]()
    if name == 'tokenizer':
        path = write_rows(tmp_path, TEXT_ROWS)
    dataset = open_dataset(path, processor)
    random_state = torch.get_rng_state()

    table = build_length_table(dataset, processor, patch_size=4)

    assert torch.equal(torch.get_rng_state(), random_state)
    assert not dataset.reads
    expected = truth(dataset, patch_size=4)
    assert_same_table(table, expected)
    if name != 'tokenizer':
        numbers_of_patches = set(table.vision_patches.tolist())
        assert len(numbers_of_patches) > 3
    if name not in ('tokenizer', 'small', 'llava', 'gemma3'):
        numbers_of_tokens = set(table.image_tokens.tolist())
        assert len(numbers_of_tokens) > 5, 'sizes make no difference'


@pytest.mark.slow
def test_workers_make_the_same_table(path, by_headers, monkeypatch):
    monkeypatch.setattr(sizes, 'FEWEST_FOR_WORKERS', 1)
    monkeypatch.setattr(sizes, 'TEXTS_TOGETHER', 7)
    processor = PROCESSORS['llava_next']()
    dataset = open_dataset(path, processor)

    table = build_length_table(dataset, processor, num_workers=2)

    expected = truth(dataset)
    assert_same_table(table, expected)


def test_header_sizes_match_decoded_images(path):
    dataset = open_dataset(path, PROCESSORS['llava']())
    for record in dataset.records:
        files = open_files(record)
        images = decode_media(record, files).get('image', [])
        sizes_of_headers = [image_size(file) for file in files]
        sizes_of_images = [image.size for image in images]
        assert sizes_of_headers == sizes_of_images


@pytest.mark.parametrize(
    ('name', 'size'),
    [
        pytest.param('turned1.png', (48, 20), id='upright'),
        pytest.param('turned6.png', (20, 48), id='quarter turn'),
    ],
)
def test_header_size_of_turned_image(path, name, size):
    file = path.parent / 'images' / name

    assert image_size(file) == size


def test_few_are_read_if_headers_agree(path, monkeypatch):
    use_headers(monkeypatch, num_checked=10)
    dataset = open_dataset(path, PROCESSORS['llava']())

    build_length_table(dataset, dataset.encoder.processor)

    assert len(dataset.reads) == 10
    assert len(set(dataset.reads)) == 10


class OneTokenLonger(CountingDataset):
    """Samples that headers measure wrongly, by one token."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        for name in ('input_ids', 'labels', 'attention_mask'):
            sample[name] = torch.nn.functional.pad(sample[name], (0, 1))
        return sample


def test_all_are_read_if_headers_differ(path, monkeypatch, caplog):
    use_headers(monkeypatch, num_checked=10)
    processor = PROCESSORS['llava']()
    dataset = OneTokenLonger(path, processor, image_dir=path.parent / 'images')

    with caplog.at_level(logging.WARNING):
        table = build_length_table(dataset, processor)

    all_samples = set(range(len(dataset)))
    assert set(dataset.reads) == all_samples
    expected = truth(dataset)
    assert_same_table(table, expected)
    [warning] = caplog.messages
    assert f'so all {len(dataset)} samples are read' in warning


def test_placeholder_in_text_needs_the_processor(tmp_path, by_headers):
    noise((16, 16)).save(tmp_path / 'a.png')
    plain_row = row(['a.png'], '<image>?', 'Red')
    row_with_placeholder = row(['a.png'], '<image>What is <|image_pad|>?', 'Blue')
    path = write_rows(tmp_path, [plain_row, row_with_placeholder])
    processor = PROCESSORS['qwen2_vl']()
    dataset = LlavaDataset(path, processor)

    with pytest.raises((BadSampleError, RuntimeError), match='sample "s1"'):
        build_length_table(dataset, processor)


@pytest.fixture
def jpegs(tmp_path):
    """Writes three files: an image, the same image cut behind its header, and a text."""
    good = tmp_path / 'good.jpg'
    noise((200, 100)).save(good)
    content = good.read_bytes()
    (tmp_path / 'cut.jpg').write_bytes(content[:2000])
    (tmp_path / 'none.jpg').write_bytes(b'no image')
    return tmp_path


def write_questions(folder, *names):
    """Writes a row for each of these images."""
    rows = [row([name], '<image>?', 'Red') for name in names]
    return write_rows(folder, rows)


def test_damaged_image_with_header(jpegs, by_headers):
    """It has a size, so it is only refused when it is read."""
    processor = PROCESSORS['llava_next']()
    path = write_questions(jpegs, 'good.jpg', 'cut.jpg')
    dataset = LlavaDataset(path, processor)

    table = build_length_table(dataset, processor)

    assert (table.image_tokens > 0).all()
    with pytest.raises(BadSampleError, match=r'sample "s1".*cut\.jpg cannot be read'):
        dataset[1]


def test_damaged_image_without_header(jpegs, by_headers):
    processor = PROCESSORS['llava_next']()
    path = write_questions(jpegs, 'cut.jpg', 'none.jpg')
    dataset = LlavaDataset(path, processor)

    with pytest.raises(BadSampleError, match=r'sample "s1".*none\.jpg cannot be read'):
        build_length_table(dataset, processor)


def test_sample_over_max_length_is_named(path, by_headers):
    processor = PROCESSORS['llava_next']()
    unlimited = open_dataset(path, processor)
    expected = truth(unlimited)
    longest = int(expected.lengths.max())
    longest_record = unlimited.records[int(expected.lengths.argmax())]
    dataset = open_dataset(path, processor, max_length=longest)
    too_short = open_dataset(path, processor, max_length=longest - 1)

    table = build_length_table(dataset, processor)

    assert_same_table(table, expected)
    assert not dataset.reads
    message = f'sample "{longest_record.sample_id}".*`max_length` .*{longest - 1} < {longest} tokens'
    with pytest.raises(BadSampleError, match=message):
        build_length_table(too_short, processor)


def test_skip_reads_all_samples(jpegs, by_headers):
    """A table by headers does not know the bad samples, so skipping cannot use it."""
    path = write_questions(jpegs, 'good.jpg', 'cut.jpg')
    processor = PROCESSORS['llava']()
    folder = jpegs / 'lengths'
    strict = CountingDataset(path, processor)
    measured = length_table(strict, processor, folder=folder)
    loaded = length_table(strict, processor, folder=folder)
    assert len(measured) == 2
    assert len(loaded) == 2
    assert not strict.reads

    skipping = CountingDataset(path, processor, on_error='skip', lengths_folder=folder)

    assert [record.sample_id for record in skipping.records] == ['s0']


@pytest.mark.slow
def test_ranks_share_the_work(path):
    num_checked = 12
    dataset = open_dataset(path, PROCESSORS['llava_next']())
    expected = truth(dataset)
    expected_columns = {name: getattr(expected, name).tolist() for name in lengths.TABLE_COLUMNS}

    results = launch_json('tests/ranks/scan_headers.py', str(path), str(num_checked), ranks=2)

    num_reads = 0
    for rank, result in enumerate(results):
        assert result['columns'] == expected_columns
        reads = result['reads']
        num_reads += len(reads)
        assert {index % 2 for index in reads} == {rank}
    assert len(results) == 2
    assert num_reads == num_checked
