# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Videos and sounds as they are on disk: which frames are taken, when they are shown, and what cannot be read."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.signal import resample

pytest.importorskip('av')

import av

from composer_tokacc.data import BadSampleError, VideoSampling, videos
from composer_tokacc.data.media import decode_media, open_files
from composer_tokacc.data.records import Medium, Record, Turn
from tests.support.clips import SHADES, sine, write_encoded_sound, write_sound, write_video

ALL = VideoSampling(num_frames=len(SHADES))


def record_of(kind, *files):
    turns = (Turn('user', f'<{kind}>?'), Turn('assistant', 'Yes.'))
    return Record(sample_id='a', source='data.json, line 3', turns=turns, media=(Medium(kind, tuple(files)),))


def read(kind, *paths, **options):
    record = record_of(kind, *map(str, paths))
    (content,) = decode_media(record, open_files(record), **options)[kind]
    return content


def shades_of(video):
    """Shade of each frame, right of the middle."""
    return [round(float(frame[:, :, frame.shape[2] * 3 // 4 :].float().mean())) for frame in video.frames]


def close_to(shades):
    """Codecs lose a little."""
    return pytest.approx(shades, abs=12)


FILMS = {
    'mpeg4.mp4': {},
    'mpeg4.mkv': {},
    'mpeg4_b.avi': {'options': {'bf': '2', 'g': '4'}},
    'mpeg2.mkv': {'codec': 'mpeg2video', 'rate': 25, 'options': {'bf': '2', 'g': '4'}},
    'flash.flv': {'codec': 'flv', 'options': {'g': '4'}},
    'pictures.gif': {'codec': 'gif', 'pixels': 'rgb8'},
    'h264.mp4': {'codec': 'libx264', 'options': {'g': '4', 'bf': '2', 'x264-params': 'open-gop=1'}},
    'vp8.webm': {'codec': 'libvpx', 'options': {'g': '4'}},
}


def film(folder, name):
    options = FILMS[name]
    if options.get('codec', 'mpeg4') not in av.codecs_available:
        pytest.skip(f'PyAV without {options["codec"]}')
    return write_video(folder / name, **options)


@pytest.mark.parametrize('name', FILMS)
def test_frames_are_those_that_were_filmed(tmp_path, name):
    path = film(tmp_path, name)
    video = read('video', path, video=ALL)
    assert video.frames.shape == (len(SHADES), 3, 32, 32)
    assert shades_of(video) == close_to(SHADES)
    rate = FILMS[name].get('rate', 10)
    assert video.metadata['fps'] == pytest.approx(rate, rel=1e-3)
    assert video.metadata['frames_indices'] == list(range(len(SHADES)))
    assert video.metadata['total_num_frames'] == len(SHADES)
    assert video.metadata['duration'] == pytest.approx(len(SHADES) / rate, rel=1e-3)


@pytest.mark.parametrize('name', FILMS)
def test_some_frames_are_those_of_all(tmp_path, name):
    """Decoding starts at key frames; what it skips does not shift what it finds."""
    path = film(tmp_path, name)
    every = read('video', path, video=ALL).frames
    for count in (1, 2, 3, 4, 7):
        video = read('video', path, video=VideoSampling(num_frames=count))
        # As transformers samples by itself.
        chosen = (np.arange(count) * len(SHADES) // count).tolist()
        assert video.metadata['frames_indices'] == chosen
        assert (video.frames == every[chosen]).all()


@pytest.mark.parametrize(
    ('options', 'count'),
    [
        ({}, 2),
        ({'fps': 3}, 3),
        ({'fps': 10}, 10),
        ({'fps': 99}, 10),
        ({'fps': 0.1}, 1),
        ({'fps': 0.1, 'min_frames': 4}, 4),
        ({'fps': 10, 'max_frames': 4}, 4),
        ({'num_frames': 16}, 16),
    ],
)
def test_number_of_frames(options, count):
    times = [i / 10 for i in range(10)]
    chosen = VideoSampling(**options).choose(times, 1.0)
    assert len(chosen) == count
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == (10 * (count - 1)) // count


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'num_frames': 0}, '`num_frames` must be a positive number'),
        ({'num_frames': 2.5}, '`num_frames` must be a positive number'),
        ({'num_frames': True}, '`num_frames` must be a positive number'),
        ({'fps': -1}, '`fps` must be a positive number'),
        ({'fps': '2'}, '`fps` must be a positive number'),
        ({'fps': float('nan')}, '`fps` must be a positive number'),
        ({'max_frames': 4, 'min_frames': 5}, '`max_frames` must be at least the frames asked for, got: 4 < 5'),
        ({'num_frames': 256}, '`max_frames` must be at least the frames asked for, got: 128 < 256'),
        ({'num_frames': 4, 'fps': 2}, '`fps` must be left out beside `num_frames`'),
    ],
)
def test_sampling_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VideoSampling(**options)


def test_uneven_times_of_frames(tmp_path):
    times = [0, 100, 150, 500, 510, 2000, 2100, 2200, 2300, 4900]
    path = write_video(tmp_path / 'uneven.mkv', times=times)
    video = read('video', path, video=VideoSampling(num_frames=5))
    # At 0, 1.09, 2.18, 3.27 and 4.36 s: what is on the screen at that moment.
    assert shades_of(video) == close_to([SHADES[i] for i in (0, 4, 6, 8, 8)])
    shown = [number / video.metadata['fps'] for number in video.metadata['frames_indices']]
    assert shown == pytest.approx([0, 0.51, 2.1, 2.3, 2.3], abs=0.005)
    assert video.metadata['duration'] == pytest.approx(4.9 * 10 / 9, abs=0.01)


# Top left, top right, bottom left and bottom right of a film whose upper right quarter is white.
@pytest.mark.parametrize(
    ('matrix', 'quarters'),
    [
        ((1, 0, 0, 1), [0, 1, 0, 0]),
        ((0, 1, -1, 0), [0, 0, 0, 1]),  # a quarter, clockwise
        ((-1, 0, 0, -1), [0, 0, 1, 0]),
        ((0, -1, 1, 0), [1, 0, 0, 0]),
        ((-1, 0, 0, 1), [1, 0, 0, 0]),  # mirrored
        ((1, 0, 0, -1), [0, 0, 0, 1]),
        ((0, 1, 1, 0), [0, 0, 1, 0]),
        ((0, -1, -1, 0), [0, 1, 0, 0]),
    ],
)
def test_video_is_turned_and_mirrored(tmp_path, matrix, quarters):
    path = tmp_path / 'turned.mp4'
    with av.open(str(path), 'w') as container:
        stream = container.add_stream('mpeg4', rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, 'yuv420p'
        picture = np.zeros((32, 48, 3), np.uint8)
        picture[:16, 24:] = 255
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(picture, format='rgb24')), *stream.encode()])
    content = path.read_bytes()
    upright, turned = (
        struct.pack('>9i', a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
        for a, b, c, d in ((1, 0, 0, 1), matrix)
    )
    place = content.index(upright, content.index(b'tkhd'))
    path.write_bytes(content[:place] + turned + content[place + len(turned) :])
    frame = read('video', path, video=VideoSampling(num_frames=1)).frames[0].float().mean(dim=0)
    height, width = frame.shape
    assert (height, width) == ((48, 32) if matrix[0] == 0 else (32, 48))
    halves = [half.chunk(2, dim=1) for half in frame.chunk(2)]
    assert [round(float(quarter.mean()) / 255) for half in halves for quarter in half] == quarters


def test_video_that_begins_late_is_whole(tmp_path):
    for name in ('late.mkv', 'late.mp4'):
        times = [20_000 + 100 * i for i in range(len(SHADES))]
        video = read('video', write_video(tmp_path / name, times=times), video=ALL)
        assert shades_of(video) == close_to(SHADES)
        assert video.metadata['duration'] == pytest.approx(1.0)


def test_frames_outside_the_edit_list(tmp_path):
    path = film(tmp_path, 'h264.mp4')
    content = bytearray(path.read_bytes())
    place = content.index(b'elst') + 12
    duration, start, rate = struct.unpack('>IiI', content[place : place + 12])
    content[place : place + 12] = struct.pack('>IiI', duration - 500, start + 5 * 1024, rate)
    path.write_bytes(content)
    video = read('video', path, video=VideoSampling(num_frames=5))
    assert shades_of(video) == close_to(SHADES[5:])
    assert video.metadata['duration'] == pytest.approx(0.5)


def test_place_behind_the_frame(tmp_path):
    path = film(tmp_path, 'mpeg4_b.avi')
    with videos._open_stream(path, 'video') as (container, stream):
        stamps, keys = videos._read_stamps(container, stream)
    wrong = [videos.KeyFrame(stamp, stamp) for stamp, _ in keys]  # this container looks for times of decoding
    assert wrong != keys
    frames, expected = (videos._decode_frames(path, stamps[5:6], places) for places in (wrong, []))
    assert (frames[stamps[5]] == expected[stamps[5]]).all()


def test_one_frame(tmp_path):
    path = write_video(tmp_path / 'one.mp4', SHADES[3:4])
    video = read('video', path)
    assert shades_of(video) == close_to(SHADES[3:4])
    assert video.metadata['frames_indices'] == [0]
    assert video.metadata['fps'] == pytest.approx(10)
    assert shades_of(read('video', path, video=VideoSampling(min_frames=2))) == close_to(SHADES[3:4] * 2)


def test_name_says_nothing_about_the_content(tmp_path):
    film_as_picture = write_video(tmp_path / 'film.mp4').rename(tmp_path / 'film.jpg')
    assert shades_of(read('video', film_as_picture, video=ALL)) == close_to(SHADES)
    sound_as_film = write_sound(tmp_path / 'sound.mp4', sine(0.1))
    assert len(read('audio', sound_as_film)) == 1600


def test_name_that_looks_like_an_address(tmp_path, monkeypatch):
    write_video(tmp_path / 'a.mp4').rename(tmp_path / '12:30 %d.mp4')
    monkeypatch.chdir(tmp_path)
    assert shades_of(read('video', '12:30 %d.mp4', video=ALL)) == close_to(SHADES)


def test_images_as_frames_of_a_video(tmp_path):
    names = []
    for index, shade in enumerate(SHADES):
        Image.new('RGB', (32, 32), (shade,) * 3).save(tmp_path / f'{index}.png')
        names.append(tmp_path / f'{index}.png')
    video = read('video', *names)
    assert shades_of(video) == SHADES
    assert video.metadata['fps'] == 2
    assert video.metadata['frames_indices'] == list(range(10))
    assert shades_of(read('video', *names, video=VideoSampling(num_frames=2))) == [SHADES[0], SHADES[5]]
    assert len(read('video', *names, video=VideoSampling(fps=4, max_frames=5)).frames) == 5


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def long_video(path):
    """Of many bytes, so that a cut takes frames."""
    return write_video(path, SHADES * 6)


def write_file(path, content):
    path.write_bytes(content)
    return path


NO_NUMBERS = np.full(999, np.nan, np.float32)
# Name of the file, what makes it of a path, modality, message.
BAD = {
    'cut mp4': ('a.mp4', lambda path: cut(long_video(path), 0.6), 'video', 'it ends after|middle of a frame'),
    'cut mkv': ('a.mkv', lambda path: cut(long_video(path), 0.6), 'video', 'its end is missing'),
    'cut avi': ('a.avi', lambda path: cut(long_video(path), 0.6), 'video', 'it ends after|middle of a frame'),
    'picture as video': ('a.mp4', lambda path: Image.new('L', (9, 9)).save(path, 'PNG'), 'video', 'not supported'),
    'head of an mp4': ('a.mp4', lambda path: cut(write_video(path), 0.02), 'video', 'Invalid data'),
    'no frames': ('a.avi', lambda path: write_video(path, []), 'video', 'it holds no frames that have a time'),
    'empty': ('a.mp4', lambda path: write_file(path, b''), 'video', 'Invalid data|End of file'),
    'text': ('a.mp4', lambda path: write_file(path, b'film ' * 99), 'video', 'Invalid data'),
    'audio as video': ('a.wav', lambda path: write_sound(path, sine(0.1)), 'video', 'it holds no video'),
    'video as audio': ('a.mp4', write_video, 'audio', 'it holds no audio'),
    'video as image': ('a.mp4', write_video, 'image', 'no image of a known format.*pip install pillow-heif'),
    'cut audio': ('a.wav', lambda path: cut(write_sound(path, sine(2)), 0.5), 'audio', 'its end is missing'),
    'cut aiff': (
        'a.aiff',
        lambda path: cut(write_encoded_sound(path, codec='pcm_s16be'), 0.5),
        'audio',
        'its end is missing',
    ),
    'silent file': ('a.wav', lambda path: write_sound(path, sine(0)), 'audio', 'it holds no audio'),
    'no numbers': ('a.wav', lambda path: write_sound(path, NO_NUMBERS), 'audio', 'no finite numbers'),
    'folder': ('a', Path.mkdir, 'video', 'it is no regular file'),
    'pipe': ('a.mp4', os.mkfifo, 'video', 'it is no regular file'),
}


@pytest.mark.parametrize(('name', 'make', 'modality', 'message'), BAD.values(), ids=BAD.keys())
def test_bad_file_is_named(tmp_path, name, make, modality, message):
    path = tmp_path / name
    make(path)
    with pytest.raises(BadSampleError, match=message) as raised:
        read(modality, path)
    assert str(raised.value).startswith(f'sample "a" (data.json, line 3): {modality} file {path} cannot be read: ')
    assert '\n' not in str(raised.value)


def test_song_cover_is_no_video(tmp_path):
    path = tmp_path / 'song.m4a'
    with av.open(str(path), 'w', format='mp4') as container:
        sound = container.add_stream('aac', rate=16000, layout='mono')
        cover = container.add_stream('png', rate=1)
        cover.width = cover.height = 32
        cover.pix_fmt = 'rgb24'
        cover.disposition = av.stream.Disposition.attached_pic.value
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format='rgb24')))
        frame = av.AudioFrame.from_ndarray(sine(0.5)[None], format='fltp', layout='mono')
        frame.sample_rate = 16000
        container.mux([*sound.encode(frame), *sound.encode()])
    with pytest.raises(BadSampleError, match='it holds no video'):
        read('video', path)
    assert len(read('audio', path)) == pytest.approx(8000, abs=2100)


@pytest.mark.parametrize(
    ('name', 'subtype', 'error'),
    [
        *(('a.wav', subtype, 0) for subtype in ('PCM_U8', 'PCM_16', 'PCM_24', 'PCM_32', 'FLOAT', 'DOUBLE', 'ULAW')),
        *(('a.flac', subtype, 0) for subtype in ('PCM_S8', 'PCM_16', 'PCM_24')),
        ('a.ogg', 'VORBIS', 1e-6),
        ('a.mp3', 'MPEG_LAYER_III', 1e-5),
    ],
)
def test_samples_are_those_that_soundfile_reads(tmp_path, name, subtype, error):
    soundfile = pytest.importorskip('soundfile')
    path, tones = tmp_path / name, np.stack([sine(0.3, rate=22050), sine(0.3, rate=22050, pitch=700)], axis=1)
    soundfile.write(path, tones, 22050, subtype=subtype)
    expected, _ = soundfile.read(path, dtype='float32')
    found = read('audio', path, sampling_rate=22050)
    assert found.dtype == np.float32
    # FFmpeg ends a Vorbis file up to two hundredths of a second too soon or too late.
    both = min(len(found), len(expected))
    assert abs(len(found) - len(expected)) <= (500 if subtype == 'VORBIS' else 0)
    np.testing.assert_allclose(found[:both], expected[:both].mean(axis=1), rtol=0, atol=error)


@pytest.mark.parametrize('rate', [8000, 22050, 44100, 48000])
def test_audio_of_another_rate_is_resampled(tmp_path, rate):
    tone = sine(0.5, rate=rate)
    found = read('audio', write_sound(tmp_path / 'a.wav', tone, rate=rate), sampling_rate=16000)
    assert len(found) == pytest.approx(8000, abs=1)
    expected = resample(tone, 8000)
    middle = slice(400, 7600)
    np.testing.assert_allclose(found[middle], expected[middle], atol=0.01)


@pytest.mark.parametrize('size', [0, 0x7FFFF000, 0xFFFFFFFF])
def test_size_written_by_a_pipe(tmp_path, size):
    path = write_sound(tmp_path / 'a.wav', sine(0.5))
    content = path.read_bytes()
    place = content.index(b'data') + 4
    path.write_bytes(content[:place] + struct.pack('<I', size) + content[place + 4 :])
    assert len(read('audio', path)) == 8000
    aiff = write_encoded_sound(tmp_path / 'whole.aiff', codec='pcm_s16be')
    assert len(read('audio', aiff)) == pytest.approx(16000 * 0.6, abs=1)


@pytest.mark.parametrize('missing', ['av', 'av.container'])
def test_missing_decoder_is_no_bad_sample(tmp_path, monkeypatch, missing):
    """The decoder is named, and not the file, also if only a shared library of it is missing."""
    path = write_video(tmp_path / 'a.mp4')
    for name in [name for name in sys.modules if name.partition('.')[0] == 'av']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"PyAV, which cannot be imported \(.*pip install 'composer") as raised:
        read('video', path)
    assert not isinstance(raised.value, BadSampleError)
    assert 'a.mp4' not in str(raised.value)


def test_heif_is_read(tmp_path):
    pillow_heif = pytest.importorskip('pillow_heif')
    picture = Image.new('RGB', (64, 48), (200, 20, 20))
    pillow_heif.from_pillow(picture).save(tmp_path / 'a.heic', quality=100)
    assert np.abs(np.asarray(read('image', tmp_path / 'a.heic')).astype(int) - np.asarray(picture)).max() < 12
