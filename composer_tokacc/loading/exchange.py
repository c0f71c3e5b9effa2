# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Moves samples between ranks: point to point, over a gloo group of its own, only what another rank computes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from composer.utils import dist

__all__ = ['SampleExchange', 'pack', 'unpack']


class SampleExchange:
    """A process group on the CPU beside that of the training, and the two steps of an exchange.

    Every rank must make the same calls in the same order. The group is made at the first of them.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; for small ones."""
        if dist.get_world_size() == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(values, value, group=self._gloo())
        return values

    def share(self, samples: Sequence[Any], num_samples: Sequence[int], shares: Sequence[Sequence[int]]) -> list[Any]:
        """Gives every rank the samples of its share.

        Args:
            samples: Those that this rank has.
            num_samples: How many each rank has. Samples of all ranks are counted through in the order of the ranks.
            shares: Numbers of the samples that each rank shall have; a sample may be in several shares.

        Returns:
            The samples of this rank's share, in its order. Those that were here are the objects that were given.
        """
        rank = dist.get_global_rank()
        owners = [owner for owner, number in enumerate(num_samples) for _ in range(number)]
        first = sum(num_samples[:rank])
        wanted = [[samples[index - first] for index in share if owners[index] == rank] for share in shares]
        sending = {to: pack(wanted[to]) for to in range(len(shares)) if wanted[to] and to != rank}
        senders = {owners[index] for index in shares[rank]} - {rank}
        arrived = {owner: iter(unpack(packed)) for owner, packed in self._swap(sending, senders).items()}
        return [
            samples[index - first] if owners[index] == rank else next(arrived[owners[index]]) for index in shares[rank]
        ]

    def _swap(self, sending: Mapping[int, torch.Tensor], senders: set[int]) -> dict[int, torch.Tensor]:
        """Sends bytes to ranks, receives from `senders`; the number of bytes goes ahead of them."""
        sizes = {owner: torch.zeros(1, dtype=torch.int64) for owner in senders}
        waiting = [self._receive(size, owner, tag=0) for owner, size in sizes.items()]
        sent = []  # with what is sent, which must live until then
        for to, packed in sending.items():
            size = torch.tensor([len(packed)])
            sent += [(size, self._send(size, to, tag=0)), (packed, self._send(packed, to, tag=1))]
        for work in waiting:
            work.wait()
        received = {owner: torch.empty(int(size), dtype=torch.uint8) for owner, size in sizes.items()}
        waiting = [self._receive(packed, owner, tag=1) for owner, packed in received.items()]
        for work in [*waiting, *(work for _, work in sent)]:
            work.wait()
        return received

    def _send(self, tensor: torch.Tensor, to: int, *, tag: int) -> Any:
        return torch.distributed.isend(tensor, dst=to, group=self._gloo(), tag=tag)

    def _receive(self, tensor: torch.Tensor, owner: int, *, tag: int) -> Any:
        return torch.distributed.irecv(tensor, src=owner, group=self._gloo(), tag=tag)

    def _gloo(self) -> Any:
        if self._group is None:
            self._group = torch.distributed.new_group(backend='gloo')
        return self._group


def pack(samples: Sequence[Any]) -> torch.Tensor:
    """Samples as bytes, uint8 (number of bytes,)."""
    buffer = io.BytesIO()
    torch.save(list(samples), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> list[Any]:
    """The inverse of :func:`pack`."""
    # Not weights_only: what one process of a run sends to another is whatever its dataset made.
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=False)
