# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Files that one run keeps for the next: what names them, where they lie, and how they are written and read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Kept = TypeVar('Kept')


def fingerprint(value: Any, *, length: int = 32) -> str:
    """Returns hex digits that change with a value: with an iterator's bytes as they are, all else as sorted JSON."""
    digest = hashlib.sha256()
    for piece in value if isinstance(value, Iterator) else [json.dumps(value, sort_keys=True, default=str).encode()]:
        digest.update(piece)
    return digest.hexdigest()[:length]


def cache_folder(name: str) -> Path:
    """Returns one of this package's folders in the user's cache folder, there or not."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'composer_tokacc' / name


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to that replaces ``path`` at the end: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        yield (written := Path(unfinished) / path.name)
        os.replace(written, path)


def load_kept(path: Path, load: Callable[[Path], Kept]) -> Kept | None:
    """Returns what a file holds; None where there is none, or, with a warning, where it is damaged."""
    try:
        return load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever numpy, zlib, json and constructors raise
        log.warning('%s is damaged (%s); it is made again.', path, error)
        return None


def keep(path: Path, save: Callable[[Path], None], *, hint: str = '') -> None:
    """Saves what the next run may read; a folder that cannot be written costs a warning with a hint."""
    try:
        save(path)
    except OSError as error:
        log.warning('%s cannot be kept (%s); the next run makes it again. %s', path, error.strerror, hint)
