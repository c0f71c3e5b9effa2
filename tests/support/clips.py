# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes small videos and sounds with PyAV, and a folder of conversations about them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from scipy.io import wavfile

from tests.support.family_processors import WORDS

__all__ = ['SHADES', 'sine', 'write_encoded_sound', 'write_media_folder', 'write_sound', 'write_video']

SHADES = [20, 120, 60, 220, 180, 90, 250, 40, 150, 200]
"""The grey of each frame of a video. A test recognises the frames by it."""


def _frame_of_shade(shade: int, size: tuple[int, int]) -> av.VideoFrame:
    """Returns a grey frame whose left half is black."""
    width, height = size
    picture = np.full((height, width, 3), shade, np.uint8)
    picture[:, : width // 2] = 0
    return av.VideoFrame.from_ndarray(picture, format='rgb24')


def write_video(
    path: Path,
    shades: Sequence[int] = SHADES,
    *,
    size: tuple[int, int] = (32, 32),
    codec: str = 'mpeg4',
    pixels: str = 'yuv420p',
    rate: int = 10,
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    sound: np.ndarray | None = None,
) -> Path:
    """Writes a video. Each frame has one shade, and its left half is black.

    Args:
        path: Its suffix decides the container.
        shades: The grey of each frame.
        size: Width and height.
        codec: The codec of the frames.
        pixels: Format of the pixels.
        rate: Frames per second.
        times: When each frame is shown, in milliseconds. None: at equal distances.
        options: Options of the codec.
        sound: Samples of a sound track, 16,000 per second. None: no sound.
    """
    milliseconds = Fraction(1, 1000)
    container_options = {'movflags': 'faststart'} if path.suffix == '.mp4' else {}
    with av.open(str(path), 'w', options=container_options) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        if times is not None:
            stream.codec_context.time_base = milliseconds
        sound_stream: Any = None
        if sound is not None:
            sound_stream = container.add_stream('aac', rate=16000, layout='mono')
        container.start_encoding()

        for index, shade in enumerate(shades):
            frame = _frame_of_shade(shade, size)
            if times is not None:
                frame.pts = times[index]
                frame.time_base = milliseconds
            container.mux(stream.encode(frame))
        container.mux(stream.encode())

        if sound is not None:
            samples = sound[None].astype(np.float32)
            sound_frame = av.AudioFrame.from_ndarray(samples, format='fltp', layout='mono')
            sound_frame.sample_rate = 16000
            container.mux(sound_stream.encode(sound_frame))
            container.mux(sound_stream.encode())
    return path


def sine(seconds: float, *, rate: int = 16000, pitch: float = 440.0) -> np.ndarray:
    """Returns the samples of a tone, at half of the greatest loudness."""
    num_samples = round(seconds * rate)
    times = np.arange(num_samples) / rate
    samples = 0.5 * np.sin(2 * np.pi * pitch * times)
    return samples.astype(np.float32)


def write_sound(path: Path, samples: np.ndarray, *, rate: int = 16000) -> Path:
    """Writes a WAV file, also if the path has another suffix. Several channels: ``samples`` is (samples, channels)."""
    with path.open('wb') as file:
        wavfile.write(file, rate, samples)
    return path


def write_encoded_sound(
    path: Path,
    *,
    codec: str,
    rate: int = 48000,
    channels: int = 1,
    seconds: float = 0.6,
    **options: str,
) -> Path:
    """Writes a tone, encoded by PyAV. Its number of samples must be a multiple of 960."""
    layout = 'mono' if channels == 1 else '7.1'
    blocks = sine(seconds, rate=rate).reshape(-1, 960)
    # Without a duration of pages, one page of an Ogg file would hold all samples.
    with av.open(str(path), 'w', options={'page_duration': '20000', **options}) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        for block in blocks:
            samples = (block * 32767).astype(np.int16)
            interleaved = np.repeat(samples, channels)
            frame = av.AudioFrame.from_ndarray(interleaved[None], format='s16', layout=stream.layout.name)
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_media_folder(folder: Path, rows: Sequence[Sequence[str]], *, seed: int = 0) -> Path:
    """Writes media and conversations about them. Media, texts and numbers of turns differ from row to row.

    Args:
        folder: Gets the files.
        rows: The modalities of each row: ``'image'``, ``'video'`` or ``'audio'``.
        seed: Seed of sizes and words.

    Returns:
        Path of ``data.json``. Sample ``i`` has the id ``s<i>``.
    """
    rng = random.Random(seed)
    records = []
    for index, modalities in enumerate(rows):
        record: dict[str, Any] = {'id': f's{index}', 'images': [], 'videos': [], 'audios': []}
        question = _words(rng)
        for place, modality in enumerate(modalities):
            path = _write_random_media(folder / f'{index}_{place}', modality, rng)
            record[f'{modality}s'].append(path.name)
            question += f' <{modality}> {_words(rng)}'
        messages = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': _words(rng)}]
        if index % 2:
            messages.append({'role': 'user', 'content': _words(rng)})
            messages.append({'role': 'assistant', 'content': _words(rng)})
        record['messages'] = messages
        records.append(record)
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def _write_random_media(stem: Path, modality: str, rng: random.Random) -> Path:
    """Writes an image, a video or a sound of random content and size. Returns its path."""
    if modality == 'image':
        path = stem.with_suffix('.png')
        width, height = rng.choice([(16, 16), (40, 16), (16, 32), (24, 24), (16, 48)])
        pixels = rng.randbytes(3 * width * height)
        Image.frombytes('RGB', (width, height), pixels).save(path)
        return path
    if modality == 'video':
        num_frames = rng.randint(6, 20)
        shades = [rng.randrange(256) for _ in range(num_frames)]
        return write_video(stem.with_suffix('.mp4'), shades)
    rate = rng.choice([8000, 16000, 44100])
    seconds = rng.uniform(0.1, 0.6)
    pitch = rng.uniform(200, 2000)
    tone = sine(seconds, rate=rate, pitch=pitch)
    return write_sound(stem.with_suffix('.wav'), tone, rate=rate)


def _words(rng: random.Random) -> str:
    """Returns one to nine random words."""
    num_words = rng.randint(1, 9)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return ' '.join(words)
