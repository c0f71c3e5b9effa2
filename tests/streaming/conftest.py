# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_shared_memory_left():
    """What killed runs and earlier tests left would count as datasets that are in use."""
    util = pytest.importorskip('streaming.base.util')
    util.clean_stale_shared_memory()
    yield
    util.clean_stale_shared_memory()
