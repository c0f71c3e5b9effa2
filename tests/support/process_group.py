# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A process group of one rank in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

KEPT_GROUPS = []
"""Groups are kept until the process ends. The destructor of gloo may wait without end for a thread that needs the lock
of the interpreter."""


@contextmanager
def group_of_one_rank(folder: Path) -> Iterator[None]:
    """Makes a gloo group, unless a program that ran in this process has left one."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group('gloo', init_method=f'file://{folder}/ranks', rank=0, world_size=1)
    try:
        yield
    finally:
        KEPT_GROUPS.append(distributed.group.WORLD)
        distributed.destroy_process_group()
