# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader whose ranks exchange the samples of a global batch, so that all finish together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.data.records import BadSampleError
from composer_tokacc.data_spec.added_rows import zero_weight
from composer_tokacc.data_spec.replay import MICROBATCH_IDS
from composer_tokacc.loading.exchange import SampleExchange, pack, unpack
from composer_tokacc.planning import CostModel
from composer_tokacc.sampler.load_plan import LoadPlanner, RankShare
from composer_tokacc.sampler.window import repeated_rows

__all__ = ['ExchangingDataLoader']


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
        collate_fn: Makes a batch of this rank's samples; should return a mapping.
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
        BadSampleError: On iterating, on all ranks, for a sample that one of them cannot read.
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
            shares = [RankShare.of(microbatches) for microbatches in plan]
            mine = self._exchange.share(samples, [len(of_rank) for of_rank in sizes], [one.indices for one in shares])
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
        told = (None, '') if failure is None else (isinstance(failure, BadSampleError), str(failure))
        answers = self._exchange.gather((told, [self._size(sample) for sample in samples]))
        if failure is not None:
            raise failure
        for rank, ((is_bad_sample, message), _) in enumerate(answers):
            if is_bad_sample:
                raise BadSampleError(message)
            if is_bad_sample is not None:
                raise RuntimeError(f'every rank must read its samples, got: an error on rank {rank}: {message}')
        return samples, [sizes for _, sizes in answers]

    def _size(self, sample: Mapping[str, Any]) -> tuple[int, int]:
        ids = sample['input_ids']
        return ids.shape[-1], int(torch.isin(ids, self._image_token_ids).sum())

    def _batch(self, samples: list[Any], share: RankShare) -> Any:
        batch = self._collate(samples)
        if not isinstance(batch, Mapping):
            return batch
        batch = zero_weight(batch) if share.is_copy else {**batch, MICROBATCH_IDS: share.microbatch_ids}
        if self._pin:
            batch = {key: value.pin_memory() if isinstance(value, torch.Tensor) else value
                     for key, value in batch.items()}  # fmt: skip
        return batch
