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
    is_under_way: bool = True
    """Whether it has neither ended nor was given up."""
    has_ended: bool = False


class Passes:
    """The iterators of a sampler and its loaders, and the place in the data that a checkpoint must hold.

    A run has one iterator that it trains on. A look (``next(iter(loader))``) makes another one, which must not move the
    place. So the furthest iterator of the epoch holds the place, until an epoch ends.
    """

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        """Since the end of the last epoch. The one that yielded a batch last is at the end."""

    @property
    def are_under_way(self) -> bool:
        """Whether an iterator is under way."""
        return any(each_pass.is_under_way for each_pass in self._passes)

    def follow(
        self,
        batches: Iterable[Item],
        epoch: int,
        first: int,
    ) -> Iterator[Item]:
        """Yields the batches of an epoch from batch `first` on, and notes how far they were taken."""
        current = Pass(epoch, first)
        passes = []
        for earlier_pass in self._passes:
            # If the same epoch is read again, its end is no longer the place of the run.
            if not (earlier_pass.has_ended and earlier_pass.epoch == epoch):
                passes.append(earlier_pass)
        self._passes = [*passes, current]
        try:
            for batch in batches:
                current.batch += 1
                # Moved to the end of the list. It is missing if another iterator has ended the epoch in between.
                if current in self._passes:
                    self._passes.remove(current)
                self._passes.append(current)
                yield batch
            if current in self._passes:
                current.has_ended = True
                self._passes = [current]  # all others are looks that stayed behind
        finally:
            # Also reached if the iterator is closed or garbage collected in the middle of the epoch.
            current.is_under_way = False

    def forget(self) -> None:
        """Forgets all iterators, because the place is set from outside."""
        self._passes = []

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
        epochs_under_way = [each_pass.epoch for each_pass in self._passes if each_pass.is_under_way]
        epoch = epochs_under_way[-1] if epochs_under_way else next_epoch
        # Iterators of other epochs are looks, or belong to an epoch that was left early.
        batches = [each_pass.batch for each_pass in self._passes if each_pass.epoch == epoch]
        return epoch, max(batches, default=next_batch)
