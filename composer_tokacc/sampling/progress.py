# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How far a run has read its data, if several iterators read the same epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar('Item')


@dataclass(eq=False)
class _ReadingIterator:
    """How far one iterator has read. Without ``eq``, so that ``in`` and ``remove`` of a list find this very object."""

    epoch: int
    next_batch: int
    """Number in the epoch of the batch that it yields next."""
    is_reading: bool = True
    """Whether it can yield further batches. False once it has ended, or was closed or garbage collected before."""
    has_ended: bool = False
    """Whether it has yielded all batches of the epoch. Then it is no longer reading."""


class Progress:
    """The iterators of a sampler and of its loaders, and the place of the run, which a checkpoint must hold.

    The place is an epoch, and the number of the batch that the run reads next. A run trains on the batches of one
    iterator. But ``next(iter(loader))`` makes a second iterator, to look at a batch, and must not change the place. So
    the iterator that is furthest in the epoch holds the place. (Before the first step, a look moves the place by one
    batch.) Once an iterator has reached the end of the epoch, the others are forgotten. If a
    :class:`.RegroupingDataLoader` is iterated, the iterator of the loader is noted, and not the one of the sampler,
    because the workers read ahead.
    """

    def __init__(self) -> None:
        self._iterators: list[_ReadingIterator] = []
        """All iterators that may hold the place. The one that began or yielded a batch most recently comes last."""
        self.num_reading = 0
        """Number of iterators that can yield further batches, those that were forgotten included."""

    def follow(
        self,
        batches: Iterable[Item],
        epoch: int,
        first: int,
    ) -> Iterator[Item]:
        """Yields the batches of an epoch from batch `first` on, and notes how many were taken."""
        # If an iterator has reached the end of this epoch, the run reads the epoch again. That iterator must no longer
        # be the furthest.
        self._iterators = [
            iterator for iterator in self._iterators if not (iterator.has_ended and iterator.epoch == epoch)
        ]
        current = _ReadingIterator(epoch, first)
        self._iterators.append(current)
        self.num_reading += 1
        try:
            for batch in batches:
                current.next_batch += 1
                # Moves it to the end of the list. If it was forgotten, it is not in the list, and is added again.
                if current in self._iterators:
                    self._iterators.remove(current)
                self._iterators.append(current)
                yield batch
            # If it was forgotten after its last batch, the run has set another place, which must not change here.
            if current in self._iterators:
                current.has_ended = True
                self._iterators = [current]
        finally:
            # Also reached if the iterator is closed or garbage collected in the middle of the epoch.
            current.is_reading = False
            self.num_reading -= 1

    def forget(self) -> None:
        """Forgets all iterators. The place is then the one that the caller sets, until an iterator yields a batch."""
        self._iterators = []

    def place(
        self,
        next_epoch: int,
        next_batch: int,
    ) -> tuple[int, int]:
        """Returns the epoch of the run, and the number of the batch that it reads next.

        While an iterator is reading, its epoch counts, even if ``set_epoch`` has already set the next one.

        Args:
            next_epoch: The epoch if no iterator is reading.
            next_batch: The batch if no iterator has read this epoch.
        """
        epoch = next_epoch
        reading = [iterator for iterator in self._iterators if iterator.is_reading]
        if reading:
            most_recent = reading[-1]
            epoch = most_recent.epoch
        # Iterators of other epochs do not count. They have ended, looked at a batch, or were given up.
        batches_in_epoch = [iterator.next_batch for iterator in self._iterators if iterator.epoch == epoch]
        return epoch, max(batches_in_epoch, default=next_batch)
