# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Copies the YAML files and examples that come with the package into a folder, where they may be changed.

    python -m composer_tokacc.examples [FOLDER]

Writes `yamls/`, `examples/` and `overrides.txt` (default: into the current folder). A file that is there with another
content stays as it is, and is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

__all__ = ['copy_examples', 'main']

_INSTALLED = ('share', 'composer_tokacc')
"""Where setup.cfg has them installed, below the prefix of the environment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; status 1 if a file of another content was in the way, 2 if nothing can be copied."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('python -m composer_tokacc.examples', description=__doc__, formatter_class=form)
    parser.add_argument('folder', nargs='?', default='.', type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        written, kept = copy_examples(folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(f'{len(written)} files written to {folder.resolve()}: yamls/, examples/, overrides.txt')
    for path in kept:
        print(f'left as it is, with another content: {path}', file=sys.stderr)
    return 1 if kept else 0


def copy_examples(folder: Path) -> tuple[list[Path], list[Path]]:
    """Copies what comes with the package.

    Returns:
        Paths that were written, and paths that were left because they hold something else; both below ``folder``.

    Raises:
        FileNotFoundError: The package was installed without them.
    """
    sources = _sources()
    if not sources:
        raise FileNotFoundError('examples must come with the package, got: none. Install composer_tokacc from a wheel')
    written, kept = [], []
    for name, source in sorted(sources.items()):
        path, content = folder / name, source.read_bytes()
        if path.exists():
            if path.read_bytes() != content:
                kept.append(path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written.append(path)
    return written, kept


def _sources() -> dict[Path, Path]:
    """Every file by its path relative to the folder that it is copied to: those of a checkout, else the wheel's."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / 'yamls' / 'llava_json.yaml').exists():
        found = [checkout / 'overrides.txt', *checkout.glob('yamls/*.yaml'), *checkout.glob('examples/**/*.*')]
        return {path.relative_to(checkout): path for path in found if path.suffix != '.pyc'}
    try:
        installed = files('composer_tokacc') or []
    except PackageNotFoundError:
        return {}
    sources = {}
    for path in installed:
        if _INSTALLED[0] in path.parts and _INSTALLED[1] in path.parts and path.suffix != '.pyc':
            name = Path(*path.parts[path.parts.index(_INSTALLED[1]) + 1 :])
            sources[name] = Path(str(path.locate()))
    return sources


if __name__ == '__main__':
    sys.exit(main())
