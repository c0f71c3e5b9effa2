# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media that fit: no sample over its caps, no smaller than need be, the same each time, and said sample by sample."""

from __future__ import annotations

import json

import pytest
from PIL import Image

pytest.importorskip('av')

from composer_tokacc.data import BadSampleError, LlavaDataset, image_token_ids, length_table
from composer_tokacc.data.fit import FittingEncoder, find_pixel_coordinates, share_of
from composer_tokacc.programs import load_config
from composer_tokacc.programs.sources import source_of
from tests.data.chat_processors import PROCESSORS
from tests.support.clips import write_video
from tests.support.family_media import MEDIA
from tests.support.launch import ROOT

SIDES = ((16, 16), (64, 48), (20, 90), (96, 96))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture(scope='module')
def processor(request):
    return MEDIA[getattr(request, 'param', 'qwen2_vl')]().processor


@pytest.fixture
def path(tmp_path):
    """Samples of one to three images of many sizes, one of text alone, and two with a video."""
    records = [record(f's{count}', ['image'] * count) for count in (1, 0, 2, 3)]
    records += [record('film', ['video']), record('both', ['image', 'video'])]
    for number, side in enumerate(SIDES[:3]):
        Image.effect_noise(side, 90).convert('RGB').save(tmp_path / f'{number}.png')
    write_video(tmp_path / 'film.mp4', size=(64, 64))
    return write(tmp_path, records)


def record(name, kinds, text='bi da'):
    images = [f'{number}.png' for number in range(kinds.count('image'))]
    question = ' '.join([*(f'<{kind}>' for kind in kinds), text])
    turns = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': 'fo gu'}]
    return {'id': name, 'images': images, 'videos': ['film.mp4'] * kinds.count('video'), 'messages': turns}


def write(folder, records):
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def sizes(dataset, processor):
    """Tokens of each sample, and how many of them stand for media, counted one by one."""
    media = set(image_token_ids(processor))
    ids = [dataset[index]['input_ids'][0].tolist() for index in range(len(dataset))]
    return [len(one) for one in ids], [sum(token in media for token in one) for one in ids]


FRAMES = {'fps': 10, 'max_frames': 8}


def open_dataset(path, processor, **options):
    return LlavaDataset(path, processor, video=FRAMES, num_workers=0, **options)


@pytest.mark.parametrize('processor', ['qwen2_vl', 'qwen3_vl'], indirect=True)
@pytest.mark.parametrize('share', [0.9, 0.5])
def test_samples_just_fit_the_cap(path, processor, share):
    lengths, media = sizes(open_dataset(path, processor), processor)
    cap = int(max(lengths) * share)
    dataset = open_dataset(path, processor, fit=True, max_length=cap)
    fitted, fitted_media = sizes(dataset, processor)
    named = {one['sample']: one for one in dataset.fitted()}
    assert any(length > cap for length in lengths), 'something has to become smaller'
    for index, one in enumerate(dataset.records):
        assert fitted[index] <= cap
        if lengths[index] <= cap:
            assert fitted[index] == lengths[index]
            assert one.sample_id not in named
            continue
        assert fitted_media[index] < media[index]
        assert named[one.sample_id]['tokens'] == fitted[index]
        # One step less, and it would not fit.
        steps = int(dataset.measured[1].shrink_steps[index])
        assert named[one.sample_id]['share'] == pytest.approx(share_of(steps), abs=1e-4)
        larger = dataset.encoder._encoder_after(steps - 1)
        files = [path.parent / name for medium in one.media for name in medium.names]
        assert super(FittingEncoder, larger).encode_record(one, files)['input_ids'].shape[1] > cap


def test_table_holds_what_samples_are(path, processor, tmp_path):
    first = open_dataset(path, processor, fit=True, max_length=24, max_image_tokens=16)
    again = open_dataset(path, processor, fit=True, max_length=24, max_image_tokens=16, lengths_folder=tmp_path / 'new')
    table = length_table(first, processor)
    assert (table.lengths.tolist(), table.image_tokens.tolist()) == sizes(first, processor) == sizes(again, processor)
    assert max(table.image_tokens) <= 16
    assert first.fitted() == again.fitted()
    assert first.identity() == again.identity() != open_dataset(path, processor, max_length=200).identity()
    for index in range(len(first)):
        sample, other = first[index], again[index]
        assert sample.keys() == other.keys()
        assert 'shrink_steps' not in sample
        assert all((sample[key] == other[key]).all() for key in sample if hasattr(sample[key], 'shape'))


def test_a_video_gives_frames_and_pixels(path, processor):
    whole, fitted = open_dataset(path, processor), open_dataset(path, processor, fit=True, max_image_tokens=8)
    grids = [dataset[4]['video_grid_thw'][0].tolist() for dataset in (whole, fitted)]
    assert grids[1][0] < grids[0][0]
    assert grids[1][1] * grids[1][2] <= grids[0][1] * grids[0][2]


def test_text_that_is_too_long(path, processor, tmp_path):
    long = write(tmp_path, [record('short', ['image']), record('long', ['image'], text='bi ' * 60)])
    with pytest.raises(BadSampleError, match=r'"long".*`max_length`=40 .* must have room .* got: \d+ tokens'):
        open_dataset(long, processor, fit=True, max_length=40)
    dataset = open_dataset(long, processor, fit=True, max_length=40, on_error='skip')
    assert [one.sample_id for one in dataset.records] == ['short']
    assert '"long"' in dataset.skip_report()


def images_alone(folder, family, **options):
    """Samples of one and of two images of a thousand pixels a side, with the processor of a family without videos."""
    Image.effect_noise((1000, 800), 90).convert('RGB').save(folder / '0.png')
    Image.effect_noise((40, 30), 90).convert('RGB').save(folder / '1.png')
    processor = PROCESSORS[family][0]()
    path = write(folder, [record('one', ['image']), record('two', ['image'] * 2)])
    return processor, LlavaDataset(path, processor, num_workers=0, **options)


@pytest.mark.parametrize('family', ['qwen2_vl', 'idefics3'])
def test_budget_of_pixels_or_longest_side(tmp_path, family):
    processor, whole = images_alone(tmp_path, family)
    cap = min(sizes(whole, processor)[1]) - 1
    processor, fitted = images_alone(tmp_path, family, fit=True, max_image_tokens=cap)
    assert 0 < max(sizes(fitted, processor)[1]) <= cap
    assert [one['sample'] for one in fitted.fitted()] == ['one', 'two']


@pytest.mark.parametrize('family', ['small', 'llava', 'llava_next', 'llava_onevision'])
def test_processor_of_fixed_images_is_refused(tmp_path, family):
    with pytest.raises(ValueError, match=r'`fit` must have a processor whose images can be smaller, got: Llava\w*'):
        images_alone(tmp_path, family, fit=True, max_length=30)


def test_fit_and_cap_need_each_other(tmp_path):
    with pytest.raises(ValueError, match='`fit` must have a cap'):
        images_alone(tmp_path, 'qwen2_vl', fit=True)
    with pytest.raises(ValueError, match='`max_image_tokens` must be left out without `fit`'):
        images_alone(tmp_path, 'qwen2_vl', max_image_tokens=8)


@pytest.mark.parametrize(('given', 'cap'), [(['microbatching.slot_tokens=14'], 28), (['dataset.max_length=25'], 25)])
def test_microbatch_memory_is_a_cap(path, processor, tmp_path, given, cap):
    values = [
        f'dataset.path={path}',
        'dataset.fit=true',
        'dataset.video={fps: 10, max_frames: 8}',
        'microbatching.device_train_microbatch_size=2',
        f'loader.lengths_folder={tmp_path}',
        'loader.num_workers=0',
    ]
    config = load_config(ROOT / 'yamls' / 'llava_json.yaml', [*values, *given])
    dataset = source_of(config).build_dataset(processor)
    assert cap - 4 < max(sizes(dataset, processor)[0]) <= cap


COORDINATES = {
    'The cat is at [120, 40, 150, 90].': '[120, 40, 150, 90]',
    '<|box_start|>(12,40),(150,90)<|box_end|>': '(12,40),(150,90)',
    '[{"bbox_2d": [1, 2, 30.5, 40], "label": "cat"}]': '[1, 2, 30.5, 40]',
    '{"point_2d": [394, 105]}': 'point_2d": [394, 105]',
    'At [0.12, 0.40, 0.15, 0.90].': None,
    'Numbers: 1, 2, 3, 4 and [5, 6].': None,
    'No box.': None,
}


@pytest.mark.parametrize(('answer', 'expected'), COORDINATES.items())
def test_pixel_coordinates_are_found(answer, expected):
    assert find_pixel_coordinates(answer) == expected


@pytest.mark.parametrize('is_shrunk', [True, False])
def test_coordinates_of_shrunk_images_are_named(tmp_path, caplog, is_shrunk):
    processor = MEDIA['qwen2_vl']().processor
    records = [record(name, ['image']) for name in ('plain', 'box', 'boxes')]
    records[1]['messages'][1]['content'] = 'It is at [120, 40, 150, 90].'
    records[2]['messages'][1]['content'] = '[[1, 2, 3, 4], [5, 6, 7, 8]]'
    Image.effect_noise((96, 96), 90).convert('RGB').save(tmp_path / '0.png')
    path = write(tmp_path, records)
    image_tokens = sizes(open_dataset(path, processor), processor)[1][0]
    dataset = open_dataset(path, processor, fit=True, max_image_tokens=image_tokens - is_shrunk)
    lines = [message for message in caplog.messages if 'pixel coordinates' in message]
    if not is_shrunk:
        assert dataset.fitted() == []
        assert lines == []
        return
    (line,) = lines
    assert 'The first: sample "box"' in line
