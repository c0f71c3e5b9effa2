# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Audio as models hear it, and the door to all that PyAV decodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from composer_tokacc.data.records import MediaFile

CUT_SHARE = 0.05
"""Share that may be missing at the end: durations in headers are round, and the audio of a video may end first."""


@contextmanager
def open_container(file: MediaFile) -> Iterator[Any]:
    """Gives a container of PyAV: by a name that is taken for no address (``12:30.mp4``), or an open file's start."""
    import av

    if not isinstance(file, PathLike):
        file.seek(0)
    with av.open(os.path.abspath(file) if isinstance(file, PathLike) else file) as container:
        yield container


def one_thread(stream: Any) -> None:
    """Decodes alone: the decoder's threads write log lines, waiting for Python while Python waits for their end."""
    stream.codec_context.thread_count = 1


def check_end(container: Any, end: float) -> None:
    """Refuses a file of which the end is missing, where its header says how long it is."""
    start, duration = ((value or 0) / 1e6 for value in (container.start_time, container.duration))
    if container.format.name.startswith('matroska'):  # which may count from 0, wherever its video begins
        start = 0
    if end - start < duration * (1 - CUT_SHARE) - 0.5:
        raise ValueError(f'it ends after {end - start:.1f} of {duration:.1f} s')


def read_audio(file: MediaFile, sampling_rate: int) -> np.ndarray:
    """Returns the mean of its channels, float32 ``(samples,)``, so many samples a second."""
    import av

    with open_container(file) as container:
        if not container.streams.audio:
            raise ValueError('it holds no audio')
        one_thread(container.streams.audio[0])
        resampler = av.AudioResampler(format='fltp', rate=sampling_rate)
        frames = [*container.decode(audio=0), None]  # None: what the resampler still holds
        pieces = [piece.to_ndarray() for frame in frames for piece in resampler.resample(frame)]
        if not pieces:
            raise ValueError('it holds no audio')
        audio = np.concatenate(pieces, axis=1).mean(axis=0)
        if not np.isfinite(audio).all():
            raise ValueError('it holds samples that are no finite numbers')
        check_end(container, (container.start_time or 0) / 1e6 + len(audio) / sampling_rate)
        return audio
