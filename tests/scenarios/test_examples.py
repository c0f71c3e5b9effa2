# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Copies of the YAML files and examples; that a wheel holds them is tried by ``make dist``."""

from __future__ import annotations

import os

from composer_tokacc.examples import main
from tests.support.launch import ROOT


def files_in(root, folder):
    """Returns the paths of the files in a folder of the root."""
    return {path.relative_to(root) for path in (root / folder).rglob('*.*')}


def test_everything_is_copied_once(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    for folder in ('yamls', 'examples'):
        # Compiled code must not be copied.
        expected = {path for path in files_in(ROOT, folder) if path.suffix != '.pyc'}
        assert files_in(tmp_path, folder) == expected

    assert main([str(tmp_path)]) == 0
    assert '0 files written' in capsys.readouterr().out


def test_changed_file_is_left(tmp_path, capsys):
    changed = tmp_path / 'yamls' / 'digits.yaml'
    changed.parent.mkdir()
    changed.write_text('mine')
    assert main([str(tmp_path)]) == 1
    assert changed.read_text() == 'mine'
    assert str(changed) in capsys.readouterr().err
    assert (tmp_path / 'yamls' / 'llava_json.yaml').exists()


def test_pipe_in_the_way_is_left(tmp_path, capsys):
    os.mkfifo(tmp_path / 'overrides.txt')
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path / 'overrides.txt') in capsys.readouterr().err
