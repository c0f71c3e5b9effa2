# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that assigns each global batch to the ranks by length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.collectives import get_global_rank, get_world_size
from composer_tokacc.plan_agreement import Facts, PlanRecord, checksum_of, extended_checksum, table_facts
from composer_tokacc.planning import (
    CAPPED_SIZES,
    CostModel,
    CutOptions,
    MicrobatchPlan,
    Rows,
    Table,
    check_choice,
    check_count,
    check_kind,
    check_state,
    checked_table,
)
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.global_batches import GlobalBatches, Stages, check_cap, check_global_batch
from composer_tokacc.sampling.mixture import LossShares, Mixture
from composer_tokacc.sampling.passes import Item, Passes
from composer_tokacc.sampling.rank_assignment import RankAssignment, plan_batch

Result = TypeVar('Result')


class RegroupingBatchSampler(DistributedSampler):
    """Gives each rank equal work, with almost no padding, by assigning the samples of each global batch by length.

    With one `global_batch_size`, a global batch holds exactly the samples that torch's ``DistributedSampler`` (same
    seed, epoch, `shuffle` and `drop_last`) gives to all ranks together, for every number of ranks. Only the grouping of
    samples into microbatches and ranks changes. With exact token accumulation that changes no gradient. The one
    difference is that no sample counts twice: without `drop_last` the last global batch holds the samples that are
    left, while torch's sampler repeats samples to fill it up to a multiple of the ranks.

    With `global_batch_tokens`, or a schedule of `global_batch_size`, the same order of samples is cut at other places,
    which are the same for every number of ranks, too. A global batch by tokens takes samples until the next one would
    lift the tokens of the epoch above the next multiple of `global_batch_tokens`. So every epoch has equally many
    global batches, and a step differs from `global_batch_tokens` by less than the longest sample. :meth:`window_tokens`
    returns the tokens of each. With a schedule, epochs have unequal numbers of global batches. Then ``len()`` raises
    TypeError, and Composer needs a ``max_duration`` in tokens, samples or batches.

    Ranks may get unequal numbers of samples. If there are fewer samples than ranks, some ranks get a copy of another
    rank's sample, which is marked (``RankAssignment.is_copy``) and must weigh nothing.

    Its assignments are a pure function of its arguments, the epoch and the rank. Nothing is communicated. It holds the
    order of the epoch, the lengths (16 bytes a sample together) and a few global batches. The next ones are planned in
    a background thread while the loader reads. Use it with :class:`composer_tokacc.RegroupingDataLoader`, or as
    ``DataLoader(batch_sampler=...)``.

    :meth:`state_dict` returns the place of the iterator that has come furthest in the epoch. So a look at some batch
    (``next(iter(sampler))``) does not move the place of a run that is further. After :meth:`load_state_dict` or
    :meth:`skip_to` every iteration of the epoch starts at that place, until one reaches the end of the epoch.

    Args:
        dataset: Map-style dataset.
        lengths: Length of each sample in tokens, image tokens included, (n,). Estimates are enough: the split measures
            the rows and cuts a microbatch that would break the cap.
        global_batch_size: Samples of an optimizer step over all ranks. Or its schedule, a list of (start, size): a
            start is an optimizer step of the run (``1000`` or ``'1000ba'``) or a number of trained tokens
            (``'5000000tok'``), and the first one is 0. A start is counted as if every earlier epoch was read to its
            end.
        global_batch_tokens: Tokens of an optimizer step over all ranks, by `lengths`, instead of `global_batch_size`.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        seed: Seed of the order, the same on all ranks.
        shuffle: Whether each epoch has another order.
        drop_last: Whether the last, smaller global batch of an epoch is left out.
        num_replicas: Number of ranks. Default: as launched.
        rank: This rank. Default: as launched.
        cost, image_tokens, loss_tokens, vision_cost, max_image_tokens, max_loss_tokens, objective: As for
            :func:`.plan_microbatches`.
        width_multiple: As given to ``token_data_spec``.
        mixture: Shares of several datasets, `dataset` being their ``ConcatDataset``. Then
            every global batch has each dataset's share.
        modality: ``'mixed'``, or ``'per_step'`` for global batches of one modality each: with images, or without.
        media: Modality of each sample for ``'per_step'``, (n,) ints. Default: whether it has `image_tokens`.
        loss_shares: Weights of tokens, so that each dataset has its share of a step. Batches then have
            ``loss_weights``, for ``TokenAccumulation(token_weights='column')``.

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
        global_batch_size: int | Stages | None = None,
        global_batch_tokens: int | None = None,
        max_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        cost: CostModel | None = None,
        image_tokens: Table | None = None,
        loss_tokens: Table | None = None,
        vision_cost: Table | None = None,
        max_image_tokens: int | None = None,
        max_loss_tokens: int | None = None,
        objective: Literal['ddp', 'fsdp'] = 'ddp',
        width_multiple: int = 1,
        mixture: Mixture | None = None,
        modality: Literal['mixed', 'per_step'] = 'mixed',
        media: Table | None = None,
        loss_shares: LossShares | None = None,
    ) -> None:
        # The rank and the order of samples, which torch's class keeps.
        if num_replicas is None:
            num_replicas = get_world_size()
        if rank is None:
            rank = get_global_rank()
        num_samples = length_of(dataset)
        check_count('num_replicas', num_replicas)
        _check_within('rank', rank, 0, num_replicas - 1)
        check_choice('shuffle', shuffle, (True, False))
        check_choice('drop_last', drop_last, (True, False))
        _check_within('seed', seed)
        super().__init__(dataset, num_replicas, rank, shuffle, int(seed), drop_last)
        # Sizes of the samples and caps of a microbatch. Bad tables are refused here, before the first epoch.
        options = CutOptions(
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            max_loss_tokens=max_loss_tokens,
            width_multiple=width_multiple,
            objective=objective,
            cost=cost or CostModel(),
        )
        self.rows = Rows(
            checked_table('lengths', lengths, num_samples, least=1),
            options,
            image_tokens=image_tokens,
            loss_tokens=loss_tokens,
            vision_cost=vision_cost,
        )
        _check_samples_fit(self.rows)
        self.lengths = self.rows.lengths
        # The samples of each global batch.
        check_choice('modality', modality, ('mixed', 'per_step'))
        self.modality = modality
        self.media: np.ndarray | None = None
        if modality == 'per_step':
            self.media = _modality_of_samples(media, self.rows)
            # Only mixtures are divided by modality, so a single dataset becomes a mixture of one.
            mixture = mixture or Mixture([num_samples])
        self.mixture = mixture
        self._global_batches = GlobalBatches(
            self.lengths,
            samples=global_batch_size,
            tokens=global_batch_tokens,
            seed=self.seed if shuffle else None,
            drop_last=drop_last,
            mixture=mixture,
            media=self.media,
        )
        if global_batch_tokens is None:
            for size in self._global_batches.sizes:
                check_global_batch(size, num_replicas)
        self.global_batch_size = max(self._global_batches.sizes)
        """Samples of a global batch: of the largest one with a schedule, on average with `global_batch_tokens`."""
        if loss_shares is not None:
            check_kind('loss_shares', loss_shares, LossShares)
            checked_table('loss_shares', loss_shares.loss_tokens, num_samples)
        self.loss_shares = loss_shares
        # The place of the run.
        self.first_batch = 0
        """The global batch that the next iteration starts at."""
        self.start_of_loader: int | None = None
        """Set by a loader while it makes its iterator, which starts here. Torch calls `iter`, which has no arguments.

        The sampler then does not note its progress. The loader has it read ahead, so the loader notes the batches that
        it yields.
        """
        self.passes = Passes()
        self._compared_epoch: int | None = None
        """The first epoch that is iterated. In it the ranks compare their datasets.

        All ranks read a few samples in addition, the witnesses. That is needed once, because a dataset keeps its order.
        """

    def __len__(self) -> int:
        """Global batches of an epoch, the same in every epoch and on all ranks.

        Raises:
            TypeError: If epochs have unequal numbers of global batches. Composer takes such a loader for one of unknown
                length, and reads each epoch to its end.
        """
        if not self._global_batches.is_same_every_epoch:
            raise TypeError(
                'Epochs have unequal numbers of global batches here, because of a schedule of `global_batch_size`, or '
                'of `global_batch_tokens` with a mixture of parts of datasets. Use `num_batches` for that of the '
                'present epoch, and give the Trainer a `max_duration` in tokens, samples or batches.'
            )
        return self.num_batches

    @property
    def num_batches(self) -> int:
        """Global batches of the present epoch, the same on all ranks."""
        return len(self._batches())

    def __iter__(self) -> Iterator[RankAssignment]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns this rank's assignment of each global batch of the epoch, from `first_batch` on."""
        if self._compared_epoch is None:
            self._compared_epoch = self.epoch
        if self.start_of_loader is not None:
            return self._assignments(self.epoch, self.start_of_loader)
        first = self.first_batch
        assignments = self._assignments(self.epoch, first)
        return noting_progress(self, assignments, self.epoch, first)

    def _assignments(self, epoch: int, first: int) -> Iterator[RankAssignment]:
        """Yields this rank's assignment of each global batch from `first` on, the first one with the witnesses."""
        windows = self._global_batches.of_epoch(epoch)
        # See `_compared_epoch`.
        needs_witnesses = self.num_replicas > 1 and epoch == self._compared_epoch
        for assignment in prefetch(self._assign, windows[first:]):
            if needs_witnesses:
                # The same ones in every epoch, because a rank may have looked at another epoch.
                assignment = replace(assignment, witnesses=(0, len(self.lengths) - 1))
                needs_witnesses = False
            yield assignment

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Another epoch than the present one starts at its beginning."""
        _check_within('epoch', epoch)  # it is added to the seed
        if epoch != self.epoch:
            self.first_batch = 0
        super().set_epoch(int(epoch))

    def window(self, batch: int) -> list[int]:
        """Returns the window of global batch `batch` of this epoch: its samples, in the order of the epoch."""
        return self._window(batch).tolist()

    def window_tokens(self) -> np.ndarray:
        """Returns the tokens of each global batch of this epoch, by `lengths`, int64 (number of global batches,)."""
        tokens = [self.lengths[window].sum() for window in self._batches()]
        return np.array(tokens, dtype=np.int64)

    def plan(self, batch: int) -> MicrobatchPlan:
        """Returns the plan of global batch `batch` over all ranks; its indices are places in :meth:`window`."""
        return plan_batch(self.rows.of(self._window(batch)), self.num_replicas)

    def has_only_copies(self, batch: int) -> bool:
        """Whether this rank only has a copy, which must weigh nothing, in global batch `batch` of this epoch."""
        window = self._window(batch)
        return len(window) < self.num_replicas and self._assign(window).is_copy

    def skip_to(self, batch: int) -> None:
        """Lets the next iterations start at global batch `batch`. Earlier ones are neither planned nor read."""
        _check_within('batch', batch, 0, self.num_batches)
        self.first_batch = batch
        self.passes.forget()

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the run, and the arguments that decide its global batches, on any number of ranks."""
        epoch, batch = self.passes.place(self.epoch, self.first_batch)
        return {'epoch': epoch, 'batch': batch, **self._identity()}

    def load_state_dict(
        self,
        state: dict[str, Any],
    ) -> None:
        """Continues where :meth:`state_dict` was taken, also on another number of ranks.

        Raises:
            ValueError: If the state is of other global batches, lacks a key, or has an unknown one.
        """
        check_state(state, {'epoch', 'batch'}, counts=('epoch', 'batch'))
        identity = self._identity()
        size = identity.get('global_batch_size')
        # Earlier versions saved a single size as a schedule of one stage.
        if state.get('global_batch_size') == [['0ba', size]]:
            state = {**state, 'global_batch_size': size}
        for name in sorted({*identity, *state} - {'epoch', 'batch'}):
            # None if the key is missing in one of the two, which is a difference, too.
            if state.get(name) != identity.get(name):
                raise InvalidInputError(
                    f'`{name}` must be that of the saved run for the same global batches, got: {identity.get(name)}, '
                    f'saved: {state.get(name)}. Restore it, or start without the saved state.'
                )
        super().set_epoch(state['epoch'])
        self.skip_to(state['batch'])

    def plan_record(self, batch: int) -> PlanRecord:
        """Returns a record of the plan of global batch `batch`. Ranks with a plain DataLoader are compared by it.

        The checksum covers the arguments and the samples, but not the plan, which would have to be made again. A
        RegroupingDataLoader sends the checksum of its assignment instead. That one covers the plan, too.
        """
        epoch = self.epoch
        checksum = extended_checksum(self._checksum, self._window(batch).tobytes())
        facts = partial(self.plan_facts, epoch, batch)
        return PlanRecord(checksum, self.rank, self.num_replicas, facts=facts)

    def plan_facts(
        self,
        epoch: int,
        batch: int,
    ) -> Facts:
        """Returns the arguments and the place that a plan depends on."""
        return {**self._facts, 'epoch': str(epoch), 'global batch': str(batch)}

    @cached_property
    def _facts(self) -> Facts:
        """Returns the arguments that all plans of the run depend on."""
        facts = {
            'number of ranks': str(self.num_replicas),
            'number of samples': str(len(self.lengths)),
        }
        tables = {
            'lengths': self.lengths,
            **self.rows.sizes,
            'media': self.media,
            'vision_cost': self.rows.vision_cost_table,
        }
        if self.loss_shares is not None:
            tables['loss_shares'] = self.loss_shares.shares
            tables['loss_tokens of loss_shares'] = self.loss_shares.loss_tokens
            tables['sizes of loss_shares'] = np.array(self.loss_shares.sizes)
        for name, table in tables.items():
            if table is not None:
                facts.update(table_facts(name, table))
        arguments = {**self._identity(), **asdict(self.rows.options)}
        for name, value in arguments.items():
            facts[name] = str(value)
        return facts

    @cached_property
    def _checksum(self) -> int:
        return checksum_of(self._facts)

    def _identity(self) -> dict[str, Any]:
        """Returns the arguments that decide which samples a global batch holds, as plain values by name."""
        identity: dict[str, Any] = {}
        if self.mixture is not None:
            identity['quotas'] = [str(quota) for quota in self.mixture.quotas]
            identity['modality'] = self.modality
        identity['num_samples'] = len(self.lengths)
        identity.update(self._global_batches.identity())
        for name in ('seed', 'shuffle', 'drop_last'):
            identity[name] = getattr(self, name)
        return identity

    def _batches(self) -> list[np.ndarray]:
        return self._global_batches.of_epoch(self.epoch)

    def _window(self, batch: int) -> np.ndarray:
        batches = self._batches()
        _check_within('batch', batch, 0, len(batches) - 1)
        return batches[batch]

    def _assign(self, window: np.ndarray) -> RankAssignment:
        plan = plan_batch(self.rows.of(window), self.num_replicas)
        weights = None
        if self.loss_shares is not None:
            weights = self.loss_shares.weights(window)
        checksum = 0
        if self.num_replicas > 1:  # a single rank has no other to compare with
            indices_of_ranks = []
            for rank in plan.ranks:
                indices_of_ranks.append([microbatch.indices for microbatch in rank])
            planned = window.tobytes() + repr(indices_of_ranks).encode()
            checksum = extended_checksum(self._checksum, planned)
        return RankAssignment.from_plan(plan.ranks[self.rank], window, weights, checksum)


def noting_progress(
    sampler: RegroupingBatchSampler,
    batches: Iterable[Item],
    epoch: int,
    first: int,
) -> Iterator[Item]:
    """Yields the batches of an epoch from batch `first` on, and notes in the sampler how far the run is."""
    yield from sampler.passes.follow(batches, epoch, first)
    # The epoch is over. If it was resumed in the middle, the next iteration starts at the beginning nevertheless.
    if epoch == sampler.epoch:
        sampler.first_batch = 0


def prefetch(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    depth: int = 2,
) -> Iterator[Result]:
    """Yields ``map(function, items)``, with up to `depth` further results computed in a background thread.

    The thread starts with the first item. It is joined when the iterator ends, is closed or is garbage collected. An
    error of `function` is raised where its result would have been yielded. Items are taken only as they are needed.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch')
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


def length_of(dataset: object) -> int:
    """Returns how many samples a dataset has. Raises ValueError if it does not say."""
    check_kind('dataset', dataset, Sized)
    assert isinstance(dataset, Sized)
    return len(dataset)


def _check_samples_fit(rows: Rows) -> None:
    """Raises ValueError if a sample is larger than a cap of a microbatch."""
    options = rows.options
    check_cap('max_tokens', options.max_tokens, rows.lengths)
    for size, cap in options.caps.items():
        check_cap(CAPPED_SIZES[size], cap, rows.sizes[size])


def _modality_of_samples(media: Table | None, rows: Rows) -> np.ndarray:
    """Returns the modality of each sample, int64 (n,): as given, or 1 with image tokens and 0 without."""
    if media is None and 'image_tokens' in rows.sizes:
        return np.sign(rows.image_tokens)
    if media is None:
        raise InvalidInputError(
            "`image_tokens` or `media` must be given with modality='per_step', got: neither. They tell the modality of "
            'each sample.'
        )
    return checked_table('media', media, len(rows.lengths))


def _check_within(
    name: str,
    value: int,
    least: int = -(2**62),
    most: int = 2**62,
) -> None:
    """Raises ValueError unless a value is an integer in a range. The default keeps seed + epoch within 64 bits."""
    if not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InvalidInputError(f'`{name}` must be an integer from {least} to {most}, got: {value!r}.')
