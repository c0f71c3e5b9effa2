# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that assigns each global batch to the ranks by length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.collectives import get_global_rank, get_world_size
from composer_tokacc.planning import (
    CostModel,
    CutOptions,
    MicrobatchPlan,
    Table,
    check_choice,
    check_count,
    check_kind,
    check_state,
    checked_table,
)
from composer_tokacc.sampling.mixture import LossShares, Mixture, mixed_batches
from composer_tokacc.sampling.rank_assignment import LoadPlanner, RankAssignment, check_global_batch


class RegroupingBatchSampler(DistributedSampler):
    """Assigns the samples of each global batch so that all ranks finish together, with almost no padding.

    Global batch ``b`` holds exactly the samples that torch's ``DistributedSampler`` (same seed, epoch, `shuffle` and
    `drop_last`) with ``global_batch_size / num_replicas`` samples a rank gives to all ranks together, for every ``b``
    and every number of ranks: only who computes what with whom changes. With exact token accumulation that changes no
    gradient. The one difference is that no sample is ever repeated: without `drop_last` the last global batch holds the
    samples that are left, which torch's sampler fills up to a multiple of the ranks.

    Ranks may get unequal numbers of samples. Where there are fewer samples than ranks some get a copy of another rank's
    sample, which is marked (``RankAssignment.is_copy``) and must weigh nothing.

    What it yields is a pure function of its arguments, the epoch and the rank; nothing is communicated. Beside the
    order of the epoch and the lengths (16 bytes a sample) it holds a few global batches. The next ones are planned in
    a background thread while the loader reads. Use it with :class:`composer_tokacc.RegroupingDataLoader`, or as
    ``DataLoader(batch_sampler=...)``.

    Args:
        dataset: Map-style dataset.
        lengths: Length of each sample in tokens, image tokens included, (n,). Estimates will do: the split measures
            again and cuts again what would break the cap.
        global_batch_size: Samples of an optimizer step over all ranks.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        seed: Seed of the order, the same on all ranks.
        shuffle: Whether each epoch has another order.
        drop_last: Whether the last, smaller global batch of an epoch is left out.
        num_replicas: Number of ranks. Default: as launched.
        rank: This rank. Default: as launched.
        cost, image_tokens, vision_cost, max_image_tokens, objective: As for :func:`.plan_microbatches`.
        width_multiple: As given to ``token_data_spec``.
        mixture: Shares of several datasets, `dataset` being their ``ConcatDataset``. Then
            ``sampling.mixture.mixed_batches`` says what a global batch holds.
        modality: ``'mixed'``, or ``'per_step'`` for global batches of one modality each: with images, or without.
            Likewise.
        media: Modality of each sample for ``'per_step'``, (n,) ints. Default: whether it has `image_tokens`.
        loss_shares: What tokens weigh so that each dataset has its share of a step. Batches then have ``loss_weights``,
            for ``TokenAccumulation(token_weights='column')``.

    Raises:
        ValueError: If an argument is out of range; says which and how to fix it.

    Example:
        >>> sampler = RegroupingBatchSampler(range(6), lengths=[7, 2, 8, 2, 2, 7], global_batch_size=6, max_tokens=16,
        ...                                  shuffle=False, num_replicas=2, rank=1)
        >>> [assignment.microbatches for assignment in sampler]
        [[[2], [1, 3, 4]]]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        lengths: Table,
        global_batch_size: int,
        max_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        cost: CostModel | None = None,
        image_tokens: Table | None = None,
        vision_cost: Table | None = None,
        max_image_tokens: int | None = None,
        objective: Literal['ddp', 'fsdp'] = 'ddp',
        width_multiple: int = 1,
        mixture: Mixture | None = None,
        modality: Literal['mixed', 'per_step'] = 'mixed',
        media: Table | None = None,
        loss_shares: LossShares | None = None,
    ) -> None:
        num_replicas = get_world_size() if num_replicas is None else num_replicas
        rank = get_global_rank() if rank is None else rank
        num_samples = length_of(dataset)
        _check_batch_size(global_batch_size, num_replicas, num_samples, mixture, drop_last)
        _check_order(rank, num_replicas, seed, shuffle, drop_last)
        super().__init__(dataset, num_replicas, rank, shuffle, int(seed), drop_last)
        self.planner = LoadPlanner(num_replicas, CutOptions(
            max_tokens=max_tokens, max_image_tokens=max_image_tokens, width_multiple=width_multiple,
            objective=objective, cost=cost or CostModel(),
        ))  # fmt: skip
        self.global_batch_size, self.modality, self.loss_shares = global_batch_size, modality, loss_shares
        self._read_tables(num_samples, lengths, image_tokens, vision_cost, media)
        self.mixture = Mixture([num_samples]) if mixture is None and modality == 'per_step' else mixture
        self._plan(np.zeros(1, dtype=np.int64))  # refuses bad options now
        self.first_batch = self._position = 0  # where the next iteration starts; what was yielded of this one
        self._kept: tuple[int, list[np.ndarray]] = (-1, [])  # an epoch, and its global batches
        self._num_batches = len(self._batches())

    def _read_tables(
        self, num_samples: int, lengths: Table, images: Table | None, vision: Table | None, media: Table | None
    ) -> None:
        self.lengths = checked_table('lengths', lengths, num_samples, least=1)
        _check_cap(self.lengths, 'max_tokens', self.planner.options.max_tokens)
        self.image_tokens = self.media = self._vision_cost = None
        if images is not None:
            self.image_tokens = checked_table('image_tokens', images, num_samples)
            _check_cap(self.image_tokens, 'max_image_tokens', self.planner.options.max_image_tokens)
        if vision is not None:
            self._vision_cost = checked_table('vision_cost', vision, num_samples, dtype=np.float64)
        if self.loss_shares is not None:
            check_kind('loss_shares', self.loss_shares, LossShares)
            checked_table('loss_shares', self.loss_shares.loss_tokens, num_samples)
        check_choice('modality', self.modality, ('mixed', 'per_step'))
        if self.modality == 'per_step':
            if media is None and self.image_tokens is not None:
                media = np.sign(self.image_tokens)
            if media is None:
                raise ValueError("`image_tokens` or `media` must be given with modality='per_step', got: neither.")
            self.media = checked_table('media', media, num_samples)

    def __len__(self) -> int:
        """Global batches of an epoch, the same in every epoch and on all ranks."""
        return self._num_batches

    def __iter__(self) -> Iterator[RankAssignment]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yields this rank's assignment of each global batch of the epoch, from the one that was skipped to."""
        first, self.first_batch = self.first_batch, 0
        assignments = prefetch(self._assign, self._batches()[first:])
        for self._position, assignment in enumerate(assignments, start=first + 1):
            yield assignment

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; another epoch than the present one starts at its beginning."""
        _check_within('epoch', epoch)  # it is added to the seed
        if epoch != self.epoch:
            self.first_batch = self._position = 0
        super().set_epoch(int(epoch))

    def window(self, batch: int) -> list[int]:
        """Returns the samples of global batch `batch` of this epoch over all ranks, in the order of torch's sampler."""
        return self._window(batch).tolist()

    def plan(self, batch: int) -> MicrobatchPlan:
        """Returns the plan of global batch `batch` over all ranks; its indices are places in :meth:`window`."""
        return self._plan(self._window(batch))

    def has_only_copies(self, batch: int) -> bool:
        """Whether this rank has no sample of global batch `batch` of this epoch, but a copy that must weigh nothing."""
        window = self._window(batch)
        return len(window) < self.num_replicas and self._assign(window).is_copy

    def skip_to(self, batch: int) -> None:
        """Lets the next iteration start at global batch `batch`; what comes before is not even planned."""
        _check_within('batch', batch, 0, len(self))
        self.first_batch = self._position = batch

    def state_dict(self) -> dict[str, Any]:
        """Returns where the sampler is: plain values only, valid for any number of ranks."""
        return {'epoch': self.epoch, 'batch': self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` was taken, be it on another number of ranks.

        Raises:
            ValueError: If the state is of other global batches, or has keys missing or left over.
        """
        expected = {'epoch', 'batch', *self._identity()}
        check_state(state, expected, counts=('epoch', 'batch'))
        if left_over := state.keys() - expected:
            raise ValueError(f'`state` must have the keys {sorted(expected)} and no others, got: {sorted(left_over)}.')
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f'`{name}` must be that of the saved run for the same global batches, got: {value}, saved: '
                    f'{state[name]}. Restore it, or start without the saved state.'
                )
        super().set_epoch(state['epoch'])
        self.skip_to(state['batch'])

    def _identity(self) -> dict[str, Any]:
        """Returns what must be equal for the global batches to be equal."""
        mixed: dict[str, Any] = {}
        if self.mixture is not None:
            mixed = {'quotas': [str(quota) for quota in self.mixture.quotas], 'modality': self.modality}
        names = ('global_batch_size', 'seed', 'shuffle', 'drop_last')
        return {**mixed, 'num_samples': len(self.lengths), **{name: getattr(self, name) for name in names}}

    def _batches(self) -> list[np.ndarray]:
        # Kept, because they take time in proportion to the dataset. Each is a view of the one order of the epoch.
        if self._kept[0] != self.epoch:
            seed = self.seed if self.shuffle else None
            options: dict[str, Any] = {'drop_last': self.drop_last, 'seed': seed, 'epoch': self.epoch}
            if self.mixture is None:
                batches = torchs_batches(len(self.lengths), self.global_batch_size, **options)
            else:
                batches = mixed_batches(self.mixture, self.global_batch_size, media=self.media, **options)
            self._kept = (self.epoch, batches)
        return self._kept[1]

    def _window(self, batch: int) -> np.ndarray:
        batches = self._batches()
        _check_within('batch', batch, 0, len(batches) - 1)
        return batches[batch]

    def _assign(self, window: np.ndarray) -> RankAssignment:
        weights = None if self.loss_shares is None else self.loss_shares.weights(window).tolist()
        return RankAssignment.from_plan(self._plan(window).ranks[self.rank], window.tolist(), weights)

    def _plan(self, window: np.ndarray) -> MicrobatchPlan:
        images = None if self.image_tokens is None else self.image_tokens[window]
        vision = None if self._vision_cost is None else self._vision_cost[window]
        return self.planner.plan(self.lengths[window], images, vision)


def torchs_batches(
    num_samples: int, global_batch_size: int, *, drop_last: bool, seed: int | None, epoch: int
) -> list[np.ndarray]:
    """Returns the samples of each global batch of one epoch: those of torch's DistributedSampler, each once.

    Rank ``r`` of ``W`` gets positions ``r, r + W, ...`` of torch's order, ``G / W`` of them in a batch; so the ranks
    together get positions ``b * G`` to ``(b + 1) * G``, whatever ``W`` is. Without `drop_last` torch moreover repeats
    the start of the order until every rank has equally many samples, which makes the last step of an epoch another one
    for each ``W``. That is left out here: the last global batch holds the samples that are left, and no other. Without
    a seed samples keep the dataset's own order.
    """
    if seed is None:
        order = np.arange(num_samples)
    else:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    end = num_samples - num_samples % global_batch_size if drop_last else num_samples
    return [order[start : start + global_batch_size] for start in range(0, end, global_batch_size)]


def prefetch(function: Callable[[Any], Any], items: Iterable[Any], *, depth: int = 2) -> Iterator[Any]:
    """Yields ``map(function, items)``, with up to `depth` further results computed in a background thread.

    The thread starts with the first item, and is joined when the iterator ends, is closed or is garbage collected; an
    error of `function` is raised where its result would have been yielded. Items are drawn lazily.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch')
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def length_of(dataset: Any) -> int:
    """Returns how many samples a dataset has."""
    check_kind('dataset', dataset, Sized)
    return len(dataset)


def _check_order(rank: int, num_replicas: int, seed: int, shuffle: bool, drop_last: bool) -> None:
    """Refuses what gives torch's sampler no order, or a rank no part of it."""
    check_choice('rank', rank, range(num_replicas))
    check_choice('shuffle', shuffle, (True, False))
    check_choice('drop_last', drop_last, (True, False))
    _check_within('seed', seed)


def _check_within(name: str, value: int, least: int = -(2**62), most: int = 2**62) -> None:
    """Refuses what is no integer in a range; by default that of torch's seeds, to which an epoch is added."""
    if not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise ValueError(f'`{name}` must be an integer from {least} to {most}, got: {value!r}.')


def _check_batch_size(
    global_batch_size: int, num_replicas: int, num_samples: int, mixture: Mixture | None, drop_last: bool
) -> None:
    """Refuses a global batch that ranks cannot share, or that an epoch cannot fill."""
    if mixture is not None:
        check_kind('mixture', mixture, Mixture)
    if mixture is not None and sum(mixture.sizes) != num_samples:
        raise ValueError(
            f'`mixture` must have the sizes of the datasets in `dataset`, got: {list(mixture.sizes)} for '
            f'{num_samples} samples. Use torch.utils.data.ConcatDataset.'
        )
    num_samples = num_samples if mixture is None else mixture.num_samples  # of an epoch
    if num_samples < 1:
        raise ValueError('`dataset` must hold at least one sample, got: none.')
    check_count('num_replicas', num_replicas)
    check_global_batch(global_batch_size, num_replicas)
    if drop_last and num_samples < global_batch_size:
        raise ValueError(
            f'`global_batch_size` must be at most the dataset with `drop_last`, got: {global_batch_size} > '
            f'{num_samples} samples. Lower it or set drop_last=False.'
        )


def _check_cap(sizes: np.ndarray, name: str, cap: int | None) -> None:
    """Refuses samples that no microbatch may hold."""
    highest = int(sizes.argmax())
    if cap is not None and sizes[highest] > cap:
        raise ValueError(
            f'`{name}` must be at least the longest sample, got: {cap} < {sizes[highest]} (sample {highest}). '
            'Raise it, or leave the sample out.'
        )
