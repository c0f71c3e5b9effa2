# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the samples that a sampler repeats so that every rank has equally many. They must not count in the loss.

A repeated sample is in the batches of two ranks. The one that must not count goes through these steps:

1. *Found.* :func:`num_repeated` finds it by its place in the order of torch's DistributedSampler, because nothing in
   the batch shows it. A RegroupingDataLoader knows its own (``RankAssignment.is_copy``), and marks them when it
   collates. An ExchangingDataLoader leaves those of torch's sampler out when it reads (``_read``).
2. *Marked.* ``TokenAccumulation._count_batch`` gives its row 0 samples (``RowCounts.samples``). From here on nobody
   else has to find it.
3. *Masked.* ``with_counts`` of ``row_counts.py`` masks the labels of rows of 0 samples, so it is in no sum of tokens.
4. *Left out.* With our split and several ranks, ``MicrobatchSplit._cut`` takes no row of 0 samples. Without our
   split the row is computed, without labels.

In evaluation Composer drops repeated samples by itself, and ``MicrobatchSplit._split_in_order`` keeps the order for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from composer_tokacc.collectives import get_world_size
from composer_tokacc.refusals import InvalidInputError

log = logging.getLogger(__name__)


def num_repeated(dataloader: Any, batch_index: int, num_rows: int) -> int:
    """Returns how many rows at the end of this rank's batch come from a repeated sample.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many. A
    RegroupingBatchSampler repeats one for a rank that would have none. Another rank has the same sample, too. If the
    sample counted on both, the last step of an epoch would depend on the number of ranks.

    If the row of a repeated sample is not known, warns and returns 0. Returns 0 for other samplers, too. Before
    training, :func:`warn_of_unknown_copies` warns if they repeat samples. Loaders with ``marks_added_rows`` mark
    repeated samples themselves.

    Args:
        dataloader: The DataLoader that Composer iterates.
        batch_index: Counts the batches of the epoch from 0, skipped ones included.
        num_rows: The rows of this batch. A collator may have joined several samples to one row, or made several rows of
            one sample.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    num_samples = _samples_if_last_is_repeated(dataloader, batch_index)
    if num_samples is None:
        return 0
    if not yields_in_order(dataloader):
        log.warning(
            'A sample of another rank is repeated in this epoch, and counts twice: the loader has `in_order=False`, so '
            'it is not known which batch has it. Leave `in_order` out.'
        )
        return 0
    if num_samples == 1:
        return num_rows  # the repeated sample is the only one, so all rows are of it
    if num_rows != num_samples:
        log.warning(
            'The last batch of the epoch repeats a sample of another rank, and the sample counts twice: the batch has '
            '%d rows, and not one for each sample, so its row is not known. `drop_last=True` of the sampler avoids it.',
            num_rows,
        )
        return 0
    return 1


def _samples_if_last_is_repeated(dataloader: DataLoader, batch_index: int) -> int | None:
    """Returns how many samples this rank's batch has if the last of them is a repeated sample, else None."""
    batch_sampler: Any = dataloader.batch_sampler
    if _is_regrouping(batch_sampler):
        # It repeats a sample only for a rank that would have none, so the repeated sample is the only one.
        return 1 if batch_sampler.has_only_copies(batch_index) else None
    sampler, batch_size = sampler_of(dataloader)
    if batch_size is None or num_repeated_by(sampler, batch_size, batch_index) == 0:
        return None
    # Only the last batch of the epoch has a repeated sample. It holds the samples of this rank that are left.
    return sampler.num_samples - batch_index * batch_size


def _is_regrouping(batch_sampler: object) -> bool:
    """Returns whether this is a :class:`.RegroupingBatchSampler`, or a wrapper that passes on its attributes.

    Not with ``isinstance``, because the module of the class imports this one. Nor with a ``Protocol``: from Python 3.12
    on, ``isinstance`` does not find attributes that a wrapper passes on by ``__getattr__``. The copies of a rank would
    then count, without a warning.
    """
    return hasattr(batch_sampler, 'has_only_copies')


def sampler_of(dataloader: DataLoader) -> tuple[Any, int | None]:
    """Returns the sampler of a loader, and the number of samples in a batch.

    The number is None if the batches are not made by torch's BatchSampler. Then they may hold other samples than those
    of the sampler, or the same in another order.
    """
    batch_sampler = dataloader.batch_sampler
    # With `DataLoader(batch_sampler=...)` the loader's own `sampler` and `batch_size` are not used, so they are read
    # from the batch sampler. A subclass of BatchSampler with its own `__iter__` may make other batches.
    if isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__:
        return batch_sampler.sampler, batch_sampler.batch_size
    return dataloader.sampler, dataloader.batch_size


def num_repeated_by(sampler: Any, batch_size: int, batch_index: int) -> int:
    """Returns how many rows at the end of a batch torch's DistributedSampler repeats; 0 for other samplers."""
    if not has_torchs_order(sampler):
        return 0
    # Rank r of W gets places r, r + W, r + 2 W and so on of the sampler's order. The repeated samples are at the end of
    # the order, and are fewer than W. So a rank has at most one of them, as its last sample. For example, with 5
    # samples on 3 ranks the order is 0, 1, 2, 3, 4, 0. Ranks 0, 1 and 2 get (0, 3), (1, 4) and (2, 0). The last sample
    # of rank 2 has place 5 of the order, after the 5 samples of the dataset. So it is repeated.
    last_on_rank = sampler.num_samples - 1
    place_in_order = last_on_rank * sampler.num_replicas + sampler.rank
    is_repeated = place_in_order >= len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    is_last_batch = batch_index == last_on_rank // batch_size
    return int(is_repeated and is_last_batch)


def warn_of_unknown_copies(dataloader: Any) -> None:
    """Warns if a DistributedSampler repeats samples in an order that is not torch's, so that their rows are not known.

    The order is that of a subclass, such as the length-grouped sampler of Hugging Face, or of a batch sampler around
    it.
    """
    if not isinstance(dataloader, DataLoader) or _is_regrouping(dataloader.batch_sampler):
        return  # a RegroupingBatchSampler tells which samples it repeats
    sampler = getattr(dataloader.batch_sampler, 'sampler', dataloader.sampler)
    if not isinstance(sampler, DistributedSampler) or not isinstance(dataloader.dataset, Sized):
        return
    _, batch_size = sampler_of(dataloader)  # None: the batches are not those of torch's BatchSampler
    if has_torchs_order(sampler) and batch_size is not None:
        return  # `num_repeated` knows the row of a repeated sample
    try:
        num_samples = len(sampler)
    except (AttributeError, NotImplementedError, TypeError):
        return  # the length of a subclass is not known before the end of the epoch
    num_ranks = getattr(sampler, 'num_replicas', get_world_size())  # a subclass may not have it
    num_copies = num_samples * num_ranks - len(dataloader.dataset)
    # Fewer copies than ranks give all ranks equally many samples. A sampler with more was asked to repeat samples.
    if 0 < num_copies < num_ranks:
        log.warning(
            'Samples that fill up the ranks count twice, got: %d in each epoch, from %s. Their rows are not known, '
            'because this sampler or its batch sampler has an order of its own. `drop_last=True` of the sampler avoids '
            'it.',
            num_copies,
            type(sampler).__name__,
        )


def has_torchs_order(sampler: object) -> TypeGuard[DistributedSampler]:
    """Returns whether torch's DistributedSampler decides the order. A subclass may change the order."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def yields_in_order(dataloader: DataLoader) -> bool:
    """Returns whether the batches come in the order of the sampler. Only worker processes can change it."""
    # A subclass that does not call torch's `__init__`, such as older StatefulDataLoaders, has no `in_order`.
    return getattr(dataloader, 'in_order', True) or dataloader.num_workers == 0


def check_order(dataloader: DataLoader) -> None:
    """Raises ValueError if batches may come in another order than that of the sampler."""
    if not yields_in_order(dataloader):
        raise InvalidInputError(
            '`in_order` must be True, got: False. The place of a run in an epoch is the number of its batches, so a '
            'resumed run would leave out batches that came late, and repeat others. Leave `in_order` out.'
        )


def announce_marking(dataloader: Any) -> None:
    """Tells a :class:`.RegroupingBatchSampler` that copies are marked by :func:`num_repeated`.

    Without this call a plain DataLoader cannot read an epoch in which a rank gets a copy.
    """
    if not isinstance(dataloader, DataLoader):
        return  # num_repeated() does not mark copies of such a loader
    batch_sampler: Any = dataloader.batch_sampler
    # A wrapper may pass on only the public names.
    allow_copies = getattr(batch_sampler, '_allow_copies_in_plain_loader', None)
    if allow_copies is not None:
        allow_copies()


def first_batch_of(dataloader: Any) -> int:
    """Returns the index in the epoch, from 0, of the first batch that a loader yields.

    It is above 0 only if a :class:`.RegroupingBatchSampler` resumes an epoch. At the end of the epoch it is 0 again.
    """
    batch_sampler: Any = getattr(dataloader, 'batch_sampler', None)
    if _is_regrouping(batch_sampler):
        return batch_sampler.first_batch
    return 0
