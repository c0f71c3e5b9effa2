# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Collects the wheels that a GPU machine without network lacks for `benchmarks.gpu` and `pytest -m gpu`.

    pip list --format=freeze > present.txt        # on that machine
    python -m benchmarks.gpu.wheels wheels --python 3.12 --platform x86_64 --present present.txt     # here

    # on that machine, with the repository and the folder copied there:
    pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site:. python -m benchmarks.gpu

Composer is taken without its pins: they forbid the torch that a new GPU needs. What is at hand there stays as it is, so
name it: torch, numpy and transformers always count as present. Everything that must come along is plain Python or has a
manylinux wheel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Versions that the package is tested with; newer ones of the rest do.
WANTED = (
    'mosaicml==0.32.1', 'omegaconf>=2.3,<3', 'numba', 'scipy', 'matplotlib', 'rich', 'tqdm', 'pytest', 'pytest-timeout',
    'hypothesis', 'pillow', 'scikit-learn',
)  # fmt: skip
# A machine for this has them, and each is larger than all the rest together.
ALWAYS_PRESENT = ('torch', 'torchvision', 'numpy', 'transformers')
GLIBC = ('2_34', '2_31', '2_28', '2_27', '2_24', '2_17', '2014', '2_12', '2010', '2_5', '1')


def download(requirement: str, folder: Path, python: str, machine: str) -> Path:
    """The one wheel that answers a requirement there, without what it needs itself."""
    platforms = [f'--platform=manylinux{"" if version in ("2014", "2010", "1") else "_"}{version}_{machine}'
                 for version in GLIBC]  # fmt: skip
    command = [
        sys.executable, '-m', 'pip', 'download', '--quiet', '--disable-pip-version-check', '--no-deps',
        '--only-binary=:all:', f'--python-version={python}', '--implementation=cp', *platforms, '--platform=any',
        f'--dest={folder}', requirement,
    ]  # fmt: skip
    name = canonicalize_name(Requirement(requirement).name)
    subprocess.run(command, check=True)
    return next(wheel for wheel in sorted(folder.glob('*.whl')) if canonicalize_name(_name(wheel)) == name)


def needs(wheel: Path, python: str, extras: set[str]) -> list[Requirement]:
    """What a wheel requires on that Python with these extras."""
    with zipfile.ZipFile(wheel) as archive:
        inside = next(name for name in archive.namelist() if re.fullmatch(r'[^/]+\.dist-info/METADATA', name))
        metadata = Parser().parsestr(archive.read(inside).decode())
    there = {'python_version': python, 'python_full_version': f'{python}.0', 'sys_platform': 'linux'}
    found = [Requirement(line) for line in metadata.get_all('Requires-Dist') or []]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({**there, 'extra': extra}) for extra in ('', *extras))
    ]


def collect(folder: Path, python: str, machine: str, present: set[str]) -> list[Path]:
    """Downloads what is wanted and, step by step, what that needs; one version of each, the first asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    pending, done, wheels = [Requirement(one) for one in WANTED], set(present), []
    while pending:
        requirement = pending.pop(0)
        name = canonicalize_name(requirement.name)
        if name in done:
            continue
        done.add(name)
        wheels.append(download(f'{requirement.name}{requirement.specifier}', folder, python, machine))
        pending += needs(wheels[-1], python, requirement.extras)
    return wheels


def read_present(file: Path | None) -> set[str]:
    """Names in a list as `pip list --format=freeze` prints it, or simply one a line."""
    lines = file.read_text().split() if file is not None else []
    return {canonicalize_name(re.split(r'[=<>!~@\[]', line)[0]) for line in (*lines, *ALWAYS_PRESENT)}


def _name(wheel: Path) -> str:
    return wheel.name.split('-')[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--python', default='3.12', help='version there')
    parser.add_argument('--platform', default='x86_64', help='what `uname -m` prints there')
    parser.add_argument('--present', type=Path, help='what is installed there')
    given = parser.parse_args()
    wheels = collect(given.folder, given.python, given.platform, read_present(given.present))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f'{len(wheels)} wheels, {size / 2**20:.1f} MiB in {given.folder}: {", ".join(map(_name, wheels))}')


if __name__ == '__main__':
    main()
