# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A distributed batch sampler that assigns each global batch to the ranks by length.

The samples of a global batch, in the order of the epoch, are its *window*. The assignment of a rank lists the samples
that it computes, by microbatch. The *place* of a run is the epoch, and the number of the next global batch in it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from composer_tokacc.arguments import check_choice, check_count, check_kind, check_state
from composer_tokacc.collectives import get_global_rank, get_world_size
from composer_tokacc.plan_agreement import Facts, PlanRecord, checksum_of, extended_checksum, table_summary
from composer_tokacc.planning import CAPPED_SIZES, CostModel, CutOptions, MicrobatchPlan, Rows, Table, checked_table
from composer_tokacc.planning.plan import plan_checked_rows
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sampling.global_batches import GlobalBatches, Stages, check_cap, check_global_batch
from composer_tokacc.sampling.mixture import LossShares, Mixture, check_sizes_of_datasets
from composer_tokacc.sampling.progress import Item, Progress
from composer_tokacc.sampling.rank_assignment import RankAssignment

log = logging.getLogger(__name__)

Result = TypeVar('Result')

_USE_OUR_LOADER = (
    'Take a RegroupingDataLoader, or set `drop_last=True`. (With TokenAccumulation a plain DataLoader can be used for '
    'training. Code of your own may read the `microbatches` of the assignments, if it masks the labels of a copy.)'
)
_COPY_IN_PLAIN_LOADER = (
    "A global batch has too few samples for all ranks, so this rank gets a copy of another rank's sample. A plain "
    f'DataLoader does not mark it, and the sample would count twice. {_USE_OUR_LOADER}'
)
_SHARES_IN_PLAIN_LOADER = (
    "`loss_shares` of the sampler need `token_weights='column'` and a RegroupingDataLoader, which writes them into its "
    'batches, got: another loader, which loses them. Take a RegroupingDataLoader, or leave `loss_shares` out.'
)

_GREATEST_SEED = 2**62
"""Greatest seed and epoch. Torch draws the order of an epoch with their sum, which must fit into 64 bits."""


class RegroupingBatchSampler(DistributedSampler):
    """Gives each rank equal work, with almost no padding, by assigning the samples of each global batch by length.

    With one `global_batch_size`, a global batch holds exactly the samples that torch's ``DistributedSampler`` (same
    seed, epoch, `shuffle` and `drop_last`) gives to all ranks together, for every number of ranks. Only the grouping of
    samples into microbatches and ranks changes. With exact token accumulation that changes no gradient. There is one
    difference: without `drop_last`, torch's sampler repeats samples until the last global batch is a multiple of the
    ranks. Here it holds only the samples that are left, so no sample counts twice.

    With `mixture` or ``modality='per_step'`` an epoch has another order. With `global_batch_tokens`, or a schedule of
    `global_batch_size`, the order is cut at other places. Neither depends on the number of ranks. With a schedule,
    epochs have unequal numbers of global batches. Then ``len()`` raises TypeError, and Composer needs a
    ``max_duration`` in tokens, samples or batches.

    With ``global_batch_tokens=G``, the first ``b`` global batches of an epoch are the longest start of its order that
    has at most ``b * G`` tokens. So a step has G tokens, give or take less than the longest sample, and the number of
    global batches only depends on the sum of the lengths. :meth:`window_tokens` returns the tokens of each.

    Ranks may get unequal numbers of samples. If there are fewer samples than ranks, or for ``'fsdp'`` hardly more, some
    ranks get a copy of another rank's sample. It is marked (``RankAssignment.is_copy``) and must not count. A plain
    DataLoader loses the mark, so without :class:`.TokenAccumulation` it must not read such a copy.

    The assignments only depend on the arguments, the epoch and the rank, so ranks exchange nothing to make them. The
    order of the epoch and the lengths take 16 bytes of memory a sample. A background thread plans the next global
    batches while the loader reads. Use the sampler with :class:`composer_tokacc.RegroupingDataLoader`, or as
    ``DataLoader(batch_sampler=...)``.

    :meth:`state_dict` returns the place of the run: the epoch, and the number of the next global batch. If several
    iterators read the epoch, the furthest one counts. So ``next(iter(sampler))``, a look at a batch, does not change
    the place of a run that has read more. After :meth:`load_state_dict` or :meth:`skip_to` every iteration of the epoch
    starts at the place that was set, until one reaches the end of the epoch.

    A plain DataLoader with workers reads ahead of the run. Then the state counts batches that the run has not had, and
    a run that resumes from it leaves them out. RegroupingDataLoader counts only the batches that it has yielded.

    Args:
        dataset: Map-style dataset.
        lengths: Length of each sample in tokens, image tokens included, (n,). Estimates are enough: the split measures
            the rows and cuts a microbatch that would break the cap.
        global_batch_size: Samples of an optimizer step over all ranks. Or its schedule, a list of (start, size): a
            start is an optimizer step of the run (``1000`` or ``'1000ba'``) or a number of trained tokens
            (``'5000000tok'``), and the first one is 0. Steps and tokens are counted as if the run had read every
            earlier epoch to its end.
        global_batch_tokens: Tokens of an optimizer step over all ranks, by `lengths`, instead of `global_batch_size`.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        seed: Seed of the order, the same on all ranks.
        shuffle: Whether each epoch has another order.
        drop_last: Whether the last, smaller global batch of an epoch is left out.
        num_replicas: Number of ranks. Default: the size of the process group, else ``WORLD_SIZE`` of the launcher.
        rank: This rank. Default: the rank in the process group, else ``RANK`` of the launcher.
        cost, image_tokens, loss_tokens, vision_cost, max_image_tokens, max_loss_tokens, objective: As for
            :func:`.plan_microbatches`.
        width_multiple: The same value as for ``token_data_spec``, because it widens the planned microbatches.
        mixture: Shares of several datasets, which `dataset` joins as a ``ConcatDataset``. Every global batch has each
            dataset's share to within a few samples; more if one dataset of many has a large share.
        modality: ``'mixed'``, or ``'per_step'`` for global batches of samples of one modality each.
        media: Number of the modality of each sample, (n,) ints. Only has an effect with ``'per_step'``. Default: 1 for
            samples with `image_tokens`, 0 for all others.
        loss_shares: Weights of tokens that give each dataset its share of the loss of every step. Batches of a
            RegroupingDataLoader then have an entry ``loss_weights``, for ``TokenAccumulation(token_weights='column')``.
            A plain DataLoader does not add it, and is refused.

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
        # Ranks, and arguments for the order of an epoch. Torch's class keeps them as attributes.
        if num_replicas is None:
            num_replicas = get_world_size()
        if rank is None:
            rank = get_global_rank()
        num_samples = length_of(dataset)
        check_count('num_replicas', num_replicas)
        _check_integer('rank', rank, 0, num_replicas - 1)
        check_choice('shuffle', shuffle, (True, False))
        check_choice('drop_last', drop_last, (True, False))
        _check_integer('seed', seed, -_GREATEST_SEED, _GREATEST_SEED)
        super().__init__(dataset, num_replicas, rank, shuffle, int(seed), drop_last)
        # Torch's class counts repeated samples, too, but here none is repeated. If this number is greater than the size
        # of the dataset, Composer's evaluation drops the difference at the end.
        self.total_size = num_samples
        # Sizes of the samples, and caps of a microbatch. Bad tables are refused now, and not in the first epoch.
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
        check_cap('max_tokens', options.max_tokens, self.rows.lengths)
        for size, cap in options.caps.items():
            check_cap(CAPPED_SIZES[size], cap, self.rows.sizes[size])
        self.lengths = self.rows.lengths
        # Which samples each global batch holds.
        if mixture is not None:
            check_kind('mixture', mixture, Mixture)
            check_sizes_of_datasets('mixture', mixture.sizes, dataset, num_samples)
        check_choice('modality', modality, ('mixed', 'per_step'))
        modality_of_samples = None
        if modality == 'per_step':
            modality_of_samples = _modality_of_samples(media, self.rows)
            if mixture is None:
                # Only a mixture can be divided by modality, so a single dataset becomes a mixture of one dataset.
                mixture = Mixture([num_samples])
        self._global_batches = GlobalBatches(
            self.lengths,
            samples=global_batch_size,
            tokens=global_batch_tokens,
            seed=self.seed if shuffle else None,
            drop_last=drop_last,
            mixture=mixture,
            media=modality_of_samples,
        )
        if global_batch_tokens is None:
            # Each size must be a multiple of the ranks, because the samples of one rank are the loader's `batch_size`.
            for size in self._global_batches.sizes:
                check_global_batch(size, num_replicas)
        self.global_batch_size = max(self._global_batches.sizes)
        """Samples of a global batch: of the largest one with a schedule, on average with `global_batch_tokens`."""
        if loss_shares is not None:
            check_kind('loss_shares', loss_shares, LossShares)
            checked_table('loss_shares', loss_shares.loss_tokens, num_samples)
            check_sizes_of_datasets('loss_shares', loss_shares.sizes, dataset, num_samples)
        self.loss_shares = loss_shares
        # The place of the run.
        self.first_batch = 0
        """The global batch that the next iteration starts at."""
        self.start_of_loader: tuple[int, int] | None = None
        """The epoch and the global batch at which the iterator of a RegroupingDataLoader starts.

        The loader sets this attribute only while torch calls ``iter(sampler)``, because torch passes no arguments. The
        sampler does not note the progress of such an iterator, because workers read ahead. The loader notes the batches
        that it yields.
        """
        self.progress = Progress()
        self._are_copies_marked = False
        """Whether the code that reads the batches of a plain DataLoader marks copies by itself."""
        self._epoch_to_compare: int | None = None
        """The first epoch that is iterated. In it each iterator's first assignment has two samples to compare.

        Every rank reads them. If they differ between ranks, the datasets list their samples in different orders, and
        the step is refused. One epoch is enough, because a dataset does not change its order during a run.
        """

    def __len__(self) -> int:
        """Returns the number of global batches of an epoch, the same in every epoch and on all ranks.

        Raises:
            TypeError: If epochs have unequal numbers of global batches. Composer then reads each epoch to its end, as
                for any loader without a length.
        """
        if not self._global_batches.has_equal_epochs:
            raise TypeError(
                'Epochs have unequal numbers of global batches here, because of a schedule of `global_batch_size`, or '
                'of `global_batch_tokens` with a mixture of parts of datasets. Give the Trainer a `max_duration` in '
                'tokens, samples or batches. `num_batches` is the number of this epoch.'
            )
        return self.num_batches

    @property
    def num_batches(self) -> int:
        """Number of global batches of the present epoch, the same on all ranks."""
        return len(self._windows())

    def __iter__(self) -> Iterator[RankAssignment]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns this rank's assignment of each global batch of the epoch, from `first_batch` on.

        The iterator of a RegroupingDataLoader begins at `start_of_loader` instead. Its progress is not noted here,
        because the loader notes it.
        """
        # `start_of_loader` is set only during this call. So this method must not be a generator, whose body would run
        # later, when the first item is requested.
        is_for_loader = self.start_of_loader is not None
        epoch, first = self.start_of_loader or (self.epoch, self.first_batch)
        if self._epoch_to_compare is None:
            self._epoch_to_compare = epoch
        assignments = self._assignments(epoch, first)
        if is_for_loader:
            return assignments
        return noting_progress(self, self._for_plain_loader(assignments, epoch, first), epoch, first)

    def _assignments(self, epoch: int, first: int) -> Iterator[RankAssignment]:
        """Yields this rank's assignment of each global batch from `first` on, the first one with samples to compare."""
        windows = self._global_batches.of_epoch(epoch)
        must_compare = self.num_replicas > 1 and epoch == self._epoch_to_compare
        for assignment in prefetch(self._assign, windows[first:]):
            if must_compare:
                # The first and the last sample of the dataset, not of the window: ranks may read them in different
                # epochs, because one rank may look at a batch of another epoch before the run. The loader gives their
                # digest to all later batches, so the ranks can still compare it.
                assignment = replace(assignment, samples_to_compare=(0, len(self.lengths) - 1))
                must_compare = False
            yield assignment

    def _for_plain_loader(
        self,
        assignments: Iterable[RankAssignment],
        epoch: int,
        first: int,
    ) -> Iterator[RankAssignment]:
        """Yields the assignments of an epoch from batch `first` on, as a plain DataLoader may read them.

        It takes only the samples of an assignment. So it must not read assignments with weights. Unless its reader
        marks copies, it must not read a copy, either.
        """
        windows = self._global_batches.of_epoch(epoch)[first:]
        # Warns before the first step, because most often the last global batch of the epoch is the short one.
        if not self._are_copies_marked and any(len(window) < self.num_replicas for window in windows):
            log.warning(
                'A global batch of epoch %d has fewer samples than ranks. There a rank gets a copy of a sample, and a '
                'plain DataLoader is refused. %s',
                epoch,
                _USE_OUR_LOADER,
            )
        for assignment in assignments:
            if self.loss_shares is not None:
                assignment = replace(assignment, refusal=_SHARES_IN_PLAIN_LOADER)
            elif assignment.is_copy and not self._are_copies_marked:
                assignment = replace(assignment, refusal=_COPY_IN_PLAIN_LOADER)
            yield assignment

    def _allow_copies_in_plain_loader(self) -> None:
        """Lets a plain DataLoader read copies, because the caller marks them (see :meth:`has_only_copies`)."""
        self._are_copies_marked = True

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which starts at batch 0 if this is not the present epoch."""
        # Epochs are counted from 0. A mixture has no samples before its first epoch.
        _check_integer('epoch', epoch, 0, _GREATEST_SEED)
        if epoch != self.epoch:
            self.first_batch = 0
        super().set_epoch(int(epoch))

    def window(self, batch: int) -> list[int]:
        """Returns the samples of global batch `batch` of this epoch, its *window* in the order of the epoch."""
        return self._window(batch).tolist()

    def window_tokens(self) -> np.ndarray:
        """Returns the tokens of each global batch of this epoch, by `lengths`, int64 (number of global batches,)."""
        tokens = [self.lengths[window].sum() for window in self._windows()]
        return np.array(tokens, dtype=np.int64)

    def plan(self, batch: int) -> MicrobatchPlan:
        """Returns the plan of global batch `batch` over all ranks. Index ``i`` in it is ``window(batch)[i]``."""
        return plan_checked_rows(self.rows.of(self._window(batch)), self.num_replicas)

    def has_only_copies(self, batch: int) -> bool:
        """Returns whether this rank's only sample in global batch `batch` of this epoch is a copy of another rank's."""
        window = self._window(batch)
        # With enough samples every rank gets one of its own, so no plan is needed. For 'ddp' one for each rank is
        # enough. For 'fsdp' four for each of the W ranks are enough, because one step slot has no dummies, and gives
        # every rank a sample:
        # - Samples with images and samples without are planned separately. One of these groups has 2 W samples or more.
        # - The number of its microbatches is a multiple of W. It has dummies only if that is more than its samples, so
        #   more than 2 W. Then there are at least three slots.
        # - There are fewer than W dummies. They follow one another in the order in which slots are filled, so they are
        #   in at most two slots.
        enough = self.num_replicas
        if self.rows.options.objective == 'fsdp':
            enough = 4 * self.num_replicas
        return len(window) < enough and self._assign(window).is_copy

    def skip_to(self, batch: int) -> None:
        """Lets the next iterations start at global batch `batch`. Earlier ones are neither planned nor read."""
        _check_integer('batch', batch, 0, self.num_batches)
        self.first_batch = batch
        self.progress.forget()  # no earlier iterator may hold the place any longer

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the run, and the arguments that decide its global batches.

        Neither depends on the number of ranks.
        """
        epoch, batch = self.progress.place(self.epoch, self.first_batch)
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
        state = _as_saved_today(state, identity)
        names = {*identity, *state} - {'epoch', 'batch'}
        for name in sorted(names):
            # A name that only the saved state has, or only this sampler, is a difference, too: `get` returns None.
            if state.get(name) != identity.get(name):
                raise InvalidInputError(
                    f'`{name}` must be that of the saved run for the same global batches, got: {identity.get(name)}, '
                    f'saved: {state.get(name)}. Restore it, or start without the saved state.'
                )
        self.set_epoch(state['epoch'])
        self.skip_to(state['batch'])

    def plan_record(self, batch: int) -> PlanRecord:
        """Returns the record of global batch `batch`, with which ranks check that they agree.

        It is for a plain DataLoader. Its checksum covers the arguments and the samples, but not the plan, which would
        have to be made again. A batch of a RegroupingDataLoader has a record of its own, whose checksum also covers the
        plan.
        """
        checksum = extended_checksum(self._checksum, self._window(batch).tobytes())
        return PlanRecord(checksum, self.rank, self.num_replicas, facts=self.plan_facts(self.epoch, batch))

    def plan_facts(
        self,
        epoch: int,
        batch: int,
    ) -> Facts:
        """Returns all arguments that decide the plan of a global batch. An error shows which of them differ."""
        return {**self._facts, 'epoch': epoch, 'global batch': batch}

    @cached_property
    def _facts(self) -> Facts:
        """All arguments that decide the plans of a run, by name: those of `_identity`, and all others.

        Ranks must have the same ones. An error shows which of them differ, so tables are given as summaries.
        """
        facts: Facts = {'number of ranks': self.num_replicas, 'number of samples': len(self.lengths)}
        tables = {
            'lengths': self.lengths,
            **self.rows.sizes,
            'media': self._global_batches.media,
            'vision_cost': self.rows.vision_cost,
        }
        if self.loss_shares is not None:
            tables['loss_shares'] = self.loss_shares.shares
            tables['loss_tokens of loss_shares'] = self.loss_shares.loss_tokens
            tables['sizes of loss_shares'] = np.array(self.loss_shares.sizes)
        for name, table in tables.items():
            if table is not None:
                facts[name] = table_summary(table)
        return {**facts, **self._identity(), **asdict(self.rows.options)}

    @cached_property
    def _checksum(self) -> int:
        """Checksum of `_facts`."""
        return checksum_of(self._facts)

    def _identity(self) -> dict[str, Any]:
        """Returns the arguments that decide which samples a global batch holds, as plain values by name.

        State dicts hold them, and a run that resumes must have the same ones. All other arguments, such as the number
        of ranks, may change.
        """
        identity = self._global_batches.identity()
        for name in ('seed', 'shuffle', 'drop_last'):
            identity[name] = getattr(self, name)
        return identity

    def _windows(self) -> list[np.ndarray]:
        """Returns the samples of each global batch of this epoch, int64 (samples,) each."""
        return self._global_batches.of_epoch(self.epoch)

    def _window(self, batch: int) -> np.ndarray:
        """Returns the samples of a global batch of this epoch. Raises ValueError if the epoch has no such batch."""
        windows = self._windows()
        _check_integer('batch', batch, 0, len(windows) - 1)
        return windows[batch]

    def _assign(self, window: np.ndarray) -> RankAssignment:
        """Plans a global batch for all ranks. Returns this rank's part, with a checksum of the plan of all ranks."""
        plan = plan_checked_rows(self.rows.of(window), self.num_replicas)
        checksum = 0  # a single rank has no other to compare with
        if self.num_replicas > 1:
            indices_of_ranks = []
            for rank in plan.ranks:
                indices_of_ranks.append([microbatch.indices for microbatch in rank])
            checksum = extended_checksum(self._checksum, window.tobytes())
            checksum = extended_checksum(checksum, repr(indices_of_ranks).encode())
        return RankAssignment.from_plan(plan.ranks[self.rank], window, self.loss_shares, checksum)


def _as_saved_today(state: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state that any version has saved, with the names and forms of this version.

    If an argument is added to ``GlobalBatches.identity``, earlier states lack its name, and would be refused. So give
    it here the value that all earlier versions had, such as ``state.setdefault('reverse', False)``.

    Args:
        state: The saved state.
        identity: The arguments of this sampler that decide its global batches.
    """
    state = dict(state)
    # Earlier versions saved a single size as a schedule of one stage.
    size = identity.get('global_batch_size')
    if state.get('global_batch_size') == [['0ba', size]]:
        state['global_batch_size'] = size
    # Earlier versions did not save these, and nothing else tells their values. So they are not compared.
    for name in ('checksum_of_media', 'sizes'):
        state.setdefault(name, identity.get(name))
    return state


def noting_progress(
    sampler: RegroupingBatchSampler,
    batches: Iterable[Item],
    epoch: int,
    first: int,
) -> Iterator[Item]:
    """Yields the batches of an epoch from batch `first` on, and keeps the sampler's place of the run up to date."""
    yield from sampler.progress.follow(batches, epoch, first)
    # The epoch is over. If it was resumed in the middle, `first_batch` is still above 0, but the next iteration must
    # start at 0. If the trainer has already set another epoch, `first_batch` belongs to that one, and stays.
    if epoch == sampler.epoch:
        sampler.first_batch = 0


def prefetch(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields ``map(function, items)``. A background thread computes up to two further results in advance.

    Two, because the thread can then work on one item while the result of the other one waits. No more than these
    are taken from ``items`` in advance. The thread starts when the first result is requested. It is joined when the
    iterator ends, is closed or is garbage collected. An error of `function` is raised where its result would have been
    yielded.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch') as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def length_of(dataset: object) -> int:
    """Returns how many samples a dataset has. Raises ValueError if it does not say."""
    if not isinstance(dataset, Sized):
        raise InvalidInputError(
            f'`dataset` must have a length and samples by index, got: a {type(dataset).__name__}. For an iterable '
            'dataset use ExchangingDataLoader.'
        )
    return len(dataset)


def _modality_of_samples(media: Table | None, rows: Rows) -> np.ndarray:
    """Returns the modality of each sample, int64 (n,). Without `media` it is 1 with image tokens and 0 without them."""
    if media is not None:
        return checked_table('media', media, len(rows.lengths))
    if 'image_tokens' not in rows.sizes:
        raise InvalidInputError(
            "`image_tokens` or `media` must be given with modality='per_step', got: neither. They tell the modality of "
            'each sample.'
        )
    return np.sign(rows.image_tokens)


def _check_integer(
    name: str,
    value: int,
    least: int,
    most: int,
) -> None:
    """Raises ValueError unless an argument is an integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InvalidInputError(f'`{name}` must be an integer from {least} to {most}, got: {value!r}.')
