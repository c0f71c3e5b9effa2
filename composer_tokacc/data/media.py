# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media of a sample: reading their files, and how many patches the vision tower computes for them."""

from __future__ import annotations

import importlib.util
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from composer_tokacc.data.formats import Medium, Record

__all__ = [
    'DEFAULT_PATCH_SIZE',
    'MediaFolders',
    'Video',
    'VideoSampling',
    'check_decoder',
    'count_patches',
    'declared_patch_size',
    'image_size',
    'open_media',
    'side_of_patch',
]

File = PathLike[str] | BinaryIO

MAX_16_BIT = 65535
MAX_PIXELS = 89_478_485
"""Of one image; above it PIL warns of a decompression bomb."""
SIZE_IN_HEADER = ('JPEG', 'MPO', 'PNG', 'WEBP', 'GIF', 'BMP')
"""Formats of PIL whose images have the size that stands in the header, before an EXIF entry turns them."""
QUARTER_TURNS = (5, 6, 7, 8)
"""Values of EXIF's orientation that exchange width and height."""
DEFAULT_PATCH_SIZE = 14
"""The commonest side of a patch, in pixels, for where neither model nor processor names one."""
DEFAULT_FPS = 2.0
CUT_SHARE = 0.05
"""Share of a video that may be missing at its end: durations in headers are round, and sounds may end first."""


@dataclass(frozen=True, kw_only=True)
class VideoSampling:
    """Which frames of a video a model sees: evenly spread over its time, in whatever rhythm they were filmed.

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

    def choose(self, times: Sequence[float], duration: float) -> list[int]:
        """Numbers of the frames to take, in their order.

        Args:
            times: When each frame of the video is shown, in seconds from the first, ascending.
            duration: Until the last one ends.
        """
        count = self.num_frames
        if count is None:
            count = min(int(duration * (self.fps or DEFAULT_FPS) + 1e-6), len(times))  # 0.3 s x 10 is 2.9999999
        count = min(max(count, self.min_frames), self.max_frames)
        # What is on the screen at that moment.
        return [max(bisect_right(times, i * duration / count + 1e-6) - 1, 0) for i in range(count)]


class Video(NamedTuple):
    """Frames of a video."""

    frames: torch.Tensor
    """``(frames, 3, height, width)`` uint8."""
    metadata: dict[str, Any]
    """Fields of transformers' ``VideoMetadata``, by which processors tell the model when a frame is shown."""


def check_decoder(medium: Medium) -> None:
    """Refuses what needs a decoder that is not there; no fault of the sample, which must not be skipped for it.

    Raises:
        ValueError: If it is a video or a sound and PyAV is not installed.
    """
    is_pictures = medium.kind == 'image' or len(medium.files) > 1
    if not is_pictures and importlib.util.find_spec('av') is None:
        raise ValueError(
            "videos and sounds must have PyAV to read them, got: none. pip install 'composer_tokacc[media]'"
        )


class MediaFolders:
    """Looks up files of media in their folders, by one listing of a folder instead of one question a file.

    Args:
        allow_outside: Whether names may lead out of the folder: ``../``, absolute ones, links.
    """

    def __init__(self, *, allow_outside: bool = False) -> None:
        self._allows_outside = allow_outside
        self._listings: dict[Path, _Listing] = {}

    def check(self, record: Record, folder: Path) -> None:
        """Refuses a record with a file that is not there, lies elsewhere, or has no decoder.

        Raises:
            BadSampleError: If a file does not exist, or lies outside the folder.
            ValueError: If there is no decoder for it.
        """
        for medium in record.media:
            check_decoder(medium)
            for file in (folder / file for file in medium.files if isinstance(file, str)):
                found, listed = self._listing(file.parent), self._listing(folder)
                if file.name not in found.is_link:
                    raise record.error(f'{medium.kind} file {file} does not exist; is `image_dir` right?')
                place = Path(os.path.realpath(file)).parent if found.is_link[file.name] else found.place
                if not self._allows_outside and not place.is_relative_to(listed.place):
                    raise record.error(
                        f'{medium.kind} file {file} must lie under {folder}, got: {place}. Set `image_dir` to a folder '
                        'that holds all files, or `allow_outside=true` for files that you know'
                    )

    def _listing(self, folder: Path) -> _Listing:
        if folder not in self._listings:
            entries = os.scandir(folder) if os.path.isdir(folder) else ()  # False too where no name may be so long
            is_link = {entry.name: entry.is_symlink() for entry in entries}
            self._listings[folder] = _Listing(Path(os.path.realpath(folder)), is_link)
        return self._listings[folder]


class _Listing(NamedTuple):
    """A folder of media."""

    place: Path
    """Where it really is."""
    is_link: dict[str, bool]
    """What it holds, by name; nothing where there is no such folder."""


def open_media(
    record: Record,
    files: Sequence[File],
    *,
    video: VideoSampling | None = None,
    sampling_rate: int = 16000,
    outlines: bool = False,
) -> dict[str, list[Any]]:
    """Decodes the files of a record.

    Args:
        record: Whose media they are.
        files: One path or open file for each file of ``record.media``.
        video: Which frames of its videos.
        sampling_rate: Of its sounds, in samples a second; others are resampled.
        outlines: Decode no more than sizes and times need: images are black, all frames of a film are its first.

    Returns:
        By kind of medium: ``'image'``, in RGB, turned as a camera's EXIF entry says, 16 bits a channel scaled to 8;
        ``'video'``, turned likewise; ``'audio'``, float32 ``(samples,)``, the mean of its channels.

    Raises:
        BadSampleError: If one cannot be decoded; names sample and file.
        ValueError: If there is no decoder for it.
    """
    found: dict[str, list[Any]] = {}
    rest = iter(files)
    for medium in record.media:
        check_decoder(medium)
        opened = [next(rest) for _ in medium.files]
        try:
            if medium.kind == 'audio':
                content = _read_sound(opened[0], sampling_rate)
            elif medium.kind == 'image':
                content = Image.new('RGB', image_size(opened[0])) if outlines else _read_image(opened[0])
            else:
                content = _read_video(opened, video or VideoSampling(), outlines)
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            named = zip(opened, medium.names, strict=True)
            names = ', '.join(str(file if isinstance(file, PathLike) else name) for file, name in named)
            raise record.error(f'{medium.kind} file {names} cannot be read: {error}') from error
        found.setdefault(medium.kind, []).append(content)
    return found


@contextmanager
def _open_image(file: File) -> Iterator[Image.Image]:
    """The image, not decoded yet, unless it is too large: 100 million pixels took 1.9 GiB."""
    with Image.open(file) as image:
        num_pixels = image.width * image.height
        if num_pixels > MAX_PIXELS:
            raise ValueError(f'it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; make it smaller')
        yield image


def _read_image(file: File) -> Image.Image:
    with _open_image(file) as image:
        return _to_rgb(ImageOps.exif_transpose(image))


def _read_video(files: Sequence[File], sampling: VideoSampling, outlines: bool) -> Video:
    """The chosen frames of a film, or of pictures that are its frames, one each time that a frame would be taken."""
    if len(files) > 1:
        step = 1 / (sampling.fps or DEFAULT_FPS)
        times = [i * step for i in range(len(files))]
        chosen = sampling.choose(times, len(files) * step)
        pictures = {i: _read_image(files[i]) for i in set(chosen)}
        size = pictures[chosen[0]].size
        return _video([np.asarray(pictures[i].resize(size)) for i in chosen], chosen, len(times), step)
    with _open_film(files[0]) as (container, stream):
        stamps, keys = _read_stamps(container, stream)
        # Of the film itself: the container's own figure may be that of another stream, or of a clock.
        unit = float(stream.time_base)
        span = (stamps[-1] - stamps[0]) * unit
        step = span / (len(stamps) - 1) if span else 1 / float(stream.average_rate or 1)
    times = [(stamp - stamps[0]) * unit for stamp in stamps]
    duration = times[-1] + step
    chosen = sampling.choose(times, duration)
    wanted = sorted({stamps[i] for i in chosen})
    frames = _read_frames(files[0], wanted[:1] if outlines else wanted, keys)
    if outlines:
        frames = dict.fromkeys(wanted, frames[wanted[0]])
    gaps = [gap for gap in np.diff(times).tolist() if gap > 0]
    if gaps and max(gaps) > 1.5 * step:  # in an uneven rhythm the mean says little about when a frame is shown
        step = min(gaps)
    nominal = [round(times[i] / step) for i in chosen]
    return _video([frames[stamps[i]] for i in chosen], nominal, round(duration / step), step)


def _source(file: File) -> str | BinaryIO:
    """What PyAV opens: a name that it takes for no address (``12:30.mp4``), or the file from its start."""
    if isinstance(file, PathLike):
        return os.path.abspath(file)
    file.seek(0)
    return file


@contextmanager
def _open_film(file: File) -> Iterator[tuple[Any, Any]]:
    """The container and its film."""
    import av
    from av.stream import Disposition

    with av.open(_source(file)) as container:
        streams = [one for one in container.streams.video if not one.disposition & Disposition.attached_pic]
        if not streams or container.format.name == 'tty':  # which takes any text for a film
            raise ValueError('it holds no video')
        # Threads of the decoder write log lines, for which they wait for Python while Python waits for their end.
        streams[0].codec_context.thread_count = 1
        yield container, streams[0]


def _read_stamps(container: Any, stream: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """When each frame is shown, in units of the stream; nothing is decoded.

    Returns:
        The times of all frames, and time and decoding time of those from which decoding may start; ascending.
    """
    stamps, keys, end = [], [], 0.0
    for packet in container.demux():
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


def _check_end(container: Any, end: float) -> None:
    """Refuses a file of which the end is missing, where its header says how long it is."""
    start, duration = ((value or 0) / 1e6 for value in (container.start_time, container.duration))
    if container.format.name.startswith('matroska'):  # which may count from 0, wherever its film begins
        start = 0
    if end - start < duration * (1 - CUT_SHARE) - 0.5:
        raise ValueError(f'it ends after {end - start:.1f} of {duration:.1f} s')


def _read_frames(file: File, wanted: Sequence[int], keys: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
    """The frames of the given stamps, by stamp, ``(height, width, 3)`` each."""
    found, size = {}, {}
    with _open_film(file) as (container, stream):
        frames, frame = container.decode(stream), None
        for stamp in wanted:
            past = frame.pts if frame is not None else keys[0][0] if keys else stamp
            index = bisect_right(keys, (stamp, sys.maxsize)) - 1
            if index >= 0 and keys[index][0] > past:  # nothing of what lies between has to be decoded
                for place in keys[index]:  # some containers look for what is shown then, others for what is decoded
                    container.seek(place, stream=stream)
                    frames = container.decode(stream)
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
            picture = frame.reformat(format='rgb24', **size).to_ndarray()
            found[stamp] = _upright(picture, frame.side_data.get('DISPLAYMATRIX'))
    return found


def _upright(picture: np.ndarray, matrix: Any) -> np.ndarray:
    """The picture turned as the camera was, and mirrored where it filmed as a mirror shows."""
    if matrix is None:
        return picture
    # Of 16.16 numbers: a pixel at (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5]
    if abs(b) > abs(a):
        picture, a, d = picture.swapaxes(0, 1), c, b
    return picture[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _video(frames: Sequence[np.ndarray], numbers: list[int], total: int, step: float) -> Video:
    """Frames with what processors ask about them: frame ``n`` is shown after ``n * step`` seconds."""
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


def _read_sound(file: File, sampling_rate: int) -> np.ndarray:
    import av

    with av.open(_source(file)) as container:
        if not container.streams.audio:
            raise ValueError('it holds no sound')
        container.streams.audio[0].codec_context.thread_count = 1  # as above
        resampler = av.AudioResampler(format='fltp', rate=sampling_rate)
        frames = [*container.decode(audio=0), None]  # None: what the resampler still holds
        pieces = [piece.to_ndarray() for frame in frames for piece in resampler.resample(frame)]
        if not pieces:
            raise ValueError('it holds no sound')
        sound = np.concatenate(pieces, axis=1).mean(axis=0)
        if not np.isfinite(sound).all():
            raise ValueError('it holds samples that are no finite numbers')
        _check_end(container, (container.start_time or 0) / 1e6 + len(sound) / sampling_rate)
        return sound


def image_size(file: File) -> tuple[int, int]:
    """Width and height of the image that :func:`open_media` makes of a file, from its header where that says so.

    Raises:
        Exception: Whatever PIL raises on a file that is no image.
    """
    with _open_image(file) as image:
        if image.format not in SIZE_IN_HEADER:
            return ImageOps.exif_transpose(image).size
        if image.format == 'PNG' and _has_metadata_at_end(image.fp):
            image.load()
        # Of the base class: that of PNG decodes the image to look behind it.
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in QUARTER_TURNS
        width, height = image.size
        return (height, width) if turned else (width, height)


def _has_metadata_at_end(file: Any) -> bool:
    """Whether metadata come behind the pixels of a PNG file; its chunks are passed over, not read."""
    start, seen = file.tell(), False
    file.seek(len(b'\x89PNG\r\n\x1a\n'))
    while len(head := file.read(8)) == 8:
        kind = head[4:]
        if seen and kind not in (b'IDAT', b'IEND'):
            break
        seen |= kind == b'IDAT'
        file.seek(int.from_bytes(head[:4], 'big') + 4, os.SEEK_CUR)  # its content and a check sum
    file.seek(start)
    return len(head) == 8


def _to_rgb(image: Image.Image) -> Image.Image:
    """PIL itself clips what is above 255 to white."""
    if image.mode == 'F' or image.mode.startswith('I'):
        values = np.asarray(image)
        if image.mode == 'F' or values.min(initial=0) < 0 or values.max(initial=0) > MAX_16_BIT:
            raise ValueError(f'a picture of mode {image.mode} has no known white; save it with 8 or 16 bits a channel')
        image = Image.fromarray((values // (MAX_16_BIT // 255)).astype(np.uint8))
    return image.convert('RGB')


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Patches that the vision tower computes for one sample; a class token is none.

    What the tower is given but drops before its first block does not count: tiles that only fill up an image's row,
    and what surrounds an image smaller than its batch (Pixtral). Padding that the tower computes does: Mllama's unused
    tiles, and the margins of a tile.

    Args:
        sample: What the processor returns for it.
        patch_size: Side of a patch in pixels. Of no importance where the processor cuts the patches (Qwen-VL).
    """
    # Video-LLaVA's processor names images by themselves.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    videos = sample.get('pixel_values_videos')
    num_patches = 0 if images is None else _patches_of(images, patch_size, sample.get('image_sizes'))
    if videos is not None and videos.dim() == 5:  # of clips all is computed, what is grey too
        videos = videos.flatten(0, 1)
    return num_patches + (0 if videos is None else _patches_of(videos, patch_size, None))


def declared_patch_size(processor: Any) -> int | None:
    """Side of a patch in pixels, as the processor declares it: LLaVA's does, Idefics3's does not."""
    owners = (processor, getattr(processor, 'image_processor', None))
    sides = (side_of_patch(getattr(owner, 'patch_size', None)) for owner in owners)
    return next((side for side in sides if side is not None), None)


def side_of_patch(value: Any) -> int | None:
    """The height in what configs and processors call `patch_size`: a number, a pair, or a mapping."""
    if isinstance(value, Mapping):
        value = value.get('height')
    elif isinstance(value, list | tuple):
        value = value[0] if value else None
    value = getattr(value, 'height', value)  # SizeDict of transformers 5
    return value if isinstance(value, int) and value > 0 else None


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Patches of ``(..., channels, height, width)``, or of ``(..., values)`` where each entry is one already."""
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    if pixels.dim() == 4 and image_sizes is not None:
        return int((torch.as_tensor(image_sizes) // patch_size).prod(dim=1).sum())
    num_tiles = pixels.shape[:-3].numel()
    if pixels.dim() == 5 and not pixels.is_meta:
        # Idefics3 takes out tiles of nothing but zeros; LLaVA-NeXT and OneVision those that their processors add, which
        # are the same. Mllama (6 dimensions) computes all. Where only sizes are asked for (meta), no tile fills up.
        num_tiles = int(pixels.flatten(2).any(dim=2).sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)
