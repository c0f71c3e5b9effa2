# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A file with images, videos, sounds and plain text -> dataset -> batch -> one step: the gradient of one forward."""

from __future__ import annotations

import copy
import json
import re
from io import BytesIO

import pytest
import torch
import transformers
from PIL import Image

pytest.importorskip('av')

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.data import (
    BadSampleError,
    ConversationEncoder,
    LlavaDataset,
    VideoSampling,
    VisionLanguageCollator,
    image_token_ids,
    length_table,
    lengths,
    to_mds,
)
from composer_tokacc.data.files import read_records
from composer_tokacc.data.lengths import build_length_table
from composer_tokacc.layout import BatchLayout
from tests.data.chat_processors import assert_same
from tests.support.clips import sine, write_media_folder, write_sound, write_video
from tests.support.family_media import MEDIA, SLOT_MEDIA
from tests.support.training import loader, reference_gradients, relative_error, train

PICTURES = (
    (),
    ('video',),
    ('image', 'video', 'image'),
    ('video', 'video'),
    (),
    ('image', 'image'),
    ('video',),
    ('image',),
)
OMNI = ((), ('video',), ('image', 'video'), ('audio',), ('audio', 'image', 'video'), (), ('image',))
SOUNDS = ((), ('audio',), ('audio', 'audio'), (), ('audio',))
# Its processor joins neither the pixels of two videos nor those of a video and an image.
APART = ((), ('video',), ('image',), (), ('image', 'image'), ('video',))
FEW, FIXED = {'fps': 3, 'max_frames': 8}, {'num_frames': 3}
# Rows of the file, and which frames: the videos of LLaVA and its kin must be of one number of frames.
FAMILIES = {
    'qwen2_vl': (PICTURES, FEW),
    'qwen2_5_vl': (PICTURES, FEW),
    'qwen3_vl': (PICTURES, FEW),
    'qwen2_5_omni': (OMNI, FEW),
    'qwen2_audio': (SOUNDS, None),
    'llava_onevision': (PICTURES, FIXED),
    'llava_next_video': (PICTURES, FIXED),
    'video_llava': (PICTURES, FIXED),
    'internvl': (PICTURES, FIXED),
    'smolvlm_video': (APART, FEW),
}


# Neither processor can be told there that the frames are chosen already.
NOT_OF_TRANSFORMERS_4 = ('video_llava', 'smolvlm_video')
IS_TRANSFORMERS_4 = transformers.__version__.startswith('4.')


def load(name, folder, **options):
    if IS_TRANSFORMERS_4 and name in NOT_OF_TRANSFORMERS_4:
        pytest.skip('its processor wants Transformers 5')
    cases = {**MEDIA, **SLOT_MEDIA}
    if name not in cases:
        pytest.skip('its processor wants num2words')
    case, (rows, video) = cases[name](), FAMILIES[name]
    path = write_media_folder(folder, rows)
    return case, LlavaDataset(path, case.processor, video=video, **options)


CUTS = [('right', 2, True), ('right', 3, False), ('left', 2, True)]
OTHER_CUTS = [('right', 2, False), ('left', 2, False), ('right', 3, True)]
OTHER_CUTS += [('right', size, regroup) for size in (1, None) for regroup in (True, False)]


QUICK = ('qwen2_5_omni', 'llava_onevision')  # all modalities; a video as patches, and as frames
GRADIENTS = [
    pytest.param(name, cuts, marks=[] if name in QUICK and cuts is CUTS else pytest.mark.slow)
    for name in FAMILIES
    for cuts in (CUTS, OTHER_CUTS)
]


@pytest.mark.parametrize(('name', 'cuts'), GRADIENTS)
def test_gradient_is_that_of_one_forward(tmp_path, name, cuts):
    case, dataset = load(name, tmp_path)
    samples, batches = [dataset[i] for i in range(len(dataset))], {}
    for side, microbatch_size, regroup in cuts:
        if side not in batches:
            case.processor.tokenizer.padding_side = side
            batch = VisionLanguageCollator(case.processor, layout=BatchLayout.for_model(case.model))(samples)
            batches[side] = batch, reference_gradients(case.model, batch)[0]
        batch, expected = batches[side]
        spec = token_data_spec(loader(batch), regroup=regroup)
        model, size = copy.deepcopy(case.model), microbatch_size or len(dataset)
        recorder, *_ = train(model, spec, algorithms=[TokenAccumulation()], microbatch_size=size)
        error = relative_error(recorder.gradients, expected)
        assert error < 1e-6, f'{side}, {microbatch_size=}, {regroup=}'


@pytest.mark.parametrize('name', FAMILIES)
def test_a_sample_says_what_it_holds(tmp_path, name):
    case, dataset = load(name, tmp_path)
    rows = FAMILIES[name][0]
    table = length_table(dataset, case.processor, folder=tmp_path / 'lengths')
    placeholders = set(image_token_ids(case.processor))
    for index, kinds in enumerate(rows):
        sample = dataset[index]
        for kind in ('image', 'video', 'audio'):
            assert sample.get(f'num_{kind}s', [0]) == [kinds.count(kind)]
        ids = sample['input_ids'][0].tolist()
        assert table.lengths[index] == len(ids)
        assert table.image_tokens[index] == sum(token in placeholders for token in ids)
        assert bool(table.image_tokens[index]) == bool(kinds)
        assert bool(table.vision_patches[index]) == ({'image', 'video'} & set(kinds) != set())
        learnt = sample['labels'][sample['labels'] != -100]
        assert not placeholders & set(learnt.tolist())
        spoken = [turn.text.split() for turn in dataset.records[index].turns if turn.role == 'assistant']
        end = case.processor.tokenizer.eos_token
        assert case.processor.tokenizer.decode(learnt).split() == [word for words in spoken for word in [*words, end]]


@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'llava_onevision', 'internvl'])
def test_lengths_of_videos_without_reading(tmp_path, name, monkeypatch):
    case, dataset = load(name, tmp_path)
    expected = build_length_table([dataset[index] for index in range(len(dataset))], case.processor)
    monkeypatch.setattr(lengths, 'FEWEST_FOR_HEADERS', 0)
    monkeypatch.setattr(lengths, 'NUM_CHECKED', 0)
    monkeypatch.delattr(LlavaDataset, '__getitem__')
    table = build_length_table(dataset, case.processor)
    for column in lengths.TABLE_COLUMNS:
        assert getattr(table, column).tolist() == getattr(expected, column).tolist()


def test_unequal_numbers_of_frames_are_refused(tmp_path):
    case, dataset = load('llava_onevision', tmp_path)
    longer = LlavaDataset(tmp_path / 'data.json', case.processor, video={'num_frames': 4})
    collate = VisionLanguageCollator(case.processor, layout=BatchLayout.for_model(case.model))
    with pytest.raises(ValueError, match=r"got: 3 \(sample \['s1'\]\), 4 \(sample \['s6'\]\).*num_frames"):
        collate([dataset[1], longer[6]])


def ask(folder, kind, *files, name='data.json'):
    """A file of one conversation about some media of a kind."""
    messages = [{'role': 'user', 'content': f'<{kind}>' * len(files)}, {'role': 'assistant', 'content': 'ba'}]
    (folder / name).write_text(json.dumps([{'id': 'a', f'{kind}s': files, 'messages': messages}]))
    return folder / name


def test_model_is_told_times_of_frames(tmp_path):
    times = [0, 100, 150, 500, 510, 2000, 2100, 2200, 2300, 4900]
    path = write_video(tmp_path / 'uneven.mkv', times=times)
    file = ask(tmp_path, 'video', path.name)
    # On the screen at 0, 1.36, 2.72 and 4.08 s are the frames of 0, 0.51, 2.3 and 2.3 s.
    processor = MEDIA['qwen3_vl']().processor
    text = processor.tokenizer.decode(LlavaDataset(file, processor, video={'num_frames': 4})[0]['input_ids'][0])
    shown = [float(''.join(found.split())) for found in re.findall(r'< ([\d. ]+) seconds', text)]
    assert shown == pytest.approx([0.25, 2.3], abs=0.3)
    for name, key in (('qwen2_5_vl', 'second_per_grid_ts'), ('qwen2_5_omni', 'video_second_per_grid')):
        sample = LlavaDataset(file, MEDIA[name]().processor, video={'num_frames': 4})[0]
        assert float(sample[key]) == pytest.approx(2 * 5.444 / 4, rel=1e-3), name


@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen3_vl', 'llava_next_video', 'internvl'])
def test_one_frame_and_images_as_video(tmp_path, name):
    write_video(tmp_path / 'one.mp4', [90])
    write_video(tmp_path / 'many.gif', codec='gif', pixels='rgb8')
    case = MEDIA[name]()
    for files in (['one.mp4'], ['many.gif']):
        sample = LlavaDataset(ask(tmp_path, 'video', *files), case.processor)[0]
        assert sample['num_videos'] == [1]
        assert torch.isfinite(case.loss(sample))


def test_bad_media_are_skipped_and_counted(tmp_path):
    write_video(tmp_path / 'good.mp4')
    write_sound(tmp_path / 'sound.mp4', sine(0.5))
    (tmp_path / 'folder.mp4').mkdir()
    reasons = {
        ('audio', 'sound.mp4'): 'has audios, but the processor takes none; use one with `feature_extractor`',
        ('video', 'absent.mp4'): 'does not exist',
        ('video', 'sound.mp4'): 'it holds no video',
        ('video', 'folder.mp4'): 'it is no regular file',
    }
    records = []
    for kind, name in [('video', 'good.mp4'), *reasons]:
        records += json.loads(ask(tmp_path, kind, name).read_text())
    (tmp_path / 'data.json').write_text('\n'.join(map(json.dumps, records)))
    processor = MEDIA['qwen2_vl']().processor
    options = {'on_error': 'skip', 'lengths_folder': tmp_path / 'lengths', 'num_workers': 0}
    dataset = LlavaDataset(tmp_path / 'data.json', processor, **options)
    assert len(dataset) == 1
    for reason, line in zip(
        reasons.values(), sorted(dataset.skipped, key=lambda line: 'line 2' not in line), strict=True
    ):
        assert reason in line
        assert '\n' not in line
    assert dataset.skip_report().startswith('skipped 4 of 5 samples')


def test_audio_that_is_too_long(tmp_path):
    write_sound(tmp_path / 'long.wav', sine(1.2, rate=8000), rate=8000)
    dataset = LlavaDataset(ask(tmp_path, 'audio', 'long.wav'), MEDIA['qwen2_audio']().processor)
    with pytest.raises(BadSampleError, match=r'sample "a" .*an audio must be at most 1\.0 s, .* got: 1\.2 s'):
        dataset[0]


@pytest.mark.parametrize('name', ['fingerprint', 'identity'])
def test_video_sampling_changes_the_fingerprint(tmp_path, name):
    write_video(tmp_path / 'a.mp4')
    Image.new('RGB', (16, 16)).save(tmp_path / 'a.png')
    processor, different = MEDIA['qwen2_vl']().processor, {'video': 3, 'image': 1}
    for kind, file in (('video', 'a.mp4'), ('image', 'a.png')):
        path = ask(tmp_path, kind, file)
        sampled = [LlavaDataset(path, processor, video=video) for video in (None, {'fps': 2}, {'fps': 3}, {})]
        assert len({getattr(dataset, name)() for dataset in sampled}) == different[kind]


def test_joined_frames_come_in_pairs():
    encoder = ConversationEncoder(MEDIA['qwen3_vl']().processor, video=VideoSampling(fps=1))
    assert encoder.video == VideoSampling(fps=1, min_frames=2)


@pytest.mark.parametrize('name', ['qwen2_vl', 'qwen2_audio'])
def test_rows_of_shards_are_the_records(tmp_path, name):
    """The columns that streaming writes, without streaming."""
    _, dataset = load(name, tmp_path)
    rows = list(to_mds._read_rows(list(read_records(tmp_path / 'data.json'))))
    for index, row in enumerate(rows):
        assert row.keys() == to_mds.SHARD_COLUMNS.keys()
        record, files = to_mds.from_row({**row, 'record': json.loads(json.dumps(row['record']))})
        assert_same(dataset.encoder.encode_record(record, [BytesIO(file) for file in files]), dataset[index])


@pytest.mark.parametrize(('kind', 'name'), [('video', 'qwen2_vl'), ('audio', 'qwen2_audio')])
@pytest.mark.parametrize('typed', [True, False])
def test_videos_and_audio_in_a_table(tmp_path, monkeypatch, kind, name, typed):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    path = write_video(tmp_path / 'a.mp4') if kind == 'video' else write_sound(tmp_path / 'a.wav', sine(0.3))
    processor = MEDIA[name]().processor
    expected = LlavaDataset(ask(tmp_path, kind, path.name), processor)[0]
    (row,) = json.loads((tmp_path / 'data.json').read_text())
    row[f'{kind}s'] = [{'bytes': path.read_bytes(), 'path': None}]
    table = datasets.Dataset.from_list([row])
    if typed:
        feature = datasets.Video() if kind == 'video' else datasets.Audio()
        table = table.cast(datasets.Features({**table.features, f'{kind}s': datasets.List(feature)}))
    table.to_parquet(tmp_path / 'table.parquet')
    assert_same(LlavaDataset(tmp_path / 'table.parquet', processor)[0], expected)


def test_list_of_images_as_a_video(tmp_path):
    for index in range(4):
        Image.new('RGB', (32, 32), (60 * index,) * 3).save(tmp_path / f'{index}.png')
    processor = MEDIA['qwen2_vl']().processor
    sample = LlavaDataset(ask(tmp_path, 'video', [f'{index}.png' for index in range(4)]), processor)[0]
    assert sample['video_grid_thw'][0, 0] == 2
    with pytest.raises(BadSampleError, match=r'video file .*9\.png does not exist'):
        LlavaDataset(ask(tmp_path, 'video', ['0.png', '9.png']), processor)
    (tmp_path / '1.png').write_bytes(b'no picture')
    with pytest.raises(BadSampleError, match=r'sample "a" .*video file .*0\.png, .*1\.png cannot be read'):
        LlavaDataset(ask(tmp_path, 'video', ['0.png', '1.png']), processor)[0]


@pytest.mark.parametrize('kinds', [('video', 'video'), ('video', 'image')])
def test_pixels_that_would_be_dropped(tmp_path, kinds):
    if not SLOT_MEDIA or IS_TRANSFORMERS_4:
        pytest.skip('its processor wants num2words and Transformers 5')
    path = write_media_folder(tmp_path, [kinds, ('video',)])
    dataset = LlavaDataset(path, SLOT_MEDIA['smolvlm_video']().processor, video={'num_frames': 2})
    with pytest.raises(
        BadSampleError, match=r'sample "s0" .*SmolVLMProcessor, which takes one video in a conversation'
    ):
        dataset[0]
    assert dataset[1]['pixel_values'].shape[:2] == (1, 2)
