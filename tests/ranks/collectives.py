# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: all-reduces a step, with and without the algorithm; the counts."""

from __future__ import annotations

from typing import Any

from composer.core import Callback
from torch.profiler import ProfilerActivity, profile

from composer_tokacc import TokenAccumulation, TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader


class CountCollectives(Callback):
    """Profiles the third step whole, from the previous BATCH_END on."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.counts: dict[str, int] = {}

    def batch_end(self, state: Any, logger: Any) -> None:
        step = int(state.timestamp.batch)
        if step == 2:
            self.profiler.start()
        elif step == 3:
            self.profiler.stop()
            events = [event.key for event in self.profiler.events() or []]
            self.counts = {
                kind: sum(kind in key for key in events)
                for kind in ('c10d::allreduce', 'c10d::allgather', 'c10d::broadcast')
            }


def count(size: int, algorithms: list[Any], callbacks: list[Any]) -> dict[str, int]:
    rows = text_rows([(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2)])
    counter = CountCollectives()
    # The counter comes last, so that its step runs from after one TokenMonitor reduction to after the next.
    options: Any = {'algorithms': algorithms, 'callbacks': [*callbacks, counter], 'microbatch_size': size}
    fit(text_model(), loader(*[collate(rows)] * 4), max_duration='4ba', **options)
    return counter.counts


def counts(size: int) -> dict[str, Any]:
    return {
        'stock': count(size, [], []),
        'ours': count(size, [TokenAccumulation()], []),
        'monitor': count(size, [], [TokenMonitor()]),
    }


def main() -> dict[str, Any]:
    return {str(size): counts(size) for size in (1, 6)}
