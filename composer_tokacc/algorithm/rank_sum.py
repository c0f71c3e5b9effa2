# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A sum of integers over the ranks that is under way while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from composer.devices import Device

__all__ = ['RankSum']


class RankSum:
    """Starts one all-reduce of integers; :meth:`read` waits for it the first time.

    Composer's own ``dist.all_reduce`` waits at once, for a rank that may be late. Here the waiting is left to whichever
    collective the host needs first, so it is never paid twice.

    Args:
        values: This rank's integers, equally many on all ranks.
        device: Where the process group reduces.
    """

    def __init__(self, values: Sequence[int], device: Device) -> None:
        self._values: tuple[int, ...] | None = None
        self._tensor = device.tensor_to_device(torch.tensor(values, dtype=torch.int64))
        self._work = None
        if torch.distributed.is_initialized():
            self._work = torch.distributed.all_reduce(self._tensor, async_op=True)

    def read(self) -> tuple[int, ...]:
        """The sums over all ranks."""
        if self._values is None:
            if self._work is not None:
                self._work.wait()
            self._values = tuple(self._tensor.tolist())
        return self._values
