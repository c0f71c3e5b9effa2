# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""After a real out-of-memory under Composer's ``'auto'``: what the memory model had predicted, and what was held."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from composer.core import State
from composer.utils import dist

from composer_tokacc.layout import BatchLayout
from composer_tokacc.memory import GIB, BatchShape, MemoryModel

__all__ = ['OutOfMemory', 'predicted_and_actual']


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An attempt at a step that failed, as it was on the fullest rank.

    Args:
        size: ``device_train_microbatch_size`` of the attempt.
        rank: The rank that had the most memory allocated.
        shape: The microbatch that it was at.
        predicted: Bytes at the peak of such a microbatch, by the memory model.
        allocated: Most bytes that were allocated on that rank; what could not be allocated comes on top.
    """

    size: float
    rank: int
    shape: BatchShape
    predicted: float
    allocated: float

    def message(self) -> str:
        """One line: predicted against actual, and what follows."""
        shape, short = self.shape, self.allocated - self.predicted
        images = f', {shape.image_tokens} image tokens' if shape.image_tokens else ''
        verdict = (
            f'The memory model is at least {short / self.predicted:.0%} too low here: leave that much more room'
            if short > 0
            else 'The memory model expected no less: microbatching.size=suggest would have begun with what fits'
        )
        return (
            f'Out of memory with device_train_microbatch_size={self.size}, rank {self.rank}, {shape.rows} rows of '
            f'{shape.width} tokens{images}: predicted {self.predicted / GIB:.2f} GiB, actual at least '
            f'{self.allocated / GIB:.2f} GiB. {verdict}.'
        )

    def metrics(self) -> dict[str, float]:
        """The same for a logger, in GiB."""
        return {'oom_predicted_gib': self.predicted / GIB, 'oom_actual_gib': self.allocated / GIB}


def predicted_and_actual(memory: MemoryModel, state: State, size: float) -> OutOfMemory:
    """What is known of the attempt that has just failed; every rank must call it, before anything is trained again.

    Args:
        memory: Memory model of the run.
        state: Composer's, at the retry's BEFORE_TRAIN_BATCH: its batch is still the microbatch that failed.
        size: The microbatch size that was tried.
    """
    shape = BatchShape.of(state.batch, BatchLayout.for_model(state.model))
    predicted = memory.peak(shape, num_ranks=dist.get_world_size())
    allocated = float(torch.cuda.max_memory_allocated())
    mine = [allocated, predicted, shape.rows, shape.width, shape.image_tokens]
    ranks = dist.all_gather(state.device.tensor_to_device(torch.tensor(mine, dtype=torch.float64)))
    rank, fullest = max(enumerate(of_rank.tolist() for of_rank in ranks), key=lambda entry: entry[1][0])
    rows, width, image_tokens = map(int, fullest[2:])
    return OutOfMemory(
        size=size,
        rank=rank,
        shape=BatchShape(rows=rows, width=width, image_tokens=image_tokens),
        predicted=fullest[1],
        allocated=fullest[0],
    )
