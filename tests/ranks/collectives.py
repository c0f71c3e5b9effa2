# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: counts the collectives of a step, with and without the algorithm and the monitor."""

from __future__ import annotations

from typing import Any

from composer.core import Callback
from torch.profiler import ProfilerActivity, profile

from composer_tokacc import TokenAccumulation, TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader


class CountCollectives(Callback):
    """Profiles the third step, from the BATCH_END before it to its own."""

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
            for collective in ('c10d::allreduce', 'c10d::allgather', 'c10d::broadcast'):
                self.counts[collective] = sum(collective in event for event in events)


def count(size: int, algorithms: list[Any], callbacks: list[Any]) -> dict[str, int]:
    rows = text_rows([(4, 2), (14, 11), (9, 9), (3, 0), (6, 1), (7, 2)])
    counter = CountCollectives()
    batches = [collate(rows)] * 4
    fit(
        text_model(),
        loader(*batches),
        algorithms=algorithms,
        # The counter comes after TokenMonitor, so that its step has one reduction of the monitor.
        callbacks=[*callbacks, counter],
        microbatch_size=size,
        max_duration='4ba',
    )
    return counter.counts


def counts(size: int) -> dict[str, Any]:
    return {
        'stock': count(size, [], []),
        'ours': count(size, [TokenAccumulation()], []),
        'monitor': count(size, [], [TokenMonitor()]),
    }


def main() -> dict[str, Any]:
    return {str(size): counts(size) for size in (1, 6)}
