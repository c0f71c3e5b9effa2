# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The door to files that a user names: there, regular, inside the folder that they must lie in, opened and decoded."""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from composer_tokacc.data.images import image_size, read_image
from composer_tokacc.data.records import EmbeddedFile, MediaFile, Medium, Record
from composer_tokacc.data.videos import VideoSampling, read_audio, read_frames, read_video


def regular_file(path: Path) -> Path:
    """Returns the path of a file: a pipe or a device would be waited for, or never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError('it is no regular file')
    return path


class MediaFolders:
    """Looks up files of media in their folders, by one listing of a folder instead of one question a file.

    Args:
        allow_outside: Whether names may lead out of the folder: ``../``, absolute ones, links.
    """

    def __init__(self, *, allow_outside: bool = False) -> None:
        self._allows_outside = allow_outside
        self._listing = cache(_listing)

    def check(self, record: Record, folder: Path) -> None:
        """Checks that all files of a record are there, and inside its folder."""
        for modality, name in record.files:
            if isinstance(name, str) and (wrong := self._what_is_wrong(folder / name, folder)):
                raise record.error(f'{modality} file {folder / name} {wrong}')

    def _what_is_wrong(self, file: Path, folder: Path) -> str:
        try:
            (place, is_link), (root, _) = self._listing(file.parent), self._listing(folder)
        except OSError as error:
            return f'cannot be read: {error}'
        if file.name not in is_link:
            return 'does not exist; is `image_dir` right?'
        if is_link[file.name]:
            if not os.path.exists(file):
                return 'cannot be read: it is a link to nothing'
            place = Path(os.path.realpath(file)).parent
        if self._allows_outside or place.is_relative_to(root):
            return ''
        remedy = 'Set another `image_dir`, or `allow_outside=true` for files that you know'
        return f'must lie under {folder}, got: {place}. {remedy}'


def _listing(folder: Path) -> tuple[Path, dict[str, bool]]:
    """Returns where a folder really is, and which of its names are links; none where there is no such folder."""
    entries = os.scandir(folder) if os.path.isdir(folder) else ()  # False too where no name may be so long
    return Path(os.path.realpath(folder)), {entry.name: entry.is_symlink() for entry in entries}


def open_files(record: Record, folder: Path) -> list[Path | BinaryIO]:
    """Returns the files of all media of a record, in their order: paths, and embedded ones as open files."""
    opened: list[Path | BinaryIO] = []
    for modality, file in record.files:
        try:
            opened.append(BytesIO(file.read()) if isinstance(file, EmbeddedFile) else regular_file(folder / file))
        except (ValueError, OSError) as error:
            raise record.error(f'{modality} file {folder / str(file)} cannot be read: {error}') from error
    return opened


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
            names = ', '.join(str(file if isinstance(file, os.PathLike) else name) for file, name in named)
            raise record.error(f'{medium.modality} file {names} cannot be read: {error}') from error
        found.setdefault(medium.modality, []).append(content)
    return found


def _decode(medium: Medium, files: Sequence[Any], video: VideoSampling, sampling_rate: int, shapes_only: bool) -> Any:
    if medium.modality == 'audio':
        return read_audio(files[0], sampling_rate)
    if medium.modality == 'image':
        return Image.new('RGB', image_size(files[0])) if shapes_only else read_image(files[0])
    return read_frames(files, video) if len(files) > 1 else read_video(files[0], video, shapes_only=shapes_only)
