# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The samples of a global batch that one rank loads, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from composer_tokacc.planning import Microbatch

Value = TypeVar('Value')


@dataclass(frozen=True)
class RankAssignment:
    """The samples that one rank loads, at least one.

    Dummies of the plan are not among them: the split makes dummy rows itself, from a row that it has.
    """

    microbatches: list[list[int]]
    """Samples of each microbatch. A rank that computes no sample gets a copy of one that another rank computes."""
    is_copy: bool = False
    """Whether its only sample is such a copy, which must weigh nothing."""
    weights: list[list[float]] | None = None
    """Weight of a token of each sample; None if all tokens of the step weigh the same."""
    plan_checksum: int = 0
    """Checksum of the plan of all ranks, see :class:`.PlanRecord`."""
    witnesses: tuple[int, ...] = field(default=(), compare=False)
    """Samples that every rank reads in addition, to compare the datasets of the ranks."""

    def __iter__(self) -> Iterator[int]:
        """Yields all samples, microbatch by microbatch, as a plain DataLoader reads them."""
        for indices in self.microbatches:
            yield from indices

    def __len__(self) -> int:
        return sum(len(indices) for indices in self.microbatches)

    @classmethod
    def from_plan(
        cls,
        planned: Sequence[Microbatch],
        members: Sequence[int],
        weights: Sequence[float] | None = None,
        plan_checksum: int = 0,
    ) -> RankAssignment:
        """Returns the assignment of a rank with these planned microbatches, whose indices are places in `members`."""
        computed = [microbatch for microbatch in planned if not microbatch.filled]
        is_copy = not computed
        if is_copy:
            computed = list(planned[:1])  # a dummy, which is a copy of a sample
        samples = [_picked(members, microbatch) for microbatch in computed]
        weights_of_samples = None
        if weights is not None:
            weights_of_samples = [_picked(weights, microbatch) for microbatch in computed]
        return cls(samples, is_copy, weights_of_samples, plan_checksum)


def _picked(values: Sequence[Value], microbatch: Microbatch) -> list[Value]:
    return [values[place] for place in microbatch.indices]
