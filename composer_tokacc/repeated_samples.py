# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds the samples that a sampler repeats so that every rank has equally many. They must not count in the loss."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from composer_tokacc.collectives import get_world_size
from composer_tokacc.refusals import InvalidInputError

log = logging.getLogger(__name__)


def num_repeated(dataloader: Any, batch_index: int, num_rows: int) -> int:
    """Returns how many rows at the end of this rank's batch are repeated samples: 0 or 1.

    Without ``drop_last`` torch's DistributedSampler repeats samples until every rank has equally many. A
    RegroupingBatchSampler repeats one for a rank that would have none. Another rank has the same sample, too. If the
    sample counted on both, the last step of an epoch would depend on the number of ranks.

    If the row of a repeated sample is not known, warns and returns 0. Returns 0 for other samplers, too. Before
    training, :func:`warn_of_unknown_copies` warns if they repeat samples. Loaders with ``marks_added_rows`` mark
    repeated samples themselves.

    Args:
        dataloader: The DataLoader that Composer iterates.
        batch_index: Counts the batches of the epoch from 0, skipped ones included.
        num_rows: The rows of this batch. A collator may have joined several samples to one row.
    """
    if not isinstance(dataloader, DataLoader) or getattr(dataloader, 'marks_added_rows', False):
        return 0
    num_samples: int | None = None  # of the batch, if it is known
    # A RegroupingBatchSampler tells whether the only sample of this rank's batch is a copy.
    has_only_copies = getattr(dataloader.batch_sampler, 'has_only_copies', None)
    if has_only_copies is not None:
        num_copies = int(has_only_copies(batch_index))
        num_samples = 1
    else:
        sampler, batch_size = sampler_of(dataloader)
        if batch_size is None:
            return 0
        num_copies = num_repeated_by(sampler, batch_size, batch_index)
        if num_copies > 0:
            # Only the last batch of the epoch repeats a sample, so it has the remaining samples of this rank.
            num_samples = sampler.num_samples - batch_index * batch_size
    if num_copies == 0:
        return 0
    if not yields_in_order(dataloader):
        log.warning(
            'A sample of another rank is repeated in this epoch, and counts twice: the loader has `in_order=False`, so '
            'it is not known which batch has it. Leave `in_order` out.'
        )
        return 0
    if num_samples is not None and num_rows != num_samples:
        log.warning(
            'The last batch of the epoch repeats a sample of another rank, and the sample counts twice: the batch has '
            '%d rows, and not one for each sample, so its row is not known. `drop_last=True` of the sampler avoids it.',
            num_rows,
        )
        return 0
    return num_copies


def sampler_of(dataloader: DataLoader) -> tuple[Any, int | None]:
    """Returns the sampler of a loader, and the number of samples in a batch.

    The number is None if torch's BatchSampler does not make the batches. Then the sampler may decide nothing.
    """
    batch_sampler = dataloader.batch_sampler
    # With `DataLoader(batch_sampler=...)` the loader's own `sampler` and `batch_size` say nothing. A subclass with
    # another `__iter__` may make other batches.
    if isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__:
        return batch_sampler.sampler, batch_sampler.batch_size
    return dataloader.sampler, dataloader.batch_size


def num_repeated_by(sampler: Any, batch_size: int, batch_index: int) -> int:
    """Returns how many rows at the end of a batch torch's DistributedSampler repeats; 0 for other samplers."""
    if not has_torchs_order(sampler):
        return 0
    # The sampler repeats samples at the end of its order, fewer than there are ranks, and deals the order out like
    # cards. So a rank has at most one of them, as its last sample. For example, 3 ranks get 5 samples as (0, 3), (1, 4)
    # and (2, 0). The last sample of rank 2 has place 5 in the order, which is behind the 5 samples of the dataset.
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
    if not isinstance(dataloader, DataLoader) or hasattr(dataloader.batch_sampler, 'has_only_copies'):
        return
    sampler = getattr(dataloader.batch_sampler, 'sampler', dataloader.sampler)
    if not isinstance(sampler, DistributedSampler) or not isinstance(dataloader.dataset, Sized):
        return
    _, batch_size = sampler_of(dataloader)  # None: the batches are not those of torch's BatchSampler
    if has_torchs_order(sampler) and batch_size is not None:
        return
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


def first_batch_of(dataloader: Any) -> int:
    """Returns the index in the epoch, from 0, of the first batch that a loader yields.

    It is above 0 only if a :class:`.RegroupingBatchSampler` resumes an epoch. At the end of the epoch it is 0 again.
    """
    batch_sampler: Any = getattr(dataloader, 'batch_sampler', None)
    # Not with isinstance(), because the module of the class imports this one.
    is_regrouping = hasattr(batch_sampler, 'has_only_copies')
    return batch_sampler.first_batch if is_regrouping else 0
