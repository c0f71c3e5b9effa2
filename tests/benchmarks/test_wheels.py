# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import zipfile

import pytest

from benchmarks.gpu import wheels

# What each made-up package needs, as wheels say it.
PACKAGES = {
    'trainer': ['client[sockets]>=1', 'torch<2.7.1', 'old-typing ; python_version < "3.11"', 'more ; extra == "nlp"'],
    'client': ['Web_Sockets ; extra == "sockets"', 'pyyaml', 'winreg ; sys_platform == "win32"'],
    'web-sockets': ['client'],
    'old-typing': [],
    'pyyaml': [],
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """The index, on disk; what was downloaded of it, in order."""
    found = []

    def download(requirement, folder, python, machine):
        name = wheels.canonicalize_name(wheels.Requirement(requirement).name)
        found.append(requirement)
        wheel = folder / f'{name.replace("-", "_")}-1-py3-none-any.whl'
        with zipfile.ZipFile(wheel, 'w') as archive:
            lines = [f'Requires-Dist: {line}' for line in PACKAGES[name]]
            archive.writestr(f'{name}-1.dist-info/METADATA', '\n'.join(['Name: x', *lines, '']))
        return wheel

    monkeypatch.setattr(wheels, 'download', download)
    monkeypatch.setattr(wheels, 'WANTED', ('trainer==1',))
    return found


def test_all_that_is_needed_there_once_and_nothing_that_is_present(asked, tmp_path):
    present = tmp_path / 'present.txt'
    present.write_text('PyYAML==6.0\nnumpy==2.4\n')
    wheels.collect(tmp_path, '3.12', 'x86_64', wheels.read_present(present))
    assert asked == ['trainer==1', 'client>=1', 'Web_Sockets']


def test_markers_are_those_of_the_other_python(asked, tmp_path):
    wheels.collect(tmp_path, '3.10', 'x86_64', wheels.read_present(None))
    assert asked == ['trainer==1', 'client>=1', 'old-typing', 'Web_Sockets', 'pyyaml']
