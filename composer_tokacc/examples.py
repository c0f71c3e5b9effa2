# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Copies the YAML files and examples that come with the package into a folder, where they may be changed.

    python -m composer_tokacc.examples [FOLDER]

Writes `yamls/`, `examples/` and `overrides.txt` (default: into the current folder). If a file exists with another
content, it stays as it is, and the program names it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ['copy_examples', 'main']

FOLDER_IN_ENVIRONMENT = Path('share') / 'composer_tokacc'
"""The folder, below the prefix of the environment, into which setup.cfg installs the files."""
KNOWN_FILE = Path('yamls') / 'llava_json.yaml'
"""One of the files. The folder that has it has all of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns status 1 if a file exists with another content, 2 if files cannot be copied."""
    parser = argparse.ArgumentParser(
        'python -m composer_tokacc.examples',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('folder', nargs='?', default='.', type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        written, different = copy_examples(folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(f'{len(written)} files written to {folder.resolve()}: yamls/, examples/, overrides.txt')
    for path in different:
        print(f'not overwritten, because its content differs: {path}', file=sys.stderr)
    return 1 if different else 0


def copy_examples(folder: Path) -> tuple[list[Path], list[Path]]:
    """Copies the files that come with the package.

    Returns:
        Paths that were written, and paths that were left because they have another content; both below ``folder``.

    Raises:
        FileNotFoundError: The package was installed without them.
    """
    source_folder = _source_folder()
    if source_folder is None:
        raise FileNotFoundError('composer_tokacc was installed without its examples. Install it from a wheel.')
    written = []
    different = []
    for source in _files_to_copy(source_folder):
        path = folder / source.relative_to(source_folder)
        content = source.read_bytes()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
        # A folder or a pipe is not read. To read a pipe would wait for somebody to write to it.
        elif not path.is_file() or path.read_bytes() != content:
            different.append(path)
    return written, different


def _source_folder() -> Path | None:
    """Returns the folder that has the files to copy. None if the package was installed without them.

    In a checkout the files lie next to the package. A wheel installs them into ``share``, below the prefix of the
    environment, which is some folder above the package.
    """
    module = Path(__file__)
    # An installer may have made this file a link into a cache without examples. So the folders above the link come
    # before those above its target.
    for parent in (*module.absolute().parents, *module.resolve().parents):
        for folder in (parent, parent / FOLDER_IN_ENVIRONMENT):
            if (folder / KNOWN_FILE).exists():
                return folder
    return None


def _files_to_copy(folder: Path) -> list[Path]:
    """Returns the files to copy from the source folder, in the order of their paths. Leaves out compiled code."""
    paths = [folder / 'overrides.txt', *folder.glob('yamls/*.yaml'), *folder.glob('examples/**/*.*')]
    return sorted(path for path in paths if path.is_file() and path.suffix != '.pyc')


if __name__ == '__main__':
    sys.exit(main())
