# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Videos as models see them: which frames are taken, and when each is shown."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from composer_tokacc.data.audio import check_end, one_thread, open_container
from composer_tokacc.data.images import read_image
from composer_tokacc.data.records import MediaFile

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
    with _open_video(file) as (container, stream):
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


@contextmanager
def _open_video(file: MediaFile) -> Iterator[tuple[Any, Any]]:
    """Gives the container and its video."""
    from av.stream import Disposition

    with open_container(file) as container:
        streams = [one for one in container.streams.video if not one.disposition & Disposition.attached_pic]
        if not streams:
            raise ValueError('it holds no video')
        one_thread(streams[0])
        yield container, streams[0]


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
    check_end(container, end)
    return sorted(stamps), sorted(keys)


def _read_frames(file: MediaFile, wanted: Sequence[int], keys: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
    """Reads the frames of the given stamps, by stamp, ``(height, width, 3)`` each."""
    found, size = {}, {}
    with _open_video(file) as (container, stream):
        frames, frame = _undamaged(container.decode(stream), keys[0][0] if keys else wanted[0]), None
        for stamp in wanted:
            past = frame.pts if frame is not None else keys[0][0] if keys else stamp
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
    metadata = {
        'total_num_frames': total,
        'fps': 1 / step,
        'duration': total * step,
        'frames_indices': numbers,
        'height': stacked.shape[2],
        'width': stacked.shape[3],
        'video_backend': 'pyav',
    }
    return Video(stacked, metadata)
