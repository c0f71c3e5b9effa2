# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What holds for all tests.

Hypothesis draws the same examples in every run, so that a failure is of the change at hand: HYPOTHESIS_PROFILE=random
draws others each time, to search for what nobody has thought of. Ranks that stay belong to one worker of pytest-xdist.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.support.launch import close_ranks
from tests.support.lookups import shorten_lookups

settings.register_profile('steady', derandomize=True)
settings.register_profile('random', derandomize=False)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))


def pytest_collection_modifyitems(items):
    for item in items:
        if _needs_ranks(item):
            item.add_marker(pytest.mark.xdist_group('ranks'))
    # By their number, so that few have to be started; last the matrix, whose many short tests keep all workers busy.
    items.sort(key=lambda item: (not _needs_ranks(item), _num_ranks(item), 'tests.matrix' in item.module.__name__))


def _needs_ranks(item) -> bool:
    return bool(item.get_closest_marker('slow') and {'launch_json', 'launch_program'} & vars(item.module).keys())


def _num_ranks(item) -> int:
    return item.callspec.params.get('ranks', 0) if _needs_ranks(item) and hasattr(item, 'callspec') else 0


@pytest.fixture(scope='session', autouse=True)
def _short_lookups():
    shorten_lookups()


def pytest_sessionfinish():
    close_ranks()
