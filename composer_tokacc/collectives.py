# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What ranks tell each other about a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed
from composer.utils import dist

__all__ = ['RankSum', 'from_any_rank', 'max_over_ranks']

T = TypeVar('T')


def from_any_rank(value: T | None) -> T | None:
    """Returns the value of the first rank that has one; a collective."""
    return next((found for found in dist.all_gather_object(value) if found is not None), None)


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """Returns one integer all-reduce; on the GPU only where the backend knows no other."""
    if not torch.distributed.is_initialized():
        return [int(value) for value in values]
    on_gpu = torch.distributed.get_backend() == 'nccl'
    tensor = torch.tensor([int(value) for value in values], device=torch.cuda.current_device() if on_gpu else 'cpu')
    dist.all_reduce(tensor, reduce_operation='MAX')
    return tensor.tolist()


class RankSum:
    """Starts one all-reduce of numbers; :meth:`read` waits for it the first time.

    Composer's own ``dist.all_reduce`` waits at once, for a rank that may be late. Here the waiting is left to whichever
    collective the host needs first, so it is never paid twice.

    Args:
        values: This rank's numbers, int64 or float64, equally many on all ranks, where the process group reduces.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values: tuple[float, ...] | None = None
        self._tensor = values
        self._work = None
        if torch.distributed.is_initialized():
            self._work = torch.distributed.all_reduce(self._tensor, async_op=True)

    def read(self) -> tuple[float, ...]:
        """Returns the sums over all ranks."""
        if self._values is None:
            if self._work is not None:
                self._work.wait()
            self._values = tuple(self._tensor.tolist())
        return self._values
