# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The commands of docs/streaming.md run as they are written."""

from __future__ import annotations

import pytest

pytest.importorskip('streaming')

from tests.docs.snippets import blocks_of, check_lines, run_page
from tests.support.launch import ROOT
from tests.support.llava_folder import write_llava_folder

PAGE = 'docs/streaming.md'


# Not marked as slow, though two ranks train: CI runs every page.
def test_page_runs(tmp_path, monkeypatch):
    assert {block.language for block in blocks_of(PAGE) if block.runs} == {'bash', 'yaml'}
    write_llava_folder(tmp_path / 'page', 20)
    (tmp_path / 'page' / 'yamls').symlink_to(ROOT / 'yamls')
    monkeypatch.chdir(tmp_path / 'page')
    run_page(PAGE, tmp_path / 'page')
    assert (tmp_path / 'page' / 'runs' / 'llava_streaming' / 'result.json').exists()


def test_commands_within_lines_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_lines(PAGE)
