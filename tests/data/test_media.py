# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Videos and sounds on disk: the frames that are taken, their times, and files that cannot be read."""

from __future__ import annotations

import ctypes
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.signal import resample

pytest.importorskip('av')

import av

from composer_tokacc.data import BadSampleError, VideoSampling, containers, videos
from composer_tokacc.data.images import image_size
from composer_tokacc.data.media import decode_media, open_files
from composer_tokacc.data.records import Medium, Record, Turn
from tests.support.clips import SHADES, sine, write_encoded_sound, write_sound, write_video

SEGMENT_ID = b'\x18S\x80g'
"""Begins the part of a Matroska file that holds everything."""


def read(modality, *paths, **options):
    """Decodes the one medium of a record: a video, a sound or an image."""
    record = Record(
        sample_id='a',
        source='data.json, line 3',
        turns=(Turn('user', f'<{modality}>?'), Turn('assistant', 'Yes.')),
        media=(Medium(modality, tuple(map(str, paths))),),
    )
    (content,) = decode_media(record, open_files(record), **options)[modality]
    return content


def read_video(*paths, **sampling):
    return read('video', *paths, video=VideoSampling(**sampling))


def shades_of(video):
    """Returns the shade of each frame. Only their right half has it."""
    width = video.frames.shape[3]
    start = width * 3 // 4
    right_quarter = video.frames[..., start:].float()
    means = right_quarter.mean(dim=(1, 2, 3))
    return means.round().int().tolist()


def close_to(shades):
    """Compares loosely, because codecs change the shades a little."""
    return pytest.approx(shades, abs=12)


# Name of the file -> options of `write_video`.
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


def write_film(folder, name):
    codec = FILMS[name].get('codec', 'mpeg4')
    if codec not in av.codecs_available:
        pytest.skip(f'PyAV without {codec}')
    return write_video(folder / name, **FILMS[name])


@pytest.mark.parametrize('name', FILMS)
def test_frames_are_those_that_were_filmed(tmp_path, name):
    rate = FILMS[name].get('rate', 10)
    path = write_film(tmp_path, name)

    video = read_video(path, num_frames=10)

    assert video.frames.shape == (10, 3, 32, 32)
    assert shades_of(video) == close_to(SHADES)
    metadata = video.metadata
    assert metadata['fps'] == pytest.approx(rate, rel=1e-3)
    assert metadata['frames_indices'] == list(range(10))
    assert metadata['total_num_frames'] == 10
    assert metadata['duration'] == pytest.approx(10 / rate, rel=1e-3)


@pytest.mark.parametrize('name', FILMS)
def test_jumps_do_not_change_frames(tmp_path, name):
    """Decoding of a few frames jumps to key frames (in the AVI past some frames)."""
    path = write_film(tmp_path, name)
    all_frames = read_video(path, num_frames=10).frames

    for count in (1, 2, 3, 4, 7):
        video = read_video(path, num_frames=count)

        # The sampling of transformers' own processors.
        expected = (np.arange(count) * 10 // count).tolist()
        assert video.metadata['frames_indices'] == expected
        assert torch.equal(video.frames, all_frames[expected])


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
    times = np.linspace(0, 0.9, 10).tolist()
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
        ({'fps': '2'}, '`fps` must be a positive number'),
        ({'fps': float('nan')}, '`fps` must be a positive number'),
        ({'max_frames': None}, '`max_frames` must be a positive number'),
        ({'max_frames': 10**7}, '`max_frames` must be a positive number below 1,000,000'),
        ({'max_frames': 4, 'min_frames': 5}, '`min_frames` <= `num_frames` .* got: 5, None and 4'),
        ({'num_frames': 256}, '`min_frames` <= `num_frames` <= `max_frames` must hold, got: 1, 256 and 128'),
        ({'num_frames': 4, 'min_frames': 5}, '`min_frames` <= `num_frames` .* got: 5, 4 and 128'),
        ({'num_frames': 4, 'fps': 2}, '`fps` must be left out if `num_frames` is given'),
    ],
)
def test_sampling_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VideoSampling(**options)


def test_uneven_times_of_frames(tmp_path):
    """Five frames of a video of 4.9 s: those on the screen at 0, 1.09, 2.18, 3.27 and 4.36 s."""
    times = [0, 100, 150, 500, 510, 2000, 2100, 2200, 2300, 4900]
    path = write_video(tmp_path / 'uneven.mkv', times=times)

    video = read_video(path, num_frames=5)

    expected_frames = [0, 4, 6, 8, 8]
    expected_shades = [SHADES[frame] for frame in expected_frames]
    expected_seconds = [0, 0.51, 2.1, 2.3, 2.3]
    assert shades_of(video) == close_to(expected_shades)
    metadata = video.metadata
    seconds = [index / metadata['fps'] for index in metadata['frames_indices']]
    assert seconds == pytest.approx(expected_seconds, abs=0.005)
    assert metadata['duration'] == pytest.approx(4.9 * 10 / 9, abs=0.01)


def matrix_bytes(a, b, c, d):
    """Returns a display matrix as an MP4 file holds it, in numbers of 16 bits behind the point."""
    one = 1 << 16
    first_row = (a * one, b * one, 0)
    second_row = (c * one, d * one, 0)
    third_row = (0, 0, 1 << 30)
    return struct.pack('>9i', *first_row, *second_row, *third_row)


def replace_bytes(path, place, new_bytes):
    content = bytearray(path.read_bytes())
    end = place + len(new_bytes)
    content[place:end] = new_bytes
    path.write_bytes(content)


def write_picture_as_video(path, picture):
    """Writes a video of one frame."""
    height, width, _ = picture.shape
    frame = av.VideoFrame.from_ndarray(picture, format='rgb24')
    with av.open(str(path), 'w') as container:
        stream = container.add_stream('mpeg4', rate=10)
        stream.width = width
        stream.height = height
        stream.pix_fmt = 'yuv420p'
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


# Display matrix, and the white corner of a film whose upper right corner was white.
TURNS = {
    'upright': ((1, 0, 0, 1), 'top right'),
    'quarter turn, clockwise': ((0, 1, -1, 0), 'bottom right'),
    'half turn': ((-1, 0, 0, -1), 'bottom left'),
    'quarter turn, counterclockwise': ((0, -1, 1, 0), 'top left'),
    'mirrored left to right': ((-1, 0, 0, 1), 'top left'),
    'mirrored top to bottom': ((1, 0, 0, -1), 'bottom right'),
    'mirrored at one diagonal': ((0, 1, 1, 0), 'bottom left'),
    'mirrored at the other diagonal': ((0, -1, -1, 0), 'top right'),
}
CORNERS = ('top left', 'top right', 'bottom left', 'bottom right')


def white_corners(frame):
    """Returns the names of the corners whose quarter of a frame is mostly white."""
    brightness = frame.float().mean(dim=0, keepdim=True) / 255
    quarters = torch.nn.functional.adaptive_avg_pool2d(brightness, (2, 2))
    corners = []
    for name, mean in zip(CORNERS, quarters.flatten(), strict=True):
        if mean > 0.5:
            corners.append(name)
    return corners


@pytest.mark.parametrize(('matrix', 'corner'), TURNS.values(), ids=TURNS.keys())
def test_video_is_turned_and_mirrored(tmp_path, matrix, corner):
    path = tmp_path / 'turned.mp4'
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, 24:] = 255
    write_picture_as_video(path, picture)
    content = path.read_bytes()
    header = content.index(b'tkhd')
    place_of_matrix = content.index(matrix_bytes(1, 0, 0, 1), header)
    replace_bytes(path, place_of_matrix, matrix_bytes(*matrix))

    video = read_video(path, num_frames=1)

    is_turned = matrix[0] == 0
    height_and_width = (48, 32) if is_turned else (32, 48)
    [frame] = video.frames
    assert frame.shape == (3, *height_and_width)
    assert white_corners(frame) == [corner]


@pytest.mark.parametrize('name', ['late.mkv', 'late.mp4'])
def test_video_that_begins_late_is_whole(tmp_path, name):
    """Its first frame is at 20 s."""
    times = list(range(20_000, 21_000, 100))
    path = write_video(tmp_path / name, times=times)

    video = read_video(path, num_frames=10)

    assert shades_of(video) == close_to(SHADES)
    assert video.metadata['duration'] == pytest.approx(1.0)


def test_frames_outside_the_edit_list(tmp_path):
    """The edit list leaves out the first half of the frames."""
    path = write_film(tmp_path, 'h264.mp4')
    content = path.read_bytes()
    place = content.index(b'elst') + 12
    duration, start, rate = struct.unpack_from('>IiI', content, place)
    half_duration = duration - 500
    start_of_second_half = start + 5 * 1024
    edit = struct.pack('>IiI', half_duration, start_of_second_half, rate)
    replace_bytes(path, place, edit)

    video = read_video(path, num_frames=5)

    assert shades_of(video) == close_to(SHADES[5:])
    assert video.metadata['duration'] == pytest.approx(0.5)


def test_one_frame(tmp_path):
    path = write_video(tmp_path / 'one.mp4', [90])

    video = read('video', path)
    repeated = read_video(path, min_frames=2)

    assert shades_of(video) == close_to([90])
    assert video.metadata['frames_indices'] == [0]
    assert video.metadata['fps'] == pytest.approx(10)
    assert shades_of(repeated) == close_to([90, 90])


def test_video_named_as_image(tmp_path):
    path = write_video(tmp_path / 'film.mp4').rename(tmp_path / 'film.jpg')

    video = read_video(path, num_frames=10)

    assert shades_of(video) == close_to(SHADES)


def test_sound_named_as_video(tmp_path):
    path = write_sound(tmp_path / 'sound.mp4', sine(0.1))

    samples = read('audio', path)

    assert len(samples) == 1600


def test_name_that_looks_like_an_address(tmp_path, monkeypatch):
    write_video(tmp_path / 'a.mp4').rename(tmp_path / '12:30 %d.mp4')
    monkeypatch.chdir(tmp_path)

    video = read_video('12:30 %d.mp4', num_frames=10)

    assert shades_of(video) == close_to(SHADES)


def test_images_as_frames_of_a_video(tmp_path):
    paths = []
    for index, shade in enumerate(SHADES):
        path = tmp_path / f'{index}.png'
        Image.new('L', (32, 32), shade).save(path)
        paths.append(path)

    video = read('video', *paths)
    two_frames = read_video(*paths, num_frames=2)
    five_frames = read_video(*paths, fps=4, max_frames=5)

    assert shades_of(video) == SHADES
    assert video.metadata['fps'] == 2
    assert video.metadata['frames_indices'] == list(range(10))
    assert shades_of(two_frames) == [SHADES[0], SHADES[5]]
    assert len(five_frames.frames) == 5


def test_image_of_too_many_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 4)
    Image.new('RGB', (3, 3)).save(tmp_path / 'large.png')
    with pytest.raises(ValueError, match=r'9 pixels.* smaller'):
        image_size(tmp_path / 'large.png')


def test_images_are_checked_before_all_are_decoded(tmp_path):
    """The second image is damaged. It is not read, because the size of the first one is refused."""
    large = tmp_path / 'large.png'
    Image.new('L', (9000, 9000)).save(large)
    damaged = tmp_path / 'damaged.png'
    text_file(damaged)
    with pytest.raises(BadSampleError, match='got: 32 frames of 9000 x 9000'):
        read_video(large, damaged, num_frames=32)


def test_bad_file_is_named(tmp_path):
    """The trials have bad files of many kinds."""
    path = tmp_path / 'a.mp4'
    text_file(path)
    with pytest.raises(BadSampleError) as raised:
        read_video(path)
    assert str(raised.value).startswith(f'sample "a" (data.json, line 3): video file {path} cannot be read: ')


@pytest.fixture
def whitelist_folder(tmp_path):
    """FFmpeg's message about a container that is not supported has this word. The name of a file may have it, too."""
    folder = tmp_path / 'whitelist'
    folder.mkdir()
    return folder


def test_damaged_file_in_folder_named_whitelist(whitelist_folder):
    damaged = whitelist_folder / 'a.mp4'
    text_file(damaged)

    with pytest.raises(BadSampleError, match='Invalid data'):
        read_video(damaged)


def test_container_that_is_not_supported(whitelist_folder):
    path = write_video(whitelist_folder / 'a.ts', codec='mpeg2video')

    with pytest.raises(BadSampleError, match='container that is not supported'):
        read_video(path)


def test_ogg_page_needs_its_mark():
    """The bytes behind an Ogg file may look like the rest of a page."""
    assert not containers._ends_with_last_ogg_page(b'\4' * 70)


def with_space_before_segment(content, size):
    """Puts an empty element of this size, at least 3 bytes, before the segment of a Matroska file."""
    place = content.index(SEGMENT_ID)
    num_zeros = size - 3  # an id of one byte and a size of two bytes come first
    size_bytes = (0x4000 | num_zeros).to_bytes(2, 'big')
    space = b'\xec' + size_bytes + bytes(num_zeros)
    return content[:place] + space + content[place:]


@pytest.mark.parametrize('place', [47, 90, 96, 98, 100, 300])
def test_matroska_whose_segment_begins_later(tmp_path, place):
    """Some programs leave space before the segment. Where it begins must not matter."""
    path = write_video(tmp_path / 'a.mkv')
    content = path.read_bytes()
    size_of_space = place - content.index(SEGMENT_ID)
    content = with_space_before_segment(content, size_of_space)
    assert content.index(SEGMENT_ID) == place
    path.write_bytes(content)

    video = read_video(path, num_frames=10)

    assert shades_of(video) == close_to(SHADES)
    path.write_bytes(content[:-100])
    with pytest.raises(BadSampleError, match='its end is missing'):
        read_video(path)


def text_file(path):
    path.write_bytes(b'film ' * 99)


def cut(path, share):
    """Keeps this share of a file's bytes."""
    content = path.read_bytes()
    num_kept = int(len(content) * share)
    path.write_bytes(content[:num_kept])


def write_song(path, *, codec, seconds):
    """Writes a tone, after a picture of its cover."""
    black = np.zeros((32, 32, 3), np.uint8)
    picture = av.VideoFrame.from_ndarray(black, format='rgb24')
    tone = av.AudioFrame.from_ndarray(sine(seconds)[None], format='fltp', layout='mono')
    tone.sample_rate = 16000
    with av.open(str(path), 'w') as container:
        audio = container.add_stream(codec, rate=16000, layout='mono')
        cover = container.add_stream('png', rate=1)
        cover.width = 32
        cover.height = 32
        cover.pix_fmt = 'rgb24'
        cover.disposition = av.stream.Disposition.attached_pic.value
        container.mux(cover.encode(picture))
        container.mux(audio.encode(tone))
        container.mux(audio.encode())
    return path


def test_song_cover_is_no_video(tmp_path):
    path = write_song(tmp_path / 'song.mp4', codec='aac', seconds=0.5)

    samples = read('audio', path)

    assert len(samples) == pytest.approx(8000, abs=2100)
    with pytest.raises(BadSampleError, match='it holds no video'):
        read('video', path)


def test_cut_song_with_cover_is_refused(tmp_path):
    """Only a file with a video may lack up to 0.5 s, for the frame of its last packet. A cover is no video."""
    path = write_song(tmp_path / 'song.mp3', codec='libmp3lame', seconds=1)
    samples = read('audio', path)
    assert len(samples) == pytest.approx(16000, abs=1200)

    cut(path, 0.65)

    with pytest.raises(BadSampleError, match=r'it ends after 0\.6 of 1\.0 s'):
        read('audio', path)


@pytest.mark.parametrize(
    ('name', 'subtype', 'error', 'most_missing'),
    [
        ('a.wav', 'PCM_U8', 0, 0),
        ('a.wav', 'PCM_16', 0, 0),
        ('a.wav', 'PCM_24', 0, 0),
        ('a.wav', 'PCM_32', 0, 0),
        ('a.wav', 'FLOAT', 0, 0),
        ('a.wav', 'DOUBLE', 0, 0),
        ('a.wav', 'ULAW', 0, 0),
        ('a.flac', 'PCM_S8', 0, 0),
        ('a.flac', 'PCM_16', 0, 0),
        ('a.flac', 'PCM_24', 0, 0),
        # FFmpeg ends a Vorbis file up to two hundredths of a second too soon or too late.
        ('a.ogg', 'VORBIS', 1e-6, 500),
        ('a.mp3', 'MPEG_LAYER_III', 1e-5, 0),
    ],
)
def test_samples_are_those_that_soundfile_reads(tmp_path, name, subtype, error, most_missing):
    soundfile = pytest.importorskip('soundfile')
    path = tmp_path / name
    left = sine(0.3, rate=22050)
    right = sine(0.3, rate=22050, pitch=700)
    stereo = np.stack([left, right], axis=1)
    soundfile.write(path, stereo, 22050, subtype=subtype)
    channels, _ = soundfile.read(path, dtype='float32')
    expected = channels.mean(axis=1)

    samples = read('audio', path, sampling_rate=22050)

    assert samples.dtype == np.float32
    assert abs(len(samples) - len(expected)) <= most_missing
    length = min(len(samples), len(expected))
    np.testing.assert_allclose(samples[:length], expected[:length], rtol=0, atol=error)


@pytest.mark.parametrize('rate', [8000, 22050, 44100, 48000])
def test_audio_of_another_rate_is_resampled(tmp_path, rate):
    tone = sine(0.5, rate=rate)
    path = write_sound(tmp_path / 'a.wav', tone, rate=rate)
    expected = resample(tone, 8000)

    samples = read('audio', path, sampling_rate=16000)

    assert len(samples) == pytest.approx(8000, abs=1)
    middle = slice(400, 7600)  # the two methods differ at the ends of a sound
    np.testing.assert_allclose(samples[middle], expected[middle], atol=0.01)


@pytest.mark.parametrize('size', [0, 0x7FFFF000, 0xFFFFFFFF])
def test_size_written_by_a_pipe(tmp_path, size):
    """A program that writes into a pipe does not know the size when it writes the header."""
    path = write_sound(tmp_path / 'a.wav', sine(0.5))
    content = path.read_bytes()
    place = content.index(b'data') + 4
    replace_bytes(path, place, struct.pack('<I', size))

    samples = read('audio', path)

    assert len(samples) == 8000


def test_complete_aiff_is_read(tmp_path):
    path = write_encoded_sound(tmp_path / 'a.aiff', codec='pcm_s16be')

    samples = read('audio', path)

    assert len(samples) == pytest.approx(16000 * 0.6, abs=1)


@pytest.mark.parametrize('codec', ['aac', 'libmp3lame'])
def test_short_sound_that_fills_its_decoder(tmp_path, codec):
    """The decoder returns nothing for its first packets."""
    path = write_encoded_sound(tmp_path / 'a.mka', codec=codec, rate=8000, seconds=0.24)

    samples = read('audio', path)

    assert len(samples) >= 16000 * 0.24


@pytest.mark.parametrize('name', ['a.mp4', 'a.mkv', 'a.avi'])
def test_sound_that_ends_before_its_pictures(tmp_path, name):
    """The sound of a video of 3 s ends after 1 s, as it is meant. A file that was cut is refused."""
    path = write_video(tmp_path / name, SHADES * 3, sound=sine(1))
    samples = read('audio', path)
    assert len(samples) == pytest.approx(16000, abs=2100)

    cut(path, 0.6)

    with pytest.raises(BadSampleError, match=r'it ends after|end is missing|Invalid data'):
        read('audio', path)


def test_sound_with_a_pause_is_refused(tmp_path):
    """Without its pause the sound would be shorter than it is, and its parts at other times."""
    path = tmp_path / 'a.mka'
    samples = (sine(1) * 32767).astype(np.int16)
    with av.open(str(path), 'w', format='matroska') as container:
        stream = container.add_stream('flac', rate=16000, layout='mono')
        for start in (0, 48000):
            frame = av.AudioFrame.from_ndarray(samples[None], format='s16', layout='mono')
            frame.sample_rate = 16000
            frame.pts = start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())

    with pytest.raises(BadSampleError, match=r'only 2\.0 of its 4\.0 s .* has pauses'):
        read('audio', path)


@pytest.mark.parametrize('missing', ['av', 'av.container'])
def test_missing_decoder_is_no_bad_sample(tmp_path, monkeypatch, missing):
    """The message names the decoder, not the file, even if only a shared library of it is missing."""
    path = write_video(tmp_path / 'a.mp4')
    for name in list(sys.modules):
        if name.partition('.')[0] == 'av':
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"PyAV, which cannot be imported \(.*pip install 'composer") as raised:
        read('video', path)
    assert not isinstance(raised.value, BadSampleError)
    assert 'a.mp4' not in str(raised.value)


# Value of EXIF's orientation -> row and column in which the end of the first stored row is seen.
END_OF_FIRST_ROW = {
    1: (0, -1),
    2: (0, 0),
    3: (-1, 0),
    4: (-1, -1),
    5: (-1, 0),
    6: (-1, -1),
    7: (0, -1),
    8: (0, 0),
}


def tiff_directory(entries):
    """Returns the directory of a TIFF or EXIF block: the number of entries, and the mark that no other one follows."""
    return struct.pack('<H', len(entries)) + b''.join(entries) + bytes(4)


@pytest.mark.parametrize(('orientation', 'place'), END_OF_FIRST_ROW.items())
def test_image_with_odd_exif_is_turned(tmp_path, orientation, place):
    """Another entry has a type that the standard does not allow, so PIL cannot write the EXIF block again."""
    entries = [
        struct.pack('<HHIHH', 0x112, 3, 1, orientation, 0),
        struct.pack('<HHII', 0x128, 4, 1, 70_000),  # the unit of resolution, which has 16 bits
    ]
    header = b'II*\0' + struct.pack('<I', 8)
    exif = b'Exif\0\0' + header + tiff_directory(entries)
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, -1] = 255
    path = tmp_path / 'a.png'
    Image.fromarray(pixels).save(path, exif=exif)

    image = read('image', path)

    is_quarter_turn = orientation >= 5
    size = (2, 3) if is_quarter_turn else (3, 2)
    assert image.size == size
    assert image_size(path) == size
    turned_pixels = np.asarray(image)
    assert turned_pixels[place].tolist() == [255, 255, 255]


def write_grey_tiff(path, bits, white_is_zero, pixels):
    """Writes a TIFF of one row of two grey pixels. ``pixels`` are the bytes of the row."""
    number_of_tag = {
        256: 2,  # width
        257: 1,  # height
        258: bits,
        259: 1,  # not compressed
        262: 0 if white_is_zero else 1,
        273: 8,  # place of the pixels, behind the header
        277: 1,  # channels
        278: 1,  # rows in a strip
        279: len(pixels),
    }
    entries = []
    for tag, number in number_of_tag.items():
        entry = struct.pack('<HHIHH', tag, 3, 1, number, 0)
        entries.append(entry)
    place_of_directory = 8 + len(pixels)
    header = b'II*\0' + struct.pack('<I', place_of_directory)
    path.write_bytes(header + pixels + tiff_directory(entries))


@pytest.mark.parametrize(
    ('bits', 'white_is_zero', 'pixels', 'expected'),
    [
        pytest.param(16, False, b'\xff\xff\0\0', [255, 0], id='16 bits'),
        pytest.param(8, True, b'\xff\0', [0, 255], id='8 bits, inverted'),
    ],
)
def test_white_of_a_tiff(tmp_path, bits, white_is_zero, pixels, expected):
    path = tmp_path / 'a.tiff'
    write_grey_tiff(path, bits, white_is_zero, pixels)

    image = np.asarray(read('image', path))

    assert image[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ('bits', 'white_is_zero', 'pixels'),
    [
        pytest.param(16, True, b'\xff\xff\0\0', id='16 bits, inverted'),
        pytest.param(12, False, b'\xff\xf0\0', id='12 bits'),
    ],
)
def test_tiff_of_unknown_white_is_refused(tmp_path, bits, white_is_zero, pixels):
    """PIL returns 12 bits as they are, and does not invert 16 bits."""
    path = tmp_path / 'a.tiff'
    write_grey_tiff(path, bits, white_is_zero, pixels)

    with pytest.raises(BadSampleError, match='it has no known white'):
        read('image', path)


def test_heif_is_read(tmp_path):
    pillow_heif = pytest.importorskip('pillow_heif')
    path = tmp_path / 'a.heic'
    picture = Image.new('RGB', (64, 48), (200, 20, 20))
    pillow_heif.from_pillow(picture).save(path, quality=100)

    image = read('image', path)

    pixels = np.asarray(image).astype(int)
    np.testing.assert_allclose(pixels, picture, rtol=0, atol=11)


@pytest.fixture
def overwritten_memory():
    """Lets the C library overwrite memory that is freed, so that a use of it is noticed."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, 'mallopt'):
        pytest.skip('not the C library of GNU')
    m_perturb = -6  # from malloc.h
    libc.mallopt(m_perturb, 165)
    yield
    libc.mallopt(m_perturb, 0)


def test_missing_frames_are_counted(tmp_path, overwritten_memory):
    path = write_video(tmp_path / 'a.mp4')
    with containers.open_stream(path, 'video') as (container, stream):
        stamps, key_stamps = videos._read_timestamps(container, stream)
    time_behind_the_end = 2 * stamps[-1]
    stamps.append(time_behind_the_end)

    with pytest.raises(ValueError, match='the last 1 of its 11 chosen frames cannot be decoded'):
        videos._decode_frames(path, stamps, key_stamps)


def test_damage_before_first_key_frame(tmp_path):
    """The time of one frame is wrong, so everything is decoded. Then earlier frames are not excused by a jump."""
    path = write_video(tmp_path / 'a.mp4')
    with containers.open_stream(path, 'video') as (container, stream):
        packets = [(packet.pos, packet.size) for packet in container.demux(stream)]
    start, size = packets[3]
    half = size // 2
    replace_bytes(path, start + half, bytes(size - half))
    with containers.open_stream(path, 'video') as (container, stream):
        stamps, _ = videos._read_timestamps(container, stream)
    wrong_stamps = [stamps[0], stamps[1] + 1, *stamps[2:]]

    with pytest.raises(ValueError, match=r'its frame at 0\.30 s is damaged'):
        videos._decode_frames(path, wrong_stamps, key_timestamps=[stamps[5]])
