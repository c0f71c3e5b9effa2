# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The largest microbatch that a device holds, by the memory model, whatever rows of the dataset come together."""

from __future__ import annotations

from dataclasses import dataclass

from composer_tokacc.memory import GIB, BatchShape, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes

__all__ = ['Capacity']

# Far beyond any device; bisection starts here.
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What fits on one rank.

    Args:
        memory: Memory model.
        table: Sizes of the samples.
        num_ranks: Ranks.
        limit: Bytes that may be used: device memory times the safety factor.
    """

    memory: MemoryModel
    table: SampleSizes
    num_ranks: int
    limit: float

    def worst_shape(self, tokens: int, image_tokens: int | None = None) -> BatchShape:
        """The dearest microbatch of this many positions: the widest rows, and as many image tokens as rows can have.

        Args:
            tokens: Positions, padding included.
            image_tokens: Image tokens; by default the share of the sample that has the largest.
        """
        vision = self.table.vision
        most = tokens * float((vision / self.table.tokens).max()) if image_tokens is None else image_tokens
        width = min(int(self.table.tokens.max()), tokens)
        return BatchShape(
            rows=max(round(tokens / width), 1),
            width=width,
            image_tokens=int(most),
            image_area=most * float(vision.max()),
            pixel_bytes=int(most * self.memory.pixel_bytes_per_image_token),
        )

    def peak(self, tokens: int, image_tokens: int | None = None) -> float:
        """Bytes at the peak of the dearest microbatch of this many positions."""
        return self.memory.peak(self.worst_shape(tokens, image_tokens), num_ranks=self.num_ranks)

    def terms(self, tokens: int) -> dict[str, float]:
        """The same by term."""
        return self.memory.terms(self.worst_shape(tokens), num_ranks=self.num_ranks)

    def max_tokens(self) -> int:
        """Most positions of a microbatch that fits; 0 where not even one does."""
        return _largest(lambda tokens: self.peak(tokens) <= self.limit)

    def max_image_tokens(self, tokens: int) -> int:
        """Most image tokens that fit beside this many positions, at most all of them."""
        return min(_largest(lambda images: self.peak(tokens, images) <= self.limit), tokens)

    def why_nothing_fits(self) -> str:
        """One line for a model that leaves no room: what is held, and what would help."""
        shortest = int(self.table.tokens.min())
        terms = self.terms(shortest)
        largest = sorted(terms, key=lambda name: -terms[name])[:3]
        held = ', '.join(f'{name} {terms[name] / GIB:.2f}' for name in largest)
        remedies = ['sharding with FSDP over more ranks' if self.memory.strategy == 'fsdp' else 'sharding with FSDP']
        remedies += ['freezing parts', 'activation checkpointing', 'a shorter context']
        return (
            f'`device_memory_gib` must hold the model and its shortest sample, got: {self.limit / GIB:.2f} GiB usable '
            f'for {sum(terms.values()) / GIB:.2f} ({held}). What would help: {", ".join(remedies)}.'
        )


def _largest(fits) -> int:  # noqa: ANN001 - a predicate that is true up to some number
    """The largest number for which a monotonic predicate holds; 0 where it never does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= _MOST_TOKENS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
