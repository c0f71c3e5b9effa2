# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds, opens and decodes the files of a record's media.

`check_files` raises if files do not exist, or lie outside of the folder of the media without `allow_outside`.
`open_files` raises if they are no regular files.
"""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from composer_tokacc.data.audio import read_audio
from composer_tokacc.data.images import image_size, read_image
from composer_tokacc.data.records import (
    DecodedMedia,
    EmbeddedFile,
    MediaFile,
    Record,
    is_from_file,
)
from composer_tokacc.data.videos import (
    VideoSampling,
    read_frames,
    read_video,
)
from composer_tokacc.refusals import InvalidInputError


def regular_file(path: Path) -> Path:
    """Returns the path. Raises ValueError for a folder, and for a pipe or device, where reading may block for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InvalidInputError('it is no regular file')
    return path


def check_files(record: Record, *, allow_outside: bool) -> None:
    """Raises BadSampleError if a file does not exist, or without `allow_outside` lies outside of the record's folder.

    Args:
        record: The record.
        allow_outside: Whether file names may lead out of the folder, by ``../``, as absolute paths or through links.
    """
    for modality, file in record.files:
        if isinstance(file, EmbeddedFile):
            continue
        path = record.folder / file
        try:
            real_path = os.path.realpath(path, strict=True)
        except (ValueError, OSError) as error:  # ValueError: the name has a null character
            if not is_from_file(error):
                raise
            reason = getattr(error, 'strerror', None) or error
            raise record.error(f'{modality} file {path} cannot be found: {reason}. Is `image_dir` right?') from error
        is_inside = Path(real_path).is_relative_to(record.folder.resolve())
        if not is_inside and not allow_outside:
            raise record.error(
                f'{modality} file {path} must lie under {record.folder}, got: {real_path}. Set '
                'another `image_dir`, or `allow_outside=true` for files that you know'
            )


def open_files(record: Record) -> list[Path | BinaryIO]:
    """Returns the files of a record, in order: the path of a regular file, or the open content of an embedded one.

    Raises BadSampleError if a path leads to no regular file, or embedded content cannot be read. Errors that do not
    come from the file are raised as they are, see :func:`.is_from_file`.
    """
    files: list[Path | BinaryIO] = []
    for modality, file in record.files:
        try:
            if isinstance(file, EmbeddedFile):
                files.append(BytesIO(file.read()))
            else:
                files.append(regular_file(record.folder / file))
        except (ValueError, OSError) as error:
            if not is_from_file(error):
                raise
            name = file.name if isinstance(file, EmbeddedFile) else record.folder / file
            raise record.error(f'{modality} file {name} cannot be read: {error}') from error
    return files


def check_pyav(record: Record) -> None:
    """Raises ValueError if the record needs PyAV and it cannot be imported.

    It is not a :class:`.BadSampleError`, because the sample is good, and ``on_error=skip`` must not skip it.
    """
    # A video of several files is a list of images, which do not need PyAV.
    needs_pyav = any(medium.modality != 'image' and len(medium.files) == 1 for medium in record.media)
    if not needs_pyav:
        return
    try:
        importlib.import_module('av')
    except Exception as error:  # it is not installed, or a shared library is missing
        remedy = "pip install 'composer_tokacc[media]'"
        raise InvalidInputError(
            f'videos and audio need PyAV, which cannot be imported ({type(error).__name__}: {error}). {remedy}'
        ) from error


def decode_media(
    record: Record,
    files: Sequence[MediaFile],
    *,
    video: VideoSampling | None = None,
    sampling_rate: int = 16000,
    shapes_only: bool = False,
) -> DecodedMedia:
    """Decodes the files of a record.

    Args:
        record: The record of the media.
        files: One path or open file for each file of ``record.media``.
        video: How frames of videos are chosen. None: ``VideoSampling()``.
        sampling_rate: Samples a second of the audio that is returned. Audio of another rate is resampled.
        shapes_only: Decode less, because only shapes and times must be right. Images are black, and all frames of a
            video file are its first chosen one. Audio, and videos of several files, are decoded as usual.

    Returns:
        A list of media for each modality, in the order of the record. ``'image'``: in RGB, turned as a camera's EXIF
        entry says, 16 bits a channel scaled to 8. ``'video'``: :class:`.Video`, turned in the same way. ``'audio'``:
        float32 ``(samples,)``, the mean of the channels.

    Raises:
        BadSampleError: If a file cannot be decoded.
        Exception: Any error that does not come from the file, such as a missing PyAV, see :func:`.is_from_file`.
    """
    check_pyav(record)
    sampling = video or VideoSampling()
    decoded: dict[str, list[Any]] = {}
    remaining_files = iter(files)
    for medium in record.media:
        # Outside of the `try`, because missing files are a fault of the caller. The sample is good.
        files_of_medium = [next(remaining_files) for _ in medium.files]
        try:
            content = _decode_medium(medium.modality, files_of_medium, sampling, sampling_rate, shapes_only)
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            if not is_from_file(error):
                raise
            file_names = ', '.join(medium.names)
            raise record.error(f'{medium.modality} file {file_names} cannot be read: {error}') from error
        decoded.setdefault(medium.modality, []).append(content)
    return decoded


def _decode_medium(
    modality: str,
    files: Sequence[MediaFile],
    sampling: VideoSampling,
    sampling_rate: int,
    shapes_only: bool,
) -> Any:
    """Decodes the files of one image, video or audio. See :func:`decode_media`."""
    if len(files) > 1:  # the frames of a video as images. No other medium has several files
        return read_frames(files, sampling)
    (file,) = files
    if modality == 'video':
        return read_video(file, sampling, shapes_only=shapes_only)
    if modality == 'audio':
        return read_audio(file, sampling_rate)
    if shapes_only:
        return Image.new('RGB', image_size(file))
    return read_image(file)
