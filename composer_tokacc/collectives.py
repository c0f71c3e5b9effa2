# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What ranks tell each other about a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed

__all__ = ['RankSum', 'all_gather_object', 'from_any_rank', 'get_global_rank', 'get_world_size', 'max_over_ranks']

T = TypeVar('T')


def get_world_size() -> int:
    """Returns how many ranks there are: of the process group, or before it stands as launched."""
    return torch.distributed.get_world_size() if _has_group() else int(os.environ.get('WORLD_SIZE', 1))


def get_global_rank() -> int:
    """Returns which of them this is, as :func:`get_world_size` does."""
    return torch.distributed.get_rank() if _has_group() else int(os.environ.get('RANK', 0))


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _can_ask() -> bool:
    """Returns whether there are other ranks to ask; refuses ranks that were launched and do not know each other."""
    if not _has_group() and get_world_size() > 1:
        raise RuntimeError(
            f'Ranks must have a process group to sum over, got: none on {get_world_size()} ranks. Call '
            '`torch.distributed.init_process_group` first (with Composer: `dist.initialize_dist`).'
        )
    return _has_group()


def all_gather_object(value: T) -> list[T]:
    """Returns the values of all ranks, by rank; a collective."""
    values = [value] * get_world_size()
    if _can_ask():
        torch.distributed.all_gather_object(values, value)
    return values


def from_any_rank(value: T | None) -> T | None:
    """Returns the value of the first rank that has one; a collective."""
    num_ranks = get_world_size()
    (behind,) = max_over_ranks([0 if value is None else num_ranks - get_global_rank()])
    values = [value]
    if _can_ask() and behind:  # one rank sends; gathering, all that have one would
        torch.distributed.broadcast_object_list(values, src=num_ranks - behind)
    return values[0]


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """Returns one integer all-reduce; on the GPU only where the backend knows no other."""
    if not torch.distributed.is_initialized():
        return [int(value) for value in values]
    on_gpu = torch.distributed.get_backend() == 'nccl'
    tensor = torch.tensor([int(value) for value in values], device=torch.cuda.current_device() if on_gpu else 'cpu')
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


class RankSum:
    """Starts one all-reduce of numbers, equally many on all ranks; :meth:`read` waits for it the first time.

    Composer's own ``dist.all_reduce`` waits at once, for a rank that may be late. Here the waiting is left to whichever
    collective the host needs first, so it is never paid twice.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._tensor = values  # int64 or float64, where the process group reduces
        self._work = torch.distributed.all_reduce(values, async_op=True) if _can_ask() else None
        self._sums: tuple[float, ...] | None = None

    def read(self) -> tuple[float, ...]:
        """Returns the sums over all ranks."""
        if self._sums is None:
            if self._work is not None:
                self._work.wait()
            self._sums = tuple(self._tensor.tolist())
        return self._sums
