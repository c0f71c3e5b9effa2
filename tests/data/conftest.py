# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keeps a test from reading length tables of earlier tests, which lie in the user's cache."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
