# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Computes what an iterator will yield next while its consumer is busy with the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ['map_ahead']

Item = TypeVar('Item')
Result = TypeVar('Result')


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], *, depth: int = 2) -> Iterator[Result]:
    """``map(function, items)``, with up to `depth` further results computed in a background thread.

    The thread starts with the first item, and is joined when the iterator ends, is closed or is garbage collected; an
    error of `function` is raised where its result would have been yielded.

    Args:
        function: What to compute. It must be safe to call from another thread.
        items: Its arguments, drawn lazily: at most `depth` more than results were yielded.
        depth: How many results may wait.

    Yields:
        The results, in order.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix='map_ahead')
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
