# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Audio as models hear it, and the door to all that PyAV decodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from composer_tokacc.data.records import MediaFile

CUT_SHARE = 0.05
"""Share that may be missing at the end: durations in headers are round, and the audio of a video may end first."""


MEDIA_CONTAINERS = (
    'aiff,apng,asf,au,avi,caf,flac,flv,gif,ivf,matroska,mov,mp3,mxf,nistsphere,nut,ogg,tta,voc,w64,wav,wv'
)
"""FFmpeg's names of those that are one file, and say where it ends. Playlists name others, outside of the folder too;
a transport or an elementary stream ends anywhere, so that nobody would see that half is missing."""
STEADY_CONTAINERS = ('aiff', 'caf', 'flac', 'mp3', 'ogg', 'tta', 'voc', 'w64', 'wav', 'wv')
"""Those of sounds alone in which no time can be left out; a recording in the others may have pauses."""
OGG_PAGE = 27 + 255 + 255 * 255
MAX_SAMPLE = 2**20
"""Full scale is 1, or 2**15 where a writer forgot to scale: far above it, features overflow."""
MAX_SECONDS, MIN_SECONDS = 6 * 3600, 0.05
"""Of an audio: more would fill the memory, less is no token to any model."""


@contextmanager
def open_container(file: MediaFile) -> Iterator[Any]:
    """Gives a container of PyAV: by a name that is taken for no address (``12:30.mp4``), or an open file's start."""
    import av

    with open(file, 'rb') if isinstance(file, PathLike) else nullcontext(file) as opened:
        _check_last_bytes(opened)
        opened.seek(0)
    source = os.path.abspath(file) if isinstance(file, PathLike) else file
    try:
        opened = av.open(source, options={'format_whitelist': MEDIA_CONTAINERS})
    except ValueError as error:
        if 'whitelist' not in str(error):
            raise
        raise ValueError(
            f'it is in no container that is read. Convert it to mp4, mkv or wav; read: {MEDIA_CONTAINERS}'
        ) from error
    with opened as container:
        yield container


def _check_last_bytes(file: BinaryIO) -> None:
    """Refuses a file of which the end is missing, in formats that mark their end or say their size."""
    file.seek(0)
    head, size = file.read(100), file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OGG_PAGE))
    last = file.read()
    if head.startswith(b'OggS'):
        page = last[max(last.rfind(b'OggS'), 0) :]
        # Flags stand at 5 (4: the last page), the number of segments at 26, then the size of each.
        is_whole = len(page) > 26 and page[5] & 4 and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
    elif head.startswith(b'\x1aE\xdf\xa3') and (place := head.find(b'\x18S\x80g') + 4) > 3:  # Matroska's segment
        # Of the bytes of its size the first bit that is set says the number; all that follow set: not known.
        num_bytes = 9 - head[place].bit_length()
        unknown = (1 << 7 * num_bytes) - 1
        length = int.from_bytes(head[place : place + num_bytes], 'big') & unknown
        is_whole = length == unknown or place + num_bytes + length <= size
    else:
        ends = {b'GIF8': b';', b'\x89PNG': b'IEND\xaeB`\x82'}
        is_whole = last.rstrip(b'\0').endswith(ends.get(head[:4], b''))
    if not is_whole:
        raise ValueError('its end is missing')


def one_thread(stream: Any) -> None:
    """Decodes alone: the decoder's threads write log lines, waiting for Python while Python waits for their end."""
    if stream.codec_context is None:
        raise ValueError('it is in a codec that is not known. Convert it to mp4, flac or wav')
    stream.codec_context.thread_count = 1


def check_end(container: Any, end: float) -> None:
    """Refuses a file of which the end is missing, where its header says how long it is."""
    start, duration = ((value or 0) / 1e6 for value in (container.start_time, container.duration))
    if container.format.name.startswith('matroska'):  # which may count from 0, wherever its video begins
        start = 0
    if container.duration is None and container.format.name != 'apng':  # of which the last bytes tell
        raise ValueError('it does not say how long it is. Write it anew: `ffmpeg -i it -c copy other.mkv`')
    if end - start < duration * (1 - CUT_SHARE) - (0.5 if container.streams.video else 0.1):
        raise ValueError(f'it ends after {end - start:.1f} of {duration:.1f} s')


def _frames_of(container: Any) -> Iterator[Any]:
    """Gives the frames of the audio; a decoder leaves out what is damaged, and the next comes too late."""
    end = None
    for frame in container.decode(audio=0):
        gap = 0 if end is None or frame.time is None else frame.time - end
        if gap > frame.samples / frame.sample_rate / 2 and container.format.name in STEADY_CONTAINERS:
            raise ValueError(f'{gap:.3f} s of it cannot be decoded, at {end:.2f} s: it is damaged')
        end = (end or 0 if frame.time is None else frame.time) + frame.samples / frame.sample_rate
        yield frame


def read_audio(file: MediaFile, sampling_rate: int) -> np.ndarray:
    """Returns the mean of its channels, float32 ``(samples,)``, so many samples a second."""
    import av

    with open_container(file) as container:
        if not container.streams.audio:
            raise ValueError('it holds no audio')
        one_thread(container.streams.audio[0])
        container.streams.audio[0].codec_context.options = {'err_detect': 'crccheck+explode'}  # FLAC's, of each frame
        # Not planar: PyAV's arrays of eight planes and more end the process.
        resampler = av.AudioResampler(format='flt', rate=sampling_rate)
        pieces, size = [np.empty(0, np.float32)], 0
        for frame in chain(_frames_of(container), [None]):  # None: what the resampler still holds
            for piece in resampler.resample(frame):
                pieces.append(piece.to_ndarray().reshape(-1, piece.layout.nb_channels).mean(axis=1))
                size += len(pieces[-1])
            if size > MAX_SECONDS * sampling_rate:
                raise ValueError(f'it must be at most {MAX_SECONDS} s, got: more. Cut it')
        audio = np.concatenate(pieces)
        if not size:
            raise ValueError('it holds no audio')
        if size < MIN_SECONDS * sampling_rate:
            raise ValueError(f'it must be at least {MIN_SECONDS} s, got: {size / sampling_rate} s')
        if not (np.abs(audio) < MAX_SAMPLE).all():
            raise ValueError(f'it holds samples that are no finite numbers, or above {MAX_SAMPLE}')
        check_end(container, (container.start_time or 0) / 1e6 + len(audio) / sampling_rate)
        return audio
