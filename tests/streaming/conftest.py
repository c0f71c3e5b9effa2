# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import tempfile

import pytest

from tests.support.launch import close_ranks


@pytest.fixture(autouse=True)
def _no_shared_memory_left(tmp_path, monkeypatch):
    """Removes the shared memory of killed runs and earlier tests, which would count as datasets in use.

    mosaicml-streaming never removes its lock files from the temporary folder, and skips their numbers when it numbers
    shared memory. Its cleaning stops at the first number without memory. So each test gets a new temporary folder.
    """
    util = pytest.importorskip('streaming.base.util')
    (tmp_path / 'locks').mkdir()
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'locks'))
    monkeypatch.setattr(tempfile, 'tempdir', None)
    util.clean_stale_shared_memory()
    yield
    close_ranks()  # they use the temporary folder, which is removed
    util.clean_stale_shared_memory()
