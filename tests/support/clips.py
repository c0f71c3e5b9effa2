# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Small films and sounds, written with PyAV, and a folder of conversations about them."""

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

from tests.support.sample_encoder import WORDS

__all__ = ['SHADES', 'sine', 'write_encoded_sound', 'write_media_folder', 'write_sound', 'write_video']

SHADES = [20, 120, 60, 220, 180, 90, 250, 40, 150, 200]
"""Grey of the frames of a film, by which a test knows them again."""


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
    """A film of one shade a frame, left half of it black.

    Args:
        path: Its ending says which container.
        shades: Of each frame.
        size: Width and height.
        codec: Of the film.
        pixels: Format of its pixels.
        rate: Frames a second.
        times: When each frame is shown, in milliseconds; None: evenly.
        options: Of the codec.
        sound: Samples of a sound beside it, 16,000 a second.
    """
    with av.open(str(path), 'w', options={'movflags': 'faststart'} if path.suffix == '.mp4' else {}) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        beside: Any = None if sound is None else container.add_stream('aac', rate=16000, layout='mono')
        container.start_encoding()
        for index, shade in enumerate(shades):
            picture = np.full((size[1], size[0], 3), shade, np.uint8)
            picture[:, : size[0] // 2] = 0
            frame = av.VideoFrame.from_ndarray(picture, format='rgb24')
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if beside is not None and sound is not None:
            frame = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format='fltp', layout='mono')
            frame.sample_rate = 16000
            container.mux([*beside.encode(frame), *beside.encode()])
    return path


def sine(seconds: float, *, rate: int = 16000, pitch: float = 440.0) -> np.ndarray:
    """A tone, half as loud as it may be."""
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write_sound(path: Path, samples: np.ndarray, *, rate: int = 16000) -> Path:
    """A WAV file, whatever it is called; of several channels where ``samples`` is ``(samples, channels)``."""
    with path.open('wb') as file:
        wavfile.write(file, rate, samples)
    return path


def write_encoded_sound(path: Path, *, codec: str, rate: int = 48000, channels: int = 1, **options: str) -> Path:
    """A tone of 0.6 s that PyAV has encoded."""
    # Without a duration of pages one page of an Ogg file would hold all.
    with av.open(str(path), 'w', options={'page_duration': '20000', **options}) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout='mono' if channels == 1 else '7.1')
        for samples in sine(0.6, rate=rate).reshape(-1, 960):
            values = np.repeat((samples * 32767).astype(np.int16), channels)[None]
            frame = av.AudioFrame.from_ndarray(values, format='s16', layout=stream.layout.name)
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_media_folder(folder: Path, rows: Sequence[Sequence[str]], *, seed: int = 0) -> Path:
    """Conversations about the media of each row, ``image``, ``video`` or ``audio``, unequal in everything.

    Returns:
        Path of ``data.json``. Sample ``i`` has the id ``s<i>``.
    """
    rng, records = random.Random(seed), []
    for index, kinds in enumerate(rows):
        record: dict[str, Any] = {'id': f's{index}', 'images': [], 'videos': [], 'audios': []}
        question = _words(rng)
        for place, kind in enumerate(kinds):
            name = f'{index}_{place}'
            if kind == 'image':
                width, height = rng.choice([(16, 16), (40, 16), (16, 32), (24, 24), (16, 48)])
                picture = Image.frombytes('RGB', (width, height), rng.randbytes(3 * width * height))
                picture.save(folder / f'{name}.png')
                record['images'].append(f'{name}.png')
            elif kind == 'video':
                write_video(folder / f'{name}.mp4', [rng.randrange(256) for _ in range(rng.randint(6, 20))])
                record['videos'].append(f'{name}.mp4')
            else:
                rate = rng.choice([8000, 16000, 44100])
                tone = sine(rng.uniform(0.1, 0.6), rate=rate, pitch=rng.uniform(200, 2000))
                write_sound(folder / f'{name}.wav', tone, rate=rate)
                record['audios'].append(f'{name}.wav')
            question += f' <{kind}> {_words(rng)}'
        turns = [question, _words(rng)]
        if index % 2:
            turns += [_words(rng), _words(rng)]
        record['messages'] = [
            {'role': ('user', 'assistant')[turn % 2], 'content': text} for turn, text in enumerate(turns)
        ]
        records.append(record)
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def _words(rng: random.Random) -> str:
    return ' '.join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))
