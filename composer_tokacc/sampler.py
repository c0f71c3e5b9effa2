# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that shares each global batch among the ranks by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from composer.utils import dist
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.ahead import map_ahead
from composer_tokacc.planning import CostModel, MicrobatchPlan, plan_microbatches
from composer_tokacc.window import EpochOrder, num_windows

__all__ = ['PlannedBatch', 'RegroupingBatchSampler']


class PlannedBatch(list[int]):
    """One rank's sample indices of a global batch, microbatch by microbatch."""

    microbatch_ids: list[int]
    """For each index, which microbatch of the rank it was planned into; from 0, never falling."""

    def __init__(self, indices: Sequence[int] = (), microbatch_ids: Sequence[int] = ()) -> None:
        super().__init__(indices)
        self.microbatch_ids = list(microbatch_ids)


class RegroupingBatchSampler(DistributedSampler):
    """Deals the samples of each global batch so that all ranks finish together, with almost no padding.

    Global batch ``b`` holds exactly the samples that torch's ``DistributedSampler`` (same seed, epoch, `shuffle` and
    `drop_last`) with ``global_batch_size / num_replicas`` samples a rank gives to all ranks together, for every ``b``
    and every number of ranks: only who computes what with whom changes. With exact token accumulation that changes no
    gradient. Ranks may get unequal numbers of samples, never none. For torch's repetition of samples without
    `drop_last` see :class:`composer_tokacc.window.EpochOrder`.

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
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_global_rank() if rank is None else rank
        num_samples = len(dataset)  # pyright: ignore[reportArgumentType]
        _check_batch_size(global_batch_size, num_replicas, num_samples, drop_last)
        self.lengths = _table('lengths', lengths, num_samples, 1, 'max_tokens', max_tokens)
        self.image_tokens = None
        if image_tokens is not None:
            self.image_tokens = _table(
                'image_tokens', image_tokens, num_samples, 0, 'max_image_tokens', max_image_tokens
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.global_batch_size = global_batch_size
        self._plan_window = partial(
            plan_microbatches,
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            objective=objective,
            cost=cost,
            width_multiple=width_multiple,
        )
        self._plan_window(self.lengths[:1], num_ranks=1, image_tokens=self._images([0]))  # refuses bad options now
        self.first_batch = 0
        """Where the next iteration starts."""
        self._position = 0

    def __len__(self) -> int:
        """Global batches of an epoch, the same on all ranks."""
        return num_windows(len(self.lengths), self.global_batch_size, self.num_replicas, drop_last=self.drop_last)

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

    def skip_to(self, batch: int) -> None:
        """Lets the next iteration start at global batch `batch`; what comes before is not even planned."""
        if not 0 <= batch <= len(self):
            raise ValueError(f'`batch` must be in [0, {len(self)}], got: {batch}.')
        self.first_batch = self._position = batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is: ints and bools only, valid for any number of ranks."""
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

    def _identity(self) -> dict[str, int | bool]:
        """What must be equal for the global batches to be equal."""
        return {
            'num_samples': len(self.lengths),
            'global_batch_size': self.global_batch_size,
            'seed': self.seed,
            'shuffle': self.shuffle,
            'drop_last': self.drop_last,
        }

    def _order(self) -> EpochOrder:
        return EpochOrder(
            len(self.lengths),
            self.global_batch_size,
            self.num_replicas,
            drop_last=self.drop_last,
            seed=self.seed + self.epoch if self.shuffle else None,
        )

    def _share(self, window: np.ndarray) -> PlannedBatch:
        share = PlannedBatch()
        members = window.tolist()
        for microbatch in self._plan(window).ranks[self.rank]:
            if not microbatch.filled:  # the split adds zero-weight rows where they are needed
                number = share.microbatch_ids[-1] + 1 if share else 0
                share.extend(members[index] for index in microbatch.indices)
                share.microbatch_ids.extend([number] * len(microbatch.indices))
        return share

    def _plan(self, window: np.ndarray) -> MicrobatchPlan:
        images = self._images(window)
        plan = self._plan_window(self.lengths[window], num_ranks=self.num_replicas, image_tokens=images)
        if any(all(microbatch.filled for microbatch in rank) for rank in plan.ranks):
            # Columns by modality can leave a rank without samples, and an empty batch cannot be collated.
            plan = self._plan_window(
                self.lengths[window], num_ranks=self.num_replicas, image_tokens=images, objective='ddp'
            )
        return plan

    def _images(self, window: np.ndarray | list[int]) -> np.ndarray | None:
        return None if self.image_tokens is None else self.image_tokens[window]


def _check_batch_size(global_batch_size: int, num_replicas: int, num_samples: int, drop_last: bool) -> None:
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


def _table(
    name: str, values: Sequence[int] | np.ndarray, num_samples: int, least: int, cap_name: str, cap: int | None
) -> np.ndarray:
    """One non-negative int per sample, int64 (n,), none over the cap."""
    table = np.asarray(values)
    if table.shape != (num_samples,):
        raise ValueError(
            f'`{name}` must have one entry per sample, got: shape {table.shape} for {num_samples} samples. Was the '
            'table made for another dataset?'
        )
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
