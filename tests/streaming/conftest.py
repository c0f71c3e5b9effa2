# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import tempfile

import pytest

from tests.support.launch import close_ranks


@pytest.fixture(autouse=True)
def _no_shared_memory_left(tmp_path, monkeypatch):
    """What killed runs and earlier tests left would count as datasets that are in use.

    mosaicml-streaming numbers its shared memory past lock files that it never removes from the temporary folder, and
    its cleaning stops at the first number without memory: so every test has a temporary folder of its own.
    """
    util = pytest.importorskip('streaming.base.util')
    (tmp_path / 'locks').mkdir()
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'locks'))
    monkeypatch.setattr(tempfile, 'tempdir', None)
    util.clean_stale_shared_memory()
    yield
    close_ranks()  # of a temporary folder that goes
    util.clean_stale_shared_memory()
