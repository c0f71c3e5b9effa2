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
    """Number of the batch of the epoch that it yields next."""
    has_ended: bool = False


class Passes:
    """The iterators of a sampler and its loaders, and the place in the data that a checkpoint must hold.

    A run has one iterator that it trains on. A look (``next(iter(loader))``) makes another one, which must not move the
    place. So the furthest iterator of the epoch holds the place, until an epoch ends.
    """

    def __init__(self) -> None:
        self._under_way: list[Pass] = []
        """The one that yielded a batch last is at the end."""
        self._furthest_done: Pass | None = None
        """The furthest one that has ended or was given up, in the last epoch that has one."""

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
            # The same epoch is read again, so its end is no longer the place of the run.
            self._furthest_done = None
        current = Pass(epoch, first)
        self._under_way.append(current)
        try:
            for batch in batches:
                current.batch += 1
                # Moved to the end of the list. It is missing if another iterator has ended the epoch in between.
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

    def _give_up(self, abandoned: Pass) -> None:
        """Notes that an iterator will not go on. Does nothing for one that has ended."""
        if abandoned not in self._under_way:
            return
        self._under_way.remove(abandoned)
        done = self._furthest_done
        if done is None or done.epoch != abandoned.epoch or done.batch < abandoned.batch:
            self._furthest_done = abandoned

    def forget(self) -> None:
        """Forgets all iterators, because the place is set from outside."""
        self._under_way.clear()
        self._furthest_done = None

    def place(
        self,
        next_epoch: int,
        next_batch: int,
    ) -> tuple[int, int]:
        """Returns epoch and batch of the furthest iterator, or the given place if no iterator has begun.

        While an iterator is under way its epoch counts, even if the trainer has already set the next epoch.

        Args:
            next_epoch: Epoch of the next iterator.
            next_batch: Batch at which the next iterator starts.
        """
        epoch = next_epoch
        if self._under_way:
            epoch = self._under_way[-1].epoch
        candidates = list(self._under_way)
        if self._furthest_done is not None:
            candidates.append(self._furthest_done)
        # Iterators of other epochs are looks, or belong to an epoch that was left early.
        batches = [candidate.batch for candidate in candidates if candidate.epoch == epoch]
        return epoch, max(batches, default=next_batch)
