# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How far a run is in an epoch while several iterators of one loader may be under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar('Item')


@dataclass(eq=False)
class Pass:
    """One iterator on its way through an epoch."""

    epoch: int
    batch: int
    """Batches of the epoch that lie behind it, those before its start included."""
    has_ended: bool = False


class Passes:
    """The iterators of a sampler and its loaders, and the place in the data that a checkpoint must hold.

    A run has one iterator that it trains on. A look (``next(iter(loader))``) makes another one, which must not move the
    place. So the furthest iterator of the epoch holds the place, until an epoch ends.
    """

    def __init__(self) -> None:
        self._under_way: list[Pass] = []
        """In the order in which they moved last."""
        self._furthest_done: Pass | None = None
        """The furthest one that has ended or was given up."""

    @property
    def are_under_way(self) -> bool:
        """Whether an iterator is under way: begun, and neither ended nor given up."""
        return bool(self._under_way)

    def follow(
        self,
        batches: Iterable[Item],
        epoch: int,
        first: int,
    ) -> Iterator[Item]:
        """Yields the batches of an epoch from batch `first` on, and notes how far they were taken."""
        done = self._furthest_done
        if done is not None and done.has_ended and done.epoch == epoch:
            # The same epoch is read again. So the place is no longer its end.
            self._furthest_done = None
        current = Pass(epoch, first)
        self._under_way.append(current)
        try:
            for batch in batches:
                current.batch += 1
                # It is missing if another iterator has reached the end of the epoch since, which takes all others for
                # looks.
                if current in self._under_way:
                    self._under_way.remove(current)
                self._under_way.append(current)
                yield batch
            if current in self._under_way:
                current.has_ended = True
                self._furthest_done = current
                self._under_way.clear()  # all others are looks that stayed behind
        finally:
            # Also reached if the iterator is closed or garbage collected in the middle of the epoch.
            self._give_up(current)

    def _give_up(self, left: Pass) -> None:
        """Notes that an iterator will not go on. Does nothing for one that has ended."""
        if left not in self._under_way:
            return
        self._under_way.remove(left)
        done = self._furthest_done
        if done is None or done.epoch != left.epoch or done.batch < left.batch:
            self._furthest_done = left

    def forget(self) -> None:
        """Forgets all iterators, because the place is set from outside."""
        self._under_way.clear()
        self._furthest_done = None

    def place(
        self,
        next_epoch: int,
        next_batch: int,
    ) -> tuple[int, int]:
        """Returns epoch and batch of the furthest iterator, or the start of the next one if there is none.

        While an iterator is under way its epoch counts, even if the epoch of the next one is set already.
        """
        epoch = next_epoch
        if self._under_way:
            epoch = self._under_way[-1].epoch
        candidates = list(self._under_way)
        if self._furthest_done is not None:
            candidates.append(self._furthest_done)
        # Iterators of other epochs are looks, or remains of an epoch that was left early.
        batches = [candidate.batch for candidate in candidates if candidate.epoch == epoch]
        return epoch, max(batches, default=next_batch)
