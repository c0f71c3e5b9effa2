# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Videos and audio as models see and hear them: all that PyAV decodes."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch

from composer_tokacc.data.images import read_image
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
DEFAULT_FPS = 2.0
MAX_PIXELS_OF_VIDEO = 2**31
"""Of all frames that are taken: 6 GiB."""


@dataclass(frozen=True, kw_only=True)
class VideoSampling:
    """Which frames of a video a model sees: evenly spread over its time, whatever their rhythm.

    Args:
        num_frames: Frames of every video; those of a shorter one are repeated.
        fps: Frames a second, and never more than the video has. Default, where ``num_frames`` is not given: 2.
        min_frames: Least frames of a video, repeated where it has fewer.
        max_frames: Most frames of a video.

    Raises:
        ValueError: If a number is not positive, or they contradict each other.
    """

    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 1
    max_frames: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kinds = (int, float) if name == 'fps' else int
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e6):
                raise ValueError(f'`{name}` must be a positive number, whole but for `fps`, got: {value!r}')
        if self.num_frames is not None and self.fps is not None:
            raise ValueError(f'`fps` must be left out beside `num_frames`, got: {self.fps}. Remove one')
        least = max(self.min_frames, self.num_frames or 0)
        if self.max_frames < least:
            raise ValueError(f'`max_frames` must be at least the frames asked for, got: {self.max_frames} < {least}')

    def count(self, num_frames: int, duration: float) -> int:
        """Returns how many are taken of a video of so many frames, and seconds."""
        count = self.num_frames
        if count is None:
            count = min(int(duration * (self.fps or DEFAULT_FPS) + 1e-6), num_frames)  # 0.3 s x 10 is 2.9999999
        return min(max(count, self.min_frames), self.max_frames)

    def choose(self, times: Sequence[float], duration: float) -> list[int]:
        """Returns numbers of the frames to take; the times of all, and the duration, are in seconds from the first."""
        count = self.count(len(times), duration)
        # What is on the screen at that moment.
        return [max(bisect_right(times, i * duration / count + 1e-6) - 1, 0) for i in range(count)]


class Video(NamedTuple):
    """Frames of a video."""

    frames: torch.Tensor
    """``(frames, 3, height, width)`` uint8."""
    metadata: dict[str, Any]
    """Fields of transformers' ``VideoMetadata``, by which processors tell the model when a frame is shown."""


@contextmanager
def _open_stream(file: MediaFile, modality: Literal['video', 'audio']) -> Iterator[tuple[Any, Any]]:
    """Gives PyAV's container and stream: of a name that is taken for no address (``12:30.mp4``), or of an open file."""
    import av
    from av.stream import Disposition

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
        streams = getattr(container.streams, modality)
        stream = next((one for one in streams if not one.disposition & Disposition.attached_pic), None)
        if stream is None:
            raise ValueError(f'it holds no {modality}')
        if stream.codec_context is None:
            raise ValueError('it is in a codec that is not known. Convert it to mp4, flac or wav')
        # The decoder's own threads write log lines, waiting for Python while Python waits for their end.
        stream.codec_context.thread_count = 1
        yield container, stream


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


def _check_end(container: Any, end: float) -> None:
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

    with _open_stream(file, 'audio') as (container, stream):
        stream.codec_context.options = {'err_detect': 'crccheck+explode'}  # FLAC's, of each frame
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
        _check_end(container, (container.start_time or 0) / 1e6 + len(audio) / sampling_rate)
        return audio


def read_frames(files: Sequence[MediaFile], sampling: VideoSampling) -> Video:
    """Returns the chosen ones of images that are the frames of a video, one each time that a frame would be taken."""
    step = 1 / (sampling.fps or DEFAULT_FPS)
    chosen = sampling.choose([i * step for i in range(len(files))], len(files) * step)
    images = {i: read_image(files[i]) for i in set(chosen)}
    if len(sizes := {image.size for image in images.values()}) > 1:
        raise ValueError(f'frames of a video must be of one size, got: {sorted(sizes)[:3]}. Resize them')
    _check_pixels(len(chosen), *images[chosen[0]].size)
    return make_video([np.asarray(images[i]) for i in chosen], chosen, len(files), step)


def _check_pixels(num_frames: int, width: int, height: int) -> None:
    if num_frames * width * height > MAX_PIXELS_OF_VIDEO:
        found = f'{num_frames} frames of {width} x {height}. Take fewer, or make it smaller'
        raise ValueError(f'a video must have at most {MAX_PIXELS_OF_VIDEO} pixels, got: {found}')


def read_video(file: MediaFile, sampling: VideoSampling, *, shapes_only: bool = False) -> Video:
    """Returns the chosen frames of a video, turned as the camera was; with ``shapes_only`` all are the first one."""
    with _open_stream(file, 'video') as (container, stream):
        stamps, keys = _read_stamps(container, stream)
        # Of the video itself: the container's own figure may be that of another stream, or of a clock.
        unit = float(stream.time_base)
        span = (stamps[-1] - stamps[0]) * unit
        step = span / (len(stamps) - 1) if span else 1 / float(stream.average_rate or 1)
    times = [(stamp - stamps[0]) * unit for stamp in stamps]
    duration = times[-1] + step
    chosen = sampling.choose(times, duration)
    _check_pixels(len(chosen), stream.width, stream.height)
    wanted = sorted({stamps[i] for i in chosen})
    frames = _read_frames(file, wanted[:1] if shapes_only else wanted, keys)
    if shapes_only:
        frames = dict.fromkeys(wanted, frames[wanted[0]])
    gaps = [gap for gap in np.diff(times).tolist() if gap > 0]
    if gaps and max(gaps) > 1.5 * step:  # in an uneven rhythm the mean says little about when a frame is shown
        step = min(gaps)
    nominal = [round(times[i] / step) for i in chosen]
    return make_video([frames[stamps[i]] for i in chosen], nominal, round(duration / step), step)


def _read_stamps(container: Any, stream: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Reads when frames are shown, and where (time, decoding time) decoding may start, in units of the stream."""
    stamps, keys, end = [], [], 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise ValueError('it is cut in the middle of a frame, or damaged')
        stamp = packet.dts if packet.pts is None else packet.pts
        if packet.size and stamp is not None:
            end = max(end, float((stamp + (packet.duration or 0)) * packet.time_base))
            if packet.stream is stream and not packet.is_discard:
                stamps.append(stamp)
                keys += [(stamp, stamp if packet.dts is None else packet.dts)] * packet.is_keyframe
    if not stamps:
        raise ValueError('it holds no frames that have a time')
    _check_end(container, end)
    return sorted(stamps), sorted(keys)


def _read_frames(file: MediaFile, wanted: Sequence[int], keys: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
    """Reads the frames of the given stamps, by stamp, ``(height, width, 3)`` each."""
    found, size = {}, {}
    start = keys[0][0] if keys else wanted[0]
    with _open_stream(file, 'video') as (container, stream):
        frames, frame = _undamaged(container.decode(stream), start), None
        for stamp in wanted:
            past = start if frame is None else frame.pts
            index = bisect_right(keys, (stamp, sys.maxsize)) - 1
            if index >= 0 and keys[index][0] > past:  # nothing of what lies between has to be decoded
                for place in keys[index]:  # some containers look for what is shown then, others for what is decoded
                    container.seek(place, stream=stream)
                    frames = _undamaged(container.decode(stream), keys[index][0])
                    frame = next(frames, None)
                    if frame is not None and frame.pts is not None and frame.pts <= stamp:
                        break
            if frame is None or frame.pts is None or frame.pts < stamp:
                frame = next((one for one in frames if one.pts is not None and one.pts >= stamp), None)
            if keys and (frame is None or frame.pts > stamp):  # what was found lies behind it
                return _read_frames(file, wanted, [])
            if frame is None:
                raise ValueError(f'its frame at {float(stamp * stream.time_base):.2f} s cannot be decoded')
            size = size or {'width': frame.width, 'height': frame.height}  # may change in the middle
            pixels = frame.reformat(format='rgb24', **size).to_ndarray()
            found[stamp] = _upright(pixels, frame.side_data.get('DISPLAYMATRIX'))
    return found


def _undamaged(frames: Iterator[Any], start: int) -> Iterator[Any]:
    """Refuses frames that their decoder marks, but for those before a key frame, which may lack what they need."""
    for frame in frames:
        if frame.is_corrupt and frame.pts is not None and frame.pts >= start:
            raise ValueError(f'its frame at {frame.time:.2f} s is damaged')
        yield frame


def _upright(frame: np.ndarray, matrix: Any) -> np.ndarray:
    """Turns a frame as the camera was turned, and mirrors it where that filmed as a mirror shows."""
    if matrix is None:
        return frame
    # Of 16.16 numbers: a pixel at (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5]
    if abs(b) > abs(a):
        frame, a, d = frame.swapaxes(0, 1), c, b
    return frame[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def make_video(frames: Sequence[np.ndarray], numbers: list[int], total: int, step: float) -> Video:
    """Joins frames with what processors ask about them: frame ``n`` is shown after ``n * step`` seconds."""
    stacked = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    metadata = {'total_num_frames': total, 'fps': 1 / step, 'duration': total * step, 'frames_indices': numbers}
    return Video(stacked, metadata)
