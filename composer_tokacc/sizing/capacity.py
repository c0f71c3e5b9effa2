# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The largest microbatch that a device holds, by the memory model, whatever rows of the dataset come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.profile import SampleSizes
from composer_tokacc.sizing.shapes import BatchShape

__all__ = ['Capacity', 'LargestMicrobatch', 'largest_microbatch']

# Far beyond any device; bisection starts here.
_MOST_TOKENS = 1 << 30
# Terms of the memory model that a smaller microbatch would lower.
_KINDS = {'text': 'text activations', 'logits': 'logits', 'vision': 'vision activations'}


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What fits on one rank.

    Args:
        memory: Memory model.
        table: Sizes of the samples.
        num_ranks: Ranks.
        limit: Bytes that may be used: device memory times the safety factor.
        packing: Whether a microbatch is one packed row.
    """

    memory: MemoryModel
    table: SampleSizes
    num_ranks: int
    limit: float
    packing: bool = False

    def worst_shape(self, tokens: int, image_tokens: int | None = None) -> BatchShape:
        """The costliest microbatch of this many positions: the widest rows, and as many image tokens as they can have.

        Args:
            tokens: Positions, padding included.
            image_tokens: Image tokens; by default the share of the sample that has the largest.
        """
        vision = self.table.vision
        most = tokens * float((vision / self.table.tokens).max()) if image_tokens is None else image_tokens
        # The mask of a packed row is as wide as all its documents together.
        width = tokens if self.packing else min(int(self.table.tokens.max()), tokens)
        return BatchShape(
            rows=max(round(tokens / width), 1),
            width=width,
            image_tokens=int(most),
            image_area=most * float(vision.max()),
            pixel_bytes=int(most * self.memory.pixel_bytes_per_image_token),
        )

    def peak(self, tokens: int, image_tokens: int | None = None) -> float:
        """Bytes at the peak of the costliest microbatch of this many positions."""
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
        terms = self.terms(int(self.table.tokens.min()))
        largest = sorted(terms, key=lambda name: -terms[name])[:3]
        held = ', '.join(f'{name} {terms[name] / GIB:.2f}' for name in largest)
        remedies = ['sharding with FSDP over more ranks' if self.memory.strategy == 'fsdp' else 'sharding with FSDP']
        remedies += ['freezing parts', 'activation checkpointing', 'a shorter context']
        return (
            f'`device_memory_gib` must hold the model and its shortest sample, got: {self.limit / GIB:.2f} GiB usable '
            f'for {sum(terms.values()) / GIB:.2f} ({held}). What would help: {", ".join(remedies)}.'
        )


@dataclass(frozen=True, kw_only=True)
class LargestMicrobatch:
    """The largest safe microbatch of a run.

    Args:
        size: ``device_train_microbatch_size``, in rows of `slot_tokens`.
        slot_tokens: Width of a slot.
        stock_rows: Rows that stock Composer computes at once in the same memory, each as wide as the longest sample.
        fitting_tokens: Most positions that fit, whole slots or not.
        binds: What keeps it from being larger: ``'text'``, ``'logits'``, ``'vision'`` or ``'global batch'``.
    """

    size: int
    slot_tokens: int
    stock_rows: int
    fitting_tokens: int
    binds: str

    @property
    def max_tokens(self) -> int:
        """Token budget of a microbatch."""
        return self.size * self.slot_tokens


def largest_microbatch(capacity: Capacity, *, rows_per_rank: int, slot_tokens: int) -> LargestMicrobatch:
    """The most slots that fit, at most one for each row of a device batch.

    Args:
        capacity: What fits.
        rows_per_rank: Rows of a device batch.
        slot_tokens: Width of a slot; one wider than memory is narrowed to what fits.

    Raises:
        ValueError: Not even the shortest sample fits.
    """
    fitting = capacity.max_tokens()
    if fitting < int(capacity.table.tokens.min()):
        raise ValueError(capacity.why_nothing_fits())
    slot = min(slot_tokens, fitting)
    size = min(fitting // slot, rows_per_rank)
    terms = capacity.terms(size * slot)
    unpacked = replace(capacity, packing=False).max_tokens() if capacity.packing else fitting
    return LargestMicrobatch(
        size=size,
        slot_tokens=slot,
        stock_rows=max(min(unpacked // int(capacity.table.tokens.max()), rows_per_rank), 1),
        fitting_tokens=fitting,
        binds='global batch' if size == rows_per_rank else max(_KINDS, key=lambda kind: terms[_KINDS[kind]]),
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number for which a predicate holds that is true up to some number; 0 where it never does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= _MOST_TOKENS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
