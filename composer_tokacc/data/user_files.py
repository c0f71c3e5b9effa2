# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The door for files that a user names: there, regular, readable, and inside the folder that they must lie in."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from composer_tokacc.data.records import EmbeddedFile, Medium, Record


def regular_file(path: Path) -> Path:
    """Returns the path of a file: a pipe or a device would be waited for, or never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError('it is no regular file')
    return path


def open_files(record: Record, folder: Path) -> list[Path | BinaryIO]:
    """Returns the files of all media of a record, in their order: paths, and embedded ones as open files."""
    opened: list[Path | BinaryIO] = []
    for modality, file in ((medium.modality, file) for medium in record.media for file in medium.files):
        try:
            opened.append(BytesIO(file.read()) if isinstance(file, EmbeddedFile) else regular_file(folder / file))
        except (ValueError, OSError) as error:
            raise record.error(f'{modality} file {folder / str(file)} cannot be read: {error}') from error
    return opened


class MediaFolders:
    """Looks up files of media in their folders, by one listing of a folder instead of one question a file.

    Args:
        allow_outside: Whether names may lead out of the folder: ``../``, absolute ones, links.
    """

    def __init__(self, *, allow_outside: bool = False) -> None:
        self._allows_outside = allow_outside
        self._listings: dict[Path, _Listing] = {}

    def check(self, record: Record, folder: Path) -> None:
        """Checks that all files of a record are there, and inside its folder."""
        for medium in record.media:
            for file in (folder / file for file in medium.files if isinstance(file, str)):
                self._check_file(record, medium, file, folder)

    def _check_file(self, record: Record, medium: Medium, file: Path, folder: Path) -> None:
        try:
            found, root = self._listing(file.parent), self._listing(folder).place
        except OSError as error:
            raise record.error(f'{medium.modality} file {file} cannot be read: {error}') from error
        if file.name not in found.is_link:
            raise record.error(f'{medium.modality} file {file} does not exist; is `image_dir` right?')
        if found.is_link[file.name] and not os.path.exists(file):
            raise record.error(f'{medium.modality} file {file} cannot be read: it is a link to nothing')
        place = Path(os.path.realpath(file)).parent if found.is_link[file.name] else found.place
        if not self._allows_outside and not place.is_relative_to(root):
            remedy = 'Set another `image_dir`, or `allow_outside=true` for files that you know'
            raise record.error(f'{medium.modality} file {file} must lie under {folder}, got: {place}. {remedy}')

    def _listing(self, folder: Path) -> _Listing:
        if folder not in self._listings:
            entries = os.scandir(folder) if os.path.isdir(folder) else ()  # False too where no name may be so long
            is_link = {entry.name: entry.is_symlink() for entry in entries}
            self._listings[folder] = _Listing(Path(os.path.realpath(folder)), is_link)
        return self._listings[folder]


class _Listing(NamedTuple):
    """Where a folder really is, and what it holds, by name; nothing where there is no such folder."""

    place: Path
    is_link: Mapping[str, bool]
