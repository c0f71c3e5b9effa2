# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader whose ranks exchange the samples of a global batch, so that all finish together.

Samples go point to point, over a gloo group of its own, and only those that another rank computes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.collectives import get_global_rank, get_world_size
from composer_tokacc.planning import CostModel, CutOptions
from composer_tokacc.sampling.rank_assignment import LoadPlanner, RankAssignment, num_repeated_by


class ExchangingDataLoader(DataLoader):
    """Regroups across ranks after loading, for datasets that say themselves which rank reads what, as streamed ones do.

    Every step each rank reads the samples that a plain DataLoader would read, all learn how long those of the others
    are and make the same plan, and samples go to the rank that will compute them. So a global batch holds what it would
    hold without, each sample once; only who computes what with whom changes, which token accumulation makes free.
    What torch's DistributedSampler repeats to fill up the ranks is thrown away. Ranks may get unequal numbers of
    samples, never none unless there are fewer samples than ranks; then a rank gets a copy that weighs nothing and is
    no sample.

    Composer resumes it as it resumes the dataset: it asks the dataset itself for its state, in samples of all ranks,
    and their number stays the same.

    Args:
        dataset: Its samples are mappings with ``input_ids`` of shape ``(1, length)``. On several ranks it is iterable
            and shares itself among them, as StreamingDataset, or is used with a DistributedSampler.
        collate_fn: Makes a mapping of the samples of a microbatch.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        image_token_ids: Ids of the placeholders in ``input_ids``, for image budget and ``'fsdp'``.
        max_image_tokens, objective, cost: As for :func:`.plan_microbatches`.
        patches: Patches that the vision encoder computes for a sample, for `cost`. Default: image tokens tell its cost.
        width_multiple: As given to ``token_data_spec``.
        pin_memory: Whether to copy batches to page-locked memory.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`; ``batch_size`` is what each rank reads.

    Raises:
        ValueError: If an argument is out of range.
        ValueError: On iterating, on all ranks, for a sample that one of them refuses.
    """

    marks_added_rows = True
    """Copies that fill up the ranks weigh nothing here: ``num_repeated`` finds none."""

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
        patches: Callable[[Any], int] | None = None,
        width_multiple: int = 1,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        # An own generator: seeding workers must not move the random numbers of the run.
        kwargs.setdefault('generator', torch.Generator().manual_seed(torch.initial_seed() + get_global_rank()))
        # Workers send each tensor through a file of its own, and samples are many: so they send one that holds all.
        super().__init__(dataset, collate_fn=to_bytes if kwargs.get('num_workers') else list, **kwargs)
        if self.batch_size is None:
            raise ValueError('`batch_size` must be what each rank reads in a step, got: None. Pass a number.')
        self._collate = collate_fn
        self._pin = pin_memory
        self._image_token_ids = torch.tensor(list(image_token_ids))
        options = CutOptions(
            max_tokens=max_tokens, max_image_tokens=max_image_tokens, width_multiple=width_multiple,
            objective=objective, cost=cost or CostModel(),
        )  # fmt: skip
        self._planner = LoadPlanner(get_world_size(), options)
        self._patches = None if cost is None else patches  # without a cost the encoder is free: no need to look
        self._exchange = SampleExchange()
        self._num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields what this rank computes of each global batch, until no rank has samples left."""
        self._num_samples = 0
        planner, reading = self._planner, super().__iter__()
        for batch in count():
            samples, sizes = self._read(reading, batch)
            if not any(sizes):
                return
            lengths, image_tokens, patches = np.array([size for of_rank in sizes for size in of_rank]).T
            vision = planner.options.cost.vision(image_tokens, patches)
            plan = planner.plan(lengths, image_tokens, vision).ranks  # of nothing but the sizes: the same on every rank
            assignments = [RankAssignment.from_plan(microbatches, range(len(lengths))) for microbatches in plan]
            rank = get_global_rank()
            to_compute = self._exchange.swap(samples, sum(map(len, sizes[:rank])), [list(one) for one in assignments])
            self._num_samples += len(lengths)
            ready = planner.collate(self._collate, to_compute, assignments[rank])
            ready.indices = None  # they count the samples of this step, and say nothing to a user
            yield ready.pin_memory() if self._pin else ready

    def state_dict(self) -> dict[str, Any] | None:
        """State of the dataset after the batches that were yielded, as StreamingDataLoader has it."""
        state_dict = getattr(self.dataset, 'state_dict', None)
        return None if state_dict is None else state_dict(self._num_samples, False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where :meth:`state_dict` was taken."""
        self.dataset.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]

    def _read(self, reading: Iterator[Any], batch: int) -> tuple[list[Any], list[list[tuple[int, int, int]]]]:
        """Returns this rank's samples, and length, image tokens and patches of those of every rank.

        A rank that fails tells the others, which would wait for it otherwise.
        """
        samples: list[Any] = []
        failure = None
        try:
            samples = next(reading, [])
            samples = from_bytes(samples) if isinstance(samples, torch.Tensor) else samples
            assert self.batch_size is not None
            samples = samples[: len(samples) - num_repeated_by(self.sampler, self.batch_size, batch)]
        except Exception as error:
            failure = error
        # What is wrong with the data is the same error everywhere; others need not survive the way to another process.
        reason = failure if failure is None or isinstance(failure, ValueError) else str(failure)
        replies = self._exchange.gather((reason, [self._size(sample) for sample in samples]))
        if failure is not None:
            raise failure
        for rank, (reason, _) in enumerate(replies):
            if isinstance(reason, ValueError):
                raise reason
            if reason is not None:
                raise RuntimeError(f'every rank must read its samples, got: an error on rank {rank}: {reason}')
        return samples, [sizes for _, sizes in replies]

    def _size(self, sample: Mapping[str, Any]) -> tuple[int, int, int]:
        ids = sample['input_ids']
        patches = 0 if self._patches is None else self._patches(sample)
        return ids.shape[-1], int(torch.isin(ids, self._image_token_ids).sum()), patches


class SampleExchange:
    """A process group on the CPU, made at its first use; every rank must make the same calls in the same order."""

    @cached_property
    def _gloo(self) -> Any:
        return torch.distributed.new_group(backend='gloo')

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank; for small ones."""
        if get_world_size() == 1:
            return [value]
        values: list[Any] = [None] * get_world_size()
        torch.distributed.all_gather_object(values, value, group=self._gloo)
        return values

    def swap(self, samples: Sequence[Any], first: int, assigned: Sequence[Sequence[int]]) -> list[Any]:
        """Gives every rank the samples that it computes, and returns those of this rank, in its order.

        Args:
            samples: Those that this rank has.
            first: Number of the first of them. Samples of all ranks are counted through in the order of the ranks.
            assigned: Numbers of the samples that each rank shall have; several may have the same.
        """
        held = dict(enumerate(samples, start=first))
        sending = []
        for to, numbers in enumerate(assigned):
            wanted = {number: held[number] for number in numbers if number in held and to != get_global_rank()}
            sending.append(to_bytes(wanted) if wanted else torch.empty(0, dtype=torch.uint8))
        for packed in filter(len, self._all_to_all(sending)):
            held |= from_bytes(packed)
        return [held[number] for number in assigned[get_global_rank()]]

    def _all_to_all(self, sending: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Swaps bytes from every rank for bytes to every rank; the numbers of bytes go ahead of them."""
        if len(sending) == 1:
            return sending
        num_sent = torch.tensor([len(packed) for packed in sending])
        num_received = torch.empty_like(num_sent)
        torch.distributed.all_to_all_single(num_received, num_sent, group=self._gloo)
        received = torch.empty(int(num_received.sum()), dtype=torch.uint8)
        sizes = num_received.tolist(), num_sent.tolist()
        torch.distributed.all_to_all_single(received, torch.cat(list(sending)), *sizes, group=self._gloo)
        return received.split(sizes[0])


def to_bytes(samples: Any) -> torch.Tensor:
    """Returns samples as bytes, uint8 (number of bytes,)."""
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def from_bytes(packed: torch.Tensor) -> Any:
    """Returns the inverse of :func:`to_bytes`."""
    # Not weights_only: what one process of a run sends to another is whatever its dataset made.
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=False)
