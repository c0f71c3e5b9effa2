# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from composer_tokacc.data_spec import split


@pytest.fixture
def two_ranks(monkeypatch):
    """Makes this process one of two ranks. The other rank gives the same answers."""
    monkeypatch.setattr(split, 'get_world_size', lambda: 2)
    monkeypatch.setattr(split, 'max_over_ranks', list)
