# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Chooses the frames of videos, and reads them with PyAV.

The first part of this file chooses frames, the second reads them. :mod:`.containers` says what a timestamp is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from composer_tokacc.data.containers import check_duration, end_of, open_stream, timestamp_of
from composer_tokacc.data.images import read_image
from composer_tokacc.data.records import MediaFile, is_from_file
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

DEFAULT_FPS = 2.0
MAX_SAMPLING_NUMBER = 1e6
"""Limit for the numbers of :class:`VideoSampling`. A larger one is a mistake, such as a number of bytes."""
MAX_PIXELS_OF_VIDEO = 2**31
"""Limit for the pixels of all frames that are taken of one video. In RGB they take 6 GiB."""


@dataclass(frozen=True, kw_only=True)
class VideoSampling:
    """Chooses the frames that a model sees, evenly spread over time.

    Args:
        num_frames: Frames to take of every video. A shorter video repeats frames.
        fps: Frames to take of each second, but never more than the video has. The default is 2, unless ``num_frames``
            is given.
        min_frames: Fewest frames to take. A shorter video repeats frames.
        max_frames: Most frames to take.

    Raises:
        ValueError: If a number is not positive, or two of them contradict each other.
    """

    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 1
    max_frames: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_none = name in ('num_frames', 'fps')
            if value is None and may_be_none:
                continue
            has_right_type = type(value) is int or (type(value) is float and name == 'fps')
            if value is None or not has_right_type or not 0 < value < MAX_SAMPLING_NUMBER:
                raise InvalidInputError(
                    f'`{name}` must be a positive number below {MAX_SAMPLING_NUMBER:,.0f} (only `fps` may have a '
                    f'fraction), got: {value!r:.100}'
                )
        if self.num_frames is not None and self.fps is not None:
            raise InvalidInputError(f'`fps` must be left out if `num_frames` is given, got: {self.fps}. Remove one')
        # Without `num_frames`, only the two limits are compared.
        num_frames = self.num_frames or self.min_frames
        if not self.min_frames <= num_frames <= self.max_frames:
            raise InvalidInputError(
                '`min_frames` <= `num_frames` <= `max_frames` must hold, got: '
                f'{self.min_frames}, {self.num_frames} and {self.max_frames}. Raise or remove one of them'
            )

    def count(self, num_frames: int, duration: float) -> int:
        """Returns the number of frames to take of a video.

        Args:
            num_frames: Frames of the video.
            duration: Seconds of the video.
        """
        if self.num_frames is not None:
            return self.num_frames
        # The small number is for rounding: 4 frames at 10 a second last 0.39999999 s, and x 10 this is 3.9999999.
        frames_of_rate = int(duration * (self.fps or DEFAULT_FPS) + 1e-6)
        count = min(frames_of_rate, num_frames)
        return min(max(count, self.min_frames), self.max_frames)

    def choose(self, times: Sequence[float], duration: float) -> list[int]:
        """Returns the indices of the frames to take: those on screen at evenly spread moments.

        Args:
            times: Seconds from the first frame to each frame, ascending. The first is 0.
            duration: Seconds of the whole video.
        """
        count = self.count(len(times), duration)
        chosen = []
        for number in range(count):
            moment = number * duration / count + 1e-6  # the small number is for rounding here, too
            frame_on_screen = bisect_right(times, moment) - 1  # the last frame that begins at this moment or before
            chosen.append(frame_on_screen)
        return chosen


class Video(NamedTuple):
    """The chosen frames of a video."""

    frames: torch.Tensor
    """``(frames, 3, height, width)`` uint8."""
    metadata: dict[str, Any]
    """Fields of transformers' ``VideoMetadata``. Processors compute from them when a frame is shown."""


def make_video(frames: Sequence[np.ndarray], frame_numbers: list[int], num_steps: int, step: float) -> Video:
    """Stacks frames and adds the metadata that processors need.

    Processors expect a video with equal steps of time between frames. So the time of a frame is given in such steps,
    see `_even_step`.

    Args:
        frames: The frames that were taken, uint8 ``(height, width, 3)`` each.
        frame_numbers: For each frame, the number of steps from the start of the video to this frame.
        num_steps: Duration of the whole video in steps. It is the number of its frames, if their times are even.
        step: Seconds of a step.
    """
    stacked = torch.from_numpy(np.stack(frames))
    stacked = stacked.permute(0, 3, 1, 2)
    metadata = {
        'total_num_frames': num_steps,
        'fps': 1 / step,
        'duration': num_steps * step,
        'frames_indices': frame_numbers,
    }
    return Video(stacked, metadata)


# Reading videos.


def read_frames(files: Sequence[MediaFile], sampling: VideoSampling) -> Video:
    """Returns a video whose frames are image files.

    Image files have no times. So they count as a video with as many frames a second as the sampling takes. It takes all
    of them, unless their number is limited.
    """
    step = 1 / (sampling.fps or DEFAULT_FPS)
    times = [number * step for number in range(len(files))]
    seconds = len(files) * step
    chosen = sampling.choose(times, seconds)
    frames: list[np.ndarray] = []
    for number in chosen:
        try:
            image = read_image(files[number])
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            if not is_from_file(error):
                raise
            raise InvalidInputError(f'image {number + 1} of {len(files)}: {error}') from error
        # Checked before the next image is decoded, because all images may fill the memory.
        _check_pixels(len(chosen), *image.size)
        frames.append(np.asarray(image))
        if frames[-1].shape != frames[0].shape:
            shapes = f'{frames[0].shape} and {frames[-1].shape}'
            raise InvalidInputError(f'frames of a video must be of one size, got: {shapes}. Resize them')
    return make_video(frames, chosen, len(files), step)


def read_video(file: MediaFile, sampling: VideoSampling, *, shapes_only: bool = False) -> Video:
    """Returns the frames of a video that the sampling chooses, upright.

    With ``shapes_only``, the first of them is decoded and returned for each. That is enough to measure lengths.
    """
    with open_stream(file, 'video') as (container, stream):
        timestamps, key_timestamps = _read_timestamps(container, stream)
        times = [float((timestamp - timestamps[0]) * stream.time_base) for timestamp in timestamps]
        # The step is measured. The rate in the header may belong to another stream, or be the tick rate of a clock.
        if times[-1] > 0:
            mean_step = times[-1] / (len(times) - 1)
        else:  # with one frame there is nothing to measure
            mean_step = 1 / float(stream.average_rate or 1)
        duration = times[-1] + mean_step
        chosen = sampling.choose(times, duration)
        _check_pixels(len(chosen), stream.width, stream.height)
    # `_read_timestamps` has read all packets to the end. So the file is opened again to decode frames.
    chosen_timestamps = [timestamps[index] for index in chosen]
    if shapes_only:
        frames = _decode_frames(file, chosen_timestamps[:1], key_timestamps) * len(chosen)
    else:
        frames = _decode_frames(file, chosen_timestamps, key_timestamps)
    # The metadata give times in equal steps, see `make_video`.
    even_step = _even_step(times, mean_step)
    frame_numbers = [round(times[index] / even_step) for index in chosen]
    num_steps = round(duration / even_step)
    return make_video(frames, frame_numbers, num_steps, even_step)


def _even_step(times: Sequence[float], mean_step: float) -> float:
    """Returns the seconds of a step of :func:`make_video`.

    Usually it is the mean step between frames, so that the number of a frame is its index. If the steps between frames
    are uneven, it is the smallest of them. Then rounding moves a frame by at most half of this step.

    Args:
        times: Seconds from the first frame to each frame.
        mean_step: Mean of the seconds between two frames.
    """
    steps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    # A step longer than 1.5 times the mean is uneven. Rounding of timestamps makes no such step.
    if steps and max(steps) > 1.5 * mean_step:
        return min(steps)
    return mean_step


def _check_pixels(num_frames: int, width: int, height: int) -> None:
    """Refuses frames that would fill the memory."""
    if num_frames * width * height > MAX_PIXELS_OF_VIDEO:
        raise InvalidInputError(
            f'a video must have at most {MAX_PIXELS_OF_VIDEO} pixels, got: {num_frames} frames of {width} x {height}. '
            'Take fewer frames, or make it smaller'
        )


def _read_timestamps(container: InputContainer, stream: VideoStream) -> tuple[list[int], list[int]]:
    """Returns the timestamps of all frames, and the timestamps of the key frames, both sorted. No frame is decoded.

    Refuses a file that is cut or damaged. To see this, it reads all packets of the file.
    """
    timestamps = []
    key_timestamps = []
    end_of_file = 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise InvalidInputError('it is cut in the middle of a frame, or damaged')
        end_of_file = max(end_of_file, end_of(packet))
        timestamp = timestamp_of(packet)
        if timestamp is None:
            continue
        if packet.stream is not stream or packet.is_discard:  # a discarded frame is not shown
            continue
        timestamps.append(timestamp)
        if packet.is_keyframe:
            key_timestamps.append(timestamp)
    if not timestamps:
        raise InvalidInputError('it holds no frames that have a time')
    check_duration(container, end_of_file)
    return sorted(timestamps), sorted(key_timestamps)


def _decode_frames(
    file: MediaFile,
    timestamps: list[int],
    key_timestamps: Sequence[int],
) -> list[np.ndarray]:
    """Returns the frame of each timestamp, uint8 ``(height, width, 3)`` and upright.

    If the decoder does not return the frame of a timestamp, the next frame that it returns is taken. The video is
    refused if no frame follows, or if a frame is damaged.

    Args:
        file: The file, which is opened here.
        timestamps: The timestamps, sorted, at least one. Some may be equal.
        key_timestamps: Timestamps of all key frames of the video, sorted.
    """
    # The first attempt jumps to key frames. A jump may go past a frame, if the container has no index or a wrong one.
    # So if a frame is missing, the second attempt decodes everything from the start, without jumps.
    for jump_timestamps in (key_timestamps, []):
        with open_stream(file, 'video') as (container, stream):
            frames = _take_frames(container, stream, timestamps, jump_timestamps)
        if [frame.pts for frame in frames] == timestamps:
            break
    num_missing = len(timestamps) - len(frames)
    if num_missing:
        raise InvalidInputError(f'the last {num_missing} of its {len(timestamps)} chosen frames cannot be decoded')
    upright = []
    for frame in frames:
        # The size of frames may change within a video, so all get the size of the first.
        resized = frame.reformat(
            format='rgb24',
            width=frames[0].width,
            height=frames[0].height,
        )
        display_matrix = frame.side_data.get('DISPLAYMATRIX')
        upright.append(_turn_upright(resized.to_ndarray(), display_matrix))
    return upright


def _take_frames(
    container: InputContainer,
    stream: VideoStream,
    timestamps: Sequence[int],
    jump_timestamps: Sequence[int],
) -> list[VideoFrame]:
    """Returns for each timestamp the first decoded frame that is shown at this timestamp or later.

    It is a later frame if the decoder does not return the frame of the timestamp. For a timestamp after the last
    decoded frame the result has no frame. Refuses a damaged frame.

    Args:
        container: The file, which was just opened.
        stream: Its video.
        timestamps: The timestamps, sorted.
        jump_timestamps: Timestamps of the key frames that may be jumped to, sorted. If several of them lie between two
            timestamps, the last one is jumped to.
    """
    taken_frames = []
    # The timestamp at which decoding has started. In a file that was just opened, it starts at the first key frame.
    decoded_from = timestamps[0]
    if jump_timestamps:
        decoded_from = jump_timestamps[0]
    frames = container.decode(stream)
    frame = None  # the last frame that was decoded since the last jump. None: no frame yet, or the file has ended
    for timestamp in timestamps:
        key_timestamp = decoded_from
        num_keys_before = bisect_right(jump_timestamps, timestamp)
        if num_keys_before > 0:
            key_timestamp = jump_timestamps[num_keys_before - 1]
        if key_timestamp != decoded_from:
            container.seek(key_timestamp, stream=stream)
            decoded_from = key_timestamp
            frames = container.decode(stream)
            frame = None
        frame = _first_frame_from(timestamp, frame, frames, decoded_from)
        if frame is not None:
            taken_frames.append(frame)
    return taken_frames


def _first_frame_from(
    timestamp: int,
    frame: VideoFrame | None,
    next_frames: Iterator[VideoFrame],
    decoded_from: int,
) -> VideoFrame | None:
    """Returns the first frame that is shown at a timestamp or later. None if the file ends before. Refuses damage.

    Args:
        timestamp: The timestamp.
        frame: The frame that was decoded last. It is returned if it is not shown before the timestamp.
        next_frames: Decodes the frames after it.
        decoded_from: The timestamp at which decoding has started.
    """
    while frame is None or frame.pts is None or frame.pts < timestamp:
        frame = next(next_frames, None)
        if frame is None:
            return None
        # An earlier frame may be marked as damaged, because it needs a key frame that was not decoded.
        if frame.is_corrupt and frame.pts is not None and frame.pts >= decoded_from:
            raise InvalidInputError(f'its frame at {frame.time:.2f} s is damaged')
    return frame


def _turn_upright(frame: np.ndarray, matrix: bytes | None) -> np.ndarray:
    """Turns and mirrors a frame as the display matrix says.

    Args:
        frame: ``(height, width, 3)``.
        matrix: FFmpeg's display matrix, the numbers a, b, u, c, d, v, and three more, as int32. A pixel at (x, y) is
            shown at (a x + c y, b x + d y), apart from a shift. Frames are turned by 90, 180 or 270 degrees only. None:
            the frame is upright.
    """
    if matrix is None:
        return frame
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5]
    x_sign = a
    y_sign = d
    if abs(b) > abs(a):  # a turn by 90 or 270 degrees: x is shown as y, and y as x
        frame = frame.swapaxes(0, 1)
        x_sign = c
        y_sign = b
    horizontal_step = -1 if x_sign < 0 else 1
    vertical_step = -1 if y_sign < 0 else 1
    return frame[::vertical_step, ::horizontal_step]
