# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files with images, videos, sounds and plain text, from the dataset to the gradient of one step."""

from __future__ import annotations

import json
import re
from io import BytesIO

import numpy as np
import pytest
import transformers
from PIL import Image

pytest.importorskip('av')

from composer_tokacc.data import (
    BadSampleError,
    ConversationEncoder,
    LlavaDataset,
    VideoSampling,
    VisionLanguageCollator,
    image_token_ids,
    length_table,
    to_mds,
)
from composer_tokacc.data.files import read_records
from composer_tokacc.data.lengths import build_length_table
from composer_tokacc.layout import BatchLayout
from tests.data.chat_processors import assert_same, learned_text
from tests.data.length_tables import assert_same_table, use_headers
from tests.support.clips import sine, write_media_folder, write_sound, write_video
from tests.support.conversations import write_json
from tests.support.families import MEDIA, SLOT_MEDIA
from tests.support.training import assert_exact

# The media of each sample of a file.
IMAGES_AND_VIDEOS = (
    (),
    ('video',),
    ('image', 'video', 'image'),
    ('video', 'video'),
    (),
    ('image', 'image'),
    ('video',),
    ('image',),
)
ALL_MODALITIES = (
    (),
    ('video',),
    ('image', 'video'),
    ('audio',),
    ('audio', 'image', 'video'),
    (),
    ('image',),
)
SOUNDS = ((), ('audio',), ('audio', 'audio'), (), ('audio',))
# SmolVLM's processor cannot join the pixels of two videos, or of a video and an image.
ONE_VIDEO_AT_MOST = ((), ('video',), ('image',), (), ('image', 'image'), ('video',))

FEW_FRAMES = {'fps': 3, 'max_frames': 8}
# The videos of LLaVA and its kin must have the same number of frames.
THREE_FRAMES = {'num_frames': 3}

# Name of the family -> media of the samples, and sampling of the videos.
FAMILIES = {
    'qwen2_vl': (IMAGES_AND_VIDEOS, FEW_FRAMES),
    'qwen2_5_vl': (IMAGES_AND_VIDEOS, FEW_FRAMES),
    'qwen3_vl': (IMAGES_AND_VIDEOS, FEW_FRAMES),
    'qwen2_5_omni': (ALL_MODALITIES, FEW_FRAMES),
    'qwen2_audio': (SOUNDS, None),
    'llava_onevision': (IMAGES_AND_VIDEOS, THREE_FRAMES),
    'llava_next_video': (IMAGES_AND_VIDEOS, THREE_FRAMES),
    'video_llava': (IMAGES_AND_VIDEOS, THREE_FRAMES),
    'internvl': (IMAGES_AND_VIDEOS, THREE_FRAMES),
    'smolvlm_video': (ONE_VIDEO_AT_MOST, FEW_FRAMES),
}

IS_TRANSFORMERS_4 = transformers.__version__.startswith('4.')
# In Transformers 4 these processors cannot be told that the frames are chosen already.
NOT_OF_TRANSFORMERS_4 = ('video_llava', 'smolvlm_video')


def open_family(name, folder):
    """Returns the case of a family, and a dataset of its samples."""
    if IS_TRANSFORMERS_4 and name in NOT_OF_TRANSFORMERS_4:
        pytest.skip('its processor wants Transformers 5')
    cases = {**MEDIA, **SLOT_MEDIA}
    if name not in cases:
        pytest.skip('its processor wants num2words')
    case = cases[name]()
    media, sampling = FAMILIES[name]
    path = write_media_folder(folder, media)
    return case, LlavaDataset(path, case.processor, video=sampling)


# Together these two have all modalities, and a video as patches and as frames.
QUICK = ('qwen2_5_omni', 'llava_onevision')
FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK]


@pytest.mark.parametrize('name', [*QUICK, *FURTHER])
def test_gradient_is_that_of_one_forward(tmp_path, name):
    case, dataset = open_family(name, tmp_path)
    samples = list(dataset)
    collate = VisionLanguageCollator(case.processor, layout=BatchLayout.for_model(case.model))
    for side, regroup in (('left', True), ('right', False)):
        case.processor.tokenizer.padding_side = side
        assert_exact(case.model, collate(samples), microbatch_size=2, regroup=regroup)


@pytest.mark.parametrize('name', FAMILIES)
def test_table_and_labels_match_a_sample(tmp_path, name):
    case, dataset = open_family(name, tmp_path)
    table = length_table(dataset, case.processor, folder=tmp_path / 'lengths')
    tokenizer = case.processor.tokenizer
    placeholders = list(image_token_ids(case.processor))
    media_of_samples, _ = FAMILIES[name]
    for index, modalities in enumerate(media_of_samples):
        sample = dataset[index]
        for modality in ('image', 'video', 'audio'):
            assert sample.get(f'num_{modality}s', [0]) == [modalities.count(modality)]
        is_placeholder = np.isin(sample['input_ids'], placeholders)
        assert table.lengths[index] == is_placeholder.size
        assert table.image_tokens[index] == is_placeholder.sum()
        assert is_placeholder.any() == bool(modalities)
        has_pixels = 'image' in modalities or 'video' in modalities
        assert (table.vision_patches[index] > 0) == has_pixels
        assert not np.isin(sample['labels'], placeholders).any()
        expected_words = []
        for turn in dataset.records[index].turns:
            if turn.role == 'assistant':
                expected_words += [*turn.text.split(), tokenizer.eos_token]
        assert learned_text(sample, tokenizer).split() == expected_words


@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'llava_onevision', 'internvl'])
def test_lengths_of_videos_without_reading(tmp_path, name, monkeypatch):
    case, dataset = open_family(name, tmp_path)
    expected = build_length_table(list(dataset), case.processor)
    use_headers(monkeypatch)
    monkeypatch.delattr(LlavaDataset, '__getitem__')
    table = build_length_table(dataset, case.processor)
    assert_same_table(table, expected)


def test_unequal_numbers_of_frames_are_refused(tmp_path):
    case, dataset = open_family('llava_onevision', tmp_path)
    longer = LlavaDataset(tmp_path / 'data.json', case.processor, video={'num_frames': 4})
    collate = VisionLanguageCollator(case.processor, layout=BatchLayout.for_model(case.model))
    with pytest.raises(ValueError, match=r"got: 3 .*'s1'.* 4 .*'s6'.*num_frames"):
        collate([dataset[1], longer[6]])


def write_question(folder, modality, *files):
    """Writes a file of one conversation, whose question is about these files."""
    messages = [
        {'role': 'user', 'content': f'<{modality}>' * len(files)},
        {'role': 'assistant', 'content': 'ba'},
    ]
    return write_json(folder, [{'id': 'a', f'{modality}s': files, 'messages': messages}])


@pytest.fixture
def uneven_video(tmp_path):
    """Four frames are taken, at 0, 1.36, 2.72 and 4.08 s. On the screen are the frames of 0, 0.51, 2.3 and 2.3 s."""
    times = [0, 100, 150, 500, 510, 2000, 2100, 2200, 2300, 4900]
    write_video(tmp_path / 'uneven.mkv', times=times)
    return write_question(tmp_path, 'video', 'uneven.mkv')


def test_text_tells_times_of_frames(uneven_video):
    processor = MEDIA['qwen3_vl']().processor
    sample = LlavaDataset(uneven_video, processor, video={'num_frames': 4})[0]
    text = processor.tokenizer.decode(sample['input_ids'][0])
    numbers = re.findall(r'<([\d.]+)seconds', text.replace(' ', ''))
    seconds = [float(number) for number in numbers]
    assert seconds == pytest.approx([0.25, 2.3], abs=0.3)  # the middle of each pair of frames


@pytest.mark.parametrize(
    ('name', 'key'), [('qwen2_5_vl', 'second_per_grid_ts'), ('qwen2_5_omni', 'video_second_per_grid')]
)
def test_model_gets_seconds_per_pair(uneven_video, name, key):
    processor = MEDIA[name]().processor
    num_frames = 4
    sample = LlavaDataset(uneven_video, processor, video={'num_frames': num_frames})[0]
    seconds = 4.9 + 4.9 / 9  # the last of ten frames is shown as long as the others on average
    assert float(sample[key]) == pytest.approx(2 * seconds / num_frames, rel=1e-3)


def test_bad_media_are_skipped_and_counted(tmp_path):
    write_video(tmp_path / 'good.mp4')
    write_sound(tmp_path / 'sound.mp4', sine(0.5))
    (tmp_path / 'folder.mp4').mkdir()
    # The modality, the name of the file, and the words of its message.
    bad_files = [
        ('audio', 'sound.mp4', 'has audios, but the processor takes none; use one with `feature_extractor`'),
        ('video', 'absent.mp4', 'cannot be found'),
        ('video', 'sound.mp4', 'it holds no video'),
        ('video', 'folder.mp4', 'it is no regular file'),
    ]
    records = json.loads(write_question(tmp_path, 'video', 'good.mp4').read_text())
    for modality, file, _ in bad_files:
        records += json.loads(write_question(tmp_path, modality, file).read_text())
    path = write_json(tmp_path, records)
    processor = MEDIA['qwen2_vl']().processor

    dataset = LlavaDataset(path, processor, on_error='skip', lengths_folder=tmp_path / 'lengths', num_workers=0)

    assert len(dataset) == 1
    assert len(dataset.skipped) == len(bad_files)
    for entry, (_, _, reason) in enumerate(bad_files, start=2):
        (line,) = [line for line in dataset.skipped if f'entry {entry})' in line]
        assert reason in line
        assert '\n' not in line
    assert dataset.skip_report().startswith('skipped 4 of 5 samples')


@pytest.mark.parametrize('name', ['fingerprint', 'identity'])
@pytest.mark.parametrize(('modality', 'num_different'), [('video', 3), ('image', 1)])
def test_video_sampling_changes_the_fingerprint(tmp_path, name, modality, num_different):
    if modality == 'video':
        file = write_video(tmp_path / 'a.mp4')
    else:
        file = tmp_path / 'a.png'
        Image.new('RGB', (16, 16)).save(file)
    path = write_question(tmp_path, modality, file.name)
    processor = MEDIA['qwen2_vl']().processor
    fingerprints = set()
    for sampling in (None, {'fps': 2}, {'fps': 3}, {}):  # the first and the last are the same
        dataset = LlavaDataset(path, processor, video=sampling)
        fingerprints.add(getattr(dataset, name)())
    assert len(fingerprints) == num_different


def test_joined_frames_come_in_pairs():
    processor = MEDIA['qwen3_vl']().processor
    encoder = ConversationEncoder(processor, video=VideoSampling(fps=1))
    assert encoder.video == VideoSampling(fps=1, min_frames=2)
    one_frame = ConversationEncoder(processor, video=VideoSampling(num_frames=1))
    assert one_frame.video.count(num_frames=10, duration=1.0) == 2
    with pytest.raises(ValueError, match='2, None and 1'):
        ConversationEncoder(processor, video=VideoSampling(max_frames=1))


@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen2_audio'])
def test_rows_of_shards_are_the_records(tmp_path, name):
    """Checks the columns of a shard without mosaicml-streaming."""
    _, dataset = open_family(name, tmp_path)
    rows = list(to_mds._read_rows(list(read_records(tmp_path / 'data.json'))))
    assert len(rows) == len(dataset)
    for row, expected in zip(rows, dataset, strict=True):
        assert row.keys() == to_mds.SHARD_COLUMNS.keys()
        record_of_shard = json.loads(json.dumps(row['record']))
        record, contents = to_mds.from_row({**row, 'record': record_of_shard})
        files = [BytesIO(content) for content in contents]
        assert_same(dataset.encoder.encode_record(record, files), expected)


@pytest.mark.parametrize(('modality', 'name'), [('video', 'qwen2_vl'), ('audio', 'qwen2_audio')])
@pytest.mark.parametrize('typed', [True, False])
def test_videos_and_audio_in_a_table(tmp_path, monkeypatch, modality, name, typed):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    if modality == 'video':
        file = write_video(tmp_path / 'a.mp4')
        feature = datasets.Video()
    else:
        file = write_sound(tmp_path / 'a.wav', sine(0.3))
        feature = datasets.Audio()
    processor = MEDIA[name]().processor
    path = write_question(tmp_path, modality, file.name)
    expected = LlavaDataset(path, processor)[0]
    (row,) = json.loads(path.read_text())
    row[f'{modality}s'] = [{'bytes': file.read_bytes(), 'path': None}]
    table = datasets.Dataset.from_list([row])
    if typed:
        features = table.features.copy()
        features[f'{modality}s'] = datasets.List(feature)
        table = table.cast(features)
    table.to_parquet(tmp_path / 'table.parquet')
    assert_same(LlavaDataset(tmp_path / 'table.parquet', processor)[0], expected)


def test_list_of_images_as_a_video(tmp_path):
    names = ['0.png', '1.png', '2.png', '3.png']
    for index, name in enumerate(names):
        Image.new('L', (32, 32), 60 * index).save(tmp_path / name)
    processor = MEDIA['qwen2_vl']().processor
    path = write_question(tmp_path, 'video', names)
    dataset = LlavaDataset(path, processor)
    num_pairs, _, _ = dataset[0]['video_grid_thw'][0]
    assert num_pairs == 2
    (tmp_path / '1.png').write_bytes(b'no picture')
    with pytest.raises(BadSampleError, match=r'video file .*0\.png, .*1\.png, .* cannot be read: image 2 of 4'):
        dataset[0]


@pytest.mark.parametrize('modalities', [('video', 'video'), ('video', 'image')])
def test_pixels_that_would_be_dropped(tmp_path, modalities):
    if not SLOT_MEDIA or IS_TRANSFORMERS_4:
        pytest.skip('its processor wants num2words and Transformers 5')
    path = write_media_folder(tmp_path, [modalities, ('video',)])
    dataset = LlavaDataset(path, SLOT_MEDIA['smolvlm_video']().processor, video={'num_frames': 2})
    with pytest.raises(BadSampleError, match=r'"s0" .*SmolVLMProcessor takes one video in a conversation'):
        dataset[0]
    assert dataset[1]['pixel_values'].shape[:2] == (1, 2)
