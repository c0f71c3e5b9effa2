# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads videos and audio with PyAV, and refuses files that are cut or damaged.

The first part of this file chooses frames. The second opens files and checks that they are complete. The third reads
audio, and the last reads videos. Error messages call a file "it", because the caller puts its name before the message.

A timestamp is the moment at which a frame is shown, as a whole number in the units of its stream's ``time_base``, a
fraction of a second.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch

from composer_tokacc.data.images import read_image
from composer_tokacc.data.records import MediaFile, is_from_file
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream, Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

MAX_MISSING_SHARE = 0.05
"""Share of a duration that may be missing, because the durations in headers are rounded or estimated."""
MEDIA_CONTAINERS = 'aiff,asf,au,avi,flac,flv,gif,ivf,matroska,mov,mp3,mxf,nistsphere,ogg,tta,wav,wv'
"""Containers that are read, by FFmpeg's names. Each is a single file. Playlists are not read, because they name other
files, which may lie outside of the media folder. Transport streams, elementary streams, caf, nut, voc and w64 are not
read, because they may end anywhere, so a missing half could not be noticed."""
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
HEAD_BYTES = 4096
"""Bytes at the start of a file that are searched for the mark of its format, and for the segment of a Matroska file."""
MAX_OGG_PAGE = 27 + 255 + 255 * 255
"""Bytes of the longest page of an Ogg file: a header, a size for each of 255 segments, and 255 bytes in each."""
MIN_UNKNOWN_SIZE = 2**31 - 2**16
"""From this value on, the size in the header of a WAV or AIFF file means that the size is unknown. So does 0. Programs
that write to a pipe write 0, or a size near 2**31 or 2**32 bytes."""
MAX_SAMPLE = 2**20
"""Limit for the absolute values of audio samples. Full scale is 1, or 2**15 if a program did not scale 16-bit integers.
Values far above that are damage, and a model's audio features would overflow."""
MAX_SECONDS = 6 * 3600
"""Longest audio. At 16,000 float32 samples a second it takes 1.3 GiB."""
MIN_SECONDS = 0.05
"""Shortest audio. No model makes a token of a shorter one."""
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
            if value is None and name in ('num_frames', 'fps'):
                continue
            is_number = type(value) is int or (name == 'fps' and type(value) is float)
            if value is None or not is_number or not 0 < value < MAX_SAMPLING_NUMBER:
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


# Opening files, and checks that they are complete.


@contextmanager
def _open_stream(file: MediaFile, modality: Literal['video', 'audio']) -> Iterator[tuple[InputContainer, Any]]:
    """Opens a file with PyAV. Yields the container and its first stream of the modality.

    Refuses a file without its end, without such a stream, or of a format that is not supported. The stream must not be
    used afterwards, because its memory is freed when the container is closed.
    """
    import av.logging
    from av.stream import Disposition

    if isinstance(file, PathLike):
        with open(file, 'rb') as opened:
            _check_last_bytes(opened)
        # The absolute path, because FFmpeg takes a name such as `12:30.mp4` for an address.
        source = os.path.abspath(file)
    else:
        _check_last_bytes(file)
        file.seek(0)
        source = file
    if av.logging.get_level() is None:  # else the user has set it, or torchvision before 0.23
        # With a level, the errors of PyAV hold FFmpeg's reason. PANIC prints nothing.
        av.logging.set_level(av.logging.PANIC)
    try:
        container = av.open(
            source,
            mode='r',
            options={'format_whitelist': MEDIA_CONTAINERS},
            metadata_errors='replace',  # tags may be in any encoding. They are not read
        )
    except ValueError as error:
        if 'whitelist' not in str(error):  # FFmpeg's message about other containers has this word
            raise
        raise InvalidInputError(
            f'it is in a container that is not supported. Convert it to mp4, mkv or wav. Supported: {MEDIA_CONTAINERS}'
        ) from error
    with container:
        streams = getattr(container.streams, modality)
        # The picture on the cover of a song is also a stream of video.
        candidates = [stream for stream in streams if not stream.disposition & Disposition.attached_pic]
        if not candidates:
            raise InvalidInputError(f'it holds no {modality}')
        stream = candidates[0]
        if stream.codec_context is None:
            raise InvalidInputError('it is in a codec that is not known. Convert it to mp4, flac or wav')
        # One thread, because several may deadlock: they wait for Python to write a log line, and Python waits for them.
        stream.codec_context.thread_count = 1
        yield container, stream


def _check_last_bytes(file: BinaryIO) -> None:
    """Refuses a file whose end is missing, if its format marks the end or says the size.

    FFmpeg may read such a file up to the missing part without an error. All files are also checked by their duration,
    see :func:`_check_end`.
    """
    file.seek(0)
    head = file.read(HEAD_BYTES)
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - MAX_OGG_PAGE))
    last_bytes = file.read()
    is_complete = True
    if head.startswith(b'OggS'):
        is_complete = _ends_with_last_ogg_page(last_bytes)
    elif head.startswith(b'\x1aE\xdf\xa3'):  # also WebM
        is_complete = _is_complete_matroska(file, file_size, head)
    elif head.startswith(b'RIFF') and head[8:12] == b'WAVE':
        is_complete = _has_complete_chunk(file, file_size, b'data', 'little')
    elif head.startswith(b'FORM') and head[8:12] in (b'AIFF', b'AIFC'):
        is_complete = _has_complete_chunk(file, file_size, b'SSND', 'big')
    elif head.startswith(b'GIF8'):
        is_complete = last_bytes.rstrip(b'\0').endswith(b';')  # the trailer. Zeros may follow it
    if not is_complete:
        raise InvalidInputError('its end is missing')


def _ends_with_last_ogg_page(last_bytes: bytes) -> bool:
    """Tells whether the last page in an Ogg file is complete, and marked as the last page of a stream.

    Args:
        last_bytes: The last bytes of the file, at least the longest page, or the whole file.
    """
    start = last_bytes.rfind(b'OggS')
    page = last_bytes[start:]
    if start < 0 or len(page) < 27:  # a header has 27 bytes
        return False
    # Byte 5 holds flags (4: the last page), byte 26 the number of segments. A byte for the size of each follows.
    is_marked = bool(page[5] & 4)
    num_segments = page[26]
    segment_sizes = page[27 : 27 + num_segments]
    return is_marked and len(page) >= 27 + num_segments + sum(segment_sizes)


def _is_complete_matroska(file: BinaryIO, file_size: int, head: bytes) -> bool:
    """Tells whether the segment of a Matroska file, which holds everything, ends inside the file.

    The segment begins with an id. Its size comes next, in one to eight bytes. The first of these bytes begins with a
    zero bit for each further byte, and a 1. All bits after this 1 are the size. If each of them is 1, the writer did
    not know the size.

    Args:
        file: The open file.
        file_size: Its size in bytes.
        head: Its first bytes.
    """
    segment_id = b'\x18S\x80g'
    offset_of_id = head.find(segment_id)
    if offset_of_id < 0:
        return True  # FFmpeg reports the missing segment
    offset = offset_of_id + len(segment_id)
    file.seek(offset)
    size_bytes = file.read(8)
    if not size_bytes:
        return False
    num_bytes = 9 - size_bytes[0].bit_length()
    all_size_bits = (1 << 7 * num_bytes) - 1
    length = int.from_bytes(size_bytes[:num_bytes], 'big') & all_size_bits
    is_unknown = length == all_size_bits
    return is_unknown or offset + num_bytes + length <= file_size


def _has_complete_chunk(
    file: BinaryIO,
    file_size: int,
    chunk_id: bytes,
    byteorder: Literal['little', 'big'],
) -> bool:
    """Tells whether the chunk that holds the samples of a WAV or AIFF file ends inside the file.

    A chunk begins with its id and the length of its content in bytes, four bytes each.
    """
    offset = 12  # the first chunk comes after `RIFF` or `FORM`, the size of the file, and the name of the format
    while offset + 8 <= file_size:
        file.seek(offset)
        head = file.read(8)
        length = int.from_bytes(head[4:], byteorder)
        if head[:4] == chunk_id:
            is_unknown = length == 0 or length >= MIN_UNKNOWN_SIZE
            return is_unknown or offset + 8 + length <= file_size
        offset += 8 + length + length % 2  # chunks begin at even offsets
    return True  # FFmpeg reports the missing chunk


def _check_end(container: InputContainer, end: float) -> None:
    """Refuses a file that ends earlier than its header says.

    Args:
        container: The open file. Its header gives the duration of the longest stream.
        end: Time at which the last packet of any stream ends, in seconds.
    """
    if container.duration is None:
        raise InvalidInputError('it does not say how long it is. Write it again: `ffmpeg -i FILE -c copy other.mkv`')
    duration = container.duration / 1e6  # PyAV counts the times of a container in microseconds
    start = (container.start_time or 0) / 1e6
    if container.format.name.startswith('matroska'):
        start = 0  # its duration may count from 0, even if the video begins later
    seconds = end - start
    if seconds < _fewest_seconds(duration, container):
        raise InvalidInputError(f'it ends after {seconds:.1f} of {duration:.1f} s')


def _fewest_seconds(duration: float, container: InputContainer) -> float:
    """Returns how many seconds a file or stream of this duration must at least have to count as complete."""
    # The last packet may have no duration. It holds one frame, up to 0.5 s of a video. The first packets of an audio
    # may fill the decoder, which returns nothing for them: up to 0.2 s (MP3 with 8,000 samples a second).
    tolerance = 0.5 if container.streams.video else 0.2
    return duration * (1 - MAX_MISSING_SHARE) - tolerance


def _end_of(packet: Packet) -> float:
    """Returns the time at which a packet ends, in seconds. 0 if it has no time, or no content."""
    timestamp = _timestamp_of(packet)
    if timestamp is None:
        return 0.0
    end = timestamp + (packet.duration or 0)
    return float(end * packet.time_base)


def _timestamp_of(packet: Packet) -> int | None:
    """Returns the timestamp of the frame in a packet. None if the packet has no time, or no content.

    Some containers, such as AVI, say only when a frame is decoded. Then this time is taken.
    """
    if not packet.size:  # it only marks the end of a stream
        return None
    return packet.dts if packet.pts is None else packet.pts


# Audio.


def read_audio(file: MediaFile, sampling_rate: int) -> np.ndarray:
    """Returns the audio as mono, float32 ``(samples,)``, with ``sampling_rate`` samples a second.

    Refuses audio that is damaged, too short or too long.
    """
    import av

    with _open_stream(file, 'audio') as (container, stream):
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
        end_of_file = max(end_of_file, _end_of(packet))
        if packet.stream is not stream:
            continue
        timestamp = _timestamp_of(packet)
        if timestamp is not None:
            packet_times.append(float(timestamp * packet.time_base))
            packet_times.append(_end_of(packet))
        for frame in stream.decode(packet):
            frame_seconds = frame.samples / frame.sample_rate
            start = frame.time
            if start is None:  # it follows the frame before it
                start = end_of_audio or 0.0
            # A gap of more than half a frame does not come from rounding. A frame is missing.
            if is_steady and end_of_audio is not None and start - end_of_audio > frame_seconds / 2:
                gap = start - end_of_audio
                raise InvalidInputError(f'{gap:.3f} s of it cannot be decoded, at {end_of_audio:.2f} s: it is damaged')
            end_of_audio = start + frame_seconds
            decoded_seconds += frame_seconds
            yield frame
    if end_of_audio is None:
        raise InvalidInputError('it holds no audio')
    _check_end(container, max(end_of_file, end_of_audio))  # packets may have no duration, but frames have one
    if stream.duration is not None and stream.time_base is not None:
        duration = float(stream.duration * stream.time_base)
    else:  # some containers do not have a duration for each stream
        duration = max(packet_times, default=0.0) - min(packet_times, default=0.0)
    if decoded_seconds < _fewest_seconds(duration, container):
        raise InvalidInputError(
            f'only {decoded_seconds:.1f} of its {duration:.1f} s of audio can be decoded: it is damaged, or has '
            'pauses. Write it again, with silence for the pauses: `ffmpeg -i FILE -af aresample=async=1 other.wav`'
        )


# Videos.


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
    with _open_stream(file, 'video') as (container, stream):
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
        end_of_file = max(end_of_file, _end_of(packet))
        timestamp = _timestamp_of(packet)
        if timestamp is None:
            continue
        if packet.stream is not stream or packet.is_discard:  # a discarded frame is not shown
            continue
        timestamps.append(timestamp)
        if packet.is_keyframe:
            key_timestamps.append(timestamp)
    if not timestamps:
        raise InvalidInputError('it holds no frames that have a time')
    _check_end(container, end_of_file)
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
        with _open_stream(file, 'video') as (container, stream):
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
    decoded_from = timestamps[0]
    if jump_timestamps:  # decoding a file that was just opened starts at its first key frame
        decoded_from = jump_timestamps[0]
    frames = container.decode(stream)
    frame = None
    for timestamp in timestamps:
        num_jumps_before = bisect_right(jump_timestamps, timestamp)
        if num_jumps_before and jump_timestamps[num_jumps_before - 1] != decoded_from:
            decoded_from = jump_timestamps[num_jumps_before - 1]
            container.seek(decoded_from, stream=stream)
            frames = container.decode(stream)
            frame = None
        while frame is None or frame.pts is None or frame.pts < timestamp:
            frame = next(frames, None)
            if frame is None:
                break  # the file has ended
            # An earlier frame may be marked as damaged, because it needs a key frame that was not decoded.
            if frame.is_corrupt and frame.pts is not None and frame.pts >= decoded_from:
                raise InvalidInputError(f'its frame at {frame.time:.2f} s is damaged')
        if frame is not None:
            taken_frames.append(frame)
    return taken_frames


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
