# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The door through which every image, video and audio of a record is decoded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from os import PathLike
from typing import Any

from PIL import Image

from composer_tokacc.data.audio import read_audio
from composer_tokacc.data.images import image_size, read_image
from composer_tokacc.data.records import MediaFile, Medium, Record
from composer_tokacc.data.videos import VideoSampling, read_frames, read_video


def check_decoder(record: Record) -> None:
    """Refuses media that need a decoder that is not there; no fault of the sample, which must not be skipped for it."""
    needs_decoder = any(medium.modality != 'image' and len(medium.files) == 1 for medium in record.media)
    if needs_decoder and importlib.util.find_spec('av') is None:
        raise ValueError(
            "videos and audio must have PyAV to read them, got: none. pip install 'composer_tokacc[media]'"
        )


def decode_media(
    record: Record,
    files: Sequence[MediaFile],
    *,
    video: VideoSampling | None = None,
    sampling_rate: int = 16000,
    shapes_only: bool = False,
) -> dict[str, list[Any]]:
    """Decodes the files of a record.

    Args:
        record: Whose media they are.
        files: One path or open file for each file of ``record.media``.
        video: Which frames of its videos.
        sampling_rate: Of its audio, in samples a second; others are resampled.
        shapes_only: Decode no more than sizes and times need: images are black, all frames of a video are its first.

    Returns:
        By modality: ``'image'``, in RGB, turned as a camera's EXIF entry says, 16 bits a channel scaled to 8;
        ``'video'``, turned likewise; ``'audio'``, float32 ``(samples,)``, the mean of its channels.
    """
    check_decoder(record)
    found: dict[str, list[Any]] = {}
    rest = iter(files)
    for medium in record.media:
        opened = [next(rest) for _ in medium.files]
        try:
            content = _decode(medium, opened, video or VideoSampling(), sampling_rate, shapes_only)
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            named = zip(opened, medium.names, strict=True)
            names = ', '.join(str(file if isinstance(file, PathLike) else name) for file, name in named)
            raise record.error(f'{medium.modality} file {names} cannot be read: {error}') from error
        found.setdefault(medium.modality, []).append(content)
    return found


def _decode(medium: Medium, files: Sequence[Any], video: VideoSampling, sampling_rate: int, shapes_only: bool) -> Any:
    if medium.modality == 'audio':
        return read_audio(files[0], sampling_rate)
    if medium.modality == 'image':
        return Image.new('RGB', image_size(files[0])) if shapes_only else read_image(files[0])
    return read_frames(files, video) if len(files) > 1 else read_video(files[0], video, shapes_only=shapes_only)
