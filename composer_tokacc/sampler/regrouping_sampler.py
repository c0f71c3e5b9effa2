# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that shares each global batch among the ranks by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from composer.utils import dist
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.planning import CostModel, MicrobatchPlan
from composer_tokacc.sampler.ahead import map_ahead
from composer_tokacc.sampler.checks import check_batch_size, int_table, media_of
from composer_tokacc.sampler.load_plan import LoadPlanner, RankShare, only_copies
from composer_tokacc.sampler.mixture import Mixture, MixtureOrder, num_mixed_batches
from composer_tokacc.sampler.window import EpochOrder, num_windows

__all__ = ['PlannedBatch', 'RegroupingBatchSampler']


class PlannedBatch(list[int]):
    """One rank's sample indices of a global batch, microbatch by microbatch."""

    microbatch_ids: list[int]
    """For each index, which microbatch of the rank it was planned into; from 0, never falling."""
    is_copy: bool
    """Whether the rank has no sample, and the index is that of another rank's, to be computed without weight."""

    def __init__(
        self, indices: Sequence[int] = (), microbatch_ids: Sequence[int] = (), *, is_copy: bool = False
    ) -> None:
        super().__init__(indices)
        self.microbatch_ids = list(microbatch_ids)
        self.is_copy = is_copy


class RegroupingBatchSampler(DistributedSampler):
    """Deals the samples of each global batch so that all ranks finish together, with almost no padding.

    Global batch ``b`` holds exactly the samples that torch's ``DistributedSampler`` (same seed, epoch, `shuffle` and
    `drop_last`) with ``global_batch_size / num_replicas`` samples a rank gives to all ranks together, for every ``b``
    and every number of ranks: only who computes what with whom changes. With exact token accumulation that changes no
    gradient. The one difference is that no sample is ever repeated: without `drop_last` the last global batch holds the
    samples that are left, which torch's sampler fills up to a multiple of the ranks.

    Ranks may get unequal numbers of samples. Where there are fewer samples than ranks some get a copy of another rank's
    sample, which is marked (:attr:`PlannedBatch.is_copy`) and must weigh nothing.

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
        max_image_tokens: Image budget of a microbatch.
        objective: ``'ddp'``, or ``'fsdp'`` where ranks must have equal numbers of microbatches.
        width_multiple: As given to ``token_data_spec``.
        mixture: Shares of several datasets, `dataset` being their ``ConcatDataset``. Then
            :class:`composer_tokacc.sampler.mixture.MixtureOrder` says what a global batch holds.
        modality: ``'mixed'``, or ``'per_step'`` for global batches of one medium each: with images, or without.
            Likewise.
        media: Medium of each sample for ``'per_step'``, (n,) ints. Default: whether it has `image_tokens`.

    Raises:
        ValueError: If an argument is out of range; says which and how to mend it.

    Example:
        >>> sampler = RegroupingBatchSampler(range(6), lengths=[7, 2, 8, 2, 2, 7], global_batch_size=6, max_tokens=16,
        ...                                  shuffle=False, num_replicas=2, rank=1)
        >>> [(batch, batch.microbatch_ids) for batch in sampler]
        [([2, 1, 3, 4], [0, 1, 1, 1])]
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
        check_batch_size(global_batch_size, num_replicas, in_epoch, drop_last)
        self.lengths = int_table('lengths', lengths, num_samples, 1, 'max_tokens', max_tokens)
        self.image_tokens = None
        if image_tokens is not None:
            self.image_tokens = int_table(
                'image_tokens', image_tokens, num_samples, 0, 'max_image_tokens', max_image_tokens
            )
        self.modality = modality
        self.media = media_of(modality, media, self.image_tokens, num_samples)
        self.mixture = Mixture([num_samples]) if mixture is None and modality == 'per_step' else mixture
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.global_batch_size = global_batch_size
        if self.mixture is not None:
            self._num_mixed = num_mixed_batches(self.mixture, global_batch_size, drop_last=drop_last, media=self.media)
        self._planner = LoadPlanner(
            num_ranks=num_replicas,
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            objective=objective,
            cost=cost,
            width_multiple=width_multiple,
        )
        self._plan(np.zeros(1, dtype=np.int64))  # refuses bad options now
        self.first_batch = 0
        """Where the next iteration starts."""
        self._position = 0

    def __len__(self) -> int:
        """Global batches of an epoch, the same on all ranks."""
        if self.mixture is not None:
            return self._num_mixed
        return num_windows(len(self.lengths), self.global_batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[PlannedBatch]:
        """Yields this rank's share of each global batch of the epoch, from the one that was skipped to."""
        first, self.first_batch = self.first_batch, 0
        order = self._order()
        shares = map_ahead(lambda batch: self._share(order.window(batch)), range(first, len(self)))
        for self._position, share in enumerate(shares, start=first + 1):
            yield share

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; another epoch than the present one starts at its beginning."""
        if epoch != self.epoch:
            self.first_batch = self._position = 0
        super().set_epoch(epoch)

    def window(self, batch: int) -> list[int]:
        """Samples of global batch `batch` of this epoch over all ranks, in the order of torch's sampler."""
        return self._order().window(batch).tolist()

    def plan(self, batch: int) -> MicrobatchPlan:
        """Plan of global batch `batch` of this epoch over all ranks; its indices are places in :meth:`window`."""
        return self._plan(self._order().window(batch))

    def has_only_copies(self, batch: int) -> bool:
        """Whether this rank has no sample of global batch `batch` of this epoch, but a copy that must weigh nothing."""
        window = self._order().window(batch)
        return len(window) < self.num_replicas and only_copies(self._plan(window).ranks[self.rank])

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

    def _order(self) -> EpochOrder | MixtureOrder:
        if self.mixture is not None:
            return MixtureOrder(
                self.mixture,
                self.global_batch_size,
                drop_last=self.drop_last,
                seed=self.seed if self.shuffle else None,
                epoch=self.epoch,
                media=self.media,
            )
        return EpochOrder(
            len(self.lengths), self.global_batch_size, seed=self.seed + self.epoch if self.shuffle else None
        )

    def _share(self, window: np.ndarray) -> PlannedBatch:
        members = window.tolist()
        share = RankShare.of(self._plan(window).ranks[self.rank])
        return PlannedBatch([members[index] for index in share.indices], share.microbatch_ids, is_copy=share.is_copy)

    def _plan(self, window: np.ndarray) -> MicrobatchPlan:
        images = None if self.image_tokens is None else self.image_tokens[window]
        return self._planner.plan(self.lengths[window], images)
