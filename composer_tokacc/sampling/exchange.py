# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader whose ranks exchange the samples of a global batch, so that all finish together.

Samples go point to point, over a gloo group of its own, and only those that another rank computes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.algorithm.filler_rows import repeated_rows
from composer_tokacc.layout import ReadyBatch
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling.share import LoadPlanner, RankShare, collate_share

__all__ = ['ExchangingDataLoader', 'SampleExchange', 'pack', 'unpack']


class ExchangingDataLoader(DataLoader):
    """Regroups across ranks after loading, for datasets that say themselves which rank reads what, as streamed ones do.

    Every step each rank reads the samples that a plain DataLoader would read, all learn how long those of the others
    are and make the same plan, and samples go to the rank that will compute them. So a global batch holds what it would
    hold without, each sample once; only who computes what with whom changes, which token accumulation makes free.
    What torch's DistributedSampler repeats to fill up the ranks is thrown away. Ranks may get unequal numbers of
    samples, never none unless there are fewer samples than ranks; then a rank gets a zero-weight copy, which is no
    sample.

    Composer resumes it as it resumes the dataset: it asks the dataset itself for its state, in samples of all ranks,
    and their number stays the same.

    Args:
        dataset: Its samples are mappings with ``input_ids`` of shape ``(1, length)``. On several ranks it is iterable
            and shares itself among them, as StreamingDataset, or is used with a DistributedSampler.
        collate_fn: Makes a mapping of the samples of a microbatch.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        image_token_ids: Ids of the placeholders in ``input_ids``, for image budget and ``'fsdp'``.
        max_image_tokens: Image budget of a microbatch.
        objective: ``'ddp'``, or ``'fsdp'`` where ranks must have equal numbers of microbatches.
        cost: Cost model of a microbatch.
        width_multiple: As given to ``token_data_spec``.
        pin_memory: Whether to copy batches to page-locked memory.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`; ``batch_size`` is what each rank reads.

    Raises:
        ValueError: If an argument is out of range.
        ValueError: On iterating, on all ranks, for a sample that one of them refuses.
    """

    marks_added_rows = True
    """Rows that only fill up the ranks weigh nothing here: :func:`.filler_rows` finds none."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate_fn: Callable[[list[Any]], Any],
        max_tokens: int,
        image_token_ids: Sequence[int] = (),
        max_image_tokens: int | None = None,
        objective: Literal['ddp', 'fsdp'] = 'ddp',
        cost: CostModel | None = None,
        width_multiple: int = 1,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        # An own generator: seeding workers must not move the random numbers of the run.
        kwargs.setdefault('generator', torch.Generator().manual_seed(torch.initial_seed() + dist.get_global_rank()))
        # Workers send each tensor through a file of its own, and samples are many: so they send one that holds all.
        super().__init__(dataset, collate_fn=pack if kwargs.get('num_workers') else list, **kwargs)
        if self.batch_size is None:
            raise ValueError('`batch_size` must be what each rank reads in a step, got: None. Pass a number.')
        self._collate = collate_fn
        self._pin = pin_memory
        self._image_token_ids = torch.tensor(list(image_token_ids))
        self._planner = LoadPlanner(
            num_ranks=dist.get_world_size(),
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            objective=objective,
            cost=cost,
            width_multiple=width_multiple,
        )
        self._planner.plan([1], [0])  # refuses bad options now
        self._exchange = SampleExchange()
        self._num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's share of each global batch, until no rank has samples left."""
        self._num_samples = 0
        reading = super().__iter__()
        for batch in count():
            samples, sizes = self._read(reading, batch)
            if not any(sizes):
                return
            lengths, image_tokens = zip(*(size for of_rank in sizes for size in of_rank), strict=True)
            plan = self._planner.plan(lengths, image_tokens).ranks  # of nothing but the sizes: the same on every rank
            shares = [RankShare.from_plan(microbatches) for microbatches in plan]
            mine = self._exchange.share(samples, [len(of_rank) for of_rank in sizes], [list(one) for one in shares])
            self._num_samples += sum(map(len, sizes))
            yield self._batch(mine, shares[dist.get_global_rank()])

    def state_dict(self) -> dict[str, Any] | None:
        """State of the dataset after the batches that were yielded, as StreamingDataLoader has it."""
        state_dict = getattr(self.dataset, 'state_dict', None)
        return None if state_dict is None else state_dict(self._num_samples, False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where :meth:`state_dict` was taken."""
        self.dataset.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]

    def _read(self, reading: Iterator[Any], batch: int) -> tuple[list[Any], list[list[tuple[int, int]]]]:
        """This rank's samples, and length and image tokens of those of every rank.

        A rank that fails tells the others, which would wait for it otherwise.
        """
        samples: list[Any] = []
        failure = None
        try:
            samples = next(reading, [])
            samples = unpack(samples) if isinstance(samples, torch.Tensor) else samples
            assert self.batch_size is not None
            samples = samples[: len(samples) - repeated_rows(self.sampler, self.batch_size, batch)]
        except Exception as error:
            failure = error
        # What is wrong with the data is the same error everywhere; others need not survive the way to another process.
        told = failure if failure is None or isinstance(failure, ValueError) else str(failure)
        answers = self._exchange.gather((told, [self._size(sample) for sample in samples]))
        if failure is not None:
            raise failure
        for rank, (told, _) in enumerate(answers):
            if isinstance(told, ValueError):
                raise told
            if told is not None:
                raise RuntimeError(f'every rank must read its samples, got: an error on rank {rank}: {told}')
        return samples, [sizes for _, sizes in answers]

    def _size(self, sample: Mapping[str, Any]) -> tuple[int, int]:
        ids = sample['input_ids']
        return ids.shape[-1], int(torch.isin(ids, self._image_token_ids).sum())

    def _batch(self, samples: list[Any], share: RankShare) -> ReadyBatch:
        planner = self._planner
        batch = collate_share(
            self._collate, samples, share, max_tokens=planner.max_tokens, width_multiple=planner.width_multiple
        )
        batch.indices = None  # they count the samples of this step, and say nothing to a user
        return batch.pin_memory() if self._pin else batch


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
