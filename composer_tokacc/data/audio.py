# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads audio with PyAV. Refuses files that are cut or damaged, or lack a part of the audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from composer_tokacc.data.containers import check_duration, end_of, least_seconds, open_stream, timestamp_of
from composer_tokacc.data.records import MediaFile
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

STEADY_CONTAINERS = (
    'aiff',
    'flac',
    'mp3',
    'ogg',
    'tta',
    'wav',
    'wv',
)
"""Containers whose audio has no gaps, so a gap means damage. In others it may be a pause of the recording."""
MAX_SAMPLE = 2**20
"""Limit for the absolute values of audio samples. Full scale is 1, or 2**15 if a program did not scale 16-bit integers.
Values far above that are damage, and a model's audio features would overflow."""
MAX_SECONDS = 6 * 3600
"""Longest audio. At 16,000 float32 samples a second it takes 1.3 GiB."""
MIN_SECONDS = 0.05
"""Shortest audio. No model makes a token of a shorter one."""


def read_audio(file: MediaFile, sampling_rate: int) -> np.ndarray:
    """Returns the audio as mono, float32 ``(samples,)``, with ``sampling_rate`` samples a second.

    Refuses audio that is damaged, too short or too long.
    """
    import av

    with open_stream(file, 'audio') as (container, stream):
        stream.codec_context.options = {'err_detect': 'crccheck+explode'}  # refuses a FLAC frame with a wrong checksum
        # `flt` interleaves the channels. `fltp`, a plane for each channel, crashes PyAV for eight channels or more.
        resampler = av.AudioResampler(format='flt', rate=sampling_rate)
        pieces = []
        num_samples = 0
        for frame in chain(_audio_frames(container, stream), [None]):  # None flushes the resampler
            for piece in resampler.resample(frame):
                samples = piece.to_ndarray().reshape(-1, piece.layout.nb_channels)
                pieces.append(samples.mean(axis=1))
                num_samples += len(samples)
            if num_samples > MAX_SECONDS * sampling_rate:
                raise InvalidInputError(f'it is longer than {MAX_SECONDS} s. Cut it')
    if num_samples < MIN_SECONDS * sampling_rate:
        raise InvalidInputError(f'it must be at least {MIN_SECONDS} s, got: {num_samples / sampling_rate} s')
    audio = np.concatenate(pieces)
    if not (np.abs(audio) < MAX_SAMPLE).all():
        raise InvalidInputError(f'it holds samples that are not finite, or above {MAX_SAMPLE}')
    return audio


def _audio_frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    """Yields the frames of the audio. Refuses a file that is cut, or lacks a part of the audio.

    This must be checked, because the decoder leaves out damaged frames without an error. A gap is refused before the
    frame after it, and a file that is too short after its last frame. All times are in seconds.
    """
    is_steady = container.format.name in STEADY_CONTAINERS
    end_of_file = 0.0  # end of the last packet of any stream: the pictures of a video may be longer than its audio
    packet_times = []  # starts and ends of the packets of the audio
    decoded_seconds = 0.0
    end_of_audio = None  # end of the last decoded frame
    for packet in container.demux():
        end_of_file = max(end_of_file, end_of(packet))
        if packet.stream is not stream:
            continue
        timestamp = timestamp_of(packet)
        if timestamp is not None:
            packet_times.append(float(timestamp * packet.time_base))
            packet_times.append(end_of(packet))
        for frame in stream.decode(packet):
            frame_seconds = frame.samples / frame.sample_rate
            start = frame.time
            if start is None:  # it follows the frame before it
                start = 0.0 if end_of_audio is None else end_of_audio
            if is_steady and end_of_audio is not None:
                gap = start - end_of_audio
                # A gap of more than half a frame does not come from rounding. A frame is missing.
                if gap > frame_seconds / 2:
                    raise InvalidInputError(
                        f'{gap:.3f} s of it cannot be decoded, at {end_of_audio:.2f} s: it is damaged'
                    )
            end_of_audio = start + frame_seconds
            decoded_seconds += frame_seconds
            yield frame
    if end_of_audio is None:
        raise InvalidInputError('it holds no audio')
    check_duration(container, max(end_of_file, end_of_audio))  # packets may have no duration, but frames have one
    duration = _duration_of_audio(stream, packet_times)
    if decoded_seconds < least_seconds(duration, container):
        raise InvalidInputError(
            f'only {decoded_seconds:.1f} of its {duration:.1f} s of audio can be decoded: it is damaged, or has '
            'pauses. Write it again, with silence for the pauses: `ffmpeg -i FILE -af aresample=async=1 other.wav`'
        )


def _duration_of_audio(stream: AudioStream, packet_times: Sequence[float]) -> float:
    """Returns the duration of an audio in seconds. Some containers have none for each stream: then that of its packets.

    Args:
        stream: The audio.
        packet_times: Starts and ends of its packets, in seconds.
    """
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if not packet_times:
        return 0.0
    return max(packet_times) - min(packet_times)
