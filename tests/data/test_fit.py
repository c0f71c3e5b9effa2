# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media are made smaller until a sample fits its caps: no smaller than needed, the same each time, and reported."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from PIL import Image

pytest.importorskip('av')

from composer_tokacc.data import (
    BadSampleError,
    LlavaDataset,
    image_token_ids,
    length_table,
)
from composer_tokacc.data.conversation import AudioWindow
from composer_tokacc.data.files import read_records
from composer_tokacc.data.fit import PROBE_FRAMES, FittingEncoder, find_pixel_coordinates, share_of
from composer_tokacc.data.media import open_files
from composer_tokacc.programs import load_config
from composer_tokacc.programs.sources import source_of
from tests.data.chat_processors import PROCESSORS, assert_same
from tests.support.clips import SHADES, sine, write_sound, write_video
from tests.support.conversations import write_json
from tests.support.families import MEDIA
from tests.support.launch import ROOT


@pytest.fixture(scope='module')
def processor(request):
    return MEDIA[getattr(request, 'param', 'qwen2_vl')]().processor


def write_noise(path, size):
    noise = Image.effect_noise(size, 90)
    noise.convert('RGB').save(path)


def record_of(name, modalities, text='bi da', answer='fo gu'):
    """Returns a record about ``0.png``, ``1.png`` and so on, and about ``film.mp4``."""
    placeholders = ''.join(f'<{modality}> ' for modality in modalities)
    question = {'role': 'user', 'content': placeholders + text}
    return {
        'id': name,
        'images': [f'{number}.png' for number in range(modalities.count('image'))],
        'videos': ['film.mp4'] * modalities.count('video'),
        'messages': [question, {'role': 'assistant', 'content': answer}],
    }


@pytest.fixture
def path(tmp_path):
    """Writes samples of text, of one to three images of unequal sizes, and two with a video."""
    write_noise(tmp_path / '0.png', (16, 16))
    write_noise(tmp_path / '1.png', (64, 48))
    write_noise(tmp_path / '2.png', (20, 90))
    write_video(tmp_path / 'film.mp4', size=(64, 64))
    records = [
        record_of('one', ['image']),
        record_of('text', []),
        record_of('two', ['image', 'image']),
        record_of('three', ['image', 'image', 'image']),
        record_of('film', ['video']),
        record_of('both', ['image', 'video']),
    ]
    return write_json(tmp_path, records)


def count_tokens(dataset, processor):
    """Returns the number of tokens of each sample, and how many of them stand for media."""
    placeholders = image_token_ids(processor)
    lengths = []
    media_tokens = []
    for sample in dataset:
        ids = sample['input_ids']
        lengths.append(ids.numel())
        media_tokens.append(int(np.isin(ids, placeholders).sum()))
    return lengths, media_tokens


def open_dataset(path, processor, **options):
    sampling = {'fps': 10, 'max_frames': 8}
    return LlavaDataset(path, processor, video=sampling, num_workers=0, **options)


@pytest.mark.parametrize('processor', ['qwen2_vl', 'qwen3_vl'], indirect=True)
@pytest.mark.parametrize('share', [0.9, 0.5])
def test_samples_just_fit_the_cap(path, processor, share):
    full_dataset = open_dataset(path, processor)
    lengths, media_tokens = count_tokens(full_dataset, processor)
    cap = int(max(lengths) * share)

    dataset = open_dataset(path, processor, fit=True, max_length=cap)

    fitted_lengths, fitted_media_tokens = count_tokens(dataset, processor)
    table = dataset.measured
    reports = {report['sample']: report for report in dataset.fitted()}
    assert reports
    for index, record in enumerate(dataset.records):
        assert fitted_lengths[index] <= cap
        if lengths[index] <= cap:
            assert fitted_lengths[index] == lengths[index]
            continue
        assert fitted_media_tokens[index] < media_tokens[index]
        report = reports.pop(record.sample_id)
        assert report['tokens'] == fitted_lengths[index]
        steps = int(table.shrink_steps[index])
        assert report['share'] == pytest.approx(share_of(steps), abs=1e-4)
        # With one step less the sample is still too long.
        larger_encoder = dataset.encoder._encoder_with_steps(steps - 1)
        files = []
        for medium in record.media:
            files += [path.parent / name for name in medium.names]
        larger_sample = super(FittingEncoder, larger_encoder).encode_record(record, files)
        assert larger_sample['input_ids'].numel() > cap
    assert not reports, 'a sample is reported that fitted before'


def test_table_holds_what_samples_are(path, processor):
    dataset = open_dataset(path, processor, fit=True, max_length=24, max_image_tokens=16)

    table = length_table(dataset, processor)

    lengths, media_tokens = count_tokens(dataset, processor)
    assert table.lengths.tolist() == lengths
    assert table.image_tokens.tolist() == media_tokens
    assert max(table.image_tokens) <= 16


def test_samples_are_fitted_alike_again(path, processor, tmp_path):
    caps = {'fit': True, 'max_length': 24, 'max_image_tokens': 16}

    dataset = open_dataset(path, processor, **caps)
    measured_again = open_dataset(path, processor, **caps, lengths_folder=tmp_path / 'new')
    other_caps = open_dataset(path, processor, max_length=200)

    assert dataset.fitted() == measured_again.fitted()
    assert dataset.identity() == measured_again.identity()
    assert dataset.identity() != other_caps.identity()
    for sample, expected in zip(dataset, measured_again, strict=True):
        assert_same(sample, expected)
        assert 'shrink_steps' not in sample


def test_image_that_has_changed_since_the_table(processor, tmp_path):
    """The new image has as many bytes as the old one, so it has the same fingerprint."""
    image = tmp_path / '0.ppm'
    record = record_of('one', ['image'])
    record['images'] = [image.name]
    path = write_json(tmp_path, [record])
    options = {'fit': True, 'max_length': 19, 'lengths_folder': tmp_path / 'tables'}
    write_noise(image, (18, 245))
    [sample_of_table] = open_dataset(path, processor, **options)
    assert sample_of_table['input_ids'].shape == (1, 18)

    write_noise(image, (10, 441))
    [sample] = open_dataset(path, processor, **options)

    num_rows, length = sample['input_ids'].shape
    assert num_rows == 1
    assert length <= 19
    assert 'shrink_steps' not in sample


def test_a_video_gives_frames_and_pixels(path, processor):
    film = 4  # index of the sample
    dataset = open_dataset(path, processor)
    fitted_dataset = open_dataset(path, processor, fit=True, max_image_tokens=8)

    [[frames, height, width]] = dataset[film]['video_grid_thw'].tolist()
    [[fitted_frames, fitted_height, fitted_width]] = fitted_dataset[film]['video_grid_thw'].tolist()

    assert fitted_frames < frames
    assert fitted_height * fitted_width <= height * width


def test_fewer_frames_of_many(processor, tmp_path):
    """A video of ``PROBE_FRAMES`` frames shows whether fewer frames make fewer tokens. Here no fewer are allowed."""
    write_video(tmp_path / 'film.mp4', SHADES * 2, size=(64, 64))
    path = write_json(tmp_path, [record_of('film', ['video'])])
    options = {'video': {'fps': 10, 'min_frames': PROBE_FRAMES}, 'num_workers': 0}
    frames_of_patch = 2
    fewest_patches = PROBE_FRAMES // frames_of_patch

    [full_video] = LlavaDataset(path, processor, **options)
    [fitted_video] = LlavaDataset(path, processor, fit=True, max_image_tokens=fewest_patches, **options)

    assert full_video['video_grid_thw'][0, 0] == 20 // frames_of_patch
    assert fitted_video['video_grid_thw'][0, 0] == fewest_patches


def test_long_audio_is_encoded_once(tmp_path, monkeypatch):
    """Only the first one is encoded twice: with noise at its end, which shows whether the processor reads it."""
    processor = MEDIA['qwen2_5_omni']().processor
    encoder = FittingEncoder(processor, max_length=1000)
    encoder._audio_window = AudioWindow(1600)  # samples: the sound is longer
    write_sound(tmp_path / 'sound.wav', sine(1))
    entry = record_of('sound', ['audio'])
    entry['audios'] = ['sound.wav']
    path = write_json(tmp_path, [entry])
    [record] = read_records(path)
    encode = mock.Mock(wraps=encoder._encode)
    monkeypatch.setattr(encoder, '_encode', encode)

    for num_calls in (2, 3, 4):
        encoder.encode_record(record, open_files(record))
        assert encode.call_count == num_calls


@pytest.fixture
def path_of_long_text(tmp_path):
    """Writes a short sample, and one whose text is over 40 tokens."""
    write_noise(tmp_path / '0.png', (16, 16))
    short = record_of('short', ['image'])
    long = record_of('long', ['image'], text='bi ' * 60)
    return write_json(tmp_path, [short, long])


def test_text_that_is_too_long(processor, path_of_long_text):
    with pytest.raises(BadSampleError, match=r'"long".*`max_length`=40 .* got: \d+ tokens'):
        open_dataset(path_of_long_text, processor, fit=True, max_length=40)


def test_text_that_is_too_long_is_skipped(processor, path_of_long_text):
    dataset = open_dataset(path_of_long_text, processor, fit=True, max_length=40, on_error='skip')

    assert [record.sample_id for record in dataset.records] == ['short']
    assert '"long"' in dataset.skip_report()


def open_images(folder, family, **options):
    """Opens samples of one and of two images, with the processor of a family without videos."""
    write_noise(folder / '0.png', (400, 320))
    write_noise(folder / '1.png', (40, 30))
    make_processor, _ = PROCESSORS[family]
    processor = make_processor()
    records = [record_of('one', ['image']), record_of('two', ['image', 'image'])]
    path = write_json(folder, records)
    return processor, LlavaDataset(path, processor, num_workers=0, **options)


@pytest.mark.parametrize('family', ['qwen2_vl', 'idefics3'])
def test_budget_of_pixels_or_longest_side(tmp_path, family):
    processor, dataset = open_images(tmp_path, family)
    _, media_tokens = count_tokens(dataset, processor)
    cap = min(media_tokens) - 1

    processor, fitted = open_images(tmp_path, family, fit=True, max_image_tokens=cap)

    _, fitted_media_tokens = count_tokens(fitted, processor)
    assert max(fitted_media_tokens) > 0
    assert max(fitted_media_tokens) <= cap
    assert [report['sample'] for report in fitted.fitted()] == ['one', 'two']


def test_processor_loaded_with_max_pixels(path, processor, tmp_path):
    """Transformers passes `max_pixels` on to each call, where it would take the place of a smaller `size`."""
    folder = tmp_path / 'processor'
    processor.save_pretrained(folder)
    loaded = type(processor).from_pretrained(folder, max_pixels=40 * 40)
    loaded.chat_template = processor.chat_template

    dataset = open_dataset(path, loaded, fit=True, max_length=24, on_error='skip')

    assert not dataset.skipped
    assert [report['sample'] for report in dataset.fitted()] == ['two', 'three', 'film', 'both']


@pytest.mark.parametrize('family', ['small', 'llava', 'llava_next', 'llava_onevision'])
def test_processor_of_fixed_images_is_refused(tmp_path, family):
    with pytest.raises(ValueError, match='`fit` must be left out, because Llava'):
        open_images(tmp_path, family, fit=True, max_length=30)


def test_fit_needs_a_cap(tmp_path):
    with pytest.raises(ValueError, match='`fit` must have a cap'):
        open_images(tmp_path, 'qwen2_vl', fit=True)


def test_cap_needs_fit(tmp_path):
    with pytest.raises(ValueError, match='`max_image_tokens` must be left out'):
        open_images(tmp_path, 'qwen2_vl', max_image_tokens=8)


@pytest.mark.parametrize('cap', [0, '8'])
def test_cap_that_is_no_count(tmp_path, cap):
    with pytest.raises(ValueError, match=f'`max_image_tokens` must be a positive integer, got: {cap!r}'):
        open_images(tmp_path, 'qwen2_vl', fit=True, max_image_tokens=cap)


@pytest.mark.parametrize(('override', 'cap'), [('microbatching.slot_tokens=14', 28), ('dataset.max_length=25', 25)])
def test_microbatch_memory_is_a_cap(path, processor, tmp_path, override, cap):
    overrides = [
        f'dataset.path={path}',
        'dataset.fit=true',
        'dataset.video={fps: 10, max_frames: 8}',
        'microbatching.device_train_microbatch_size=2',
        f'loader.lengths_folder={tmp_path}',
        'loader.num_workers=0',
        override,
    ]
    config = load_config(ROOT / 'yamls' / 'llava_json.yaml', overrides)
    source = source_of(config)
    source.processor = processor
    lengths, _ = count_tokens(source.train_dataset, processor)
    assert cap - 4 < max(lengths) <= cap  # an image loses several tokens in a step


def test_long_text_beside_an_image_is_skipped(tmp_path):
    """Idefics3's processor makes images without any pixel, on which torch raises a RuntimeError."""
    write_noise(tmp_path / '0.png', (64, 48))
    long = record_of('long', ['image'], text='bi ' * 500)
    short = record_of('short', ['image'])
    path = write_json(tmp_path, [long, short])
    make_processor, _ = PROCESSORS['idefics3']

    dataset = open_dataset(path, make_processor(), fit=True, max_length=100, on_error='skip')

    assert [record.sample_id for record in dataset.records] == ['short']
    [reason] = dataset.skipped
    assert 'sample "long"' in reason


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


def open_answers_with_coordinates(folder, **options):
    write_noise(folder / '0.png', (96, 96))
    records = [
        record_of('plain', ['image']),
        record_of('box', ['image'], answer='It is at [120, 40, 150, 90].'),
        record_of('boxes', ['image'], answer='[[1, 2, 3, 4], [5, 6, 7, 8]]'),
    ]
    processor = MEDIA['qwen2_vl']().processor
    return processor, open_dataset(write_json(folder, records), processor, **options)


def test_coordinates_of_shrunk_images_are_named(tmp_path, caplog):
    processor, dataset = open_answers_with_coordinates(tmp_path)
    _, image_tokens = count_tokens(dataset, processor)
    cap = max(image_tokens)

    _, full_size = open_answers_with_coordinates(tmp_path, fit=True, max_image_tokens=cap)

    assert full_size.fitted() == []
    assert 'pixel coordinates' not in caplog.text

    open_answers_with_coordinates(tmp_path, fit=True, max_image_tokens=cap - 1)

    assert caplog.text.count('pixel coordinates') == 1
    assert 'sample "box"' in caplog.text
