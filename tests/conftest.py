# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of all tests.

Hypothesis draws the same examples in every run, so that only a change of the code can make a test fail. With
HYPOTHESIS_PROFILE=random it draws new ones each time, to search for cases that nobody has thought of.

Ranks wait for the next test that needs them, because starting four of them takes 40 s of processor time. So one worker
of pytest-xdist runs all tests with ranks, first those that need few. The other workers run the other tests.

The main process of pytest-xdist runs no test, but loads this module before it starts the workers. So what loads torch
or Composer, which takes six seconds, is imported in the fixtures.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Torch reads it when it is imported. By default its compiler starts two processes, which no test needs.
os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')

settings.register_profile('steady', derandomize=True)
settings.register_profile('random', derandomize=False)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))


def pytest_collection_finish():
    """Leaves imported modules out of garbage collection, which would look at them for half a second each time.

    Later imports add more. So the garbage is collected less often than by default (700).
    """
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_collection_modifyitems(items):
    items.sort(key=_place_in_run)


def _place_in_run(item) -> tuple[bool, int, bool]:
    """Returns the key by which tests are sorted.

    Tests with ranks come first, by the number of ranks, so that few have to be started. The matrix comes last, because
    its many short tests keep all workers busy.
    """
    needs_ranks = bool(item.get_closest_marker('slow')) and _launches_ranks(item.path)
    num_ranks = 0
    if needs_ranks and hasattr(item, 'callspec'):
        num_ranks = item.callspec.params.get('ranks', 0)
    is_of_matrix = 'tests.matrix' in item.module.__name__
    return not needs_ranks, num_ranks, is_of_matrix


@functools.cache
def _launches_ranks(path: Path) -> bool:
    """Returns whether a file of tests uses ranks that wait. ``run_page`` runs the commands of a page on them."""
    return re.search('launch_json|launch_program|run_page', path.read_text()) is not None


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be switched off
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class RanksInOneWorker(LoadScopeScheduling):
        """Sends all tests of files that launch ranks to one worker.

        The mark `xdist_group` would do the same, but xdist 3.8 ignores it under pytest 9.2.
        """

        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition('::')[0]
            return 'ranks' if _launches_ranks(path) else nodeid

    return RanksInOneWorker(config, log) if config.getvalue('dist') == 'loadgroup' else None


@pytest.fixture(scope='session', autouse=True)
def _short_lookups_and_waits():
    from tests.support.lookups import shorten_lookups_and_waits

    shorten_lookups_and_waits()


def pytest_sessionfinish():
    launch = sys.modules.get('tests.support.launch')
    if launch is not None:  # some test has imported it, and may have started ranks
        launch.close_ranks()
