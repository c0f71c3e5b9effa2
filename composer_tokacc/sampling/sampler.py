# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that shares each global batch among the ranks by length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from composer.utils import dist
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.planning import CostModel, CutOptions, MicrobatchPlan
from composer_tokacc.sampling.mixture import Mixture, mixed_batches
from composer_tokacc.sampling.rank_share import LoadPlanner, RankShare

__all__ = ['RegroupingBatchSampler', 'map_ahead']

Item = TypeVar('Item')
Result = TypeVar('Result')


class RegroupingBatchSampler(DistributedSampler):
    """Deals the samples of each global batch so that all ranks finish together, with almost no padding.

    Global batch ``b`` holds exactly the samples that torch's ``DistributedSampler`` (same seed, epoch, `shuffle` and
    `drop_last`) with ``global_batch_size / num_replicas`` samples a rank gives to all ranks together, for every ``b``
    and every number of ranks: only who computes what with whom changes. With exact token accumulation that changes no
    gradient. The one difference is that no sample is ever repeated: without `drop_last` the last global batch holds the
    samples that are left, which torch's sampler fills up to a multiple of the ranks.

    Ranks may get unequal numbers of samples. Where there are fewer samples than ranks some get a copy of another rank's
    sample, which is marked (``RankShare.is_copy``) and must weigh nothing.

    What it yields is a pure function of its arguments, the epoch and the rank; nothing is communicated. Beside the
    order of the epoch and the lengths (16 bytes a sample) it holds a few global batches. The next ones are planned in
    a background thread while the loader reads. Use it with :class:`composer_tokacc.RegroupingDataLoader`, or as
    ``DataLoader(batch_sampler=...)``.

    Args:
        dataset: Map-style dataset.
        lengths: Length of each sample in tokens, image tokens included, (n,). Estimates will do: the split measures
            again and cuts anew what would break the cap.
        global_batch_size: Samples of an optimizer step over all ranks.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        seed: Seed of the order, the same on all ranks.
        shuffle: Whether each epoch has another order.
        drop_last: Whether the last, smaller global batch of an epoch is left out.
        num_replicas: Number of ranks. Default: as launched.
        rank: This rank. Default: as launched.
        cost: Cost model of a microbatch.
        image_tokens: Image tokens of each sample, (n,).
        vision_cost: Cost of each sample in the vision tower, (n,), as :meth:`.CostModel.tower` has it, where image
            tokens do not tell it.
        max_image_tokens: Image budget of a microbatch.
        objective: ``'ddp'``, or ``'fsdp'`` where ranks must have equal numbers of microbatches.
        width_multiple: As given to ``token_data_spec``.
        mixture: Shares of several datasets, `dataset` being their ``ConcatDataset``. Then
            ``sampling.mixture.mixed_batches`` says what a global batch holds.
        modality: ``'mixed'``, or ``'per_step'`` for global batches of one medium each: with images, or without.
            Likewise.
        media: Medium of each sample for ``'per_step'``, (n,) ints. Default: whether it has `image_tokens`.

    Raises:
        ValueError: If an argument is out of range; says which and how to mend it.

    Example:
        >>> sampler = RegroupingBatchSampler(range(6), lengths=[7, 2, 8, 2, 2, 7], global_batch_size=6, max_tokens=16,
        ...                                  shuffle=False, num_replicas=2, rank=1)
        >>> [share.microbatches for share in sampler]
        [[[2], [1, 3, 4]]]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        lengths: Sequence[int] | np.ndarray,
        global_batch_size: int,
        max_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        cost: CostModel | None = None,
        image_tokens: Sequence[int] | np.ndarray | None = None,
        vision_cost: Sequence[float] | np.ndarray | None = None,
        max_image_tokens: int | None = None,
        objective: Literal['ddp', 'fsdp'] = 'ddp',
        width_multiple: int = 1,
        mixture: Mixture | None = None,
        modality: Literal['mixed', 'per_step'] = 'mixed',
        media: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_global_rank() if rank is None else rank
        num_samples = len(dataset)  # pyright: ignore[reportArgumentType]
        if mixture is not None and sum(mixture.sizes) != num_samples:
            raise ValueError(
                f'`mixture` must have the sizes of the datasets in `dataset`, got: {list(mixture.sizes)} for '
                f'{num_samples} samples. Use torch.utils.data.ConcatDataset.'
            )
        in_epoch = num_samples if mixture is None else mixture.num_samples
        _check_batch_size(global_batch_size, num_replicas, in_epoch, drop_last)
        self.lengths = _int_table('lengths', lengths, num_samples, 1, 'max_tokens', max_tokens)
        self.image_tokens = None
        if image_tokens is not None:
            self.image_tokens = _int_table(
                'image_tokens', image_tokens, num_samples, 0, 'max_image_tokens', max_image_tokens
            )
        self._vision_cost = None
        if vision_cost is not None:
            self._vision_cost = _table('vision_cost', vision_cost, num_samples).astype(np.float64)
        self.modality = modality
        self.media = _media_of(modality, media, self.image_tokens, num_samples)
        self.mixture = Mixture([num_samples]) if mixture is None and modality == 'per_step' else mixture
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.global_batch_size = global_batch_size
        options = CutOptions(
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            objective=objective,
            cost=CostModel() if cost is None else cost,
            width_multiple=width_multiple,
        )
        self.planner = LoadPlanner(num_replicas, options)
        self._plan(np.zeros(1, dtype=np.int64))  # refuses bad options now
        self.first_batch = 0
        """Where the next iteration starts."""
        self._position = 0
        self._kept = (self.epoch, self._batches_of_epoch())
        self._num_batches = len(self._kept[1])

    def __len__(self) -> int:
        """Global batches of an epoch, the same in every epoch and on all ranks."""
        return self._num_batches

    def __iter__(self) -> Iterator[RankShare]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yields this rank's share of each global batch of the epoch, from the one that was skipped to."""
        first, self.first_batch = self.first_batch, 0
        shares = map_ahead(self._share, self._batches()[first:])
        for self._position, share in enumerate(shares, start=first + 1):
            yield share

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; another epoch than the present one starts at its beginning."""
        if epoch != self.epoch:
            self.first_batch = self._position = 0
        super().set_epoch(epoch)

    def window(self, batch: int) -> list[int]:
        """Samples of global batch `batch` of this epoch over all ranks, in the order of torch's sampler."""
        return self._batches()[batch].tolist()

    def plan(self, batch: int) -> MicrobatchPlan:
        """Plan of global batch `batch` of this epoch over all ranks; its indices are places in :meth:`window`."""
        return self._plan(self._batches()[batch])

    def has_only_copies(self, batch: int) -> bool:
        """Whether this rank has no sample of global batch `batch` of this epoch, but a copy that must weigh nothing."""
        window = self._batches()[batch]
        return len(window) < self.num_replicas and self._share(window).is_copy

    def skip_to(self, batch: int) -> None:
        """Lets the next iteration start at global batch `batch`; what comes before is not even planned."""
        if not 0 <= batch <= len(self):
            raise ValueError(f'`batch` must be in [0, {len(self)}], got: {batch}.')
        self.first_batch = self._position = batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is: plain values only, valid for any number of ranks."""
        return {'epoch': self.epoch, 'batch': self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` was taken, be it on another number of ranks.

        Raises:
            ValueError: If the state is of other global batches, or has keys missing or left over.
        """
        expected = {'epoch', 'batch', *self._identity()}
        if state.keys() != expected:
            raise ValueError(f'`state` must have the keys {sorted(expected)}, got: {sorted(state)}.')
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f'`{name}` must be that of the saved run for the same global batches, got: {value}, saved: '
                    f'{state[name]}. Restore it, or start without the saved state.'
                )
        super().set_epoch(state['epoch'])
        self.skip_to(state['batch'])

    def _identity(self) -> dict[str, Any]:
        """What must be equal for the global batches to be equal."""
        mixed: dict[str, Any] = {}
        if self.mixture is not None:
            mixed = {'quotas': [str(quota) for quota in self.mixture.quotas], 'modality': self.modality}
        return {
            **mixed,
            'num_samples': len(self.lengths),
            'global_batch_size': self.global_batch_size,
            'seed': self.seed,
            'shuffle': self.shuffle,
            'drop_last': self.drop_last,
        }

    def _batches(self) -> list[np.ndarray]:
        """Samples of each global batch of the present epoch; kept, because it takes time in proportion to the dataset.

        Plain arrays: each is a view of the one order of the epoch.
        """
        if self._kept[0] != self.epoch:
            self._kept = (self.epoch, self._batches_of_epoch())
        return self._kept[1]

    def _batches_of_epoch(self) -> list[np.ndarray]:
        seed = self.seed if self.shuffle else None
        options: dict[str, Any] = {'drop_last': self.drop_last, 'seed': seed, 'epoch': self.epoch}
        if self.mixture is not None:
            return mixed_batches(self.mixture, self.global_batch_size, media=self.media, **options)
        return torchs_batches(len(self.lengths), self.global_batch_size, **options)

    def _share(self, window: np.ndarray) -> RankShare:
        return RankShare.from_plan(self._plan(window).ranks[self.rank], window.tolist())

    def _plan(self, window: np.ndarray) -> MicrobatchPlan:
        images = None if self.image_tokens is None else self.image_tokens[window]
        towers = None if self._vision_cost is None else self._vision_cost[window]
        return self.planner.plan(self.lengths[window], images, towers)


def torchs_batches(
    num_samples: int, global_batch_size: int, *, drop_last: bool, seed: int | None, epoch: int
) -> list[np.ndarray]:
    """The global batches of one epoch: those of torch's DistributedSampler, each sample once.

    Rank ``r`` of ``W`` gets positions ``r, r + W, ...`` of torch's order, ``G / W`` of them in a batch; so the ranks
    together get positions ``b * G`` to ``(b + 1) * G``, whatever ``W`` is. Without `drop_last` torch moreover repeats
    the start of the order until every rank has equally many samples, which makes the last step of an epoch another one
    for each ``W``. That is left out here: the last global batch holds the samples that are left, and no other.

    Args:
        num_samples: Samples of the dataset.
        global_batch_size: Samples of a global batch, ``G``.
        drop_last: Whether the last, smaller global batch is left out.
        seed: Seed of the run; None keeps the dataset's own order.
        epoch: Number of the epoch.

    Returns:
        Indices of the samples of each global batch, int64, in torch's order.
    """
    if seed is None:
        order = np.arange(num_samples)
    else:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    end = num_samples - num_samples % global_batch_size if drop_last else num_samples
    return [order[start : start + global_batch_size] for start in range(0, end, global_batch_size)]


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], *, depth: int = 2) -> Iterator[Result]:
    """``map(function, items)``, with up to `depth` further results computed in a background thread.

    The thread starts with the first item, and is joined when the iterator ends, is closed or is garbage collected; an
    error of `function` is raised where its result would have been yielded.

    Args:
        function: What to compute. It must be safe to call from another thread.
        items: Its arguments, drawn lazily: at most `depth` more than results were yielded.
        depth: How many results may wait.

    Yields:
        The results, in order.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix='map_ahead')
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _media_of(
    modality: str, media: Sequence[int] | np.ndarray | None, image_tokens: np.ndarray | None, num_samples: int
) -> np.ndarray | None:
    """Medium of each sample, or None where global batches mix them."""
    if modality not in ('mixed', 'per_step'):
        raise ValueError(f"`modality` must be 'mixed' or 'per_step', got: {modality!r}.")
    if modality == 'mixed':
        return None
    if media is not None:
        return _int_table('media', media, num_samples, 0, 'media', None)
    if image_tokens is None:
        raise ValueError("`image_tokens` or `media` must be given with modality='per_step', got: neither.")
    return (image_tokens > 0).astype(np.int64)


def _check_batch_size(global_batch_size: int, num_replicas: int, num_samples: int, drop_last: bool) -> None:
    """Refuses a global batch that ranks cannot share, or that an epoch cannot fill; `num_samples` an epoch."""
    if num_samples < 1:
        raise ValueError('`dataset` must hold at least one sample, got: none.')
    if global_batch_size < 1 or global_batch_size % num_replicas:
        above = max(-(-global_batch_size // num_replicas), 1) * num_replicas
        raise ValueError(
            f'`global_batch_size` must be a positive multiple of the number of ranks, got: {global_batch_size} on '
            f'{num_replicas} ranks. Set it to {above}, or launch another number of ranks.'
        )
    if drop_last and num_samples < global_batch_size:
        raise ValueError(
            f'`global_batch_size` must be at most the dataset with `drop_last`, got: {global_batch_size} > '
            f'{num_samples} samples. Lower it or set drop_last=False.'
        )


def _table(name: str, values: Sequence[float] | np.ndarray, num_samples: int) -> np.ndarray:
    """One number per sample, (n,)."""
    table = np.asarray(values)
    if table.shape != (num_samples,):
        raise ValueError(
            f'`{name}` must have one entry per sample, got: shape {table.shape} for {num_samples} samples. Was the '
            'table made for another dataset?'
        )
    return table


def _int_table(
    name: str, values: Sequence[int] | np.ndarray, num_samples: int, least: int, cap_name: str, cap: int | None
) -> np.ndarray:
    """One non-negative int per sample, int64 (n,), none over the cap."""
    table = _table(name, values, num_samples)
    if table.dtype.kind not in 'iu':
        raise ValueError(f'`{name}` must be integers, got: {table.dtype}. Pass token counts.')
    table = table.astype(np.int64)
    lowest, highest = int(table.argmin()), int(table.argmax())
    if table[lowest] < least:
        raise ValueError(f'`{name}` must be at least {least}, got: {table[lowest]} at sample {lowest}. Count it anew.')
    if cap is not None and table[highest] > cap:
        raise ValueError(
            f'`{cap_name}` must be at least the longest sample, got: {cap} < {table[highest]} (sample {highest}). '
            'Raise it, or leave the sample out.'
        )
    return table
