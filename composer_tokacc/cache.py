# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files that one run writes and later runs read: their names, their folder, writing and reading."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

CachedValue = TypeVar('CachedValue')


def fingerprint(value: object, *, length: int = 32) -> str:
    """Returns a hash of a value as ``length`` hex digits, the same in every process.

    The value is hashed as JSON, with ``str()`` in the place of an object that JSON does not know. This text must not
    contain an address, which differs between processes.
    """
    text = json.dumps(value, sort_keys=True, default=str)
    return fingerprint_of_bytes([text.encode()], length=length)


def fingerprint_of_bytes(pieces: Iterable[bytes], *, length: int = 32) -> str:
    """Returns a hash of the joined pieces, such as the parts of a file, as ``length`` hex digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:length]


def cache_folder(name: str) -> Path:
    """Returns the path of one of this package's folders in the user's cache folder. It may not exist."""
    home = os.path.expanduser('~')
    if home == '~':  # the user has no home folder, as in some containers
        home = tempfile.gettempdir()
    user_cache = os.environ.get('XDG_CACHE_HOME') or f'{home}/.cache'
    return Path(user_cache) / 'composer_tokacc' / name


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file to write. At the end the file is moved to ``path``.

    So other processes never read half a file. After an error, ``path`` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a file can be replaced in one operation only within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        os.replace(unfinished, path)


def load_kept(path: Path, load: Callable[[Path], CachedValue]) -> CachedValue | None:
    """Returns the value in a file of the cache. None if there is no file, or, with a warning, if it cannot be read.

    Args:
        path: The file.
        load: Reads the file.
    """
    try:
        return load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # numpy, zlib, json and constructors raise errors of many kinds
        log.warning('%s is damaged or cannot be read (%s); it is made again.', path, error)
        return None


def keep(path: Path, save: Callable[[Path], None], *, hint: str = '') -> None:
    """Saves a file for the next run. If it cannot be written, logs a warning.

    Args:
        path: The file.
        save: Writes the value to the file.
        hint: The remedy for the user, at the end of the warning.
    """
    try:
        save(path)
    except OSError as error:
        log.warning('%s cannot be kept (%s); the next run makes it again. %s', path, error.strerror, hint)
