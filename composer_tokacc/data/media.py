# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds, opens and decodes the files that a record names.

A file must be there, be a regular file, and lie inside the folder of the media.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import stat
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from composer_tokacc.data.images import image_size, read_image
from composer_tokacc.data.records import (
    DecodedMedia,
    EmbeddedFile,
    MediaFile,
    Medium,
    Record,
)
from composer_tokacc.data.videos import (
    VideoSampling,
    read_audio,
    read_frames,
    read_video,
)


def regular_file(path: Path) -> Path:
    """Returns the path of a regular file. Raises ValueError for a pipe or a device, which could block for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError('it is no regular file')
    return path


class Listing(NamedTuple):
    """The names in a folder."""

    real_path: Path
    """The folder, with links resolved."""
    is_link: dict[str, bool]
    """Whether each name is a link. Empty if there is no such folder."""


class MediaFolders:
    """Checks that files of media are there. Lists each folder once, instead of asking for every file.

    Args:
        allow_outside: Whether names may lead out of the folder: ``../``, absolute ones, links.
    """

    def __init__(self, *, allow_outside: bool = False) -> None:
        self._allows_outside = allow_outside
        self._list_folder = cache(_list_folder)

    def check(self, record: Record, folder: Path) -> None:
        """Checks that all files of a record are there, and inside its folder."""
        for modality, file in record.files:
            if isinstance(file, EmbeddedFile):
                continue
            problem = self._problem_of(folder / file, folder)
            if problem:
                raise record.error(f'{modality} file {folder / file} {problem}')

    def _problem_of(self, file: Path, folder: Path) -> str:
        """Returns what is wrong with a file. '' if nothing is wrong."""
        try:
            listing = self._list_folder(file.parent)
            root = self._list_folder(folder).real_path
        except OSError as error:
            return f'cannot be read: {error}'
        if file.name not in listing.is_link:
            similar_name = _similar_name(file.name, listing.is_link)
            if similar_name is not None:
                return f'does not exist, but {similar_name!a} does; rename one of them'
            return 'does not exist; is `image_dir` right?'
        # The listing is enough for a file that is not a link. Only a link needs a call to the file system.
        place = listing.real_path
        if listing.is_link[file.name]:
            if not os.path.exists(file):
                return 'cannot be read: it is a link to nothing'
            place = Path(os.path.realpath(file)).parent
        if self._allows_outside or place.is_relative_to(root):
            return ''
        remedy = 'Set another `image_dir`, or `allow_outside=true` for files that you know'
        return f'must lie under {folder}, got: {place}. {remedy}'


def _similar_name(name: str, names: Iterable[str]) -> str | None:
    """Returns a name that differs only in case or Unicode form: macOS writes ü as two characters."""

    def normalized(text: str) -> str:
        return unicodedata.normalize('NFC', text).casefold()

    looked_for = normalized(name)
    for candidate in names:
        if normalized(candidate) == looked_for:
            return candidate
    return None


def _list_folder(folder: Path) -> Listing:
    is_link = {}
    if os.path.isdir(folder):  # also False if the name is too long for the file system
        with os.scandir(folder) as entries:
            for entry in entries:
                is_link[entry.name] = entry.is_symlink()
    return Listing(Path(os.path.realpath(folder)), is_link)


def open_files(record: Record, folder: Path) -> list[Path | BinaryIO]:
    """Returns the files of all media of a record, in order. Embedded files are opened, others are paths."""
    opened: list[Path | BinaryIO] = []
    for modality, file in record.files:
        try:
            if isinstance(file, EmbeddedFile):
                opened.append(BytesIO(file.read()))
            else:
                opened.append(regular_file(folder / file))
        except (ValueError, OSError) as error:
            name = file.name if isinstance(file, EmbeddedFile) else folder / file
            raise record.error(f'{modality} file {name} cannot be read: {error}') from error
    return opened


def check_decoder(record: Record) -> None:
    """Raises ValueError if the record needs PyAV and it cannot be imported.

    This is not a fault of the sample, so ``on_error=skip`` must not skip the sample. A video that is a list of images
    needs no PyAV.
    """
    needs_decoder = any(medium.modality != 'image' and len(medium.files) == 1 for medium in record.media)
    if not needs_decoder:
        return
    remedy = "pip install 'composer_tokacc[media]'"
    if importlib.util.find_spec('av') is None:
        raise ValueError(f'videos and audio must have PyAV to read them, got: none. {remedy}')
    try:
        importlib.import_module('av.container')
        _ = importlib.import_module('av.stream').Disposition  # old releases do not have it
    except Exception as error:  # a shared library that is missing, or of another version
        reason = f'{type(error).__name__}: {error}'
        raise ValueError(f'videos and audio need PyAV, which cannot be imported ({reason}). {remedy}') from error


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
        video: The frames to take of its videos.
        sampling_rate: Samples a second of its audio. Other rates are resampled.
        shapes_only: Decode only sizes and times: images are black, and all frames of a video are its first.

    Returns:
        Media by modality. ``'image'``: in RGB, turned as a camera's EXIF entry says, 16 bits a channel scaled to 8.
        ``'video'``: :class:`.Video`, turned in the same way. ``'audio'``: float32 ``(samples,)``, the mean of the
        channels.
    """
    check_decoder(record)
    decoded: DecodedMedia = {}
    next_file = iter(files)
    for medium in record.media:
        files_of_medium = [next(next_file) for _ in medium.files]
        try:
            content = _decode(
                medium,
                files_of_medium,
                video or VideoSampling(),
                sampling_rate,
                shapes_only,
            )
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, ... on broken files
            names = []
            for file, name in zip(files_of_medium, medium.names, strict=True):
                names.append(str(file) if isinstance(file, os.PathLike) else name)
            raise record.error(f'{medium.modality} file {", ".join(names)} cannot be read: {error}') from error
        decoded.setdefault(medium.modality, []).append(content)
    return decoded


def _decode(
    medium: Medium,
    files: Sequence[MediaFile],
    video: VideoSampling,
    sampling_rate: int,
    shapes_only: bool,
) -> Any:
    if medium.modality == 'audio':
        return read_audio(files[0], sampling_rate)
    if medium.modality == 'video':
        if len(files) > 1:
            return read_frames(files, video)
        return read_video(files[0], video, shapes_only=shapes_only)
    if shapes_only:
        return Image.new('RGB', image_size(files[0]))
    return read_image(files[0])
