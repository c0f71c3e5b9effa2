# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: counts the collectives of a step, with and without the algorithm and the monitor."""

from __future__ import annotations

from collections import Counter
from typing import Any

from composer.core import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from composer_tokacc import TokenAccumulation, TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader


class Collectives(TorchDispatchMode):
    """Counts the collectives inside of the context, by name. DDP's reductions of gradients count, too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == 'c10d':
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


class CountCollectives(Callback):
    """Counts in the third step, from the BATCH_END before it to its own."""

    def __init__(self) -> None:
        self.collectives = Collectives()

    def batch_end(self, state: Any, logger: Any) -> None:
        step = int(state.timestamp.batch)
        if step == 2:
            self.collectives.__enter__()
        elif step == 3:
            self.collectives.__exit__(None, None, None)


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
    return counter.collectives.counts


def counts(size: int) -> dict[str, Any]:
    return {
        'stock': count(size, [], []),
        'ours': count(size, [TokenAccumulation()], []),
        'monitor': count(size, [], [TokenMonitor()]),
    }


def main() -> dict[str, Any]:
    return {str(size): counts(size) for size in (1, 6)}
